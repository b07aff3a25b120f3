"""Whether policies learn as well from what others sample for them as from what they sample themselves; JSON lines.

    python bench/samplers.py [--updates 100] [--seeds 1 2 3] [--arms colocated samplers cheated late] [--policy hf]

Eight nodes on the simulated network, two that train and six that only sample (`--role rollout`), with the product's own
protocol and real tiny policies on nine digit tasks in base 3, which are learned in so many updates. Time is virtual:
sampling a batch takes `--sampling` seconds, an update `--update`, links have 50 ms and 20 Mbit/s. Nobody learns from
rollouts of policies other than its own (J = 0), so that arms differ in who samples only. With `--policy hf` the policy
is a Llama of two layers and width 128 by `transformers`, all of whose parameters are trained; it is made here with
random weights, taught the form of an answer as the other is, and asked in base 2, as it learns more slowly:

colocated   the two that train ask themselves as many questions for an update as three samplers ask
samplers    with the newest weights that there are when they begin a batch
cheated     the same, and one of the six samples with other weights, which it was left with
late        the same, and one of the six is started after LATE updates

Told for each arm and seed: the mean over all updates and both trainers of the expected reward on fresh questions after
the update ("reward per update"), and over the last tenth; how many updates old the groups were that were learned from;
groups a trainer learned from in an update; what of them was refused; and where one cheats, in how many of its trainer's
rounds it was caught and how many of its groups were learned from; where one is late, how many updates its trainer did
from its start until it sampled with weights no older than those of the others at that moment (`in_step`), and until the
trainer had learned from a group of it (`learned_from`). `cpu_seconds` is the bench's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from policytrainer import BATCH, InProcess
from sampling import make
from simswarm import SimSwarm

from swarmnode.protocols.methods.rollouts.sapo import ASKED_ITSELF, Sapo, SapoSampler
from swarmnode.testing.learners import start_from
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.training.rl.groups import Learned
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment

TRAINERS, SAMPLERS = "ab", "cdefgh"
CHEAT = LATECOMER = "h"
LATE = 20  # updates
TINY = "gpt:1x48"
HF_RATE = 3e-4  # learning rate of the Llama; at 1e-3, the default, it forgets within an update what it wrote before


def a_spec(arm: str, seed: int, policy: str = TINY) -> RunSpec:
    """The run that the nodes of an arm learn in."""
    tables = {"run": {"name": arm, "seed": seed}, "task": {"name": "digits-rl"}, "rollouts": rollouts_of(arm, policy)}
    return parse_runspec(tables if policy == TINY else tables | {"inner": {"lr": HF_RATE}}, source="bench")


def rollouts_of(arm: str, policy: str = TINY) -> dict[str, Any]:
    """[rollouts] of an arm's run."""
    each = BATCH * len(SAMPLERS) // len(TRAINERS) + ASKED_ITSELF  # groups of an update
    return {
        "batch": each if arm == "colocated" else BATCH,
        "external": 0,
        "difficulty": 3 if policy == TINY else 2,
        "adaptive": False,
        "policy": policy,
        "tokens": 8,
    }


def a_llama(folder: Path) -> str:
    """The policy of runs by a language model that is made in `folder`."""
    make(folder, layers=2, width=128, words=64, context=64)
    return f"hf-full:{folder}"


def run_arm(arm: str, seed: int, *, updates: int, sampling: float, update: float, policy: str = TINY) -> dict[str, Any]:
    """The line of one arm. All chance of the learning comes from `seed`."""
    began = time.process_time()
    spec = a_spec(arm, seed, policy)
    beginning = Trainee(spec, Assignment("", "beginning"))
    without = spec.updated(rollouts={"warm_up": 0})
    trainers: dict[str, InProcess] = {}

    def make(name: str, peer: str) -> InProcess:
        task = Trainee(without, Assignment("", peer))
        start_from(task.learner, beginning.learner)
        cheats = arm == "cheated" and name == CHEAT
        trainers[name] = InProcess(task, sampling=sampling, update=update, cheats=cheats)
        return trainers[name]

    told: dict[str, Any] = {"arm": arm, "policy": policy.partition(":")[0], "seed": seed, "updates": updates}

    async def main(nursery: trio.Nursery) -> None:
        world = SimWorld(latency=0.05, bandwidth=20e6 / 8)
        swarm = SimSwarm(
            nursery, world=world, method="sapo", trainer=make, rollouts=rollouts_of(arm, policy), seed=seed
        )
        late = LATECOMER if arm == "late" else ""
        for name in TRAINERS if arm == "colocated" else TRAINERS + SAMPLERS:
            if name != late:
                await swarm.start(name, join=None if name == "a" else "a", samples=name in SAMPLERS)
        if late:
            await swarm.until(lambda: all(len(trainers[name].learned) >= LATE for name in TRAINERS), within=1e5)
            told["late"] = await joined_late(swarm, trainers)
        await swarm.until(lambda: all(len(trainers[name].learned) >= updates for name in TRAINERS), within=1e5)
        told.update(what_came(swarm, {name: trainers[name].learned[:updates] for name in TRAINERS}))
        if arm == "cheated":
            told.update(caught(swarm))

    run_with_nursery(main)
    return {**told, "cpu_seconds": round(time.process_time() - began, 1)}


