"""Others' words: what liars with less than half of the voices can do, and what a node believes of what it saw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.reputation.account import judge_voice, weighted_median
from swarmnode.protocols.reputation.view import FEW, with_own

values = st.floats(0.0, 1.0)
voices = st.floats(0.01, 10.0)
heard = st.lists(st.tuples(values, voices), min_size=1, max_size=20)


@given(heard, st.lists(st.tuples(values, voices), max_size=20))
def test_liars_with_less_than_half_of_the_voices_move_the_median_to_no_value_beyond_the_honest(
    honest: list[tuple[float, float]], liars: list[tuple[float, float]]
) -> None:
    while liars and sum(voice for _, voice in liars) >= 0.99 * sum(voice for _, voice in honest):
        liars.pop()
    found = weighted_median([*honest, *liars])
    assert found is not None
    assert min(value for value, _ in honest) <= found <= max(value for value, _ in honest)


@given(heard)
def test_the_order_in_which_words_are_heard_does_not_matter(said: list[tuple[float, float]]) -> None:
    assert weighted_median(said) == weighted_median(list(reversed(said)))


def test_voices_without_weight_are_not_heard() -> None:
    assert weighted_median([(0.0, 0.0), (0.5, 1.0), (1.0, 0.0)]) == 0.5
    assert weighted_median([(0.5, 0.0)]) is None


def test_half_of_the_weight_on_either_side_gives_the_middle() -> None:
    assert weighted_median([(0.0, 1.0), (1.0, 1.0)]) == 0.5


@given(values, st.integers(int(FEW), 100), heard)
def test_what_a_node_saw_for_long_enough_nobody_talks_it_out_of(
    own: float, rounds: int, said: list[tuple[float, float]]
) -> None:
    nearest = [value for value, _ in said]
    believed = with_own(own, rounds, said)
    assert believed == pytest.approx(own) or min(*nearest, own) <= believed <= max(*nearest, own)
    assert with_own(own, rounds + 1, said) == own


def test_a_node_that_saw_nothing_needs_more_than_one_weak_voice_to_believe_anything() -> None:
    assert with_own(0.0, 0, [(1.0, 0.4)]) == 0.0
    assert with_own(0.0, 0, [(1.0, 0.4), (0.9, 0.4)]) == 0.9


def test_a_judge_who_does_half_of_the_work_is_heard_in_full_and_one_without_any_hardly() -> None:
    assert judge_voice(0.5) == judge_voice(1.0) == 1.0
    assert 0 < judge_voice(0.0) <= 0.05
