"""Who floods the pool of rollouts: six honest nodes of a run by rollouts, and one attacker under one name or many.

Sessions, sharing, membership, policies, gate and ledgers are the product's; the network is simnet and time is virtual.
Honest nodes learn from one another first; then the attacker's nodes join. Nobody is told who they are: a node knows
them by what its trainer made of their groups, which its ledger counts at the end of each epoch of 30 s.

Measured at the honest node, and at the moment, where it is greatest: the attacker's share of the groups held, and of
any batch that was learned from. The undefended nodes are SAPO as published: no gate, no quotas, no ledger; the oldest
group goes first, and batches are drawn alike from all that is held.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import trio
from adversaries.rollouts import Flood, Liar
from policytrainer import InProcess
from simpolicy import Groups
from simswarm import SimSwarm

from swarmnode.node.reputation import Reputation
from swarmnode.node.session import METHODS
from swarmnode.protocols.limits import Allowance
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.methods.rollouts.messages import SignedGroup
from swarmnode.protocols.methods.rollouts.pool import PoolLimits, Rates, RolloutLimits, RolloutPool
from swarmnode.protocols.methods.rollouts.sapo import Sapo
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.observations import Promises
from swarmnode.testing.learners import start_from
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.training.rl.groups import Learned, RolloutGroup
from swarmnode.training.rl.grpo import BatchLimits
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment

PUBLISHED = 1  # groups of a quiet attacker in a round: as many as an honest node's that teach something
PACE = 10.0  # s of a round
BATCH, EXTERNAL = 8, 4
_ANY = Rates(groups=Allowance(1e6, 1e6), bytes=Allowance(1e9, 1e9))
NAIVE = RolloutLimits(copies=64, total=_ANY, author=_ANY, sender=_ANY, pool=PoolLimits(share=1.0, few=512))


@dataclass(frozen=True)
class Damage:
    """Shares of the attacker's identities together."""

    made: float  # of all groups that were published while it was there
    pool: float
    batch: float
    cap: float  # of a batch
    over: float  # share of a pool beyond what was allowed of it at that moment, at the most; below 0 where it was less

    def __str__(self) -> str:
        return f"{self.made:.0%} of what was published, {self.pool:.0%} of a pool, {self.batch:.0%} of a batch"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.over > 0:
            broken.append(f"{self.over:.0%} of a pool beyond what is allowed")
        if self.batch > self.cap:
            broken.append(f"{self.batch:.0%} of a batch, at most {self.cap:.0%} are allowed")
        return tuple(broken)


class _Honest(InProcess):
    """Notes whose groups it learned from, in each of its updates."""

    def __init__(self, task: Trainee) -> None:
        super().__init__(task, sampling=0.5, update=0.2)
        self.published = 0
        self.batches: list[list[str]] = []
        choose = task.learner._taken

        def noted(*given):  # type: ignore[no-untyped-def]
            taken, left_out = choose(*given)
            self.batches.append([scored.author for scored in taken])
            return taken, left_out

        task.learner._taken = noted  # type: ignore[method-assign]

    async def rollouts(self, **asked):  # type: ignore[no-untyped-def]
        groups, seconds = await super().rollouts(**asked)
        self.published += sum(scored.informative for scored in self.task._own)
        return groups, seconds


class _Attacker(InProcess):
    """Publishes what it likes, and learns nothing."""

    def __init__(self, task: Trainee, flood: Flood, number: int) -> None:
        super().__init__(task, sampling=0.0, update=0.0)
        self._flood, self._liar = flood, Liar(np.random.default_rng([1, number]), [])
        self.published = 0

    async def rollouts(self, **asked):  # type: ignore[no-untyped-def]
        await trio.lowlevel.checkpoint()
        liar, count = self._liar, self._flood.times(PUBLISHED)
        self.published += count
        return [RolloutGroup.from_map(self._flood.group(liar, liar.question())) for _ in range(count)], 0.0

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        await trio.lowlevel.checkpoint()
        return Learned(
            reward=0.0, own=0, informative=0, taken=0, authors=0, external=0, refused={}, refused_answers={}, tokens=0
        )


