"""Of two daemons with one key exactly the younger stops, and nobody stops for a dead life's lease."""

from __future__ import annotations

import pytest

from swarmnode.protocols.state.membership import MAX_RIVALS, DuplicateIdentity, KeyInUse


def test_exactly_the_younger_stops_whoever_hears_first() -> None:
    for first_hears in (True, False):
        older, younger = DuplicateIdentity(1, since=100_000), DuplicateIdentity(2, since=160_000)
        if first_hears:
            assert older.saw(younger.mark)
            with pytest.raises(KeyInUse, match="since 60 s before"):
                younger.saw(older.mark)
        else:
            assert younger.saw(older.mark)
            assert older.saw(younger.mark)  # it is named, goes on, and answers
            with pytest.raises(KeyInUse):
                younger.saw(older.mark)


def test_of_two_that_started_together_one_stops() -> None:
    one, other = DuplicateIdentity(1, since=100), DuplicateIdentity(2, since=100)
    assert one.saw(other.mark)
    assert other.mark == {"instance": 2, "since": 100}
    with pytest.raises(KeyInUse):
        other.saw(one.mark)
    assert other.mark["rival"] == 1
    assert one.saw(other.mark)


def test_a_lease_of_an_earlier_life_is_answered_once_and_stops_nobody() -> None:
    dead = DuplicateIdentity(1, since=100).mark
    alive = DuplicateIdentity(2, since=200)
    assert alive.saw(dead)
    assert not alive.saw(dead)
    assert not alive.saw(alive.mark)
    assert not alive.saw({"addresses": ()})


def test_a_lease_given_up_by_another_life_is_renewed() -> None:
    assert DuplicateIdentity(1, since=100).saw(None)


def test_many_earlier_lives_are_answered_up_to_a_bound() -> None:
    alive = DuplicateIdentity(0, since=200)
    answered = sum(alive.saw(DuplicateIdentity(number, since=number).mark) for number in range(1, 100))
    assert answered == MAX_RIVALS
