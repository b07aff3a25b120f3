"""Where others see this node, as identify tells it, and what that says about the NAT in front of it.

Only connections that left from the listening port, or came to it, say where that port is mapped to. Two observers at
different addresses that see the same mapping mean an endpoint-independent NAT ("cone"), which can be punched through;
two that see different ones mean an address-dependent NAT ("symmetric"), which cannot. (RFC 4787, section 4.1.)

Observers may lie: one address counts once, and what it says is used for attempts to connect, never believed alone.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass

from libp2p.abc import INetConn
from multiaddr import Multiaddr

from swarmnode.node.endpoint import parse
from swarmnode.node.metered_tcp import metered_stream_of
from swarmnode.protocols.network import Address

MAX_OBSERVERS = 64  # the latest, by their own address


@dataclass(frozen=True)
class Mapping:
    """One observer's view of this node."""

    place: Address  # /ip4/…/tcp/…, without a peer
    host: str
    from_listening_port: bool


class ObservedAddresses:
    """Takes the place of py-libp2p's manager of observed addresses, which knows nothing of ports of origin."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, bool], Mapping] = OrderedDict()  # by host of the observer and kind of port
        self._by_conn: dict[int, tuple[str, bool]] = {}

    def record_observation(self, conn: INetConn, observed: Multiaddr, listening: list[Multiaddr]) -> None:
        """py-libp2p heard from identify on `conn` that the other side sees `observed`."""
        endpoint = parse(str(observed).partition("/p2p/")[0])
        stream = metered_stream_of(conn.muxed_conn.secured_conn)  # type: ignore[attr-defined]
        remote = stream.get_remote_address() if stream is not None else None
        if endpoint is None or endpoint.is_name or stream is None or remote is None:
            return
        ports = {parsed.port for parsed in map(parse, map(str, listening)) if parsed is not None}
        ports |= {
            int(part[1]) for part in (str(a).split("/tcp/") for a in listening) if len(part) == 2 and part[1].isdigit()
        }
        key = (remote[0], stream.local_port in ports)
        self._seen.pop(key, None)
        self._seen[key] = Mapping(endpoint.place, endpoint.host, key[1])
        while len(self._seen) > MAX_OBSERVERS:
            self._seen.popitem(last=False)

    def remove_conn(self, conn: INetConn) -> None:
        """A mapping outlives the connection on which it was seen; newer views push it out."""

    def addrs(self) -> list[Multiaddr]:
        """What py-libp2p would announce on its own: nothing, `reachability` decides that."""
        return []

    def forget(self) -> None:
        """The network changed: what was seen before says nothing."""
        self._seen.clear()

    def hosts(self) -> tuple[str, ...]:
        """This node's addresses as others see them, the most often seen first; public ones only."""
        counted = Counter(
            mapping.host for mapping in self._seen.values() if ipaddress.ip_address(mapping.host).is_global
        )
        return tuple(host for host, _ in counted.most_common())

    def mappings(self) -> tuple[Address, ...]:
        """Where the listening port is seen, /ip4/…/tcp/…, the most often seen first."""
        counted = Counter(mapping.place for mapping in self._seen.values() if mapping.from_listening_port)
        return tuple(place for place, _ in counted.most_common())

    def endpoint_independent(self) -> bool | None:
        """Whether everybody sees the listening port at one place; None where fewer than two observers know."""
        places = [mapping.place for mapping in self._seen.values() if mapping.from_listening_port]
        return len(set(places)) == 1 if len(places) > 1 else None
