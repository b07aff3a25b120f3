"""The rules of a leader: what it must adopt, when a result is final, and whom it leaves out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.methods.known.agreement import (
    Agreement,
    is_safe,
    result_to_adopt,
    seats_of,
    without_broken_links,
)
from swarmnode.protocols.methods.known.messages import Accepted, Ready, RoundRoster, Seat, majority

RUN, PARENT, X, Y = "ab" * 32, "00" * 32, "11" * 32, "22" * 32
VOTERS = ("a", "b", "c", "d", "e")


def accepted(ballot: int, hash: str) -> Accepted:
    return Accepted(ballot, hash, RoundRoster(RUN, 1, ballot, PARENT, (Seat("a", 1, 4),), (), 1.0))


def ready(claim: Accepted | None = None) -> Ready:
    return Ready(RUN, 1, 9, PARENT, 10, 2.0, {}, (), claim)


def test_a_result_that_a_majority_accepted_is_adopted_by_every_majority_that_is_ready() -> None:
    claims = {"a": accepted(1, X), "b": accepted(1, X), "c": accepted(1, X), "d": accepted(0, Y)}
    for size in (3, 4, 5):
        for present in combinations(VOTERS, size):
            adopted = result_to_adopt({p: ready(claims.get(p)) for p in present}, VOTERS)
            assert adopted is not None and adopted[0].state_hash == X
            assert set(adopted[1]) == {p for p in present if p in "abc"}


def test_the_latest_ballot_counts_where_several_may_have_been_decided() -> None:
    readies = {"a": ready(accepted(4, Y)), "b": ready(accepted(2, X)), "c": ready()}
    adopted = result_to_adopt(readies, VOTERS)
    assert adopted is not None and adopted[0].state_hash == Y


def test_a_claim_that_no_majority_can_stand_behind_binds_nobody() -> None:
    readies = {p: ready() for p in VOTERS} | {"e": ready(accepted(1 << 40, Y)), "stranger": ready(accepted(3, Y))}
    assert result_to_adopt(readies, VOTERS) is None


def test_a_minority_does_not_drop_a_claim_that_the_silent_may_share() -> None:
    assert result_to_adopt({"a": ready(accepted(0, X)), "b": ready()}, VOTERS) is not None


def test_a_peer_that_could_not_give_what_it_claims_is_not_believed_again() -> None:
    readies = {"a": ready(), "b": ready(accepted(0, X))}
    assert result_to_adopt(readies, ("a", "b", "c"), distrusted=["b"]) is None


@given(st.sets(st.sampled_from(VOTERS)), st.sets(st.sampled_from(VOTERS)))
def test_two_disjoint_groups_never_both_decide_while_a_majority_is_reachable(one: set[str], two: set[str]) -> None:
    reachable = VOTERS[:3]
    if not one & two:
        assert not (is_safe(one, VOTERS, reachable) and is_safe(two, VOTERS, reachable))


def test_without_a_majority_in_reach_all_that_can_be_reached_decide() -> None:
    assert is_safe({"a", "b"}, VOTERS, ("a", "b"))
    assert not is_safe({"a"}, VOTERS, ("a", "b"))
    assert not is_safe({"a", "b"}, VOTERS, ("a", "b", "c"))


@given(st.sets(st.tuples(st.sampled_from(VOTERS), st.sampled_from(VOTERS)), max_size=6))
def test_no_broken_link_remains_and_somebody_does(broken: set[tuple[str, str]]) -> None:
    remaining = without_broken_links(VOTERS, broken)
    assert remaining and not any(a in remaining and b in remaining for a, b in broken if a != b)
    assert [p for p in VOTERS if p in remaining] == list(remaining)


def test_one_that_everybody_missed_goes_and_so_does_one_that_missed_everybody() -> None:
    assert without_broken_links(VOTERS, {("a", "c"), ("b", "c")}) == ("a", "b", "d", "e")
    assert without_broken_links(VOTERS, {("d", p) for p in "abce"}) == ("a", "b", "c", "e")
    assert without_broken_links(VOTERS, {("a", "b")}) == ("a", "c", "d", "e")


def test_the_next_window_follows_the_median_and_no_claim() -> None:
    here = SimpleNamespace(position=SimpleNamespace(window=60.0), elapsed=lambda: 5.0)
    leader: Any = SimpleNamespace(acceptor=here, _settings=SimpleNamespace(deadline_floor=1.0))
    next_window, slow_claim = partial(Agreement._next_window, leader), replace(ready(), train_seconds=1e9)
    assert next_window([ready(), ready(), slow_claim], 1.0) == 4.0
    assert next_window([slow_claim], 1.0) == 10.0
    assert next_window([slow_claim], 1.5) == 15.0
    assert next_window([replace(ready(), samples=0)], 1.0) == 60.0


def test_what_a_peer_measured_of_itself_does_not_count() -> None:
    readies = {"a": replace(ready(), rates={"a": 1e9, "b": 100.0}), "b": replace(ready(), rates={"a": 100.0})}
    assert {seat.share for seat in seats_of(("a", "b"), readies, weight_cap=2.0)} == {4}


def through_relays(*pairs: str, members: str = "abcde") -> dict[str, Ready]:
    """Readies of members whose `pairs`, "ab", reach each other through relays."""
    return {
        p: replace(ready(), relayed=tuple(other for other in members if p + other in pairs or other + p in pairs))
        for p in members
    }


def owners(readies: dict[str, Ready]) -> str:
    return "".join(seat.peer for seat in seats_of(tuple(readies), readies, weight_cap=2.0) if seat.share)


def test_members_behind_relays_own_no_part() -> None:
    assert owners(through_relays()) == "abcde"
    assert owners(through_relays("ab", members="abc")) == "c"


def test_a_private_pair_that_is_direct_counts_as_direct() -> None:
    # a is public; b and c, punched through to each other, are not; neither gets through to d and e
    assert owners(through_relays("bd", "be", "cd", "ce", "de")) == "abc"
    assert owners(through_relays("bd", "be", "cd", "ce", "de", members="bcde")) == "bc"


def test_where_all_are_relayed_all_own_parts() -> None:
    assert owners(through_relays("ab", members="ab")) == "ab"
    assert owners(through_relays("ab", "ac", "bc", members="abc")) == "abc"


def test_nobody_is_a_client_because_another_says_so() -> None:
    readies = through_relays() | {"e": replace(ready(), relayed=("a", "b", "c", "d"))}
    assert owners(readies) == "abcde"


@pytest.mark.parametrize(("voters", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_more_than_half_is_a_majority(voters: int, needed: int) -> None:
    assert majority(VOTERS[:voters]) == needed
