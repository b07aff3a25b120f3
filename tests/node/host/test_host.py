"""The libp2p host on real loopback sockets: what a node may expect of it, and what strangers may not do to it."""

from __future__ import annotations

import logging
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from disconnecting import disconnect
from hosts import echo, identity, network, running, until
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from swarmnode.node.discovery import kademlia
from swarmnode.node.discovery.kademlia import Walk
from swarmnode.node.exitcodes import CONFIG, PORT_TAKEN, ExpectedError
from swarmnode.node.host import addresses
from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.host.dialling import peer_id
from swarmnode.node.host.limits import ConnectionLimits, Limits
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.patches.yamux_session import HEADER, YamuxSession
from swarmnode.node.host.stream import agree, places_in
from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.limits import Allowance
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import ProtocolUnsupported, Stream, StreamBroken, Unreachable

ECHO = "/test/echo/1"


async def ask(node: Libp2pNetwork, peer: str, message: bytes) -> bytes:
    stream = await node.open_stream(peer, ECHO)
    await stream.send_all(message)
    await stream.send_eof()
    answer = b""
    while chunk := await stream.receive_some(1 << 16):
        answer += chunk
    await stream.aclose()
    return answer


async def test_streams_carry_bytes_both_ways_and_end_cleanly() -> None:
    a, b = network(), network()
    b.serve(ECHO, echo)
    async with running(a, b):
        assert await a.connect(b.addresses[0]) == b.me
        payload = os.urandom(3_000_000)
        stream = await a.open_stream(b.me, ECHO)

        async def send() -> None:
            await stream.send_all(payload)
            await stream.send_eof()

        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while chunk := await stream.receive_some(1 << 20):
                received += chunk
        assert received == payload


async def test_connecting_on_loopback_takes_no_fixed_wait() -> None:
    taken = []
    for _ in range(3):  # a machine with other work may be late once
        a, b = network(), network()
        async with running(a, b):
            began = trio.current_time()
            await a.connect(b.addresses[0])
            taken.append(trio.current_time() - began)
    assert min(taken) < 0.2, "upstream waits 0.25 s for a better address"


async def test_errors_say_which_of_three_things_happened() -> None:
    a, b = network(), network()

    async def drop(stream: Stream) -> None:
        await stream.aclose()

    b.serve("/test/drop/1", drop)
    async with running(a, b):
        nobody = identity().peer_id
        with pytest.raises(Unreachable, match="no address"):
            await a.connect(nobody)
        with pytest.raises(Unreachable, match="refused"):
            await a.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}")
        with pytest.raises(Unreachable, match=f"answers as another peer, {b.me}"):
            await a.connect(addresses.with_peer(b.addresses[0], nobody))
        with pytest.raises(Unreachable, match="itself"):
            await a.connect(a.addresses[0])
        with pytest.raises(Unreachable, match="cannot be dialled: expected /ip4/"):
            await a.connect("/ip4/127.0.0.1/udp/1")
        await a.connect(b.addresses[0])
        with pytest.raises(ProtocolUnsupported):
            await a.open_stream(b.me, "/test/unknown/1")
        stream = await a.open_stream(b.me, "/test/drop/1")
        with pytest.raises(StreamBroken):
            await stream.receive_some(1)
        await stream.aclose()


async def test_silent_address_is_given_up_after_the_timeout() -> None:
    a = network()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with running(a):
            target = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{identity().peer_id}"
            with pytest.raises(Unreachable, match=r"did not answer within 0\.2 s"), trio.fail_after(10):
                await a.connect(target, timeout=0.2)


async def test_two_tasks_that_connect_to_one_peer_share_the_dial() -> None:
    a, b = network(), network()
    async with running(a, b):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(a.connect, b.addresses[0])
        assert len(a.connections.of(b.me)) == 1


async def test_cancelled_caller_leaves_the_shared_dial_to_the_others() -> None:
    a, b = network(), network()
    async with running(a, b), trio.open_nursery() as nursery:
        impatient = trio.CancelScope()

        async def leave() -> None:
            with impatient:
                await a.connect(b.addresses[0])

        nursery.start_soon(leave)
        nursery.start_soon(a.connect, b.addresses[0])
        while not a._dialler._under_way:
            await trio.lowlevel.checkpoint()
        impatient.cancel()
        await until(lambda: bool(a.peers()))


