"""Ratings against the player that does nothing: OpenSkill's numbers, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.reputation.account import (
    NEW,
    SIGMA,
    Rating,
    better_than_idle,
    match,
    unseen,
)

WON, DRAWN, LOST = 1.0, 0.5, 0.0

# PlackettLuce(tau=0.1) of openskill 6.2.0, against a rating of (25, 0.5): before, outcome, after.
GOLDEN = (
    ((25.0, 25 / 3), WON, (28.398157822716755, 7.748386086461293)),
    ((25.0, 25 / 3), DRAWN, (25.0, 7.748386086461293)),
    ((25.0, 25 / 3), LOST, (21.601842177283245, 7.748386086461293)),
    ((31.5, 4.2), WON, (32.20524490287342, 4.11636208824721)),
    ((31.5, 4.2), DRAWN, (30.988810034247383, 4.11636208824721)),
    ((31.5, 4.2), LOST, (29.772375165621348, 4.11636208824721)),
    ((18.0, 6.0), WON, (20.976822171910445, 5.767164484884679)),
    ((18.0, 6.0), DRAWN, (18.839904747571442, 5.767164484884679)),
    ((18.0, 6.0), LOST, (16.702987323232435, 5.767164484884679)),
)

outcomes = st.lists(st.sampled_from((WON, DRAWN, LOST)), max_size=60)


def played(results: list[float]) -> Rating:
    rating = NEW
    for result in results:
        rating = match(rating, result)
    return rating


@pytest.mark.parametrize(("before", "points", "after"), GOLDEN)
def test_ratings_are_those_of_openskill(before: tuple[float, float], points: float, after: tuple[float, float]) -> None:
    got = match(Rating(*before), points)
    assert (got.mu, got.sigma) == pytest.approx(after, rel=1e-12)


def test_the_chance_to_win_is_that_of_openskill() -> None:
    assert better_than_idle(Rating(31.5, 4.2)) == pytest.approx(0.8149077904243902, rel=1e-12)


def test_a_newcomer_is_as_likely_worse_than_nothing_as_better() -> None:
    assert better_than_idle(NEW) == pytest.approx(0.5)


def test_three_matches_won_are_enough_to_be_sure_and_two_are_not() -> None:
    assert better_than_idle(played([WON] * 3)) > 0.75 > better_than_idle(played([WON] * 2))


@given(outcomes)
def test_winning_once_more_never_lowers_a_rating_and_losing_never_lifts_it(results: list[float]) -> None:
    rating = played(results)
    assert match(rating, LOST).mu < rating.mu < match(rating, WON).mu


@given(outcomes, st.integers(0, 1000))
def test_absence_makes_nobody_better_and_nobody_less_certain_than_a_newcomer(results: list[float], away: int) -> None:
    rating = played(results)
    back = unseen(rating, away)
    assert back.mu == rating.mu
    assert rating.sigma <= back.sigma <= max(SIGMA, rating.sigma)
