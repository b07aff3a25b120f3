"""Butterfly all-reduce: every owner reduces one part of the vector and hands the same bytes of it to everybody.

Order, for a roster that fits into one group (`partition.py`):

1. each member encodes its values part by part, error feedback added, and offers each part to its owner;
2. each owner fetches its part from all seats, decodes, takes the weighted mean in the roster's order, encodes the mean
   *once* (with a residual of its own, dropped when ownership moves) and offers it to all seats;
3. each member fetches all reduced parts and decodes them: all hold the same bytes, so all compute the same state.

In a grid of several groups the owner of a column adds up, in step 2, the weighted values of its group alone, encodes
these sums (with one more residual) and offers them to the owners of the column's parts; the owner of a part adds up
the sums of all groups, in their order, encodes the mean once and offers it to the others; each passes the bytes of the
whole column on to its group. So the mean is that of all, and the same bits for all, however many groups there are.

All of it goes on at once, chunk by chunk (`partition.py`): what is offered and fetched grows (`StreamingBuffer`): a
chunk is on its way while the next is encoded, reduced while the next arrives, and its mean offered while the next is
reduced. The arithmetic (`reduction.py`) runs in the runner's threads, where numpy lets the others go on, a batch of
chunks at a time.

Nobody pushes: a member fetches what it needs (`bulk.py`), so no peer can fill its memory. When a peer dies, freezes,
sends what cannot be decoded or is too slow, whoever needs its part raises PartsMissing with its name, and nothing was
changed: the residuals of the attempt are pending until `commit`. A peer that shows no sign of life is given up within
a part of a reduction's usual time, whatever it is waited for (`silence_allowed`). Where it lives, owners give up on
members first, after `within` seconds, and members on owners after twice that, those between them in between, so that
the first complaint names the one that held all up. In chunks whose values cannot be encoded, because they and the
residual overflow, the values count as zeros and the residual ends.

Where all are one group, the next attempt at the round goes on from what is there: whoever owned a part keeps it
(`partition.py`), with what the others sent of it, and what was encoded stands (`ChunkStream`). Only the sums and means
are made anew, and the parts of those who are gone.

What was offered stays until the next attempt of the round, and that of a decided round until the next one is decided.
Wire, per parameter and member: 2 (N−1)/N times the codec's bytes, in a full grid too. Memory: beside values, mean and
residuals, the encoded vector and the encoded means twice, for two rounds, and what arrived, for one; all of it is used
again.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import trio

from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.methods.known.messages import Part, PartsMissing, RoundRoster, Seat
from swarmnode.protocols.methods.known.partition import BATCH, CHUNK, BufferPool, Chunks, Column, Grid, grid_of
from swarmnode.protocols.methods.known.reduction import (
    Arrivals,
    Reduction,
    Summing,
    Undecodable,
    Vector,
    all_or_missing,
    next_batch,
    pass_on,
    silence_allowed,
)
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk import Bulk, Key
from swarmnode.protocols.transfer.bulk_client import StreamingBuffer
from swarmnode.training.codecs import CodecError, codec
from swarmnode.training.outer import shares_of
from swarmnode.training.runspec import ExchangeSection


@dataclass(frozen=True)
class ChunkStream:
    """Encoded chunks on their way from a member to an owner, at one end of it."""

    chunks: Chunks
    growing: StreamingBuffer

    @classmethod
    def new(cls, chunks: Chunks, pool: BufferPool, name: bytes = b"") -> ChunkStream:
        """One that begins, in memory of `pool`."""
        return cls(chunks, StreamingBuffer(pool.take(chunks.size), name=name))

    def encoded_on(self, chunks: Chunks, pool: BufferPool) -> ChunkStream:
        """At the sender: with these chunks to be encoded, less those that are already. It takes this one's memory."""
        done = self.chunks.bytes_until(self.chunks.whole_in(self.growing.ready))
        memory, kept = self._in_hand(chunks, pool, done)
        stream = ChunkStream(chunks, StreamingBuffer(memory, name=self.growing.name))
        stream.growing.grow(kept)
        return stream

    def encoded_from(self, others: Iterable[ChunkStream]) -> None:
        """At the sender: take chunks that come next from those encoded for others, as far as they are there."""
        there = {
            (place.start, place.stop): stream.chunks.raw(chunk, stream.growing.buffer)
            for stream in others
            for chunk in range(stream.chunks.whole_in(stream.growing.ready))
            for place in (stream.chunks.elements(chunk),)
        }
        for chunk in range(self.chunks.whole_in(self.growing.ready), self.chunks.count):
            place = self.chunks.elements(chunk)
            if (place.start, place.stop) not in there:
                break
            self.chunks.raw(chunk, self.growing.buffer)[:] = there[place.start, place.stop]
            self.growing.grow(self.chunks.bytes_until(chunk + 1))

    def fetched_on(self, chunks: Chunks, pool: BufferPool) -> ChunkStream:
        """At the owner: with these chunks to be fetched, less what came. It takes this one's memory."""
        came = max(self.growing.ready, self.growing.kept) if self.growing.name else 0
        memory, kept = self._in_hand(chunks, pool, came)
        return ChunkStream(chunks, StreamingBuffer(memory, name=self.growing.name, kept=kept))

    def _in_hand(self, chunks: Chunks, pool: BufferPool, good: int) -> tuple[memoryview, int]:
        kept = min(good, self.chunks.begins_like(chunks))
        return pool.enlarge(self.growing.buffer, chunks.size, used=kept), kept


