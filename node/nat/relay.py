"""Being a relay: circuit relay v2 (https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md), the hop side.

    private node -> relay   RESERVE               keep a place for me; answered with an expiry and limits
    anybody      -> relay   CONNECT(private)      answered OK once the private node took the circuit
    relay -> private node   CONNECT(anybody)      on a stream of its own, `stop`
    relay -> private node   STATUS(NO_RESERVATION)  the same; ours: its place was given to another

After OK the two streams are one pipe that carries a connection of its own, encrypted end to end: the relay sees bytes.
A circuit ends when either side ends it, at its limit of bytes or time, or when the relay goes; then both ends find
their connection lost. What a peer may have of this node, and all peers together, stands in `RelayLimits`; beyond it a
request is refused with a typed status, and those who are served do not notice. Only where all places are taken, who has
`AHEAD` more standing than one of their holders gets its place; circuits that this one has go on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.node.host.limits import RelayLimits
from swarmnode.node.nat.messages import BadMessage, peer_bytes, peer_in, receive, send
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId, Stream

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
INTRODUCED_WITHIN = 1.0  # s that a peer has to become one that is served: identify or its lease are under way
LIMITS = RelayLimits()
AHEAD = 0.25  # of standing, by which a peer must be ahead to get the place of another
PIECE = 64 << 10  # bytes read at a time in each direction of a circuit: all that a circuit keeps in memory here


class RelayServer:
    """Serves reservations and circuits while `run` runs.

    `admits` says for whom: members of this node's runs, or with `--role relay` all nodes of our kind. Counted:
    `refused` by name of the status, `bytes_relayed`.
    """

    def __init__(
        self,
        network: Network,
        *,
        admits: Callable[[PeerId], bool],
        limits: RelayLimits = LIMITS,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`now` gives seconds since the epoch: expiries travel as such."""
        self._network = network
        self._admits = admits
        self._limits = limits
        self._now = now
        self._reservations: dict[PeerId, float] = {}  # until when, s since the epoch
        self._circuits: Counter[PeerId] = Counter()  # by each of their two ends
        self._requests: dict[PeerId, list[float]] = {}  # when each peer asked in the last minute, trio time
        self.open_circuits = 0
        self.bytes_relayed = 0
        self.refused: Counter[str] = Counter()
        self._standing: Callable[[PeerId], float] = lambda peer: 1.0

    def prefer(self, standing: Callable[[PeerId], float]) -> None:
        """Where places do not suffice, keep them for those of more `standing` (0 to 1); until then all are equal."""
        self._standing = standing

    @property
    def reservations(self) -> tuple[PeerId, ...]:
        """Who holds a place now."""
        now = self._now()
        return tuple(peer for peer, until in self._reservations.items() if until > now)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; forget who left."""
        self._network.serve(HOP, self._serve)
        task_status.started()
        with self._network.watch_peers() as events:
            async for event in events:
                if not event.up:  # a place is only good while its holder can be told of circuits
                    self._reservations.pop(event.peer, None)
                    self._requests.pop(event.peer, None)

    async def _serve(self, stream: Stream) -> None:
        try:
            request = await receive(stream, pb.HopMessage)
        except BadMessage as error:
            await self._refuse(stream, pb.MALFORMED_MESSAGE, str(error))
            return
        if self._asks_too_often(stream.peer):
            await self._refuse(stream, pb.RESOURCE_LIMIT_EXCEEDED, "asks too often")
        elif request.type == pb.HopMessage.RESERVE:
            await self._reserve(stream)
        elif request.type == pb.HopMessage.CONNECT:
            await self._connect(stream, request)
        else:
            await self._refuse(stream, pb.UNEXPECTED_MESSAGE, "neither RESERVE nor CONNECT")

    async def _reserve(self, stream: Stream) -> None:
        peer, now = stream.peer, self._now()
        if not await self._admitted(peer) or self._is_relayed(peer):
            await self._refuse(stream, pb.PERMISSION_DENIED, "not of a run of this node, or relayed itself")
            return
        leaves = None
        if peer not in self._reservations and len(self.reservations) >= self._limits.reservations:
            leaves = self._who_leaves_for(peer)
            if leaves is None:
                await self._refuse(stream, pb.RESERVATION_REFUSED, "all places are taken")
                return
            del self._reservations[leaves]
        self._reservations = {holder: until for holder, until in self._reservations.items() if until > now}
        until = self._reservations[peer] = now + self._limits.reservation_ttl
        own = tuple(_packed(address) for address in self._network.addresses)
        place = pb.Reservation(expire=int(until), addrs=own)
        try:
            answer = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, reservation=place, limit=self._limit())
            await send(stream, answer)
        finally:
            if leaves is not None:
                await self._tell_displaced(leaves)

    def _who_leaves_for(self, peer: PeerId) -> PeerId | None:
        """Whose place `peer` gets: that of the least standing, if it is less by enough."""
        held = {holder: self._standing(holder) for holder in self.reservations}
        least = min(held, key=held.__getitem__, default=None)
        return least if least is not None and held[least] + AHEAD <= self._standing(peer) else None

    async def _tell_displaced(self, peer: PeerId) -> None:
        """Who knows that its place is gone announces it no longer, and looks for another relay."""
        logger.info("%s has no place any more: one of more standing needs it", peer)
        try:
            stream = await self._network.open_stream(peer, STOP)
            try:
                await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.NO_RESERVATION))
                await receive(stream, pb.StopMessage)
            finally:
                await stream.aclose()
        except NetworkError as error:
            logger.debug("%s could not be told: %s", peer, error)

    async def _connect(self, stream: Stream, request: pb.HopMessage) -> None:
        source = stream.peer
        try:
            target = peer_in(request.peer.id)
        except BadMessage as error:
            await self._refuse(stream, pb.MALFORMED_MESSAGE, str(error))
            return
        if target not in self.reservations:
            await self._refuse(stream, pb.NO_RESERVATION, f"{target} holds no place here")
        elif not await self._admitted(source):
            await self._refuse(stream, pb.PERMISSION_DENIED, "not of a run of this node")
        elif (
            self.open_circuits >= self._limits.circuits
            or max(self._circuits[source], self._circuits[target]) >= self._limits.circuits_per_peer
        ):
            await self._refuse(stream, pb.RESOURCE_LIMIT_EXCEEDED, "too many circuits")
        else:
            self.open_circuits += 1
            self._circuits.update((source, target))
            try:
                await self._relay(stream, target)
            finally:
                self.open_circuits -= 1
                self._circuits.subtract((source, target))
                self._circuits += Counter()  # drops who has none

    async def _relay(self, stream: Stream, target: PeerId) -> None:
        try:
            onward = await self._network.open_stream(target, STOP)
        except NetworkError as error:
            await self._refuse(stream, pb.CONNECTION_FAILED, f"{target} does not answer: {error}")
            return
        try:
            peer = pb.PeerId(id=peer_bytes(stream.peer))
            await send(onward, pb.StopMessage(type=pb.StopMessage.CONNECT, peer=peer, limit=self._limit()))
            answer = await receive(onward, pb.StopMessage)
            if answer.type != pb.StopMessage.STATUS or answer.status != pb.OK:
                raise BadMessage(f"{target} does not take the circuit")
        except NetworkError as error:
            await onward.aclose()
            await self._refuse(stream, pb.CONNECTION_FAILED, str(error))
            return
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

    async def _refuse(self, stream: Stream, status: pb.Status.ValueType, why: str) -> None:
        self.refused[pb.Status.Name(status)] += 1
        logger.debug("refused %s: %s", stream.peer, why)
        await send(stream, pb.HopMessage(type=pb.HopMessage.STATUS, status=status))

    async def _admitted(self, peer: PeerId) -> bool:
        """Whether this relay serves the peer; who has just connected may not have said yet what it is."""
        until = trio.current_time() + INTRODUCED_WITHIN
        while not self._admits(peer):
            if trio.current_time() >= until:
                return False
            await trio.sleep(INTRODUCED_WITHIN / 10)
        return True

    def _limit(self) -> pb.Limit:
        return pb.Limit(duration=int(self._limits.circuit_seconds), data=self._limits.circuit_bytes)

    def _asks_too_often(self, peer: PeerId) -> bool:
        now = trio.current_time()
        asked = [at for at in self._requests.get(peer, ()) if at > now - 60.0]
        self._requests[peer] = [*asked[-self._limits.requests_per_minute :], now]
        return len(asked) >= self._limits.requests_per_minute

    def _is_relayed(self, peer: PeerId) -> bool:
        """A reservation through another relay would make circuits of circuits."""
        return any(view.peer == peer and view.path == "relayed" for view in self._network.peers())


def _packed(address: Address) -> bytes:
    raw: bytes = Multiaddr(address).to_bytes()
    return raw
