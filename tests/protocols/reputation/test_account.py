"""What a node makes of what it sees of one peer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.chain.statements import Refusal
from swarmnode.protocols.reputation.account import (
    MAX_PEERS,
    NEWCOMER,
    Account,
    Judged,
    RoundWork,
    after_roster,
    after_violations,
    after_work,
    contained,
    score,
    weight,
    work,
)

gains = st.lists(st.floats(-1.0, 1.0), max_size=60)


def seen(history: list[float], first: int = 0) -> Account:
    account = NEWCOMER
    for round, gain in enumerate(history, first):
        account = after_work(account, gain, round=round)
    return account


def test_a_newcomer_counts_for_nothing() -> None:
    assert score(NEWCOMER) == work(NEWCOMER, 5) == weight(NEWCOMER, 5) == 0.0


@given(gains)
def test_score_work_and_weight_stay_between_nothing_and_one(history: list[float]) -> None:
    account = seen(history)
    assert 0.0 <= score(account) <= 1.0
    assert 0.0 <= work(account, len(history)) <= 1.0
    assert weight(account, len(history)) == score(account) * work(account, len(history))


@given(st.lists(st.floats(-1.0, 0.0), max_size=60))
def test_who_never_helped_has_no_weight_whatever_else_it_did(history: list[float]) -> None:
    assert weight(seen(history), len(history)) == 0.0


@given(gains, st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
def test_a_better_contribution_never_leads_to_less_weight(history: list[float], one: float, other: float) -> None:
    now, account = len(history), seen(history)
    low, high = sorted((one, other))
    after = [weight(after_work(account, gain, round=now), now + 1) for gain in (low, high)]
    assert after[0] <= after[1] + 1e-12


@given(gains, st.integers(1, 500))
def test_leaving_never_adds_weight(history: list[float], away: int) -> None:
    account = seen(history)
    assert weight(account, len(history) + away) <= weight(account, len(history)) + 1e-12


@given(gains, st.integers(1, 500))
def test_who_did_harm_has_no_more_weight_after_an_absence_than_a_newcomer_who_does_the_same(
    history: list[float], away: int
) -> None:
    bad = [-abs(gain) for gain in history]
    now = len(bad) + away
    back, new = after_work(seen(bad), 1.0, round=now), after_work(NEWCOMER, 1.0, round=now)
    assert weight(back, now + 1) <= weight(new, now + 1) + 1e-12


@given(gains, st.floats(0.1, 20.0))
def test_an_offence_lowers_the_score_of_whoever_has_one(history: list[float], bad: float) -> None:
    account = seen(history)
    worse = after_violations(account, bad=bad, round=len(history))
    assert score(worse) < score(account) or score(account) == 0.0


@given(st.lists(st.floats(0.3, 1.0), min_size=10, max_size=40), st.integers(2, 10))
def test_work_under_many_names_weighs_no_more_than_under_one(history: list[float], names: int) -> None:
    one = weight(seen(history), len(history))
    split = weight(seen([gain / names for gain in history]), len(history))
    assert names * split <= one * 1.05


def test_a_strike_of_a_trusted_peer_takes_three_quarters_and_four_in_a_row_all_but_a_hundredth() -> None:
    account, now = seen([1.0] * 60), 60
    before = weight(account, now)
    weights = []
    for strike in range(4):
        account = after_work(account, -1.0, round=now + strike)
        weights.append(weight(account, now + strike + 1))
    assert weights[0] <= 0.25 * before
    assert weights[3] <= 0.01 * before


def test_lesser_harm_takes_more_the_longer_it_goes_on() -> None:
    account = seen([1.0] * 60)
    left = []
    for round in range(60, 64):
        before = weight(account, round)
        account = after_work(account, -0.3, round=round)
        left.append(weight(account, round + 1) / before if before else 0.0)
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.1


def test_one_contribution_that_harms_a_little_strikes_nobody() -> None:
    before = seen([1.0] * 30)
    after = after_work(before, -0.05, round=30)
    assert after.strikes == 0
    assert weight(after, 31) > 0.75 * weight(before, 30)


def test_an_outage_of_twenty_rounds_costs_less_than_five_percent() -> None:
    account = seen([1.0] * 40)
    assert weight(account, 60) == pytest.approx(weight(account, 40), rel=0.05)
    back = account
    for round in range(60, 63):
        back = after_work(back, 1.0, round=round)
    assert score(back) == score(account) == 1.0
    assert weight(back, 63) == pytest.approx(weight(account, 40), rel=0.03)


def test_an_honest_newcomer_has_four_fifths_of_a_full_weight_after_eight_rounds() -> None:
    assert weight(seen([1.0] * 8), 8) >= 0.8 > weight(seen([1.0] * 7), 7)


def test_contained_is_who_goes_on_doing_harm() -> None:
    assert contained(seen([-1.0] * 3))
    assert not contained(seen([-1.0] * 2))
    assert not contained(seen([-1.0] * 5 + [1.0]))
    assert not contained(seen([0.0] * 20))


def test_accounts_of_many_who_came_and_went_are_bounded_and_those_who_work_keep_theirs() -> None:
    accounts: Mapping[str, Account] = {}
    for round in range(60):
        came = (Judged(f"{round} {number}", Refusal.MALFORMED, False, {}) for number in range(95))
        works = (Judged("steady", 0, True, {"judge": 500.0}), *came)
        accounts = after_roster(accounts, RoundWork(round, round.to_bytes(32, "big"), works))
    assert len(accounts) == MAX_PEERS and "steady" in accounts
    assert "0 0" not in accounts and "59 94" in accounts
