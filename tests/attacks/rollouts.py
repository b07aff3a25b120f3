"""The rollout group: what liars publish among nodes that learn from one another's answers, and who floods.

Measured beside a run without liars: the share of liars' groups of which nothing was learned, the share of honest
answers that the defences refused, how many honest answers carry what the liars wanted, and how long they are.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import cache

import rolloutflood
import rolloutproofs
import trio
from adversaries import rollouts as adversaries
from adversaries import samplers
from adversaries.rollouts import RolloutLie
from harness import Outcome
from rolloutswarm import FULL, Course, Size, run

REJECTED = 0.99  # of liars' groups, at least
HONEST_LOST = 0.01  # of honest answers, at most
CARRIED = 0.02  # of honest answers beyond those of a run without liars
LONGER = 1.1  # than in a run without liars


@dataclass(frozen=True)
class Damage:
    """What a lie did to nodes that defend themselves, and to those that do not."""

    lie: RolloutLie
    clean: Course
    course: Course
    undefended: Course

    def __str__(self) -> str:
        kept = f"{self.course.rejected:.1%} rejected, {self.course.honest_lost:.1%} of honest"
        return f"{kept}; {self.told(self.course)}; {self.lie.arrived_at(self.clean.texts):.0%} without liars"

    def told(self, course: Course) -> str:
        carried = f"{self.lie.arrived_at(course.texts):.0%} of honest answers carry it"
        return f"{carried}, length × {course.length / self.clean.length:.2f}"

    def failures(self) -> tuple[str, ...]:
        broken, course = [], self.course
        if not course.rejected >= REJECTED:
            broken.append(f"{course.rejected:.1%} rejected, at least {REJECTED:.0%} promised")
        if course.honest_lost > HONEST_LOST:
            broken.append(f"{course.honest_lost:.1%} of honest answers refused, at most {HONEST_LOST:.0%} promised")
        more = self.lie.arrived_at(course.texts) - self.lie.arrived_at(self.clean.texts)
        if more > CARRIED:
            broken.append(f"{more:.1%} more honest answers carry it, at most {CARRIED:.0%} promised")
        if course.length > LONGER * self.clean.length:
            broken.append(f"{course.length / self.clean.length:.2f} times as long, at most {LONGER} promised")
        return tuple(broken)


@cache
def clean(size: Size) -> Course:
    """The honest nodes of such a swarm among themselves."""
    return run(None, replace(size, nodes=size.nodes - size.liars))


def damage(lie: RolloutLie, size: Size = FULL) -> Damage:
    size = replace(size, worked=lie.worked)
    return Damage(lie, clean(size), run(lie, size), run(lie, size, defended=False))


async def outcomes() -> AsyncIterator[Outcome]:
    """Every attack of the group in full."""
    logging.getLogger("swarmnode").setLevel(logging.ERROR)
    for lie in adversaries.everyone():
        yield await trio.to_thread.run_sync(_of_all_seeds, lie)
    for one in samplers.everyone():
        proved = await trio.to_thread.run_sync(rolloutproofs.damage, one)
        naive = f"{proved.naive:.0%} learned from"
        yield Outcome("rollout", f"samplers: {one.name}", str(proved), naive, proved.failures())
    for flood in adversaries.floods():
        kept, lost = await trio.to_thread.run_sync(_both, flood)
        yield Outcome("rollout", flood.name, str(kept), str(lost), kept.failures())


def _of_all_seeds(lie: RolloutLie) -> Outcome:
    """The line of one attack; what it came to with several seeds stands behind one another."""
    found = [damage(lie, replace(FULL, seed=seed, warm_up=lie.warm_up)) for seed in lie.seeds]
    seeds = [f"seed {seed}: " if len(found) > 1 else "" for seed in lie.seeds]
    defended, undefended = (
        "; ".join(seed + told for seed, told in zip(seeds, of_node, strict=True))
        for of_node in ([str(one) for one in found], [one.told(one.undefended) for one in found])
    )
    failures = [seed + broken for seed, one in zip(seeds, found, strict=True) for broken in one.failures()]
    return Outcome("rollout", lie.name, defended, undefended, tuple(failures))


def _both(flood: adversaries.Flood) -> tuple[rolloutflood.Damage, rolloutflood.Damage]:
    return rolloutflood.damage(flood), rolloutflood.damage(flood, defended=False)