async def test_peers_that_dial_each_other_at_once_end_up_connected() -> None:
    a, b = network(), network()
    a.serve(ECHO, echo)
    b.serve(ECHO, echo)
    async with running(a, b):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, b.addresses[0])
            nursery.start_soon(b.connect, a.addresses[0])
        assert await ask(a, b.me, b"one way") == b"one way"
        assert await ask(b, a.me, b"and back") == b"and back"
        assert [view.peer for view in a.peers()] == [b.me]


def test_exception_in_a_handler_ends_its_stream_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        a, b = network(), network()

        async def fail(stream: Stream) -> None:
            raise RuntimeError("broken handler")

        b.serve(ECHO, echo)
        b.serve("/test/fail/1", fail)
        async with running(a, b):
            await a.connect(b.addresses[0])
            stream = await a.open_stream(b.me, "/test/fail/1")
            with pytest.raises(StreamBroken):
                await stream.receive_some(1)
            assert await ask(a, b.me, b"alive") == b"alive"
            assert b._failures == {"/test/fail/1": 1}
            assert a.me in caplog.text

    with caplog.at_level(logging.WARNING):
        trio.run(main)


async def test_garbage_in_negotiation_does_not_end_the_host() -> None:
    a, b = network(), network()
    b.serve(ECHO, echo)
    async with running(a, b):
        await a.connect(b.addresses[0])
        for garbage in (b"\x04\xff\xfe\xfd\n", b"\xff" * 64, os.urandom(300), b"\x00", b"\x13/multistream/2.0.0\n"):
            connection = a.connections.best(b.me)
            assert connection is not None
            stream = await connection.session.open_stream()
            await stream.send_all(garbage)
            stream.send_eof_nowait()
        assert await ask(a, b.me, b"alive") == b"alive"


async def test_a_stranger_writes_a_line_of_each_kind_however_often_it_offends(caplog: pytest.LogCaptureFixture) -> None:
    a, b = network(), network()

    async def fail(stream: Stream) -> None:
        raise RuntimeError("broken handler")

    b.serve("/test/fail/1", fail)
    caplog.set_level(logging.INFO)
    async with running(a, b):
        for _ in range(3):
            await a.connect(b.addresses[0])
            for _ in range(5):
                await a.open_stream(b.me, "/test/fail/1")
                connection = a.connections.best(b.me)
                assert connection is not None and isinstance(connection.session, YamuxSession)
                stream = await connection.session.open_stream()
                await stream.send_all(b"\x04\xff\xfe\xfd\n")
            connection.session.answer(b"no such version".ljust(HEADER.size))
            await until(lambda: a.me not in b.connections and b.me not in a.connections)
    lines = [record.getMessage() for record in caplog.records if a.me in record.getMessage()]
    assert [line for line in lines if "broke the rules" in line and "no such version" not in line]
    assert len(lines) == 3, lines  # its first violation, the handler's first failure, and that it is slowed


async def test_closed_connections_leave_nothing_behind() -> None:
    a, b = network(quic=True), network(quic=True)
    async with running(a, b):
        tasks = 0
        for number, address in enumerate(4 * b.own_addresses):
            await a.connect(address)
            await until(lambda: bool(b.peers()))
            await disconnect(a, b.me)
            await until(lambda: not b.peers())
            if not number:
                tasks = trio.lowlevel.current_statistics().tasks_living
        await until(lambda: not b._handshakes.waiting and not b.swarm.get_connections())
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)


async def test_a_peer_has_few_connections() -> None:
    a, b = network(), network()
    async with running(a, b):
        await a.connect(b.addresses[0])
        more = [await a._dialler.dial_beside(b.me, "127.0.0.1", "tcp") for _ in range(5)]
        assert [session is not None for session in more] == [True] * 3 + [False] * 2
        await until(lambda: len(a.connections.of(b.me)) == len(b.swarm.get_connections()) == 4)
        assert a.connections._turned_away["enough connections"] == 2
        assert not any("turned away" in change.why for change in a.connections.history(b.me)), "it is connected"


