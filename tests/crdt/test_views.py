"""Views: functions of the set of elements, which no author can bend by more than its own word."""

from __future__ import annotations

import dataclasses
from typing import Any

import laws
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.elements import Element
from swarmnode.crdt.evidence import evidence_of
from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import KINDS, key_of
from swarmnode.crdt.record import Record
from swarmnode.crdt.state import State
from swarmnode.crdt.views import (
    MAX_COUNT,
    Counter,
    Member,
    Place,
    commits,
    counters,
    equivocators,
    leaderboard,
    members,
    shards,
)

RUN = "ab" * 32
NOW = 1_700_000_000_000


def said(author: str, key: str, value: Any, time: int = NOW) -> Record:
    return Record(1, RUN, author, key, stamp_at(time), KINDS[key.partition("/")[0]].ttl, value, bytes(64))


def attested(author: str, subject: str, score: Any, round: int = 1) -> Record:
    return said(author, key_of("attestation", round, subject), {"score": score}, NOW + round)


def test_members_are_those_whose_leases_have_not_run_out() -> None:
    state = State(RUN)
    for record in (
        said("B", "member", {"addresses": ("/ip4/1.2.3.4", 5)}),
        said("A", "member", {"addresses": ()}, NOW - 30_000),
        said("C", "member", {"addresses": ("/ip4/9.9.9.9",)}),
        said("C", "member", None, NOW + 1),
        said("D", "member", "not a lease"),
        said("E", "member", {"addresses": (), "lasts": 300}, NOW - 100_000),
        said("F", "member", {"addresses": (), "lasts": 1 << 40}, NOW - 10_000),
        said("G", "member", {"addresses": (), "lasts": 120}, NOW - 120_000),
    ):
        state.merge(record, NOW)
    assert members(state.live(NOW), NOW) == (
        Member("A", (), NOW - 30_000, NOW + 30_000),
        Member("B", ("/ip4/1.2.3.4",), NOW, NOW + 60_000),
        Member("E", (), NOW - 100_000, NOW + 200_000),
        Member("F", (), NOW - 10_000, NOW - 10_000 + KINDS["member"].ttl),
    )
    assert [member.peer for member in members(state.live(NOW + 30_000), NOW + 30_000)] == ["B", "E", "F"]


def test_counters_add_what_each_author_counts() -> None:
    state = State(RUN)
    for record in (
        said("A", "counter/steps", 5),
        said("A", "counter/steps", 7, NOW + 1),
        said("B", "counter/steps", 10),
        said("B", "counter/rounds", 1),
    ):
        state.merge(record, NOW)
    rounds, steps = counters(state.live(NOW))
    assert steps == Counter("steps", {"A": 7, "B": 10}) and steps.total == 17
    assert rounds == Counter("rounds", {"B": 1})


@pytest.mark.parametrize("count", [-1, MAX_COUNT + 1, 1.5, "7", True, {"n": 1}])
def test_what_is_no_count_is_not_added(count: Any) -> None:
    assert counters([said("A", "counter/steps", count)]) == ()


def test_the_leaderboard_is_by_median_so_few_liars_do_not_move_it() -> None:
    honest = [attested(author, subject, score) for author in "ABC" for subject, score in (("x", 2), ("y", 1.0))]
    lies = [attested(author, subject, score) for author in "DE" for subject, score in (("x", -1e9), ("y", 1e9))]
    assert leaderboard(honest) == (Place("x", 2.0, 3), Place("y", 1.0, 3))
    assert leaderboard(honest + lies) == (Place("x", 2.0, 5), Place("y", 1.0, 5))


def test_an_attester_has_one_score_for_a_subject_that_of_its_latest_round() -> None:
    many = [attested("A", "x", 100 + round, round) for round in range(2, 9)]
    assert leaderboard([*many, attested("B", "x", 1), attested("C", "x", 2)]) == (Place("x", 2.0, 3),)
    assert leaderboard(many) == (Place("x", 108.0, 1),)


def test_nobody_scores_itself_and_equivocators_score_nobody() -> None:
    liar = [attested("L", "x", 9), attested("L", "x", 8), attested("L", "y", 9)]
    assert leaderboard([attested("x", "x", 9), *liar, attested("B", "x", 1)]) == (Place("x", 1.0, 1),)
    assert leaderboard([liar[2], evidence_of(*liar[:2])]) == ()
    of_commits = evidence_of(said("L", key_of("commit", 1, 0), 1), said("L", key_of("commit", 1, 0), 2))
    assert leaderboard([liar[2], of_commits]) == (Place("y", 9.0, 1),)


@pytest.mark.parametrize("score", ["9", None, True, (1,), float("nan")])
def test_what_is_no_score_is_passed_over(score: Any) -> None:
    assert leaderboard([attested("A", "x", score)]) == ()


def test_equal_scores_are_in_order_of_subject() -> None:
    assert [place.subject for place in leaderboard([attested("A", s, 1) for s in "zxy"])] == ["x", "y", "z"]


def test_the_shard_index_lists_who_serves_a_shard() -> None:
    entries = [said(author, f"shard/{shard}", {"name": "corpus"}) for author, shard in ("Bf", "Af", "Ae")]
    assert list(shards([*entries, said("C", "shard/f", None)]).items()) == [("e", ("A",)), ("f", ("A", "B"))]


def test_round_commits_show_equivocation_and_do_not_settle_it() -> None:
    key = key_of("commit", 3, 0)
    one, two, other = said("A", key, 1), said("A", key, 2, NOW + 1), said("B", key, 3)
    assert commits([two, other, one, said("B", key_of("commit", 30, 0), 4)], 3) == {"A": (one, two), "B": (other,)}


def test_equivocators_are_known_by_evidence_or_by_what_stands() -> None:
    one, two = (said("A", key_of("cut", 3, 0), value) for value in range(2))
    for elements in ([one, two], [evidence_of(one, two)], [one, evidence_of(one, two), two]):
        assert equivocators(elements) == {"A": frozenset({"cut"})}
    assert equivocators([one, said("A", key_of("cut", 4, 0), 1), said("B", key_of("cut", 3, 0), 1)]) == {}


@given(laws.heard, st.randoms(use_true_random=False))
def test_views_are_functions_of_the_set_whatever_the_order_and_the_values(heard: list[Element], random: Any) -> None:
    shuffled = list(heard)
    random.shuffle(shuffled)
    for view in (
        lambda elements: members(elements, NOW),
        counters,
        shards,
        equivocators,
        leaderboard,
        lambda elements: commits(elements, 1),
    ):
        assert view(heard) == view(shuffled)  # type: ignore[operator]


def test_a_view_is_made_of_frozen_rows() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Place("x", 1.0, 1).score = 2.0  # type: ignore[misc]
