"""The round group: peers that stop at any moment, lying leaders and judges, and a swarm cut in two.

Measured in a swarm on simnet, all validators: rounds of which honest nodes have different states, and the slowest
round beside the usual one; what else must be true is said by each adversary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import trio
from adversaries import rounds as adversaries
from adversaries.rounds import Stopped
from harness import Outcome
from openswarm import NODES, UNDEFENDED_PATIENCE, Scene, in_swarm
from roundadversary import RoundAdversary


@dataclass(frozen=True)
class Damage:
    """What one attack did to the honest nodes."""

    split: int  # rounds of which they have different states
    usual: float  # seconds of a round
    slowest: float
    slower: float  # of the usual, that is allowed
    broken: tuple[str, ...]  # other promises
    achieved: str  # what else there is to say
    ended: bool  # whether the rounds did, in the time that they had
    after: int  # rounds that ended from the attack on

    def __str__(self) -> str:
        slowest = f"slowest round × {self.slowest / self.usual:.1f}"
        told = [self.achieved] if self.achieved else []
        if not self.ended and not self.split:
            return f"{self.after} rounds ended in {UNDEFENDED_PATIENCE:.0f} s"
        return ", ".join([*told, f"{self.split} rounds split", slowest])

    def failures(self) -> tuple[str, ...]:
        found = [*self.broken, *([] if self.ended else ["its rounds do not end"])]
        if self.split:
            found.append(f"honest nodes have different states of {self.split} rounds")
        if self.slowest > self.slower * self.usual:
            found.append(f"a round took {self.slowest:.1f} s, usually {self.usual:.1f} s")
        return tuple(found)


async def _attacked(scene: Scene, adversary: RoundAdversary, *, heals: bool = True) -> Damage:
    """`heals`: whether rounds that may be split for a while are not counted."""
    usual, ended = scene.usual(), True
    try:
        await adversary.attack(scene)
    except trio.TooSlowError:
        ended = False
    slowest, split = scene.slowest(adversary.first), scene.split(adversary.first + heals * adversary.healing)
    broken = tuple(await adversary.broken(scene)) if ended else ()
    after = max(0, scene.round + 1 - adversary.first)
    return Damage(len(split), usual, slowest, adversary.slower, broken, await adversary.achieved(scene), ended, after)


def damage(adversary: RoundAdversary, *, nodes: int = NODES) -> Damage:
    """Run one attack on so many nodes to its end."""
    return in_swarm(lambda scene: _attacked(scene, adversary), nodes=nodes)


def undefended(adversary: RoundAdversary) -> Damage:
    """The same on nodes that lack the defence against it."""

    async def body(scene: Scene) -> Damage:
        scene.patience = UNDEFENDED_PATIENCE
        with adversary.lacks.taken_out():
            return await _attacked(scene, adversary.undefended(), heals=False)

    return in_swarm(body)


async def outcomes(nodes: int = NODES) -> AsyncIterator[Outcome]:
    """Every attack on so many nodes in full; the stops of one kind share a line."""
    for how in ("kill", "freeze"):
        found, beside = [], []
        for adversary in adversaries.stops():
            if isinstance(adversary, Stopped) and adversary.how == how:
                found.append((adversary, await trio.to_thread.run_sync(partial(damage, adversary, nodes=nodes))))
                if nodes == NODES:
                    beside.append(await trio.to_thread.run_sync(undefended, adversary))
        yield _of_all(how, found, beside)
    for adversary in adversaries.everyone():
        harm = await trio.to_thread.run_sync(partial(damage, adversary, nodes=nodes))
        lost = await trio.to_thread.run_sync(undefended, adversary) if nodes == NODES else None
        shows = adversary.shows if lost is not None and not lost.failures() else ""
        yield Outcome("round", adversary.name, str(harm), adversary.lacks.beside(lost), harm.failures(), shows)


def _of_all(how: str, found: list[tuple[Stopped, Damage]], beside: list[Damage]) -> Outcome:
    slowest = max(harm.slowest / harm.usual for _, harm in found)
    split = sum(harm.split for _, harm in found)
    told = f"{len(found)} times: {split} rounds split, slowest round × {slowest:.1f}"
    failures = tuple(f"{one.name}: {line}" for one, harm in found for line in harm.failures())
    stuck = sum(not harm.ended for harm in beside)
    lost = f"{stuck} of {len(beside)} times no further round ended in {UNDEFENDED_PATIENCE:.0f} s" if beside else None
    name = f"{how} of one peer, the leader or another, before each statement"
    return Outcome("round", name, told, Stopped.lacks.beside(lost), failures)
