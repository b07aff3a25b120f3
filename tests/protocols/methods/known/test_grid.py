"""Groups and columns: what every member must draw alike, and that it spreads the work as the document says."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.methods.known.messages import PART_ALIGNMENT, RoundRoster, Seat
from swarmnode.protocols.methods.known.partition import Grid, grid_of
from swarmnode.testing.parts import parts

RUN, PARENT = "ab" * 32, "cd" * 32
SHARES = st.lists(st.sampled_from([0, 1, 2, 4, 4, 4, 8, 16]), min_size=1, max_size=40).filter(any)


def a_roster(shares: list[int], round: int = 3) -> RoundRoster:
    seats = tuple(Seat(f"peer{number:03}", 1, share) for number, share in enumerate(shares))
    return RoundRoster(RUN, round, 0, PARENT, seats, (), 1.0)


@given(SHARES, st.integers(1, 40), st.integers(0, 99), st.integers(1, 200_000))
def test_every_member_is_in_one_group_and_every_element_in_one_part(
    shares: list[int], group_size: int, round: int, parameters: int
) -> None:
    roster = a_roster(shares, round)
    grid = grid_of(roster, parameters, group_size)
    seated = [seat for seats in grid.groups for seat in seats]
    assert sorted(seated, key=lambda seat: seat.peer) == list(roster.seats)
    sizes = [len(seats) for seats in grid.groups]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= group_size or len(sizes) == sum(share > 0 for share in shares)
    cut = [part for column in grid.columns for part in column.parts]
    assert cut[0].start == 0 and cut[-1].stop == parameters
    assert all(a.stop == b.start for a, b in pairwise(cut))
    assert all(part.start < part.stop and part.start % PART_ALIGNMENT == 0 for part in cut)
    for column in grid.columns:
        assert [grid.group_of(owner) for owner in column.owners] == list(range(len(grid.groups)))
        assert {part.owner for part in column.parts} <= set(column.owners)
    assert len({owner for column in grid.columns for owner in column.owners}) == sum(map(len, _owners(grid)))


def _owners(grid: Grid) -> list[tuple[str, ...]]:
    return [column.owners for column in grid.columns]


@given(SHARES, st.integers(1, 200_000))
def test_a_swarm_that_fits_into_a_group_is_cut_as_without_groups(shares: list[int], parameters: int) -> None:
    roster = a_roster(shares)
    grid = grid_of(roster, parameters, len(shares))
    assert grid.groups == (roster.seats,)
    assert tuple(part for column in grid.columns for part in column.parts) == parts(roster, parameters)


def test_columns_stay_from_round_to_round_and_everybody_comes_to_sit_with_everybody_else() -> None:
    grids = [grid_of(a_roster([4] * 12, round), 10**6, 4) for round in range(60)]
    assert len({tuple((frozenset(c.owners), c.parts) for c in grid.columns) for grid in grids}) == 1
    together = {
        frozenset((a.peer, b.peer)) for grid in grids for seats in grid.groups for a in seats for b in seats if a != b
    }
    mates = {frozenset((a, b)) for column in grids[0].columns for a in column.owners for b in column.owners if a != b}
    assert together | mates == {frozenset((f"peer{a:03}", f"peer{b:03}")) for a in range(12) for b in range(a)}
    assert not together & mates  # those who add up for one column are in different groups


@pytest.mark.parametrize(("count", "group_size"), [(16, 4), (64, 16), (256, 16), (48, 16)])
def test_members_of_a_full_grid_send_no_more_than_without_groups(count: int, group_size: int) -> None:
    parameters = count * PART_ALIGNMENT * 10
    sent = traffic(grid_of(a_roster([4] * count), parameters, group_size))
    assert max(sent.values()) == min(sent.values()) == pytest.approx(2 * (count - 1) / count * parameters)


@pytest.mark.parametrize(("count", "group_size"), [(17, 16), (20, 16), (23, 8), (100, 16)])
def test_members_of_a_grid_with_holes_send_little_more(count: int, group_size: int) -> None:
    parameters = 10**7
    sent = traffic(grid_of(a_roster([4] * count), parameters, group_size))
    width = len(grid_of(a_roster([4] * count), parameters, group_size).columns)
    assert max(sent.values()) <= 2 * parameters * (1 + 1 / width)


def traffic(grid: Grid) -> dict[str, int]:
    """Elements that each member sends in a round."""
    sent = {seat.peer: 0 for seats in grid.groups for seat in seats}
    for column in grid.columns:
        size = sum(part.stop - part.start for part in column.parts)
        for owner, seats in zip(column.owners, grid.groups, strict=True):
            for seat in seats:
                sent[seat.peer] += size * (seat.peer != owner)  # its values
            sent[owner] += size * (len(seats) - 1)  # the means, passed on
            for part in column.parts:
                length = part.stop - part.start
                sent[owner] += length * (part.owner != owner)  # its group's sums
                sent[owner] += length * (part.owner == owner) * (len(column.owners) - 1)  # the mean
    return sent


def test_a_member_has_to_do_with_a_few_of_many() -> None:
    grid = grid_of(a_roster([4] * 256), 10**7, 16)
    partners = {seat.peer: len(grid.groups[grid.group_of(seat.peer)]) - 1 for seats in grid.groups for seat in seats}
    for column in grid.columns:
        for owner in column.owners:
            partners[owner] += len(column.owners) - 1
    assert set(partners.values()) == {2 * (math.isqrt(256) - 1)}
