"""RankSet: whatever came and went, it knows what a sorted list knows; and each stays as it is."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.crdt import lthash, ranges
from swarmnode.crdt.hlc import MAX_TIME, expiring_after, stamp_at, time_of
from swarmnode.crdt.ranges import END, RANK, START, RankSet, separator

SALT = bytes(range(32))


def rank_at(number: int) -> bytes:
    """Few different beginnings, so that bounds fall between, onto and outside ranks."""
    return (number // 4).to_bytes(8, "big") + bytes([number % 4]) * 32


numbers = st.integers(0, 120)
bounds = st.one_of(
    numbers.map(rank_at), numbers.map(lambda n: rank_at(n)[:8]), numbers.map(lambda n: rank_at(n)[:12]), st.just(END)
) | st.just(START)


@pytest.fixture(scope="module", autouse=True)
def small_leaves() -> Iterator[None]:
    """So that a hundred ranks take many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "MAX_LEAF", 4)
        yield


def agrees(found: RankSet, model: set[bytes], lo: bytes, hi: bytes) -> None:
    """Everything that the set says about a range is true of the model."""
    every = sorted(model)
    inside = [rank for rank in every if lo <= rank < hi]
    total, count = found.sum(lo, hi)
    assert len(found) == len(every)
    assert found.keys() == every
    assert found.keys(lo, hi) == inside
    assert found.keys(lo, hi, 3) == inside[:3]
    assert found.count(lo, hi) == count == len(inside)
    assert found.index(lo) == bisect_left(every, lo)
    assert np.array_equal(total, lthash.sum_of(inside))
    assert found.fingerprint(lo, hi, SALT) == lthash.fingerprint(lthash.sum_of(inside), len(inside), SALT)


@settings(max_examples=500)
@given(st.sets(numbers), st.lists(st.tuples(st.booleans(), numbers), max_size=80), bounds, bounds)
def test_changes_leave_what_a_sorted_list_holds(
    first: set[int], changes: list[tuple[bool, int]], lo: bytes, hi: bytes
) -> None:
    model = {rank_at(number) for number in first}
    found = RankSet(sorted(model))
    for adds, number in changes:
        rank = rank_at(number)
        assert (rank in found) == (rank in model)
        found = found.changed([rank]) if adds else found.changed(removed=[rank])
        (model.add if adds else model.discard)(rank)
    agrees(found, model, lo, hi)
    assert [found.at(index) for index in range(len(found))] == sorted(model)


many = st.lists(st.tuples(st.lists(numbers, max_size=60), st.lists(numbers, max_size=60)), max_size=8)


@settings(max_examples=500)
@given(many, bounds, bounds)
def test_many_changes_at_once_leave_what_they_leave_one_by_one(
    changes: list[tuple[list[int], list[int]]], lo: bytes, hi: bytes
) -> None:
    found, model = RankSet(), set[bytes]()
    for added, removed in changes:
        new, gone = set(map(rank_at, added)), set(map(rank_at, removed)) - set(map(rank_at, added))
        found, model = found.changed(map(rank_at, added), gone), model - gone | new
        agrees(found, model, lo, hi)
        agrees(found, model, START, END)
    assert [found.at(index) for index in range(len(found))] == sorted(model)


@settings(max_examples=300)
@given(st.sets(numbers), st.lists(st.tuples(st.booleans(), numbers), min_size=1, max_size=40))
def test_a_set_stays_as_it_is_while_others_are_made_from_it(first: set[int], changes: list[tuple[bool, int]]) -> None:
    model = {rank_at(number) for number in first}
    still = moved = RankSet(sorted(model))
    other = set(model)
    for adds, number in changes:
        moved = moved.changed([rank_at(number)]) if adds else moved.changed(removed=[rank_at(number)])
        (other.add if adds else other.discard)(rank_at(number))
    agrees(still, model, START, END)
    agrees(moved, other, START, END)


times = st.integers(0, 30)


@given(st.lists(times, max_size=60), st.integers(-10, 40) | st.just(MAX_TIME))
def test_what_expires_after_a_cutoff_is_a_set_of_its_own(expiries: list[int], cutoff: int) -> None:
    model = {stamp_at(time, n % 7).to_bytes(8, "big") + bytes([n]) * 32 for n, time in enumerate(expiries)}
    later = {rank for rank in model if time_of(int.from_bytes(rank[:8], "big")) > cutoff}
    found = RankSet(sorted(model))
    agrees(found.after(cutoff), later, START, END)
    assert set(found.keys(START, expiring_after(cutoff))) == model - later
    agrees(found, model, START, END)


