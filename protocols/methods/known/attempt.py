"""One attempt at a round's reduction, and what it leaves to the next one at the same round.

Left are the values that stand encoded, and those of others that have arrived: streams of cells from a member to an
owner. Where the next attempt asks for the same cells first, a stream goes on where it ended, in the same memory; its
name sees to it that a receiver goes on only with what it began with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from swarmnode.protocols.methods.known.chunks import Cells, Pool
from swarmnode.protocols.methods.known.grid import Column, Grid
from swarmnode.protocols.methods.known.reduction import Vector
from swarmnode.protocols.methods.known.roster import Roster, Seat
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.bulk_client import StreamingBuffer


@dataclass(frozen=True)
class Stream:
    """Encoded cells on their way from a member to an owner, at one end of it."""

    cells: Cells
    growing: StreamingBuffer

    @classmethod
    def new(cls, cells: Cells, pool: Pool, name: bytes = b"") -> Stream:
        """One that begins, in memory of `pool`."""
        return cls(cells, StreamingBuffer(pool.take(cells.size), name=name))

    def encoded_on(self, cells: Cells, pool: Pool) -> Stream:
        """At the sender: with these cells to be encoded, less those that are already. It takes this one's memory."""
        done = self.cells.bytes_until(self.cells.whole_in(self.growing.ready))
        memory, kept = self._in_hand(cells, pool, done)
        stream = Stream(cells, StreamingBuffer(memory, name=self.growing.name))
        stream.growing.grow(kept)
        return stream

    def encoded_from(self, others: Iterable[Stream]) -> None:
        """At the sender: take cells that come next from those encoded for others, as far as they are there."""
        there = {
            (place.start, place.stop): stream.cells.raw(cell, stream.growing.buffer)
            for stream in others
            for cell in range(stream.cells.whole_in(stream.growing.ready))
            for place in (stream.cells.elements(cell),)
        }
        for cell in range(self.cells.whole_in(self.growing.ready), self.cells.count):
            place = self.cells.elements(cell)
            if (place.start, place.stop) not in there:
                break
            self.cells.raw(cell, self.growing.buffer)[:] = there[place.start, place.stop]
            self.growing.grow(self.cells.bytes_until(cell + 1))

    def fetched_on(self, cells: Cells, pool: Pool) -> Stream:
        """At the owner: with these cells to be fetched, less what came. It takes this one's memory."""
        came = max(self.growing.ready, self.growing.kept) if self.growing.name else 0
        memory, kept = self._in_hand(cells, pool, came)
        return Stream(cells, StreamingBuffer(memory, name=self.growing.name, kept=kept))

    def _in_hand(self, cells: Cells, pool: Pool, good: int) -> tuple[memoryview, int]:
        kept = min(good, self.cells.begins_like(cells))
        return pool.enlarge(self.growing.buffer, cells.size, used=kept), kept


@dataclass(frozen=True)
class Attempt:
    """One reduction under way. Times are trio's, by which to give up on peers that live."""

    roster: Roster
    grid: Grid
    group: tuple[Seat, ...]  # this node's
    shares: dict[PeerId, np.float32]  # of those whose values count, in the roster's order
    values: Vector
    mean: Vector
    sent: tuple[Stream, ...]  # this node's values, encoded, one a column; none where it has no weight
    taken: dict[PeerId, Stream]  # others' values of this node's column, one for each of its group who works
    sent_by: float
    sums_by: float
    parts_by: float
    means_by: float

    def owner(self, column: Column) -> PeerId:
        """Who takes in a column for this node's group."""
        return column.owners[self.grid.groups.index(self.group)]

    def leads_to(self, later: Roster, grid: Grid) -> bool:
        """Whether an attempt by `later` may take up what this one leaves: of the same round, and all in one group."""
        same = (self.roster.round, self.roster.parent) == (later.round, later.parent)
        return same and len(self.grid.groups) == len(grid.groups) == 1

    def is_cut_as(self, later: Roster) -> bool:
        """Whether the vector lies in the same cells in both, whoever they go to."""
        return self.roster.cutters == later.cutters
