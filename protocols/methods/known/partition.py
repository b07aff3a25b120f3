"""How the vector is cut: into parts for their owners, parts into chunks for the wire, and seats into groups. Pure.

**Chunks.** A part is encoded chunk by chunk, each on its own, and the encoded chunks follow one another. So a chunk can
be sent while the next is encoded, and reduced while the next arrives; and its 512 KiB stay in a core's cache through
all of that.

**Re-partition.** After an attempt that failed, the next roster says by whom the vector was cut before
(`RoundRoster.cut_by`), and only what belonged to those who are gone is cut anew, among all owners of the new roster:

    before      a a a a a a   b b b b b b   c c c c c c
    without b   a a a a a a   a a a c c c   c c c c c c     a: its own part, and behind it the first half of b's

An owner then has several ranges, its old part first: what was sent to it before is the head of what is sent now
(`Chunks.begins_like`). Old parts are cut between their chunks, so that every chunk is what it was.

**The grid.** Up to `group_size` seats are one group: each owner of a part takes the mean of it from all the others.
More seats make a grid (as Moshpit, 2103.03239, does), but the mean is exact, and one for all (docs/architecture.md):

            column 0   column 1   column 2   others
    group 0    a          d          g          k      a adds up group 0's values of column 0, b those of group 1, …
    group 1    b          e          h
    group 2    c          f          i          j      a, b and c cut column 0 among them and add their sums up

The elements of the vector are cut into columns, and those of a column into parts, one for each of its owners. Columns
are filled in the order of shares and peer ids, so that they stay while membership does, and with them the residuals of
their owners. Which owner of a column is in which group, and where those sit who own nothing, is drawn anew for each
round from its number.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from swarmnode.protocols.methods.known.messages import Owner, Part, RoundRoster, Seat, cut, owners_of
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.bulk import StreamingBuffer
from swarmnode.training.codecs import Codec
from swarmnode.training.codecs.base import STEP

CHUNK = STEP  # elements; the blocks of all codecs divide it
BATCH = 8  # chunks that are worth waking a thread for: about 2 ms of work


@dataclass(frozen=True)
class Chunks:
    """Parts of the vector, one after another, each cut into chunks of CHUNK elements; its last may be shorter."""

    parts: tuple[Part, ...]
    codec: Codec

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The elements of the vector at which each chunk begins and ends."""
        return [
            (first, min(first + CHUNK, part.stop))
            for part in self.parts
            for first in range(part.start, part.stop, CHUNK)
        ]

    @cached_property
    def offsets(self) -> list[int]:
        """The bytes at which encoded chunks begin, and `size`."""
        return [0, *accumulate(self.codec.encoded_size(stop - start) for start, stop in self.places)]

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def size(self) -> int:
        """Bytes of the encoded part."""
        return self.offsets[-1]

    def elements(self, chunk: int) -> slice:
        return slice(*self.places[chunk])

    def begins_like(self, other: Chunks) -> int:
        """How many bytes hold the chunks with which both begin."""
        pairs = enumerate(zip(self.places, other.places, strict=False))
        alike = next((chunk for chunk, (one, two) in pairs if one != two), min(self.count, other.count))
        return self.offsets[alike]


