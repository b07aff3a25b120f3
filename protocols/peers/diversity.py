"""Where peers are, so that who has a thousand identities behind one address is not most of what a node sees.

Identities are cheap, addresses in many networks are not (Heilman et al. 2015, "Eclipse attacks on Bitcoin"). A peer's
*group* is the /24 of IPv4 or the /48 of IPv6 that it connects from, or the relay that it is reached through, which then
has no more weight than one network. Private and local addresses are in no group: at home, in a laboratory or behind
one's own router everybody has the same. What counts is the address at the other end of the connection, wherever there
is one, and not what a peer says of itself.

Groups rank, they do not forbid: where there is room for all, a swarm in one data centre works as any other. Where there
is not, each group has a turn before any has a second one.
"""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Group = str | None  # None: in no group, and so never one of a crowd
VIA = "via "
PREFIX_V4, PREFIX_V6 = 24, 48  # bits: what one customer of a provider often has, and what a site has (RFC 6177)


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IP address without its zone; of IPv4 where it is one mapped into IPv6. Raises ValueError."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def network_of(host: str) -> str:
    """The network that one customer of a provider holds; what is no IP address is one of its own."""
    try:
        address = ip_of(host)
    except ValueError:
        return host
    prefix = PREFIX_V4 if address.version == 4 else PREFIX_V6
    return str(ipaddress.ip_network((address, prefix), strict=False))


def group_of_host(host: str) -> Group:
    """The group of an IP address; None for one that is not routed globally, and for what is no address."""
    try:
        return network_of(host) if ip_of(host).is_global else None
    except ValueError:
        return None


def group_of_addresses(addresses: Iterable[str]) -> Group:
    """The group of the first address of these that has one; what a peer claims, for want of better."""
    for address in addresses:
        _, _, relayed = address.partition("/p2p-circuit")
        parts = address.split("/")
        if relayed:
            if "p2p" in parts:
                return through(group_of_host(parts[2]) or parts[parts.index("p2p") + 1])
        elif len(parts) > 2 and parts[1] in ("ip4", "ip6") and (group := group_of_host(parts[2])) is not None:
            return group
    return None


def through(relay: str) -> Group:
    """The group of those whom a relay carries, of such a peer id or group: also where it is itself carried."""
    return relay if relay.startswith(VIA) else VIA + relay


def spread(items: Iterable[T], group: Callable[[T], Group]) -> list[T]:
    """The items in turns: the first of each group in the order given, then each one's second, and so on."""
    return [item for _, item in sorted(_ranked(items, group), key=lambda each: each[0])]


def sample(rng: random.Random, items: Sequence[T], count: int, group: Callable[[T], Group]) -> list[T]:
    """At most `count` different items by chance, each group as likely as any other, however many are in it."""
    if all(group(item) is None for item in items):
        return rng.sample(items, min(len(items), count))
    turns: dict[int, list[T]] = {}  # of each group its first, in any order, and then its second
    for rank, item in _ranked(rng.sample(items, len(items)), group):
        turns.setdefault(rank, []).append(item)
    return [item for _, each in sorted(turns.items()) for item in rng.sample(each, len(each))][:count]


def _ranked(items: Iterable[T], group: Callable[[T], Group]) -> Iterator[tuple[int, T]]:
    """Each item with how many of its group came before it."""
    seen: Counter[str] = Counter()
    for item in items:
        of = group(item)
        yield (0, item) if of is None else (seen[of], item)
        if of is not None:
            seen[of] += 1


def crowd(groups: Iterable[Group], *, least: int) -> Group:
    """The group with the most members, if it has at least so many; None where there is none."""
    counted = Counter(group for group in groups if group is not None)
    most = max(counted, key=lambda group: counted[group], default=None)
    return most if most is not None and counted[most] >= least else None