async def test_who_has_many_connections_keeps_nobody_out() -> None:
    many = Limits(connections=ConnectionLimits(per_peer=9))
    full, a, b, late = network(max_peers=3), network(limits=many), network(limits=many), network()
    async with running(full, a, b, late):
        for node in (a, b):
            await node.connect(full.addresses[0])
            for _ in range(3):
                await node._dialler.dial_beside(full.me, "127.0.0.1", "tcp")
        await late.connect(full.addresses[0])
        await until(lambda: {view.peer for view in full.peers()} == {a.me, b.me, late.me})
        await until(lambda: len(full.swarm.get_connections()) == 6)
        await trio.sleep(0.2)
        assert late.peers(), "it was not turned away"


async def test_who_hangs_up_within_its_handshake_keeps_no_place() -> None:
    """As who asks whether a node can be dialled does: after Noise it is gone. Its place was lost for good."""
    me, other = network(), network()
    async with running(me, other):
        place = Multiaddr(addresses.without_peer(me.addresses[0]))
        for _ in range(4):
            raw = await other.swarm.transport_manager.transport_for_dialing(place).dial(place)
            await other.swarm.upgrader.upgrade_security(raw, True, ID.from_string(me.me))
            await raw.close()
        await until(lambda: me._handshakes.outcomes["failed"] == 4 and not me._handshakes.waiting)


async def test_a_peer_that_hangs_up_as_it_is_registered_is_not_kept() -> None:
    a, b = network(), network()
    async with running(a, b):
        place = Multiaddr(addresses.without_peer(b.addresses[0]))
        dialled = []
        for _ in range(40):  # it takes a certain order of events
            raw: Any = await a.swarm.transport_manager.transport_for_dialing(place).dial(place)
            secured = await a.swarm.upgrader.security_multistream.secure_outbound(raw, None)
            await a.swarm.upgrader.upgrade_connection(secured, peer_id(b.me))
            raw.stream._socket.shutdown(socket.SHUT_WR)
            dialled.append(raw)
        await until(lambda: not b._handshakes.waiting and not b.swarm.connections)
        for raw in dialled:
            await raw.close()


async def test_peers_come_and_go_with_events_and_views() -> None:
    a, b = network(), network(agent="swarmnode/test")
    async with running(a, b):
        with a.watch_peers() as events:
            await a.connect(b.addresses[0])
            event = await events.receive()
            assert (event.peer, event.up) == (b.me, True)
            (view,) = a.peers()
            assert (view.path, view.inbound) == ("direct", False)
            assert b.addresses[0] in a.known_addresses(b.me)
            await until(lambda: a.peers()[0].agent == "swarmnode/test")
            await until(lambda: bool(b.peers()))
            assert b.peers()[0].inbound
            await disconnect(b, a.me)
            event = await events.receive()
            assert (event.peer, event.up) == (b.me, False)


async def test_feed_that_nobody_reads_forgets_its_oldest_events() -> None:
    from swarmnode.node.host.connections import EVENTS, Connections, PeerEvent

    connections = Connections(HostAllowance())
    with connections.watch() as events:
        for number in range(EVENTS + 10):
            connections._notify(PeerEvent(str(number), up=True))
        assert (await events.receive()).peer == "10"


async def test_more_peers_than_the_limit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    full = network(max_peers=1)
    a, b = network(), network()
    async with running(full, a, b):
        await a.connect(full.addresses[0])
        await until(lambda: bool(full.peers()))
        await b.connect(full.addresses[0])
        await until(lambda: not b.peers())
        assert [view.peer for view in full.peers()] == [a.me]
        assert b.me not in caplog.text  # which it could write as often as it dials


async def test_stopped_host_no_longer_accepts_and_its_peers_notice() -> None:
    a, b = network(), network()
    async with running(a):
        with trio.fail_after(3):
            async with running(b):
                await a.connect(b.addresses[0])
                port = int(b.addresses[0].split("/")[4])
        await until(lambda: not a.peers())
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream("127.0.0.1", port)


async def test_a_host_that_has_ended_tells_where_it_was() -> None:
    node = network()
    async with running(node):
        told = node.own_addresses
    assert told and node.own_addresses == node.addresses == told
    assert node.dial_source("127.0.0.1")


