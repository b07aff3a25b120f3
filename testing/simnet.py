"""A network in memory, on trio's MockClock: latency, bandwidth, partitions, frozen and killed nodes.

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = world.node("alice"), world.node("bob")
        for node in (alice, bob):
            await nursery.start(node.run)
        stream = await alice.open_stream(bob.me, "/some/protocol/1")

    run_with_nursery(main, SimWorld(latency=0.02))

How it moves: whatever one node sends another becomes an event in the receiver's heap (`simnode`), due when the link has
serialised it and its latency has passed, in the order of sending. While a partition or a frozen sender closes the way,
the link holds it. Each node runs one task that carries out its events; links and connections that nobody uses cost
nothing, so thousands of nodes fit in a process.

What the faults mean:
- kill: the node's connections end at once at both ends, its handlers are cancelled, and its `run` returns.
  `node(name)` then gives a new node of the same identity, as a restart would.
- freeze: nothing is delivered to the node or from it, as after SIGSTOP. Nothing breaks; bytes wait within each stream's
  window. What waits is delivered on thaw. The node's own tasks go on and are heard by nobody.
- partition: between groups bytes wait, and connections break after `silence` seconds, as with a keepalive; heal()
  before that, and they go on. New connections run into their timeouts, and a dial that was given up makes no connection
  later, by heal() or thaw().

Deterministic: events due at one time happen in the order in which they were sent, random choices come from the
seed, and `run_simulation` turns off trio's deliberate shuffling of tasks.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node.identity import Identity
from swarmnode.protocols.network import PeerId, Unreachable
from swarmnode.testing.simnode import Connection, SimNetwork

T = TypeVar("T")


@dataclass
class _Link:
    """One direction between two nodes."""

    latency: float  # seconds
    bandwidth: float | None  # bytes per second, None = without limit
    free_at: float = 0.0  # when what was sent so far is serialised
    last_arrival: float = 0.0
    held: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # sent while the way was closed


class SimWorld:
    """The nodes, the links between them, and what goes wrong.

    `latency` (s) and `bandwidth` (bytes/s, None = without limit) hold for each direction of each link that `link` does
    not set otherwise; `silence` (s) is how long a connection across a partition lives. What is sent arrives at the next
    multiple of `tick` (s), where that is not 0: many things at one moment take less of the simulating machine's time
    than each at its own.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: float = 0.02,
        bandwidth: float | None = None,
        silence: float = 15.0,
        tick: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self._tick = tick
        self._seed = seed
        self._latency, self._bandwidth, self._silence = latency, bandwidth, silence
        self.nodes: dict[PeerId, SimNetwork] = {}
        self._named: dict[str | int, SimNetwork] = {}
        self.by_address: dict[str, PeerId] = {}  # without /p2p/ and what follows
        self._links: dict[tuple[PeerId, PeerId], _Link] = {}
        self._connections: dict[tuple[PeerId, PeerId], Connection] = {}
        self._group: dict[PeerId, int] = {}  # peer -> its side of the partition; -1 where it is not named
        self._cut_number = 0  # partitions and heals so far
        self.frozen: set[PeerId] = set()
        self.relayed: set[frozenset[PeerId]] = set()  # pairs that reach each other through a relay only
        self._providers: dict[bytes, dict[PeerId, None]] = {}
        self.order = itertools.count()  # of what is sent

    # -- who is there

    def node(self, name: str | int) -> SimNetwork:
        """The node of that name; a new one with the same identity where the last was killed or has stopped."""
        last = self._named.get(name)
        if last is not None and not last.ended:
            return last
        if last is not None:
            identity, address = last.identity, last.address
        else:
            secret = hashlib.sha256(f"simnet {self._seed} {name!r}".encode()).digest()
            identity = Identity(Ed25519PrivateKey.from_private_bytes(secret))
            number = len(self._named) + 1
            place = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4077"
            self.by_address[place] = identity.peer_id
            address = f"{place}/p2p/{identity.peer_id}"
        node = SimNetwork(self, identity, address)
        self._named[name] = self.nodes[node.me] = node
        self.frozen.discard(node.me)
        return node

    # -- what goes wrong

    def link(self, a: PeerId, b: PeerId, *, latency: float | None = None, bandwidth: float | None = None) -> None:
        """Set both directions between two peers; None leaves a value as it is."""
        for link in (self._link(a, b), self._link(b, a)):
            link.latency = link.latency if latency is None else latency
            link.bandwidth = link.bandwidth if bandwidth is None else bandwidth

    def relay(self, a: PeerId, b: PeerId) -> None:
        """The two reach each other through a relay from now on; what that costs is for `link` to say."""
        self.relayed.add(frozenset((a, b)))
        for end in (a, b):
            if end in self.nodes:
                self.nodes[end].path_changed()

    def get_direct(self, a: PeerId, b: PeerId) -> None:
        """A direct connection of the two takes the relayed one's place; streams go on as they are."""
        self.relayed.discard(frozenset((a, b)))
        if self.connection(a, b) is not None:
            for end, other in ((a, b), (b, a)):
                self.nodes[end].moved(other)

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
        self.frozen.add(peer)

    def thaw(self, peer: PeerId) -> None:
        """Deliver what waited, and go on."""
        self.frozen.discard(peer)
        self.nodes[peer].changed.unpark_all()
        self._release()

    def kill(self, peer: PeerId) -> None:
        """End the node at once; its peers see their streams break and the connection go."""
        self.nodes[peer].end("the peer is gone")

    # -- for SimNetwork

    def send(self, source: SimNetwork, target: SimNetwork, size: int, arrival: Callable[[], None]) -> None:
        """Put `size` bytes on the link; `arrival` happens in the target's task, in order."""
        source.bytes_out += size
        link = self._link(source.me, target.me)
        if source.me in self.frozen or self._cut(source.me, target.me):
            link.held.append((size, arrival))
        else:
            self._put(link, target, size, arrival)

    def round_trip(self, a: PeerId, b: PeerId) -> float:
        return self._link(a, b).latency + self._link(b, a).latency

    def connection(self, a: PeerId, b: PeerId) -> Connection | None:
        return self._connections.get((min(a, b), max(a, b)))

    def connect(self, dialler: SimNetwork, dialled: SimNetwork) -> Connection:
        """The connection of two running nodes, made where there is none."""
        pair = (min(dialler.me, dialled.me), max(dialler.me, dialled.me))
        held = self._connections.get(pair)
        if held is not None and {held.dialler, held.dialled} != {dialler, dialled}:  # of an earlier life of one
            self.end_connection(held, "the peer began anew")
        if pair not in self._connections:
            self._connections[pair] = Connection(dialler, dialled)
        return self._connections[pair]

    def end_connection(self, connection: Connection, why: str) -> None:
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

    def provide(self, key: bytes, peer: PeerId) -> None:
        self._providers.setdefault(key, {})[peer] = None

    def forget_provider(self, peer: PeerId, key: bytes | None = None) -> None:
        """The peer provides `key` no more, or nothing at all."""
        for providers in self._providers.values() if key is None else [self._providers.get(key, {})]:
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
        arrival_at = link.free_at + link.latency
        if self._tick:
            arrival_at = math.ceil(arrival_at / self._tick - 1e-6) * self._tick
        link.last_arrival = max(link.last_arrival, arrival_at)
        target.schedule(link.last_arrival, arrival, size)

    def _release(self) -> None:
        """Send on what waited on links that are open again."""
        for (source, target), link in self._links.items():
            if link.held and source not in self.frozen and not self._cut(source, target):
                held, link.held = link.held, []
                for size, arrival in held:
                    self._put(link, self.nodes[target], size, arrival)

    def _silent(self, connection: Connection, number: int) -> None:
        if self._cut_number == number:
            self.end_connection(connection, "nothing was heard from the peer for too long")


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


def run_with_nursery(main: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """`run_simulation` of `main(*args, nursery)`; what it started in the nursery ends with it."""

    async def inner() -> T:
        async with trio.open_nursery() as nursery:
            result = await main(*args, nursery)
            nursery.cancel_scope.cancel()
        return result

    return run_simulation(inner, seed=seed)
