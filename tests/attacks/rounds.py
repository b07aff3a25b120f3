"""The round group: peers that stop at any moment, lying leaders and judges, and a swarm cut in two.

Measured in a swarm on simnet, all electors: rounds of which honest nodes have different states, and the slowest
round beside the usual one; what else must be true is said by each adversary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import trio
from adversaries import rounds as adversaries
from adversaries.rounds import RoundAdversary, Stopped
from harness import Outcome
from openswarm import NODES, Scene, with_swarm

from swarmnode.node.simnet import run_simulation


@dataclass(frozen=True)
class Damage:
    """What one attack did to the honest nodes."""

    split: int  # rounds of which they have different states
    usual: float  # seconds of a round
    slowest: float
    slower: float  # of the usual, that is allowed
    broken: tuple[str, ...]  # other promises

    def __str__(self) -> str:
        return f"{self.split} rounds split, slowest round × {self.slowest / self.usual:.1f}"

    def failures(self) -> tuple[str, ...]:
        found = list(self.broken)
        if self.split:
            found.append(f"honest nodes have different states of {self.split} rounds")
        if self.slowest > self.slower * self.usual:
            found.append(f"a round took {self.slowest:.1f} s, usually {self.usual:.1f} s")
        return tuple(found)


def damage(adversary: RoundAdversary, *, nodes: int = NODES) -> Damage:
    """Run one attack on so many nodes to its end."""

    async def body(scene: Scene) -> Damage:
        usual = scene.usual()
        try:
            await adversary.attack(scene)
        except trio.TooSlowError:
            return Damage(len(scene.split()), usual, scene.slowest(adversary.first), adversary.slower, ("no end",))
        slowest, split = scene.slowest(adversary.first), scene.split(adversary.first + adversary.healing)
        broken = tuple(await adversary.broken(scene))
        return Damage(len(split), usual, slowest, adversary.slower, broken)

    found = run_simulation(lambda: with_swarm(body, nodes=nodes))
    assert isinstance(found, Damage)
    return found


async def outcomes(nodes: int = NODES) -> AsyncIterator[Outcome]:
    """Every attack on so many nodes in full; the stops of one kind share a line."""
    for how in ("kill", "freeze"):
        found = []
        for adversary in adversaries.stops():
            if isinstance(adversary, Stopped) and adversary.how == how:
                found.append((adversary, await trio.to_thread.run_sync(partial(damage, adversary, nodes=nodes))))
        yield _of_all(how, found)
    for adversary in adversaries.everyone():
        harm = await trio.to_thread.run_sync(partial(damage, adversary, nodes=nodes))
        yield Outcome("round", adversary.name, str(harm), "—", harm.failures())


def _of_all(how: str, found: list[tuple[Stopped, Damage]]) -> Outcome:
    slowest = max(harm.slowest / harm.usual for _, harm in found)
    split = sum(harm.split for _, harm in found)
    told = f"{len(found)} times: {split} rounds split, slowest round × {slowest:.1f}"
    failures = tuple(f"{one.name}: {line}" for one, harm in found for line in harm.failures())
    return Outcome("round", f"{how} of one peer, the leader or another, before each statement", told, "—", failures)
