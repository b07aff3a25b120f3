"""Who meets whom: everybody one other, by lot, and nearly the same where nodes know others than one another."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from swarmnode.protocols.methods.gossip.pairing import partner

RUN = "ab" * 32


def names(count: int) -> list[str]:
    return [f"peer{number}" for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 101])
def test_each_has_one_partner_who_has_it_in_turn_and_one_of_an_odd_number_none(count: int) -> None:
    for round in range(20):
        met = {me: partner(RUN, round, me, names(count)) for me in names(count)}
        assert all(other is None or (met[other] == me != other) for me, other in met.items())
        assert sum(other is None for other in met.values()) == count % 2


def test_the_order_of_members_and_being_named_oneself_change_nothing() -> None:
    for me in names(9):
        others = [peer for peer in reversed(names(9)) if peer != me]
        assert partner(RUN, 3, me, others) == partner(RUN, 3, me, names(9))


def test_all_pairs_are_as_likely_and_so_is_being_left_over() -> None:
    rounds = 4000
    met = Counter(partner(RUN, round, "peer2", names(5)) for round in range(rounds))
    assert set(met) == {"peer0", "peer1", "peer3", "peer4", None}
    for times in met.values():
        assert abs(times / rounds - 0.2) < 5 * math.sqrt(0.2 * 0.8 / rounds)


def test_one_member_more_changes_few_pairs() -> None:
    """On its way to the root alone: 2 log2(n) nodes at the most, where a row would change half of them."""
    count, changed = 256, []
    for round in range(20):
        before, after = (
            {me: partner(RUN, round, me, peers) for me in names(count)}
            for peers in (names(count), [*names(count), "newcomer"])
        )
        changed.append(sum(before[me] != after[me] for me in before))
    assert max(changed) <= 2 * math.log2(count) + 2 and sum(changed) / len(changed) < math.log2(count)
