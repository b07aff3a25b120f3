"""Validators who are silent leave soon, nobody else does, and those who earned a place take their seats one by one."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import pytest
from chains import RULES, after_rounds, block, cut, hashed, offer, quote, row, scores, start
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.chain import state as chainstate
from swarmnode.protocols.chain.forks import empty_block
from swarmnode.protocols.chain.state import (
    EARN_WINDOW,
    GROWTH,
    MILLION,
    REMEMBERED,
    SILENCE,
    SMALL,
    ChainState,
    Worked,
    disproved,
    judges,
    leaders,
    majority,
    most_validators,
    next_silent,
    places_of,
    quorum,
    reseated,
    successors,
)

NAMES = tuple(f"validator-{number:02d}" for number in range(16))
OTHERS = tuple(f"other-{number:02d}" for number in range(48))


def roster(chain: ChainState, quoted: Mapping[str, Iterable[str]], authors: Collection[str] = ()) -> ChainState:
    """The chain after a roster that quotes the cuts of these judges, who missed so many others of the round before."""
    offers = [offer(chain, author) for author in authors]
    cuts = [cut(chain, judge, (one.id for one in offers), absent=missed) for judge, missed in quoted.items()]
    scored = [scores(chain, judge, [row(one.id, one.gain) for one in offers]) for judge in quoted]
    return block(chain, RULES, quote(cuts, scored, offers)).chain


# --- who leaves -------------------------------------------------------------------------------------------------------


def test_a_validator_that_most_judges_missed_for_some_rosters_is_none_any_more() -> None:
    chain, rest = start(NAMES), NAMES[1:]
    for _ in range(SILENCE - 1):
        chain = roster(chain, {judge: NAMES[:1] for judge in rest})
    assert chain.validators == NAMES
    chain = roster(chain, {judge: NAMES[:1] for judge in rest})
    assert chain.validators == rest and chain.silent == {}


def test_a_swarm_that_loses_its_validators_one_after_the_other_goes_on_without_an_empty_round() -> None:
    chain, left = start(NAMES), list(NAMES)
    while len(left) > SMALL - 1:
        left.pop()
        chain = after_rounds(chain, RULES, SILENCE + 1, left, silent=set(NAMES) - set(left))
    assert chain.empties == 0 and chain.made == chain.round
    assert len(chain.validators) == SMALL


@given(st.integers(5, 16), st.randoms(use_true_random=False))
def test_a_minority_of_liars_has_nobody_removed_whom_most_judges_heard(validators: int, rng: random.Random) -> None:
    """Whichever cuts a lying leader quotes: here a quorum at least, all liars, and never the one to be removed."""
    chain = start(NAMES[:validators])
    needed = quorum(chain)
    liars = set(rng.sample(NAMES[:validators], validators - needed))
    victim = min(set(chain.validators) - liars)
    for _ in range(4 * SILENCE):
        others = sorted(set(chain.validators) - {victim} - liars)
        chosen = liars.union(rng.sample(others, rng.randint(max(0, needed - len(liars)), len(others))))
        chain = roster(chain, {judge: set(chain.validators) - liars if judge in liars else () for judge in chosen})
        assert victim in chain.validators and victim not in chain.silent


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=9), min_size=1, max_size=12))
def test_who_is_quoted_is_never_removed_whatever_others_say(quoted: list[set[str]]) -> None:
    chain = start(NAMES)
    for chosen in quoted:
        there = set(chosen).intersection(chain.validators)
        if len(there) < quorum(chain):
            break
        chain = roster(chain, {judge: chain.validators for judge in there})
        assert there <= set(chain.validators) and there.isdisjoint(chain.silent)


def test_who_is_heard_again_begins_at_zero() -> None:
    chain = start(NAMES)
    for _ in range(3):
        for _ in range(SILENCE - 1):
            chain = roster(chain, {judge: NAMES[:1] for judge in NAMES[1:]})
        assert chain.silent == {NAMES[0]: SILENCE - 1}
        chain = roster(chain, {judge: () for judge in NAMES})
        assert chain.silent == {}
    assert chain.validators == NAMES


@given(st.integers(1, 16), st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9)))
def test_a_validator_set_never_becomes_small(validators: int, silent: dict[str, int]) -> None:
    chain = replace(start(NAMES[:validators]), made=1, silent=silent)
    after = reseated(chain, RULES)
    assert len(after.validators) >= min(validators, SMALL)
    gone = set(chain.validators) - set(after.validators)
    assert all(silent[validator] >= SILENCE for validator in gone)
    if len(after.validators) > SMALL:
        assert all(silent.get(validator, 0) < SILENCE for validator in after.validators)
    assert set(after.silent) <= set(after.validators)


def test_silence_is_part_of_the_chain() -> None:
    chain = roster(start(NAMES), {judge: NAMES[:2] for judge in NAMES[2:]})
    assert chain.silent == dict.fromkeys(NAMES[:2], 1)
    assert chainstate.decode(chain.encode()) == chain
    assert chain.digest != replace(chain, silent={}).digest
    assert empty_block(chain).chain.silent == chain.silent


def test_a_testimony_counts_by_who_is_named_and_nobody_else() -> None:
    chain = start(NAMES)
    assert places_of(chain, ["nobody", NAMES[3], NAMES[1]]) == (1, 3)
    beyond = replace(cut(chain, NAMES[0], ()).what, absent=(0, 99))
    said = [replace(cut(chain, judge, ()), what=beyond) for judge in NAMES[1:]]
    assert next_silent(chain, said) == {NAMES[0]: 1}


def test_who_was_missed_leads_after_all_others() -> None:
    for seed in range(20):
        chain = replace(start(NAMES[:5]), seed=hashed(seed), silent={NAMES[2]: 1})
        assert leaders(chain)[-1] == NAMES[2]
        assert set(leaders(chain)) == set(NAMES[:5])


def test_above_the_committee_s_size_those_who_do_not_judge_keep_their_places() -> None:
    many = tuple(f"{name}-{place}" for name in NAMES for place in "abc")
    chain = start(many)
    for _ in range(3 * SILENCE):
        judging = judges(chain)
        chain = roster(chain, {judge: () for judge in judging})
    assert chain.validators == tuple(sorted(many))
    dead = set(many[:12])
    for _ in range(30):
        judged = judges(chain)
        following = roster(chain, {judge: () for judge in judged if judge not in dead})
        missed = dead.intersection(judged)
        chain = roster(following, {judge: missed for judge in judges(following) if judge not in dead})
    assert dead.isdisjoint(chain.validators)


# --- who lies ---------------------------------------------------------------------------------------------------------


def accused(chain: ChainState, naming: Mapping[str, Iterable[str]], authors: Collection[str] = NAMES) -> ChainState:
    """The chain after a roster of work by these authors that quotes judges, who disproved so many others."""
    offers = [offer(chain, author) for author in authors]
    cuts = [
        cut(chain, judge, (one.id for one in offers), disproved=naming.get(judge, ())) for judge in chain.validators
    ]
    scored = [scores(chain, judge, [row(one.id, one.gain) for one in offers]) for judge in chain.validators]
    return block(chain, RULES, quote(cuts, scored, offers)).chain


def test_whom_most_judges_disproved_is_no_validator_and_has_earned_nothing() -> None:
    chain = after_rounds(start(NAMES), RULES, 20, NAMES)
    enough = majority(chain)
    assert accused(chain, dict.fromkeys(NAMES[1:enough], NAMES[:1])).validators == NAMES
    after = accused(chain, dict.fromkeys(NAMES[1 : enough + 1], NAMES[:1]))
    assert after.validators == NAMES[1:]
    assert all(one.author != NAMES[0] for worked in after.history for one in worked)
    assert all(len(worked) == len(NAMES) - 1 for worked in after.history)
    assert chainstate.decode(after.encode()) == after and after.digest != replace(after, expelled={}).digest


@pytest.mark.parametrize("made", [3, 20])  # while genesis validators need no proof of work, and later
def test_who_was_disproved_comes_back_after_a_whole_window_and_not_before(made: int) -> None:
    chain = after_rounds(start(NAMES), RULES, made, NAMES)
    chain = accused(chain, dict.fromkeys(NAMES[1:], NAMES[:1]))
    for _ in range(EARN_WINDOW - 1):
        assert NAMES[0] not in chain.validators and NAMES[0] not in successors(chain)
        chain = after_rounds(chain, RULES, 1, NAMES)
    chain = after_rounds(chain, RULES, 1 + EARN_WINDOW, NAMES)
    assert chain.validators == NAMES and chain.expelled == {}


@given(st.integers(1, 16), st.integers(0, 5), st.randoms(use_true_random=False))
def test_no_minority_removes_anybody_however_many_rounds_ended_empty(n: int, empties: int, rng: random.Random) -> None:
    chain = replace(start(NAMES[:n]), empties=empties)
    liars = rng.sample(NAMES[:n], (n - 1) // 2)
    said = [cut(chain, judge, (), disproved=NAMES) for judge in liars]
    assert disproved(chain, said) == set()


def test_a_validator_that_is_named_for_two_rounds_by_one_judge_is_named_once() -> None:
    chain = start(NAMES[:3])
    twice = replace(cut(chain, NAMES[1], ()).what, disproved=((0, 4), (0, 5), (99, 5)))
    assert disproved(chain, [replace(cut(chain, NAMES[1], ()), what=twice)]) == set()


def test_a_few_validators_are_left_however_many_are_disproved() -> None:
    chain = accused(start(NAMES[:6]), dict.fromkeys(NAMES[:6], NAMES[:6]), NAMES[:6])
    assert len(chain.validators) == SMALL and len(chain.expelled) == 2


def test_judges_above_the_committee_s_size_are_removed_by_most_of_the_committee() -> None:
    chain = start(tuple(f"{name}-{place}" for name in NAMES for place in "abc"))
    judging = judges(chain)
    for count, named in ((majority(chain) - 1, set()), (majority(chain), {judging[0]})):
        said = [cut(chain, judge, (), disproved=judging[:1]) for judge in judging[1 : count + 1]]
        assert disproved(chain, said) == named


# --- who comes --------------------------------------------------------------------------------------------------------


def proven(validators: Collection[str], others: Collection[str], *, made: int = 33, seats: int = 16) -> ChainState:
    """A chain in which these others have earned places, with vacated seats."""
    worked = tuple(Worked(author, 1000) for author in sorted({*validators, *others}))
    chain = replace(start(validators), made=made, seats=seats, history=(worked,) * REMEMBERED)
    return chain


@given(st.integers(4, 16), st.integers(0, 40), st.integers(16, 64))
def test_seats_are_filled_by_the_growth_and_no_further_than_they_are(validators: int, others: int, made: int) -> None:
    chain = proven(NAMES[:validators], OTHERS[:others], made=made)
    after = reseated(chain, RULES)
    came = set(after.validators) - set(chain.validators)
    assert came <= set(OTHERS[:others])
    assert len(came) <= -(-validators * GROWTH // MILLION)
    assert len(after.validators) <= max(chain.seats, after.seats) <= most_validators(RULES)
    if made % EARN_WINDOW:
        assert after.seats == chain.seats and after.cohort == chain.cohort
        assert len(came) == min(others, chain.seats - validators, -(-validators * GROWTH // MILLION))


def test_who_is_not_in_the_last_roster_gets_no_seat() -> None:
    chain = proven(NAMES[:8], OTHERS[:1])
    gone = replace(chain, history=(*chain.history[:-1], tuple(Worked(name, 1000) for name in NAMES[:8])))
    assert OTHERS[0] in reseated(chain, RULES).validators
    assert reseated(gone, RULES).validators == chain.validators


def test_seats_grow_where_more_have_earned_one_and_lapse_where_nobody_has() -> None:
    assert reseated(proven(NAMES, OTHERS, made=48), RULES).seats == 18
    assert reseated(proven(NAMES[:8], (), made=48), RULES).seats == 14
    assert reseated(proven(NAMES, (), made=48), RULES).seats == 16
    full = proven((*NAMES, *OTHERS[:32]), OTHERS[32:], made=48, seats=48)
    assert reseated(full, RULES).seats == most_validators(RULES) == 48


def test_a_genesis_validator_that_was_away_takes_its_seat_again_as_soon_as_it_works() -> None:
    chain = after_rounds(start(NAMES[:6]), RULES, SILENCE + 1, NAMES[1:6], silent=NAMES[:1])
    assert NAMES[0] not in chain.validators and chain.seats == 6
    chain = after_rounds(chain, RULES, 1, NAMES[:6])
    assert chain.validators == NAMES[:6]


def test_a_swarm_whose_nodes_all_leave_in_time_keeps_as_many_validators() -> None:
    """Every round one of 40 nodes dies and another comes: the nodes that began are all gone after 100 rounds."""
    nodes = [*NAMES, *OTHERS[:24]]
    chain, left = start(NAMES), set[str]()
    for number in range(100):
        chain = after_rounds(chain, RULES, 2, nodes, silent=left)
        left.add(nodes.pop(0))
        nodes.append(f"later-{number:03d}")
    assert left.issuperset(NAMES)
    assert chain.made == chain.round and chain.empties == 0
    assert len(set(chain.validators) - left) >= 12 and len(set(chain.validators) - left) >= majority(chain)
