"""Inbound connections whose peer is not known yet: few at once, and nobody can keep the others out.

Before the Noise handshake a connection has an address and nothing else. There is room for `most`; one more takes the
place of one from the network that has the most (a network: a /24 of IPv4, a /48 of IPv6), of the oldest that has not
said a word, or else of the oldest. So who opens connections again and again displaces its own, and a newcomer from
anywhere else has a place. Nothing is remembered of an address that has no connection here: behind one there may be many
nodes.

Work begins with the first byte, which the dialling side sends at once (multistream-select): a silent connection costs
its place, and no more. It begins for one connection in a turn of the loop, so that a crowd that speaks at once is
spread over many turns, between which everything else goes on.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics

UNDER_WAY = Metric("swarmnode_handshakes", GAUGE, "inbound connections whose peer is not known yet")
ENDED = Metric("swarmnode_handshakes_total", COUNTER, "inbound connections by what became of them", "outcome")
OUTCOMES = ("known", "failed", "displaced")


class Handshake:
    """One connection's place."""

    def __init__(self, network: str, displace: Callable[[], None]) -> None:
        self.network = network
        self.displace = displace
        self.outcome = "failed"
        self.spoke = False


class Handshakes:
    """All places of a host."""

    def __init__(self, most: int, patience: float) -> None:
        self._most = most
        self.patience = patience  # seconds until the first byte
        self._by_network: dict[str, OrderedDict[Handshake, None]] = {}  # the oldest first
        self._outcomes: Counter[str] = Counter()
        self._gate = trio.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._by_network.values()))

    @contextmanager
    def place(self, host: str, displace: Callable[[], None]) -> Iterator[Handshake]:
        """A place for a connection from `host` until `settle`, or until the block ends.

        `displace()` is called when another takes it: it must end the connection, and not wait.
        """
        handshake = Handshake(network_of(host), displace)
        if len(self) >= self._most:
            crowd = max(self._by_network, key=lambda network: len(self._by_network[network]))
            waiting = self._by_network[crowd]
            given_up = next((each for each in waiting if not each.spoke), next(iter(waiting)))
            given_up.outcome = "displaced"
            self._leave(given_up)
            given_up.displace()
        self._by_network.setdefault(handshake.network, OrderedDict())[handshake] = None
        try:
            yield handshake
        finally:
            self._leave(handshake)

    async def turn(self) -> None:
        """Wait for a turn of the loop in which no other handshake begins."""
        async with self._gate:
            await trio.lowlevel.checkpoint()

    def settle(self, handshake: Handshake) -> None:
        """The peer is known: the place is free."""
        handshake.outcome = "known"
        self._leave(handshake)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(UNDER_WAY, lambda: len(self))
        metrics.show(ENDED, lambda: {outcome: self._outcomes[outcome] for outcome in OUTCOMES})

    def _leave(self, handshake: Handshake) -> None:
        of_network = self._by_network.get(handshake.network, OrderedDict())
        if handshake not in of_network:
            return
        del of_network[handshake]
        if not of_network:
            del self._by_network[handshake.network]
        self._outcomes[handshake.outcome] += 1


def network_of(host: str) -> str:
    """The network that `host`, an IP address, is in; what is no address is one of its own."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))
