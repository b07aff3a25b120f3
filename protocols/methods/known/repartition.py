"""How the vector is cut when a round is tried again: whoever owned a part keeps it. Pure.

In an attempt that failed, most values were encoded, and have reached the owners of their parts. A new cut would move
every part and spoil all of it. So the next roster says by whom the vector was cut before (`Roster.cut_by`), and only
what belonged to those who are gone is cut anew, among all owners of the new roster:

    before      a a a a a a   b b b b b b   c c c c c c
    without b   a a a a a a   a a a c c c   c c c c c c     a: its own part, and behind it the first half of b's

An owner then has several stretches, its old part first: what was sent to it before is the head of what is sent now
(`Cells.begins_like`). Old parts are cut between their cells, so that every cell is what it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmnode.protocols.methods.known.chunks import CELL
from swarmnode.protocols.methods.known.roster import Owner, Part, Roster, Seat, cut, owners_of


def cut_to_keep(before: tuple[Owner, ...], seats: Iterable[Seat]) -> tuple[Owner, ...]:
    """The owners of an earlier attempt by whom to cut again among these seats; none where a new cut is the better one.

    That is where more than half of the owners are gone, or where more than half of those now have come since.
    """
    owners = {owner.peer for owner in owners_of(seats)}
    stay = sum(owner.peer in owners for owner in before)
    return before if 2 * stay >= max(len(before), len(owners)) else ()


def parts_by_owner(roster: Roster, parameters: int) -> tuple[tuple[Part, ...], ...]:
    """What each owner reduces, in the order of their ids: its part, or its old one and a share of what is orphaned.

    The parts of all cover the vector, and there are at the most as many as owners now and before.
    """
    owners = owners_of(roster.seats)
    if not roster.cut_by:
        return tuple((part,) for part in cut(owners, 0, parameters))
    owned: dict[str, list[Part]] = {owner.peer: [] for owner in owners}
    orphaned: list[Part] = []
    for part in cut(sorted(roster.cut_by, key=lambda owner: owner.peer), 0, parameters):
        owned.get(part.owner, orphaned).append(part)
    cells = sum(-(-(part.stop - part.start) // CELL) for part in orphaned)
    total, taken, first = sum(owner.share for owner in owners), 0, 0
    for owner in owners:
        taken += owner.share
        last = cells * taken // total
        owned[owner.peer] += _cells_between(orphaned, first, last, owner.peer)
        first = last
    return tuple(tuple(parts) for parts in owned.values() if parts)


def _cells_between(parts: Iterable[Part], first: int, last: int, owner: str) -> list[Part]:
    """The cells of `parts`, counted through, from `first` to before `last`, as parts of `owner`."""
    found, before = [], 0
    for part in parts:
        count = -(-(part.stop - part.start) // CELL)
        low, high = max(first - before, 0), min(last - before, count)
        if low < high:
            found.append(Part(owner, part.start + low * CELL, min(part.start + high * CELL, part.stop)))
        before += count
    return found
