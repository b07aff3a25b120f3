"""Each mended defect of py-libp2p twice: it is gone here, and it still shows upstream.

A `test_stock_…` test that fails says that upstream no longer needs the patch: remove what it names.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing
from hosts import network
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push import identify_push
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, create_signed_peer_record
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from swarmnode.node.discovery.kademlia import CLOSER, MAX_ADDRESSES, REPEAT, BoundedProviderStore
from swarmnode.node.host import muxed
from swarmnode.node.host.allowances import FRAME, HostAllowance, PeerAllowance, PeerPolicy
from swarmnode.node.host.libp2p_host import _PeerStore
from swarmnode.node.host.limits import MIB, ConnectionLimits, DhtLimits, RateLimits
from swarmnode.node.host.patches import basic_host, mend_libp2p, yamux_session
from swarmnode.node.host.patches.yamux_session import YamuxSession
from swarmnode.protocols.peers.scoring import Kind

mend_libp2p()

PEER = ID.from_pubkey(create_new_key_pair().public_key)
GONE = "upstream no longer shows this defect: remove the patch {}"


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def is_idle(share: PeerAllowance) -> bool:
    return not share.unread and not share.streams


def stock(patched: Any) -> Any:
    return patched.__wrapped__


class Secured:
    """A secured connection in memory that, like Noise over a full socket, writes in pieces and can be cancelled."""

    def __init__(self, stream: trio.abc.Stream, *, initiator: bool) -> None:
        self.stream = stream
        self.host = HostAllowance()
        self.is_initiator = initiator
        self.stuck = False

    async def write(self, data: bytes) -> None:
        if self.stuck:
            await trio.sleep_forever()
        for start in range(0, len(data), 1000):
            await self.stream.send_all(data[start : start + 1000])

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(n))  # type: ignore[call-arg]

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> None:
        return None


class Plain:
    """Stands for Noise: what is written is read as it is."""

    def __init__(self, secured: Secured) -> None:
        self._secured = secured
        self.raw = SimpleNamespace(host=secured.host)
        self._left: list[Any] = []

    async def read(self) -> list[bytes]:
        received = await self._secured.read(1 << 20)
        return [received] if received else []

    async def write(self, pieces: Any) -> None:
        out, self._left = [*self._left, *pieces], []
        if out:
            await self._secured.write(b"".join(out))

    def write_now(self, pieces: Any) -> bool:
        self._left += map(bytes, pieces)
        return False


@pytest.fixture(autouse=True)
def _without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux_session, "over", Plain)


@asynccontextmanager
async def pair(
    muxer: Any, other: Any = None, *, host: HostAllowance | None = None
) -> AsyncIterator[tuple[Any, Any, Secured, Secured]]:
    """Two ends of a connection; `host` is the right one's."""
    one, two = trio.testing.memory_stream_pair()
    a, b = Secured(one, initiator=True), Secured(two, initiator=False)
    b.host = host or b.host
    left, right = muxer(a, PEER), (other or muxer)(b, PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.start)
        nursery.start_soon(right.start)
        await left.event_started.wait()
        await right.event_started.wait()
        yield left, right, a, b
        nursery.cancel_scope.cancel()


async def open_pair(left: Any, right: Any) -> tuple[Any, Any]:
    outgoing = await left.open_stream()
    return outgoing, await right.accept_stream()


def test_patches_are_applied_once_however_often_they_are_asked_for() -> None:
    before = BasicHost._swarm_stream_handler
    mend_libp2p()
    assert BasicHost._swarm_stream_handler is before
    assert not hasattr(stock(before), "__wrapped__")


# stream handlers: basic_host.contain


def failing_host() -> Any:
    async def negotiate(*_: Any) -> None:
        b"\xff".decode()

    return SimpleNamespace(
        negotiate_timeout=5, _network=SimpleNamespace(), multiselect=SimpleNamespace(negotiate=negotiate)
    )


class Resettable(SimpleNamespace):
    was_reset = False

    async def reset(self) -> None:
        self.was_reset = True


def test_exception_in_negotiation_resets_that_stream_only() -> None:
    async def main() -> None:
        stream = Resettable(muxed_conn=SimpleNamespace(peer_id=PEER))
        await BasicHost._swarm_stream_handler(failing_host(), stream)  # type: ignore[arg-type]
        assert stream.was_reset

    run(main)


def test_stock_handler_exception_still_escapes() -> None:
    async def main() -> None:
        stream = Resettable(muxed_conn=SimpleNamespace(peer_id=PEER))
        with pytest.raises(UnicodeDecodeError):
            await stock(BasicHost._swarm_stream_handler)(failing_host(), stream)
            pytest.fail(GONE.format("basic_host.contain"))

    run(main)


