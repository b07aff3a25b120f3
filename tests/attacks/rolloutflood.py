"""Who floods the pool of rollouts, on simnet in virtual time: twelve honest nodes, and one attacker.

Measured at the honest node where it is greatest: the attacker's share of the groups held, and of any one batch that is
drawn from them. The undefended nodes keep everything in a pool of the same size, the oldest goes first, and draw alike
from all of it: SAPO as published.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import trio
from adversaries.rollouts import Flood, Liar, sent
from rolloutnodes import RolloutNode, connect, everybody, start

from swarmnode.protocols.limits import Allowance
from swarmnode.protocols.methods.rollouts.intake import informative
from swarmnode.protocols.methods.rollouts.pool import PoolLimits, Rates, RolloutLimits
from swarmnode.testing.simnet import SimWorld, run_simulation
from swarmnode.training.rl.groups import RolloutGroup, score
from swarmnode.training.rl.grpo import BatchLimits, Split, choose

HONEST = 12
PUBLISHED = 4  # groups of an honest node in a round of 10 s
ROUNDS = 3
SPLIT = Split(4, 4)
BATCHES = 20  # drawn at each node
NEWCOMER = 0.25  # standing of the attacker's identities, where there is reputation
_ANY = Rates(groups=Allowance(1e6, 1e6), bytes=Allowance(1e9, 1e9))
NAIVE = RolloutLimits(copies=64, total=_ANY, author=_ANY, sender=_ANY, pool=PoolLimits(share=1.0, few=512))
DEFENDED = RolloutLimits()


@dataclass(frozen=True)
class Damage:
    """Shares of the attacker's identities together."""

    made: float  # of all groups that were published
    pool: float
    batch: float
    cap: float  # of a batch
    pool_cap: float  # of a pool

    def __str__(self) -> str:
        return f"{self.made:.0%} of what was published, {self.pool:.0%} of a pool, {self.batch:.0%} of a batch"

    def failures(self) -> tuple[str, ...]:
        found = {"a pool": (self.pool, self.pool_cap), "a batch": (self.batch, self.cap)}
        return tuple(
            f"{share:.0%} of {what}, at most {cap:.0%} are allowed"
            for what, (share, cap) in found.items()
            if share > cap
        )


def damage(flood: Flood, *, defended: bool = True, rounds: int = ROUNDS) -> Damage:
    """Flood for some rounds, then draw batches everywhere."""
    found: list[Damage] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            found.append(await _flooded(flood, nursery, defended, rounds))
            nursery.cancel_scope.cancel()

    run_simulation(main)
    return found[0]


async def _flooded(flood: Flood, nursery: trio.Nursery, defended: bool, rounds: int) -> Damage:
    world, rng = SimWorld(latency=0.05), np.random.default_rng(1)
    sybils: set[str] = set()

    def standing(author: str) -> float:
        return NEWCOMER if defended and flood.newcomers and author in sybils else 1.0

    limits = DEFENDED if defended else NAIVE
    same = {"verify": lambda *_: True, "check": informative if defended else lambda group: "", "standing": standing}
    honest = await start(nursery, world, HONEST, limits=limits, **same)
    attackers = [
        RolloutNode.make(world.node(f"attacker {number}"), limits=replace(NAIVE, copies=64), verify=lambda *_: True)
        for number in range(flood.identities)
    ]
    for node in attackers:
        sybils.add(node.me)
        await nursery.start(node.network.run)
        await nursery.start(node.run)
    await connect(everybody([*honest, *attackers]))
    await trio.sleep(3)
    made = 0
    for _ in range(rounds):
        for node in attackers:
            liar = Liar(rng, [])
            groups = [RolloutGroup.from_map(flood.group(liar, liar.question())) for _ in range(flood.times(PUBLISHED))]
            made += len(groups)
            await node.rollouts.publish(groups)
        for node in honest:
            await node.rollouts.publish(_honest(Liar(rng, [])))
            await trio.sleep(10 / HONEST)
    await trio.sleep(5)
    shares = [_shares(node, sybils, defended, {each: standing(each) for each in sybils}) for node in honest]
    cap = BatchLimits().probation if flood.newcomers else BatchLimits().share
    few = DEFENDED.pool.few / min(len(node.rollouts.pool) for node in honest)  # that anybody may have in a small pool
    return Damage(
        made=made / (made + rounds * HONEST * PUBLISHED),
        pool=max(pool for pool, _ in shares),
        batch=max(batch for _, batch in shares),
        cap=cap,
        pool_cap=cap if flood.newcomers else max(cap, few),
    )


def _honest(liar: Liar) -> list[RolloutGroup]:
    """Groups in which one answer is right."""
    questions = [liar.question() for _ in range(PUBLISHED)]
    return [RolloutGroup.from_map(sent(asked, [asked.key, *[liar.wrong(asked)] * 7])) for asked in questions]


def _shares(node: RolloutNode, sybils: set[str], defended: bool, standings: dict[str, float]) -> tuple[float, float]:
    """Of the pool, and of the batch in which it is greatest."""
    held = [each.signed for each in node.rollouts.pool]
    greatest = 0
    limits = BatchLimits() if defended else BatchLimits(share=1.0, probation=1.0)
    for number in range(BATCHES):
        rng = random.Random(number)
        drawn = node.rollouts.pool.candidates(64, rng) if defended else rng.sample(held, min(64, len(held)))
        pool = [score(signed.author, signed.group) for signed in drawn]
        taken, _ = choose(pool, SPLIT, limits, np.random.default_rng(number), author=node.me, standings=standings)
        greatest = max(greatest, _of(sybils, [scored.author for scored in taken]))
    return _of(sybils, [signed.author for signed in held]) / max(1, len(held)), greatest / SPLIT.total


def _of(sybils: set[str], authors: Sequence[str]) -> int:
    return sum(author in sybils for author in authors)
