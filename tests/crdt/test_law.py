"""The merge law on bare orders, and the times around it."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.hlc import MAX_AHEAD, stamp_at
from swarmnode.crdt.kinds import ElementKind
from swarmnode.crdt.law import MAX_STEP_BACK, Judgement, Merged, Order, advance, judge, untimely

NOTE = ElementKind("note", 1_000, 2, 512)
COMMIT = ElementKind("commit", 1_000, 2, 512, write_once=True)
A1, A2, B1, C9 = (Order(key, bytes([time]) * 40) for key, time in (("a", 1), ("a", 2), ("b", 3), ("c", 9)))

orders = st.builds(
    lambda key, time, other: Order(
        key, time.to_bytes(8, "big") + hashlib.sha256(f"{key} {time} {other}".encode()).digest()
    ),
    st.sampled_from("abc"),
    st.integers(0, 3),
    st.booleans(),
)


def test_a_greater_order_replaces_under_its_key() -> None:
    assert judge(NOTE, [A1], A2) == Judgement(Merged.STORED, gone=A1)
    assert judge(NOTE, [A2], A1) == Judgement(Merged.OLDER)
    assert judge(NOTE, [A2, B1], A2) == Judgement(Merged.KNOWN)


def test_full_slots_give_way_to_the_greater_only() -> None:
    assert judge(NOTE, [A2, B1], C9) == Judgement(Merged.STORED, gone=A2)
    assert judge(NOTE, [B1, C9], A1) == Judgement(Merged.QUOTA)
    assert judge(NOTE, [B1, C9], B1._replace(rank=bytes([4]) * 40)) == Judgement(Merged.STORED, gone=B1)


def test_two_words_under_a_write_once_key_both_stand_and_are_named() -> None:
    assert judge(COMMIT, [A1], A2) == Judgement(Merged.STORED, rival=A1)
    assert judge(COMMIT, [A2], A1) == Judgement(Merged.STORED, rival=A2)
    assert judge(COMMIT, [A2, B1], A1) == Judgement(Merged.QUOTA, rival=A2)
    assert judge(COMMIT, [A2, B1], Order("a", bytes([7]) * 40)) == Judgement(
        Merged.STORED, gone=A2, rival=A2
    )  # the rival leaves as the new one comes, and is named all the same
    assert judge(COMMIT, [A1, A2], Order("b", bytes([7]) * 40)) == Judgement(Merged.STORED, gone=A1)


@given(st.lists(orders, max_size=6), orders, st.randoms(use_true_random=False))
def test_the_order_of_what_stands_does_not_matter(standing: list[Order], new: Order, random: object) -> None:
    shuffled = list(standing)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert judge(COMMIT, standing, new) == judge(COMMIT, shuffled, new)


def test_untimely_elements_are_told_apart() -> None:
    now = 1_000_000
    at = stamp_at(now)
    assert untimely(at, now + 1, now=now, horizon=now) is None
    assert untimely(at, now, now=now, horizon=now) is Merged.EXPIRED
    assert untimely(at, now + 1, now=now, horizon=now + 1) is Merged.EXPIRED
    assert untimely(stamp_at(now + MAX_AHEAD), 2 * now, now=now, horizon=now) is None
    assert untimely(stamp_at(now + MAX_AHEAD + 1), 2 * now, now=now, horizon=now) is Merged.AHEAD


def test_the_horizon_follows_the_clock_forward_and_only_far_back() -> None:
    start = 10 * MAX_STEP_BACK
    assert advance(start, start + 1) == start + 1
    assert advance(start, start - MAX_STEP_BACK) == start
    assert advance(start, start - MAX_STEP_BACK - 1) == start - MAX_STEP_BACK - 1
