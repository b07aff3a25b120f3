"""Pairs of machines that want to meet, and what comes of it: connected or not, direct or relayed, how soon and fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from agents import FAST, Agent, Answer, Relay
from lab import Host, Lab, Link

MIB = 1 << 20
HOME_LINK = Link(delay=0.02, jitter=0.002, rate=50)  # 40 ms to a relay and back, 80 ms to another home
SETTLE = 30.0  # s to find out how one can be reached, and to get places at relays
GIVE_UP = 24.0  # s after which a pair that is not direct stays relayed: three attempts of 6 s and what is between them


@dataclass(frozen=True)
class Topology:
    """Where A and B are; B dials A."""

    name: str
    build: Callable[[Lab, Link], tuple[Host, Host]]
    direct: bool  # what it must come to
    states: tuple[str, ...] = ("relayed",)  # what A may find out about itself
    mdns: bool = False  # nobody tells B about A: they meet on the local network
    programs: tuple[str, ...] = ()  # needed beside the usual
    many: bool = True  # several pairs may use the same machines at once
    ipv6: bool = False  # both join one relay over IPv6 and the other over IPv4


@dataclass
class Attempt:
    """What one pair came to; times in s from B's first dial, None where it did not come to that."""

    settled: float = 0.0
    connected: float | None = None
    direct: float | None = None
    path: str | None = None
    why: str = ""
    over_udp: bool = False  # what the streams go over at the end
    packets: int = 0  # UDP packets that both sent to make holes


@dataclass
class Row:
    """All attempts in one topology."""

    topology: Topology
    attempts: list[Attempt] = field(default_factory=list)
    rate: float | None = None  # Mbit/s of a fetch over the path that it came to

    @property
    def connected(self) -> int:
        return sum(a.connected is not None for a in self.attempts)

    @property
    def over_udp(self) -> int:
        return sum(a.over_udp for a in self.attempts)

    @property
    def went_direct(self) -> int:
        return sum(a.path == "direct" for a in self.attempts)


def pair(kind_a: str, kind_b: str) -> Callable[[Lab, Link], tuple[Host, Host]]:
    """A and B each behind a NAT of their own."""

    def build(lab: Lab, link: Link) -> tuple[Host, Host]:
        a, b = lab.nat("routerA", kind_a, link=link), lab.nat("routerB", kind_b, link=link)
        return lab.private("A", a), lab.private("B", b)

    return build


def two_public(lab: Lab, link: Link) -> tuple[Host, Host]:
    return lab.public("A", link), lab.public("B", link)


def same_lan(lab: Lab, link: Link) -> tuple[Host, Host]:
    router = lab.nat("router", "symmetric", link=link)
    return lab.private("A", router), lab.private("B", router)


def firewalls(lab: Lab, link: Link) -> tuple[Host, Host]:
    """A's firewall opens holes where it is asked."""
    return firewalled(lab, "A", link, opens=True), firewalled(lab, "B", link)


def firewalled(lab: Lab, name: str, link: Link, *, opens: bool = False) -> Host:
    """A machine with IPv6 that a router's firewall guards, and a symmetric NAT in front of its IPv4, as a carrier's."""
    router = lab.nat(f"router{name}", "symmetric", link=link, ipv6=True)
    if opens:
        lab.upnp(router)
    return lab.private(name, router)


CONE_CONE = Topology("cone–cone", pair("cone", "cone"), direct=True)
CONE_SYMMETRIC = Topology("cone–symmetric", pair("cone", "symmetric"), direct=True)
SYMMETRIC = Topology("symmetric–symmetric", pair("symmetric", "symmetric"), direct=False)
SEQUENTIAL = Topology("symmetric in sequence, both", pair("sequential", "sequential"), direct=True)
RESTRICTED = Topology("address-restricted, both", pair("address-restricted", "address-restricted"), direct=True)
PUBLIC = Topology("public–public", two_public, direct=True, states=("public",))
TOPOLOGIES = (
    PUBLIC,
    CONE_CONE,
    Topology("renumbering cone–cone", pair("renumbering", "cone"), direct=True),
    Topology("rejecting cone–cone", pair("rejecting", "cone"), direct=False),
    Topology("same LAN, found by mDNS", same_lan, direct=True, mdns=True, many=False),
    Topology("same LAN, dialled through a relay", same_lan, direct=True),
    Topology(
        "IPv6 firewall that opens holes–IPv6 firewall",
        firewalls,
        direct=True,
        states=("public",),
        programs=("miniupnpd",),
        ipv6=True,
    ),
    Topology("forgets after 30 s–cone", pair("forgetful", "cone"), direct=True),
)