async def test_port_in_use_is_reported_with_a_way_out() -> None:
    a = network()
    async with running(a):
        port = a.addresses[0].split("/")[4]
        late = network(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        with pytest.raises(ExpectedError, match=rf"port {port} is in use.*--port 0") as caught:
            await late.run()
        assert caught.value.exit_code == PORT_TAKEN


async def test_address_of_no_interface_is_reported() -> None:
    with pytest.raises(ExpectedError, match=r"192\.0\.2\.77 port 40777: .*--listen") as caught:
        await network(listen=("/ip4/192.0.2.77/tcp/40777",)).run()
    assert caught.value.exit_code == CONFIG


async def test_unspecified_address_is_announced_as_real_ones() -> None:
    a = network(listen=("/ip4/0.0.0.0/tcp/0",))
    async with running(a):
        assert a.addresses
        assert not any("/0.0.0.0/" in address for address in a.addresses)
        assert all(addresses.peer_of(address) == a.me for address in a.addresses)
        assert [Multiaddr(address.partition("/p2p/")[0]) for address in a.addresses] == [
            address.decapsulate("/p2p") if "/p2p/" in str(address) else address for address in a._host.get_addrs()
        ]


def test_told_addresses_replace_those_of_the_interfaces() -> None:
    a = network(announce=("/dns4/node.example/tcp/4077",))
    assert a.addresses == (f"/dns4/node.example/tcp/4077/p2p/{a.me}",)


async def test_all_bytes_at_the_sockets_are_counted() -> None:
    a, b = network(), network()
    b.serve(ECHO, echo)
    async with running(a, b):
        await a.connect(b.addresses[0])
        await ask(a, b.me, bytes(100_000))
        traffic = a.traffic()
        assert 100_000 < traffic.bytes_out < 130_000
        assert 100_000 < traffic.bytes_in < 130_000
        await until(lambda: b.traffic().bytes_in == a.traffic().bytes_out)
        metrics = Metrics()
        b.measure(metrics)
        told = {(one.metric.name, one.of): one.value for one in metrics.samples()}
        for way in ("received", "sent"):
            assert 100_000 < told[f"swarmnode_{way}_bytes_total", ECHO] < 103_000  # with what streams cost
            assert told[f"swarmnode_{way}_bytes_total", "other"] < 3_000


@pytest.mark.slow
@pytest.mark.parametrize("capped", ["up", "down"])
async def test_caps_hold_traffic_to_their_rate(capped: str) -> None:
    rate = 1_600_000.0
    a = network(up=rate if capped == "up" else 0)
    b = network(down=rate if capped == "down" else 0)

    def passed() -> int:
        return a.traffic().bytes_out if capped == "up" else b.traffic().bytes_in

    async def send() -> None:
        stream = await a.open_stream(b.me, ECHO)
        await stream.send_all(bytes(16_000_000))

    async def drain(stream: Stream) -> None:
        while await stream.receive_some(1 << 16):
            pass

    b.serve(ECHO, drain)
    async with running(a, b) as nursery:
        await a.connect(b.addresses[0])
        nursery.start_soon(send)
        await until(lambda: passed() > 0.4 * rate)
        before, began = passed(), trio.current_time()
        await trio.sleep(3.0)  # if the machine stood still before, a quarter of a second is caught up on
        taken = (passed() - before) / (trio.current_time() - began)
    assert 0.2 * rate < taken < 1.1 * rate  # other programs may have the CPU


def test_signatures_are_bound_to_the_peer_id() -> None:
    a, b = network(), network()
    signature = a.sign(b"message")
    assert b.verify(a.me, b"message", signature)
    assert not b.verify(b.me, b"message", signature)
    assert not b.verify(a.me, b"massage", signature)
    assert not b.verify("nonsense", b"message", signature)
    assert not b.verify(a.me, b"message", b"short")


def test_learned_addresses_are_bounded_and_undialable_ones_left_out() -> None:
    a = network()
    peer = identity().peer_id
    a.learn(peer, tuple(f"/ip4/10.0.0.1/tcp/{port}" for port in range(1, 100)))
    assert len(a.known_addresses(peer)) == 16
    other = identity().peer_id
    a.learn(other, ("/ip4/0.0.0.0/tcp/1", "/ip4/10.0.0.1/udp/1", "nonsense", "/ip4/10.0.0.2/tcp/2"))
    assert a.known_addresses(other) == (f"/ip4/10.0.0.2/tcp/2/p2p/{other}",)


def test_a_peer_of_which_ever_new_addresses_are_told_costs_no_more_memory() -> None:
    a, peer = network(), identity().peer_id
    for port in range(1, 200):
        a.learn(peer, (f"/ip4/10.0.0.1/tcp/{port}",))
    assert len(a.swarm.peerstore.addrs(peer_id(peer))) <= 32


async def test_however_many_others_are_told_of_who_is_connected_is_still_known_and_so_is_this_node_itself() -> None:
    """Upstream forgets those first of whom it knew first, and before them those without an address, such as itself."""

    a, b, late = network(), network(), network()
    async with running(a, b, late):
        await b.connect(a.addresses[0])
        await until(lambda: bool(a.protocols_of(b.me)))
        for number in range(1, 1200):
            a.learn(peer_id_of(number.to_bytes(32, "big")), (f"/ip4/192.0.2.1/tcp/{number}",))
        assert a.protocols_of(b.me) and len(a.swarm.peerstore.peer_ids()) <= 1000
        await late.connect(a.addresses[0])
        await until(lambda: bool(late.protocols_of(a.me)))


async def test_providers_are_found_through_a_third_node() -> None:
    a, b, c = network(), network(), network()
    key = os.urandom(32)
    async with running(a, b, c):
        await a.connect(b.addresses[0])
        await c.connect(b.addresses[0])
        await until(lambda: all(view.agent for node in (a, b, c) for view in node.peers()) and bool(c.peers()))
        await a.provide(key)
        assert await c.find_providers(key) == (a.me,)
        assert a.addresses[0] in c.known_addresses(a.me)
        assert await c.find_providers(os.urandom(32)) == ()
        lies = [Multiaddr(f"/ip4/192.0.2.{number}/tcp/1") for number in range(8)]
        b.kademlia.provider_store.add_provider(key, PeerInfo(peer_id(a.me), lies))
        assert await c.find_providers(key) == (a.me,)
        assert c._dialler._known[a.me][0] == a.addresses[0], "what was known goes before hearsay"


async def test_one_router_that_names_many_providers_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = network(), network()
    many, real = {f"fake {number}": () for number in range(20)}, {"real": ()}
    for answers, found in (([many], False), ([many, real, {"other": ()}], True)):
        walk = Walk(a.kademlia, Message(), {}, 20)
        for answer in answers:
            monkeypatch.setattr(walk, "_named", lambda peers, answer=answer: answer.items() if peers == [1] else ())

            async def exchange(*_: object) -> Any:
                return SimpleNamespace(providerPeers=[1], closerPeers=[])

            monkeypatch.setattr(a.kademlia, "exchange", exchange)
            await walk.ask(b.me)
        assert walk.enough == found
        assert ("real" in walk.by_turns()[:20]) == found


async def test_who_asks_the_dht_without_end_is_answered_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia, "ASKED", Allowance(rate=5, burst=20))
    a, b = network(), network()
    async with running(a, b):
        await b.connect(a.addresses[0])
        answers = 0

        async def ask() -> None:
            nonlocal answers
            while True:
                await b.kademlia.exchange(a.me, Message(type=Message.MessageType.FIND_NODE, key=os.urandom(32)))
                answers += 1

        began = trio.current_time()
        with trio.move_on_after(2.0):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(ask)
        assert 5 < answers <= 20 + 5 * (trio.current_time() - began) + 1


