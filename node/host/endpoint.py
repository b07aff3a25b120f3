"""Multiaddrs that this node can dial: TCP at an IP address or a name, with or without who is expected there.

    /ip4/203.0.113.7/tcp/4077/p2p/12D3KooW…    /dns4/seed/tcp/4077
    /ip4/203.0.113.7/tcp/4077/p2p/RELAY/p2p-circuit/p2p/12D3KooW…

Names are resolved anew for each dial, by the system's resolver (so /etc/hosts and a container's service names count).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.protocols.network import Address, PeerId

MAX_TEXT = 408  # characters of an address: a name of 253, two peer ids of 52, and what stands between
NAME = re.compile(
    r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?"
)  # as RFC 1035, with the underscores of containers
EXPECTED = "expected /ip4/ADDRESS/tcp/PORT or /dns4/NAME/tcp/PORT, with /p2p/PEER_ID at the end or without"
FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


@dataclass(frozen=True)
class Endpoint:
    """One multiaddr, taken apart."""

    kind: str  # ip4, ip6, dns, dns4 or dns6
    host: str
    port: int
    peer: PeerId | None  # who is expected there; not checked to be a peer id
    relay: PeerId | None = None  # who is there, where `peer` is behind a relay; not checked either

    @property
    def is_name(self) -> bool:
        return self.kind in FAMILIES

    @property
    def place(self) -> str:
        """The multiaddr of what is dialled, without the peer."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}"


def parse(address: Address) -> Endpoint | None:
    """None for what cannot be dialled from here: other transports, port 0, the unspecified address, nonsense."""
    peer: str | None = None
    relay: str | None = None
    match address.split("/") if len(address) <= MAX_TEXT else []:
        case ["", kind, host, "tcp", port, *rest] if rest in ([], [""]):
            pass
        case ["", kind, host, "tcp", port, "p2p", last] if _is_plain(last):
            peer = last
        case ["", kind, host, "tcp", port, "p2p", first, "p2p-circuit", "p2p", last] if (
            _is_plain(first) and _is_plain(last) and first != last
        ):
            peer, relay = last, first
        case _:
            return None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return None
    if kind in ("ip4", "ip6"):
        try:
            ip = ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
        except ValueError:
            return None
        if ip.is_unspecified or ip.is_multicast:
            return None
    elif kind not in FAMILIES or not NAME.fullmatch(host) or len(host) > 253:
        return None
    return Endpoint(kind, host, int(port), peer, relay)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isalnum()
