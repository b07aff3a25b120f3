"""The exchange method `streaming`: `diloco` a fragment at a time, while training goes on (training/streaming.py).

A round is one fragment's exchange. Its last `tau` inner steps are taken while the fragment is on the wire:

    theta <- inner steps from theta                all but tau of the round's H
    g <- what they and earlier steps did to this round's fragment, as far as no result has it
    agree on a roster, all-reduce g                beside: tau steps more, and further ones until the result is here
    phi <- one outer step of the fragment along the mean, bit-identical on all members
    theta <- alpha * theta + (1 - alpha) * phi     in the fragment, and nowhere else

So with F fragments each one is exchanged every F * H steps, and the next begins when this one is done. Agreement,
all-reduce and finding a place are those of `diloco` (known/), and so is what is promised: members that end a round with
one hash hold the same bits. What differs is where work waits that no result has: in the local parameters, which are not
the shared ones between two rounds either, until this node leaves, pauses or catches up; then in the residual. A process
that is killed loses up to F rounds of its own work, as one of `diloco` loses a round.

The paper applies a result exactly tau steps late. Here that is the least: a link too slow for it costs staleness and
not time, up to as many steps again as the round has; after these the node waits.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from math import inf
from typing import ClassVar

import numpy as np
import trio

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.agreement import Agreement
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import Behind, Decision, Position, RoundHead, RoundRoster
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.known.reduction import Reducer
from swarmnode.protocols.methods.known.round import DilocoRounds
from swarmnode.protocols.methods.method import LostPlace, RoundResult
from swarmnode.protocols.methods.trainer import NOTHING, Trainer, TrainerDied, TrainStats, Turns, Vector
from swarmnode.protocols.network import PeerId
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.outer import OuterState
from swarmnode.training.streaming import Fragment, Unsettled, ahead, fragments_of, mixed

logger = logging.getLogger(__name__)


def by_turns(parts: Context) -> tuple[Fragment, ...]:
    """What is exchanged by turns: all at once but in `streaming`, whose other methods have the rest in common."""
    exchange = parts.spec.exchange
    return fragments_of(parts.trainer.layout, exchange.fragments if exchange.method == "streaming" else 1)


class FragmentReduce(Reducer):
    """An all-reduce of its own for each fragment: with the fragment's residuals, which wait for its next turn."""

    def __init__(self, parts: Context) -> None:
        super().__init__(parts, parameters=0)
        self._fragments = fragments = by_turns(parts)
        self._each = [AllReduce(parts, fragment.size) for fragment in fragments]
        self._size = parts.trainer.layout.parameters

    def _turn(self, roster: RoundRoster) -> AllReduce:
        return self._each[roster.round % len(self._each)]

    async def reduce(
        self, roster: RoundRoster, values: Vector, *, within: float = inf, silence: float | None = None
    ) -> Vector:
        """As in `Reducer`, of the fragment whose turn the round is, (size,)."""
        turn = self._turn(roster)
        mean = await turn.reduce(roster, values, within=within, silence=silence)
        self.rates = turn.rates
        return mean

    def commit(self, roster: RoundRoster) -> bool:
        return self._turn(roster).commit(roster)

    def rollback(self) -> None:
        for one in self._each:
            one.rollback()

    def encode_by(self, name: str) -> None:
        for one in self._each:
            one.encode_by(name)

    def give_back(self, work: Vector) -> bool:
        """As in `Reducer`; no fragment takes more than the norm of what it is given."""
        if not is_finite(work):
            return False
        pairs = zip(self._fragments, self._each, strict=True)
        return any([one.give_back(fragment.take(work)) for fragment, one in pairs])

    def left_over(self) -> Vector:
        found = np.zeros(self._size, np.float32)
        for fragment, one in zip(self._fragments, self._each, strict=True):
            fragment.put(found, one.left_over())
        return found

    def restore(self, left_over: Vector) -> None:
        if left_over.shape != (self._size,):
            raise ValueError(f"a residual of {self._size} parameters was expected, not of shape {left_over.shape}")
        for fragment, one in zip(self._fragments, self._each, strict=True):
            one.restore(fragment.take(left_over))


