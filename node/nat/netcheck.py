"""What `swarmnode netcheck` tells: how this node is reached, through what, how well, and what its owner can do.

`report` reads the parts of the daemon; `problems` and `class_of` are pure. `trace` tries each way to one peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trio

from swarmnode.node.doctor import SET_CLOCK
from swarmnode.node.host.addresses import CIRCUIT, parse
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import peer_bytes
from swarmnode.node.nat.reachability import Reachability, is_local
from swarmnode.node.nat.traversal import NatTraversal
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Standing

NO_NAT, INDEPENDENT, DEPENDENT, UNKNOWN = "none", "endpoint-independent", "address-dependent", "unknown"
OPEN, CLOSED = "open", "port-dependent"
# Which packets from outside come in (RFC 4787, section 5), as peers that dialled back found out. They dial from another
# port than the one that this node knows of them: where they got through, the way is open; where they did not, only
# answers from where this node sent something come in.
FILTERING = {"public": OPEN, "private": CLOSED, "relayed": CLOSED, "unknown": UNKNOWN}
OPENED, FIREWALL, MAPPED, FULL_CONE = "no NAT", "firewall", "mapped", "full cone"
ADDRESS_RESTRICTED, PORT_RESTRICTED, SYMMETRIC = "address-restricted", "port-restricted", "symmetric"
CLASSES = (OPENED, FIREWALL, MAPPED, FULL_CONE, ADDRESS_RESTRICTED, PORT_RESTRICTED, SYMMETRIC)


def report(network: Libp2pNetwork, nat: NatTraversal, rates: Mapping[str, float], clock: str = "") -> dict[str, Any]:
    """The answer of the control socket; docs/cli.md documents it. `rates` in bytes/s, `clock`: what is wrong there."""
    views, reach = network.peers(), nat.reachability
    relayed = sum(view.path == "relayed" for view in views)
    reached_by, failed_for = reach.counts()
    mapping, pinhole = reach.mappings.get("ip4"), reach.mappings.get("ip6")
    answer: dict[str, Any] = {
        "reachability": nat.how_reached,
        "reached_by": reached_by,
        "failed_for": failed_for,
        "listens": list(network.own_addresses),
        "announces": list(network.addresses),
        "observed": list(reach.observed()),
        "nat": kind_of_nat(network.own_addresses, reach),
        "filtering": OPEN if reached_by > failed_for else FILTERING[nat.how_reached],
        "uninvited": len(reach.uninvited),
        "ipv6": {
            "addresses": [
                at for at in network.own_addresses if at.startswith("/ip6/") and not is_local(at.split("/")[2])
            ],
            "reached_at": list(reach.open_at(trio.current_time(), "ip6")),
        },
        "port_mapping": {
            "asked": nat.asks_router,
            "way": mapping.way if mapping is not None else None,
            "address": mapping.address if mapping is not None else None,
            "state": nat.ports["ip4"].state if nat.asks_router else "switched off (upnp = false)",
            "pinhole": pinhole.address if pinhole is not None else None,
            "state_of_ipv6": nat.ports["ip6"].state if nat.asks_router else "switched off (upnp = false)",
        },
        "relays": [
            {"peer_id": relay, "rtt_ms": round(1000 * rtt, 2) if (rtt := network.rtt(relay)) else None}
            for relay in network.relay_client.relays
        ],
        "peers": {"connected": len(views), "direct": len(views) - relayed, "relayed": relayed},
        "punched": nat.puncher.succeeded,
        "not_punched": nat.puncher.failed,
        "rates": dict(rates),
        "clock": clock,
        "serves": {
            "reservations": len(nat.relay.reservations),
            "circuits": nat.relay.open_circuits,
            "bytes": nat.relay.bytes_relayed,
        },
    }
    kind = class_of(answer)
    udp = any("/quic" in address for address in network.own_addresses)
    works = [{"class": other, "path": path_between(kind, other, udp=udp)} for other in CLASSES]
    told = [{"problem": what, "advice": do} for what, do in problems(answer)]
    return answer | {"class": kind, "works_with": works, "problems": told}


def class_of(answer: Mapping[str, Any]) -> str:
    """What stands between this node and the internet, one of CLASSES, by a report.

    RFC 3489's names, which people know: mapping and filtering of RFC 4787 taken together. Who dials back has heard from
    this node, so it gets through an address-restricted NAT too; a full cone is known by who came uninvited.
    """
    nat, lets_in = answer["nat"], answer["filtering"]
    if UNKNOWN in (nat, lets_in):
        return UNKNOWN
    if nat == NO_NAT:
        return OPENED if lets_in == OPEN else FIREWALL
    if lets_in == OPEN and (answer["port_mapping"]["address"] or nat == DEPENDENT):
        return MAPPED
    if nat == DEPENDENT:
        return SYMMETRIC
    if lets_in == OPEN:
        return FULL_CONE if answer["uninvited"] else ADDRESS_RESTRICTED
    return PORT_RESTRICTED


def path_between(one: str, other: str, *, udp: bool = False) -> str:
    """How two nodes behind NATs of these classes come together: "direct", "punched", "probed", "relayed", "unknown".

    `udp`: whether both speak QUIC, over which a port can be guessed where one of the two is symmetric.
    """
    pair = {one, other}
    if pair & {OPENED, MAPPED, FULL_CONE}:
        return "direct"
    if UNKNOWN in pair:
        return UNKNOWN
    # A symmetric side dials from a port that nobody foresees: in comes it only where ports do not matter.
    if SYMMETRIC not in pair or ADDRESS_RESTRICTED in pair:
        return "punched"
    return "probed" if udp and len(pair) == 2 else "relayed"


async def trace(network: Libp2pNetwork, nat: NatTraversal, peer: PeerId) -> dict[str, Any]:
    """Try every way to a peer, and tell each step with its result, and what to do. Some 25 s at the most."""
    steps: list[dict[str, Any]] = []

    def told(step: str, ok: bool, result: str) -> None:
        steps.append({"step": step, "ok": ok, "result": result})

    def path() -> str:
        return network.connections.path(peer)

    standing = network.scoring.standing(peer)
    kept_in = standing is not Standing.BANNED
    told("standing here", kept_in, "blocked by its owner" if peer in network.scoring.blocked else standing.word)
    told("connected", path() == "direct", {"none": "not before this"}.get(path(), path()))
    if kept_in and path() != "direct":
        known = network.known_addresses(peer)
        told("addresses known here", bool(known), f"{len(known)}")
        _, asked = await network.kademlia.look_up(peer_bytes(peer))
        fresh = [address for address in network.known_addresses(peer) if address not in known]
        told("asked the DHT", bool(fresh), f"{len(asked)} peers answered, {len(fresh)} addresses more")
        for address, failure in sorted((await network.dial_each(peer)).items(), key=lambda each: CIRCUIT in each[0]):
            told(f"dialled {address}", not failure, failure or "connected")
        if path() == "relayed":
            punched = await nat.puncher.punch(peer)
            why = "".join(change.why for change in network.connections.history(peer)[-1:])
            told("punched a hole", punched, "direct" if punched else why)
    return {"peer_id": peer, "path": path(), "steps": steps, "advice": advice(path(), steps)}


def advice(path: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """What the steps of a trace mean, and what to do."""
    dialled = [each["result"] for each in steps if each["step"].startswith("dialled")]
    if path == "direct":
        return "nothing to mend: it is reached directly"
    if path == "relayed":
        return (
            "it is reached through a relay, and no direct way was found: one of the two has to be dialable. "
            "swarmnode netcheck, here and there, says what each router needs"
        )
    if not steps[0]["ok"]:
        return "this node keeps it out: swarmnode peers unblock lets it in"
    if not dialled:
        return "nobody says where it is. It is off, or in another swarm: ask its owner for swarmnode id --join"
    if all("refused" in result for result in dialled):
        return "its machine answers and nothing listens: the node is off, or took another port"
    if any("another peer" in result for result in dialled):
        return "somebody else is at its address now: ask its owner for swarmnode id --join"
    return "no way in answers: it is off, or behind a NAT or firewall and without a relay; run swarmnode netcheck there"


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


def problems(answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong by a report, the worst first, and what to do about each."""
    reachability, relays = answer["reachability"], answer["relays"]
    endpoints = [endpoint for address in answer["listens"] if (endpoint := parse(address)) is not None]
    port = endpoints[0].port if endpoints else 4077
    forward = f"forward TCP port {port} to this machine on the router"
    if answer["clock"]:  # relays and peers refuse what it dates
        yield answer["clock"], SET_CLOCK
    if not answer["peers"]["connected"]:
        dial = "have others join (swarmnode id --join prints the line), or dial one: swarmnode peers connect MULTIADDR"
        yield "no peer is connected, so nothing could be tried", dial
    elif reachability == "unknown":
        yield "no peer has tried to dial this node yet", "wait a minute and look again"
    if endpoints and all(endpoint.host in ("127.0.0.1", "::1") for endpoint in endpoints):
        yield "the node listens for this machine only", "start it with --listen ::"
    if reachability == "private":
        yield (
            "peers cannot dial this node, and no relay has a place for it: it works with those that it dials",
            f"{forward}, or have somebody with a public address run: swarmnode run --role relay --join ADDRESS",
        )
    if reachability == "relayed" and len(relays) == 1:
        yield (
            "there is a place at one relay only; if it goes, peers lose this node until another is found",
            "one more node with a public address mends that: swarmnode run --role relay --join ADDRESS",
        )
    if reachability in ("private", "relayed"):
        yield from _closed(answer, forward)