@settings(max_examples=300)
@given(st.sets(numbers, min_size=1), bounds, bounds, st.integers(1, 20))
def test_a_split_cuts_a_range_into_parts_as_even_as_can_be(some: set[int], lo: bytes, hi: bytes, parts: int) -> None:
    found = RankSet(sorted(map(rank_at, some)))
    lo, hi = min(lo, hi), max(lo, hi)
    count = found.count(lo, hi)
    cuts = found.split(lo, hi, parts)
    assert len(cuts) == max(0, min(parts, count) - 1)
    if cuts:
        sizes = [found.count(a, b) for a, b in pairwise([lo, *cuts, hi])]
        assert all(a < b for a, b in pairwise([lo, *cuts, hi]))
        assert sum(sizes) == count
        assert max(sizes) - min(sizes) <= 1


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_a_separator_is_the_shortest_prefix_that_separates(one: bytes, other: bytes) -> None:
    below, above = sorted((one.ljust(6, b"\0"), other.ljust(6, b"\0")))
    if below != above:
        cut = separator(below, above)
        assert below < cut <= above
        assert above.startswith(cut)
        assert not below < cut[:-1]


def test_a_set_built_at_once_is_one_built_rank_by_rank() -> None:
    every = sorted(map(rank_at, range(120)))
    grown = RankSet()
    for rank in random.Random(1).sample(every, len(every)):
        grown = grown.changed([rank])
    built = RankSet(every)
    assert built.keys() == grown.keys() == every
    assert built.fingerprint(START, END, SALT) == grown.fingerprint(START, END, SALT)
    assert built.digest == grown.digest


def test_digests_are_those_of_every_implementation() -> None:
    assert RankSet().digest == "e5a00aa9991ac8a5ee3109844d84a55583bd20572ad3ffcd42792f3c36b183ad"
    two = [bytes(RANK), b"\1" * RANK]
    assert RankSet(two).digest == "ccbd51442f42b4fa0358d47a4ed9d3eff650ee5535f385f9260ff9eeb4f823f9"
    assert RankSet([two[0], rank_at(3), two[1]]).changed(removed=[rank_at(3)]).digest == RankSet(two).digest


@pytest.mark.parametrize("order", ["ascending", "descending", "downwards onto a full leaf", "shuffled"])
def test_a_set_that_shrank_holds_no_more_leaves_than_a_small_one(order: str) -> None:
    """Or expiry would leave 2 KiB behind for each rank that is left."""
    rng = random.Random(2)
    every = sorted({rng.randbytes(RANK) for _ in range(400)})
    arrival = {
        "ascending": every,
        "descending": every[::-1],
        "downwards onto a full leaf": every[:4] + every[:3:-1],
        "shuffled": rng.sample(every, 400),
    }[order]
    found = RankSet()
    for rank in arrival:
        found = found.changed([rank])
    assert len(found._leaves) <= 400 / 2 + 1  # at least half full, on average
    for rank in rng.sample(every, 380):
        found = found.changed(removed=[rank])
    assert len(found._leaves) <= 20
    found = found.changed(removed=found)
    assert not found._leaves
    assert np.array_equal(found.sum()[0], lthash.zero())


@pytest.mark.parametrize("at_once", [1, 10])
def test_ranks_in_order_fill_their_leaves(at_once: int) -> None:
    found = RankSet()
    for first in range(0, 120, at_once):
        found = found.changed(rank_at(number) for number in range(first, first + at_once))
    assert [leaf.count for leaf in found._leaves] == [ranges.MAX_LEAF] * 30


@pytest.mark.parametrize("wrong", [[rank_at(2), rank_at(1)], [rank_at(1), rank_at(1)], [b"short"]])
def test_what_is_no_ascending_list_of_ranks_is_refused(wrong: list[bytes]) -> None:
    with pytest.raises(ValueError):
        RankSet(wrong)


def test_a_rank_has_forty_bytes() -> None:
    with pytest.raises(ValueError):
        RankSet().changed([b"short"])


@pytest.mark.parametrize("index", [-1, 3])
def test_there_is_no_rank_outside_the_set(index: int) -> None:
    with pytest.raises(IndexError):
        RankSet(map(rank_at, range(3))).at(index)
