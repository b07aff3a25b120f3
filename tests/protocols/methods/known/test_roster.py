"""What every node must conclude alike from the same facts: leaders, weights, parts; and what no message may say."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.methods.known.messages import (
    PART_ALIGNMENT,
    Ready,
    RoundHead,
    RoundRoster,
    RoundStep,
    Seat,
    capped_weights,
    leader_order,
    shares_by_rate,
)
from swarmnode.protocols.wire import WireError, decode, encode
from swarmnode.testing.parts import parts

RUN, PARENT = "ab" * 32, "cd" * 32
PEERS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), unique=True, min_size=1, max_size=9)


def a_roster(**changes: Any) -> RoundRoster:
    fields = {"run_id": RUN, "round": 3, "ballot": 0, "parent": PARENT, "seats": (Seat("a", 1, 4),), "joiners": ()}
    return RoundRoster(**{**fields, "window": 1.0, **changes})


@given(PEERS, st.lists(st.integers(0, 16), min_size=9, max_size=9), st.integers(1, 50_000))
def test_parts_cover_the_vector_exactly_and_start_at_whole_blocks(
    peers: list[str], shares: list[int], parameters: int
) -> None:
    shares[0] = max(1, shares[0])
    roster = a_roster(seats=tuple(Seat(p, 1, s) for p, s in zip(peers, shares, strict=False)))
    cut = parts(roster, parameters)
    assert cut[0].start == 0
    assert cut[-1].stop == parameters
    assert all(a.stop == b.start for a, b in pairwise(cut))
    assert all(part.start < part.stop and part.start % PART_ALIGNMENT == 0 for part in cut)
    assert len({part.owner for part in cut}) == len(cut)


@given(st.dictionaries(st.text("abcd", min_size=1), st.integers(-5, 1 << 53), min_size=1), st.floats(1, 10))
def test_no_claim_of_work_earns_more_than_the_cap(samples: dict[str, int], cap: float) -> None:
    weights = capped_weights(samples, cap)
    assert weights.keys() == samples.keys()
    assert all(0 <= weights[p] <= max(0, samples[p]) for p in samples)
    assert any(weights.values()) == any(n > 0 for n in samples.values())


@pytest.mark.parametrize("honest", [1, 2, 5])
def test_a_boundless_claim_earns_a_few_fair_shares(honest: int) -> None:
    samples = {f"p{i}": 100 for i in range(honest)} | {"liar": 10**15}
    assert capped_weights(samples, 2.0)["liar"] == 200


@given(PEERS, PEERS, st.integers(0, 1 << 40))
def test_leaders_come_in_an_order_that_all_agree_on_voters_first(
    voters: list[str], joiners: list[str], round: int
) -> None:
    order = leader_order(RUN, round, voters, joiners)
    assert order == leader_order(RUN, round, reversed(voters), reversed(joiners))
    assert set(order[: len(voters)]) == set(voters)
    assert sorted(order) == sorted({*voters, *joiners})


def test_leaders_change_from_round_to_round() -> None:
    assert len({leader_order(RUN, round, "abcde")[0] for round in range(40)}) == 5


@given(st.dictionaries(st.text("abcd", min_size=1), st.none() | st.floats(0, 1e15), min_size=1))
def test_shares_are_powers_of_two_around_the_median(rates: dict[str, float | None]) -> None:
    assert set(shares_by_rate(rates).values()) <= {1, 2, 4, 8, 16}


def test_a_node_twice_as_fast_gets_a_larger_part_and_noise_moves_nothing() -> None:
    assert shares_by_rate({"a": 100.0, "b": 100.0, "c": 210.0}) == {"a": 4, "b": 4, "c": 8}
    assert shares_by_rate({"a": 100.0, "b": 140.0, "c": 190.0}) == {"a": 4, "b": 4, "c": 4}


ABSURD_ROSTERS: list[dict[str, Any]] = [
    {"round": -1},
    {"ballot": 1 << 60},
    {"parent": "zz" * 32},
    {"seats": ()},
    {"seats": (Seat("a", 1, 0),)},
    {"seats": (Seat("a", 1, 4), Seat("a", 1, 4))},
    {"seats": (Seat("a" * 200, 1, 4),)},
    {"seats": tuple(Seat(str(i), 1, 1) for i in range(2000))},
    {"joiners": ("x", "x")},
    {"window": math.nan},
    {"window": math.inf},
    {"window": -1.0},
]


@pytest.mark.parametrize("changes", ABSURD_ROSTERS, ids=str)
def test_a_roster_that_no_honest_leader_sends_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        a_roster(**changes)


def unchecked(message: Any, **changes: Any) -> bytes:
    """The message with values that its class refuses, as a peer with other code would send it."""
    for name, value in changes.items():
        object.__setattr__(message, name, value)
    return encode(message)


@pytest.mark.parametrize("changes", [{"weight": -1}, {"weight": 1 << 60}, {"share": 1 << 40}, {"share": -1}], ids=str)
def test_a_seat_that_no_honest_leader_gives_is_refused(changes: dict[str, int]) -> None:
    roster = a_roster()
    unchecked(roster.seats[0], **changes)
    with pytest.raises(WireError, match="Seat"):
        decode(RoundRoster, encode(roster))


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": -1},
        {"samples": 10**18},
        {"train_seconds": math.nan},
        {"train_seconds": -1.0},
        {"train_seconds": math.inf},
        {"rates": {"a": math.nan}},
        {"rates": {"a": math.inf}},
        {"rates": {"a": -1.0}},
        {"rates": {str(i): 1.0 for i in range(2000)}},
        {"round": 1 << 62},
        {"ballot": 1 << 62},
        {"ballot": -1},
        {"parent": ""},
        {"joiners": tuple(str(i) for i in range(2000))},
    ],
    ids=lambda c: str(c)[:40],
)
def test_a_ready_with_absurd_values_does_not_get_in(changes: dict[str, Any]) -> None:
    raw = unchecked(Ready(RUN, 1, 0, PARENT, 10, 1.0, {}, (), None), **changes)
    with pytest.raises(WireError):
        decode(Ready, raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": "not hex"},
        {"elapsed": math.nan},
        {"elapsed": -1.0},
        {"window": math.inf},
        {"round": 1 << 62},
        {"voters": ("a", "a")},
        {"history": tuple(RoundStep(i, PARENT) for i in range(100))},
    ],
    ids=lambda c: str(c)[:40],
)
def test_a_head_with_absurd_values_does_not_get_in(changes: dict[str, Any]) -> None:
    raw = unchecked(RoundHead(1, PARENT, ("a",), (), 1.0, RUN, (), 1.0, False), **changes)
    with pytest.raises(WireError):
        decode(RoundHead, raw)