# connections that ended as they were added: Connections.connected


async def hang_up() -> int:
    """Connections that a swarm keeps after one whose peer hung up while it was added."""

    async def nothing(*_: Any) -> None: ...

    async def over() -> None:
        raise MuxedConnUnavailable("the connection ended")

    started = trio.Event()
    started.set()
    connection = SimpleNamespace(
        peer_id=PEER,
        event_started=started,
        is_closed=False,
        is_established=True,
        start=nothing,
        accept_stream=over,
        close=nothing,
    )
    async with trio.open_nursery() as nursery:
        swarm: Any = SimpleNamespace(
            connections={},
            connection_config=SimpleNamespace(max_connections=9, max_connections_per_peer=9),
            _resource_manager=None,
            _schedule_prune=lambda: None,
            metric_send_channel=None,
            manager=SimpleNamespace(run_task=nursery.start_soon),
            initialize_connection_health=lambda *_: None,
            cleanup_connection_health=lambda *_: None,
            notify_connected=nothing,
            notify_disconnected=nothing,
        )
        swarm.get_connections = partial(Swarm.get_connections, swarm)
        swarm.remove_conn = partial(Swarm.remove_conn, swarm)
        await Swarm.add_conn(swarm, connection)
    return len(swarm.get_connections())


def test_stock_connection_that_ended_as_it_was_added_still_stays() -> None:
    async def main() -> None:
        assert await hang_up() == 1, GONE.format("Connections.connected")

    run(main)


# agent versions: basic_host.keep_agent


def test_what_a_peer_says_of_itself_is_kept_printable_and_short() -> None:
    store = PeerStore()
    message = Identify(
        agent_version="swarm\x1bnode/1\n" + "x" * 1000,
        listen_addrs=[bytes(1 << 20), *(number.to_bytes(2, "big") for number in range(1000))],
        protocols=["y" * 1000, "é" * 64, *(f"/{number}" for number in range(100_000))],
        signedPeerRecord=bytes(1 << 20),
        observed_addr=bytes(basic_host.MAX_PLACE + 1),
    )
    run(partial(basic_host.keep_agent, store, PEER, message))
    agent = str(store.get(PEER, basic_host.AGENT))
    assert agent.startswith("swarmnode/1x") and len(agent) <= basic_host.MAX_AGENT
    assert 0 < len(store.addrs(PEER)) < basic_host.MAX_PLACES
    assert 0 < len(store.get_protocols(PEER)) < basic_host.MAX_PROTOCOLS
    assert "é" * 64 not in store.get_protocols(PEER), "which this node could not ask for"
    assert not message.signedPeerRecord and not message.observed_addr


def test_what_a_peer_pushes_is_bounded_as_well() -> None:
    assert identify_push.update_peerstore_from_identify is basic_host.keep_agent
    assert identify_push.read_length_prefixed_protobuf.keywords == {"max_length": basic_host.MAX_IDENTIFY}


def test_stock_identify_still_takes_a_thousand_addresses() -> None:
    from libp2p.host import basic_host as upstream

    source = stock(upstream.update_peerstore_from_identify).__code__
    assert 1000 in source.co_consts, GONE.format("basic_host.keep_agent")


def test_stock_identify_still_forgets_the_agent() -> None:
    from libp2p.host import basic_host as upstream

    source = stock(upstream.update_peerstore_from_identify).__code__
    assert "agent_version" not in source.co_names, GONE.format("basic_host.keep_agent")


# the observed address: basic_host.tell_transport


def test_identify_tells_a_udp_port_as_one() -> None:
    from libp2p.identity.identify import identify

    told = [identify._remote_address_to_multiaddr(kind(("192.0.2.1", 4077))) for kind in (tuple, muxed.UdpAddress)]
    assert [str(each) for each in told] == ["/ip4/192.0.2.1/tcp/4077", "/ip4/192.0.2.1/udp/4077/quic-v1"]


def test_stock_identify_still_calls_every_port_one_of_tcp() -> None:
    from libp2p.identity.identify import identify

    source = stock(identify._remote_address_to_multiaddr)
    assert "/tcp/" in str(source(muxed.UdpAddress(("192.0.2.1", 4077)))), GONE.format("basic_host.tell_transport")


# what is known of peers: libp2p_host._PeerStore


def test_stock_peer_store_still_forgets_its_own_key() -> None:
    keys, store = create_new_key_pair(), PeerStore(max_peers=3)
    me = ID.from_pubkey(keys.public_key)
    store.add_key_pair(me, keys)
    for number in range(4):
        store.add_addrs(ID(bytes([number])), [Multiaddr("/ip4/192.0.2.1/tcp/1")], 60)
    assert not store.has_peer(me), GONE.format("libp2p_host._PeerStore")


