"""The same arms over the product's own protocol: eight nodes of the simulated network, or eight daemons on loopback.

outcome = over_simnet(Arm("4/4", own=4, external=4), seed=1, say=print)
outcome = over_processes(Arm("4/4 tapered", own=4, external=4, correction="taper"), seed=1, say=print)

On the simulated network, nodes have real sessions, membership and sharing (protocols/methods/rollouts/sapo.py), and
this process trains all eight policies; a round takes one virtual second, links have 50 ms. Daemons are what `swarmnode
local` starts, with a trainer process each, and learn as the product does: tapered, behind the gate. A node's first
`rounds` rounds count, whatever others have reached. There is no unfiltered arm here: groups that teach nothing do not
travel.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import trio

from sapo_swarm.swarm import NODES, TEXT, Arm, Outcome, curve_of, reward_by_task, settings_of
from swarmnode.cli.local.swarm import LocalOptions, LocalSwarm
from swarmnode.node.control.client import ControlClient
from swarmnode.testing.learners import start_from
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import parse_runspec, to_toml
from swarmnode.training.tasks import Assignment

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from policytrainer import InProcess
from simswarm import SimSwarm

Say = Callable[[int, float], None]
Update = Mapping[str, Any]  # what a node's `round` event says of it: the fields of `rl.groups.Learned`

NAMES = "abcdefgh"
PACE = 0.5  # seconds of a round at the least; eight daemons need about that long on two cores
SAMPLING, UPDATE = 0.2, 0.1  # virtual seconds of eight questions, and of an update
TICKS = os.sysconf("SC_CLK_TCK")
SHARE_SECONDS = "swarmnode_rollout_share_seconds_total"


def over_simnet(arm: Arm, seed: int, say: Say) -> Outcome:
    """`arm` on the simulated network. All chance comes from `seed`."""
    spec = parse_runspec(_tables(arm, seed), source="bench")
    beginning = Trainee(spec, Assignment("", "beginning"))
    without = spec.updated(rollouts={"warm_up": 0})
    tasks: dict[str, Trainee] = {}
    updates: dict[str, list[Update]] = {}

    def make(name: str, peer: str) -> InProcess:
        tasks[name] = task = Trainee(without, Assignment("", peer))
        start_from(task.learner, beginning.learner)
        task.learner.settings = settings_of(arm)
        task.learner.split = task.learner.settings.split
        return InProcess(task, sampling=SAMPLING, update=UPDATE)

    async def main(nursery: trio.Nursery) -> None:
        rollouts = _tables(arm, seed)["rollouts"]
        swarm = SimSwarm(
            nursery, world=SimWorld(latency=0.05), method="sapo", trainer=make, rollouts=rollouts, seed=seed
        )
        for name in NAMES:
            await swarm.start(name, join=None if name == "a" else "a")
        for round in range(arm.rounds):
            await swarm.round_done(round, *NAMES)
            for name in NAMES:
                updates.setdefault(name, []).append(swarm.nodes[name].rounds[round]["learned"])
            say(round + 1, sum(each["reward"] for of_node in updates.values() for each in of_node))

    run_with_nursery(main)
    heldout = fmean(task.learner.heldout(512, seed=seed) for task in tasks.values())
    return _outcome(list(updates.values()), heldout)


def over_processes(arm: Arm, seed: int, say: Say) -> tuple[Outcome, dict[str, float]]:
    """`arm` with eight daemons on loopback, and what sharing cost (`_Watch.costs`)."""
    updates: list[list[Update]] = [[] for _ in range(NODES)]
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / "run.toml"
        run_file.write_text(to_toml(parse_runspec(_tables(arm, seed), source="bench")), encoding="utf-8")
        with LocalSwarm(LocalOptions(NODES, arm.rounds), Path(folder)) as swarm:
            for _ in swarm.start():
                pass
            watch = _Watch([(node.data_dir, node.pid or 0) for node in swarm.nodes])
            for arrived in swarm.watch():
                if arrived is not None and arrived[1]["event"] == "round":
                    updates[swarm.nodes.index(arrived[0])].append(arrived[1]["learned"])
                    reached = min(map(len, updates))
                    if len(updates[swarm.nodes.index(arrived[0])]) == reached:
                        say(reached, sum(each["reward"] for of_node in updates for each in of_node))
            costs = watch.costs()
    heldout = fmean(of_node[-1]["heldout"] for of_node in updates)
    return _outcome(updates, heldout), costs


class _Watch:
    """What the processes of some nodes take from now on. Reads /proc, so Linux only."""

    def __init__(self, nodes: Sequence[tuple[Path, int]]) -> None:
        """`nodes`: data directories and daemons' process ids."""
        self._nodes = nodes
        self._began = time.monotonic()
        self._before = [(_sharing(folder), _cpu_of_node(pid)) for folder, pid in nodes]

    def costs(self) -> dict[str, float]:
        """Means over nodes: sharing's CPU time as a share of the time, and of all CPU time of daemon and trainer."""
        seconds = time.monotonic() - self._began
        now = [(_sharing(folder), _cpu_of_node(pid)) for folder, pid in self._nodes]
        sharing = [after[0] - before[0] for after, before in zip(now, self._before, strict=True)]
        cpu = [after[1] - before[1] for after, before in zip(now, self._before, strict=True)]
        return {
            "sharing_share": fmean(sharing) / seconds,
            "sharing_share_most": max(sharing) / seconds,
            "sharing_share_of_cpu": sum(sharing) / sum(cpu),
            "node_cpu_share": fmean(cpu) / seconds,
            "wall_seconds": seconds,
        }


def _sharing(folder: Path) -> float:
    families = ControlClient(folder).call("metrics")["metrics"]
    (family,) = [each for each in families if each["name"] == SHARE_SECONDS]
    return float(family["samples"][0]["value"])


def _cpu_of_node(pid: int) -> float:
    """User and system seconds of a daemon and its children (proc(5), fields 4, 14 and 15 of stat)."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:
            continue  # it ended meanwhile
        fields = text.rpartition(")")[2].split()
        if pid in (int(text.split()[0]), int(fields[1])):
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def _tables(arm: Arm, seed: int) -> dict[str, Any]:
    """The run file of an arm."""
    rollouts: dict[str, Any] = {
        "task": arm.task,
        "policy": "gpt:1x48",
        "batch": arm.own + arm.external,
        "external": arm.external,
        "adaptive": arm.adaptive,
        "warm_up": arm.warm_up,
        "correction": arm.correction,
        "curriculum": arm.curriculum,
        "pace": PACE,
    }
    if arm.task != "digits":
        rollouts |= {"tokens": arm.max_tokens, "context": TEXT.context}
    return {
        "run": {"name": "bench", "seed": seed},
        "task": {"name": "rollouts"},
        "inner": {"lr": arm.learning_rate},
        "rollouts": rollouts,
    }


def _outcome(updates: Sequence[Sequence[Update]], heldout: float) -> Outcome:
    every = [update for of_node in updates for update in of_node]
    refused: Counter[str] = Counter()
    for update in every:
        refused.update(update["refused"])
    rewards = [[update["reward"] for update in of_node] for of_node in updates]
    return Outcome(
        reward=sum(map(sum, rewards)),
        per_node=tuple(map(sum, rewards)),
        curve=curve_of(rewards, [[update["tokens"] for update in of_node] for of_node in updates]),
        informative=fmean(update["informative"] for update in every),
        taken=fmean(update["taken"] for update in every),
        external=fmean(update["external"] for update in every),
        heldout=heldout,
        refused=dict(refused),
        by_task=reward_by_task([[update["by_task"] for update in of_node] for of_node in updates]),
    )