class StreamingRounds(DilocoRounds):
    """One node's rounds: each exchanges one fragment, and leaves the local parameters where training has them."""

    def __init__(self, parts: Context, agreement: Agreement, allreduce: Reducer) -> None:
        super().__init__(parts, agreement, allreduce)
        self._fragments = fragments = by_turns(parts)
        self._work = Unsettled(np.zeros(0, np.float32))
        self._samples = [0] * len(fragments)  # that this node's unsettled work in each fragment comes from
        self._turns = Turns(parts.trainer)
        self.eager = parts.spec.exchange.method == "streaming" and parts.spec.exchange.eager  # see `_go_ahead`

    def _fragment(self, round: int) -> Fragment:
        return self._fragments[round % len(self._fragments)]

    async def run_round(self) -> RoundResult:
        async with self._turns.training():
            return await super().run_round()

    async def _work_in(self, here: Position) -> tuple[Vector, TrainStats]:
        fragment = self._fragment(here.round)
        worked = self._count(await self._train(here, self._steps_of(here.round)[0]))
        unsettled = await self._unsettled()
        if not await self._parts.is_whole(unsettled):
            self._begin_anew()
            unsettled, worked = np.zeros_like(unsettled), NOTHING
        gradient = fragment.take(unsettled)
        if self.eager:
            self._go_ahead(fragment, gradient)
        return gradient, worked

    async def _loss(self) -> float:
        with self._holding_shared():
            return await super()._loss()

    def _steps_of(self, round: int) -> tuple[int, int]:
        """Inner steps before a round's work is offered, and beside its exchange at the least."""
        steps = self._spec.inner.steps_in(round)
        before = max(1, steps - self._spec.exchange.tau)
        return before, steps - before

    async def _exchange(self, here: Position, worked: TrainStats) -> tuple[Decision, TrainStats]:
        """As in `DilocoRounds`; further steps are taken beside."""
        _, least = self._steps_of(here.round)
        most, until = least + self._spec.inner.steps_in(here.round), trio.current_time() + here.window
        taken, over = NOTHING, False

        async def train_on() -> None:
            nonlocal taken
            while taken.steps < least or (taken.steps < most and not over):
                left = until - trio.current_time()
                if left <= 0:
                    break
                if await self._turns.give_way():
                    continue
                goal = least if taken.steps < least else most
                with suppress(TrainerDied):
                    more = await self._take_steps(here.round, goal - taken.steps, left)
                    taken += self._count(more)

        samples = self._weight_in(here.round)
        found: Decision | Behind | LostPlace
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train_on)
            try:
                found = await self._agree(replace(worked, samples=samples))
            except (Behind, LostPlace) as error:
                found, least = error, 0
            over = True
            if taken.steps >= least:
                await self._trainer.interrupt()
        if isinstance(found, Exception):
            raise found
        return found, worked + taken

    async def _train(self, here: Position, steps: int) -> TrainStats:
        worked = await super()._train(here, steps) if steps else NOTHING
        while worked.steps < steps and await self._turns.give_way():
            worked += await super()._train(here, steps - worked.steps)
        return worked

    def _count(self, worked: TrainStats) -> TrainStats:
        self._samples = [samples + worked.samples for samples in self._samples]
        return worked

    def _weight_in(self, round: int) -> int:
        """Of what this node has to offer, before the cap: samples."""
        return self._samples[round % len(self._samples)]

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Trainer]:
        """As in `Method.lent`, between two slices of training, or when this node has found its place."""
        async with self._turns.lent():
            with self._holding_shared() as trainer:
                yield trainer

    @contextmanager
    def _holding_shared(self) -> Iterator[Trainer]:
        """The trainer with the shared parameters, if any; the local ones are afterwards what they were."""
        local = self._trainer.parameters()
        if self.stands:
            self._trainer.load(self.state.parameters)
        try:
            yield self._trainer
        finally:
            self._trainer.load(local)

    # --- where this node's parameters stand, and what of its work is settled ------------------------------------------

    async def begin(
        self, round: int, state: OuterState, voters: tuple[PeerId, ...], joiners: tuple[PeerId, ...]
    ) -> None:
        async with self._turns.training():
            await super().begin(round, state, voters, joiners)

    async def catch_up(self, head: RoundHead, sources: tuple[PeerId, ...]) -> None:
        async with self._turns.training():
            await super().catch_up(head, sources)

    async def return_local_work(self) -> None:
        async with self._turns.training():
            if self._offered is not None and (done := self._acceptor.decision_of(self._acceptor.position.round)):
                await self._account(self._gradient, self._allreduce.commit(done.roster))  # the steps beside lasted on
            await super().return_local_work()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._work = Unsettled(self.state.parameters)
        self._samples = [0] * len(self._fragments)

    async def _unsettled(self) -> Vector:
        return await self._runner(lambda: self._work.of(self._trainer.parameters()))

    def _settle(self, work: Vector) -> None:
        self._work.origin -= work

    def _go_ahead(self, fragment: Fragment, own: Vector) -> None:
        """Take this node's own part of the outer step now (2502.12996)."""
        local, outer = self._trainer.parameters(), self._spec.outer
        share = 1 / len(self._acceptor.candidates())
        try:
            to = ahead(fragment, self.state, own, share, lr=outer.lr, momentum=outer.momentum)
        except ValueError as error:
            logger.warning("this node waits for the others' part of the outer step: %s", error)
            return
        self._work.move(fragment, local, to)
        self._trainer.load(local)

    def _outer_step(self, round: int, before: OuterState, mean: Vector) -> OuterState:
        outer = self._spec.outer
        return self._fragment(round).step(before, mean, lr=outer.lr, momentum=outer.momentum)

    async def _account(self, gradient: Vector, counted: bool) -> None:
        """Work that did not count stays where it is, and is offered when the fragment has its turn again."""
        turn = self._acceptor.position.round
        if counted and self._offered is not None:
            self._work.settle(self._fragment(turn), self._offered)
            self._samples[turn % len(self._samples)] = 0
        self._offered = None

    def _take_over(self, round: int) -> None:
        fragment, local = self._fragment(round), self._trainer.parameters()
        shared = fragment.take(self.state.parameters)
        if self.eager:
            to = shared - self._work.inside(fragment, local)
        else:
            to = mixed(fragment.take(local), shared, self._spec.exchange.alpha)
        self._work.move(fragment, local, to)
        self._trainer.load(local)


class Streaming(Diloco):
    """One node's part in a run by fragments; all that is not about them is as in `Diloco`."""

    name = "streaming"
    rounds: StreamingRounds
    reducer_class: ClassVar[type[Reducer]] = FragmentReduce
    rounds_class = StreamingRounds

    def lent(self) -> AbstractAsyncContextManager[Trainer]:
        return self.rounds.lent()