@dataclass(frozen=True)
class ReduceAttempt:
    """One reduction under way, and what it leaves to the next one at the same round. Times are trio's, by which to give
    up on peers that live.

    Left are the values that stand encoded, and those of others that have arrived: streams of chunks from a member to an
    owner. Where the next attempt asks for the same chunks first, a stream goes on where it ended, in the same memory;
    its name sees to it that a receiver goes on only with what it began with.
    """

    roster: RoundRoster
    grid: Grid
    group: tuple[Seat, ...]  # this node's
    shares: dict[PeerId, np.float32]  # of those whose values count, in the roster's order
    values: Vector
    mean: Vector
    sent: tuple[ChunkStream, ...]  # this node's values, encoded, one a column; none where it has no weight
    taken: dict[PeerId, ChunkStream]  # others' values of this node's column, one for each of its group who works
    sent_by: float
    sums_by: float
    parts_by: float
    means_by: float

    def owner(self, column: Column) -> PeerId:
        """Who takes in a column for this node's group."""
        return column.owners[self.grid.groups.index(self.group)]

    def leads_to(self, later: RoundRoster, grid: Grid) -> bool:
        """Whether an attempt by `later` may take up what this one leaves: of the same round, and all in one group."""
        same = (self.roster.round, self.roster.parent) == (later.round, later.parent)
        return same and len(self.grid.groups) == len(grid.groups) == 1

    def is_cut_as(self, later: RoundRoster) -> bool:
        """Whether the vector lies in the same chunks in both, whoever they go to."""
        return self.roster.cutters == later.cutters


logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]

NAME = 16  # bytes of the name of an encoding: random, so that nothing else has it


