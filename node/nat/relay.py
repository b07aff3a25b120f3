"""Circuit relay v2 (https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md): being a relay, and using some.

    private node -> relay   RESERVE               keep a place for me; answered with an expiry and limits
    anybody      -> relay   CONNECT(private)      answered OK once the private node took the circuit
    relay -> private node   CONNECT(anybody)      on a stream of its own, `stop`
    relay -> private node   STATUS(NO_RESERVATION)  the same; ours: its place was given to another

After OK the two streams are one pipe that carries a connection of its own, Noise and then Yamux, as over TCP: the relay
sees bytes that it can neither read nor change. To the rest of the node it is a connection whose `direct` is False.
A circuit ends when either side ends it, at its limit of bytes or time, or when the relay goes; then both ends lose it.

`RelayServer` is the relay. What a peer may have of this node, and all peers together, stands in `RelayLimits`; beyond
it a request is refused with a typed status, and those who are served do not notice. Only where all places are taken,
who has `AHEAD` more standing than one of their holders gets its place; circuits that this one has go on.

`RelayClient` makes and takes circuits, and keeps `WANTED` places for a private node, renews them in time, and moves on
when a relay goes. Any public node of the swarm is one. The nearest few are preferred, with a draw among them, so that
the private nodes of a swarm spread over its relays; one that refused or failed is left alone for a while.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import trio
from libp2p.abc import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import HostAllowance, PeerPolicy
from swarmnode.node.host.limits import RelayLimits
from swarmnode.node.host.stream import BadMessage, ask, multiaddrs_of, peer_bytes, peer_in, places_in, receive, send
from swarmnode.node.host.tcp import ExactReader
from swarmnode.protocols.limits import Allowance, Budget, counted
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId, Stream, Unreachable

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
INTRODUCED_WITHIN = 1.0  # s that a peer has to become one that is served: identify or its lease are under way
LIMITS = RelayLimits()
AHEAD = 0.25  # of standing, by which a peer must be ahead to get the place of another
PIECE = 64 << 10  # bytes read at a time in each direction of a circuit: all that a circuit keeps in memory here
MAX_INBOUND = 64  # circuits to this node at a time, of each relay where it has a place, and of all others together
RELAY_KEY = hashlib.sha256(b"swarmnode/relays/1").digest()  # public nodes provide it in the DHT
WANTED = 2  # places kept: the loss of one relay leaves the node reachable
RENEW_EVERY = 300.0  # s, long before a place expires: a relay does not always tell that it is gone
LOOK_EVERY = 5.0  # s while places are lacking
REST = 60.0  # s for which a relay that refused or failed is not asked
DRAW_FROM = 4  # nearest candidates among which one is drawn
ASK_DHT_EVERY = 30.0  # s, while the connected peers do not suffice
ASK_DHT_WITHIN = 5.0  # s
RESERVE_WITHIN = 5.0  # s for connecting to a relay and its answer: one that fails still leaves places within 10 s


class RelayServer:
    """Serves reservations and circuits while `run` runs.

    `policy` says for whom: members of this node's runs, or with `--role relay` all nodes of our kind; and whose places
    are kept where they do not suffice.
    """

    def __init__(self, network: Network, policy: PeerPolicy, limits: RelayLimits = LIMITS) -> None:
        self._network = network
        self._policy = policy
        self._limits = limits
        self._serving = False
        self._reservations: dict[PeerId, float] = {}  # until when, trio time
        self._circuits: Counter[PeerId] = Counter()  # by each of their two ends
        self._requests = Budget[PeerId](Allowance(limits.requests_per_minute / 60, limits.requests_per_minute))
        self.bytes_relayed = 0

    @property
    def open_circuits(self) -> int:
        return self._circuits.total() // 2

    @property
    def reservations(self) -> tuple[PeerId, ...]:
        """The peers that hold a place now."""
        now = trio.current_time()
        return tuple(peer for peer, until in self._reservations.items() if until > now)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; forget the peers that leave."""
        self._network.serve(HOP, self._serve)
        self._serving = True
        task_status.started()
        try:
            with self._network.watch_peers() as events:
                async for event in events:
                    if not event.up:  # a place is only good while its holder can be told of circuits
                        self._reservations.pop(event.peer, None)
        finally:
            self._serving = False

    async def _serve(self, stream: Stream) -> None:
        try:
            request = await receive(stream, pb.HopMessage)
            if not self._requests.take(stream.peer, 1.0):
                raise _Refusal(pb.RESOURCE_LIMIT_EXCEEDED, "asks too often")
            if request.type == pb.HopMessage.RESERVE:
                await self._reserve(stream)
            elif request.type == pb.HopMessage.CONNECT:
                await self._connect(stream, request)
            else:
                raise _Refusal(pb.UNEXPECTED_MESSAGE, "neither RESERVE nor CONNECT")
        except (_Refusal, BadMessage) as refusal:
            logger.debug("refused %s: %s", stream.peer, refusal)
            status = refusal.status if isinstance(refusal, _Refusal) else pb.MALFORMED_MESSAGE
            await send(stream, pb.HopMessage(type=pb.HopMessage.STATUS, status=status))

    async def _reserve(self, stream: Stream) -> None:
        peer, now = stream.peer, trio.current_time()
        admitted = await self._admitted(peer)
        direct = any(view.peer == peer and view.path == "direct" for view in self._network.peers())
        if not admitted or not direct:  # else there would be circuits of circuits, and places of those who are gone
            raise _Refusal(pb.PERMISSION_DENIED, "not of a run of this node, or relayed itself")
        leaves = None
        if peer not in self._reservations and len(self.reservations) >= self._limits.reservations:
            leaves = self._who_leaves_for(peer)
            if leaves is None:
                raise _Refusal(pb.RESERVATION_REFUSED, "all places are taken")
            del self._reservations[leaves]
        self._reservations = {holder: until for holder, until in self._reservations.items() if until > now}
        self._reservations[peer] = now + self._limits.reservation_ttl
        # who dials the relay over QUIC first has TCP beside it at once; twice the addresses would help nobody
        own = multiaddrs_of(address for address in self._network.addresses if "/quic-v1" not in address)
        packed = [address.to_bytes() for address in own]
        place = pb.Reservation(expire=int(time.time() + self._limits.reservation_ttl), addrs=packed)
        try:
            answer = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, reservation=place, limit=self._limit())
            await send(stream, answer)
        finally:
            if leaves is not None:
                await self._tell_displaced(leaves)

    def _who_leaves_for(self, peer: PeerId) -> PeerId | None:
        """The holder whose place `peer` gets: the one of the least standing, where `peer` is AHEAD of it."""
        held = {holder: self._policy.standing(holder) for holder in self.reservations}
        least = min(held, key=held.__getitem__, default=None)
        return least if least is not None and held[least] + AHEAD <= self._policy.standing(peer) else None

    async def _tell_displaced(self, peer: PeerId) -> None:
        """Tell a holder that its place is gone, so that it announces it no longer and looks for another relay."""
        logger.info("%s has no place any more: one of more standing needs it", peer)
        try:
            gone = pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.NO_RESERVATION)
            await ask(self._network, peer, STOP, gone, pb.StopMessage)
        except NetworkError as error:
            logger.debug("%s could not be told: %s", peer, error)

    async def _connect(self, stream: Stream, request: pb.HopMessage) -> None:
        source, target = stream.peer, peer_in(request.peer.id)
        if not await self._admitted(source):
            raise _Refusal(pb.PERMISSION_DENIED, "not of a run of this node")
        if target not in self.reservations:
            raise _Refusal(pb.NO_RESERVATION, f"{target} holds no place here")
        most = max(self._circuits[source], self._circuits[target])
        if self.open_circuits >= self._limits.circuits or most >= self._limits.circuits_per_peer:
            raise _Refusal(pb.RESOURCE_LIMIT_EXCEEDED, "too many circuits")
        with counted(self._circuits, source, target):
            await self._relay(stream, target)

    async def _relay(self, stream: Stream, target: PeerId) -> None:
        try:
            onward = await self._network.open_stream(target, STOP)
        except NetworkError as error:
            raise _Refusal(pb.CONNECTION_FAILED, f"{target} does not answer: {error}") from error
        try:
            peer = pb.PeerId(id=peer_bytes(stream.peer))
            await send(onward, pb.StopMessage(type=pb.StopMessage.CONNECT, peer=peer, limit=self._limit()))
            answer = await receive(onward, pb.StopMessage)
            if answer.type != pb.StopMessage.STATUS or answer.status != pb.OK:
                raise BadMessage(f"{target} does not take the circuit")
        except BaseException as error:
            await onward.aclose()
            if isinstance(error, NetworkError):
                raise _Refusal(pb.CONNECTION_FAILED, str(error)) from error
            raise
        try:
            await send(stream, pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, limit=self._limit()))
            with trio.move_on_after(self._limits.circuit_seconds):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pipe, stream, onward, nursery.cancel_scope)
                    nursery.start_soon(self._pipe, onward, stream, nursery.cancel_scope)
        finally:
            with trio.CancelScope(shield=True):
                await onward.aclose()
                await stream.aclose()

    async def _pipe(self, source: Stream, sink: Stream, circuit: trio.CancelScope) -> None:
        """One direction. An end of sending passes on; anything else ends the circuit."""
        left = self._limits.circuit_bytes
        try:
            while piece := await source.receive_some(min(PIECE, left)):
                await sink.send_all(piece)
                left -= len(piece)
                self.bytes_relayed += len(piece)
                if left == 0:
                    logger.info("a circuit of %s and %s reached its limit", source.peer, sink.peer)
                    circuit.cancel()
                    return
            await sink.send_eof()
        except NetworkError as error:
            logger.debug("a circuit of %s and %s ended: %s", source.peer, sink.peer, error)
            circuit.cancel()

    async def _admitted(self, peer: PeerId) -> bool:
        """Whether this relay serves the peer; one that has just connected may still have to identify itself."""
        until = trio.current_time() + INTRODUCED_WITHIN
        while not (self._serving and self._policy.relays_for(peer)):
            if trio.current_time() >= until:
                return False
            await trio.sleep(INTRODUCED_WITHIN / 10)
        return True

    def _limit(self) -> pb.Limit:
        return pb.Limit(duration=int(self._limits.circuit_seconds), data=self._limits.circuit_bytes)


