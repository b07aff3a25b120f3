"""One node of the simulated network: its connections, their streams, and the task that carries out its events.

What travels goes through the world (`simnet`), which decides when it arrives; whatever arrives is a function in the
receiver's heap `_inbox`, and its `run` calls each when it is due.

A stream is two bounded pipes. A pipe holds at most WINDOW bytes between `send_all` here and `receive_some` there, in
flight or waiting to be read, so a sender feels a slow reader as it would with yamux. Room comes back the moment bytes
are read, without a trip.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from swarmnode.node.host.addresses import verify
from swarmnode.node.identity import Identity
from swarmnode.protocols.network import (
    Address,
    NetworkError,
    PeerEvent,
    PeerId,
    PeerView,
    ProtocolUnsupported,
    Stream,
    StreamBroken,
    StreamHandler,
    Traffic,
    Unreachable,
)

if TYPE_CHECKING:
    from swarmnode.testing.simnet import SimWorld  # it makes the nodes

log = logging.getLogger(__name__)

WINDOW = 256 * 1024  # bytes of one direction of a stream between the two programs: yamux's window
PIECE = 64 * 1024  # bytes that travel as one event: yamux's largest frame in py-libp2p
OVERHEAD = 40  # bytes that each piece costs beside its content: yamux, Noise, TCP and IP, roughly

Send = Callable[[int, Callable[[], None]], None]  # (bytes, what happens on arrival): puts a piece on a link


class Pipe:
    """One direction of a stream."""

    def __init__(self) -> None:
        self.arrived: deque[bytes] = deque()
        self.room = WINDOW
        self.finished = False  # the end has arrived
        self.broken: str | None = None  # why nothing more will come or go
        self.changed = trio.lowlevel.ParkingLot()  # the reader or the writer has a reason to look again

    def put(self, piece: bytes) -> None:
        if self.broken is None:
            self.arrived.append(piece)
            self.changed.unpark_all()

    def finish(self) -> None:
        self.finished = True
        self.changed.unpark_all()

    def break_off(self, why: str, *, keep: bool = False) -> None:
        """Nothing more goes through; `keep` leaves to the reader what has arrived."""
        if self.broken is None:
            self.broken = why
            if not keep:
                self.arrived.clear()
        self.changed.unpark_all()


class SimStream:
    """One end of a stream; `Stream` of protocols.network."""

    def __init__(self, peer: PeerId, outgoing: Pipe, incoming: Pipe, send: Send) -> None:
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._send = send
        self._eof_sent = False
        self._closed = False
        self._sending = self._receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            pipe, rest = self._outgoing, memoryview(data).cast("B")
            self._check_can_send()
            while rest:
                if not pipe.room:
                    await pipe.changed.park()
                    self._check_can_send()
                    continue
                piece = bytes(rest[: min(pipe.room, PIECE)])
                rest = rest[len(piece) :]
                pipe.room -= len(piece)
                self._send(len(piece) + OVERHEAD, lambda piece=piece: pipe.put(piece))  # type: ignore[misc]
        finally:
            self._sending = False

    def send_nowait(self, data: bytes) -> bool:
        """Send all of `data` where that needs no waiting, and say whether it did."""
        pipe = self._outgoing
        if self._sending or self._closed or self._eof_sent or pipe.broken is not None:
            return False
        if not 0 < len(data) <= min(pipe.room, PIECE):
            return False
        pipe.room -= len(data)
        self._send(len(data) + OVERHEAD, lambda: pipe.put(data))
        return True

    def _check_can_send(self) -> None:
        if self._closed or self._eof_sent:
            raise StreamBroken("this side has finished sending")
        if self._outgoing.broken is not None:
            raise StreamBroken(self._outgoing.broken)

    async def receive_some(self, max_bytes: int) -> bytes:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            pipe = self._incoming
            while True:
                if self._closed:
                    raise StreamBroken("this side has closed the stream")
                if pipe.arrived:
                    return self._take(max_bytes)
                if pipe.broken is not None:
                    raise StreamBroken(pipe.broken)
                if pipe.finished:
                    return b""
                await pipe.changed.park()
        finally:
            self._receiving = False

    def _take(self, max_bytes: int) -> bytes:
        pipe = self._incoming
        piece = pipe.arrived.popleft()
        if len(piece) > max_bytes:
            pipe.arrived.appendleft(piece[max_bytes:])
            piece = piece[:max_bytes]
        pipe.room += len(piece)
        pipe.changed.unpark_all()
        return piece

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._eof_sent:
            return
        self._check_can_send()
        self._eof_sent = True
        self._send(OVERHEAD, self._outgoing.finish)

    async def aclose(self) -> None:
        self.drop()

    def end(self) -> None:
        """Finish sending, where that is not done, and stop reading: what was sent still arrives, then its end."""
        if not self._eof_sent and not self._closed and self._outgoing.broken is None:
            self._eof_sent = True
            self._send(OVERHEAD, self._outgoing.finish)
        self.drop()

    def drop(self) -> None:
        """Close without waiting: what was sent still arrives, and then the other side finds the stream ended."""
        if self._closed:
            return
        self._closed = True
        outgoing, incoming, finished = self._outgoing, self._incoming, self._eof_sent

        def tell() -> None:
            if not finished:
                outgoing.break_off("the peer closed the stream", keep=True)
            incoming.break_off("the peer closed the stream")

        if outgoing.broken is None or incoming.broken is None:
            self._send(OVERHEAD, tell)
        incoming.arrived.clear()
        incoming.changed.unpark_all()
        outgoing.changed.unpark_all()

    def break_off(self, why: str) -> None:
        """The connection is gone, at both ends at once."""
        self._outgoing.break_off(why)
        self._incoming.break_off(why)

    @property
    def over(self) -> bool:
        """Closed here, or broken: its connection need not remember it."""
        return self._closed or (self._outgoing.broken is not None and self._incoming.broken is not None)


FEED = 256  # peer events that wait for one reader; then the oldest go
ADDRESSES_PER_PEER = 8
PEERS_LEARNED = 4096  # peers whose addresses one node remembers


class Connection:
    """Between two running nodes, at most one; each end sees it when the news has reached it."""

    def __init__(self, dialler: SimNetwork, dialled: SimNetwork) -> None:
        self.dialler, self.dialled = dialler, dialled
        self.seen_at: dict[PeerId, float] = {}  # end -> when it came up there
        self.streams: list[SimStream] = []
        self.openings: list[Answer] = []  # streams asked for and not answered
        self.confirmations = 0  # to dials that brought it about, on their way
        self.alive = True

    def other(self, end: PeerId) -> SimNetwork:
        return self.dialled if end == self.dialler.me else self.dialler


class Answer:
    """What a dial or an opening is waiting for."""

    def __init__(self) -> None:
        self.came = trio.Event()
        self.stream: SimStream | None = None
        self.error: Exception | None = None
        self.abandoned = False  # the asker waits no more

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.came.set()


class SimNetwork:
    """One node of a SimWorld; `Network` of protocols.network. Made by `SimWorld.node`."""

    def __init__(self, world: SimWorld, identity: Identity, address: Address) -> None:
        self._world = world
        self.identity = identity
        self.me: PeerId = identity.peer_id
        self.address = address
        self._handlers: dict[str, StreamHandler] = {}
        self._learned: dict[PeerId, tuple[Address, ...]] = {}
        self._watchers: list[tuple[trio.MemorySendChannel[PeerEvent], trio.MemoryReceiveChannel[PeerEvent]]] = []
        self._connections: dict[PeerId, Connection] = {}
        self._views: tuple[PeerView, ...] | None = None  # what `peers` tells, until a connection changes
        self._inbox: list[tuple[float, int, int, Callable[[], None]]] = []  # (due, order, bytes, what happens)
        self._nursery: trio.Nursery | None = None
        self.changed = trio.lowlevel.ParkingLot()  # the inbox has a new first event, or the node was thawed
        self.bytes_in = 0
        self.bytes_out = 0
        self.ended = False

    # -- lifetime

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be in the network until cancelled or killed."""
        if self.ended or self._nursery is not None:
            raise RuntimeError("a SimNetwork runs once; ask the world for a new node")
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await self._carry_out()
        finally:
            self.end("the peer has stopped")

    @property
    def up(self) -> bool:
        return self._nursery is not None and not self.ended

    def end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        for connection in list(self._connections.values()):
            self._world.end_connection(connection, why)
        self._world.forget_provider(self.me)
        self._inbox.clear()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _carry_out(self) -> None:
        while True:
            if self.me in self._world.frozen or not self._inbox:
                await self.changed.park()
                continue
            due, _, size, happens = self._inbox[0]
            if due > trio.current_time() + 1e-9:  # the clock may stop a rounding error short of a deadline
                with trio.move_on_at(due):
                    await self.changed.park()
                continue
            heapq.heappop(self._inbox)
            self.bytes_in += size
            happens()

    def schedule(self, due: float, happens: Callable[[], None], size: int = 0) -> None:
        """Let something happen at this node at a time; `size` bytes arrive with it."""
        if self.up:
            heapq.heappush(self._inbox, (due, next(self._world.order), size, happens))
            if self._inbox[0][3] is happens:
                self.changed.unpark_all()

    # -- identity and views

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (self.address,)

    def peers(self) -> tuple[PeerView, ...]:
        if self._views is None:
            self._views = tuple(
                PeerView(
                    peer=peer,
                    path="relayed" if frozenset((self.me, peer)) in self._world.relayed else "direct",
                    connected_at=connection.seen_at[self.me],
                    inbound=connection.dialled is self,
                    agent="simnet",
                )
                for peer, connection in self._connections.items()
            )
        return self._views

    def path_changed(self) -> None:
        """How a peer is reached is not what it was."""
        self._views = None

    def traffic(self) -> Traffic:
        return Traffic(self.bytes_in, self.bytes_out)

    def sign(self, message: bytes) -> bytes:
        return self.identity.private_key.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return verify(peer, message, signature)

    def learn(self, peer: PeerId, addresses: tuple[Address, ...], *, hearsay: bool = False) -> None:
        known = self._learned.pop(peer, ())
        first = known[: ADDRESSES_PER_PEER // 2] if hearsay else ()
        self._learned[peer] = tuple(dict.fromkeys((*first, *addresses, *known)))[:ADDRESSES_PER_PEER]
        while len(self._learned) > PEERS_LEARNED:
            del self._learned[next(iter(self._learned))]

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        connection = self._connections.get(peer)
        here = () if connection is None or connection.dialled is self else connection.dialled.addresses
        return tuple(dict.fromkeys((*here, *self._learned.get(peer, ()))))

    # -- connections

    async def connect(self, target: PeerId | Address, *, timeout: float = 10.0) -> PeerId:
        """As promised; a bare peer id is found as by peer routing, learned addresses or not."""
        with _unreachable_after(timeout, target):
            return (await self._connected(self._resolve(target))).other(self.me).me

    def _resolve(self, target: PeerId | Address) -> PeerId:
        if not target.startswith("/"):
            return target
        place, _, named = target.partition("/p2p/")
        peer = self._world.by_address.get(place)
        if peer is None:
            raise Unreachable(f"nobody answers at {target}")
        if named and named != peer:
            raise Unreachable(f"{target} is answered by {peer}")
        return peer

    async def _connected(self, peer: PeerId) -> Connection:
        await trio.lowlevel.checkpoint()
        if not self.up:
            raise Unreachable("this node is not running")
        if peer == self.me:
            raise Unreachable("a node does not dial itself")
        if peer not in self._connections:
            await self._dial(peer)
        if peer not in self._connections:
            raise Unreachable(f"the connection to {peer} ended at once")
        return self._connections[peer]

    async def _dial(self, peer: PeerId) -> None:
        target = self._world.nodes.get(peer)
        if target is None or not target.up:
            await trio.sleep(self._world.round_trip(self.me, peer))
            raise Unreachable(f"nobody answers for {peer}")
        answer = Answer()

        def accept() -> None:
            if self.up and target.up and not answer.abandoned:  # a frozen dialler may come late to an earlier life
                connection = self._world.connect(self, target)
                target.gained(self, connection)
                connection.confirmations += 1
                self._world.send(target, self, OVERHEAD, lambda: confirm(connection))

        def confirm(connection: Connection) -> None:
            connection.confirmations -= 1
            if connection.alive and not answer.abandoned:
                self.gained(target, connection)
            elif self.me not in connection.seen_at and not connection.confirmations:
                self._world.end_connection(connection, "the dial was given up")
            answer.came.set()

        self._world.send(self, target, OVERHEAD, accept)
        try:
            await answer.came.wait()
        except trio.Cancelled:
            answer.abandoned = True
            raise

    def gained(self, peer: SimNetwork, connection: Connection) -> None:
        if peer.me not in self._connections:
            self._connections[peer.me] = connection
            connection.seen_at[self.me] = trio.current_time()
            self._views = None
            self.learn(peer.me, peer.addresses)
            self._tell(PeerEvent(peer.me, True))

    def lost(self, peer: PeerId) -> None:
        if self._connections.pop(peer, None) is not None:
            self._views = None
            self._tell(PeerEvent(peer, False))

    def moved(self, peer: PeerId) -> None:
        """The world made the path to `peer` a direct one."""
        if peer in self._connections:
            self._views = None
            self._tell(PeerEvent(peer, up=True, moved=True))

    @contextmanager
    def watch_peers(self) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        send, receive = trio.open_memory_channel[PeerEvent](FEED)
        watcher = (send, receive)
        self._watchers.append(watcher)
        try:
            yield receive
        finally:
            self._watchers.remove(watcher)
            send.close()
            receive.close()

    def _tell(self, event: PeerEvent) -> None:
        for send, receive in self._watchers:
            try:
                send.send_nowait(event)
            except trio.WouldBlock:
                receive.receive_nowait()
                send.send_nowait(event)

    # -- streams

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout: float = 10.0) -> Stream:
        with _unreachable_after(timeout, peer):
            connection = await self._connected(peer)
            answer = Answer()
            connection.openings.append(answer)
            target = connection.other(self.me)
            self._world.send(self, target, OVERHEAD + len(protocol), lambda: self._asked(connection, protocol, answer))
            try:
                await answer.came.wait()
            except trio.Cancelled:
                answer.abandoned = True
                if answer.stream is not None:
                    answer.stream.drop()
                raise
            finally:
                connection.openings.remove(answer)
            if answer.error is not None:
                raise answer.error
            assert answer.stream is not None
            return answer.stream

    def _asked(self, connection: Connection, protocol: str, answer: Answer) -> None:
        """At the other node: make the stream and start its handler, or refuse."""
        if not connection.alive:
            return
        target = connection.other(self.me)
        handler = target._handlers.get(protocol)
        if handler is None:
            refusal = ProtocolUnsupported(f"{target.me} does not speak {protocol}")
            self._world.send(target, self, OVERHEAD, lambda: answer.fail(refusal))
            return
        out, back = Pipe(), Pipe()
        send = self._world.send
        near = SimStream(target.me, out, back, lambda size, arrival: send(self, target, size, arrival))
        far = SimStream(self.me, back, out, lambda size, arrival: send(target, self, size, arrival))
        connection.streams = [stream for stream in connection.streams if not stream.over] + [near, far]

        def confirm() -> None:
            if answer.abandoned:
                near.drop()
            answer.stream = near
            answer.came.set()

        self._world.send(target, self, OVERHEAD, confirm)
        assert target._nursery is not None
        target._nursery.start_soon(target._handle, handler, far)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    async def _handle(self, handler: StreamHandler, stream: SimStream) -> None:
        try:
            await handler(stream)
            stream.end()
        except NetworkError as error:
            log.debug("a stream from %s ended: %s", stream.peer, error)
        except Exception:
            log.exception("the handler of a stream from %s failed", stream.peer)
        finally:
            stream.drop()

    # -- providers

    async def provide(self, key: bytes) -> None:
        await trio.sleep(self._world.round_trip(self.me, self.me))
        self._world.provide(key, self.me)

    def withdraw(self, key: bytes) -> None:
        self._world.forget_provider(self.me, key)

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        """As promised. Like a DHT, it answers only a node that has a connection."""
        await trio.sleep(self._world.round_trip(self.me, self.me))
        if not self._connections or self.me in self._world.frozen:
            return ()
        found = self._world.providers(key, self.me, limit)
        for peer in found:
            self.learn(peer, self._world.nodes[peer].addresses)
        return found


@contextmanager
def _unreachable_after(timeout: float, target: str) -> Iterator[None]:
    with trio.move_on_after(timeout) as scope:
        yield
    if scope.cancelled_caught:
        raise Unreachable(f"{target} did not answer within {timeout:g} s")
