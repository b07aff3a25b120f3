"""What a running daemon answers about other nodes and the ways to them: `swarmnode peers …`, `ping`, `bw`, `dht …`.

Shapes are documented in docs/cli.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import trio

from swarmnode.node.assembly import Node
from swarmnode.node.control import Declined, done_but
from swarmnode.node.discovery.finder import rendezvous_of
from swarmnode.node.discovery.kademlia import Walk
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.host.addresses import key_hex, peer_of, public_key, transport_of
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import peer_bytes, places_in
from swarmnode.node.identity import named
from swarmnode.node.nat.reachability import identified
from swarmnode.node.nat.relay import RELAY_KEY
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.catalogue import KEY as CATALOGUE_KEY
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.scoring import Standing
from swarmnode.protocols.transfer.shard_manifest import parse_id

PING_TIMEOUT = 5.0  # seconds
CONNECT_WITHIN = 10.0  # seconds
CLOSE_WITHIN = 2.0  # seconds for connections to say goodbye
MOST_LISTED = 200  # protocols of a peer, and peers in an answer of the DHT
LINKS = ("connected", "disconnected", "blocked", "unblocked")
COUNTED = ("provider_keys", "provided_keys")  # of the metrics of the DHT
KEYS = {"relays": RELAY_KEY, "catalogue": CATALOGUE_KEY}
KEY_FORMS = "64 hex digits (as a shard's id), a peer id, run/RUN_ID, relays or catalogue"


class PeersApi:
    """The control methods about other nodes. Each raises Declined with a text for a person."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def peers(self, params: Mapping[str, Any]) -> dict[str, Any]:
        node = self._node
        members = set(node.membership.members()) if node.membership is not None else set()
        place = node.place()
        seated = {*place.members, *place.newcomers} if place is not None else set()
        now = trio.current_time()
        scoring = node.network.scoring
        return {
            "kept_out": [
                {"peer_id": kept.peer, "for_s": round(kept.seconds, 1), "why": kept.why} for kept in scoring.kept_out()
            ],
            "blocked": sorted(scoring.blocked),
            "peers": [
                {
                    **self._about(view.peer, view.agent),
                    "address": next(iter(node.network.known_addresses(view.peer)), ""),
                    "inbound": view.inbound,
                    "age_s": round(now - view.connected_at, 1),
                    "member": view.peer in members,
                    "standing": scoring.standing(view.peer).word,
                    "round": place.round if place is not None and view.peer in seated else None,
                }
                for view in node.network.peers()
            ],
        }

    async def peer(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """All that this node knows of one peer; with `identify`, also what it says of itself now."""
        peer, network = await self._resolve(str(params.get("peer", ""))), self._node.network
        said = await self._identify(peer) if params.get("identify") else None
        view = next((view for view in network.peers() if view.peer == peer), None)
        agent = said["agent"] if said is not None else view.agent if view is not None else ""
        received, sent = network.traffic_of(peer)
        reputation = self._node.trust.reputation
        work = reputation.ledger.view().get(peer) if reputation is not None else None
        return {
            **self._about(peer, agent),
            "public_key": key_hex(peer),
            "identify": said,
            "member": self._node.membership is not None and peer in self._node.membership.members(),
            "addresses": list(network.known_addresses(peer)),
            "protocols": list(network.protocols_of(peer))[:MOST_LISTED],
            "connections": [
                {
                    "address": each.address,
                    "transport": transport_of(each.address),
                    "path": "direct" if each.direct else "relayed",
                    "relay": each.relay,
                    "inbound": each.inbound,
                    "age_s": round(trio.current_time() - each.since, 1),
                    "streams": each.session.open_streams,
                    "rtt_ms": _milliseconds(each.session.rtt()),
                }
                for each in network.connections.of(peer)
            ],
            "history": [
                {"at": round(change.at, 3), "path": change.path, "why": change.why}
                for change in network.connections.history(peer)
            ],
            "traffic": _by_protocol(received, sent),
            "scoring": network.scoring.told(peer),
            "score": round(work.score, 4) if work is not None and work.account.rounds else None,
        }

    async def _identify(self, peer: PeerId) -> dict[str, Any]:
        await self._reach(peer, CONNECT_WITHIN)
        try:
            best = self._node.network.connections.best(peer)
            if best is None:
                raise Declined(f"{peer} closed the connection; try again")
            said = await identified(best.session)
        except NetworkError as error:
            raise Declined(f"{peer} cannot be asked who it is: {error}") from error
        return {
            "agent": said.agent_version[:128],
            "protocol_version": said.protocol_version[:128],
            "protocols": sorted(str(each)[:128] for each in said.protocols[:MOST_LISTED]),
            "addresses": list(places_in(said.listen_addrs[:64])),
            "sees_this_node_at": "".join(places_in([said.observed_addr])),
        }

    async def link(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Have a peer be one of LINKS: `to`. A block lasts until it is lifted, also over restarts of the node."""
        to, name, network, barred = str(params.get("to", "")), str(params.get("peer", "")), self._node.network, False
        if to not in LINKS:
            raise UsageMistake(f"{to!r}: a peer can be {', '.join(LINKS)}")
        if to == "connected":
            peer = await self._resolve(name)
            if peer not in network.connections and not network.known_addresses(peer):
                await self._walk(peer_bytes(peer))
            await self._reach(peer, CONNECT_WITHIN)
        else:
            peer = which_peer(network, name)
            barred = network.scoring.standing(peer) is Standing.BANNED
            if to == "disconnected":
                network.connections.hang_up(peer)
            else:
                with done_but("it holds until the node is started again"):
                    await self._node.block(peer, to == "blocked")
            with trio.move_on_after(CLOSE_WITHIN if to != "unblocked" else 0):
                while peer in network.connections:  # noqa: ASYNC110 (nobody else waits for a peer's end)
                    await trio.sleep(0.02)
        told = {"peer_id": peer, "blocked": peer in network.scoring.blocked, "barred_before": barred}
        return told | self._way(peer)

    async def traffic(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Bytes by protocol, of all peers since the start, or of one since it connected; and by connected peer."""
        network, name = self._node.network, str(params.get("peer") or "")
        total = network.traffic()
        return {
            "time": trio.current_time(),
            "in": total.bytes_in,
            "out": total.bytes_out,
            "protocols": _by_protocol(*network.traffic_of(which_peer(self._node.network, name) if name else None)),
            "peers": {
                view.peer: {"in": sum(received.values()), "out": sum(sent.values())}
                for view in network.peers()
                for received, sent in [network.traffic_of(view.peer)]
            },
        }

    async def ping(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A round trip by a call, and its way; with `punch`, the node begins to replace a circuit."""
        peer = await self._resolve(str(params.get("peer", "")))
        await self._reach(peer, PING_TIMEOUT)
        if params.get("punch"):
            self._node.nat.try_direct(peer)
        try:
            rtt = await self._node.rpc.ping(peer, timeout=PING_TIMEOUT)
        except CallError as error:
            raise Declined(f"{peer} does not answer: {error}. It may be off, frozen or cut off.") from error
        return {"peer_id": peer, "rtt_ms": round(1000 * rtt, 3), "way": self._way(peer)}

    # --- the DHT ----------------------------------------------------------------------------------------------------

    async def dht(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Look up where a peer is (`find`), who has a key (`providers`), or who is closest to it (`query`).

        Without any of them, how large this node's part in the DHT is.
        """
        network, began = self._node.network, trio.current_time()
        answer: dict[str, Any]
        if name := params.get("find"):
            peer = which_peer(self._node.network, str(name), itself=True)
            walk, asked = await self._walk(peer_bytes(peer))
            answer = {"peer_id": peer, "addresses": list(walk.closer.get(peer, ()))}
        elif name := params.get("providers"):
            walk, asked = await self._walk(self._key(str(name)), providers=True)
            found = walk.providers.items()
            answer = {"providers": [{"peer_id": peer, "addresses": list(told)} for peer, told in found][:MOST_LISTED]}
        elif name := params.get("query"):
            walk, asked = await self._walk(self._key(str(name)))
            closest = [{"peer_id": peer, "addresses": list(network.known_addresses(peer))} for peer in asked]
            answer = {"closest": closest[:MOST_LISTED]}
        else:
            values = {sample.metric.name: int(sample.value) for sample in self._node.metrics.samples()}
            counted = {name: values.get(f"swarmnode_dht_{name}", 0) for name in COUNTED}
            buckets = [list(map(str, bucket.peer_ids())) for bucket in network.kademlia.routing_table.buckets]
            return {"connected": len(network.kademlia.speakers()), "table": buckets, **counted}
        return {**answer, "asked": len(asked), "seconds": round(trio.current_time() - began, 3)}

    async def _walk(self, key: bytes, *, providers: bool = False) -> tuple[Walk, list[PeerId]]:
        walk, asked = await self._node.network.kademlia.look_up(key, providers=providers)
        if not asked:
            raise Declined("no peer of the DHT answers, so nothing can be looked up: see swarmnode peers")
        return walk, asked

    def _key(self, text: str) -> bytes:
        """The key that a person means. Raises Declined."""
        try:
            if text in KEYS:
                return KEYS[text]
            if text.startswith("run/"):
                return rendezvous_of(text.removeprefix("run/"))
            if len(text) == 64:
                return parse_id(text)
            return peer_bytes(which_peer(self._node.network, text, itself=True))
        except (ValueError, Declined) as error:
            raise UsageMistake(f"{text[:80]!r} is no key of the DHT: expected {KEY_FORMS}") from error

    # --- who is meant -----------------------------------------------------------------------------------------------

    def _about(self, peer: PeerId, agent: str) -> dict[str, Any]:
        """Who it is and the way to it; the round trip is of calls where there were any lately, else of its pings."""
        program, name = named(agent)
        rtt = self._node.liveness.rtts.get(peer) or self._node.network.rtt(peer)
        return {"peer_id": peer, "agent": program, "name": name, "rtt_ms": _milliseconds(rtt), **self._way(peer)}

    def _way(self, peer: PeerId) -> dict[str, Any]:
        """How new streams to the peer go."""
        connections = self._node.network.connections
        best = connections.best(peer)
        address, relay = (best.address, best.relay) if best is not None else ("", None)
        carrier = connections.best(relay) if relay is not None else None
        return {
            "path": connections.path(peer),
            "relay": relay,
            "transport": transport_of(address if carrier is None else carrier.address),
            "address": address,
        }

    async def _resolve(self, name: str) -> PeerId:
        """A peer id, the end or beginning of a connected one's, or a multiaddr, to which this node then connects."""
        return await self._reach(name, PING_TIMEOUT) if name.startswith("/") else which_peer(self._node.network, name)

    async def _reach(self, target: str, within: float) -> PeerId:
        """Be connected to a peer, or to whoever answers at a multiaddr. Raises Declined."""
        try:
            return await self._node.network.connect(target, timeout=within)
        except NetworkError as error:
            if target in self._node.network.scoring.blocked:
                raise Declined(
                    f"{target} is blocked by this node's owner. Let it in again: swarmnode peers unblock {target[-6:]}"
                ) from error
            raise Declined(f"{target} cannot be reached: {error}. Try each way: swarmnode netcheck {target}") from error


def fitting(name: str, known: Iterable[PeerId], *, listed: str) -> PeerId | None:
    """The one whose id begins or ends so, or is printed so by `listed`, a command. Raises Declined for several."""
    pattern = name.replace("…", "*")
    found = [p for p in {*known} if name and (p.startswith(name) or p.endswith(name) or fnmatchcase(p, pattern))]
    if len(found) > 1:
        raise Declined(f"{name} fits {len(found)} peers; give more of the peer id ({listed})")
    return found[0] if found else None


def which_peer(network: Libp2pNetwork, name: str, others: Iterable[PeerId] = (), *, itself: bool = False) -> PeerId:
    """A peer by its id, how that of a known one or of the `others` begins or ends, or its multiaddr.

    It is this node only where `itself`.
    """
    known = {*others, *map(str, network.swarm.peerstore.peer_ids()), *(view.peer for view in network.peers())}
    known |= {*network.scoring.blocked, *(kept.peer for kept in network.scoring.kept_out())}
    found = fitting(name, known, listed="swarmnode peers")
    try:
        peer = found or (peer_of(name) if name.startswith("/") else name)
        public_key(peer)
    except ValueError:
        raise Declined(
            f"this node knows no peer that is called {name or '(nothing)'}. swarmnode peers lists the connected "
            "ones; another one is named by its whole peer id or its multiaddr"
        ) from None
    if peer == network.me and not itself:
        raise UsageMistake(f"{name} is this node itself: swarmnode status and swarmnode id tell of it")
    return peer


def _milliseconds(seconds: float | None) -> float | None:
    return round(1000 * seconds, 2) if seconds else None


def _by_protocol(received: Mapping[str, int], sent: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {name: {"in": received.get(name, 0), "out": sent.get(name, 0)} for name in sorted({*received, *sent})}
