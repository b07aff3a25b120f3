"""What `swarmnode netcheck` tells: how this node is reached, through what, how well, and what its owner can do.

`report` reads the parts of the daemon; `problems` is pure and works on the report alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.node.host.addresses import parse
from swarmnode.node.nat.reachability import Reachability, is_local

if TYPE_CHECKING:
    from swarmnode.node.host.network import Libp2pNetwork
    from swarmnode.node.nat.traversal import NatTraversal

NO_NAT, INDEPENDENT, DEPENDENT, UNKNOWN = "none", "endpoint-independent", "address-dependent", "unknown"
OPEN, CLOSED = "open", "port-dependent"


@dataclass(frozen=True)
class Problem:
    """Something to improve, and how."""

    what: str
    do: str


def report(network: Libp2pNetwork, nat: NatTraversal, rates: Mapping[str, float]) -> dict[str, Any]:
    """The answer of the control socket; docs/cli.md documents it. `rates` in bytes/s."""
    views, reach = network.peers(), nat.reachability
    relayed = sum(view.path == "relayed" for view in views)
    reached_by, failed_for = reach.counts()
    mapping, pinhole = reach.mapping, reach.mappings.get("ip6")
    answer: dict[str, Any] = {
        "reachability": nat.how_reached,
        "reached_by": reached_by,
        "failed_for": failed_for,
        "listens": list(network.own_addresses),
        "announces": list(network.addresses),
        "observed": list(reach.observed()),
        "nat": kind_of_nat(network.own_addresses, reach),
        "filtering": filtering(nat.how_reached),
        "port_mapping": {
            "asked": nat.asks_router,
            "way": mapping.way if mapping is not None else None,
            "address": mapping.address if mapping is not None else None,
            "state": nat.ports.state if nat.asks_router else "switched off (upnp = false)",
            "pinhole": pinhole.address if pinhole is not None else None,
            "state_of_ipv6": nat.ports.state_of_ipv6 if nat.asks_router else "switched off (upnp = false)",
        },
        "relays": [
            {"peer_id": relay, "rtt_ms": round(1000 * rtt, 2) if (rtt := network.rtt(relay)) else None}
            for relay in network.relay_client.relays
        ],
        "peers": {"connected": len(views), "direct": len(views) - relayed, "relayed": relayed},
        "punched": nat.puncher.succeeded,
        "not_punched": nat.puncher.failed,
        "rates": dict(rates),
        "serves": {
            "reservations": len(nat.relay.reservations),
            "circuits": nat.relay.open_circuits,
            "bytes": nat.relay.bytes_relayed,
        },
    }
    return answer | {"problems": [{"problem": p.what, "advice": p.do} for p in problems(answer)]}


def kind_of_nat(own: tuple[str, ...], reach: Reachability) -> str:
    """Whether there is a NAT in front of this node and how it maps (RFC 4787, section 4.1)."""
    seen = reach.observed()  # over IPv4, where NATs are, if anybody sees this node there
    seen = tuple(place for place in seen if place.startswith("/ip4/")) or seen
    if {_host(address) for address in own} & {_host(place) for place in seen}:
        return NO_NAT
    independent = reach.endpoint_independent()
    if independent is None:
        return UNKNOWN
    return INDEPENDENT if independent else DEPENDENT


def filtering(reachability: str) -> str:
    """Which packets from outside come in (RFC 4787, section 5), as peers that dialled back found out.

    They dial from another port than the one that this node knows of them: where they got through, the way is open;
    where they did not, only answers from where this node sent something come in.
    """
    if reachability == "public":
        return OPEN
    return CLOSED if reachability in ("private", "relayed") else UNKNOWN


def problems(answer: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong by a report, the worst first."""
    reachability, relays = answer["reachability"], answer["relays"]
    endpoints = [endpoint for address in answer["listens"] if (endpoint := parse(address)) is not None]
    port = endpoints[0].port if endpoints else 4077
    forward = f"forward TCP port {port} to this machine on the router"
    if not answer["peers"]["connected"]:
        yield Problem("no peer is connected, so nothing could be tried", "join one: swarmnode join LINK")
    elif reachability == "unknown":
        yield Problem("no peer has tried to dial this node yet", "wait a minute and look again")
    if endpoints and all(endpoint.host in ("127.0.0.1", "::1") for endpoint in endpoints):
        yield Problem("the node listens for this machine only", "start it with --listen ::")
    if reachability == "private":
        yield Problem(
            "peers cannot dial this node, and no relay has a place for it: it works with those that it dials",
            f"{forward}, or have somebody with a public address run: swarmnode run --role relay --join ADDRESS",
        )
    if reachability == "relayed" and len(relays) == 1:
        yield Problem(
            "there is a place at one relay only; if it goes, peers lose this node until another is found",
            "one more node with a public address mends that: swarmnode run --role relay --join ADDRESS",
        )
    if reachability in ("private", "relayed"):
        yield from _closed(answer, forward)


def _closed(answer: Mapping[str, Any], forward: str) -> Iterator[Problem]:
    """Why peers cannot dial in, as far as that is known."""
    mapping = answer["port_mapping"]
    outer = _host(mapping["address"]) if mapping["address"] else None
    seen = {_host(place) for place in answer["observed"] if place.startswith("/ip4/")}
    if outer is not None and (is_local(outer) or (seen and outer not in seen)):
        yield Problem(
            f"there are two NATs: the router's own outer address, {outer}, is not on the internet",
            "set one of the two routers to bridge mode, or ask the provider for a public address",
        )
    elif outer is not None:
        yield Problem("the router mapped a port, and peers still cannot dial in", "look for a firewall: " + forward)
    elif not mapping["asked"]:
        yield Problem("the router is not asked for a port", "set upnp = true, or " + forward)
    else:
        switch = "switch on UPnP, NAT-PMP or PCP in the router, or " + forward
        yield Problem(f"the router opens no port ({mapping['state']})", switch)
    if answer["nat"] == DEPENDENT:
        yield Problem(
            "the router shows this node at another port to each peer, so peers behind such routers stay relayed",
            forward + "; nothing else makes those connections direct",
        )


def _host(address: str) -> str | None:
    endpoint = parse(address)
    return endpoint.host if endpoint is not None else None
