"""Whether a node is public: most of several hosts decide, reluctantly once it is known, anew on another network."""

from __future__ import annotations

import pytest
import trio

from swarmnode.node.nat.reachability import (
    AGE,
    ENOUGH,
    MAX_VERDICTS,
    DialVerdict,
    Mapping,
    Reach,
    Reachability,
    is_local,
)


def after(*verdicts: tuple[str, bool], at: float = 0.0, others: int = 0) -> Reachability:
    machine = Reachability()
    hear(machine, *verdicts, at=at, others=others)
    return machine


def hear(machine: Reachability, *verdicts: tuple[str, bool], at: float = 0.0, others: int = 0) -> Reach:
    for host, reached in verdicts:
        machine.record(DialVerdict(host, reached, at))
    return machine.decide(at, others=others)


def hosts(count: int, reached: bool, first: int = 1) -> list[tuple[str, bool]]:
    return [(f"45.0.0.{first + number}", reached) for number in range(count)]


def test_nothing_is_known_before_anybody_tried() -> None:
    machine = Reachability()
    assert machine.decide(0.0, others=0) is Reach.UNKNOWN and machine.counts() == (0, 0)


@pytest.mark.parametrize(("reached", "state"), [(True, Reach.PUBLIC), (False, Reach.PRIVATE)])
def test_one_verdict_counts_only_when_nobody_else_can_be_asked(reached: bool, state: Reach) -> None:
    assert after(*hosts(1, reached), others=1).state is Reach.UNKNOWN
    assert after(*hosts(1, reached), others=0).state is state


@pytest.mark.parametrize("truth", [True, False])
def test_one_liar_among_three_does_not_decide(truth: bool) -> None:
    machine = after(*hosts(ENOUGH - 1, truth), ("45.0.0.99", not truth), others=5)
    assert machine.state is (Reach.PUBLIC if truth else Reach.PRIVATE)


def test_a_liar_that_repeats_itself_counts_once() -> None:
    machine = after(*hosts(2, False), *[("45.0.0.99", True)] * 5, others=5)
    assert machine.state is Reach.PRIVATE and machine.counts() == (1, 2)


def test_as_many_for_as_against_leave_it_unknown() -> None:
    assert after(*hosts(2, True), *hosts(2, False, first=50)).state is Reach.UNKNOWN


def test_a_public_node_stays_public_until_two_thirds_fail() -> None:
    machine = after(*hosts(3, True))
    assert hear(machine, *hosts(5, False, first=50)) is Reach.PUBLIC
    assert hear(machine, *hosts(6, False, first=50)) is Reach.PRIVATE


def test_a_private_node_stays_private_until_two_thirds_get_through() -> None:
    machine = after(*hosts(3, False))
    assert hear(machine, *hosts(5, True, first=50)) is Reach.PRIVATE
    assert hear(machine, *hosts(6, True, first=50)) is Reach.PUBLIC


def test_a_host_that_changes_its_mind_is_counted_by_its_last_word() -> None:
    machine = after(*hosts(3, True))
    assert hear(machine, *hosts(3, False)) is Reach.PRIVATE
    assert machine.counts() == (0, 3)


OUTSIDE = "/ip4/45.80.10.3/tcp/4077"


@pytest.mark.parametrize(
    ("own", "mapped", "stranger", "state"),
    [
        ("/ip4/192.168.1.2/tcp/4077", False, None, Reach.PRIVATE),
        ("/ip4/192.168.1.2/tcp/4077", False, "45.0.0.77", Reach.PUBLIC),
        ("/ip4/192.168.1.2/tcp/4077", False, "45.0.0.1", Reach.PRIVATE),  # something was sent there
        ("/ip4/192.168.1.2/tcp/4077", True, None, Reach.PUBLIC),
        ("/ip4/45.80.10.3/tcp/4077", False, None, Reach.PUBLIC),
        ("/dns4/home.example.org/tcp/4077", False, None, Reach.PUBLIC),  # its owner knows the router
    ],
)
def test_behind_a_router_that_translates_those_who_dial_back_do_not_prove_that_strangers_get_in(
    own: str, mapped: bool, stranger: str | None, state: Reach
) -> None:
    machine = Reachability()
    for number in range(ENOUGH):
        machine.contacted(f"45.0.0.{number + 1}")
        machine.seen[f"45.0.0.{number + 1}"] = OUTSIDE
    if mapped:
        machine.map_to("ip4", Mapping("UPnP", "45.80.10.3", 4077, 4077))
    for number in range(ENOUGH):
        machine.record(DialVerdict(f"45.0.0.{number + 1}", True, 0.0, OUTSIDE))
    machine.decide(0.0, others=0, own=(own,))
    machine.changed = trio.Event()
    if stranger is not None:
        machine.came_in(stranger)
        assert machine.changed.is_set() == (state is Reach.PUBLIC), "it is found out at once"
    assert machine.decide(0.0, others=0, own=(own,)) is state
    assert machine.open_at(0.0, "ip4") == (OUTSIDE,), "announced in any case"