def test_peer_store_that_forgets_the_peer_at_hand_goes_on() -> None:
    me, oldest, silent = (ID(bytes([number])) for number in range(3))
    store = _PeerStore(me)
    store.max_peers, store.connected = 2, {silent: None}
    store.add_protocols(me, [])
    store.add_addrs(oldest, [Multiaddr("/ip4/192.0.2.1/tcp/1")], 60)
    store.add_protocols(silent, ["/test/1"])  # one that tells no addresses: nobody is forgotten yet
    store.add_addrs(oldest, [Multiaddr("/ip4/192.0.2.1/tcp/2")], 60)
    assert store.peer_ids() == [me, silent]


def test_peer_store_of_more_connected_peers_than_it_keeps_forgets_none_of_them() -> None:
    me, *others = (ID(bytes([number])) for number in range(4))
    store = _PeerStore(me)
    store.max_peers, store.connected = 2, dict.fromkeys(others)
    for peer in (me, *others):
        store.add_addrs(peer, [Multiaddr("/ip4/192.0.2.1/tcp/1")], 60)
    assert store.peer_ids() == [me, *others]


def test_what_a_stranger_says_in_the_dht_of_where_it_is_stalls_nobody_and_is_bounded() -> None:
    keys = create_new_key_pair()
    me, store = ID.from_pubkey(keys.public_key), _PeerStore(ID(b"another"))
    many = [Multiaddr(bytes([4, *divmod(number, 256), 0, 1, 6, 0, 1])) for number in range(5000)]
    began = time.perf_counter()
    store.add_addrs(me, many, 60)
    assert time.perf_counter() - began < 1.0, "upstream compares each with all others, for ten seconds"
    assert store.addrs(me) == many[-basic_host.MAX_PLACES :]
    store.add_addrs(me, [Multiaddr(b"\xa5\x03\xe8\x07" + bytes(1000))], 60)  # whose text takes the square of that
    assert store.addrs(me) == many[-basic_host.MAX_PLACES :]
    for places, kept in ((many[:100], False), (many[:3], True)):
        assert store.consume_peer_record(create_signed_peer_record(me, places, keys.private_key), 60)
        assert (store.get_peer_record(me) is not None) == kept
    providers = BoundedProviderStore(SimpleNamespace(get_id=lambda: ID(b"another")), DhtLimits())  # type: ignore[arg-type]
    providers.add_provider(b"key", PeerInfo(me, many))
    providers.add_provider(b"other", PeerInfo(me, [Multiaddr(b"\x35\xd8\x04" + b"a" * 600)]))
    assert [len(provider.addrs) for provider in providers.get_providers(b"key")] == [MAX_ADDRESSES]
    assert not providers.get_providers(b"other")
    circuits = [Multiaddr(f"/ip4/192.0.2.{number}/tcp/4077/p2p/{PEER}/p2p-circuit/p2p/{me}") for number in range(8)]
    providers.add_provider(b"relayed", PeerInfo(me, circuits))
    assert [provider.addrs for provider in providers.get_providers(b"relayed")] == [circuits[:6]]


def test_a_provider_is_remembered_for_so_many_keys_and_for_another_once_one_is_gone() -> None:
    limits = DhtLimits(keys_per_provider=4, provider_keys=6)
    store = BoundedProviderStore(SimpleNamespace(get_id=lambda: ID(b"another")), limits)  # type: ignore[arg-type]
    one, other = (ID.from_pubkey(create_new_key_pair().public_key) for _ in range(2))
    for provider in (one, other):
        for number in range(5):
            store.add_provider(bytes([number]), PeerInfo(provider, [Multiaddr("/ip4/192.0.2.1/tcp/4077")]))
    assert [len(store.get_providers(bytes([number]))) for number in range(5)] == [2, 2, 2, 2, 0]
    store.withdraw(b"\0", one)
    store.add_provider(b"\4", PeerInfo(one, [Multiaddr("/ip4/192.0.2.1/tcp/4077")]))
    assert [len(store.get_providers(bytes([number]))) for number in range(5)] == [1, 2, 2, 2, 1]


def test_who_is_announced_no_more_makes_room_for_a_new_provider() -> None:
    store = BoundedProviderStore(SimpleNamespace(get_id=lambda: ID(b"another")), DhtLimits())  # type: ignore[arg-type]
    peers = [ID.from_pubkey(create_new_key_pair().public_key) for _ in range(CLOSER + 1)]
    for peer in peers:
        store.add_provider(b"key", PeerInfo(peer, [Multiaddr("/ip4/192.0.2.1/tcp/4077")]))
    assert str(peers[-1]) not in store.providers[b"key"], "all are fresh"
    store.providers[b"key"][str(peers[3])].timestamp -= 4 * REPEAT
    store.add_provider(b"key", PeerInfo(peers[-1], [Multiaddr("/ip4/192.0.2.1/tcp/4077")]))
    assert str(peers[-1]) in store.providers[b"key"] and str(peers[3]) not in store.providers[b"key"]


