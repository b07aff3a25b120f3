"""Butterfly all-reduce: every owner reduces one part of the vector and hands the same bytes of it to everybody.

Order, for a roster that fits into one group (`partition.py`):

1. each member encodes its values part by part, error feedback added, and offers each part to its owner;
2. each owner fetches its part from all seats, decodes, takes the weighted mean in the roster's order, encodes the mean
   *once* (with a residual of its own, dropped when ownership moves) and offers it to all seats;
3. each member fetches all reduced parts and decodes them: all hold the same bytes, so all compute the same state.

A grid of several groups, and the next attempt at a round of one: docs/architecture.md, "Groups" and "Retries".

All of it goes on at once, chunk by chunk: what is offered and fetched grows (`StreamingBuffer`). The arithmetic
(`reduction.py`) runs in the runner's threads, a batch of chunks at a time.

Nobody pushes: a member fetches what it needs (`bulk.py`), so no peer can fill its memory. When a peer dies, freezes,
sends what cannot be decoded or is too slow, whoever needs its part raises PartsMissing with its name, and nothing was
changed: the residuals of the attempt are pending until `commit`. A peer that shows no sign of life is given up within
a part of a reduction's usual time, whatever it is waited for (`silence_allowed`). Where it lives, owners give up on
members first, after `within` seconds, and members on owners after twice that, those between them in between, so that
the first complaint names the one that held all up. In chunks whose values cannot be encoded, because they and the
residual overflow, the values count as zeros and the residual ends.

What was offered stays until the next attempt of the round, and that of a decided round until the next one is decided.
Wire, per parameter and member: 2 (N−1)/N times the codec's bytes, in a full grid too. Memory: beside values, mean and
residuals, the encoded vector and the encoded means twice, for two rounds, and what arrived, for one; all is used again.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.messages import Part, PartsMissing, RoundRoster, Seat
from swarmnode.protocols.methods.known.partition import (
    BATCH,
    CHUNK,
    BufferPool,
    Chunks,
    ChunkStream,
    Column,
    Grid,
    grid_of,
)
from swarmnode.protocols.methods.known.reduction import (
    Name,
    Reducer,
    Summing,
    all_or_missing,
    blaming,
    encoded,
    next_batch,
    pass_on,
    shares_in,
)
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

NAME = 16  # bytes of the name of an encoding: random, so that nothing else has it
# Times the seconds allowed, that others are waited for: for their values, for sums of groups, for means within a column
# and for those of a whole one. So whoever waits for somebody who waits gives up after that one did.
PATIENCE = {"sent": 1.0, "sum": 4 / 3, "part": 5 / 3, "mean": 2.0}


@dataclass(frozen=True)
class ReduceAttempt:
    """One reduction under way, and what it leaves to the next one at the same round: the values that stand encoded, and
    those of others that have arrived."""

    roster: RoundRoster
    grid: Grid
    number: int  # of this node's group
    shares: dict[PeerId, np.float32]  # of those whose values count, in the roster's order
    values: Vector
    sent: tuple[ChunkStream, ...]  # this node's values, encoded, one a column; none where it has no weight
    taken: dict[PeerId, ChunkStream]  # others' values of this node's column, one for each of its group who works
    began: float  # trio time
    allowed: float  # seconds for each member's values to reach their owners, and again for the means to come back
    silence: float | None  # seconds without a sign of life

    @property
    def group(self) -> tuple[Seat, ...]:
        return self.grid.groups[self.number]

    def leads_to(self, later: RoundRoster, grid: Grid) -> bool:
        """Whether an attempt by `later` may take up what this one leaves: of the same round, and all in one group."""
        same = (self.roster.round, self.roster.parent) == (later.round, later.parent)
        return same and len(self.grid.groups) == len(grid.groups) == 1


class AllReduce(Reducer):
    """One node's all-reduces in one run, with the three residuals that live across rounds.

    Encoding, decoding and each of the two sums may run at the same time, each in one thread.
    """

    def __init__(self, parts: Context, parameters: int | None = None) -> None:
        super().__init__(parts, parameters)
        self._sums = Summing(self._codec, self._parameters)  # of a group's values
        self._means = Summing(self._codec, self._parameters)  # of all values, or of the sums of groups
        self._residuals += [self._sums.residual, self._means.residual]
        self._before: ReduceAttempt | None = None  # the last at the round at hand: what it left the next may use
        self._lent: dict[str, list[memoryview]] = {}  # by roster id, what is offered
        self._pool = BufferPool()
        self._mean = np.empty(0, np.float32)

    async def reduce(
        self, roster: RoundRoster, values: Vector, *, within: float = math.inf, silence: float | None = None
    ) -> Vector:
        """The weighted mean of all seats' `values`, float32 (P,): bit-identical on every seat that gets it.

        It is valid until the next call, which writes over it. `values` stay as they are until the round is decided:
        what was encoded of them may be used again. `within`: seconds for each member's values to reach their owners,
        and again for the means to come back. Raises PartsMissing.
        """
        self._withdraw(old for old in self._offered if old.round >= roster.round)
        self.rates = {p: rate for p, rate in self.rates.items() if p in roster.peers}
        if not any(seat.weight for seat in roster.seats):
            self.rollback()
            self._pending = roster.roster_id
            return np.zeros(self._parameters, np.float32)  # nobody trained: nothing to send, nothing moves
        attempt = self._begin(roster, values, within, silence)
        async with all_or_missing() as nursery:
            if attempt.sent:
                nursery.start_soon(self._encode, attempt)
            for index, column in enumerate(attempt.grid.columns):
                if column.owners[attempt.number] != self._me:
                    nursery.start_soon(self._gather, attempt, index, column)
                else:
                    self._own_column(attempt, index, column, nursery)
        return self._mean

    def _begin(self, roster: RoundRoster, values: Vector, within: float, silence: float | None) -> ReduceAttempt:
        """Take up what an earlier attempt left, and offer what is going to be encoded."""
        exchange = self._parts.spec.exchange
        grid = grid_of(roster, self._parameters, exchange.group_size)
        number = grid.group_of(self._me)
        kept, arrived = self._left_for(roster, grid, values)
        self._pending = roster.roster_id
        self._offered.append(roster)
        shares = shares_in(roster)
        if self._mean.size != self._parameters:
            self._mean = np.empty(self._parameters, np.float32)
        owners = {column.owners[number]: Chunks(column.parts, self._codec) for column in grid.columns}
        sent, taken = [], {}
        if self._me in shares:
            name = secrets.token_bytes(NAME)
            for owner, chunks in owners.items():
                stream = kept.pop(owner, None)
                sent.append(stream.encoded_on(chunks, self._pool) if stream else self._stream(chunks, name))
        for stream in sent:
            stream.encoded_from(kept.values())
        if self._me in owners:
            chunks = owners[self._me]
            for peer in (seat.peer for seat in grid.groups[number] if seat.peer in shares and seat.peer != self._me):
                stream = arrived.pop(peer, None)
                taken[peer] = stream.fetched_on(chunks, self._pool) if stream else self._stream(chunks)
        self._give(*kept.values(), *arrived.values())
        allowed = min(exchange.deadline_ceiling, within)
        self._before = attempt = ReduceAttempt(
            roster, grid, number, shares, values, tuple(sent), taken, trio.current_time(), allowed, silence
        )
        for index, (owner, stream) in enumerate(zip(owners, sent, strict=False)):
            self._offer(roster, ("sent", index), stream, (owner,))
        return attempt

    def _left_for(
        self, roster: RoundRoster, grid: Grid, values: Vector
    ) -> tuple[dict[PeerId, ChunkStream], dict[PeerId, ChunkStream]]:
        """What goes on in an attempt by `roster`, read by nobody now: own values by owner, others' by sender."""
        before = self._before
        if before is None or not before.leads_to(roster, grid):
            self.rollback()
            return {}, {}
        self._before = None
        for summing in (self._sums, self._means):
            summing.residual.rollback()
        kept = {column.owners[0]: stream for column, stream in zip(before.grid.columns, before.sent, strict=False)}
        if before.values is not values or before.roster.cutters != roster.cutters or not roster.weight_of(self._me):
            self.sent.rollback()
            self._give(*kept.values())
            kept = {}
        return kept, dict(before.taken)

    # -- this node's values

    async def _encode(self, attempt: ReduceAttempt) -> None:
        """Encode the columns side by side, so that all owners have something to reduce from the start."""
        columns = attempt.grid.columns
        mine = next((i for i, column in enumerate(columns) if column.owners[attempt.number] == self._me), 0)
        order = [(mine + 1 + i) % len(columns) for i in range(len(columns))]
        lost = 0

        def encode(stream: ChunkStream, batch: range) -> int:
            """How many chunks could not be encoded and are sent as zeros."""
            failed = 0
            for chunk in batch:
                place = stream.chunks.elements(chunk)
                failed += not encoded(self.sent, place, attempt.values[place], stream.raw(chunk))
            return failed

        while any(stream.ready < stream.size for stream in attempt.sent):
            for stream in (attempt.sent[i] for i in order):
                batch = range(stream.done, min(stream.done + BATCH, stream.chunks.count))
                if batch:
                    lost += await self._parts.runner(partial(encode, stream, batch))
                    stream.grow_to(batch.stop)
        if lost:
            logger.error("round %d: %d chunks of this node's work cannot be sent", attempt.roster.round, lost)

    # -- my column

    def _own_column(self, attempt: ReduceAttempt, index: int, column: Column, nursery: trio.Nursery) -> None:
        """Add my group's values up for the owners of the parts; take the mean of my part; pass all means on.

        Where all are one group, the column is my part alone.
        """
        roster = attempt.roster
        means = self._lend(roster, column.parts)
        self._offer(roster, ("mean", index), means, [seat.peer for seat in attempt.group])
        if len(attempt.grid.groups) == 1:
            self._means.own(column.parts)
            nursery.start_soon(self._take_in, attempt, index, [means], self._means, self._mean)
            return
        sums: list[ChunkStream] = []
        if any(seat.weight for seat in attempt.group):
            sums = [self._lend(roster, (part,)) for part in column.parts]
            for number, (part, stream) in enumerate(zip(column.parts, sums, strict=True)):
                self._offer(roster, ("sum", index, number), stream, (part.owner,))
            self._sums.own(column.parts)
            nursery.start_soon(self._take_in, attempt, index, sums, self._sums, None)
        checked: list[ChunkStream] = []  # of each part, what can be decoded
        at = 0
        for number, part in enumerate(column.parts):
            chunks = Chunks((part,), self._codec)
            piece = ChunkStream(chunks, means.buffer[at : at + chunks.size])
            at += chunks.size
            checked.append(piece)
            if part.owner == self._me:
                self._offer(roster, ("part", index, number), piece, column.owners)
                self._means.own([part])
                own = sums[number] if sums else None
                nursery.start_soon(self._take_sums, attempt, ("sum", index, number), column, own, piece)
            else:
                arriving = ChunkStream(chunks, piece.buffer)
                nursery.start_soon(self._take_mean, attempt, part.owner, ("part", index, number), arriving, piece)
        nursery.start_soon(pass_on, checked, means, BATCH * self._codec.encoded_size(CHUNK))

    async def _take_in(
        self, attempt: ReduceAttempt, index: int, outs: Sequence[ChunkStream], summing: Summing, into: Vector | None
    ) -> None:
        """Fetch my group's values of a column, and add them up in `outs`, which follow one another."""
        working = [seat.peer for seat in attempt.group if seat.peer in attempt.shares]
        streams = {peer: attempt.taken[peer] if peer != self._me else attempt.sent[index] for peer in working}
        shares = [attempt.shares[peer] for peer in working]

        async def add_up() -> None:
            first = 0
            for out in outs:
                await self._add_up(attempt, summing, streams, shares, out, into, first)
                first += out.chunks.count

        async with all_or_missing() as nursery:
            for peer, stream in attempt.taken.items():
                nursery.start_soon(self._take, attempt, peer, ("sent", index), stream)
            nursery.start_soon(add_up)

    async def _take_sums(
        self, attempt: ReduceAttempt, name: Name, column: Column, own: ChunkStream | None, out: ChunkStream
    ) -> None:
        """Fetch the other groups' sums of my part, `own` beside them; their sum is the mean."""
        groups = zip(column.owners, attempt.grid.groups, strict=True)
        working = [owner for owner, seats in groups if any(seat.weight for seat in seats)]
        others = [owner for owner in working if owner != self._me]
        with self._borrow(out.chunks, len(others)) as borrowed:
            fetched = dict(zip(others, borrowed, strict=True))
            sums = {owner: stream for owner in working if (stream := fetched.get(owner, own)) is not None}
            whole = [np.float32(1)] * len(sums)
            async with all_or_missing() as nursery:
                for owner, stream in fetched.items():
                    nursery.start_soon(self._take, attempt, owner, name, stream)
                nursery.start_soon(self._add_up, attempt, self._means, sums, whole, out, self._mean, 0)

    async def _add_up(
        self,
        attempt: ReduceAttempt,
        summing: Summing,
        streams: Mapping[PeerId, ChunkStream],
        shares: Sequence[np.float32],
        out: ChunkStream,
        into: Vector | None,
        first: int,
    ) -> None:
        """Add up each of the chunks that all have sent; `out` begins with the chunk that is their `first`."""
        done, lost = first, 0
        while done < first + out.chunks.count:
            batch = await next_batch(streams.values(), done, first + out.chunks.count)
            lost += await self._parts.runner(partial(summing.sum, batch, streams, shares, out, into, first))
            done = batch.stop
            out.grow_to(done - first)
        if lost:
            logger.error("round %d: the mean of %d chunks moves nothing", attempt.roster.round, lost)

    # -- the others' means

    async def _gather(self, attempt: ReduceAttempt, index: int, column: Column) -> None:
        """Fetch the means of a column from its owner in my group, and keep each chunk as it comes."""
        with self._borrow(Chunks(column.parts, self._codec), 1) as (arriving,):
            await self._take_mean(attempt, column.owners[attempt.number], ("mean", index), arriving, None)

    async def _take_mean(
        self, attempt: ReduceAttempt, owner: PeerId, name: Name, arriving: ChunkStream, checked: ChunkStream | None
    ) -> None:
        """Fetch means from their owner; `checked`, if any, grows by what could be decoded."""

        def decode(batch: range) -> None:
            for chunk in batch:
                place = arriving.chunks.elements(chunk)
                self._codec.decode(arriving.raw(chunk), place.stop - place.start, self._mean[place])

        async with all_or_missing() as nursery:
            nursery.start_soon(self._take, attempt, owner, name, arriving)
            done = 0
            while done < arriving.chunks.count:
                batch = await next_batch([arriving], done, arriving.chunks.count)
                with blaming(owner):
                    await self._parts.runner(partial(decode, batch))
                done = batch.stop
                if checked is not None:
                    checked.grow_to(done)

    async def _take(self, attempt: ReduceAttempt, peer: PeerId, name: Name, into: ChunkStream) -> None:
        """Fetch what a peer offers. Raises PartsMissing. The rate of values is that of the peer's link; that of means
        tells about the slowest member."""
        kind = str(name[0])
        until = attempt.began + PATIENCE[kind] * attempt.allowed
        _, rate = await self._fetch(
            attempt.roster, peer, name, until, max_size=into.size, into=into, silence=attempt.silence
        )
        if into.ready < into.size:
            raise PartsMissing((peer,))
        if kind == "sent" and rate is not None:
            self.rates[peer] = rate

    # -- how it ended

    def commit(self, roster: RoundRoster) -> bool:
        counts = super().commit(roster)
        self._pool.next_round()
        return counts

    def rollback(self) -> None:
        """As in `Reducer`; no later attempt goes on from this one, and what it offers stands."""
        super().rollback()
        before, self._before = self._before, None
        if before is None:
            return
        self._give(*before.taken.values())
        if before.roster in self._offered:
            self._lent.setdefault(before.roster.roster_id, []).extend(stream.buffer for stream in before.sent)
        else:
            self._give(*before.sent)

    def _withdraw(self, rosters: Iterable[RoundRoster]) -> None:
        for old in list(rosters):
            super()._withdraw([old])
            for memory in self._lent.pop(old.roster_id, []):
                self._pool.give(memory)

    # -- memory

    def _stream(self, chunks: Chunks, name: bytes = b"") -> ChunkStream:
        return ChunkStream(chunks, self._pool.take(chunks.size), name=name)

    def _lend(self, roster: RoundRoster, parts: tuple[Part, ...]) -> ChunkStream:
        """Memory that is offered until the offers of `roster` are withdrawn."""
        stream = self._stream(Chunks(parts, self._codec))
        self._lent.setdefault(roster.roster_id, []).append(stream.buffer)
        return stream

    def _give(self, *streams: ChunkStream) -> None:
        for stream in streams:
            self._pool.give(stream.buffer)

    @contextmanager
    def _borrow(self, chunks: Chunks, count: int) -> Iterator[list[ChunkStream]]:
        taken = [self._stream(chunks) for _ in range(count)]
        try:
            yield taken
        finally:
            self._give(*taken)