class ChunkStream(StreamingBuffer):
    """Encoded chunks on their way from a member to another, at one end of it: in memory whose head is good.

    What an attempt at a round leaves to the next are such streams. Where the next asks for the same chunks first, a
    stream goes on where it ended, in the same memory; its name sees to it that a receiver goes on only with what it
    began with.
    """

    def __init__(self, chunks: Chunks, memory: memoryview, *, name: bytes = b"", kept: int = 0) -> None:
        super().__init__(memory, name=name, kept=kept)
        self.chunks = chunks

    @property
    def done(self) -> int:
        """How many whole chunks are good."""
        return bisect_right(self.chunks.offsets, self.ready) - 1

    def grow_to(self, chunk: int) -> None:
        """The first `chunk` chunks are good now."""
        self.grow(self.chunks.offsets[chunk])

    def raw(self, chunk: int) -> memoryview:
        return self.buffer[self.chunks.offsets[chunk] : self.chunks.offsets[chunk + 1]]

    def encoded_on(self, chunks: Chunks, pool: BufferPool) -> ChunkStream:
        """At the sender: with these chunks to be encoded, less those that are already. It takes this one's memory."""
        memory, kept = self._in_hand(chunks, pool, self.chunks.offsets[self.done])
        stream = ChunkStream(chunks, memory, name=self.name)
        stream.grow(kept)
        return stream

    def encoded_from(self, others: Iterable[ChunkStream]) -> None:
        """At the sender: take chunks that come next from those encoded for others, as far as they are there."""
        there = {stream.chunks.places[chunk]: stream.raw(chunk) for stream in others for chunk in range(stream.done)}
        for chunk in range(self.done, self.chunks.count):
            if self.chunks.places[chunk] not in there:
                break
            self.raw(chunk)[:] = there[self.chunks.places[chunk]]
            self.grow_to(chunk + 1)

    def fetched_on(self, chunks: Chunks, pool: BufferPool) -> ChunkStream:
        """At the owner: with these chunks to be fetched, less what came. It takes this one's memory."""
        memory, kept = self._in_hand(chunks, pool, max(self.ready, self.kept) if self.name else 0)
        return ChunkStream(chunks, memory, name=self.name, kept=kept)

    def _in_hand(self, chunks: Chunks, pool: BufferPool, good: int) -> tuple[memoryview, int]:
        kept = min(good, self.chunks.begins_like(chunks))
        return pool.enlarge(self.buffer, chunks.size, used=kept), kept


