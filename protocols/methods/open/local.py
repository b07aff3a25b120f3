"""What this node trains, and what becomes of it: local training goes on while contributions are exchanged.

    θ ← inner steps from φ - e                    until the round asks for a contribution
    Δ ← φ - e − θ_c                               at that moment; encoded with error feedback, and offered
    θ ← further inner steps                       while the others judge
    θ ← φ' - e' + (θ − θ_c)                       when the next shared state φ' is there

e is the residual, what encodings left out; 0 with topk and no outer momentum, as SparseLoCo (2508.15706) lives by doing
again and again what was done and not yet sent (`open_step.carries`).

Of Δ an accepted contribution keeps only what the encoding left out (decay 0.95) and what was clipped; one that was
refused returns to the residual, at most one norm of it; one that no judge looked at, as in an empty round, stays in θ.

Where the run has audits, `TracedTrainer` keeps the record of that work, to which contributions are bound:

    local.trace             root of the record behind the offer, for its commit
    await local.show(id)    that record or a vector that it names, while it is kept
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from math import nan
from weakref import WeakValueDictionary

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.protocols.limits import Recent
from swarmnode.protocols.methods.context import DIVERGED, Context
from swarmnode.protocols.methods.trainer import NOTHING, Trainer, TrainerDied, TrainStats, Turns, Vector, loss_of
from swarmnode.protocols.runner import surely
from swarmnode.training import mapped
from swarmnode.training.codecs import codec, codec_in
from swarmnode.training.codecs.feedback import ErrorFeedback, is_finite, norm_in_float64
from swarmnode.training.open_step import Raw, carries
from swarmnode.training.outer import OuterState
from swarmnode.training.verify.recorder import room, stretch_steps
from swarmnode.training.verify.replay import DECAY
from swarmnode.training.verify.trace import MAX_LEGS, MAX_STRETCHES, Leg, Origin, Trace, gap, vector_id
from swarmnode.training.verify.vectors import Vectors

logger = logging.getLogger(__name__)

LET_GO = 10.0  # seconds that the step in hand may take at a round's end, before its call is given up
RECORDS_KEPT = 5  # an audit takes up to a round after that of the roster, and needs the record before as well …
OFFERS_KEPT = 8  # … and where that ended and what it left over; rounds may have passed some offers over
ALL = 1.0  # share of a contribution that comes back where a roster was undone or a fork left
SPARE_STRETCHES = 64  # of a record: for the H steps that are due, and where others lay hands on the trainer
BREATH = 0.05  # seconds between two looks, where training takes no time


@dataclass(frozen=True)
class _Offer:
    """What this node offered in a round and does not know the end of yet."""

    parent: bytes  # the roster that the round builds on
    local: Vector  # (P,), θ_c; the pseudo-gradient is φ - e − θ_c
    worked: TrainStats  # since the offer before
    root: bytes = b""  # id of the contribution


class LocalTrainer:
    """The local parameters, the residual, and who may touch the trainer."""

    def __init__(self, parts: Context) -> None:
        self._parts, self._runner = parts, parts.runner
        self._spec, self._trainer = spec, trainer = parts.spec, parts.trainer
        self.carries = carries(spec.exchange.codec, spec.outer.momentum)  # the local parameters carry the residual
        self.feedback = ErrorFeedback(codec(spec.exchange.codec), trainer.layout.parameters, decay=DECAY)
        self.base: OuterState | None = None  # φ
        self._away: Vector | None = None  # (P,), φ - e, where that stands beside φ
        self.offer: _Offer | None = None
        self.since_offer = NOTHING
        self.trained = NOTHING  # in this life, in all
        self._more = trio.Event()  # set by each call that trained
        self._turns = Turns(trainer)

    @property
    def start(self) -> Vector:
        """Where training for the next contribution began, (P,): φ, or φ - e. Raises RuntimeError before that."""
        if self.base is None:
            raise RuntimeError("this node stands on no state yet")
        return self.base.parameters if self._away is None else self._away

    @property
    def trace(self) -> bytes:
        """Root of the record of the work behind the offer; empty where none is kept."""
        return b""

    def stand(self, roster: bytes, *, after: bytes = b"") -> None:
        """The shared state is that after `roster`, which builds on `after`; empty: it may be of another history."""

    # --- training -----------------------------------------------------------------------------------------------------

    async def until_enough(self, round: int) -> None:
        """Return when the H inner steps of this round are done since the last contribution."""
        while self.since_offer.steps < self._spec.inner.steps_in(round):
            await self._more.wait()

    async def run(self, round: int) -> None:
        """Train until cancelled, whenever nobody else has the trainer.

        Batches are those of the round that the work is to be offered in: after the offer, those of the next.

        The steps of a call that is cancelled count as well, unless the one in hand takes longer than LET_GO.
        """
        while True:
            async with self._turns.training():
                began = trio.current_time()
                stream = round if self.offer is None else round + 1
                steps = self._spec.inner.steps_in(stream)
                left = steps - self.since_offer.steps
                trains = left > 0 or await self._may_go_on(steps)
                if trains:
                    await self._train(stream, left if left > 0 else steps)
            self._more.set()
            self._more = trio.Event()
            if not trains or trio.current_time() == began:
                await trio.sleep(BREATH)

    async def _may_go_on(self, steps: int) -> bool:
        """Whether so many, the H of a round, may follow those of the round while others are waited for.

        Not while H grows: what is learned apart in the first rounds is lost to averaging.
        """
        return steps == self._spec.inner.steps

    async def _train(self, round: int, steps: int) -> None:
        """Add what one call does to `since_offer`; where it is cancelled, what it did until its step in hand ended."""
        over = trio.Event()
        failure: Exception | None = None

        async def let_go(call: trio.CancelScope) -> None:
            try:
                await over.wait()
            finally:
                if not over.is_set():
                    with trio.CancelScope(shield=True), trio.move_on_after(LET_GO):
                        await self._trainer.interrupt()
                        await over.wait()
                    call.shield = False

        async with trio.open_nursery() as nursery:
            with trio.CancelScope(shield=True) as call:
                nursery.start_soon(let_go, call)
                try:
                    with suppress(TrainerDied):
                        done = await self._trainer.train(round=round, steps=steps, seconds=float("inf"))
                        self.since_offer += done
                        self.trained += done
                except Exception as error:  # raised below, as it is and in no group
                    failure = error
                over.set()
        if failure is not None:
            raise failure

    def held(self) -> AbstractAsyncContextManager[None]:
        """Have the trainer for oneself, after its step in hand; training goes on afterwards."""
        return self._turns.lent()

    # --- contributions ------------------------------------------------------------------------------------------------

    async def contribute(self, parent: bytes, round: int) -> bytes | None:
        """Encode what was trained since the last contribution, for the round on `parent`; None where that is nothing.

        What the round makes of it is told to `settle`. Training goes on meanwhile.
        """
        start = self.start
        local = await self._to_offer()
        worked, self.since_offer = self.since_offer, NOTHING
        whole = await self._runner(lambda: is_finite(local))
        self._parts.observer.warn("diverged", None if whole else DIVERGED)
        if not whole:
            logger.warning("%s", DIVERGED)
            async with self.held():
                self._trainer.load(start)
            return None
        self.feedback.codec = codec_in(round, self._spec.exchange.codec)
        self.offer = _Offer(parent, local, worked)

        def encode() -> bytes | None:
            delta = np.subtract(start, local, out=mapped.zeros(local.size))
            return bytes(self.feedback.encode(delta)) if delta.any() or not self.feedback.is_zero() else None

        return await surely(self._runner(encode))

    async def _to_offer(self) -> Vector:
        """The local parameters (P,), between two steps."""
        async with self.held():
            return await self._runner(self._trainer.parameters)

    def offered(self, root: bytes) -> None:
        if self.offer is not None:
            self.offer = replace(self.offer, root=root)

    def offered_for(self, parent: bytes) -> bytes:
        """Id of the contribution in hand for the round on this roster; empty where there is none."""
        return self.offer.root if self.offer is not None and self.offer.parent == parent else b""

    async def settle(self, accepted: bool) -> None:
        """What became of the offer: keep what the encoding left out, or all of it. Nothing, where there is none."""
        offer = self.offer
        if offer is None or not self.feedback.pending:
            return
        self.offer = replace(offer, root=b"")
        if accepted:
            self.feedback.commit()
        else:
            self.feedback.rollback()
            self.feedback.fade()
            await surely(self._runner(lambda: self.feedback.give_back(self.start - offer.local)))

    def take_back(self) -> None:
        """The round passed the offer over: it stays in the local parameters, and is part of the next contribution."""
        if self.offer is not None:
            self.feedback.rollback()
            self.since_offer = self.offer.worked + self.since_offer
            self.offer = None

    async def return_encoded(self, raw: Raw, share: float = 1.0) -> None:
        """Put so much of a contribution of this node's back into the residual: what no result has, or has any more."""

        def add() -> None:
            decoded = self.feedback.codec.decode(raw, self.feedback.size)
            norm = norm_in_float64(decoded)
            self.feedback.give_back(np.multiply(decoded, np.float32(share), out=decoded), norm)

        await surely(self._runner(add))

    async def move(self, state: OuterState, round: int) -> float:
        """Go on from a new shared state with what was trained since the offer.

        The held-out loss of that state, after this round; nan where it is not measured.
        """
        since = self.offer.local if self.offer is not None else self.start
        async with self.held():
            start = await self._runner(lambda: self._start_on(state))

            def further() -> Vector:
                local = self._trainer.parameters()
                np.subtract(local, since, out=local)
                np.add(start, local, out=local)
                return local if is_finite(local) else start

            onwards, loss = await self._runner(further), nan
            try:
                if self._spec.inner.measured_after(round):
                    self._trainer.load(state.parameters)
                    loss = await loss_of(self._trainer)
            finally:
                self._trainer.load(onwards)
                self._stand(state, start)
                self.offer = None
        return loss

    async def stand_on(self, state: OuterState) -> None:
        """Go to a state that does not follow from where this node stood: what was trained goes to the residual."""
        await self.leave()
        async with self.held():
            start = await self._runner(lambda: self._start_on(state))
            self._trainer.load(start)
        self._stand(state, start)

    async def leave(self) -> None:
        """Put all that is in no result into the residual; the local parameters are then the shared ones."""
        if self.base is None:
            return
        await self.settle(accepted=False)
        since = self.offer.local if self.offer is not None else self.start
        async with self.held():
            local = self._trainer.parameters()
            self._trainer.load(self.base.parameters)
        self._stand(self.base, self.base.parameters)
        self.offer, self.since_offer = None, NOTHING
        await surely(self._runner(lambda: self.feedback.give_back(since - local)))

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Trainer]:
        """Have the trainer to measure with. Training waits; the local parameters are afterwards what they were."""
        async with self.held():
            local = await self._runner(self._trainer.parameters)
            try:
                yield self._trainer
            finally:
                self._trainer.load(local)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Trainer]:
        """Have the trainer with the shared parameters φ in place of the local ones; as `lent` otherwise."""
        async with self.lent() as trainer:
            if self.base is not None:
                trainer.load(self.base.parameters)
            yield trainer

    def _start_on(self, state: OuterState) -> Vector:
        return self.feedback.taken_from(state.parameters) if self.carries else state.parameters

    def _stand(self, state: OuterState, start: Vector) -> None:
        self.base, self._away = state, None if start is state.parameters else start