# circuit addresses: Libp2pNetwork's get_addrs

CIRCUIT = f"/ip4/192.0.2.1/tcp/4077/p2p/{PEER}/p2p-circuit"


def test_addresses_through_relays_are_told_whole() -> None:
    node = network()
    ways = tuple(f"{place}/p2p/{node.me}" for place in (CIRCUIT, "/ip4/192.0.2.2/tcp/4077"))
    node.announce_instead(ways)
    assert tuple(map(str, node._host.get_addrs())) == ways


def test_stock_hosts_still_cut_the_relay_from_their_addresses() -> None:
    host = new_host(key_pair=create_new_key_pair(), addrs_factory=lambda _: [Multiaddr(CIRCUIT)])
    assert "p2p-circuit" not in str(host.get_addrs()), GONE.format("Libp2pNetwork's get_addrs")


# yamux_session


def test_cancelled_send_leaves_the_connection_whole() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            for _ in range(20):
                out, _ = await open_pair(left, right)
                with trio.move_on_after(0.001):
                    await out.send_all(bytes(500_000))
            out, back = await open_pair(left, right)
            await out.send_all(b"still in step")
            assert await back.receive_some(100) == b"still in step"

    run(main)


def test_stock_yamux_still_loses_step_when_a_write_is_cancelled() -> None:
    async def main() -> None:
        async with pair(Yamux) as (left, right, secured, _):
            out, _ = await open_pair(left, right)
            with trio.move_on_after(0.001):
                write = secured.stream.send_all

                async def slow(data: bytes) -> None:
                    await write(data)
                    await trio.sleep(0.01)

                secured.stream.send_all = slow
                await out.write(bytes(60_000))
            secured.stream.send_all = write
            with trio.move_on_after(3) as waited:
                other = await left.open_stream()
                await other.write(b"in step?")
                incoming = await right.accept_stream()
                await incoming.read(8)
            assert waited.cancelled_caught or right.is_closed, GONE.format(yamux_session.__name__)

    run(main)


def test_reader_that_stalls_costs_nobody_but_its_own_sender() -> None:
    async def main() -> None:
        payload = bytes(3 * yamux_session.INITIAL_WINDOW)
        async with pair(YamuxSession) as (left, right, _, _), trio.open_nursery() as nursery:
            stalled, reader = await open_pair(left, right)
            nursery.start_soon(stalled.send_all, payload)
            await trio.sleep(60)  # virtual: stock gives up after 5
            other, back = await open_pair(left, right)
            await other.send_all(b"alive")
            assert await back.receive_some(5) == b"alive"
            received = 0
            while received < len(payload):
                received += len(await reader.receive_some(1 << 20))

    run(main)


def test_stock_yamux_still_fails_the_writer_of_a_stalled_reader() -> None:
    async def main() -> None:
        async with pair(Yamux) as (left, right, _, _):
            out, _ = await open_pair(left, right)
            with pytest.raises(MuxedStreamError), trio.fail_after(60):
                await out.write(bytes(3 * yamux_session.INITIAL_WINDOW))
                pytest.fail(GONE.format(yamux_session.__name__))

    run(main)


