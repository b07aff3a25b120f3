"""What a pair behind NATs comes to, in short: one attempt each, over fast links. `make netlab` tries all, and often."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import Agent, Relay
from lab import Lab
from topologies import (
    CONE_CONE,
    CONE_SYMMETRIC,
    GIVE_UP,
    MIB,
    RESTRICTED,
    SEQUENTIAL,
    SYMMETRIC,
    Attempt,
    Topology,
    placed,
    rate,
    try_to_meet,
)

from swarmnode.node.nat.holepunch import ATTEMPTS
from swarmnode.node.nat.netcheck import ADDRESS_RESTRICTED, PORT_RESTRICTED
from swarmnode.node.nat.netcheck import SYMMETRIC as SYMMETRIC_NAT
from swarmnode.node.nat.udp import OPENINGS, PROBES, SOCKETS

pytestmark = pytest.mark.slow

Met = dict[str, tuple[Attempt, Agent, Agent]]


@pytest.fixture(scope="module")
def met(lab: Lab, two_relays: list[Relay], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Met]:
    """All pairs, settled and connected beside each other."""

    def meet(topology: Topology, a: Agent, b: Agent) -> tuple[Attempt, Agent, Agent]:
        [attempt] = try_to_meet(topology, [(a, b)], two_relays, patience=GIVE_UP if topology.direct else 1.0)
        return attempt, a, b

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        under_way = {}
        for topology in (CONE_CONE, SYMMETRIC, SEQUENTIAL, RESTRICTED):
            folder = tmp_path_factory.mktemp("agents")
            [(a, b)] = stack.enter_context(placed(lab, topology, folder))
            under_way[topology.name] = pool.submit(meet, topology, a, b)
        yield {name: future.result() for name, future in under_way.items()}


def test_two_cones_get_direct_within_five_seconds(met: Met) -> None:
    attempt, a, b = met[CONE_CONE.name]
    assert attempt.path == "direct" and not attempt.why, attempt
    assert attempt.direct is not None and attempt.direct <= 5.0
    assert rate(a, b, size=MIB) > 0


def test_two_routers_that_give_ports_in_sequence_are_foreseen_and_the_packets_are_bounded(met: Met) -> None:
    attempt = met[SEQUENTIAL.name][0]
    assert attempt.path == "direct" and attempt.over_udp, attempt
    assert attempt.packets <= ATTEMPTS * 2 * (SOCKETS + 4 * OPENINGS)


def test_behind_a_router_that_lets_in_by_address_a_node_is_relayed_until_a_stranger_got_in(met: Met) -> None:
    """Those who dial it back have heard from it, so they get in; a stranger comes through a relay and is punched to."""
    attempt, a, _ = met[RESTRICTED.name]
    assert not attempt.why and attempt.path == "direct", attempt
    told = a.do("netcheck")
    assert (told["reachability"], told["class"], told["uninvited"]) == ("relayed", ADDRESS_RESTRICTED, 0), told
    assert told["reached_by"] and any("/p2p-circuit" not in place for place in told["announces"])


def test_a_cone_and_a_symmetric_one_find_each_other_over_udp(lab: Lab, two_relays: list[Relay], tmp_path: Path) -> None:
    """By chance, in 99.8 of 100 tries where the machine has time; so a second one may be needed."""
    with placed(lab, CONE_SYMMETRIC, tmp_path) as pairs:
        for _ in range(2):
            [attempt] = try_to_meet(CONE_SYMMETRIC, pairs, two_relays, patience=GIVE_UP)
            assert 0 < attempt.packets <= ATTEMPTS * (PROBES + SOCKETS + 4 * OPENINGS), attempt
            if attempt.path == "direct":
                break
        assert attempt.path == "direct" and attempt.over_udp, attempt
        assert rate(*pairs[0], size=MIB // 4) > 0


def test_two_symmetric_ones_are_relayed_within_three_seconds(met: Met) -> None:
    attempt, a, b = met[SYMMETRIC.name]
    assert attempt.path == "relayed" and attempt.connected is not None and attempt.connected < 3.0, attempt
    assert rate(a, b, size=MIB) > 0


def test_netcheck_names_the_nat_and_what_works_with_it(met: Met) -> None:
    for topology, kind, path in ((CONE_CONE, PORT_RESTRICTED, "punched"), (SYMMETRIC, SYMMETRIC_NAT, "relayed")):
        for agent in met[topology.name][1:]:
            told = agent.do("netcheck")
            assert told["class"] == kind, told
            assert {"class": kind, "path": path} in told["works_with"], "as this very pair came to be"
