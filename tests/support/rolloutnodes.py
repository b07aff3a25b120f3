"""Nodes that share rollouts on simnet, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import trio
from simnodes import RUN, SimNode, now, start_all

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.rollouts.messages import SignedGroup
from swarmnode.protocols.methods.rollouts.pool import RolloutLimits
from swarmnode.protocols.methods.rollouts.sharing import Rollouts
from swarmnode.protocols.peers.scoring import PeerScoring, ScoringLimits
from swarmnode.protocols.runner import inline
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import TaskRef


def group(
    seed: int,
    *,
    answers: int = 8,
    tokens: int = 6,
    version: int = 0,
    logprobs: bool = False,
    task: str = "digits/swap",
) -> RolloutGroup:
    """Answers that look like those to a digit task."""
    rng = random.Random(seed)
    return RolloutGroup(
        TaskRef(task, 5, seed),
        tuple(tuple(rng.randrange(12) for _ in range(tokens)) for _ in range(answers)),
        version,
        "cd" * 32,
        "characters-0123456789abcdef",
        tuple(tuple(-rng.expovariate(1.0) for _ in range(tokens)) for _ in range(answers)) if logprobs else None,
    )


async def all_teach(groups: Sequence[SignedGroup]) -> list[dict[str, Any]]:
    """A trainer that finds something to learn in everything."""
    await trio.lowlevel.checkpoint()
    return [{"refused": "", "why": ""} for _ in groups]


@dataclass(frozen=True)
class Rules:
    """Implements `SharingRules`: groups are shared with everybody who is connected; `trainer` does as `score` says."""

    network: SimNetwork
    trust: Callable[[str], float]
    judge: Callable[[SignedGroup], str]
    trainer: Callable[[Sequence[SignedGroup]], Awaitable[list[dict[str, Any]]]] = all_teach

    def peers(self) -> list[str]:
        return [view.peer for view in self.network.peers()]

    def standing(self, author: str) -> float:
        return self.trust(author)

    def check(self, group: SignedGroup) -> str:
        return self.judge(group)

    async def score(self, groups: Sequence[SignedGroup], *, texts: bool = False) -> list[dict[str, Any]]:
        return await self.trainer(groups)

    def insert_sampled(self, group: SignedGroup) -> str:
        return "for-another"


@dataclass
class RolloutNode(SimNode):
    """One with what shares rollouts."""

    rollouts: Rollouts

    @classmethod
    def make(
        cls,
        network: SimNetwork,
        *,
        limits: RolloutLimits | None = None,
        admits: Callable[[str], bool] = lambda peer: True,
        standing: Callable[[str], float] = lambda author: 1.0,
        check: Callable[[SignedGroup], str] = lambda group: "",
        verify: Callable[[str, bytes, bytes], bool] | None = None,
        trainer: Callable[[Sequence[SignedGroup]], Awaitable[list[dict[str, Any]]]] = all_teach,
        clock: Callable[[], int] = now,
        seed: int = 0,
    ) -> RolloutNode:
        rpc = Rpc(network)
        parts = SimpleNamespace(
            me=network.me,
            run_id=RUN,
            rpc=rpc,
            network=SimpleNamespace(sign=network.sign, verify=verify or network.verify),
            runner=inline,
            now=clock,
            rng=random.Random(f"{seed} {network.me}"),
            admits=admits,
        )
        rollouts = Rollouts(
            cast(Context, parts), Rules(network, standing, check, trainer), limits=limits or RolloutLimits()
        )
        scoring = PeerScoring(ScoringLimits())
        scoring.watch(rollouts.violations, rpc.violations)
        return cls(network, rpc, (rpc.run, rollouts.watch), scoring, rollouts)


async def start(nursery: trio.Nursery, world: SimWorld, count: int, **options: Any) -> list[RolloutNode]:
    """`count` running nodes that nobody has connected."""
    nodes = [RolloutNode.make(world.node(f"node {number}"), **options) for number in range(count)]
    await start_all(nursery, nodes)
    return nodes


def everybody(nodes: list[RolloutNode]) -> list[tuple[RolloutNode, RolloutNode]]:
    """Each pair once."""
    return [(one, other) for number, one in enumerate(nodes) for other in nodes[:number]]


def ring_and_chords(nodes: list[RolloutNode], degree: int, rng: random.Random) -> list[tuple[RolloutNode, RolloutNode]]:
    """A connected graph in which each node has about `degree` neighbours."""
    pairs = [(node, nodes[number - 1]) for number, node in enumerate(nodes)]
    for node in nodes:
        pairs += [(node, other) for other in rng.sample(nodes, degree // 2 - 1) if other is not node]
    return pairs