async def overrun(muxer: Any) -> tuple[int, bool]:
    """Bytes that a victim keeps, and whether it closed, after a peer sent 8 MiB into a window of 256 KiB."""
    one, two = trio.testing.memory_stream_pair()
    victim = muxer(Secured(two, initiator=False), PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(victim.start)
        await one.send_all(struct.pack("!BBHII", 0, 1, 1, 1, 0))
        for _ in range(128):
            with trio.move_on_after(1):
                try:
                    await one.send_all(struct.pack("!BBHII", 0, 0, 0, 1, 65536) + bytes(65536))
                except trio.BrokenResourceError:
                    break
        await trio.sleep(1)
        kept = victim.allowance.unread if isinstance(victim, YamuxSession) else len(victim.stream_buffers[1])
        closed = victim.is_closed
        nursery.cancel_scope.cancel()
    return kept, closed


def test_peer_that_overruns_its_window_is_dropped_before_it_takes_memory() -> None:
    async def main() -> None:
        kept, closed = await overrun(YamuxSession)
        assert closed
        assert kept <= yamux_session.INITIAL_WINDOW + 100 * ConnectionLimits().unread_chunk

    run(main)


def test_stock_yamux_still_takes_whatever_is_pushed() -> None:
    async def main() -> None:
        kept, _ = await overrun(Yamux)
        assert kept == 8 << 20, GONE.format(yamux_session.__name__)

    run(main)


async def unaccepted(muxer: Any) -> bool:
    """Whether an accepted stream still works beside 30 that nobody accepts."""
    async with pair(muxer) as (left, right, _, _):
        out, back = await open_pair(left, right)
        for _ in range(30):
            await left.open_stream()
        with trio.move_on_after(20) as waited:
            await out.write(b"x")
            assert await back.read(1) == b"x"
        return not waited.cancelled_caught


def test_streams_that_nobody_accepts_hold_up_no_other() -> None:
    async def main() -> None:
        assert await unaccepted(YamuxSession)

    run(main)


def test_stock_yamux_still_stops_reading_for_streams_that_nobody_accepts() -> None:
    async def main() -> None:
        assert not await unaccepted(Yamux), GONE.format(yamux_session.__name__)

    run(main)


def test_silent_connection_is_given_up_and_breaks_its_streams() -> None:
    async def main() -> None:
        one, _ = trio.testing.memory_stream_pair()
        session = YamuxSession(Secured(one, initiator=True), PEER)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.start)
            await session.event_started.wait()
            stream = await session.open_stream()
            with pytest.raises(MuxedStreamReset), trio.fail_after(yamux_session.SILENCE + 1):
                await stream.receive_some(1)

    run(main)


def test_idle_but_living_connection_is_kept() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            await trio.sleep(3600)
            assert not left.is_closed
            assert not right.is_closed

    run(main)


def test_socket_that_takes_nothing_ends_the_connection_and_cancelling_a_sender_does_not_wait_for_it() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, secured, _):
            out, _ = await open_pair(left, right)
            secured.stuck = True
            started = trio.current_time()
            with trio.move_on_after(0.5):
                await out.send_all(bytes(1 << 20))
            assert trio.current_time() - started == pytest.approx(0.5)
            with pytest.raises(MuxedStreamReset), trio.fail_after(yamux_session.WRITE_STALL + 1):
                await out.receive_some(1)

    run(main)


def test_a_polite_close_says_goodbye_after_all_that_waited() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, back = await open_pair(left, right)
            await out.send_all(bytes(200_000))
            await left.close()
            await trio.sleep(1)
            assert right.is_closed
            received = 0
            while received < 200_000:
                received += len(await back.receive_some(1 << 20))
            with pytest.raises(MuxedStreamReset):
                await back.receive_some(1)

    run(main)


def test_finished_stream_is_read_to_its_end_though_the_sender_dropped_it() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, back = await open_pair(left, right)
            await out.send_all(b"reply")
            out.send_eof_nowait()
            out.abort()
            await trio.sleep(1)
            assert await back.receive_some(100) == b"reply"
            assert await back.receive_some(100) == b""

    run(main)


def test_what_was_left_unread_counts_no_more_once_both_sides_have_finished() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, back = await open_pair(left, right)
            await out.send_all(b"question, and more than was asked for")
            await out.send_eof()
            await trio.sleep(1)
            assert await back.receive_some(8) == b"question"
            await back.send_all(b"answer")
            back.send_eof_nowait()
            back.abort()
            assert is_idle(right.allowance)
            await trio.sleep(1)
            assert await out.receive_some(100) == b"answer"
            assert await out.receive_some(100) == b""
            assert not left._streams

    run(main)


def test_what_stays_unread_of_a_stream_that_is_closed_is_given_back_with_the_connection() -> None:
    """As where a handler of py-libp2p's closes a stream on which its peer said more than it reads."""

    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, back = await open_pair(left, right)
            await out.send_all(b"question, and more than was asked for")
            await out.send_eof()
            await trio.sleep(1)
            await back.close()
            assert right.allowance.unread and back.stream_id in right._streams
            await left.close()
            await trio.sleep(1)
            assert is_idle(right.allowance)

    run(main)


def test_aborted_stream_breaks_at_the_other_side_and_is_forgotten() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, back = await open_pair(left, right)
            await out.send_all(b"part")
            out.abort()
            await trio.sleep(1)
            assert await back.receive_some(100) == b"part"
            with pytest.raises(MuxedStreamReset):
                await back.receive_some(100)
            assert not left._streams
            assert not right._streams
            assert is_idle(right.allowance)

    run(main)


def test_a_stream_under_the_number_of_one_that_is_over_ends_with_the_connection_all_the_same() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, first = await open_pair(left, right)
            for side in (out, first):
                side.send_eof_nowait()
            await trio.sleep(1)
            left.answer(struct.pack("!BBHII", 0, 1, 1, out.stream_id, 0))  # SYN
            second = await right.accept_stream()
            first.abort()
            await left.close()
            with pytest.raises(MuxedStreamReset), trio.fail_after(5):
                await second.receive_some(1)
            await trio.sleep(1)
            assert is_idle(right.allowance)

    run(main)


