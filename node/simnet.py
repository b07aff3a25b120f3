"""A network in memory, on trio's MockClock: latency, bandwidth, loss, partitions, frozen and killed nodes.

    async def main() -> None:
        world = SimWorld(latency=0.02)
        async with trio.open_nursery() as nursery:
            alice, bob = world.node("alice"), world.node("bob")
            for node in (alice, bob):
                await nursery.start(node.run)
            stream = await alice.open_stream(bob.me, "/some/protocol/1")

    run_simulation(main)

How it moves: whatever one node sends another becomes an event in the receiver's heap, due when the link has serialised
it and its latency has passed, in the order of sending. Each node runs one task that carries out its events; links and
connections that nobody uses cost nothing, so thousands of nodes fit in a process.

What the faults mean:
- kill: the node's connections end at once at both ends, its handlers are cancelled, and its `run` returns.
  `node(name)` then gives a new node of the same identity, as a restart would.
- freeze: nothing is delivered to the node or from it, as after SIGSTOP. Nothing breaks; bytes wait within each stream's
  window. What waits is delivered on thaw. The node's own tasks go on and are heard by nobody.
- partition: between groups bytes wait, and connections break after `silence` seconds, as with a keepalive; heal()
  before that, and they go on. Published messages across the cut are lost. New connections run into their timeouts.
- loss: the share of published messages that each receiver misses. Streams are reliable.

Deterministic: events due at one time happen in the order in which they were sent, random choices come from the
seed, and `run_simulation` turns off trio's deliberate shuffling of tasks.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio
import trio.testing
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnode.node.identity import Identity, peer_id_of
from swarmnode.node.simstream import OVERHEAD, Pipe, SimStream
from swarmnode.protocols.network import (
    Address,
    MessageHandler,
    NetworkError,
    PeerEvent,
    PeerId,
    PeerView,
    ProtocolUnsupported,
    Stream,
    StreamHandler,
    Traffic,
    Unreachable,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PUBLISH = 64 * 1024  # bytes of one published message, as the Network promises
FEED = 256  # peer events or published messages that wait for one reader; then the oldest go
ADDRESSES_PER_PEER = 8
PEERS_LEARNED = 4096  # peers whose addresses one node remembers


@dataclass
class _Link:
    """One direction between two nodes."""

    latency: float  # seconds
    bandwidth: float | None  # bytes per second, None = without limit
    free_at: float = 0.0  # when what was sent so far is serialised
    last_arrival: float = 0.0
    held: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # sent while the way was closed


class _Connection:
    """Between two running nodes, at most one; each end sees it when the news has reached it."""

    def __init__(self, dialler: SimNetwork, dialled: SimNetwork) -> None:
        self.dialler, self.dialled = dialler, dialled
        self.seen_at: dict[PeerId, float] = {}  # end -> when it came up there
        self.streams: list[SimStream] = []
        self.openings: list[_Answer] = []  # streams asked for and not answered
        self.alive = True

    def other(self, end: PeerId) -> SimNetwork:
        return self.dialled if end == self.dialler.me else self.dialler


class _Answer:
    """What a dial or an opening is waiting for."""

    def __init__(self) -> None:
        self.came = trio.Event()
        self.stream: SimStream | None = None
        self.error: Exception | None = None
        self.abandoned = False  # the asker waits no more

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.came.set()


class SimWorld:
    """The nodes, the links between them, and what goes wrong.

    `latency` (s) and `bandwidth` (bytes/s, None = without limit) hold for each direction of each link that `link` does
    not set otherwise; `loss` is the share of published messages that a receiver misses; `silence` (s) is how long a
    connection across a partition lives.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: float = 0.02,
        bandwidth: float | None = None,
        loss: float = 0.0,
        silence: float = 15.0,
    ) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self._seed = seed
        self._latency, self._bandwidth, self._silence = latency, bandwidth, silence
        self._nodes: dict[PeerId, SimNetwork] = {}
        self._names: dict[str | int, PeerId] = {}
        self._by_address: dict[str, PeerId] = {}
        self._public_keys: dict[PeerId, Ed25519PublicKey] = {}
        self._links: dict[tuple[PeerId, PeerId], _Link] = {}
        self._connections: dict[tuple[PeerId, PeerId], _Connection] = {}
        self._group: dict[PeerId, int] = {}  # peer -> its side of the partition; -1 where it is not named
        self._cut_number = 0  # partitions and heals so far
        self._frozen: set[PeerId] = set()
        self._providers: dict[bytes, dict[PeerId, None]] = {}
        self._order = itertools.count()

    # -- who is there

    def node(self, name: str | int) -> SimNetwork:
        """The node of that name; a new one with the same identity where the last was killed or has stopped."""
        peer = self._names.get(name)
        if peer is not None and not self._nodes[peer].ended:
            return self._nodes[peer]
        secret = hashlib.sha256(f"simnet {self._seed} {name!r}".encode()).digest()
        key = Ed25519PrivateKey.from_private_bytes(secret)
        peer = peer_id_of(key.public_key().public_bytes_raw())
        if peer not in self._public_keys:
            number = len(self._names) + 1
            self._names[name] = peer
            self._public_keys[peer] = key.public_key()
            self._by_address[f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4077"] = peer
        place = next(place for place, owner in self._by_address.items() if owner == peer)
        self._frozen.discard(peer)
        self._nodes[peer] = SimNetwork(self, Identity(key, peer), f"{place}/p2p/{peer}")
        return self._nodes[peer]

    # -- what goes wrong

    def link(self, a: PeerId, b: PeerId, *, latency: float | None = None, bandwidth: float | None = None) -> None:
        """Set both directions between two peers; None leaves a value as it is."""
        for link in (self._link(a, b), self._link(b, a)):
            link.latency = link.latency if latency is None else latency
            link.bandwidth = link.bandwidth if bandwidth is None else bandwidth

    def partition(self, groups: Iterable[Iterable[PeerId]]) -> None:
        """Nodes reach only their own group from now on; nodes in no group make up one more."""
        self._group = {peer: number for number, group in enumerate(groups) for peer in group}
        self._cut_number += 1
        number = self._cut_number
        for connection in list(self._connections.values()):
            a, b = connection.dialler, connection.dialled
            if self._cut(a.me, b.me):
                for end in (a, b):
                    end.schedule(trio.current_time() + self._silence, lambda c=connection: self._silent(c, number))  # type: ignore[misc]
        self._release()

    def heal(self) -> None:
        """End the partition; what waited goes on."""
        self._group = {}
        self._cut_number += 1
        self._release()

    def freeze(self, peer: PeerId) -> None:
        """Deliver nothing to the peer or from it until `thaw`."""
        self._frozen.add(peer)

    def thaw(self, peer: PeerId) -> None:
        """Deliver what waited, and go on."""
        self._frozen.discard(peer)
        self._nodes[peer].changed.unpark_all()
        self._release()

    def kill(self, peer: PeerId) -> None:
        """End the node at once; its peers see their streams break and the connection go."""
        self._nodes[peer].end("the peer is gone")

    # -- for SimNetwork

    def running(self, peer: PeerId) -> SimNetwork | None:
        node = self._nodes.get(peer)
        return node if node is not None and node.up else None

    def at(self, place: str) -> PeerId | None:
        return self._by_address.get(place)

    def addresses_of(self, peer: PeerId) -> tuple[Address, ...]:
        return self._nodes[peer].addresses if peer in self._nodes else ()

    def public_key(self, peer: PeerId) -> Ed25519PublicKey | None:
        return self._public_keys.get(peer)

    def frozen(self, peer: PeerId) -> bool:
        return peer in self._frozen

    def next_order(self) -> int:
        return next(self._order)

    def send(self, source: SimNetwork, target: SimNetwork, size: int, arrival: Callable[[], None]) -> None:
        """Put `size` bytes on the link; `arrival` happens in the target's task, in order."""
        source.bytes_out += size
        link = self._link(source.me, target.me)
        if source.me in self._frozen or self._cut(source.me, target.me):
            link.held.append((size, arrival))
        else:
            self._put(link, target, size, arrival)

    def round_trip(self, a: PeerId, b: PeerId) -> float:
        return self._link(a, b).latency + self._link(b, a).latency

    def connection(self, a: PeerId, b: PeerId) -> _Connection | None:
        return self._connections.get((min(a, b), max(a, b)))

    def connect(self, dialler: SimNetwork, dialled: SimNetwork) -> _Connection:
        """The connection of two running nodes, made where there is none."""
        pair = (min(dialler.me, dialled.me), max(dialler.me, dialled.me))
        if pair not in self._connections:
            self._connections[pair] = _Connection(dialler, dialled)
        return self._connections[pair]

    def end_connection(self, connection: _Connection, why: str) -> None:
        if not connection.alive:
            return
        connection.alive = False
        a, b = connection.dialler, connection.dialled
        del self._connections[min(a.me, b.me), max(a.me, b.me)]
        for stream in connection.streams:
            stream.break_off(why)
        for opening in connection.openings:
            opening.fail(Unreachable(why))
        a.lost(b.me)
        b.lost(a.me)

    def spread(self, author: SimNetwork, topic: str, message: bytes) -> None:
        """Flood `message` from subscriber to subscriber along connections; each receives it once or, by loss, never."""
        due = {author.me: trio.current_time()}
        waiting = deque([author.me])
        while waiting:
            here = waiting.popleft()
            if here in self._frozen:
                continue
            for peer, node in self._nodes[here].neighbours():
                if peer in due or self._cut(here, peer) or not node.subscribed(topic):
                    continue
                link = self._link(here, peer)
                size = len(message) + OVERHEAD
                due[peer] = due[here] + link.latency + (size / link.bandwidth if link.bandwidth else 0.0)
                waiting.append(peer)
                self._nodes[here].bytes_out += size
                if self.random.random() >= self.loss:
                    node.schedule(due[peer], lambda node=node: node.heard(topic, author.me, message), size)  # type: ignore[misc]

    def provide(self, key: bytes, peer: PeerId) -> None:
        self._providers.setdefault(key, {})[peer] = None

    def forget_provider(self, peer: PeerId) -> None:
        for providers in self._providers.values():
            providers.pop(peer, None)

    def providers(self, key: bytes, asker: PeerId, limit: int) -> tuple[PeerId, ...]:
        found = [peer for peer in self._providers.get(key, {}) if peer != asker and not self._cut(asker, peer)]
        return tuple(self.random.sample(found, limit) if len(found) > limit else found)

    # -- links

    def _link(self, source: PeerId, target: PeerId) -> _Link:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _Link(self._latency, self._bandwidth)
        return link

    def _cut(self, a: PeerId, b: PeerId) -> bool:
        return self._group.get(a, -1) != self._group.get(b, -1)

    def _put(self, link: _Link, target: SimNetwork, size: int, arrival: Callable[[], None]) -> None:
        link.free_at = max(link.free_at, trio.current_time()) + (size / link.bandwidth if link.bandwidth else 0.0)
        link.last_arrival = max(link.last_arrival, link.free_at + link.latency)
        target.schedule(link.last_arrival, arrival, size)

    def _release(self) -> None:
        """Send on what waited on links that are open again."""
        for (source, target), link in self._links.items():
            if link.held and source not in self._frozen and not self._cut(source, target):
                held, link.held = link.held, []
                for size, arrival in held:
                    self._put(link, self._nodes[target], size, arrival)

    def _silent(self, connection: _Connection, number: int) -> None:
        if self._cut_number == number:
            self.end_connection(connection, "nothing was heard from the peer for too long")


class SimNetwork:
    """One node of a SimWorld; `Network` of protocols.network. Made by `SimWorld.node`."""

    def __init__(self, world: SimWorld, identity: Identity, address: Address) -> None:
        self._world = world
        self._identity = identity
        self._address = address
        self._handlers: dict[str, StreamHandler] = {}
        self._topics: dict[str, list[MessageHandler]] = {}
        self._topic_queues: dict[str, trio.MemorySendChannel[tuple[PeerId, bytes]]] = {}
        self._learned: dict[PeerId, tuple[Address, ...]] = {}
        self._watchers: list[tuple[trio.MemorySendChannel[PeerEvent], trio.MemoryReceiveChannel[PeerEvent]]] = []
        self._connections: dict[PeerId, _Connection] = {}
        self._inbox: list[tuple[float, int, int, Callable[[], None]]] = []  # (due, order, bytes, what happens)
        self._nursery: trio.Nursery | None = None
        self.changed = trio.lowlevel.ParkingLot()  # the inbox has a new first event, or the node was thawed
        self.bytes_in = 0
        self.bytes_out = 0
        self.ended = False
        self.handler_failures = 0  # streams and messages whose handler raised

    # -- lifetime

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be in the network until cancelled or killed."""
        if self.ended or self._nursery is not None:
            raise RuntimeError("a SimNetwork runs once; ask the world for a new node")
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for topic in self._topics:
                    self._start_topic(topic)
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
            if self._world.frozen(self.me) or not self._inbox:
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
            heapq.heappush(self._inbox, (due, self._world.next_order(), size, happens))
            if self._inbox[0][3] is happens:
                self.changed.unpark_all()

    # -- identity and views

    @property
    def me(self) -> PeerId:
        return self._identity.peer_id

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (self._address,)

    def peers(self) -> tuple[PeerView, ...]:
        return tuple(
            PeerView(
                peer=peer,
                addresses=self._world.addresses_of(peer),
                path="direct",
                connected_at=connection.seen_at[self.me],
                inbound=connection.dialled is self,
                agent="simnet",
            )
            for peer, connection in self._connections.items()
        )

    def traffic(self) -> Traffic:
        return Traffic(self.bytes_in, self.bytes_out)

    def sign(self, message: bytes) -> bytes:
        return self._identity.private_key.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """As promised; only peers of this world have keys."""
        key = self._world.public_key(peer)
        if key is None:
            return False
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def learn(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        known = self._learned.pop(peer, ())
        self._learned[peer] = tuple(dict.fromkeys((*addresses, *known)))[:ADDRESSES_PER_PEER]
        while len(self._learned) > PEERS_LEARNED:
            del self._learned[next(iter(self._learned))]

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        return self._learned.get(peer, ())

    # -- connections

    async def connect(self, target: PeerId | Address, *, timeout: float = 10.0) -> PeerId:
        """As promised; a bare peer id is found as by peer routing, learned addresses or not."""
        with _unreachable_after(timeout, target):
            return (await self._connected(self._resolve(target))).other(self.me).me

    def _resolve(self, target: PeerId | Address) -> PeerId:
        if not target.startswith("/"):
            return target
        place, _, named = target.partition("/p2p/")
        peer = self._world.at(place)
        if peer is None:
            raise Unreachable(f"nobody answers at {target}")
        if named and named != peer:
            raise Unreachable(f"{target} is answered by {peer}")
        return peer

    async def _connected(self, peer: PeerId) -> _Connection:
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
        target = self._world.running(peer)
        if target is None:
            await trio.sleep(self._world.round_trip(self.me, peer))
            raise Unreachable(f"nobody answers for {peer}")
        answer = _Answer()

        def accept() -> None:
            if self.up:
                connection = self._world.connect(self, target)
                target.gained(self, connection)
                self._world.send(target, self, OVERHEAD, lambda: confirm(connection))

        def confirm(connection: _Connection) -> None:
            if connection.alive:
                self.gained(target, connection)
            answer.came.set()

        self._world.send(self, target, OVERHEAD, accept)
        await answer.came.wait()

    def gained(self, peer: SimNetwork, connection: _Connection) -> None:
        if peer.me not in self._connections:
            self._connections[peer.me] = connection
            connection.seen_at[self.me] = trio.current_time()
            self.learn(peer.me, peer.addresses)
            self._tell(PeerEvent(peer.me, True))

    def lost(self, peer: PeerId) -> None:
        if self._connections.pop(peer, None) is not None:
            self._tell(PeerEvent(peer, False))

    def neighbours(self) -> list[tuple[PeerId, SimNetwork]]:
        return [(peer, connection.other(self.me)) for peer, connection in self._connections.items()]

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self._connections:
            self._world.end_connection(self._connections[peer], "the connection was closed")

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
            answer = _Answer()
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

    def _asked(self, connection: _Connection, protocol: str, answer: _Answer) -> None:
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
            self.handler_failures += 1
            log.exception("the handler of a stream from %s failed", stream.peer)
        finally:
            stream.drop()

    # -- topics

    async def publish(self, topic: str, message: bytes) -> None:
        if len(message) > MAX_PUBLISH:
            raise ValueError(f"a published message has at most {MAX_PUBLISH} bytes, not {len(message)}")
        await trio.lowlevel.checkpoint()
        if self.up and not self._world.frozen(self.me):
            self._world.spread(self, topic, message)

    def subscribe(self, topic: str, handler: MessageHandler) -> None:
        if topic in self._topics:
            self._topics[topic].append(handler)
            return
        self._topics[topic] = [handler]
        if self.up:
            self._start_topic(topic)

    def subscribed(self, topic: str) -> bool:
        return topic in self._topics

    def heard(self, topic: str, author: PeerId, message: bytes) -> None:
        try:
            self._topic_queues[topic].send_nowait((author, message))
        except trio.WouldBlock:
            log.debug("a message on %s was dropped: its handler is behind", topic)

    def _start_topic(self, topic: str) -> None:
        assert self._nursery is not None
        self._topic_queues[topic], receive = trio.open_memory_channel[tuple[PeerId, bytes]](FEED)
        self._nursery.start_soon(self._hand_out, topic, receive)

    async def _hand_out(self, topic: str, messages: trio.MemoryReceiveChannel[tuple[PeerId, bytes]]) -> None:
        async for author, message in messages:
            for handler in self._topics[topic]:
                try:
                    await handler(author, message)
                except Exception:
                    self.handler_failures += 1
                    log.exception("the handler of a message from %s on %s failed", author, topic)

    # -- providers

    async def provide(self, key: bytes) -> None:
        await trio.sleep(self._world.round_trip(self.me, self.me))
        self._world.provide(key, self.me)

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        """As promised. Like a DHT, it answers only a node that has a connection."""
        await trio.sleep(self._world.round_trip(self.me, self.me))
        if not self._connections or self._world.frozen(self.me):
            return ()
        found = self._world.providers(key, self.me, limit)
        for peer in found:
            self.learn(peer, self._world.addresses_of(peer))
        return found


@contextmanager
def _unreachable_after(timeout: float, target: str) -> Iterator[None]:
    with trio.move_on_after(timeout) as scope:
        yield
    if scope.cancelled_caught:
        raise Unreachable(f"{target} did not answer within {timeout:g} s")


def run_simulation(main: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """`trio.run` under a clock that jumps whenever all tasks wait, with tasks run in a fixed order.

    Trio shuffles the tasks of a batch so that nobody relies on their order; here, as in hypothesis's trio support, the
    order is sorted and its coin is seeded.
    """
    from trio._core import _run

    was = _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(seed)
    try:
        return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = was  # type: ignore[misc]