def test_where_the_router_passes_udp_on_is_announced_with_tcp_once_that_works() -> None:
    machine = Reachability()
    machine.map_to("ip4", Mapping("UPnP", "45.80.10.3", 4077, 4077, udp_port=4078))
    udp = "/ip4/45.80.10.3/udp/4078/quic-v1"
    assert machine.mapped_udp == (udp,) and machine.reached_at(0.0) == ()
    machine.record(DialVerdict("45.0.0.1", True, 0.0, "/ip4/45.80.10.3/tcp/4077"))
    assert machine.reached_at(0.0) == ("/ip4/45.80.10.3/tcp/4077", udp)
    machine.map_to("ip4", Mapping("UPnP", "192.168.8.1", 4077, 4077, udp_port=4078))
    assert machine.mapped_udp == (), "a router behind another one maps nothing that others can reach"


def test_old_verdicts_no_longer_count() -> None:
    machine = after(*hosts(3, True), at=0.0)
    assert hear(machine, *hosts(1, False, first=50), at=AGE) is Reach.PRIVATE  # alone, as the three have aged
    assert machine.counts() == (0, 1)


def test_a_state_outlives_the_verdicts_behind_it_until_somebody_says_otherwise() -> None:
    machine = after(*hosts(3, True), at=0.0)
    assert machine.decide(10 * AGE, others=0) is Reach.PUBLIC


def test_only_the_newest_verdicts_are_kept() -> None:
    machine = after(*hosts(MAX_VERDICTS + 5, True))
    assert sum(machine.counts()) == MAX_VERDICTS


def test_a_changed_network_forgets_everything() -> None:
    machine = after(*hosts(3, True))
    machine.forget()
    assert machine.state is Reach.UNKNOWN and machine.counts() == (0, 0)


def test_the_local_network_decides_only_while_there_is_no_other() -> None:
    machine = after(("192.168.1.5", True))
    assert machine.state is Reach.PUBLIC and machine.only_local
    machine.disregard_local()
    assert machine.state is Reach.UNKNOWN and machine.counts() == (0, 0)


def test_disregarding_the_local_network_keeps_what_others_found() -> None:
    machine = after(("192.168.1.5", True), *hosts(2, False))
    machine.disregard_local()
    assert machine.state is Reach.PRIVATE and machine.counts() == (0, 2) and not machine.only_local


@pytest.mark.parametrize(
    "host", ["10.1.2.3", "172.31.0.1", "192.168.0.9", "100.64.3.4", "127.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1"]
)
def test_addresses_behind_a_nat_are_told(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize("host", ["45.80.10.3", "172.32.0.1", "203.0.113.9", "2a01:4f8::1"])
def test_addresses_of_the_internet_are_told(host: str) -> None:
    assert not is_local(host)


def test_ipv4_decides_where_anybody_came_by_it_and_ipv6_speaks_for_itself() -> None:
    machine = Reachability()
    place = "/ip6/2a10:4580::2/tcp/4077"
    for number in range(ENOUGH):
        machine.record(DialVerdict(f"2a10:4580:{number}::1", True, 0.0, place))
    assert machine.decide(0.0, others=0) is Reach.PUBLIC
    assert hear(machine, *hosts(ENOUGH, False), *hosts(ENOUGH, False, first=50)) is Reach.PRIVATE
    assert machine.open_at(0.0, "ip6") == (place,) and machine.open_at(AGE + 1, "ip6") == ()
    for number in range(ENOUGH):
        machine.record(DialVerdict(f"2a10:4580:1{number}::1", False, 0.0))
    assert machine.open_at(0.0, "ip6") == () and machine.tried_over_ipv6
    machine.map_to("ip6", Mapping("PCP", "2a10:4580::2", 4077, 4077))
    assert not machine.tried_over_ipv6 and machine.counts() == (0, 2 * ENOUGH) and machine.changed.is_set()
    assert machine.state is Reach.PRIVATE
    machine.map_to("ip4", Mapping("PCP", "45.80.10.3", 4077, 4077))
    assert machine.state is Reach.UNKNOWN and machine.counts() == (0, 0)


def test_what_was_seen_at_the_routers_former_address_is_forgotten() -> None:
    machine, former = Reachability(), "/ip4/45.80.10.3/tcp/4077"
    machine.map_to("ip4", Mapping("PCP", "45.80.10.3", 4077, 4077))
    machine.seen["45.0.0.1"] = former
    machine.map_to("ip4", Mapping("PCP", "45.80.10.3", 4077, 4077))
    assert machine.observed() == (former,)
    machine.map_to("ip4", Mapping("PCP", "45.80.10.9", 4077, 4077))
    assert machine.places(()) == ("/ip4/45.80.10.9/tcp/4077",)