def test_peer_cannot_open_more_streams_than_the_limit() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            most = ConnectionLimits().streams
            streams = [await left.open_stream() for _ in range(most + 5)]
            await trio.sleep(1)
            assert len(right._streams) == most
            assert sum(stream.broken for stream in streams) == 5

    run(main)


def test_streams_that_were_reset_take_their_places_until_they_are_accepted_or_the_connection_ends() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            most = ConnectionLimits().streams
            for _ in range(most + 5):
                (await left.open_stream()).abort()
            await trio.sleep(1)
            assert right._to_accept.statistics().current_buffer_used == right.allowance.streams == most
            for _ in range(most):
                assert (await right.accept_stream()).broken
            assert is_idle(right.allowance)
            (await left.open_stream()).abort()
            await trio.sleep(1)
            assert right.allowance.streams == 1
            await left.close()
            await trio.sleep(1)
            assert is_idle(right.allowance)

    run(main)


def test_two_connections_of_a_peer_have_one_allowance_of_streams_and_bytes() -> None:
    async def main() -> None:
        limits = ConnectionLimits(streams=8, unread=1 << 20)
        host = HostAllowance(limits)
        share = host.of(str(PEER))
        one, two = pair(YamuxSession, host=host), pair(YamuxSession, host=host)
        async with one as (left, right, *_), two as (far, near, *_):
            streams = [await session.open_stream() for session in (left, far) for _ in range(6)]
            await trio.sleep(1)
            assert (share.streams, host.streams) == (8, 8)
            assert sum(stream.broken for stream in streams) == 4
            for session in (*[right] * 6, *[near] * 2):
                await session.accept_stream()
            assert host.violations.totals == {Kind.LOAD: 4}
            for stream in streams:
                if not stream.broken:
                    with trio.move_on_after(1), contextlib.suppress(MuxedStreamReset):
                        await stream.send_all(bytes(yamux_session.INITIAL_WINDOW))
            await trio.sleep(1)
            assert share.unread == host.unread <= limits.unread
            assert host.violations.totals[Kind.LOAD] > 4
            for stream in streams:
                stream.abort()
            await trio.sleep(1)
            assert is_idle(share)
            assert (host.unread, host.streams) == (0, 0)

    run(main)


def test_one_byte_pieces_count_for_what_they_cost() -> None:
    async def main() -> None:
        host = HostAllowance(ConnectionLimits(unread=100_000))
        async with pair(YamuxSession, host=host) as (left, right, _, _):
            out, back = await open_pair(left, right)
            for _ in range(1000):
                assert out.send_nowait(b"x")
                await trio.sleep(0.001)
            await trio.sleep(1)
            assert right.allowance.unread == 65 * 1000
            assert await back.receive_some(1) == b"x"
            assert right.allowance.unread == 65 * 999
            for _ in range(1000):
                if not out.send_nowait(b"x"):
                    break
                await trio.sleep(0.001)
            assert out.broken
            assert is_idle(right.allowance)

    run(main)


def test_a_crowded_node_keeps_an_equal_share_for_each_peer() -> None:
    async def main() -> None:
        limits = ConnectionLimits(peers=4, unread=100, unread_in_all=160)
        host = HostAllowance(limits)
        greedy, second, late = map(host.of, ("greedy", "second", "late"))
        assert greedy.keep(81)
        assert not greedy.keep(1)
        assert second.keep(20)
        assert not second.keep(1)
        assert late.keep(20)
        assert not host.violations.totals  # that the others left no room is nothing that these did
        assert not greedy.keep(20)
        assert host.violations.totals == {Kind.LOAD: 1}  # it has more than one may have anywhere
        greedy.give_back(60)
        assert second.keep(60)

    run(main)


def test_peers_that_take_all_streams_leave_every_other_peer_its_share() -> None:
    async def main() -> None:
        host = HostAllowance(ConnectionLimits(peers=4, streams=8, streams_in_all=16))
        for greedy in (host.of("one"), host.of("two")):
            assert all(greedy.open() for _ in range(8))
        late = host.of("late")
        assert [late.open() for _ in range(5)] == [True] * 4 + [False]
        assert not host.violations.totals
        assert not greedy.open()
        assert host.violations.totals == {Kind.LOAD: 1}

    run(main)


def test_window_grows_for_a_stream_that_it_limits() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _), trio.open_nursery() as nursery:
            right.shortest_rtt = lambda: 1.0
            out, back = await open_pair(left, right)
            nursery.start_soon(out.send_all, bytes(24 << 20))
            received = 0
            while received < 24 << 20:
                received += (size := len(await back.receive_some(1 << 20)))
                await trio.sleep(size / 4e6)
            assert back._target == yamux_session.MAX_WINDOW

    run(main)


