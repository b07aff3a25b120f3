"""The exchange method `sapo`: policies of any size learn from one another's rollouts (Swarm sAmpling Policy
Optimization, arXiv 2509.08721).

    ask       fresh questions, and answers to each by the policy as it is
    share     the answers, with whoever is connected; what others shared meanwhile is in the pool
    learn     when the round's time is over: one update from own groups and from others', scored here

Every node has a policy of its own and rounds of its own: `state_hash` is that policy's, and nobody agrees on anything.
So nothing is waited for. Who is alone learns from its own answers and goes on learning from others' when they are back;
whoever dies, freezes or lies costs nobody a round. A trainer that dies costs the round in hand.

Nodes that only sample (`sampler.py`) may write for a node's policy: while some ask, its weights are broadcast after
each round (`rollouts/weights.py`), and what they write is learned from like its own answers, which are then few.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import trio

from swarmnode.protocols.methods.method import Begin, Completed, LostPlace, Method, Parts, Place, RoundResult, Saved
from swarmnode.protocols.methods.rollouts import Rollouts, SignedGroup
from swarmnode.protocols.methods.rollouts.checks import informative
from swarmnode.protocols.methods.rollouts.samplers import Samplers
from swarmnode.protocols.methods.rollouts.start import sharing
from swarmnode.protocols.methods.rollouts.weights import Broadcast, hash_of
from swarmnode.protocols.methods.trainer import Learned, Trainer, TrainerDied, TrainStats
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.receipts import AuditWork, RolloutWork
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.training.outer import OuterState
from swarmnode.training.rl.groups import RolloutGroup, score
from swarmnode.training.rl.tasks import tasks_of_run

log = logging.getLogger(__name__)

ASKED_ITSELF = 1  # questions of a round while others sample: for the course of the reward
CANDIDATES = 8  # others' groups that a trainer is given, as a multiple of what it takes: many teach nothing


def build(parts: Parts) -> Sapo:
    """The method of one node. Raises TypeError where its trainer trains no policy."""
    return Sapo(parts)


class Sapo(Method):
    """Its `samplers` are public, to be looked at."""

    name = "sapo"
    phase = "waiting"
    paused = False

    def __init__(self, parts: Parts) -> None:
        if not parts.trainer.capabilities.rollouts:
            raise TypeError(f"{type(parts.trainer).__name__} trains no policy")
        self._me, self._runner, self._warn = parts.me, parts.runner, parts.observer.warn
        self._trainer = parts.trainer
        self._pace = parts.spec.rollouts.pace
        self._wanted = CANDIDATES * parts.spec.rollouts.batch
        self._rng = parts.rng
        self._judged = parts.spec.rollouts.judge != "none"
        self._sampled, self._ledger = parts.spec.rollouts.sampled, parts.ledger
        self._is_sampled_for = False  # others wrote for this policy in the round before
        self.samplers = Samplers(
            parts.me,
            run_id=parts.run_id,
            tasks=tasks_of_run(parts.spec.rollouts.difficulty),
            answers=parts.spec.rollouts.answers,
            staleness=parts.spec.rollouts.staleness,
        )
        self.broadcast = _broadcast(parts, self.samplers)
        self.rollouts: Rollouts = sharing(parts)(
            peers=parts.membership.connected,
            limits=parts.rollouts,
            standing=self._standing,
            check=partial(_check, parts.spec.rollouts.difficulty, self._judged),
            sampled=self.samplers.add,
        )
        self.violations = (self.rollouts.offences, *([self.broadcast.offences] if self.broadcast is not None else []))
        self.sources = (RolloutWork(self.rollouts.pool), AuditWork(self.samplers))
        self._place: Place | None = None
        self._began = trio.current_time()

    def measure(self, metrics: Metrics) -> None:
        self.rollouts.measure(metrics)

    def status(self) -> Mapping[str, Any]:
        return {"samplers": [asdict(tally) for tally in self.samplers.tallies()]}

    def _standing(self, author: PeerId) -> float:
        """How much of its share an author has here: nothing once it was caught lying, or while it is contained.

        Who samples for this node and passed its audits is no newcomer to it.
        """
        standing = self._ledger.standing(author) if self._ledger is not None else 1.0
        if standing > 0 and self.samplers.proved(author):
            standing = 1.0
        return min(standing, self.samplers.standing(author))

    @property
    def place(self) -> Place | None:
        return self._place

    async def find_place(self, begin: Begin) -> None:
        """From the newest checkpoint, or from the beginning: a policy is nobody else's."""
        if begin.saved is not None:
            self._trainer.load(begin.saved.state.parameters)
        await self._stand(begin.saved.round if begin.saved is not None else 0)

    async def run_round(self) -> RoundResult:
        place, began = self._stands(), self._began
        self.phase = "training"
        try:
            broadcast = self.broadcast is not None and self.broadcast.newest is not None
            groups, sampling = await self._trainer.rollouts(
                version=place.round,
                count=ASKED_ITSELF if self._is_sampled_for else None,
                policy=place.state_hash if broadcast else "",
            )
            await self.rollouts.publish([group for group in groups if self._teaches(group)])
            self.phase = "exchanging"
            await trio.sleep_until(began + self._pace)
            learned = await self._learn(place.round)
        except TrainerDied as error:
            raise LostPlace(f"the trainer died and is restarted: {error}") from error
        finally:
            self.phase = "waiting"
        stands = await self._stand(place.round + 1)
        await self._broadcast_weights(stands)
        return RoundResult(
            round=place.round,
            outcome=Completed(1 + learned.authors),
            state_hash=stands.state_hash,
            loss=float("nan"),
            worked=_worked(learned, sampling),
            seconds=self._began - began,
            members=1 + learned.authors,
            counted=(self._me,),
            learned=learned,
        )

    async def regain_place(self) -> None:
        """There is no place to be lost: the next round begins from the parameters that are there.

        A trainer process that died may have left others than its last answer told: those who sample for them are judged
        by their hash.
        """
        if self._place is not None:
            await self._stand(self._place.round)

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.rollouts.watch)
            if self.broadcast is not None:
                nursery.start_soon(self.broadcast.watch)

    async def leave(self) -> None:
        """Nobody waits for this node, and no work is in hand that it could lose."""

    def lent(self) -> AbstractAsyncContextManager[Trainer]:
        return nullcontext(self._trainer)

    def saved(self) -> Saved:
        place = self._stands()
        parameters = self._trainer.parameters()
        return Saved(
            round=place.round,
            state=OuterState.start(parameters),
            residual=np.zeros(parameters.size, np.float32),
            members=(self._me,),
            method=self.name,
        )

    def _teaches(self, group: RolloutGroup) -> bool:
        return score(self._me, group, judged=self._judged).informative

    async def _learn(self, version: int) -> Learned:
        """Give the trainer what others shared and it has not seen yet; note what it made of that."""
        pool = self.rollouts.pool
        drawn = pool.candidates(self._wanted, self._rng)
        sampled = self.samplers.drawn(self._sampled, version=version)
        self._is_sampled_for = bool(sampled)
        learned = await self._trainer.learn(
            [(signed.author, signed.group) for signed in drawn],
            [(signed.author, signed.group) for signed in sampled],
            probation={signed.author for signed in drawn if pool.on_probation(signed.author)},
        )
        pool.used(signed.id for signed in drawn)
        self.samplers.settle(sampled, caught=learned.caught, checked=learned.checked)
        for author, reason in learned.caught.items():
            pool.note(author, reason)
            log.warning(
                "%s did not sample with this node's weights (%s): it is not listened to any more", author, reason
            )
        if sampled:
            behind = sum(version - signed.version for signed in sampled) / len(sampled)
            learned = replace(learned, staleness=behind)
        for author, count in learned.refused_answers.items():
            if count:
                pool.note(author, "strange-answer", count)
        return learned

    async def _broadcast_weights(self, place: Place) -> None:
        """Put out the parameters that the trainer has, if somebody samples with them."""
        if self.broadcast is None or not self.broadcast.wanted:
            return
        try:
            await self.broadcast.publish(self._trainer.parameters(), version=place.round, policy=place.state_hash)
        except ShardError as error:
            self._warn("weights", f"those who sample for this node get no new weights: {error}")
        else:
            self._warn("weights", None)

    async def _stand(self, round: int) -> Place:
        """Having done so many rounds, with the parameters that the trainer has."""
        parameters = self._trainer.parameters()
        state_hash = await self._runner(lambda: hash_of(parameters))
        self._began = trio.current_time()
        self._place = Place(round, state_hash, members=(self._me,))
        return self._place

    def _stands(self) -> Place:
        if self._place is None:
            raise RuntimeError("this node has no place yet")
        return self._place


def _check(difficulty: int, judged: bool, signed: SignedGroup) -> str:
    """Why a group would teach nothing, before it is kept or passed on; "" where it may."""
    return informative(signed, judged=judged) if signed.group.task.difficulty == difficulty else "other-difficulty"


def _broadcast(parts: Parts, samplers: Samplers) -> Broadcast | None:
    """What gives weights to those who sample for this node; None where it keeps no shards."""
    if parts.shards is None:
        return None
    rollouts = parts.spec.rollouts
    return Broadcast(
        me=parts.me,
        run_id=parts.run_id,
        shape=parts.policy or rollouts.policy,
        rpc=parts.rpc,
        shards=parts.shards,
        sign=parts.sign,
        runner=parts.runner,
        now=parts.now,
        admits=parts.admits,
        samplers=samplers,
        keep=rollouts.staleness + 1,
    )


def _worked(learned: Learned, sampling: float) -> TrainStats:
    return TrainStats(
        steps=1,
        samples=learned.own + learned.taken + learned.sampled,
        tokens=learned.tokens,
        loss=float("nan"),
        seconds=sampling + learned.seconds,
    )
