"""What the defences cost where nobody attacks, as JSON lines.

    python bench/defences.py learning [--seeds 3]      # the final loss, and the CPU time of all nodes together
    python bench/defences.py growth [--simulate 8]     # what verification takes of a node, as the swarm grows

`learning`, in one process, defences on and off with the same seeds and data: sixteen peers on clusters (IID, and
classes drawn by Dirichlet(0.3); tests/attacks/clusters.py), by the plain mean, by the rules of the open chain, and by
the CenteredClip of `btard`; then eight workers with a small byte-lm, whose contributions are applied as they are, or
judged by every worker, gated and clipped as in an open round. `loss_ratio` is defended / undefended, mean over seeds.

`growth` measures the CPU seconds of an inner step and of one judged evaluation with the model of examples/byte-lm.toml,
and multiplies by what the chain's rules have a node judge: all contributions of a round if it is a judge, and the
shared state now and before. `--simulate N` counts evaluations in real sessions of N nodes on simnet, to check that.
Shares are of the node's whole compute: of one that judges in every round, and the mean over all nodes.

Times are CPU times of this process, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "attacks")]

SIZES = (4, 8, 16, 32, 64, 128, 256)  # nodes
CLUSTER_ROUNDS = 40
LM_STEPS, LM_INTERVAL = 480, 80  # as examples/byte-lm.toml has its rounds
TIMED = 30  # steps, and evaluations
BATCHES = (4, 32)  # sequences in an inner step: the example's, and that of a node with an accelerator
LONG_ROUND = 500  # inner steps, as in the DiLoCo paper


def on_clusters(seeds: int) -> Iterator[dict[str, Any]]:
    """The three rules on the task of the gradient attacks."""
    from clusters import PEERS, Task
    from openrounds import Lie, OpenSwarm, undefended

    from swarmnode.training.btard import clipped_centre

    def by_clip(task: Task) -> np.ndarray:
        phi, shares = task.start(), [np.float32(1 / PEERS)] * PEERS
        for number in range(CLUSTER_ROUNDS):
            phi = phi - clipped_centre(task.train(phi, round=number), shares)[0]
        return phi

    rules: dict[str, Callable[[Task], np.ndarray]] = {
        "plain mean": lambda task: undefended(task, Lie(), 0, CLUSTER_ROUNDS),
        "open": lambda task: OpenSwarm(task, Lie(), 0, codec_name="fp32").run(CLUSTER_ROUNDS).phi,
        "btard": by_clip,
    }
    for name, alpha in (("IID", None), ("Dirichlet(0.3)", 0.3)):
        losses: dict[str, list[float]] = {rule: [] for rule in rules}
        for seed in range(seeds):
            for rule, run in rules.items():
                task = Task(seed=seed, alpha=alpha)
                phi = run(task)
                losses[rule].append(float(task.losses(phi[None], seed=0, samples=4000)[0]))
        for rule in ("open", "btard"):
            pairs = zip(losses[rule], losses["plain mean"], strict=True)
            yield {
                "bench": "defences",
                "task": f"clusters, {name}",
                "defences": rule,
                "seeds": seeds,
                "loss": round(fmean(losses[rule]), 4),
                "undefended": round(fmean(losses["plain mean"]), 4),
                "loss_ratio": round(fmean(on / off for on, off in pairs), 4),
            }


def on_text(seeds: int) -> Iterator[dict[str, Any]]:
    """A small byte-lm by sparse contributions, judged and clipped or applied as they are."""
    from learned import methods
    from learned.workers import Size, Workers

    from swarmnode.training.runsections import ModelSection

    class Undefended(methods.Open):
        """Everything counts in full."""

        def _gains(self, round: int, raws: list[memoryview]) -> np.ndarray:
            return np.ones((1, len(raws)))

    arm = methods.Arm("open", steps=LM_STEPS, lr=3e-3, interval=LM_INTERVAL, codec="topk", decay=0.95, judged=0.125)
    size = Size(model=ModelSection(layers=2, heads=2, width=64, context=64))
    methods.JUDGES = size.workers  # every elector judges, as up to 32 do
    usual_clip = methods.clip_units
    losses: dict[str, list[float]] = {"on": [], "off": []}
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for seed in range(1, seeds + 1):
        workers = Workers(size, seed)
        for name, method in (("off", Undefended), ("on", methods.Open)):
            methods.METHODS["open"] = method
            methods.clip_units = usual_clip if name == "on" else lambda norms: usual_clip([1.0] * len(norms))
            began = time.process_time()
            found = methods.train(
                arm, workers, start=workers.initial, stream="defences", every=LM_STEPS, say=lambda steps, loss: None
            )
            seconds[name].append(time.process_time() - began)
            losses[name].append(found.curve[-1][1])
        workers.close()
    pairs = list(zip(losses["on"], losses["off"], strict=True))
    yield {
        "bench": "defences",
        "task": f"byte-lm of {workers.parameters} parameters, {LM_STEPS} steps, H = {LM_INTERVAL}, topk",
        "defences": "open",
        "seeds": seeds,
        "loss": round(fmean(losses["on"]), 4),
        "undefended": round(fmean(losses["off"]), 4),
        "loss_ratio": round(fmean(on / off for on, off in pairs), 4),
        "cpu_seconds": round(fmean(seconds["on"]), 1),
        "cpu_seconds_undefended": round(fmean(seconds["off"]), 1),
        "cpu_ratio": round(sum(seconds["on"]) / sum(seconds["off"]), 3),
    }


def costs() -> dict[str, float]:
    """CPU seconds of an inner step, by its batch, and of one judged evaluation, with the example's model."""
    import torch

    from swarmnode.training.inner import InnerLoop, flatten_into, layout_of
    from swarmnode.training.runspec import load_runspec
    from swarmnode.training.tasks import Assignment
    from swarmnode.training.tasks.byte_lm import ByteLM

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    found: dict[str, float] = {}
    for batch in BATCHES:
        spec = load_runspec(ROOT / "examples" / "byte-lm.toml")
        spec = replace(spec, inner=replace(spec.inner, batch=batch))
        task = ByteLM(spec, Assignment("ab" * 32, "bench"))
        vector = torch.empty(layout_of(task.model).parameters)
        flatten_into(task.model, vector, keep=False)
        loop = InnerLoop(spec, task, peer_id="bench", vector=vector, keep=True)
        loop.train(round=0, steps=3, seconds=float("inf"), between=lambda: False)
        steps = TIMED if batch == BATCHES[0] else TIMED // 5
        began = time.process_time()
        loop.train(round=1, steps=steps, seconds=float("inf"), between=lambda: False)
        found[f"step_{batch}"] = (time.process_time() - began) / steps
    task.evaluate(thorough=False, seed=0)
    began = time.process_time()
    for seed in range(TIMED):
        task.evaluate(thorough=False, seed=seed)
    found["evaluation"] = (time.process_time() - began) / TIMED
    return found


