"""The round as a whole, on small swarms: whatever arrives when, and whoever dies or leads with two rosters.

In every state that is visited: nobody honest says two things under one write-once key, two nodes on one roster have one
chain, an honest leader leaves out nothing that judges found to help, and, once everything has arrived and all waits
have ended, everybody who lives has ended its rounds on the same roster.

Two nodes are explored exhaustively. So are three, one half of the round at a time: while they speak, with what
follows from it known to all at once, and while they decide, with all that is spoken known to all at once. Both halves
together are walked at random. `make thorough` explores and walks more; numbers of states are printed with `-s`.
"""

from __future__ import annotations

import random

import pytest
from chainmodel import Broken, Model
from hypothesis import settings

from swarmnode.protocols.chain import duty, rules
from swarmnode.protocols.chain.forks import Tree
from swarmnode.protocols.chain.statements import AvailabilityVote, Commit, ForkChoiceVote, Reveal, Roster, Scores, Seal

WALKS = settings().max_examples // 5  # per swarm
MOST = 5_000_000 if settings().max_examples > 100 else 60_000  # states explored of one swarm
SPOKEN: tuple[type, ...] = (Commit, AvailabilityVote, Reveal, Seal, Scores)
DECIDED: tuple[type, ...] = (Roster, ForkChoiceVote)


@pytest.mark.parametrize(
    ("authors", "may_die", "liar"), [("A", "", ""), ("AB", "", ""), ("AB", "A", ""), ("AB", "B", "A"), ("B", "AB", "B")]
)
def test_two_nodes_end_a_round_alike_in_every_order(authors: str, may_die: str, liar: str) -> None:
    model = Model(("A", "B"), frozenset(authors), may_die=frozenset(may_die), liar=liar)
    model.explore(50_000)
    print(f"two nodes, {authors=} {may_die=} {liar=}: {model.states} states, {model.rosters} rosters")
    assert model.rosters > 2


def explore(authors: str, at_once: tuple[type, ...], *, may_die: str = "", liar: str = "") -> None:
    model = Model(("A", "B", "C"), frozenset(authors), may_die=frozenset(may_die), liar=liar, at_once=at_once)
    model.explore(MOST)
    print(f"three nodes, {authors=} {may_die=} {liar=}: {model.states} states, {model.rosters} rosters")
    assert model.rosters > 2


thorough = pytest.mark.skipif(MOST < 100_000, reason="make thorough")


@pytest.mark.parametrize(
    ("authors", "may_die", "liar"),
    [
        ("A", "", ""),
        ("ABC", "", "C"),  # C leads the first attempt
        pytest.param("A", "ABC", "", marks=thorough),
    ],
)
def test_three_nodes_decide_alike_in_every_order(authors: str, may_die: str, liar: str) -> None:
    explore(authors, SPOKEN, may_die=may_die, liar=liar)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("authors", "may_die", "late"),
    [
        pytest.param("A", "", (AvailabilityVote, Reveal), marks=thorough),
        ("A", "", (Commit, Reveal)),
        pytest.param("A", "", (Commit, AvailabilityVote, Reveal), marks=thorough),
        pytest.param("A", "B", (Commit, AvailabilityVote, Reveal), marks=thorough),
        pytest.param("AB", "", (Commit, AvailabilityVote, Reveal), marks=thorough),
        pytest.param("A", "", SPOKEN, marks=thorough),
    ],
)
def test_three_nodes_end_a_round_alike_in_every_order_of_what_is_spoken(
    authors: str, may_die: str, late: tuple[type, ...]
) -> None:
    explore(authors, (*DECIDED, *(kind for kind in SPOKEN if kind not in late)), may_die=may_die)


@pytest.mark.parametrize(
    ("names", "authors", "rounds", "may_die", "liar"),
    [
        ("AB", "AB", 2, "A", ""),
        ("ABC", "ABC", 1, "", ""),
        ("ABC", "AC", 2, "ABC", ""),
        ("ABC", "ABC", 1, "B", "C"),  # C leads the first attempt
        ("ABCD", "AD", 1, "ABCD", ""),
        ("ABCD", "ABCD", 2, "D", "C"),
    ],
)
def test_more_nodes_end_their_rounds_alike_in_orders_drawn_at_random(
    names: str, authors: str, rounds: int, may_die: str, liar: str
) -> None:
    model = Model(tuple(names), frozenset(authors), rounds=rounds, may_die=frozenset(may_die), liar=liar)
    for seed in range(WALKS):
        model.walk(random.Random(seed))
    print(f"{names}, {authors=} {rounds=} {may_die=} {liar=}: {model.states} states, {model.rosters} rosters")
    assert model.rosters


# --- the model notices what is wrong ----------------------------------------------------------------------------------


def walks_break(names: str = "ABC") -> str:
    model = Model(tuple(names), frozenset(names))
    with pytest.raises(Broken) as raised:
        for seed in range(200):
            model.walk(random.Random(seed))
    return str(raised.value).splitlines()[0]


def test_a_fork_rule_that_stays_where_a_node_stands_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stubborn(tree: Tree, tip: bytes, best: bytes) -> bytes:
        return best if tip in tree.ancestry(best) else tip

    monkeypatch.setattr(duty, "_forward", stubborn)
    assert "different rosters" in walks_break()


def test_judges_who_wait_for_all_to_seal_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies would stop the round: with no roster and no empty one either, if attempts did not end."""
    monkeypatch.setattr(duty, "empty_id", lambda chain: chain.tip)
    monkeypatch.setattr(duty, "quorum", lambda chain: len(chain.validators))
    model = Model(("A", "B", "C"), frozenset("A"), may_die=frozenset("B"))
    with pytest.raises(Broken, match="cannot end its round"):
        for seed in range(50):
            model.walk(random.Random(seed))


def test_a_derivation_that_refuses_what_helps_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_vouched", lambda values, needed: 0)
    assert "leaves out" in walks_break()
