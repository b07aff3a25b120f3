"""The offers group, gradients on the network: a changed node offers through the real protocol what it should not.

Measured in a swarm on simnet: rounds of which honest nodes have different states, what the rosters say of the liar's
and of the copied node's commits, and the slowest round beside the usual one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import trio
from adversaries import offers as adversaries
from adversaries.offers import LIAR, OfferAdversary, RevealedToSome
from harness import Outcome
from openswarm import NODES, UNDEFENDED_PATIENCE, WARM, Scene, in_swarm

from swarmnode.protocols.chain.statements import VERDICTS

ACCEPTED = VERDICTS[0]
SLOWER = 2.0  # of the usual round


@dataclass(frozen=True)
class Damage:
    """What one node's offers did to the others."""

    split: int  # rounds of which honest nodes have different states
    verdicts: Counter[str]  # of rosters, on the liar's commits
    victim: Counter[str]  # on those of the node that it copied
    usual: float  # seconds of a round
    slowest: float
    permitted: bool  # whether the liar's work is in order, and may count
    moved: tuple[int, int]  # rounds in which the parameters did, and all
    ended: bool = True  # whether the rounds did, in the time that they had

    def __str__(self) -> str:
        if not self.ended:
            return f"{self.moved[0]} rounds with a result in {UNDEFENDED_PATIENCE:.0f} s"
        told = f"{self.verdicts[ACCEPTED]} of {sum(self.verdicts.values())} accepted"
        if self.victim:
            told += f", of the copied {self.victim[ACCEPTED]} of {sum(self.victim.values())}"
        if self.moved[0] < self.moved[1]:
            told += f", parameters moved in {self.moved[0]} of {self.moved[1]} rounds"
        return f"{told}, {self.split} rounds split, slowest round × {self.slowest / self.usual:.1f}"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if not self.ended:
            broken.append("its rounds do not end")
        if self.split:
            broken.append(f"honest nodes have different states of {self.split} rounds")
        if self.verdicts[ACCEPTED] and not self.permitted:
            broken.append(f"{self.verdicts[ACCEPTED]} of the liar's contributions were accepted")
        if self.victim and self.victim[ACCEPTED] < sum(self.victim.values()) - 1:
            broken.append(f"what was copied was refused: {dict(self.victim)}")
        if self.slowest > SLOWER * self.usual:
            broken.append(f"a round took {self.slowest:.1f} s, usually {self.usual:.1f} s")
        return tuple(broken)


async def _attacked(scene: Scene, adversary: OfferAdversary) -> Damage:
    first = scene.round + 2  # in the round under way the liar may have committed honestly
    usual = scene.usual()
    ended = True
    try:
        await adversary.attack(scene)
    except trio.TooSlowError:
        ended = False
    copied = Counter(scene.verdicts(adversary.copied, first)) if adversary.copied else Counter[str]()
    verdicts = Counter(scene.verdicts(LIAR, first))
    permitted = isinstance(adversary, RevealedToSome)
    slowest, moved = scene.slowest(WARM), scene.moved(first)
    return Damage(len(scene.split()), verdicts, copied, usual, slowest, permitted, moved, ended)


def damage(adversary: OfferAdversary, *, nodes: int = NODES) -> Damage:
    """Run one attack to its end, by one of so many nodes."""
    return in_swarm(lambda scene: _attacked(scene, adversary), nodes=nodes)


def undefended(adversary: OfferAdversary) -> Damage:
    """The same on nodes that lack the defence against it."""

    async def body(scene: Scene) -> Damage:
        scene.patience = UNDEFENDED_PATIENCE
        with adversary.lacks.taken_out():
            return await _attacked(scene, adversary.undefended())

    return in_swarm(body)


async def outcomes(nodes: int = NODES) -> AsyncIterator[Outcome]:
    """Every attack in full, by one of so many nodes."""
    for adversary in adversaries.everyone():
        found = await trio.to_thread.run_sync(partial(damage, adversary, nodes=nodes))
        beside = await trio.to_thread.run_sync(undefended, adversary) if nodes == NODES else None
        shows = adversary.shows if beside is not None and not beside.failures() else ""
        yield Outcome("offers", adversary.name, str(found), adversary.lacks.beside(beside), found.failures(), shows)