def test_window_does_not_follow_a_queue_of_its_own() -> None:
    """A reader that takes what came in bursts, over a short way: more window would only be more queue."""

    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _), trio.open_nursery() as nursery:
            right.shortest_rtt = lambda: 0.001
            out, back = await open_pair(left, right)
            nursery.start_soon(out.send_all, bytes(24 << 20))
            received = 0
            while received < 24 << 20:
                received += len(await back.receive_some(1 << 20))
                if not back._chunks:
                    await trio.sleep(0.01)  # 25 MB/s
            assert back._target == yamux_session.INITIAL_WINDOW

    run(main)


@pytest.mark.slow
def test_windows_of_one_connection_grow_within_its_allowance_and_give_it_back() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            right.shortest_rtt = lambda: 1.0

            async def transfer(out: Any, back: Any) -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(out.send_all, bytes(12 << 20))
                    received = 0
                    while received < 12 << 20:
                        received += (size := len(await back.receive_some(1 << 20)))
                        await trio.sleep(size / 4e6)

            streams = [await open_pair(left, right) for _ in range(6)]
            for out, back in streams:
                await transfer(out, back)
            assert 0 < right._widened == sum(back.widened for _, back in streams) <= muxed.MAX_WIDENED
            assert streams[5][1]._target < streams[0][1]._target
            for _, back in streams:
                back.abort()
            assert right._widened == 0

    run(main)


def test_sending_without_waiting_keeps_order_and_window() -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _):
            out, back = await open_pair(left, right)
            await out.send_all(b"first ")
            assert out.send_nowait(b"second ")
            await out.send_all(b"third")
            received = b""
            while len(received) < 18:
                received += await back.receive_some(100)
            assert received == b"first second third"
            sent = 0
            while out.send_nowait(bytes(10_000)):
                sent += 10_000
                await trio.sleep(1)
            assert sent == (yamux_session.INITIAL_WINDOW - 18) // 10_000 * 10_000
            back.abort()
            await trio.sleep(1)
            assert not out.send_nowait(b"x")
            assert not right.is_closed

    run(main)


@pytest.mark.parametrize("size", [100, 50_000, 3 * yamux_session.INITIAL_WINDOW])
def test_what_was_sent_may_be_changed_afterwards(size: int) -> None:
    async def main() -> None:
        async with pair(YamuxSession) as (left, right, _, _), trio.open_nursery() as nursery:
            out, back = await open_pair(left, right)

            async def send() -> None:
                buffer = bytearray(b"a" * size)
                await out.send_all(buffer)
                buffer[:] = bytes(size)

            nursery.start_soon(send)
            received = b""
            while len(received) < size:
                received += await back.receive_some(1 << 20)
            assert received == b"a" * size

    run(main)


class Instant:
    """A transport that can write without waiting, unless it is full: what it wrote, and messages to read."""

    full = False

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.arrive, self._arrived = trio.open_memory_channel[list[bytes]](8)

    async def read(self) -> list[bytes]:
        return await self._arrived.receive()

    def write_now(self, pieces: Any) -> bool:
        if not self.full:
            self.writes.append(b"".join(pieces))
        return not self.full

    async def write(self, pieces: Any) -> None:
        if self.full:
            await trio.sleep_forever()
        if pieces:
            self.writes.append(b"".join(pieces))


def ping(flags: int, nonce: int) -> bytes:
    return yamux_session.HEADER.pack(0, yamux_session.PING, flags, 0, nonce)


@asynccontextmanager
async def instant(host: HostAllowance | None = None) -> AsyncIterator[tuple[YamuxSession, Instant]]:
    secured = Secured(trio.testing.memory_stream_pair()[0], initiator=True)
    secured.host = host or secured.host
    session = YamuxSession(secured, PEER)  # type: ignore[arg-type]
    session._transport = transport = Instant()  # type: ignore[assignment]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.start)
        await trio.sleep(0.1)
        transport.writes.clear()
        yield session, transport
        nursery.cancel_scope.cancel()


def test_answers_to_what_arrived_together_go_in_one_write() -> None:
    async def main() -> None:
        async with instant() as (session, transport):
            transport.arrive.send_nowait([ping(yamux_session.SYN, n) for n in range(3)])
            await trio.sleep(0.1)
            assert transport.writes == [b"".join(ping(yamux_session.ACK, n) for n in range(3))]
            # however many come at once: it is the one who does not read the answers who breaks the rules
            many = yamux_session.MAX_ANSWERS + 10
            transport.arrive.send_nowait([b"".join(ping(yamux_session.SYN, n) for n in range(many))])
            await trio.sleep(0.1)
            assert b"".join(transport.writes[1:]) == b"".join(ping(yamux_session.ACK, n) for n in range(many))
            assert not session.is_closed

    run(main)


