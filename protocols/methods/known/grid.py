"""Who reduces what with whom in a round: groups that change from round to round, and columns that stay. Pure.

Up to `group_size` seats are one group: each owner of a part takes the mean of it from all the others. More seats make
a grid (as Moshpit, 2103.03239, does), but the mean is exact, and one for all:

            column 0   column 1   column 2   others
    group 0    a          d          g          k      a adds up group 0's values of column 0, b those of group 1, …
    group 1    b          e          h
    group 2    c          f          i          j      a, b and c cut column 0 among them and add their sums up

The elements of the vector are cut into columns, and those of a column into parts, one for each of its owners. A member
sends its group's owner of a column its values there; this one sends each owner of a part its group's sum there, gets
the means of all parts back, and passes the same bytes on to its group. So a member has to do with its group and, where
it is an owner, with those of its column: about 2 √N peers in place of N − 1, for the same bytes.

Columns are filled in the order of shares and peer ids, so that they stay while membership does, and with them the
residuals of their owners, who are about equally fast. Which owner of a column is in which group, and where those sit
who own nothing, is drawn anew for each round from its number: no pair of members is bound to one another, or kept
apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.protocols.methods.known.repartition import parts_by_owner
from swarmnode.protocols.methods.known.roster import Part, Roster, Seat, cut
from swarmnode.protocols.network import PeerId


@dataclass(frozen=True)
class Column:
    """Elements of the vector, which one owner in each group takes in."""

    owners: tuple[PeerId, ...]  # of group 0, 1, 2, …
    parts: tuple[Part, ...]  # what each owner takes the mean of; it may have none, or several where it is alone

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """The elements from and to which each part goes."""
        return tuple((part.start, part.stop) for part in self.parts)


@dataclass(frozen=True)
class Grid:
    """A round's groups and columns."""

    groups: tuple[tuple[Seat, ...], ...]  # each in the roster's order
    columns: tuple[Column, ...]

    def group_of(self, peer: PeerId) -> int:
        """Raises ValueError for one that has no seat."""
        for number, seats in enumerate(self.groups):
            if any(seat.peer == peer for seat in seats):
                return number
        raise ValueError(f"{peer} has no seat in the round")


def grid_of(roster: Roster, parameters: int, group_size: int) -> Grid:
    """How the seats of a roster reduce `parameters` elements in groups of at most `group_size`.

    Groups are larger where too few own anything to have one owner each. Where all are one group, owners keep the parts
    of an earlier attempt (`recut.py`); several groups are cut anew. Deterministic in its arguments.
    """
    owners = sorted((s for s in roster.seats if s.share > 0), key=lambda seat: (-seat.share, seat.peer))
    count = min(-(-len(roster.seats) // group_size), len(owners))
    if count <= 1:
        alone = tuple(Column((parts[0].owner,), parts) for parts in parts_by_owner(roster, parameters))
        return Grid((roster.seats,), alone)
    full = len(owners) // count * count
    columns = [sorted(owners[at : at + count], key=lambda seat: seat.peer) for at in range(0, full, count)]
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


def _drawn(roster: Roster, seats: Sequence[Seat]) -> list[Seat]:
    """The seats in an order that belongs to the round; that of its attempts is the same."""
    return sorted(
        seats, key=lambda s: hashlib.sha256(f"{roster.run_id}/{roster.round}/group/{s.peer}".encode()).digest()
    )