class _Refusal(Exception):
    """What a peer asks of this relay is not done, for a reason that it is told as a status."""

    def __init__(self, status: pb.Status.ValueType, why: str) -> None:
        super().__init__(why)
        self.status = status


class RelayRefused(NetworkError):
    """The relay does not do what it was asked."""

    def __init__(self, relay: PeerId, status: pb.Status.ValueType) -> None:
        word = pb.Status.Name(status) if status in pb.Status.values() else f"status {status}"
        super().__init__(f"relay {relay} refuses: {word.lower().replace('_', ' ')}")


@dataclass(frozen=True)
class Reservation:
    """A place at a relay, good while the connection to it lasts."""

    since: float  # when it was given, or renewed; trio time
    addresses: tuple[Address, ...]  # where this node can be dialled through the relay, each ending in /p2p/<this node>


class RelayedNetwork(Network, Protocol):
    """What a relay's client asks of its network beyond what all protocols do."""

    def speaks(self, peer: PeerId, protocol: str) -> bool: ...

    def rtt(self, peer: PeerId) -> float | None: ...

    def announce_instead(self, found: tuple[Address, ...] | None) -> None: ...


class RelayClient:
    """Makes and takes circuits of one node; and, while `run` runs because the node is private, keeps places at relays.

    The host's policy hears of what each relay carries.
    """

    def __init__(self, network: RelayedNetwork, swarm: Swarm, host: HostAllowance) -> None:
        self._network = network
        self._swarm = swarm
        self._host = host
        self._random = random.Random(network.me)
        self._inbound: Counter[PeerId | None] = Counter()  # circuits by the relay; None: where it has no place
        self.beside: tuple[Address, ...] = ()  # where this node was reached without a relay all the same
        self._held: dict[PeerId, Reservation] = {}
        self._rests: dict[PeerId, float] = {}  # relays left alone, until when, trio time
        self._asked_dht = -ASK_DHT_EVERY
        self._wake = trio.Event()
        network.serve(STOP, self._on_stop)

    async def reserve(self, relay: PeerId) -> Reservation:
        """Ask `relay` for a place, or renew it. Raises RelayRefused, or another NetworkError without an answer."""
        answer = await ask(self._network, relay, HOP, pb.HopMessage(type=pb.HopMessage.RESERVE), pb.HopMessage)
        if answer.type != pb.HopMessage.STATUS or answer.status != pb.OK:
            raise RelayRefused(relay, answer.status)
        me, places = self._network.me, places_in(answer.reservation.addrs[:8])
        circuits = tuple(f"{place}/p2p/{relay}/p2p-circuit/p2p/{me}" for place in places)
        return Reservation(trio.current_time(), circuits)

    async def dial(self, relay: PeerId, target: PeerId) -> None:
        """Connect to `target` through `relay`. Raises RelayRefused, or another NetworkError."""
        stream = await self._network.open_stream(relay, HOP)
        try:
            await send(stream, pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer_bytes(target))))
            answer = await receive(stream, pb.HopMessage)
            if answer.type != pb.HopMessage.STATUS or answer.status != pb.OK:
                raise RelayRefused(relay, answer.status)
            raw = _raw(CircuitStream(stream, self._host), stream.peer, initiator=True)
            await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(target))
        except BaseException as error:
            await stream.aclose()
            if isinstance(error, SwarmException):
                raise Unreachable(f"{target} cannot be reached through {relay}: {error}") from error
            raise

    async def _on_stop(self, stream: Stream) -> None:
        """A relay says that somebody dials this node, or that its place there is gone."""
        request = await receive(stream, pb.StopMessage)
        if request.type == pb.StopMessage.STATUS and request.status == pb.NO_RESERVATION:
            self.lose(stream.peer)
            await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK))
            return
        relay = stream.peer if stream.peer in self._held else None
        if request.type != pb.StopMessage.CONNECT or self._inbound[relay] >= MAX_INBOUND:
            status = pb.UNEXPECTED_MESSAGE if request.type != pb.StopMessage.CONNECT else pb.RESOURCE_LIMIT_EXCEEDED
            await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=status))
            return
        source = peer_in(request.peer.id)
        circuit = CircuitStream(stream, self._host)
        raw = _raw(circuit, stream.peer, initiator=False)
        self._inbound[relay] += 1
        try:
            await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK))
            await self._swarm.upgrade_inbound_raw_conn(raw, raw.get_transport_addresses()[0])
            await circuit.ended.wait()
        except Exception as error:  # whoever dials may say anything
            logger.debug("a circuit from %s through %s came to nothing: %r", source, stream.peer, error)
        finally:
            self._inbound -= Counter([relay])  # drops who has none
            await stream.aclose()

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Where this node holds a place now."""
        return tuple(self._held)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where this node can be dialled through relays, by turns, as others keep few; and beside them."""
        turns = zip_longest(*(held.addresses for held in self._held.values()))
        return (*(address for turn in turns for address in turn if address is not None), *self.beside)

    def lose(self, relay: PeerId) -> None:
        """There is no place at `relay` any more: leave it alone for a while, and look for another."""
        if self._held.pop(relay, None) is not None:
            logger.info("lost the relay %s; looking for another", relay)
            self._rests[relay] = trio.current_time() + REST
            self._network.announce_instead(self.addresses)
            self._wake.set()

    async def run(self) -> None:
        """Keep places and announce them until cancelled; what is announced then is for the caller to say."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._notice_losses)
                while True:
                    self._wake = trio.Event()  # before looking: a relay lost meanwhile is noticed as well
                    await self._renew()
                    if len(self._held) < WANTED:
                        await self._find()
                    with trio.move_on_after(LOOK_EVERY if len(self._held) < WANTED else 10 * LOOK_EVERY):
                        await self._wake.wait()
        finally:
            self._held.clear()

    async def _notice_losses(self) -> None:
        with self._network.watch_peers() as events:
            async for event in events:
                if not event.up:
                    self.lose(event.peer)
                elif len(self._held) < WANTED:
                    self._wake.set()

    async def _renew(self) -> None:
        for relay, reservation in list(self._held.items()):
            if trio.current_time() - reservation.since >= RENEW_EVERY:
                await self._keep(relay)

    async def _find(self) -> None:
        """Ask the connected peers that offer to relay, and where they do not suffice, those whom the DHT knows."""
        direct = (view.peer for view in self._network.peers() if view.path == "direct")
        await self._draw(peer for peer in direct if self._network.speaks(peer, HOP))
        if len(self._held) < WANTED and trio.current_time() >= self._asked_dht + ASK_DHT_EVERY:
            self._asked_dht = trio.current_time()
            found: tuple[PeerId, ...] = ()
            with trio.move_on_after(ASK_DHT_WITHIN):
                found = await self._network.find_providers(RELAY_KEY)
            await self._draw(found)

    async def _draw(self, offered: Iterable[PeerId]) -> None:
        """Ask those that offer a place, drawn among the nearest, until there are enough places."""
        now = trio.current_time()
        self._rests = {relay: until for relay, until in self._rests.items() if until > now}
        apart = {*self._rests, *self._held, self._network.me}
        candidates = [peer for peer in offered if peer not in apart]
        candidates.sort(key=lambda peer: self._network.rtt(peer) or 1.0)
        while candidates and len(self._held) < WANTED:
            groups = {view.peer: view.group for view in self._network.peers()}
            used = {groups.get(held) for held in self._held} - {None}
            elsewhere = [peer for peer in candidates if groups.get(peer) not in used]  # one machine is lost as a whole
            relay = self._random.choice((elsewhere or candidates)[:DRAW_FROM])
            candidates.remove(relay)
            await self._keep(relay)

    async def _keep(self, relay: PeerId) -> None:
        before = self._held.get(relay)
        try:
            with trio.fail_after(RESERVE_WITHIN):
                reservation = await self.reserve(relay)
            if all(view.peer != relay for view in self._network.peers()):
                raise Unreachable("it was lost meanwhile")
        except (NetworkError, trio.TooSlowError) as error:
            lasts = before is not None and trio.current_time() < before.since + 2 * RENEW_EVERY
            if lasts and isinstance(error, trio.TooSlowError):  # a full line: it is asked again
                return
            level = logging.DEBUG if isinstance(error, RelayRefused) else logging.INFO
            logger.log(level, "no place at the relay %s: %s", relay, str(error) or "no answer")
            self._rests[relay] = trio.current_time() + REST
            self._held.pop(relay, None)
        else:
            self._held[relay] = reservation
            if before is None:
                logger.info("reachable through the relay %s", relay)
        after = self._held.get(relay)
        if (before.addresses if before else ()) != (after.addresses if after else ()):
            self._network.announce_instead(self.addresses)


class CircuitStream(ExactReader):
    """What py-libp2p reads and writes as if it were a socket: a stream to the relay."""

    def __init__(self, stream: Stream, host: HostAllowance) -> None:
        super().__init__(host)
        self._stream = stream
        self.ended = trio.Event()

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except NetworkError as error:
            self.ended.set()
            raise ConnectionClosedError(f"circuit lost: {error}", transport="p2p-circuit") from error

    async def _some(self) -> bytes:
        try:
            chunk = await self._stream.receive_some(64 << 10)
        except NetworkError as error:
            self.ended.set()
            raise ConnectionClosedError(f"circuit lost: {error}", transport="p2p-circuit") from error
        if not chunk:
            self.ended.set()
        return chunk

    async def close(self) -> None:
        self.ended.set()
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def _raw(circuit: CircuitStream, relay: PeerId, *, initiator: bool) -> RawConnection:
    address = Multiaddr(f"/p2p/{relay}/p2p-circuit")
    return RawConnection(circuit, initiator, ConnectionType.RELAYED, [address])