class BufferPool:
    """Memory that is used again: the system takes longer to hand out fresh pages than a codec to fill them.

    It keeps what was used in the last two rounds, and no more.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, NDArray[np.uint8]]] = []  # and the round in which it was last used
        self._round = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes; what is in them is left over from earlier use."""
        fitting = [i for i, (_, memory) in enumerate(self._free) if size <= memory.nbytes <= 4 * size]
        if not fitting:
            # what nobody writes to takes no memory; and parts grow when a round is tried again without somebody
            return np.empty(size + size // 2, np.uint8).data[:size]
        best = min(fitting, key=lambda i: self._free[i][1].nbytes)
        return self._free.pop(best)[1].data[:size]

    def enlarge(self, view: memoryview, size: int, *, used: int) -> memoryview:
        """`size` bytes in place of what `take` handed out, the first `used` of them as they are."""
        memory: NDArray[np.uint8] = view.obj  # type: ignore[assignment]
        if size <= memory.nbytes:
            return memory.data[:size]
        larger = self.take(size)
        larger[:used] = view[:used]
        self.give(view)
        return larger

    def give(self, view: memoryview) -> None:
        """Take back what `take` handed out; nobody reads or writes it any more."""
        self._free.append((self._round, view.obj))  # type: ignore[arg-type]

    def next_round(self) -> None:
        """Let go of what was not needed for a whole round."""
        self._free = [(used, memory) for used, memory in self._free if used >= self._round - 1]
        self._round += 1


def cut_to_keep(before: tuple[Owner, ...], seats: Iterable[Seat]) -> tuple[Owner, ...]:
    """The owners of an earlier attempt by whom to cut again among these seats; none where a new cut is the better one.

    That is where more than half of the owners are gone, or where more than half of those now have come since.
    """
    owners = {owner.peer for owner in owners_of(seats)}
    stay = sum(owner.peer in owners for owner in before)
    return before if 2 * stay >= max(len(before), len(owners)) else ()


def parts_by_owner(roster: RoundRoster, parameters: int) -> tuple[tuple[Part, ...], ...]:
    """What each owner reduces, in the order of their ids: its part, or its old one and a share of what is orphaned.

    The parts of all cover the vector, and there are at the most as many as owners now and before.
    """
    owners = owners_of(roster.seats)
    if not roster.cut_by:
        return tuple((part,) for part in cut(owners, 0, parameters))
    owned: dict[str, list[Part]] = {owner.peer: [] for owner in owners}
    orphaned: list[Part] = []
    for part in cut(sorted(roster.cut_by, key=attrgetter("peer")), 0, parameters):
        owned.get(part.owner, orphaned).append(part)
    chunks = sum(-(-(part.stop - part.start) // CHUNK) for part in orphaned)
    total, taken, first = sum(owner.share for owner in owners), 0, 0
    for owner in owners:
        taken += owner.share
        last = chunks * taken // total
        owned[owner.peer] += _chunks_between(orphaned, first, last, owner.peer)
        first = last
    return tuple(tuple(parts) for parts in owned.values() if parts)


def _chunks_between(parts: Iterable[Part], first: int, last: int, owner: str) -> list[Part]:
    """The chunks of `parts`, counted through, from `first` to before `last`, as parts of `owner`."""
    found, before = [], 0
    for part in parts:
        count = -(-(part.stop - part.start) // CHUNK)
        low, high = max(first - before, 0), min(last - before, count)
        if low < high:
            found.append(Part(owner, part.start + low * CHUNK, min(part.start + high * CHUNK, part.stop)))
        before += count
    return found


@dataclass(frozen=True)
class Column:
    """Elements of the vector, which one owner in each group takes in."""

    owners: tuple[PeerId, ...]  # of group 0, 1, 2, …
    parts: tuple[Part, ...]  # what each owner takes the mean of; it may have none, or several where it is alone


@dataclass(frozen=True)
class Grid:
    groups: tuple[tuple[Seat, ...], ...]  # each in the roster's order
    columns: tuple[Column, ...]

    def group_of(self, peer: PeerId) -> int:
        """Raises ValueError for one that has no seat."""
        for number, seats in enumerate(self.groups):
            if any(seat.peer == peer for seat in seats):
                return number
        raise ValueError(f"{peer} has no seat in the round")


def grid_of(roster: RoundRoster, parameters: int, group_size: int) -> Grid:
    """How the seats of a roster reduce `parameters` elements in groups of at most `group_size`.

    Groups are larger where too few own anything to have one owner each. Where all are one group, owners keep the parts
    of an earlier attempt (`partition.py`); several groups are cut anew. Deterministic in its arguments.
    """
    owners = sorted((s for s in roster.seats if s.share > 0), key=lambda seat: (-seat.share, seat.peer))
    count = min(-(-len(roster.seats) // group_size), len(owners))
    if count <= 1:
        alone = tuple(Column((parts[0].owner,), parts) for parts in parts_by_owner(roster, parameters))
        return Grid((roster.seats,), alone)
    full = len(owners) // count * count
    columns = [sorted(owners[at : at + count], key=attrgetter("peer")) for at in range(0, full, count)]
    slowest = [Seat(column[0].peer, 0, min(seat.share for seat in column)) for column in columns]
    edges = {part.owner: (part.start, part.stop) for part in cut(slowest, 0, parameters)}
    drawn = [_drawn(roster, column) for column in columns]
    rest = {seat.peer for seat in roster.seats} - {seat.peer for column in columns for seat in column}
    dealt = _drawn(roster, [seat for seat in roster.seats if seat.peer in rest])
    groups = [
        {*(column[number].peer for column in drawn), *(seat.peer for seat in dealt[number::count])}
        for number in range(count)
    ]
    return Grid(
        tuple(tuple(seat for seat in roster.seats if seat.peer in group) for group in groups),
        tuple(
            Column(tuple(seat.peer for seat in placed), cut(column, *edges[column[0].peer]))
            for column, placed in zip(columns, drawn, strict=True)
            if column[0].peer in edges
        ),
    )


def _drawn(roster: RoundRoster, seats: Sequence[Seat]) -> list[Seat]:
    """The seats in an order that belongs to the round; that of its attempts is the same."""
    drawn = f"{roster.run_id}/{roster.round}/group/"
    return sorted(seats, key=lambda s: hashlib.sha256(f"{drawn}{s.peer}".encode()).digest())
