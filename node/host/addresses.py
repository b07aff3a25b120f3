"""Multiaddrs as this node uses them: where it listens, what it announces, whom it can dial, and who a peer id is.

    /ip4/203.0.113.7/tcp/4077/p2p/12D3KooW…    /dns4/seed/tcp/4077    /dnsaddr/seed.example.org
    /ip4/203.0.113.7/udp/4077/quic-v1/p2p/12D3KooW…
    /ip4/203.0.113.7/tcp/4077/p2p/RELAY/p2p-circuit/p2p/12D3KooW…
    /ip4/203.0.113.7/tcp/4077/key/0123456789abcdef    as a link says it: how the peer's public key begins

Listening on 0.0.0.0 or :: must not announce that: peers that dial it reach themselves. `announced` puts the machine's
real interface addresses in its place. TCP and QUIC at an IP address or a name are dialled; names are resolved anew for
each dial, by the system's resolver (so /etc/hosts and a container's service names count).
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import base58

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from swarmnode.protocols.network import Address, PeerId

_known: dict[str, tuple[str, ...]] = {}  # what `interface_addresses` found last, by family
_warn_once = lru_cache(maxsize=1)(logging.getLogger(__name__).warning)

CIRCUIT = "/p2p-circuit"  # stands between a relay and the peer behind it
BEGINS, FINGERPRINT = "key", 8  # how a key begins stands behind the word; bytes of it
# A libp2p peer id is the multihash of the protobuf public key, and keys up to 42 bytes are hashed by "identity":
# 00 = identity, 24 = 36 bytes follow; 08 01 = key type Ed25519; 12 20 = 32 bytes of key (libp2p spec, peer-ids).
ED25519_PREFIX = bytes.fromhex("002408011220")
MAX_TEXT = 408  # characters of an address: a name of 253, two peer ids of 52, and what stands between
NAME = re.compile(
    r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?"
)  # as RFC 1035, with the underscores of containers
ADDRESS = re.compile(
    r"/(?P<kind>ip[46]|dns[46]?)/(?P<host>[^/]+)/(tcp/(?P<tcp>[0-9]{1,5})|udp/(?P<udp>[0-9]{1,5})/quic-v1)"
    rf"(/?|(/p2p/(?P<relay>[a-zA-Z0-9]+){CIRCUIT})?/p2p/(?P<peer>[a-zA-Z0-9]+)"
    rf"|/{BEGINS}/(?P<begins>[0-9a-f]{{{2 * FINGERPRINT}}}))"
)
RECORDS = re.compile(r"/dnsaddr/(?P<host>[^/]+)(/p2p/(?P<peer>[a-zA-Z0-9]+))?")
EXPECTED = (
    "expected /ip4/ADDRESS/tcp/PORT, /dns4/NAME/tcp/PORT or /dnsaddr/NAME, with /p2p/PEER_ID at the end or without"
)
DNSADDR = "dnsaddr"  # a name whose TXT records are multiaddrs: dnsaddr=/ip4/… (multiformats.io, DNSADDR)
FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
EVERYWHERE = {"ip4": "0.0.0.0", "ip6": "::"}
FLAGS = Path("/proc/net/if_inet6")  # Linux's table of IPv6 addresses
PASSING = 0x01 | 0x08 | 0x20 | 0x40  # IFA_F_TEMPORARY (RFC 8981), DADFAILED, DEPRECATED, TENTATIVE (rtnetlink(7))
PREFERENCES, PREFER_STABLE = 72, 2  # IPV6_ADDR_PREFERENCES, IPV6_PREFER_SRC_PUBLIC (RFC 5014; linux/in6.h)


@lru_cache(maxsize=4096)
def public_key(peer: PeerId) -> Ed25519PublicKey:
    """The key that an Ed25519 peer id contains. Raises ValueError for anything else."""
    # here and not above: every command of the command line imports this module, and starts in a tenth of a second
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    plain = peer.isascii() and peer.isalnum() and len(peer) <= MAX_TEXT  # one id has one spelling, and no square's cost
    raw = base58.b58decode(peer) if plain else b""
    if len(raw) != len(ED25519_PREFIX) + 32 or not raw.startswith(ED25519_PREFIX):
        raise ValueError(f"{peer[:MAX_TEXT]!r} is not the id of an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw[len(ED25519_PREFIX) :])


def key_hex(peer: PeerId) -> str:
    """The Ed25519 key that a peer id contains, in hex; "" where it is of another kind."""
    try:
        return public_key(peer).public_bytes_raw().hex()
    except ValueError:
        return ""


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is `peer`'s, Ed25519, over `message`; False for anything malformed."""
    from cryptography.exceptions import InvalidSignature

    try:
        public_key(peer).verify(signature, message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def peer_of(address: Address) -> PeerId:
    """The peer id at the end of a multiaddr. Raises ValueError where there is none."""
    _, separator, peer = address.rpartition("/p2p/")
    if not separator or "/" in peer:
        raise ValueError(f"{address} does not end in /p2p/<peer id>")
    public_key(peer)
    return peer


def with_peer(address: str, peer: PeerId) -> Address:
    """`address` ending in /p2p/<peer>."""
    return f"{without_peer(address)}/p2p/{peer}"


def without_peer(address: str) -> str:
    """`address` without the peer at its end; one through a relay keeps the relay."""
    way, circuit, _ = address.partition(CIRCUIT)
    return way + circuit if circuit else way.partition("/p2p/")[0].partition(f"/{BEGINS}/")[0].rstrip("/")


def listening(host: str, port: int) -> tuple[str, ...]:
    """The multiaddrs to listen on at an IP address: at ::, every interface of both families that the kernel has."""
    families = ("ip4", "ip6") if host == EVERYWHERE["ip6"] else ("ip6" if ":" in host else "ip4",)
    return tuple(
        f"/{family}/{EVERYWHERE[family] if len(families) > 1 else host}/tcp/{port}"
        for family in families
        if family == "ip4" or _has_ipv6()
    )


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((EVERYWHERE["ip6"], 0))
    except OSError:
        return False
    return True


def transport_of(address: str) -> str:
    """What carries a connection to a multiaddr, or to the relay in it, by its name there: "tcp", "quic-v1"; or ""."""
    names = address.partition("/p2p")[0].split("/")[1::2]
    return names[-1] if len(names) > 1 else ""


def announced(listening: Iterable[str]) -> tuple[str, ...]:
    """`listening` with unspecified addresses replaced by those of the interfaces, loopback only for want of others.

    The families by turns, IPv4 first: who keeps a few of the addresses keeps one of each.
    """
    result: list[str] = []
    real: list[str] = []
    for address in listening:
        _, family, host, *rest = address.split("/")
        if family in EVERYWHERE and ipaddress.ip_address(host).is_unspecified:
            real += ["/".join(("", family, each, *rest)) for each in interface_addresses(family)]
        else:
            result.append(address)
    outside = [address for address in real if not ipaddress.ip_address(address.split("/")[2]).is_loopback]
    return tuple(dict.fromkeys(by_turns([*result, *(outside or real)], first="4")))


def by_turns(addresses: Iterable[str], *, first: str) -> list[str]:
    """One of each family after the other, the order within a family as it is; `first` is "4" or "6"."""
    kinds: tuple[list[str], list[str]] = ([], [])
    for address in addresses:
        kind = address.split("/", 2)[1]
        family = "6" if kind in ("ip6", "dns6") else "4"
        kinds[family != first].append(address)
    return [address for address in chain.from_iterable(zip_longest(*kinds)) if address is not None]


def interface_addresses(family: str) -> tuple[str, ...]:
    """Addresses of this machine's interfaces that are there to stay; `family` is "ip4" or "ip6".

    Left out are link-local ones, and of IPv6 those that the kernel made for a while (RFC 8981), is about to drop or
    still tries out, where it says so. Where they cannot be read, they are what they were.
    """
    import ifaddr

    found = []
    passing = _passing_addresses() if family == "ip6" else frozenset()
    try:
        for adapter in ifaddr.get_adapters():
            for entry in adapter.ips:
                host = str(entry.ip if entry.is_IPv4 else entry.ip[0])
                if entry.is_IPv4 == (family == "ip4") and not ipaddress.ip_address(host).is_link_local:
                    found.append(host)
        _known[family] = tuple(host for host in found if host not in passing)
    except OSError as error:  # too few descriptors
        _warn_once(f"the addresses of this machine cannot be read, and count as they were: {error}")
    return _known.get(family, ())


def _passing_addresses() -> frozenset[str]:
    """IPv6 addresses with a flag of PASSING. One that is deprecated for good was set so by its owner."""
    rows = rows_of(FLAGS)
    return frozenset(str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if int(row[4], 16) & PASSING)


def rows_of(table: Path) -> list[list[str]]:
    """The fields of each line of one of the kernel's tables; nothing where it cannot be read."""
    try:
        return [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []


def source_towards(host: str) -> str | None:
    """This machine's address from which packets to an IP address leave, a lasting one of IPv6; None without a way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if family == socket.AF_INET6 and FLAGS.exists():
                probe.setsockopt(socket.IPPROTO_IPV6, PREFERENCES, PREFER_STABLE)
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


@dataclass(frozen=True)
class Endpoint:
    """One multiaddr, taken apart."""

    kind: str  # ip4, ip6, dns, dns4, dns6 or dnsaddr
    host: str
    port: int  # of TCP, or of UDP for QUIC; 0 of dnsaddr, whose TXT records say more
    peer: PeerId | None  # who is expected there; not checked to be a peer id
    relay: PeerId | None = None  # who is there, where `peer` is behind a relay; not checked either
    over: str = "tcp"  # or "quic"
    begins: str = ""  # hex digits with which the key of whoever answers has to begin, where no peer is named

    @property
    def is_name(self) -> bool:
        return self.kind in FAMILIES or self.kind == DNSADDR

    @property
    def place(self) -> str:
        """The multiaddr of what is dialled, without the peer."""
        port = f"/udp/{self.port}/quic-v1" if self.over == "quic" else f"/tcp/{self.port}"
        return f"/{self.kind}/{self.host}" + (port if self.port else "")

    @property
    def who(self) -> str:
        """What stands behind `place` where there is no relay."""
        return f"/p2p/{self.peer}" if self.peer else f"/{BEGINS}/{self.begins}" if self.begins else ""


def parse(address: Address) -> Endpoint | None:
    """None for what cannot be dialled from here: other transports, port 0, the unspecified address, nonsense."""
    if len(address) > MAX_TEXT:
        return None
    if (named := RECORDS.fullmatch(address)) is not None:
        return Endpoint(DNSADDR, named["host"], 0, named["peer"]) if _is_name(named["host"]) else None
    if (found := ADDRESS.fullmatch(address)) is None:
        return None
    kind, host, peer, relay = found.group("kind", "host", "peer", "relay")
    port = int(found["tcp"] or found["udp"])
    if not 0 < port < 65536 or (relay is not None and relay == peer):
        return None
    if kind in ("ip4", "ip6"):
        try:
            ip = ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
        except ValueError:
            return None
        if ip.is_unspecified or ip.is_multicast:
            return None
    elif not _is_name(host):
        return None
    return Endpoint(kind, host, port, peer, relay, "quic" if found["udp"] else "tcp", found["begins"] or "")


def _is_name(host: str) -> bool:
    return len(host) <= 253 and NAME.fullmatch(host) is not None