def _closed(answer: Mapping[str, Any], forward: str) -> Iterator[tuple[str, str]]:
    """Why peers cannot dial in, as far as that is known, and what to do."""
    mapping = answer["port_mapping"]
    outer = _host(mapping["address"]) if mapping["address"] else None
    seen = {_host(place) for place in answer["observed"] if place.startswith("/ip4/")}
    if outer is not None and (is_local(outer) or (seen and outer not in seen)):
        yield (
            f"there are two NATs: the router's own outer address, {outer}, is not on the internet",
            "set one of the two routers to bridge mode, or ask the provider for a public address",
        )
    elif outer is not None:
        yield "the router mapped a port, and peers still cannot dial in", "look for a firewall: " + forward
    elif not mapping["asked"]:
        yield "the router is not asked for a port", "set upnp = true, or " + forward
    else:
        switch = "switch on UPnP, NAT-PMP or PCP in the router, or " + forward
        yield f"the router opens no port ({mapping['state']})", switch
    if answer["nat"] == DEPENDENT:
        yield (
            "the router shows this node at another port to each peer, so peers behind such routers stay relayed",
            forward + "; nothing else makes those connections direct",
        )


def _host(address: str) -> str | None:
    endpoint = parse(address)
    return endpoint.host if endpoint is not None else None
