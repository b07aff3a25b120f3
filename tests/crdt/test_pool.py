"""The pool of strangers: readable, small, and fair to whoever wrote last."""

from __future__ import annotations

import laws
from hypothesis import given
from hypothesis import strategies as st
from laws import KINDS, T0, make_record

from swarmnode.crdt.law import POOL_SLOTS, Merged, StrangerPool

authors = st.sampled_from("ABCDEFGH")
written = st.builds(make_record, authors, st.sampled_from(laws.REPLACEABLE_KEYS + laws.MOMENTS), laws.times)


@given(st.lists(written, max_size=40), st.integers(0, 2000))
def test_the_pool_never_exceeds_its_bytes(heard: list, room: int) -> None:  # type: ignore[type-arg]
    pool = StrangerPool(KINDS, max_bytes=room)
    for record in heard:
        pool.merge(record)
        assert sum(len(one.sealed) for one in pool) <= room
        assert len(pool) == len(list(pool))
    pool.sweep(1 << 60)
    assert len(pool) == pool._bytes == 0


def test_an_author_has_few_slots_and_its_greatest_records_in_them() -> None:
    pool = StrangerPool({**KINDS, "note": KINDS["note"].__class__("note", 1_000, 64, 512)})
    records = [make_record("A", f"note/{i}", T0 + i) for i in range(POOL_SLOTS + 2)]
    for record in records[::-1]:
        pool.merge(record)
    assert set(pool.of("A")) == set(records[2:])
    assert pool.merge(records[0]) is Merged.QUOTA
    assert pool.merge(records[2]) is Merged.KNOWN


def test_the_author_that_wrote_longest_ago_makes_room() -> None:
    records = [make_record(author, "note/a", T0) for author in "ABC"]
    pool = StrangerPool(KINDS, max_bytes=3 * len(records[0].sealed))
    for record in (*records, make_record("A", "note/a", T0 + 1), make_record("D", "note/a", T0)):
        assert pool.merge(record) is Merged.POOLED
    assert {record.author for record in pool} == {"A", "C", "D"}


def test_a_record_that_expired_leaves() -> None:
    pool = StrangerPool(KINDS)
    first, second = make_record("A", "note/a", T0), make_record("B", "note/a", T0 + 1)
    pool.merge(first)
    pool.merge(second)
    pool.sweep(first.expiry)
    assert list(pool) == [second]
    pool.sweep(second.expiry)
    assert len(pool) == 0