@dataclass(frozen=True)
class Size:
    """How many honest nodes there are, and how many rounds before the attacker comes, and with it."""

    honest: int = 6
    before: int = 6  # two epochs of the ledgers
    rounds: int = 9  # three epochs


FULL = Size()


def damage(flood: Flood, *, defended: bool = True, size: Size = FULL) -> Damage:
    """Let the attacker in for some rounds."""
    with ExitStack() as stack:
        if not defended:
            stack.enter_context(patch.object(RolloutPool, "drawn", _any_of_all))
        stack.enter_context(patch.dict(METHODS))
        return run_with_nursery(_flooded, flood, defended, size)


async def _flooded(flood: Flood, defended: bool, size: Size, nursery: trio.Nursery) -> Damage:
    good = tuple(f"node {number}" for number in range(size.honest))
    names = tuple(f"attacker {number}" for number in range(flood.identities))
    world = SimWorld(latency=0.05)
    attackers = {world.node(name).me for name in names}
    rollouts = {"policy": "gpt:1x48", "batch": BATCH, "external": EXTERNAL, "adaptive": False, "pace": PACE}
    spec = _spec(rollouts)
    beginning = Trainee(spec, Assignment("", "beginning"))

    def trainer(name: str, peer: str) -> InProcess:
        task = Trainee(spec.updated(rollouts={"warm_up": 0}), Assignment("", peer))
        if peer in attackers:
            return _Attacker(task, flood, names.index(name))
        start_from(task.learner, beginning.learner)
        if not defended:
            naive = BatchLimits(share=1.0, probation=1.0)
            task.learner.settings = replace(task.learner.settings, gate=None, limits=naive, correction="none")
        return _Honest(task)

    def build(parts: Context) -> Method:
        if parts.me in attackers or not defended:
            return Sapo(replace(parts, rollouts=NAIVE))
        ledger = Ledger(parts.me, now=parts.now)
        method = Sapo(replace(parts, ledger=ledger))
        reputation = Reputation(
            ledger, state=parts.state, sync=parts.sync, membership=parts.membership, promises=Promises()
        )
        reputation.method = method
        nursery.start_soon(reputation.run)
        return method

    METHODS["sapo"] = build
    swarm = SimSwarm(nursery, world=world, method="sapo", trainer=trainer, rollouts=rollouts)
    for name in good:
        await swarm.start(name, join=None if name == good[0] else good[0])
    await trio.sleep(size.before * PACE)
    honest = [swarm.nodes[name].trainer for name in good]
    published, learned = _published(honest), [len(each.batches) for each in honest]
    for name in names:
        await swarm.start(name, join=good[0])
    cap = BatchLimits().probation if flood.newcomers else BatchLimits().share
    few = 0 if flood.newcomers else PoolLimits().few
    pool, over = 0.0, -1.0
    for _ in range(size.rounds):
        await trio.sleep(PACE)
        for name in good:
            held = [each.signed.author for each in swarm.nodes[name].method.rollouts.pool]
            share = _of(attackers, held) / max(1, len(held))
            pool, over = max(pool, share), max(over, share - max(cap, few / max(1, len(held))))
    batches = [batch for each, since in zip(honest, learned, strict=True) for batch in each.batches[since:]]
    made = _published([swarm.nodes[name].trainer for name in names])
    return Damage(
        made=made / (made + _published(honest) - published),
        pool=pool,
        batch=max(_of(attackers, batch) for batch in batches) / BATCH,
        cap=cap,
        over=over,
    )


def _spec(rollouts: dict[str, object]) -> RunSpec:
    return parse_runspec(
        {"run": {"name": "flood"}, "task": {"name": "digits-rl"}, "rollouts": rollouts}, source="attack"
    )


def _published(trainers: Sequence[object]) -> int:
    return sum(each.published for each in trainers if isinstance(each, (_Honest, _Attacker)))


def _any_of_all(pool: RolloutPool, count: int, rng: random.Random, *, used: bool = True) -> tuple[SignedGroup, ...]:
    held = [each.signed for each in pool if used or not each.used]
    return tuple(rng.sample(held, min(count, len(held))))


def _of(attackers: set[str], authors: Sequence[str]) -> int:
    return sum(author in attackers for author in authors)