def test_a_key_too_many_is_not_announced_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        a, b = network(), network()
        async with running(a, b):
            await a.connect(b.addresses[0])
            await until(lambda: all(view.agent for node in (a, b) for view in node.peers()) and bool(b.peers()))
            for key in (b"a", b"b"):
                await a.provide(32 * key)
            assert [await b.find_providers(32 * key) for key in (b"a", b"b")] == [(a.me,), ()]
            assert "at most 1 keys" in caplog.text

    monkeypatch.setattr(kademlia, "MAX_KEYS", 1)
    trio.run(main)


@pytest.mark.parametrize("answer", [b"", b"\xff\xff\xff\x7f", b"\x03na\n"], ids=["ends", "too long", "refuses"])
def test_a_stream_whose_protocol_is_not_agreed_on_is_dropped(answer: bytes) -> None:
    class Other:
        peer, left, aborted = "other", answer, False

        async def send_all(self, data: bytes) -> None: ...

        async def receive_some(self, max_bytes: int) -> bytes:
            chunk, self.left = self.left[:max_bytes], self.left[max_bytes:]
            return chunk

        def abort(self) -> None:
            self.aborted = True

    other: Any = Other()
    with pytest.raises((ProtocolUnsupported, StreamBroken)):
        trio.run(agree, other, "/test/1")
    assert other.aborted


