"""Asking the router for a way in: the listening port, by PCP, NAT-PMP or UPnP (`routers`), over each family.

Over IPv4 that is a port of the router's address, asked for only while this node is not known to be public and its way
to the internet leads through a gateway with a private address. Over IPv6 it is a hole in the router's firewall, asked
for only while nobody got through. Where the node listens on UDP as well, that port is mapped beside the TCP one.

What a router gave is leased, renewed at half its time, and given back at the end; whether it lets anybody in is for
AutoNAT to say. A router that restarts forgets it, and a provider gives another address: so the router is asked every
`CHECK_EVERY` seconds whether it still holds, and maps anew where it does not. Nothing waits for any of this.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from pathlib import Path

import trio

from swarmnode.node.host.addresses import rows_of, source_towards
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.nat.reachability import Mapping, Reach, Reachability, is_local
from swarmnode.node.nat.routers import Lease, MappingRefused, NatPmp, Pcp, Pinholes, Upnp, Way

logger = logging.getLogger(__name__)

ASK_AGAIN = 600.0  # s after a router that did not answer or refused
LOOK_EVERY = 10.0  # s between looks at whether a mapping is needed
CHECK_EVERY = 15.0  # s between questions whether it still holds
ROUTES = Path("/proc/net/route")  # Linux's tables
ROUTES_OF_IPV6 = Path("/proc/net/ipv6_route")
INTERNET = "2000::"  # stands for anywhere outside: the first of the global unicast addresses (RFC 4291, 2.5.4)
GIVE_BACK_WITHIN = 1.5  # s at the end; what is not given back by then ends with its lease
NOT_ASKED = "not asked for yet"


class PortMapping:
    """Keeps what `reachability.mappings` has of one family, ip4 or ip6, while `run` runs."""

    def __init__(self, family: str, network: Libp2pNetwork, reachability: Reachability) -> None:
        self._family = family
        self._network = network
        self._reachability = reachability
        self._asked: tuple[str, str] | None = None  # the gateway, and this machine's address
        self._ways: list[Way] = []  # to ask it, the best first
        self._leases: dict[str, Lease] = {}  # by transport
        self._until = 0.0  # trio time, for which they hold
        self._renew_at = 0.0
        self._wake = trio.Event()
        self.state = NOT_ASKED  # for a person: what came of asking for a port, or for a hole in the firewall

    @property
    def _mapping(self) -> Mapping | None:
        return self._reachability.mappings.get(self._family)

    def ask_anew(self) -> None:
        """The network changed: whatever was mapped leads elsewhere, and another router may be there."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; then what was mapped is given back."""
        try:
            while True:
                self._wake = trio.Event()
                wait = LOOK_EVERY
                if self._mapping is not None or not self._is_open():
                    wait = await self._keep()
                else:
                    self.state = "not needed"
                with trio.move_on_after(wait):
                    await self._wake.wait()
                if self._wake.is_set():
                    self._renew_at = 0.0
        finally:
            with trio.move_on_after(GIVE_BACK_WITHIN, shield=True):
                await self._give_back()

    def _is_open(self) -> bool:
        if self._family == "ip4":
            return self._reachability.state is Reach.PUBLIC
        return bool(self._reachability.open_at(trio.current_time(), "ip6"))

    async def _keep(self) -> float:
        """Map, renew, or ask whether the mapping holds; how long to wait until the next time, in seconds."""
        place = self._place()
        if place is None:
            self._asked, self._leases, self.state = None, {}, "no router to ask"
            self._reachability.map_to(self._family, None)
            return LOOK_EVERY
        gateway, source, port = place
        if self._asked != (gateway, source):
            self._asked, self._leases, self._until = (gateway, source), {}, 0.0
            secret = self._network.sign(b"swarmnode PCP nonce 1")
            others: list[Way] = [NatPmp(gateway, source), Upnp()] if self._family == "ip4" else [Pinholes(source)]
            self._ways = [Pcp(gateway, source, secret), *others]
        if self._leases and trio.current_time() < self._renew_at and await self._holds(port):
            return self._next_look()
        try:
            await self._map(port)
        except MappingRefused as error:
            self.state = str(error)
            logger.debug("no way in through the router: %s", error)
            if self._mapping is not None and trio.current_time() < self._until:
                return CHECK_EVERY  # it restarts, perhaps
            self._leases = {}
            self._reachability.map_to(self._family, None)
            return ASK_AGAIN
        tcp, before = self._leases["tcp"], self._mapping
        udp = self._leases["udp"].port if "udp" in self._leases else 0
        mapping = Mapping(self._ways[0].name, tcp.host, tcp.port, port, udp)
        if before is None or before.addresses != mapping.addresses:
            logger.info("the router lets peers in at %s (%s)", ", ".join(mapping.addresses), mapping.way)
        self.state = "mapped"
        self._reachability.map_to(self._family, mapping)
        return self._next_look()

    def _place(self) -> tuple[str, str, int] | None:
        """The gateway to ask, this machine's address towards it, and the listening port; None where there is none."""
        gateway = default_gateway() if self._family == "ip4" else default_gateway_of_ipv6()
        if gateway is None or (self._family == "ip4" and not is_local(gateway)):
            return None
        listens = self._network.dial_source(gateway if self._family == "ip4" else INTERNET)
        if listens is None or listens[0].startswith("127."):
            return None
        source = source_towards(gateway) if self._family == "ip4" else listens[0]
        if source is None or (self._family == "ip6" and is_local(source)):
            return None
        return gateway, source, listens[1]

    def _next_look(self) -> float:
        return max(1.0, min(CHECK_EVERY, self._renew_at - trio.current_time()))

    async def _holds(self, port: int) -> bool:
        try:
            return all([await self._ways[0].holds(transport, port, lease) for transport, lease in self._leases.items()])
        except MappingRefused as error:  # a router that is silent now may know it all the same
            logger.debug("whether the router still lets peers in cannot be said: %s", error)
            return True

    async def _map(self, port: int) -> None:
        """Ask in each way until one does it; that one goes first from now on."""
        udp = any("/udp/" in address for address in self._network.own_addresses)
        wanted = self._mapping.port if self._mapping is not None else port
        refusals: list[str] = []
        for way in list(self._ways):
            try:
                leases = {"tcp": await way.map("tcp", port, wanted)}
            except MappingRefused as error:
                refusals.append(str(error))
                continue
            if udp:
                try:
                    leases["udp"] = await way.map("udp", port, leases["tcp"].port)
                except MappingRefused as error:
                    logger.debug("the router maps no UDP port: %s", error)
            self._ways.sort(key=lambda other: other is not way)
            self._leases = leases
            seconds = min(lease.seconds for lease in leases.values())
            self._until = trio.current_time() + seconds
            self._renew_at = trio.current_time() + seconds / 2
            return
        raise MappingRefused("; ".join(refusals))

    async def _give_back(self) -> None:
        mapping = self._reachability.mappings.pop(self._family, None)
        if mapping is None:
            return
        for transport, lease in self._leases.items():
            try:
                await self._ways[0].unmap(transport, mapping.inner_port, lease.port)
            except MappingRefused as error:  # miniupnpd 2.3.1 refuses for holes that were asked for by PCP
                logger.debug("what the router mapped stays until its lease ends: %s", error)


def default_gateway() -> str | None:
    """The IPv4 gateway of the default route; None where there is none, or where this cannot be found out."""
    found: list[tuple[int, str]] = []
    for fields in rows_of(ROUTES):
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and fields[2] != "00000000":
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None


def default_gateway_of_ipv6() -> str | None:
    """The same of IPv6; a link-local one with its interface, fe80::1%eth0."""
    found: list[tuple[int, str]] = []
    for fields in rows_of(ROUTES_OF_IPV6):
        if len(fields) >= 10 and int(fields[0], 16) == int(fields[1], 16) == 0 and int(fields[4], 16):
            gateway = ipaddress.IPv6Address(int(fields[4], 16))
            found.append((int(fields[5], 16), f"{gateway}%{fields[9]}" if gateway.is_link_local else str(gateway)))
    return min(found)[1] if found else None
