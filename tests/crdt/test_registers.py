"""Registers: a join, so that replicas agree whatever the order, repetition or timing of what they hear."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import Kind
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import InvalidRecord, Record
from swarmnode.crdt.registers import Registers

RUN = "ab" * 32
KINDS = {"member": Kind("member", 60_000, 1, 1024), "note": Kind("note", 1_000, 2, 256)}
KEYS = ("member", "note/a", "note/b", "note/c")
T0 = 1_000_000  # ms


def make_record(author: str, key: str, time: int, value: int | None = 1, counter: int = 0) -> Record:
    return Record(1, RUN, author, key, stamp_at(time, counter), KINDS[key.partition("/")[0]].ttl, value, b"")


# Few authors, keys, times and values, so that clashes, ties and tombstones are common.
records = st.builds(
    make_record,
    st.sampled_from("AB"),
    st.sampled_from(KEYS),
    st.sampled_from([T0, T0 + 1, T0 + 500]),
    st.none() | st.integers(0, 3),
    st.integers(0, 1),
)


def joined(*sets: list[Record], now: int = T0) -> Registers:
    registers = Registers(RUN, kinds=KINDS)
    for records in sets:
        for record in records:
            registers.merge(record, now)
    return registers


def same(one: Registers, other: Registers) -> bool:
    return one.held(T0) == other.held(T0) and one.state_hash(T0) == other.state_hash(T0)


@settings(max_examples=300)
@given(st.lists(records, max_size=12), st.data())
def test_any_order_and_repetition_gives_one_state(heard: list[Record], data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(heard), max_size=12)) if heard else []
    shuffled = data.draw(st.permutations(heard + again))
    assert same(joined(heard), joined(shuffled))


@settings(max_examples=300)
@given(st.lists(records, max_size=8), st.lists(records, max_size=8), st.lists(records, max_size=8))
def test_merging_states_is_commutative_associative_and_idempotent(
    a: list[Record], b: list[Record], c: list[Record]
) -> None:
    def join(*states: Registers) -> Registers:
        return joined(*(list(state.held(T0)) for state in states))

    x, y, z = joined(a), joined(b), joined(c)
    assert same(join(x, y), join(y, x))
    assert same(join(join(x, y), z), join(x, join(y, z)))
    assert same(join(x, x), x)


@settings(max_examples=200)
@given(st.lists(st.tuples(records, st.integers(0, 900)), max_size=10), st.data())
def test_replicas_that_sweep_at_other_times_agree_on_what_is_left(
    heard: list[tuple[Record, int]], data: st.DataObject
) -> None:
    """Both hear everything, at times between T0 and T0 + 2 s that grow, one sweeping at each step and one never."""
    eager, lazy, now = Registers(RUN, kinds=KINDS), Registers(RUN, kinds=KINDS), T0
    for record, pause in heard:
        now += pause
        eager.merge(record, now)
        eager.sweep(now)
    for record, _ in data.draw(st.permutations(heard)):
        lazy.merge(record, T0)
    assert eager.state_hash(now) == lazy.state_hash(now)
    assert eager.live(now) == lazy.live(now)


@settings(max_examples=200)
@given(st.lists(st.tuples(records, st.integers(0, 900), st.booleans()), max_size=15))
def test_what_expired_never_comes_back(steps: list[tuple[Record, int, bool]]) -> None:
    registers, now, greatest = Registers(RUN, kinds=KINDS), T0, dict[tuple[str, str], tuple[int, bytes]]()
    for record, pause, sweep in steps:
        now += pause
        outcome = registers.merge(record, now)
        assert (outcome is Merged.EXPIRED) == (record.expiry <= now)
        if sweep:
            registers.sweep(now)
        for standing in registers.held(now):
            slot = (standing.author, standing.key)
            assert standing.expiry > now
            assert greatest.get(slot, (0, b"")) <= standing.order  # never an older value than was seen before
            greatest[slot] = standing.order


def test_of_records_with_equal_clocks_the_greater_id_wins_on_every_replica() -> None:
    one, two = make_record("A", "member", T0, 1), make_record("A", "member", T0, 2)
    winner = max(one, two, key=lambda r: r.id)
    assert joined([one, two]).live(T0) == joined([two, one]).live(T0) == (winner,)


def test_outcomes_say_what_became_of_a_record() -> None:
    registers = Registers(RUN, kinds=KINDS, max_authors=1)
    old, new = make_record("A", "member", T0), make_record("A", "member", T0 + 1)
    assert registers.merge(new, T0) is Merged.STORED
    assert registers.merge(new, T0) is Merged.KNOWN
    assert registers.merge(old, T0) is Merged.OLDER
    assert registers.merge(make_record("A", "member", T0 + 60_001), T0) is Merged.AHEAD
    assert registers.merge(make_record("A", "member", T0 - 60_000), T0) is Merged.EXPIRED
    assert registers.merge(make_record("B", "member", T0), T0) is Merged.QUOTA
    for key, time in (("note/a", 1), ("note/b", 2)):
        assert registers.merge(make_record("A", key, T0 + time), T0) is Merged.STORED
    assert registers.merge(make_record("A", "note/c", T0), T0) is Merged.QUOTA
    assert registers.merge(make_record("A", "note/c", T0 + 3), T0) is Merged.STORED
    assert [r.key for r in registers.live(T0)] == ["member", "note/b", "note/c"]


def test_a_tombstone_hides_the_value_and_older_values_stay_hidden() -> None:
    registers = Registers(RUN, kinds=KINDS)
    value, deletion = make_record("A", "member", T0), make_record("A", "member", T0 + 1, None)
    registers.merge(value, T0)
    assert registers.get("A", "member", T0) == value
    registers.merge(deletion, T0)
    assert registers.get("A", "member", T0) is None and registers.live(T0) == ()
    assert registers.merge(value, T0) is Merged.OLDER
    assert registers.held(T0) == (deletion,)
    after = deletion.expiry
    assert registers.sweep(after) == 1
    assert registers.merge(value, after) is Merged.EXPIRED


def test_authors_that_expired_make_room() -> None:
    registers = Registers(RUN, kinds=KINDS, max_authors=1)
    registers.merge(make_record("A", "note/a", T0), T0)
    assert registers.merge(make_record("B", "note/a", T0 + 1_000), T0 + 1_000) is Merged.STORED
    assert [r.author for r in registers.held(T0)] == ["B"]


def test_one_authors_records_never_displace_anothers() -> None:
    registers = Registers(RUN, kinds=KINDS)
    registers.merge(make_record("A", "note/a", T0), T0)
    for key, time in product(("note/a", "note/b", "note/c"), range(1, 4)):
        registers.merge(make_record("B", key, T0 + time), T0)
    assert registers.get("A", "note/a", T0) is not None
    assert len(registers.held(T0)) == 3


def test_state_hash_speaks_only_of_what_expires_after_its_cutoff() -> None:
    lease, note = make_record("A", "member", T0), make_record("A", "note/a", T0)
    both, one = joined([lease, note]), joined([lease])
    assert both.state_hash(T0) != one.state_hash(T0)
    assert both.state_hash(note.expiry) == one.state_hash(note.expiry)
    assert one.state_hash(T0 + 5_000) != one.state_hash(T0 + 5_001)  # the cut-off itself is part of the hash
    both.sweep(T0 + 5_000)
    with pytest.raises(ValueError, match="before what this replica still knows"):
        both.state_hash(T0 + 4_999)


def test_records_of_another_run_or_kind_do_not_enter() -> None:
    with pytest.raises(InvalidRecord):
        Registers("cd" * 32, kinds=KINDS).merge(make_record("A", "member", T0), T0)
    with pytest.raises(InvalidRecord):
        Registers(RUN).merge(make_record("A", "note/a", T0), T0)
