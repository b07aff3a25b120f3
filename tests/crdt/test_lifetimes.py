"""Ranks kept apart by ttl, read as one: as if what expires after the cut-off were in one tree."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.hlc import MAX_TIME, stamp_at, time_of
from swarmnode.crdt.kinds import KINDS
from swarmnode.crdt.ranges import END, LISTED, START, Lifetimes, RangeTree
from swarmnode.crdt.reconcile import Initiator, Responder

SALT = bytes(32)
NAMES = ("member", "vote", "note", "evidence")  # one of each ttl
NOW = 3 * KINDS["evidence"].ttl


def rank(time: int, number: int) -> bytes:
    return stamp_at(time, number % 7).to_bytes(8, "big") + hashlib.sha256(b"%d" % number).digest()


times = st.integers(0, NOW) | st.integers(NOW - 100_000, NOW)
elements = st.lists(st.tuples(st.sampled_from(NAMES), times), max_size=60)
cutoffs = st.integers(-10, NOW + KINDS["evidence"].ttl) | st.just(MAX_TIME)


def expiry(kind: str, rank: bytes) -> int:
    return time_of(int.from_bytes(rank[:8], "big")) + KINDS[kind].ttl


def near_an_expiry(ranks: list[tuple[str, bytes]], data: st.DataObject) -> int:
    """A cut-off: any, or one at which it matters by a millisecond whether an element counts."""
    edges = [expiry(kind, one) + off for kind, one in ranks for off in (-1, 0, 1)]
    return data.draw(cutoffs | st.sampled_from(edges) if edges else cutoffs)


@given(elements, st.data())
def test_what_expires_later_reads_like_one_tree(found: list[tuple[str, int]], data: st.DataObject) -> None:
    ranks = [(kind, rank(time, number)) for number, (kind, time) in enumerate(found)]
    cutoff = near_an_expiry(ranks, data)
    lives, model = Lifetimes(KINDS), RangeTree.from_sorted(sorted(r for k, r in ranks if expiry(k, r) > cutoff))
    for kind, one in ranks:
        assert lives.insert(kind, one) and not lives.insert(kind, one) and one in lives
    built = Lifetimes.of(KINDS, {kind: [r for k, r in ranks if k == kind] for kind in NAMES})
    bounds = st.sampled_from([START, END, *(r for _, r in ranks), *(r[:8] for _, r in ranks)])
    lo, hi = sorted((data.draw(bounds), data.draw(bounds)))
    for one in (lives.after(cutoff), built.after(cutoff), lives.fork().after(cutoff)):
        assert len(one) == len(model) and one.keys() == model.keys()
        assert one.keys(lo, hi) == model.keys(lo, hi) and one.keys(lo, hi, 3) == model.keys(lo, hi, 3)
        assert one.count(lo, hi) == model.count(lo, hi)
        assert one.sum(lo, hi)[1] == model.sum(lo, hi)[1]
        assert one.fingerprint(lo, hi, SALT) == model.fingerprint(lo, hi, SALT)
        assert one.split(lo, hi, 5) == model.split(lo, hi, 5)
        assert all((r in one) == (r in model) for _, r in ranks)


@given(elements, st.lists(st.tuples(st.booleans(), st.integers(0, 59)), max_size=80))
def test_steps_at_once_leave_what_they_leave_one_by_one(
    found: list[tuple[str, int]], chosen: list[tuple[bool, int]]
) -> None:
    ranks = [(kind, rank(time, number)) for number, (kind, time) in enumerate(found)]
    steps = [(added, *ranks[number]) for added, number in chosen if number < len(ranks)]
    at_once, one_by_one = Lifetimes(KINDS), Lifetimes(KINDS)
    for lives in (at_once, one_by_one):
        for kind, one in ranks[::2]:
            lives.insert(kind, one)
    at_once.change(steps)
    for added, kind, one in steps:
        (one_by_one.insert if added else one_by_one.remove)(kind, one)
    assert at_once.after(0).keys() == one_by_one.after(0).keys()
    assert at_once.after(0).fingerprint(START, END, SALT) == one_by_one.after(0).fingerprint(START, END, SALT)


@given(elements, st.data())
def test_expired_ranks_are_those_that_the_cutoff_leaves_out(found: list[tuple[str, int]], data: st.DataObject) -> None:
    ranks = [(kind, rank(time, number)) for number, (kind, time) in enumerate(found)]
    horizon = near_an_expiry(ranks, data)
    lives = Lifetimes(KINDS)
    for kind, one in ranks:
        lives.insert(kind, one)
    before = lives.fork()
    expired = lives.expired(horizon, 1000)
    assert sorted(expired) == sorted(r for k, r in ranks if expiry(k, r) <= horizon)
    assert len(lives.expired(horizon, 1)) == min(1, len(expired))
    assert lives.discard(expired) == len(expired) and not lives.discard(expired)
    assert lives.after(0).keys() == lives.after(horizon).keys()
    assert len(before) == len(ranks)
    for kind, one in ranks:
        assert lives.remove(kind, one) == (one not in expired)
    assert len(lives) == 0


def many(first: int, count: int) -> Lifetimes:
    ranks = [(NAMES[n % 7 % 4], rank(NOW - 50_000 + n % 997, n)) for n in range(first, first + count)]
    return Lifetimes.of(KINDS, {kind: [r for k, r in ranks if k == kind] for kind in NAMES})


def test_large_sets_are_split_about_evenly() -> None:
    union = many(0, 4 * LISTED).after(NOW)
    for parts in (2, 3, 16):
        cuts = [START, *union.split(START, END, parts), END]
        assert len(cuts) == parts + 1 and cuts == sorted(set(cuts))
        sizes = [union.count(lo, hi) for lo, hi in pairwise(cuts)]
        assert sum(sizes) == len(union) and max(sizes) < 1.5 * len(union) / parts


def test_unions_reconcile() -> None:
    common, mine, theirs = many(0, 3000), many(10_000, 20), many(20_000, 30)
    here, there = common.fork(), common.fork()
    for kind in NAMES:
        for target, extra in ((here, mine), (there, theirs)):
            for one in extra._trees[KINDS[kind].ttl].keys():  # noqa: SIM118 (no dict)
                target.insert(kind, one)
    asking = Initiator(here.after, cutoff=NOW, nonce=bytes(8))
    answering = Responder(there.after, cutoff=NOW, nonce=bytes(range(8)))
    frame: bytes | None = asking.open()
    while frame is not None:
        frame = asking.receive(answering.receive(frame))
    assert asking.need == set(theirs.after(NOW).keys()) and asking.have == set(mine.after(NOW).keys())