class AllReduce:
    """One node's all-reduces in one run, with the two residuals that live across rounds."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        bulk: Bulk,
        liveness: Liveness,
        runner: Runner,
        exchange: ExchangeSection,
        parameters: int,
    ) -> None:
        """By the run's codec, group size and deadlines: a part of a peer that keeps answering pings is waited for until
        the ceiling of these."""
        self._me = me
        self._run_id = run_id
        self._bulk = bulk
        self._liveness = liveness
        self._runner = runner
        self._codec = codec(exchange.codec)
        self._parameters = parameters
        self._group_size = exchange.group_size
        self._patience = exchange.deadline_ceiling
        self._pace = AdaptiveDeadline(floor=0.0, ceiling=self._patience)  # of reductions that succeeded
        self._silence: float | None = None  # seconds without a sign of life in the attempt at hand
        self._failed: list[int] = []  # the round at hand, once for each attempt at it that failed
        self._reduction = Reduction(self._codec, parameters)
        self.sent = self._reduction.sent  # the residual of this node's own work
        self._attempt: str | None = None  # roster id of what is pending
        self._before: ReduceAttempt | None = None  # the last at the round at hand: what it left the next may use
        self._offered: list[RoundRoster] = []  # attempts whose offers stand
        self._lent: dict[str, list[memoryview]] = {}  # by roster id, what is offered
        self._pool = BufferPool()
        self._mean = np.empty(0, np.float32)
        self.rates: dict[PeerId, float] = {}  # bytes per second measured when fetching from each peer

    async def reduce(self, roster: RoundRoster, values: Vector, *, within: float | None = None) -> Vector:
        """The weighted mean of all seats' `values`, float32 (P,): bit-identical on every seat that gets it.

        It is valid until the next call, which writes over it. `values` stay as they are until the round is decided:
        what was encoded of them may be used again. `within`: seconds for each member's values to reach their owners,
        and again for the means to come back. Raises PartsMissing. Until `commit(roster)`, the attempt has left no trace
        but offers to others.
        """
        self._withdraw(lambda old: old.round >= roster.round)
        self.rates = {p: rate for p, rate in self.rates.items() if p in roster.peers}
        if not any(seat.weight for seat in roster.seats):
            self.rollback()
            self._attempt = roster.roster_id
            return np.zeros(self._parameters, np.float32)  # nobody trained: nothing to send, nothing moves
        attempt = self._begin(roster, values, min(self._patience, within if within is not None else self._patience))
        began = trio.current_time()
        self._failed = [round for round in self._failed if round == roster.round]
        self._silence = silence_allowed(self._pace.usual, len(self._failed))
        self._failed.append(roster.round)
        async with all_or_missing() as start:
            for work in self._work_of(attempt):
                start(work)
        self._failed.pop()
        if not roster.cut_by:  # what goes on from an earlier attempt takes less than is usual
            self._pace.observe(trio.current_time() - began)
        return attempt.mean

    def _begin(self, roster: RoundRoster, values: Vector, allowed: float) -> ReduceAttempt:
        """Take up what an earlier attempt left, and offer what is going to be encoded."""
        now = trio.current_time()
        grid = grid_of(roster, self._parameters, self._group_size)
        group = grid.groups[grid.group_of(self._me)]
        encoded, arrived = self._left_for(roster, grid, values)
        self._attempt = roster.roster_id
        self._offered.append(roster)
        working = [seat for seat in roster.seats if seat.weight > 0]
        shares = dict(zip((seat.peer for seat in working), shares_of([seat.weight for seat in working]), strict=True))
        if self._mean.size != self._parameters:
            self._mean = np.empty(self._parameters, np.float32)
        owners = {column.owners[grid.groups.index(group)]: self._chunks(column) for column in grid.columns}
        sent, taken = [], {}
        if self._me in shares:
            name = secrets.token_bytes(NAME)
            for owner, chunks in owners.items():
                stream = encoded.pop(owner, None)
                sent.append(
                    stream.encoded_on(chunks, self._pool) if stream else ChunkStream.new(chunks, self._pool, name)
                )
        for stream in sent:
            stream.encoded_from(encoded.values())
        if self._me in owners:
            chunks = owners[self._me]
            for peer in (seat.peer for seat in group if seat.peer in shares and seat.peer != self._me):
                stream = arrived.pop(peer, None)
                taken[peer] = stream.fetched_on(chunks, self._pool) if stream else ChunkStream.new(chunks, self._pool)
        self._give(*encoded.values(), *arrived.values())
        by = (now + allowed * factor for factor in (1, 4 / 3, 5 / 3, 2))
        self._before = attempt = ReduceAttempt(roster, grid, group, shares, values, self._mean, tuple(sent), taken, *by)
        for index, (owner, stream) in enumerate(zip(owners, sent, strict=False)):
            self._offer(attempt, ("sent", index), stream.growing, (owner,))
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
        encoded = {column.owners[0]: stream for column, stream in zip(before.grid.columns, before.sent, strict=False)}
        stands = before.values is values and before.is_cut_as(roster) and self._weight_in(roster) > 0
        self._reduction.rollback(also_sent=not stands)
        if not stands:
            self._give(*encoded.values())
            encoded = {}
        return encoded, dict(before.taken)

    def _work_of(self, attempt: ReduceAttempt) -> Iterator[Work]:
        """What has to be done at once."""
        if attempt.sent:
            yield partial(self._encode, attempt)
        for index, column in enumerate(attempt.grid.columns):
            owner = attempt.owner(column)
            if owner != self._me:
                yield partial(self._gather, attempt, index, owner, self._chunks(column))
            elif len(attempt.grid.groups) == 1:
                yield from self._own_part(attempt, index, column)
            else:
                yield from self._own_column(attempt, index, column)

    # -- this node's values

    async def _encode(self, attempt: ReduceAttempt) -> None:
        """Encode the columns side by side, so that all owners have something to reduce from the start."""
        columns = attempt.grid.columns
        mine = next((i for i, column in enumerate(columns) if attempt.owner(column) == self._me), 0)
        order = [(mine + 1 + i) % len(columns) for i in range(len(columns))]
        lost = 0
        while any(stream.growing.ready < stream.chunks.size for stream in attempt.sent):
            for chunks, growing in ((attempt.sent[i].chunks, attempt.sent[i].growing) for i in order):
                done = chunks.whole_in(growing.ready)
                batch = range(done, min(done + BATCH, chunks.count))
                if batch:
                    lost += await self._runner(
                        partial(self._reduction.encode, chunks, batch, attempt.values, growing.buffer)
                    )
                    growing.grow(chunks.bytes_until(batch.stop))
        if lost:
            logger.error("round %d: %d chunks of this node's work cannot be sent", attempt.roster.round, lost)

    # -- my part, where all are one group

    def _own_part(self, attempt: ReduceAttempt, index: int, column: Column) -> Iterator[Work]:
        """Take the mean of everybody's values of my part, and hand it out."""
        chunks = self._chunks(column)
        means = self._lend(attempt.roster, chunks.size)
        self._offer(attempt, ("mean", index), means, attempt.roster.peers)
        self._reduction.means.own(*column.stretches)
        yield partial(self._take_in, attempt, index, [(chunks, means)], self._reduction.means, attempt.mean)

    # -- my column, where there are several

    def _own_column(self, attempt: ReduceAttempt, index: int, column: Column) -> Iterator[Work]:
        """Add my group's values up for the owners of the parts; take the mean of my part; pass all means on."""
        means = self._lend(attempt.roster, self._chunks(column).size)
        self._offer(attempt, ("mean", index), means, [seat.peer for seat in attempt.group])
        offsets = (0, *accumulate(self._chunks(part).size for part in column.parts))
        pieces = [StreamingBuffer(means.buffer[a:b]) for a, b in pairwise(offsets)]
        sums: list[StreamingBuffer] = []
        if any(seat.weight for seat in attempt.group):
            sums = [self._lend(attempt.roster, piece.size) for piece in pieces]
            for number, (part, growing) in enumerate(zip(column.parts, sums, strict=True)):
                self._offer(attempt, ("sum", index, number), growing, (part.owner,))
            self._reduction.sums.own(*column.stretches)
            outs = [(self._chunks(part), growing) for part, growing in zip(column.parts, sums, strict=True)]
            yield partial(self._take_in, attempt, index, outs, self._reduction.sums, None)
        checked: list[StreamingBuffer] = []
        for number, (part, piece) in enumerate(zip(column.parts, pieces, strict=True)):
            key = ("part", index, number)
            if part.owner == self._me:
                self._offer(attempt, key, piece, column.owners)
                self._reduction.means.own((part.start, part.stop))
                own = sums[number] if sums else None
                yield partial(self._take_sums, attempt, (index, number), column, part, own, piece)
                checked.append(piece)
            else:
                checked.append(StreamingBuffer(piece.buffer))
                yield partial(self._take_mean, attempt, key, part, piece, checked[-1])
        yield partial(pass_on, checked, means, step=BATCH * self._codec.encoded_size(CHUNK))

    async def _take_in(
        self,
        attempt: ReduceAttempt,
        index: int,
        outs: Sequence[tuple[Chunks, StreamingBuffer]],
        summing: Summing,
        into: Vector | None,
    ) -> None:
        """Fetch my group's values of a column, and add them up in `outs`, which follow one another."""
        working = [seat.peer for seat in attempt.group if seat.peer in attempt.shares]
        streams = {peer: attempt.taken[peer] if peer != self._me else attempt.sent[index] for peer in working}
        arriving = {peer: stream.growing for peer, stream in streams.items()}

        async def add_up() -> None:
            shares, at = [attempt.shares[peer] for peer in working], 0
            for chunks, out in outs:
                await self._add_up(attempt.roster, summing, chunks, arriving, shares, out, into, at)
                at += out.size

        async with all_or_missing() as start:
            key = self._key(attempt.roster, "sent", index)
            for peer, stream in attempt.taken.items():
                start(partial(self._fetch, peer, key, stream.growing, attempt.sent_by, measured=True))
            start(add_up)

    async def _take_sums(
        self,
        attempt: ReduceAttempt,
        place: tuple[int, int],
        column: Column,
        part: Part,
        own: StreamingBuffer | None,
        out: StreamingBuffer,
    ) -> None:
        """Fetch the other groups' sums of my part, `own` beside them; their sum is the mean."""
        groups = zip(column.owners, attempt.grid.groups, strict=True)
        working = [owner for owner, seats in groups if any(seat.weight for seat in seats)]
        others = [owner for owner in working if owner != self._me]
        with self._borrow(out.size, len(others)) as borrowed:
            fetched = dict(zip(others, borrowed, strict=True))
            sums = {owner: growing for owner in working if (growing := fetched.get(owner, own)) is not None}
            async with all_or_missing() as start:
                key = self._key(attempt.roster, "sum", *place)
                for owner, growing in fetched.items():
                    start(partial(self._fetch, owner, key, growing, attempt.sums_by))
                whole = [np.float32(1)] * len(sums)
                means = self._reduction.means
                chunks = self._chunks(part)
                start(partial(self._add_up, attempt.roster, means, chunks, sums, whole, out, attempt.mean, 0))

    async def _take_mean(
        self,
        attempt: ReduceAttempt,
        key: tuple[str, int, int],
        part: Part,
        piece: StreamingBuffer,
        checked: StreamingBuffer,
    ) -> None:
        """Fetch another owner's part of my column; what could be decoded is `checked`."""
        async with all_or_missing() as start:
            start(partial(self._fetch, part.owner, self._key(attempt.roster, *key), piece, attempt.parts_by))
            start(partial(self._decode, attempt, self._chunks(part), part.owner, piece, checked))

    async def _add_up(
        self,
        roster: RoundRoster,
        summing: Summing,
        chunks: Chunks,
        arriving: Mapping[PeerId, StreamingBuffer],
        shares: Sequence[np.float32],
        out: StreamingBuffer,
        into: Vector | None,
        at: int,
    ) -> None:
        """Add up each of the chunks that all have sent; they begin `at` bytes into what arrives."""
        sources = list(arriving.values())
        raw = [growing.buffer[at : at + chunks.size] for growing in sources]
        done = lost = 0
        while done < chunks.count:
            batch = await next_batch(chunks, done, sources, at=at)
            try:
                lost += await self._runner(partial(summing.sum, chunks, batch, raw, shares, out.buffer, into))
            except Undecodable as error:
                raise PartsMissing((list(arriving)[error.index],)) from error
            done = batch.stop
            out.grow(chunks.bytes_until(done))
        if lost:
            logger.error("round %d: the mean of %d chunks moves nothing", roster.round, lost)

    # -- the others' means

    async def _gather(self, attempt: ReduceAttempt, index: int, owner: PeerId, chunks: Chunks) -> None:
        """Fetch the means of a column from its owner in my group, and keep each chunk as it comes."""
        with self._borrow(chunks.size, 1) as (arriving,):
            async with all_or_missing() as start:
                key = self._key(attempt.roster, "mean", index)
                start(partial(self._fetch, owner, key, arriving, attempt.means_by))
                start(partial(self._decode, attempt, chunks, owner, arriving, None))

    async def _decode(
        self,
        attempt: ReduceAttempt,
        chunks: Chunks,
        sender: PeerId,
        arriving: StreamingBuffer,
        checked: StreamingBuffer | None,
    ) -> None:
        done = 0
        while done < chunks.count:
            batch = await next_batch(chunks, done, [arriving])
            try:
                await self._runner(partial(self._reduction.decode, chunks, batch, arriving.buffer, attempt.mean))
            except CodecError as error:
                raise PartsMissing((sender,)) from error
            done = batch.stop
            if checked is not None:
                checked.grow(chunks.bytes_until(done))

    async def _fetch(
        self, peer: PeerId, key: Key, into: StreamingBuffer, until: float, *, measured: bool = False
    ) -> None:
        """Fetch the part under `key`, by `until` (trio time). Raises PartsMissing.

        A peer may wait for others for as long as it lives; one that shows no sign of life is given up soon. `measured`:
        the rate is that of the peer's link; that of means tells about the slowest member.
        """
        arrivals = Arrivals(into.size)
        wait = max(0.0, until - trio.current_time())

        def moving(done: int) -> None:
            arrivals.moving(done)
            self._liveness.heard_from(peer)

        async def fetch() -> None:
            await self._bulk.fetch(peer, key, into=into, max_size=into.size, wait=wait, stall=math.inf, progress=moving)

        failure: Exception | None = None
        with trio.move_on_at(until):
            try:
                await self._liveness.unless_gone(peer, fetch, within=self._silence)
            except (NetworkError, PeerGoneSilent) as error:
                failure = error
        if failure is not None or into.ready < into.size:
            raise PartsMissing((peer,)) from failure
        rate = arrivals.rate()
        if measured and rate is not None:
            self.rates[peer] = rate

    # -- how it ended

    def commit(self, roster: RoundRoster) -> bool:
        """The round of `roster` was decided: keep what its encodings left out.

        False where this node's values are not in that result: its weight was 0, or its attempt was another one.
        """
        reduced = self._attempt == roster.roster_id
        if reduced:
            self._reduction.commit()
            self._let_go()
        else:
            self.rollback()
        self._attempt = None
        self._withdraw(lambda old: old.round != roster.round)
        self._pool.next_round()
        return reduced and self._weight_in(roster) > 0

    def rollback(self) -> None:
        """Forget the pending residuals of an attempt that did not count; no later one goes on from it."""
        self._reduction.rollback()
        self._attempt = None
        self._let_go()

    def _let_go(self) -> None:
        """No attempt goes on from the one before; what it offers stands."""
        before, self._before = self._before, None
        if before is None:
            return
        self._give(*before.taken.values())
        if before.roster in self._offered:
            lent = self._lent.setdefault(before.roster.roster_id, [])
            lent += [stream.growing.buffer for stream in before.sent]
        else:
            self._give(*before.sent)

    def _withdraw(self, which: Callable[[RoundRoster], bool]) -> None:
        for old in [r for r in self._offered if which(r)]:
            self._bulk.withdraw(("parts", self._run_id, old.roster_id))
            self._offered.remove(old)
            for memory in self._lent.pop(old.roster_id, []):
                self._pool.give(memory)

    # -- memory and names

    def _lend(self, roster: RoundRoster, size: int) -> StreamingBuffer:
        """Memory that is offered until the offers of `roster` are withdrawn."""
        memory = self._pool.take(size)
        self._lent.setdefault(roster.roster_id, []).append(memory)
        return StreamingBuffer(memory)

    def _give(self, *streams: ChunkStream) -> None:
        for stream in streams:
            self._pool.give(stream.growing.buffer)

    @contextmanager
    def _borrow(self, size: int, count: int) -> Iterator[list[StreamingBuffer]]:
        """Memory for the block alone."""
        taken = [self._pool.take(size) for _ in range(count)]
        try:
            yield [StreamingBuffer(memory) for memory in taken]
        finally:
            for memory in taken:
                self._pool.give(memory)

    def _chunks(self, part: Part | Column) -> Chunks:
        return Chunks(part.stretches if isinstance(part, Column) else ((part.start, part.stop),), self._codec)

    def _weight_in(self, roster: RoundRoster) -> int:
        return sum(seat.weight for seat in roster.seats if seat.peer == self._me)

    def _offer(
        self, attempt: ReduceAttempt, name: tuple[str | int, ...], growing: StreamingBuffer, to: Iterable[PeerId]
    ) -> None:
        peers = frozenset(to) - {self._me}
        if peers:
            self._bulk.offer(self._key(attempt.roster, *name), growing, to=peers)

    def _key(self, roster: RoundRoster, *name: str | int) -> Key:
        return ("parts", self._run_id, roster.roster_id, *name)