def test_who_asks_for_answers_and_does_not_read_them_breaks_the_rules() -> None:
    async def main() -> None:
        async with instant() as (session, transport):
            transport.full = True
            many = 8 * yamux_session.MAX_ANSWERS
            transport.arrive.send_nowait([b"".join(ping(yamux_session.SYN, n) for n in range(many))])
            await trio.sleep(1)
            assert "does not read them" in session.ended
            assert len(session.outbox.answers) <= yamux_session.MAX_ANSWERS + 2 * yamux_session.TURN
            assert session.host.violations.totals[Kind.BREACH] == 1

    run(main)


class Strangers(PeerPolicy):
    def is_member(self, peer: str) -> bool:
        return False


@pytest.mark.parametrize("stranger", [False, True])
def test_small_frames_that_came_together_let_others_run_and_cost_a_stranger_time(stranger: bool) -> None:
    async def main() -> None:
        host = HostAllowance(rates=RateLimits(stranger=1.0 * MIB), policy=Strangers() if stranger else None)
        count, head = 20 * yamux_session.TURN, (0, yamux_session.DATA)
        frames = yamux_session.HEADER.pack(*head, 0, 2, 1) + b"x"
        async with instant(host) as (session, transport):
            transport.arrive.send_nowait([yamux_session.HEADER.pack(*head, yamux_session.SYN, 2, 0) + count * frames])
            stream, began = await session.accept_stream(), trio.current_time()
            most = stream.received
            while stream.received < count:
                before = stream.received
                await trio.sleep(0.01 if stranger else 0)
                most = max(most, stream.received - before)
            assert most <= 2 * yamux_session.TURN
            assert trio.current_time() - began == pytest.approx(count * FRAME / MIB if stranger else 0.0, abs=1.0)

    run(main)


def test_messages_without_a_frame_cost_a_stranger_time_as_well() -> None:
    async def main() -> None:
        host = HostAllowance(rates=RateLimits(stranger=1.0 * MIB), policy=Strangers())
        async with instant(host) as (session, transport):
            for _ in range(8):  # which count for half a MiB each
                transport.arrive.send_nowait([b""] * yamux_session.TURN)
            await trio.sleep(1)
            assert 3 < transport.arrive.statistics().current_buffer_used < 8
            await trio.sleep(4)
            assert not transport.arrive.statistics().current_buffer_used and not session.is_closed

    run(main)


def test_a_connection_that_ends_while_its_peer_waits_takes_no_more_frames() -> None:
    async def main() -> None:
        host = HostAllowance(rates=RateLimits(stranger=100.0), policy=Strangers())
        async with instant(host) as (session, transport):
            opening = yamux_session.HEADER.pack(0, yamux_session.DATA, yamux_session.SYN, 2, 0)
            transport.arrive.send_nowait([ping(yamux_session.ACK, 0) * (yamux_session.TURN - 1) + opening])
            await trio.sleep(1)
            await session.abandon("a test")
            await trio.sleep(10_000)
            assert host.streams == 0

    run(main)


def test_session_and_stock_yamux_understand_each_other() -> None:
    async def main() -> None:
        async with pair(YamuxSession, Yamux) as (ours, theirs, _, _):
            out, back = await open_pair(ours, theirs)
            await out.send_all(b"to stock")
            assert await back.read(8) == b"to stock"
            await back.write(b"from stock")
            assert await out.receive_some(10) == b"from stock"
            await back.close()
            assert await out.receive_some(10) == b""

    run(main)


# --- what no node uses ------------------------------------------------------------------------------------------------


def loaded_by(imported: str) -> set[str]:
    """Which of these libraries a process has loaded that imports this: clients of HTTP, of DNS and of web sockets."""
    told = f"import sys, {imported}; print(*{{'urllib3', 'httpcore', 'dns', 'trio_websocket'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


def test_stock_libp2p_still_loads_what_no_node_uses() -> None:
    loaded = loaded_by("libp2p")
    assert loaded & {"urllib3", "httpcore"} and loaded >= {"dns", "trio_websocket"}, GONE.format("leave_out_unused")


def test_a_node_loads_none_of_it() -> None:
    assert not loaded_by("swarmnode.node.daemon")


def test_what_a_program_had_loaded_before_its_node_stays_as_it_is() -> None:
    told = "from multiaddr import resolvers; was = resolvers.DNSResolver; import swarmnode.node.host; "
    told += "print(resolvers.DNSResolver is was)"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True).stdout == "True\n"