@contextmanager
def placed(
    lab: Lab, topology: Topology, folder: Path, link: Link = FAST, pairs: int = 1
) -> Iterator[list[tuple[Agent, Agent]]]:
    """Pairs of agents where the topology wants them; taken down again at the end."""
    before = set(lab.machines())
    host_a, host_b = topology.build(lab, link)
    try:
        with ExitStack() as stack:
            yield [
                (
                    stack.enter_context(Agent(host_a, folder / f"A{number}.log", first_port=4001 + 10 * number)),
                    stack.enter_context(Agent(host_b, folder / f"B{number}.log", first_port=4001 + 10 * number)),
                )
                for number in range(pairs)
            ]
    finally:
        lab.take_down(*(name for name in lab.machines() if name not in before))


def try_to_meet(
    topology: Topology, pairs: Sequence[tuple[Agent, Agent]], relays: Sequence[Relay], *, patience: float = GIVE_UP
) -> list[Attempt]:
    """Give every pair fresh identities, let them settle, and have each B connect to its A."""
    if topology.mdns:
        _start(pairs, relays, mdns=True)
        return [Attempt(**_met(b.do("meet", peer=a.peer, within=patience))) for a, b in pairs]
    states = settle(pairs, relays, topology.states, ipv6=topology.ipv6)
    attempts = [connect(pair, state, patience) for pair, state in zip(pairs, states, strict=True)]
    for attempt, state in zip(attempts, states, strict=True):
        if state["reachability"] not in topology.states:
            attempt.why = f"A thinks it is {state['reachability']}"
    return attempts


def _start(
    pairs: Sequence[tuple[Agent, Agent]], relays: Sequence[Relay], *, ipv6: bool = False, mdns: bool = False
) -> None:
    for agent in (agent for pair in pairs for agent in pair):
        last = relays[-1].address6 if ipv6 and agent.host.address6 else relays[-1].address
        agent.start([*(relay.address for relay in relays[:-1]), last], mdns=mdns)


def settle(
    pairs: Sequence[tuple[Agent, Agent]],
    relays: Sequence[Relay],
    states: Sequence[str] = ("public", "relayed"),
    *,
    ipv6: bool = False,
) -> list[Answer]:
    """Fresh identities for all, who then find out how they can be reached; what became of each A.

    `ipv6`: who has it joins one relay over IPv6 and the other over IPv4.
    """
    _start(pairs, relays, ipv6=ipv6)
    asked = [(a, a.ask("settle", states=states, relays=0, within=SETTLE)) for a, _ in pairs]
    asked += [(b, b.ask("settle", states=["public", "relayed"], relays=0, within=SETTLE)) for _, b in pairs]
    return [agent.answer(number) for agent, number in asked][: len(pairs)]


def connect(pair: tuple[Agent, Agent], state: Answer, patience: float) -> Attempt:
    """B connects to A, which settled so, and waits for the connection to be direct."""
    a, b = pair
    came = b.do("connect", to=state["addresses"], direct_within=patience)
    attempt = Attempt(state["seconds"], came.get("connected"), came.get("direct"), came["path"], came.get("why", ""))
    after = [agent.do("status") for agent in pair]
    attempt.over_udp = a.peer in after[1]["over_quic"]
    attempt.packets = sum(sum(each["udp"]["packets"].values()) for each in after)
    return attempt


def _met(answer: dict[str, object]) -> dict[str, object]:
    path, seconds = answer["path"], answer["connected"]
    return {
        "path": path,
        "connected": seconds if path else None,
        "direct": seconds if path == "direct" else None,
    }


def rate(a: Agent, b: Agent, size: int) -> float:
    """Mbit/s at which B fetches from A."""
    offered = a.do("offer", size=size)
    came = b.do("fetch", peer=a.peer, size=size, patience=300.0)
    assert came["digest"] == offered["digest"]
    return float(8e-6 * size / came["seconds"])


def middle(values: Sequence[float | None]) -> float | None:
    """The median of those that are there."""
    there = [value for value in values if value is not None]
    return median(there) if there else None


def most(values: Sequence[float | None]) -> float | None:
    with contextlib.suppress(ValueError):
        return max(value for value in values if value is not None)
    return None