# --- the record of the work -------------------------------------------------------------------------------------------


class TracedTrainer(LocalTrainer):
    """Local training that others may audit: it keeps the record that contributions are bound to (training/verify).

    It takes a mark of its trainer whenever somebody lays hands on it, and writes down what was taken over between
    stretches of steps. What it cannot show it says so (`Origin.UNLINKED`): after a restart of the trainer, a switch to
    another fork, work that came back from an undone roster, a state that was fetched. Nothing here waits for others,
    and a record that cannot be made costs no contribution.
    """

    def __init__(self, parts: Context) -> None:
        super().__init__(parts)
        self._legs: list[Leg] = [_FIRST]  # since the offer, or the beginning
        self._to_bind: tuple[Leg, ...] | None = None  # to the offer in the making, if they can still be shown
        self._origin, self._previous, self._began = Origin.UNLINKED, b"", b""
        self._tip = b""  # roster of the shared state
        self._life = b""
        self._trained = False  # by this trainer, ever
        # Where what is being written down begins, and where the offer did: parameters, or their id once that is known.
        self._start: Vector | bytes = parts.trainer.parameters()
        self._start_before: Vector | bytes = self._start
        self._offered: Trace | None = None
        self._shown = Recent[bytes, bytes](RECORDS_KEPT)  # records by root
        self._copies: WeakValueDictionary[bytes, NDArray[np.uint8]] = WeakValueDictionary()  # as long as they are shown
        recorded, offers, _ = parts.trainer.states
        self._recorded = Vectors(recorded)
        self._offers = Vectors(offers, budget=OFFERS_KEPT * 8 * self.feedback.size)  # an end and a residual each

    # --- what others may ask for --------------------------------------------------------------------------------------

    @property
    def trace(self) -> bytes:
        return self._offered.root if self._offered is not None and self.offer is not None else b""

    @property
    def records(self) -> bool:
        """Whether this node's own work can be shown: then others' can."""
        return bool(self._life)

    def keeps(self, root: bytes) -> bool:
        """Whether the record with this root is kept: it is of one of the last contributions."""
        return root in self._shown

    async def show(self, id: bytes) -> memoryview | None:
        """A record by its root, or a vector that a record names; None where it is kept no more, or the disk is full."""
        if id in self._shown:
            return memoryview(self._shown[id])
        if (copy := self._copies.get(id)) is not None:
            return memoryview(copy.data)
        most, vector = 8 * self.feedback.size, None
        for vectors in (self._recorded, self._offers):
            with suppress(OSError):
                vector = await self._runner(lambda vectors=vectors: vectors.copied(id, most))  # type: ignore[misc]
            if vector is not None and (not vector.size or vector.size >= self.feedback.size):
                self._copies[id] = copy = vector.view(np.uint8)
                return memoryview(copy.data)
        return None

    # --- what is written down -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        async with super().held():
            await self._mark()
            yield

    async def _may_go_on(self, steps: int) -> bool:
        """Nor where the record would take more than others accept, or than this node keeps."""
        if not await super()._may_go_on(steps):
            return False
        await self._mark()
        offered = self._offered.stretches if self._offered is not None else ()  # which may come back
        recorded = len(offered) + sum(len(leg.stretches) for leg in self._legs)
        most, parameters = self._spec.inner.steps, self.feedback.size
        kept = room(most, parameters) // (12 * parameters)  # states
        return recorded + -(-steps // stretch_steps(most, parameters)) <= min(MAX_STRETCHES - SPARE_STRETCHES, kept)

    async def _mark(self) -> None:
        """Add the stretches since the last mark. A trainer tells them once, so its answer is awaited in any case."""
        marked = None
        with suppress(TrainerDied), trio.CancelScope(shield=True):
            marked = await self._trainer.mark()
        if marked is None:
            self.unlink()
            return
        if marked.life != self._life:
            if self._life:
                logger.warning("what was trained until now cannot be shown to auditors: the trainer lost its states")
                self.unlink()
            self._life = marked.life
        self._trained = self._trained or bool(marked.stretches)
        last = self._legs[-1]
        self._legs[-1] = replace(last, stretches=(*last.stretches, *marked.stretches))

    def stand(self, roster: bytes, *, after: bytes = b"") -> None:
        if self._tip and self._tip not in (after, roster):
            self.unlink()
        self._tip = roster
        if not self._legs[-1].base and len(self._legs) > 1:
            self._legs[-1] = replace(self._legs[-1], base=roster)
        self._began = self._began or roster

    def unlink(self) -> None:
        """What was trained until now cannot be shown as one."""
        self._origin, self._previous, self._began = Origin.UNLINKED, b"", self._tip
        self._legs, self._to_bind = [_FIRST], None

    async def _to_offer(self) -> Vector:
        async with self.held():
            self._to_bind, self._legs = tuple(self._legs), [_FIRST]  # what is trained while this is encoded is the next
            return await self._runner(self._trainer.parameters)

    async def contribute(self, parent: bytes, round: int) -> bytes | None:
        residual, self._offered = self.feedback.export(), None
        encoded = await super().contribute(parent, round)
        if encoded is None or self.offer is None:
            self.unlink()
            return None
        local = self.offer.local

        def keep() -> list[bytes]:
            first = self._start if isinstance(self._start, bytes) else vector_id(self._start)
            return [first, *(self._offers.put(vector) for vector in (local, residual))]

        try:
            start, end, left = await self._runner(keep)
        except OSError as error:
            logger.warning("the disk does not take the record of this node's work, which audits need: %s", error)
            self.unlink()
            return encoded
        if self._to_bind is None:  # the trainer died meanwhile
            return encoded
        texts = self._parts.texts.given()
        trace = Trace(self._origin, self._previous, self._began, start, end, left, self._to_bind, texts)
        if self._life and not gap(trace):
            self._offered = trace
            self._shown[trace.root] = trace.encode()
        self._origin, self._previous = (Origin.AFTER, trace.root) if self._offered else (Origin.UNLINKED, b"")
        self._start_before, self._start = start, end
        self._began = parent
        return encoded

    def take_back(self) -> None:
        before = self._offered if self.offer is not None else None
        super().take_back()
        self._offered = None
        if before is None:
            return
        self._shown.pop(before.root, None)
        if before.root == self._previous:  # nothing was lost since
            self._origin, self._previous, self._began = before.origin, before.previous, before.base
            self._start = self._start_before
            joined = replace(before.legs[-1], stretches=(*before.legs[-1].stretches, *self._legs[0].stretches))
            self._legs = [*before.legs[:-1], joined, *self._legs[1:]]

    async def return_encoded(self, raw: Raw, share: float = ALL) -> None:
        await super().return_encoded(raw, share)
        if share == ALL:
            self.unlink()

    async def move(self, state: OuterState, round: int) -> float:
        since_offer = self.offer is not None
        loss = await super().move(state, round)
        self._legs.append(Leg(b"", since_offer, ()))
        if len(self._legs) > MAX_LEGS:
            self.unlink()
        return loss

    async def leave(self) -> None:
        await super().leave()
        self.unlink()

    async def stand_on(self, state: OuterState) -> None:
        await super().stand_on(state)
        self.unlink()
        self._tip = self._began = b""
        self._start = self.start
        if not self._trained and not self._trainer.moments()[1] and not self.feedback.export().any():
            self._origin = Origin.FRESH


_FIRST = Leg(b"", False, ())
