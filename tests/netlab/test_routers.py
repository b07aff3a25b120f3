"""Routers that open ports, and that restart: real ones (miniupnpd), asked in every way, with real nodes behind them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import Agent, Relay
from lab import Host, Lab, Nat, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not("miniupnpd") is not None, reason="no laboratory with miniupnpd here"),
]

SETTLE = 45.0  # s to be found public, on a machine that has other things to do
REACHABLE_AGAIN = 60.0  # s after the router is back
PORT = 4077
ASKS = """
import sys, trio
from swarmnode.node.host.addresses import source_towards
from swarmnode.node.nat.routers import NatPmp, Pcp
from swarmnode.node.nat.portmap import INTERNET, default_gateway, default_gateway_of_ipv6
from swarmnode.node.nat.routers import Pinholes, Upnp

async def main():
    way, port = sys.argv[1], int(sys.argv[2])
    router, router6, source6 = default_gateway(), default_gateway_of_ipv6(), source_towards(INTERNET)
    ways = {
        "PCP": lambda: Pcp(router, source_towards(router), b"secret"),
        "NAT-PMP": lambda: NatPmp(router, source_towards(router)),
        "UPnP": Upnp,
        "PCP over IPv6": lambda: Pcp(router6, source6, b"secret"),
        "UPnP over IPv6": lambda: Pinholes(source6),
    }
    asked = ways[way]()
    for transport in ("tcp", "udp"):
        lease = await asked.map(transport, port, port)
        assert await asked.map(transport, port, port) == lease and await asked.holds(transport, port, lease)
        print(lease.host, lease.port, lease.seconds)

trio.run(main)
"""
OPENS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()
except OSError as error:
    print(type(error).__name__)
"""


def said(host: Host, program: str, *arguments: str) -> list[str]:
    done = subprocess.run([*host.enter, sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def home(lab: Lab) -> Iterator[tuple[Nat, Host, Host]]:
    """A router that opens ports, a machine behind it, and one outside."""
    nat = lab.nat("opening", ipv6=True)
    inside, outside = lab.private("behind", nat), lab.public("beyond", ipv6=True)
    lab.upnp(nat)
    yield nat, inside, outside
    lab.take_down(nat.name, inside.name, outside.name)


@pytest.mark.parametrize(
    ("way", "port"),
    [("PCP", 4101), ("NAT-PMP", 4102), ("UPnP", 4103), ("PCP over IPv6", 4104), ("UPnP over IPv6", 4105)],
)
def test_a_real_router_lets_tcp_and_udp_in_whichever_way_it_is_asked(
    home: tuple[Nat, Host, Host], way: str, port: int
) -> None:
    nat, inside, outside = home
    at = inside.address6 if "IPv6" in way else nat.address
    assert said(outside, OPENS, at, str(port)) == ["TimeoutError"]
    assert said(inside, ASKS, way, str(port)) == [f"{at} {port} 3600.0"] * 2
    assert said(outside, OPENS, at, str(port)) == ["ConnectionRefusedError"]  # it came as far as the machine


def test_a_node_behind_a_firewall_that_opens_holes_announces_that_it_is_reached_over_ipv6(
    home: tuple[Nat, Host, Host], two_relays: list[Relay], tmp_path: Path
) -> None:
    _, inside, outside = home
    first, second = two_relays
    with Agent(inside, tmp_path / "inside.log") as node, Agent(outside, tmp_path / "outside.log") as other:
        node.start([first.address, second.address6])
        told = node.do("settle", states=["public"], relays=0, within=SETTLE)
        until = time.monotonic() + SETTLE
        while not told["over_ipv6"] and time.monotonic() < until:
            told = node.do("status")
        assert told["mapped"] == {"ip4": "PCP", "ip6": "PCP"} and told["over_ipv6"], told
        places = [place for place in told["addresses"] if inside.address6 in place]
        other.start([])
        assert other.do("connect", to=places, direct_within=5.0)["path"] == "direct"


def test_a_node_is_dialled_anew_soon_after_its_router_restarted_at_another_address(
    lab: Lab, two_relays: list[Relay], tmp_path: Path
) -> None:
    router = lab.nat("restarting")
    lab.upnp(router)
    a_host, b_host = lab.private("restarted", router), lab.private("dials", lab.nat("other", "symmetric"))
    joins = [word for relay in two_relays for word in ("--join", relay.address)]
    with ExitStack() as stack:
        a = Relay(a_host, tmp_path / "a", *joins)
        assert stack.enter_context(a.node).ready
        b = stack.enter_context(Agent(b_host, tmp_path / "b.log"))
        announced(a, router.address, within=SETTLE)
        lab.restart(router)
        lab.upnp(router)
        began = time.monotonic()
        places = announced(a, router.address, within=REACHABLE_AGAIN)
        b.start([])
        came = b.do("connect", to=places, direct_within=5.0)
        waited = time.monotonic() - began
        print(f"dialled anew {waited:.1f} s after its router was back")
        assert came["path"] == "direct" and waited < REACHABLE_AGAIN, came
    lab.take_down(router.name, a_host.name, b_host.name, "other")


def announced(node: Relay, address: str, *, within: float) -> list[str]:
    """What the node tells others once that is at `address`."""
    until = time.monotonic() + within
    while not (there := [place for place in node.status()["addresses"] if address in place]):
        assert time.monotonic() < until, node.status()["addresses"]
        time.sleep(0.2)
    return there
