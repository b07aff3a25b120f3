"""Multiaddrs as this node uses them: where it listens, what it announces, and who a peer id is.

Listening on 0.0.0.0 must not announce 0.0.0.0: peers that dial it reach themselves. `announced` puts the machine's real
interface addresses in its place.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

import base58
import ifaddr
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarmnode.protocols.network import Address, PeerId

CIRCUIT = "/p2p-circuit"  # stands between a relay and the peer behind it
ED25519_PREFIX = bytes.fromhex("002408011220")  # identity multihash of a protobuf Ed25519 public key


@lru_cache(maxsize=4096)
def public_key(peer: PeerId) -> Ed25519PublicKey:
    """The key that an Ed25519 peer id contains. Raises ValueError for anything else."""
    raw = base58.b58decode(peer)
    if len(raw) != len(ED25519_PREFIX) + 32 or not raw.startswith(ED25519_PREFIX):
        raise ValueError(f"{peer!r} is not the id of an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw[len(ED25519_PREFIX) :])


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
    return way + circuit if circuit else way.partition("/p2p/")[0].rstrip("/")


def announced(listening: Iterable[str]) -> tuple[str, ...]:
    """`listening` with unspecified addresses replaced by those of the interfaces, loopback only for want of others."""
    result: list[str] = []
    for address in listening:
        _, family, host, *rest = address.split("/")
        if family in ("ip4", "ip6") and ipaddress.ip_address(host).is_unspecified:
            result += ["/".join(("", family, real, *rest)) for real in interface_addresses(family)]
        else:
            result.append(address)
    return tuple(dict.fromkeys(result))


def interface_addresses(family: str) -> tuple[str, ...]:
    """Addresses of this machine's interfaces; `family` is "ip4" or "ip6". Link-local ones are left out."""
    found = []
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            host = str(entry.ip if entry.is_IPv4 else entry.ip[0])
            if entry.is_IPv4 == (family == "ip4") and not ipaddress.ip_address(host).is_link_local:
                found.append(host)
    outside = tuple(host for host in found if not ipaddress.ip_address(host).is_loopback)
    return outside or tuple(found)
