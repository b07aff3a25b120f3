"""RangeTree: whatever came and went, it knows what a sorted list knows; and its snapshots stay as they are."""

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
from swarmnode.crdt.ranges import END, RANK, START, RangeTree, separator

SALT = bytes(range(32))


def rank_at(number: int) -> bytes:
    """Few different beginnings, so that bounds fall between, onto and outside ranks."""
    return (number // 4).to_bytes(8, "big") + bytes([number % 4]) * 32


numbers = st.integers(0, 120)
bounds = st.one_of(
    numbers.map(rank_at), numbers.map(lambda n: rank_at(n)[:8]), numbers.map(lambda n: rank_at(n)[:12]), st.just(END)
) | st.just(START)


@pytest.fixture(scope="module", autouse=True)
def small_nodes() -> Iterator[None]:
    """So that a hundred ranks make a tree of several levels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "MAX_LEAF", 4)
        patch.setattr(ranges, "MAX_CHILDREN", 4)
        yield


def agrees(tree: RangeTree, model: set[bytes], lo: bytes, hi: bytes) -> None:
    """Everything that the tree says about a range is true of the model."""
    every = sorted(model)
    inside = [rank for rank in every if lo <= rank < hi]
    total, count = tree.sum(lo, hi)
    assert len(tree) == len(every)
    assert tree.keys() == every
    assert tree.keys(lo, hi) == inside
    assert tree.keys(lo, hi, 3) == inside[:3]
    assert tree.count(lo, hi) == count == len(inside)
    assert tree.index(lo) == bisect_left(every, lo)
    assert np.array_equal(total, lthash.sum_of(inside))
    assert tree.fingerprint(lo, hi, SALT) == lthash.fingerprint(lthash.sum_of(inside), len(inside), SALT)


@settings(max_examples=500)
@given(st.sets(numbers), st.lists(st.tuples(st.booleans(), numbers), max_size=80), bounds, bounds)
def test_insertions_and_removals_leave_what_a_sorted_list_holds(
    first: set[int], changes: list[tuple[bool, int]], lo: bytes, hi: bytes
) -> None:
    model = {rank_at(number) for number in first}
    tree = RangeTree.from_sorted(sorted(model))
    for adds, number in changes:
        rank = rank_at(number)
        assert (rank in tree) == (rank in model)
        if adds:
            assert tree.insert(rank) == (rank not in model)
            model.add(rank)
        else:
            assert tree.remove(rank) == (rank in model)
            model.discard(rank)
    agrees(tree, model, lo, hi)
    assert [tree.at(index) for index in range(len(tree))] == sorted(model)


@settings(max_examples=500)
@given(st.lists(st.tuples(st.booleans(), st.lists(numbers, max_size=60)), max_size=8), bounds, bounds)
def test_many_changes_at_once_leave_what_they_leave_one_by_one(
    changes: list[tuple[bool, list[int]]], lo: bytes, hi: bytes
) -> None:
    tree, model = RangeTree(), set[bytes]()
    for adds, many in changes:
        found, before = {rank_at(number) for number in many}, len(model)
        (model.update if adds else model.difference_update)(found)
        changed = (tree.insert_all if adds else tree.remove_all)([rank_at(number) for number in many])
        assert changed == abs(len(model) - before)
        agrees(tree, model, lo, hi)
        agrees(tree, model, START, END)
    assert [tree.at(index) for index in range(len(tree))] == sorted(model)


def test_ranks_inserted_in_order_fill_their_leaves() -> None:
    tree = RangeTree()
    for first in range(0, 120, 10):
        tree.insert_all([rank_at(number) for number in range(first, first + 10)])
    assert [len(packed) // RANK for packed in ranges._packed(tree._root, START, END)] == [ranges.MAX_LEAF] * 30


@settings(max_examples=300)
@given(st.sets(numbers), st.lists(st.tuples(st.booleans(), numbers), min_size=1, max_size=40))
def test_a_snapshot_and_its_tree_do_not_see_each_others_changes(
    first: set[int], changes: list[tuple[bool, int]]
) -> None:
    model = {rank_at(number) for number in first}
    tree = RangeTree.from_sorted(sorted(model))
    still, moved = tree.snapshot(), tree.snapshot()
    other = set(model)
    for adds, number in changes:
        (moved.insert if adds else moved.remove)(rank_at(number))
        (other.add if adds else other.discard)(rank_at(number))
    agrees(still, model, START, END)
    agrees(tree, model, START, END)
    agrees(moved, other, START, END)
    (tree.remove if rank_at(0) in model else tree.insert)(rank_at(0))
    agrees(still, model, START, END)


@settings(max_examples=300)
@given(st.sets(numbers, min_size=1), bounds, bounds, st.integers(1, 20))
def test_a_split_cuts_a_range_into_parts_as_even_as_can_be(some: set[int], lo: bytes, hi: bytes, parts: int) -> None:
    tree = RangeTree.from_sorted(sorted(map(rank_at, some)))
    lo, hi = min(lo, hi), max(lo, hi)
    count = tree.count(lo, hi)
    cuts = tree.split(lo, hi, parts)
    assert len(cuts) == max(0, min(parts, count) - 1)
    if cuts:
        sizes = [tree.count(a, b) for a, b in pairwise([lo, *cuts, hi])]
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


def test_a_tree_built_at_once_is_one_built_rank_by_rank() -> None:
    every = sorted(map(rank_at, range(120)))
    grown = RangeTree()
    for rank in random.Random(1).sample(every, len(every)):
        grown.insert(rank)
    built = RangeTree.from_sorted(every)
    assert built.keys() == grown.keys() == every
    assert built.fingerprint(START, END, SALT) == grown.fingerprint(START, END, SALT)


@pytest.mark.parametrize("order", ["ascending", "descending", "downwards onto a full leaf", "shuffled"])
def test_a_tree_that_shrank_holds_no_more_nodes_than_a_small_one(order: str) -> None:
    """Or expiry would leave 2 KiB behind for each rank that is left."""
    rng = random.Random(2)
    every = sorted({rng.randbytes(RANK) for _ in range(400)})
    arrival = {
        "ascending": every,
        "descending": every[::-1],
        "downwards onto a full leaf": every[:4] + every[:3:-1],
        "shuffled": rng.sample(every, 400),
    }[order]
    tree = RangeTree()
    for rank in arrival:
        tree.insert(rank)
    assert len(list(leaves(tree._root))) <= 400 / 2 + 1  # at least half full, on average
    for rank in rng.sample(every, 380):
        tree.remove(rank)
    assert len(list(leaves(tree._root))) <= 20
    for rank in tree:
        tree.remove(rank)
    assert len(list(leaves(tree._root))) == 1
    assert np.array_equal(tree.sum()[0], lthash.zero())


def leaves(node: ranges._Node) -> Iterator[ranges._Leaf]:
    if isinstance(node, ranges._Leaf):
        yield node
    else:
        for child in node.children:
            yield from leaves(child)


def test_ranks_in_order_fill_their_leaves() -> None:
    tree = RangeTree()
    for number in range(100):
        tree.insert(rank_at(number))
    assert len(list(leaves(tree._root))) == 100 / 4


@pytest.mark.parametrize("wrong", [[rank_at(2), rank_at(1)], [rank_at(1), rank_at(1)], [b"short"]])
def test_what_is_no_ascending_list_of_ranks_is_refused(wrong: list[bytes]) -> None:
    with pytest.raises(ValueError):
        RangeTree.from_sorted(wrong)


def test_a_rank_has_forty_bytes() -> None:
    with pytest.raises(ValueError):
        RangeTree().insert(b"short")


@pytest.mark.parametrize("index", [-1, 3])
def test_there_is_no_rank_outside_the_tree(index: int) -> None:
    with pytest.raises(IndexError):
        RangeTree.from_sorted(map(rank_at, range(3))).at(index)