def judged(nodes: int) -> tuple[int, int]:
    """Judges of a round, and evaluations of each, where all contribute and all are electors who may be."""
    from swarmnode.protocols.chain.chainstate import ChainRules, genesis
    from swarmnode.protocols.chain.electorate import ELECTORS_SHARE, judges

    rules = ChainRules()
    contributions = min(nodes, rules.participants)
    electors = min(nodes, max(4, rules.participants * ELECTORS_SHARE // 1_000_000))
    chain = genesis("ab" * 32, tuple(f"peer-{number:03d}" for number in range(electors)), window=60_000)
    return len(judges(chain, rules)), contributions + 2  # beside them the state now, and before the last roster


def growth() -> Iterator[dict[str, Any]]:
    """Verification's share of a node's compute."""
    cost = costs()
    yield {"bench": "defences", "cpu_seconds": {name: round(seconds, 5) for name, seconds in cost.items()}}
    for nodes in SIZES:
        count, evaluations = judged(nodes)
        line: dict[str, Any] = {"nodes": nodes, "judges": count, "evaluations_of_a_judge": evaluations}
        spent = evaluations * cost["evaluation"]
        for name, steps, batch in (
            ("example: 80 steps of 4", 80, 4),
            ("500 steps of 4", LONG_ROUND, 4),
            ("500 steps of 32", LONG_ROUND, 32),
        ):
            trained = steps * cost[f"step_{batch}"]
            mean = spent * count / nodes
            line[name] = {
                "judge": round(spent / (spent + trained), 4),
                "mean": round(mean / (mean + trained), 4),
            }
        yield {"bench": "defences", **line}


def simulated(nodes: int, rounds: int = 8) -> dict[str, Any]:
    """Evaluations of the average node in a round of real sessions on simnet, all of them electors."""
    import trio
    from simswarm import SimSwarm

    from swarmnode.node.simnet import run_simulation
    from swarmnode.node.toytrainer import SimTrainer

    counted = [0]
    usual = SimTrainer.evaluate

    async def counting(self: Any, *, thorough: bool, seed: int | None = None, wait: bool = True) -> float:
        counted[0] += seed is not None
        return await usual(self, thorough=thorough, seed=seed, wait=wait)

    async def body() -> None:
        names = tuple(f"{number:03d}" if number else "a" for number in range(nodes))
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, method="open", electors=names, seconds_per_step=2.0)
            await swarm.start(names[0], wait_peers=nodes - 1)
            for name in names[1:]:
                await swarm.start(name, join=names[0])
            await swarm.round_done(1, *names)
            before = counted[0]
            await swarm.round_done(1 + rounds, *names)
            counted[0] -= before
            nursery.cancel_scope.cancel()

    SimTrainer.evaluate = counting  # type: ignore[method-assign]
    run_simulation(body)
    return {
        "bench": "defences",
        "simulated_nodes": nodes,
        "evaluations_of_a_node_in_a_round": round(counted[0] / nodes / rounds, 2),
        "by_the_rules": judged(nodes)[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what the defences cost where nobody attacks")
    parser.add_argument("what", choices=("learning", "growth"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="count in a simulated swarm of N nodes")
    options = parser.parse_args()
    lines: list[Iterator[dict[str, Any]]] = []
    if options.what == "learning":
        lines = [on_clusters(options.seeds), on_text(options.seeds)]
    elif options.simulate:
        lines = [iter([simulated(options.simulate)])]
    else:
        lines = [growth()]
    for source in lines:
        for line in source:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
