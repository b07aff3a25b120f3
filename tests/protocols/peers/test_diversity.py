"""Who has many identities in one network is not most of what a node sees; a swarm in one network works as any other."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from swarmnode.protocols.peers.diversity import crowd, group_of_addresses, group_of_host, sample, spread, through

NOBODY = "12D3KooWJQFPp1PAAK2T2AzMJEftrnxs6G7FqWHA3u2WnhEr4mXY"


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("8.8.8.8", "8.8.8.0/24"),
        ("8.8.8.200", "8.8.8.0/24"),
        ("::ffff:8.8.8.8", "8.8.8.0/24"),
        ("2001:4860:4860:1::8888", "2001:4860:4860::/48"),
        ("2001:4860:4860:2::1%eth0", "2001:4860:4860::/48"),
        ("127.0.0.1", None),
        ("10.1.2.3", None),
        ("192.168.1.7", None),
        ("100.64.0.1", None),
        ("169.254.1.1", None),
        ("::1", None),
        ("fd00::1", None),
        ("seed.example.org", None),
        ("", None),
    ],
)
def test_a_group_is_a_network_of_the_internet_and_nothing_local(host: str, group: str | None) -> None:
    assert group_of_host(host) == group


def test_of_claimed_addresses_the_first_that_has_a_group_counts_and_a_relay_is_one() -> None:
    assert group_of_addresses(["/ip4/10.0.0.1/tcp/1", "/ip4/8.8.4.4/tcp/1", "/ip4/8.8.8.8/tcp/1"]) == "8.8.4.0/24"
    assert group_of_addresses([f"/ip4/8.8.8.8/tcp/1/p2p/{NOBODY}/p2p-circuit/p2p/x"]) == "via 8.8.8.0/24"
    assert group_of_addresses([f"/p2p/{NOBODY}/p2p-circuit/p2p/x"]) == f"via {NOBODY}"
    assert group_of_addresses(["/dns4/seed.example.org/tcp/1", "/", "x"]) is None
    assert group_of_addresses([]) is None


def test_those_whom_relays_of_one_network_carry_are_of_one_group_also_through_one_another() -> None:
    assert through("203.0.113.0/24") == through(through("203.0.113.0/24")) == "via 203.0.113.0/24"


def group(item: str) -> str | None:
    return None if item[0] == "-" else item[0]


def test_each_group_has_a_turn_before_any_has_a_second_and_nobody_is_left_out() -> None:
    assert spread(["a1", "a2", "a3", "b1", "-1", "a4", "b2", "-2"], group) == [
        "a1", "b1", "-1", "-2", "a2", "b2", "a3", "a4",
    ]  # fmt: skip
    assert spread([], group) == []


def test_a_thousand_identities_of_one_network_are_drawn_no_more_often_than_one_of_another() -> None:
    rng = random.Random(1)
    items = [f"a{n}" for n in range(1000)] + ["b1", "c1", "d1"]
    drawn = Counter(item[0] for _ in range(100) for item in sample(rng, items, 1, group))
    assert all(10 < drawn[name] < 40 for name in "abcd")
    assert {item[0] for item in sample(rng, items, 4, group)} == set("abcd")
    assert len(set(sample(rng, items, 50, group))) == 50
    assert sorted(sample(rng, items, 2000, group)) == sorted(items)


def test_those_in_no_group_are_drawn_as_if_there_were_none() -> None:
    items = [f"-{n}" for n in range(10)]
    assert sample(random.Random(3), items, 4, group) == random.Random(3).sample(items, 4)
    assert sample(random.Random(3), [], 4, group) == []


def test_a_crowd_is_a_group_with_more_than_a_few() -> None:
    assert crowd(["a", "a", "b", None, None, None], least=2) == "a"
    assert crowd(["a", "a", "b", None, None, None], least=3) is None
    assert crowd([None, None], least=1) is None