def what_came(swarm: SimSwarm, learned: dict[str, list[Learned]]) -> dict[str, Any]:
    """Rewards, ages and refusals."""
    both = [each for of_node in learned.values() for each in of_node]
    late = [each for of_node in learned.values() for each in of_node[-max(1, len(of_node) // 10) :]]
    events = [
        event["learned"]
        for name in learned
        for event in swarm.nodes[name].rounds.values()
        if event["learned"]["sampled"]
    ]
    refused: Counter[str] = Counter()
    came = accepted = 0
    for name in learned:
        method = swarm.nodes[name].method
        assert isinstance(method, Sapo)
        for tally in method.samplers.tallies():
            refused.update(tally.refused)
            came, accepted = came + tally.came, accepted + tally.accepted
    return {
        "reward_per_update": round(fmean(each.heldout for each in both), 4),
        "reward_at_the_end": round(fmean(each.heldout for each in late), 4),
        "staleness_mean": round(fmean(event["staleness"] for event in events), 2) if events else 0.0,
        "staleness_worst_update": max((event["staleness"] for event in events), default=0.0),
        "informative_per_update": round(fmean(each.informative + each.sampled for each in both), 2),
        "came": came,
        "accepted": accepted,
        "refused": dict(refused),
        "seconds_per_update": round(fmean(e["seconds"] for n in learned for e in swarm.nodes[n].rounds.values()), 2),
    }


async def joined_late(swarm: SimSwarm, trainers: dict[str, InProcess]) -> dict[str, Any]:
    """The latecomer is started; how many updates its trainer did until it was in step."""
    before, began = {name: len(trainers[name].learned) for name in TRAINERS}, trio.current_time()
    await swarm.start(LATECOMER, join="a", samples=True)
    method, told = swarm.nodes[LATECOMER].method, {}
    assert isinstance(method, SapoSampler)

    def trainer() -> str:
        return next(name for name in TRAINERS if swarm.peer(name) == method.trainer)

    def others() -> list[int]:
        held = [swarm.nodes[name].method for name in SAMPLERS if name != LATECOMER]
        return [
            each.weights.version
            for each in held
            if isinstance(each, SapoSampler) and each.weights is not None and each.trainer == method.trainer
        ]

    def in_step() -> bool:
        return method.weights is not None and method.weights.version >= max(others(), default=0)

    def accepted() -> bool:
        found = swarm.nodes[trainer()].method
        assert isinstance(found, Sapo)
        return found.samplers.tally(swarm.peer(LATECOMER)).accepted > 0

    for what, reached in (("in_step", in_step), ("learned_from", accepted)):
        await swarm.until(reached, within=1e3)
        told[what] = len(trainers[trainer()].learned) - before[trainer()]
        told[f"{what}_seconds"] = round(trio.current_time() - began, 1)
    return told


def caught(swarm: SimSwarm) -> dict[str, Any]:
    """When the one that cheats was found out by the trainer that it sampled for first."""
    cheat = swarm.peer(CHEAT)
    found = []
    for name in TRAINERS:
        method, rounds = swarm.nodes[name].method, swarm.nodes[name].rounds
        assert isinstance(method, Sapo)
        tally = method.samplers.tally(cheat)
        looked = [number for number, event in rounds.items() if cheat in event["learned"]["checked"]]
        lied = [number for number, event in rounds.items() if cheat in event["learned"]["caught"]]
        if tally.came:
            found.append(
                {"trainer": name, "rounds": lied[0] - looked[0] + 1 if lied else None, "learned_from": tally.accepted}
            )
    method = swarm.nodes[CHEAT].method
    assert isinstance(method, SapoSampler)
    return {"cheat": found, "cheat_samples_on": method.trainer is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="of each trainer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=["colocated", "samplers", "cheated"])
    parser.add_argument("--policy", choices=("gpt", "hf"), default="gpt")
    parser.add_argument("--sampling", type=float, default=0.5, help="virtual seconds of a batch of 8 groups")
    parser.add_argument("--update", type=float, default=0.2, help="virtual seconds of an update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    times = {"updates": options.updates, "sampling": options.sampling, "update": options.update}
    with tempfile.TemporaryDirectory() as folder:
        policy = a_llama(Path(folder)) if options.policy == "hf" else TINY
        for seed in options.seeds:
            for arm in options.arms:
                print(json.dumps(run_arm(arm, seed, **times, policy=policy)), flush=True)


if __name__ == "__main__":
    main()
