"""One suite for every Network: the simulated one on a jumping clock, and libp2p over TCP and QUIC on loopback.

A test gets a `Lab`, starts nodes in it and may use only what `protocols.network` promises. Nothing waits for a fixed
time: events are awaited within `PATIENCE`, which on the jumping clock costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from disconnecting import disconnect
from hosts import LOOPBACK, echo, identity, until
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.nat.relay import RelayServer
from swarmnode.protocols.network import (
    Network,
    PeerEvent,
    PeerId,
    ProtocolUnsupported,
    Stream,
    StreamBroken,
    Unreachable,
)
from swarmnode.testing.simnet import SimWorld, run_simulation

PATIENCE = 20.0  # seconds that anything here may take on a busy machine
MIB = 1 << 20
ECHO = "/test/echo/1"
KEY = bytes(range(32))


class OverQuic(Libp2pNetwork):
    """A host that tells nobody its TCP addresses."""

    @property
    def own_addresses(self) -> tuple[str, ...]:
        return tuple(address for address in super().own_addresses if "/quic-v1/" in address)


class Lab:
    """Starts nodes of one kind, and ends them."""

    def __init__(self, kind: str, nursery: trio.Nursery) -> None:
        self.kind = kind
        self.nursery = nursery
        self._world = SimWorld()
        self._count = 0
        self._scopes: dict[PeerId, trio.CancelScope] = {}

    def make(self) -> Any:
        self._count += 1
        if self.kind == "simnet":
            return self._world.node(self._count)
        made = OverQuic if self.kind == "quic" else Libp2pNetwork
        over = self.kind == "quic"
        return made(identity(), HostSettings(listen=LOOPBACK, quic=over, agent="test"))

    async def start(self, *nodes: Any) -> None:
        async def run(node: Any, *, task_status: trio.TaskStatus[None]) -> None:
            with trio.CancelScope() as self._scopes[node.me]:
                await node.run(task_status=task_status)

        for node in nodes:
            await self.nursery.start(run, node)

    async def pair(self) -> tuple[Network, Network]:
        """Two running nodes that echo; the first knows where the second is."""
        a, b = self.make(), self.make()
        for node in (a, b):
            node.serve(ECHO, echo)
        await self.start(a, b)
        a.learn(b.me, b.addresses)
        return a, b

    async def relayed_pair(self) -> tuple[Any, Any]:
        """Two running nodes that echo, connected through a relay; who dialled is the first."""
        a, b = self.make(), self.make()
        for node in (a, b):
            node.serve(ECHO, echo)
        await self.start(a, b)
        if self.kind == "simnet":
            self._world.relay(a.me, b.me)
            await a.connect(b.me)
        else:
            at = self.make()
            await self.start(at)
            await self.nursery.start(RelayServer(at, at.policy).run)
            for node in (a, b):
                await node.connect(at.addresses[0])
            await b.relay_client.reserve(at.me)
            await a.relay_client.dial(at.me, b.me)
        return a, b

    async def get_direct(self, a: Any, b: Any) -> None:
        """Make a direct connection beside the relayed one."""
        if self.kind == "simnet":
            self._world.get_direct(a.me, b.me)
        else:
            await a.swarm.dial_addr(Multiaddr(b.own_addresses[0]), ID.from_string(b.me))

    def kill(self, node: Network) -> None:
        self._scopes[node.me].cancel()


@pytest.fixture(params=["simnet", "libp2p", "quic"])
def conform(request: pytest.FixtureRequest) -> Callable[[Callable[[Lab], Awaitable[None]]], None]:
    """Run `main(lab)` on each kind of network."""

    def run(main: Callable[[Lab], Awaitable[None]]) -> None:
        async def inner() -> None:
            with trio.fail_after(4 * PATIENCE):
                async with trio.open_nursery() as nursery:
                    await main(Lab(request.param, nursery))
                    nursery.cancel_scope.cancel()

        if request.param == "simnet":
            run_simulation(inner)
        else:
            trio.run(inner)

    return run


Conform = Callable[[Callable[[Lab], Awaitable[None]]], None]


async def everything(stream: Stream) -> bytes:
    whole = bytearray()
    while piece := await stream.receive_some(1 << 16):
        whole += piece
    return bytes(whole)


async def exactly(stream: Stream, size: int) -> bytes:
    whole = bytearray()
    while len(whole) < size:
        piece = await stream.receive_some(size - len(whole))
        assert piece, "the stream ended early"
        whole += piece
    return bytes(whole)


@contextmanager
def soon() -> Iterator[None]:
    with trio.fail_after(PATIENCE):
        yield


async def broken(stream: Stream) -> None:
    """Reads until the stream breaks."""
    with soon(), pytest.raises(StreamBroken):
        while await stream.receive_some(1 << 16):
            pass
        raise AssertionError("the stream ended as if all were well")


def test_streams_carry_bytes_both_ways_and_end_half_by_half(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        for near, far in ((a, b), (b, a)):  # b needs no address: the connection is there
            stream = await near.open_stream(far.me, ECHO)
            assert stream.peer == far.me
            await stream.send_all(b"hello ")
            assert await exactly(stream, 6) == b"hello "
            await stream.send_all(bytearray(b"wide "))
            await stream.send_all(memoryview(b"world"))
            await stream.send_eof()
            assert await everything(stream) == b"wide world"
            assert await stream.receive_some(10) == b""
            with pytest.raises(StreamBroken):
                await stream.send_all(b"after the end")
            await stream.aclose()
            await stream.aclose()

    conform(main)


def test_receive_some_gives_at_most_what_was_asked(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        stream = await a.open_stream(b.me, ECHO)
        await stream.send_all(bytes(range(100)))
        got = b""
        while len(got) < 100:
            piece = await stream.receive_some(7)
            assert 1 <= len(piece) <= 7
            got += piece
        assert got == bytes(range(100))

    conform(main)


def test_large_transfers_in_both_directions_at_once(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        there, back = random.Random(1).randbytes(8 * MIB), random.Random(2).randbytes(8 * MIB)
        arrived = {}

        async def both_ways(stream: Stream, sent: bytes, name: str) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, sent)
                arrived[name] = await exactly(stream, 8 * MIB)

        done = trio.Event()

        async def handler(stream: Stream) -> None:
            await both_ways(stream, back, "b")
            done.set()

        b.serve("/test/large", handler)
        with soon():
            stream = await a.open_stream(b.me, "/test/large")
            await both_ways(stream, there, "a")
            await done.wait()
        assert arrived == {"a": back, "b": there}

    conform(main)


def test_a_sender_waits_for_a_reader_and_other_streams_do_not(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        go, got = trio.Event(), trio.Event()

        async def late(stream: Stream) -> None:
            await go.wait()
            await exactly(stream, 4 * MIB)
            got.set()

        b.serve("/test/late", late)
        stream = await a.open_stream(b.me, "/test/late")
        sent = trio.Event()

        async def send() -> None:
            await stream.send_all(bytes(4 * MIB))
            sent.set()

        lab.nursery.start_soon(send)
        other = await a.open_stream(b.me, ECHO)
        with soon():
            for _ in range(20):
                await other.send_all(bytes(1000))
                await exactly(other, 1000)
        assert not sent.is_set()
        go.set()
        with soon():
            await got.wait()
            await sent.wait()

    conform(main)


def test_closing_is_seen_by_the_other_side(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        got, saw = trio.Event(), trio.Event()

        async def handler(stream: Stream) -> None:
            assert await stream.receive_some(1) == b"x"
            got.set()
            with pytest.raises(StreamBroken):
                await stream.receive_some(1)
            saw.set()

        b.serve("/test/close", handler)
        stream = await a.open_stream(b.me, "/test/close")
        await stream.send_all(b"x")
        with soon():  # the end may overtake what was sent
            await got.wait()
        await stream.aclose()
        with soon():
            await saw.wait()
        with pytest.raises(StreamBroken):
            await stream.send_all(b"x")

    conform(main)


def test_a_handler_that_returns_ends_its_stream_and_what_it_sent_arrives(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()

        async def farewell(stream: Stream) -> None:
            await stream.send_all(b"goodbye")

        b.serve("/test/farewell", farewell)
        stream = await a.open_stream(b.me, "/test/farewell")
        with soon():
            assert await everything(stream) == b"goodbye"

        async def flood() -> None:
            with pytest.raises(StreamBroken):
                while True:
                    await stream.send_all(bytes(1 << 16))

        with soon():
            await flood()

    conform(main)


def test_a_failing_handler_ends_its_stream_only(conform: Conform, caplog: pytest.LogCaptureFixture) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()

        async def fail(stream: Stream) -> None:
            await stream.receive_some(1)
            raise KeyError("deliberate")

        b.serve("/test/fail", fail)
        healthy = await a.open_stream(b.me, ECHO)
        stream = await a.open_stream(b.me, "/test/fail")
        await stream.send_all(b"x")
        await broken(stream)
        await healthy.send_all(b"still here")
        assert await exactly(healthy, 10) == b"still here"
        assert any(a.me in record.getMessage() for record in caplog.records)

    conform(main)


def test_cancelled_reads_lose_nothing_and_cancelled_opens_leave_nothing(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        stream = await a.open_stream(b.me, ECHO)
        with trio.move_on_after(0.05) as scope:
            await stream.receive_some(1)
        assert scope.cancelled_caught
        await stream.send_all(b"x")
        assert await stream.receive_some(1) == b"x"
        with trio.CancelScope() as scope:
            scope.cancel()
            await a.open_stream(b.me, ECHO)
        assert scope.cancelled_caught
        again = await a.open_stream(b.me, ECHO)
        await again.send_all(b"y")
        assert await again.receive_some(1) == b"y"

    conform(main)


def test_a_cancelled_send_frees_its_task(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()

        async def deaf(_stream: Stream) -> None:
            await trio.sleep_forever()

        b.serve("/test/deaf", deaf)
        stream = await a.open_stream(b.me, "/test/deaf")
        with trio.move_on_after(0.3) as scope:
            await stream.send_all(bytes(16 * MIB))
        assert scope.cancelled_caught
        await stream.aclose()
        other = await a.open_stream(b.me, ECHO)
        await other.send_all(b"x")
        with soon():
            assert await other.receive_some(1) == b"x"

    conform(main)


def test_who_cannot_be_reached_is_told_from_who_does_not_speak_the_protocol(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        with pytest.raises(ProtocolUnsupported):
            await a.open_stream(b.me, "/test/nobody/1")
        stranger = lab.make()
        with soon(), pytest.raises(Unreachable):
            await a.open_stream(stranger.me, ECHO, timeout=2)
        with soon(), pytest.raises(Unreachable):
            await a.connect(f"/ip4/127.0.0.1/tcp/9/p2p/{stranger.me}", timeout=2)
        place = b.addresses[0].partition("/p2p/")[0]
        with soon(), pytest.raises(Unreachable):
            await a.connect(f"{place}/p2p/{stranger.me}", timeout=2)
        with pytest.raises(Unreachable):
            await a.connect(a.me)

    conform(main)


def test_connect_returns_who_answers_and_both_sides_see_each_other(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        assert a.peers() == ()
        with a.watch_peers() as seen_by_a, b.watch_peers() as seen_by_b:
            assert await a.connect(b.addresses[0]) == b.me
            assert await a.connect(b.me) == b.me
            with soon():
                assert await seen_by_a.receive() == PeerEvent(b.me, up=True)
                assert await seen_by_b.receive() == PeerEvent(a.me, up=True)
            (view,) = a.peers()
            (mirror,) = b.peers()
            assert (view.peer, view.inbound, view.path) == (b.me, False, "direct")
            assert (mirror.peer, mirror.inbound, mirror.path) == (a.me, True, "direct")
            assert 0 <= trio.current_time() - view.connected_at < PATIENCE
            await disconnect(a, b.me)
            with soon():
                assert await seen_by_a.receive() == PeerEvent(b.me, up=False)
                assert await seen_by_b.receive() == PeerEvent(a.me, up=False)
            assert a.peers() == b.peers() == ()
            stream = await a.open_stream(b.me, ECHO)
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"

    conform(main)


def path(node: Network, peer: PeerId) -> str:
    return next(view.path for view in node.peers() if view.peer == peer)


def test_both_ends_hear_of_a_move_to_a_direct_path_and_streams_under_way_go_on(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.relayed_pair()
        await until(lambda: a.me in {view.peer for view in b.peers()})
        assert path(a, b.me) == path(b, a.me) == "relayed"
        stream = await a.open_stream(b.me, ECHO)
        await stream.send_all(b"before")
        with a.watch_peers() as seen_by_a, b.watch_peers() as seen_by_b:
            await lab.get_direct(a, b)
            with soon():
                assert await seen_by_a.receive() == PeerEvent(b.me, up=True, moved=True)
                assert await seen_by_b.receive() == PeerEvent(a.me, up=True, moved=True)
            assert path(a, b.me) == path(b, a.me) == "direct"
            await stream.send_all(b" and after")
            await stream.send_eof()
            assert await everything(stream) == b"before and after"
            await disconnect(a, b.me)
            with soon():
                assert await seen_by_a.receive() == PeerEvent(b.me, up=False)
                assert await seen_by_b.receive() == PeerEvent(a.me, up=False)

    conform(main)


def test_addresses_lead_to_the_node_and_are_learned(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        assert all(address.endswith(f"/p2p/{b.me}") for address in b.addresses)
        assert a.known_addresses(b.me)[0] == b.addresses[0]
        assert a.known_addresses("12D3KooWnobody") == ()
        a.learn(b.me, tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{b.me}" for port in range(1, 200)))
        assert len(a.known_addresses(b.me)) < 50

    conform(main)


def test_both_may_dial_at_once(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        b.learn(a.me, a.addresses)

        async def ask(near: Network, far: Network) -> None:
            stream = await near.open_stream(far.me, ECHO)
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"

        with soon():
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask, a, b)
                    nursery.start_soon(ask, b, a)
        assert len(a.peers()) == len(b.peers()) == 1

    conform(main)


def test_a_peer_that_ends_breaks_its_streams_and_is_reported(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        stream = await a.open_stream(b.me, ECHO)
        await stream.send_all(b"x")
        assert await stream.receive_some(1) == b"x"
        with a.watch_peers() as events:
            lab.kill(b)
            await broken(stream)
            with soon():
                assert await events.receive() == PeerEvent(b.me, up=False)
        assert a.peers() == ()
        with soon(), pytest.raises(Unreachable):
            await a.open_stream(b.me, ECHO, timeout=2)

    conform(main)


def test_providers_are_found_with_their_addresses(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.make(), lab.make(), lab.make()
        await lab.start(a, b, c)
        with soon():
            assert await a.find_providers(KEY) == ()
        await a.connect(b.addresses[0])
        await c.connect(b.addresses[0])
        await c.provide(KEY)
        found: tuple[PeerId, ...] = ()
        with soon():
            while not found:
                found = await a.find_providers(KEY)
                await trio.sleep(0.05)
            assert found == (c.me,)
            await a.connect(c.me)
            assert await a.find_providers(bytes(32)) == ()

    conform(main)


def test_signatures_are_the_identitys_and_garbage_is_false(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        signature = a.sign(b"message")
        assert b.verify(a.me, b"message", signature)
        assert not b.verify(b.me, b"message", signature)
        assert not b.verify(a.me, b"another", signature)
        assert not b.verify(a.me, b"message", b"short")
        assert not b.verify("no peer id", b"message", signature)
        assert not b.verify("", b"", b"")

    conform(main)


def test_traffic_counts_at_least_what_was_carried(conform: Conform) -> None:
    async def main(lab: Lab) -> None:
        a, b = await lab.pair()
        before = a.traffic()
        stream = await a.open_stream(b.me, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(MIB))
            await exactly(stream, MIB)
        after = a.traffic()
        assert MIB < after.bytes_out - before.bytes_out < 1.2 * MIB
        assert MIB < after.bytes_in - before.bytes_in < 1.2 * MIB
        assert b.traffic().bytes_in > MIB

    conform(main)