async def test_lookup_among_dead_peers_ends_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmnode.node.discovery import kademlia
    from swarmnode.protocols.dht.lookup import LookupLimits

    monkeypatch.setattr(kademlia, "LOOKUP", LookupLimits(patience=5.0, seconds=0.5))
    a, b = network(), network()

    async def hang(stream: Any) -> None:
        await trio.sleep_forever()

    async with running(a, b):
        b._host.set_stream_handler(kademlia.PROTOCOL_ID, hang)
        await a.connect(b.addresses[0])
        await until(lambda: bool(a.peers()[0].agent))
        with trio.fail_after(4.5):  # one peer is waited for longer
            assert await a.find_providers(os.urandom(32)) == ()


async def test_connection_that_never_shakes_hands_costs_no_peer() -> None:
    a, b = network(), network()
    async with running(a, b):
        port = int(b.addresses[0].split("/")[4])
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(20)]
        await a.connect(b.addresses[0], timeout=2)
        for stream in silent:
            await stream.aclose()


async def test_crash_inside_the_host_leaves_run_as_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    a = network()

    async def crash() -> None:
        raise RuntimeError("internal")

    monkeypatch.setattr(a, "_listen_on_udp", crash)
    with pytest.raises(BaseExceptionGroup) as caught:
        await a.run()
    assert caught.value.subgroup(RuntimeError)


# --- addresses that nobody can read -----------------------------------------------------------------------------------

UNREADABLE = ("/dns4/my_seed/tcp/4077", "/dns4/tcp/tcp/1", "/ip6/fe80::1%a/tcp/1")
OTHER = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"


async def test_what_libp2p_cannot_read_of_a_peers_addresses_is_left_out() -> None:
    node = network(announce=(f"/dns4/my_seed/tcp/4077/p2p/{OTHER}", "/ip4/192.0.2.7/tcp/4077"))
    node.learn(OTHER, (*UNREADABLE, "/ip4/192.0.2.1/tcp/1/p2p/0/p2p-circuit", "/ip4/192.0.2.1/tcp/1"))
    assert f"/ip4/192.0.2.1/tcp/1/p2p/{OTHER}" in node.known_addresses(OTHER)
    assert list(map(str, node._host.get_addrs())) == [f"/ip4/192.0.2.7/tcp/4077/p2p/{node.me}"]


def test_addresses_in_a_message_can_be_read_as_text_as_well() -> None:
    named = Multiaddr("/dns4/abc/tcp/1").to_bytes()
    assert places_in([named, named.replace(b"abc", b"tcp"), b"\xff"]) == ("/dns4/abc/tcp/1",)
    assert places_in([b"\xa5\x03\x90\xa1\x0f" + bytes([0x11] * 250_000)]) == ()  # a peer id that took half a minute


async def test_a_provider_whose_address_cannot_be_read_is_found_all_the_same() -> None:
    node = network()
    async with running(node):
        key = os.urandom(32)
        node._routing._kademlia.provider_store.add_provider(key, PeerInfo(ID.from_string(OTHER), [Multiaddr(b"\xff")]))
        assert await node.find_providers(key) == (OTHER,)


def test_a_closer_peer_with_an_endless_id_is_left_out() -> None:
    walk: Any = SimpleNamespace(_network=SimpleNamespace(me="me"))
    named = [
        SimpleNamespace(id=bytes(1 << 18), addrs=[]),
        SimpleNamespace(id=ID.from_string(OTHER).to_bytes(), addrs=[]),
    ]
    assert list(Walk._named(walk, named)) == [(OTHER, ())]
