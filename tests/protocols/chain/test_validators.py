"""Who judges, leads and takes part: it grows slowly, survives outages, and identities alone buy nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from chains import RULES, after_rounds, hashed, start
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.chain.forks import empty_block
from swarmnode.protocols.chain.state import (
    ATTEMPTS,
    COMMITTEE,
    EARN_LAG,
    EARN_ROUNDS,
    EARN_WINDOW,
    EVERYBODY,
    FALL,
    GROWTH,
    MILLION,
    REMEMBERED,
    ChainState,
    Worked,
    judges,
    leaders,
    majority,
    next_participation,
    next_validators,
    participates,
    quorum,
    ticket,
    volunteers,
)
from swarmnode.protocols.chain.statements import MAX_COMMITS

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@st.composite
def chains(draw: st.DrawFn) -> ChainState:
    validators = draw(st.sets(st.sampled_from(NAMES), min_size=1))
    work = st.sets(st.sampled_from(NAMES), max_size=8).map(
        lambda names: tuple(Worked(name, draw(st.integers(1, 1000))) for name in sorted(names))
    )
    return replace(
        start(validators),
        genesis=tuple(sorted(draw(st.sets(st.sampled_from(sorted(validators)))))),
        made=draw(st.sampled_from([0, 16, 32, 48])),
        history=tuple(draw(st.lists(work, max_size=REMEMBERED))),
        seed=hashed(draw(st.integers(0, 99))),
        empties=draw(st.integers(0, 8)),
        participation=draw(st.integers(1, EVERYBODY)),
    )


@given(chains())
def test_newcomers_are_few_proven_and_no_majority(chain: ChainState) -> None:
    after = next_validators(chain, RULES)
    new = set(after) - set(chain.validators)
    assert after and len(new) <= max(1, len(chain.validators) * GROWTH // MILLION)
    assert 2 * len(new) <= len(after)
    assert len(after) - len(chain.validators) <= max(1, len(chain.validators) // 8)
    old = chain.history[: max(0, len(chain.history) - EARN_LAG)][-EARN_WINDOW:]
    for one in new:
        assert sum(one in {worked.author for worked in roster} for roster in old) >= EARN_ROUNDS


@given(chains())
def test_nobody_lapses_who_works_and_never_more_than_half(chain: ChainState) -> None:
    after = set(next_validators(chain, RULES))
    gone = set(chain.validators) - after
    assert 2 * len(gone) <= len(chain.validators)
    old = chain.history[: max(0, len(chain.history) - EARN_LAG)][-EARN_WINDOW:]
    for one in gone:
        assert sum(one in {worked.author for worked in roster} for roster in old) < EARN_ROUNDS


@given(chains())
def test_judges_and_leaders_are_validators_and_any_two_quorums_meet(chain: ChainState) -> None:
    judging, leading = judges(chain), leaders(chain)
    assert set(leading) <= set(judging) <= set(chain.validators)
    assert len(leading) == min(ATTEMPTS, len(judging)) == len(set(leading))
    assert 2 * majority(chain) > len(judging)
    assert 1 <= quorum(chain) <= majority(chain)
    assert quorum(chain) == majority(chain) or chain.empties >= 3


def test_above_the_committee_s_size_judges_are_drawn_by_the_seed() -> None:
    many = start(f"{name}{number}" for name in NAMES for number in "123")
    drawn = {judges(replace(many, seed=hashed(seed))) for seed in range(20)}
    assert len(drawn) == 20 and {len(one) for one in drawn} == {COMMITTEE}


def test_an_outage_of_any_length_costs_nobody_its_place() -> None:
    chain = after_rounds(start("ABCDE"), RULES, 40, "ABCDE")
    later = chain
    for _ in range(100):
        later = empty_block(later).chain
    assert (later.validators, later.history, later.made) == (chain.validators, chain.history, chain.made)


def test_who_works_becomes_a_validator_one_after_the_other() -> None:
    chain = after_rounds(start("A"), RULES, 15, "AXYZ")
    assert chain.validators == ("A",)
    chain = after_rounds(chain, RULES, 1, "AXYZ")
    assert len(chain.validators) == 2
    chain = after_rounds(chain, RULES, 16, "AXYZ")
    assert len(chain.validators) == 3


def test_of_newcomers_who_is_not_seen_to_do_harm_comes_first() -> None:
    chain = after_rounds(start("A"), RULES, 16, "AXYZ", gains={"A": 1000, "X": -1, "Y": 900, "Z": -1})
    assert chain.validators == ("A", "Y")


def test_validators_who_died_for_good_lose_their_places_and_the_run_goes_on() -> None:
    """Four of five never return: rounds end empty, then the one that is left goes on, and newcomers earn places."""
    chain = after_rounds(start("ABCDE"), RULES, 30, "ABCDE")
    chain = after_rounds(chain, RULES, 300, "EXYZ", silent="ABCD")
    assert chain.made > 100
    assert "E" in chain.validators and not set("ABCD") & set(chain.validators) and len(chain.validators) >= 3


def test_genesis_validators_need_work_after_two_changes() -> None:
    idle = after_rounds(start("ABC"), RULES, 31, "AX")
    assert {"A", "B", "C"} <= set(idle.validators)
    assert set(after_rounds(idle, RULES, 33, "AX").validators) == {"A", "X"}


@pytest.mark.parametrize("nodes", [10, 100, 1000, 10_000])
def test_participation_settles_at_what_is_aimed_at(nodes: int) -> None:
    chain = start("ABCD")
    names = [f"{name}{number}" for number in range(nodes // 10) for name in "0123456789"]
    for _ in range(30):
        listed = cut_by_judges(chain, names)
        drawn = sum(participates(chain, name) for name in names)
        chain = replace(chain, participation=next_participation(chain, RULES, listed))
    if nodes <= RULES.participants - 4:
        assert drawn == nodes
    else:
        assert 0.5 * RULES.participants <= drawn <= 1.5 * RULES.participants
    assert all(participates(chain, validator) for validator in "ABCD")


def cut_by_judges(chain: ChainState, names: list[str]) -> list[str]:
    """Of those who may contribute, whom judges who hold all their commits list."""
    drawn = [name for name in names if participates(chain, name)]
    return sorted(drawn, key=lambda name: ticket(chain, name))[:MAX_COMMITS]


@pytest.mark.parametrize("nodes", [100, 300, 1000])
def test_a_run_begun_by_many_has_as_many_contributions_as_are_aimed_at_from_its_second_round(nodes: int) -> None:
    chain = start("ABCD")
    names = [f"n{number}" for number in range(nodes)]
    after = replace(chain, participation=next_participation(chain, RULES, cut_by_judges(chain, names)))
    assert sum(participates(after, name) for name in names) == RULES.participants - len("ABCD")


@pytest.mark.parametrize("nodes", [1000, 10_000])
def test_many_who_begin_a_run_hold_back_and_later_nobody_does(nodes: int) -> None:
    chain = start("ABCD")
    names = [f"n{number}" for number in range(nodes)]
    eager = sum(volunteers(chain, RULES, name, nodes) for name in names)
    assert RULES.participants <= eager <= 3 * RULES.participants
    assert all(volunteers(chain, RULES, name, RULES.participants) for name in names)  # a small swarm as it sees it
    assert all(volunteers(chain, RULES, validator, nodes) for validator in "ABCD")
    later = replace(chain, made=1, participation=EVERYBODY // 2)
    assert all(volunteers(later, RULES, name, nodes) == participates(later, name) for name in names)


def test_those_drawn_anew_who_have_to_catch_up_are_no_reason_to_draw_more() -> None:
    chain = start("ABCD")
    names = [f"n{number}" for number in range(1000)]
    drawn_for: Counter[str] = Counter()
    listed_in = []
    for made in range(EARN_WINDOW + 6):
        if made == EARN_WINDOW:
            chain, drawn_for = replace(chain, cohort=hashed("next")), Counter()
        drawn_for.update(name for name in names if participates(chain, name))
        there = [name for name in names if made < EARN_WINDOW or drawn_for[name] >= 1 + int(name[1:]) % 3]
        listed = cut_by_judges(chain, there)
        listed_in.append(len(listed))
        chain = replace(chain, made=made + 1, participation=next_participation(chain, RULES, listed))
    room = RULES.participants - len("ABCD")
    after = listed_in[EARN_WINDOW:]
    assert after[0] < room / 2 and all(0.75 * room <= count <= 1.3 * room for count in after[2:])


@given(st.integers(1, EVERYBODY), st.sets(st.integers(0, 1 << 20), max_size=MAX_COMMITS))
def test_participation_never_vanishes_nor_leaps(before: int, strangers: set[int]) -> None:
    after = next_participation(replace(start("AB"), participation=before), RULES, map(str, strangers))
    assert max(1, before // FALL) <= after <= min(EVERYBODY, 2 * before)


@given(st.sets(st.integers(0, 1 << 20), max_size=MAX_COMMITS))
def test_of_too_many_who_were_listed_those_stay_for_whom_there_is_room(strangers: set[int]) -> None:
    chain = replace(start("AB"), participation=EVERYBODY)
    names = {str(number) for number in strangers}
    after = replace(chain, participation=next_participation(chain, RULES, names))
    stay = sum(participates(after, name) for name in names)
    room = RULES.participants - len("AB")
    assert stay == len(names) if len(names) <= room else room - 1 <= stay <= room  # rates are in millionths


def test_the_same_are_drawn_until_the_validator_set_changes() -> None:
    chain = replace(start("ABCD"), participation=EVERYBODY // 2)
    later = replace(chain, seed=hashed("next"))
    names = [f"{a}{b}" for a in NAMES for b in NAMES]
    assert [participates(chain, name) for name in names] == [participates(later, name) for name in names]
    other = replace(chain, cohort=hashed("next"))
    assert [participates(chain, name) for name in names] != [participates(other, name) for name in names]
