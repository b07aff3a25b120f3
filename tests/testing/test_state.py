"""The state in memory keeps what it promises; 2000 examples each with `--hypothesis-profile thorough`."""

from __future__ import annotations

from typing import Any

import laws
import pytest
from hypothesis import given
from laws import KINDS, RUN, T0, joined, make_record

from swarmnode.crdt.kinds import EVIDENCE
from swarmnode.crdt.law import MAX_STEP_BACK, Merged
from swarmnode.crdt.record import InvalidRecord, evidence_of
from swarmnode.testing.state import State


@given(laws.JOIN.examples)
def test_merging_states_commutes_associates_and_repeats(example: Any) -> None:
    laws.JOIN.check(example)


@given(laws.ORDER.examples)
def test_any_order_and_repetition_of_elements_gives_one_state(example: Any) -> None:
    laws.ORDER.check(example)


@given(laws.DEFINITION.examples)
def test_merging_one_by_one_gives_what_the_law_defines_for_all_at_once(example: Any) -> None:
    laws.DEFINITION.check(example)


@given(laws.SIGNATURES.examples)
def test_signing_again_is_neither_news_nor_equivocation(example: Any) -> None:
    laws.SIGNATURES.check(example)


@given(laws.QUOTAS.examples)
def test_quotas_hold_whatever_the_order(example: Any) -> None:
    laws.QUOTAS.check(example)


@given(laws.NO_RETURN.examples)
def test_nothing_deleted_or_expired_comes_back_even_as_clocks_step_back(example: Any) -> None:
    laws.NO_RETURN.check(example)


@given(laws.CONVERGENCE.examples)
def test_replicas_that_lose_sweep_and_repair_end_with_one_state_hash(example: Any) -> None:
    laws.CONVERGENCE.check(example)


@given(laws.AHEAD.examples)
def test_what_was_ahead_is_taken_when_it_is_offered_again(example: Any) -> None:
    laws.AHEAD.check(example)


@given(laws.EQUIVOCATION.examples)
def test_equivocation_ends_in_evidence(example: Any) -> None:
    laws.EQUIVOCATION.check(example)


@given(laws.EXCHANGED_EVIDENCE.examples)
def test_replicas_that_convict_for_different_reasons_agree_after_exchange(example: Any) -> None:
    laws.EXCHANGED_EVIDENCE.check(example)


def test_a_ruling_names_what_left() -> None:
    state = State(RUN, kinds=KINDS)
    first, second = make_record("A", "note/a", T0), make_record("A", "note/a", T0 + 1)
    assert state.merge(first, T0).gone is None
    assert state.merge(second, T0).gone == first
    assert state.merge(make_record("A", "note/b", T0 + 2), T0).gone is None
    assert state.merge(make_record("A", "note/c", T0 + 3), T0).gone == second


def test_a_tombstone_hides_the_value_for_as_long_as_it_would_have_lived() -> None:
    state = State(RUN, kinds=KINDS)
    value, deletion = make_record("A", "note/a", T0), make_record("A", "note/a", T0 + 1, None)
    state.merge(value, T0)
    state.merge(deletion, T0)
    assert state.get("A", "note/a", T0) == deletion
    assert state.merge(value, T0).verdict is Merged.OLDER
    assert state.sweep(deletion.expiry) == [deletion]
    assert state.merge(value, deletion.expiry).verdict is Merged.EXPIRED
    assert state.merge(value, T0).verdict is Merged.EXPIRED  # nor when the clock is set back


def test_what_expired_is_not_read_again_when_the_clock_is_set_back_before_a_sweep() -> None:
    note = make_record("A", "note/a", T0)
    state = joined([note])
    state.merge(make_record("A", "note/b", note.expiry), note.expiry)
    assert state.get("A", "note/a", T0) is None


def test_a_clock_that_had_run_far_ahead_does_not_close_the_state() -> None:
    state = State(RUN, kinds=KINDS)
    state.sweep(T0 + MAX_STEP_BACK + 1)
    assert state.merge(make_record("A", "note/a", T0), T0).verdict is Merged.STORED


def test_two_contradicting_records_both_stand_and_the_greater_is_read() -> None:
    first, second = (make_record("A", laws.MOMENTS[0], T0 + later, later) for later in (0, 1))
    state = joined([second, first])
    assert state.held(T0) == (first, second)
    assert state.get("A", laws.MOMENTS[0], T0) == second


def test_a_record_that_finds_no_slot_still_convicts() -> None:
    """Otherwise an author whose slots are full could date its second word back, and be heard by some only."""
    standing = [make_record("A", moment, T0 + 5) for moment in laws.MOMENTS[:3]]
    state, backdated = joined(standing), make_record("A", laws.MOMENTS[1], T0, 2)
    assert state.merge(backdated, T0).verdict is Merged.QUOTA
    ((evidence, _),) = state.convict(T0)
    assert evidence == evidence_of(standing[1], backdated)
    assert state.convict(T0) == []


def test_all_who_equivocate_in_one_batch_are_convicted() -> None:
    state = joined(make_record(author, key, T0, value) for author in "AB" for key in laws.MOMENTS for value in range(2))
    guilty = [(author, f"evidence/{kind}") for author in "AB" for kind in ("commit", "score")]
    assert sorted((evidence.author, evidence.key) for evidence, _ in state.convict(T0)) == guilty


def test_one_proof_is_enough_until_half_of_its_life_is_over() -> None:
    first, second, third = (make_record("A", laws.MOMENTS[0], T0, value) for value in range(3))
    state = joined([first, second])
    assert len(state.convict(T0)) == 1
    state.merge(third, T0)
    assert state.convict(T0) == []
    later = T0 + EVIDENCE.ttl // 2 + 1
    for value in range(2):
        state.merge(make_record("A", laws.MOMENTS[1], later, value), later)
    ((renewed, ruling),) = state.convict(later)
    assert ruling.gone is not None and renewed.hlc > ruling.gone.hlc
    assert [one for one in state.held(later) if one.kind == "evidence"] == [renewed]


def test_one_authors_elements_never_displace_anothers() -> None:
    state = joined([make_record("A", "note/a", T0)])
    for key in ("note/a", "note/b", "note/c"):
        for time in range(1, 4):
            state.merge(make_record("B", key, T0 + time), T0)
    assert state.get("A", "note/a", T0) is not None
    assert len(state.held(T0)) == 3


def test_elements_of_a_kind_that_is_not_held_do_not_enter() -> None:
    with pytest.raises(InvalidRecord):
        State(RUN, kinds={"member": KINDS["member"]}).merge(make_record("A", "note/a", T0), T0)
