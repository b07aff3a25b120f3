"""QUIC on loopback: the port it dials from, who is at the other end, and what strangers may not do to it."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.lowlevel
from hosts import echo, identity, running, until
from libp2p.network.exceptions import SwarmException

from swarmnode.node.host import quic, quic_transport
from swarmnode.node.host.addresses import parse
from swarmnode.node.host.certificates import certificate_for, peer_in
from swarmnode.node.host.connections import Connection
from swarmnode.node.host.dialling import HEAD_START
from swarmnode.node.host.limits import ConnectionLimits, Limits
from swarmnode.node.host.muxed import BULK, INITIAL_WINDOW, RATE_AGE, BulkRate, StreamReset
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.host.quic import QuicSession, QuicStream
from swarmnode.node.nat.reachability import seen_by
from swarmnode.protocols.network import PeerEvent, Stream, Unreachable

ECHO, IGNORE = "/test/echo/1", "/test/ignore/1"


def network(limits: ConnectionLimits | None = None, **settings: Any) -> Libp2pNetwork:
    whole = Limits() if limits is None else replace(Limits(), connections=limits)
    listen = ("/ip4/127.0.0.1/tcp/0",)
    return Libp2pNetwork(identity(), HostSettings(listen=listen, limits=whole, **{"quic": True, **settings}))


def place(node: Libp2pNetwork) -> str:
    return next(address for address in node.own_addresses if "/quic-v1/" in address)


def session(node: Libp2pNetwork, peer: Libp2pNetwork) -> QuicSession:
    (connection,) = node.connections.of(peer.me)
    assert isinstance(connection.session, QuicSession)
    return connection.session


async def never(stream: Stream) -> None:
    await trio.sleep_forever()


async def ask(node: Libp2pNetwork, peer: Libp2pNetwork, message: bytes) -> bytes:
    stream = await node.open_stream(peer.me, ECHO)
    answer = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, message)
        while len(answer) < len(message):
            answer += await stream.receive_some(1 << 16)
    await stream.aclose()
    return bytes(answer)


@asynccontextmanager
async def connected(a: Libp2pNetwork, b: Libp2pNetwork) -> AsyncIterator[trio.Nursery]:
    """`a` has dialled `b`; both echo."""
    for node in (a, b):
        node.serve(ECHO, echo)
    async with running(a, b) as nursery:
        await a.connect(place(b))
        await until(lambda: b.connections.of(a.me))
        yield nursery


def port_of(address: str) -> int:
    endpoint = parse(address)
    assert endpoint is not None
    return endpoint.port


async def test_it_listens_at_the_port_of_tcp_and_dials_from_there() -> None:
    a, b = network(), network()
    async with connected(a, b):
        assert [port_of(address) for address in b.own_addresses] == 2 * [port_of(place(b))]
        assert session(b, a).get_remote_address() == ("127.0.0.1", port_of(place(a)))
        assert await seen_by(session(a, b)) == place(a).partition("/p2p/")[0]
        assert a.connections.of(b.me)[0].direct and b.connections.of(a.me)[0].inbound


async def test_no_quic_where_the_owner_wants_none() -> None:
    a, b = network(quic=False), network()
    async with running(a, b):
        assert all("/tcp/" in address for address in a.own_addresses)
        with pytest.raises(Unreachable, match="no UDP port"):
            await a.connect(place(b))


async def test_tcp_takes_over_where_it_works_as_well_and_whoever_keeps_streams_hears_of_it() -> None:
    a, b = network(), network()
    a.learn(b.me, ())
    async with connected(a, b):
        a.learn(b.me, b.own_addresses)
        best = a.connections.best(b.me)
        assert best is not None and best.is_quic
        with a.watch_peers() as at_a, b.watch_peers() as at_b, trio.fail_after(10):
            await a._dialler.dial_beside(b.me, best.host, "tcp")
            assert await at_a.receive() == PeerEvent(b.me, up=True, moved=True)
            assert await at_b.receive() == PeerEvent(a.me, up=True, moved=True)
        best = a.connections.best(b.me)
        assert best is not None and not best.is_quic
        assert await ask(a, b, b"hello") == b"hello"


@pytest.mark.parametrize("tcp", ["silent", "refuses"])
async def test_quic_is_dialled_where_tcp_is_silent_for_a_second_or_failed(
    tcp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = network(), network()
    async with running(a, b):
        dial, began = a.swarm.dial_addr, []

        async def slow(address: Any, *more: Any) -> Any:
            began.append(("quic" in str(address), trio.current_time()))
            if "quic" not in str(address) and tcp == "refuses":
                raise SwarmException("refused")
            if "quic" not in str(address):
                await trio.sleep_forever()
            return await dial(address, *more)

        monkeypatch.setattr(a.swarm, "dial_addr", slow)
        a.learn(b.me, tuple(sorted(b.own_addresses, key=lambda address: "/tcp/" in address)))  # QUIC first
        with trio.fail_after(10):
            await a.connect(b.me)
        assert [quic for quic, _ in began[:2]] == [False, True]
        waited = began[1][1] - began[0][1]
        assert (waited > HEAD_START / 2) == (tcp == "silent")


async def test_quic_is_dialled_beside_tcp_that_turned_out_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = network(), network()
    async with running(a, b):
        b.serve(ECHO, echo)
        await a.connect(next(address for address in b.own_addresses if "/tcp/" in address))
        a.learn(b.me, b.own_addresses)
        (over_tcp,) = a.connections.of(b.me)
        for rate, transports in ((None, 1), (4e6, 1), (1e5, 2)):
            monkeypatch.setattr(over_tcp.session.pace, "rate", lambda now, rate=rate: rate)
            assert await ask(a, b, b"hello") == b"hello"
            with trio.move_on_after(0.3 if transports == 1 else 10):
                await until(lambda: len(a.connections.of(b.me)) == 2)
            assert len(a.connections.of(b.me)) == transports
        best = a.connections.best(b.me)
        assert best is not None and best.is_quic


async def test_what_each_brought_decides_between_tcp_and_quic() -> None:
    def brings(connection: Connection, rate: float, at: float) -> None:
        for number in range(1 + BULK // 1024):
            connection.session.pace.came(1024, at + number * 1024 / rate)

    a, b = network(), network()
    async with connected(a, b):
        a.learn(b.me, b.own_addresses)
        (first,) = a.connections.of(b.me)
        await a._dialler.dial_beside(b.me, first.host, "tcp")
        over_quic, over_tcp = sorted(a.connections.of(b.me), key=lambda each: not each.is_quic)
        at = trio.current_time()
        for tcp, quic, wanted in (
            (None, 4e6, over_tcp),  # nothing large came over TCP yet
            (2e6, None, over_tcp),
            (1e5, None, over_quic),  # slow, so the other is tried
            (1e5, 1.1e5, over_tcp),
            (1e5, 1.5e5, over_quic),
            (2e6, 1.5e5, over_tcp),
        ):
            for connection, rate in ((over_tcp, tcp), (over_quic, quic)):
                connection.session.pace = BulkRate()
                if rate is not None:
                    brings(connection, rate, at - BULK / rate)
            assert a.connections.best(b.me) is wanted, (tcp, quic)


def test_only_what_is_large_and_comes_without_a_pause_says_how_fast_a_connection_is() -> None:
    pace = BulkRate()
    for second in range(3000):
        pace.came(1024, float(second))  # with pauses between
    assert pace.rate(3000.0) is None
    for number in range(3000):
        pace.came(1024, 4000.0 + number / 10)  # a trickle
    assert pace.rate(4300.0) is None
    for number in range(1 + BULK // 1024):
        pace.came(1024, 5000.0 + number / 1000)
    assert pace.rate(5002.0) == pytest.approx(1024 * 1000, rel=0.01)
    assert pace.rate(5002.0 + RATE_AGE) is None, "forgotten, so that it is tried again"


async def test_who_answers_is_checked_and_named() -> None:
    a, b = network(), network()
    async with connected(a, b):
        with pytest.raises(Unreachable, match=f"another peer, {b.me}"):
            await a.connect(place(b).replace(b.me, identity().peer_id))
        c = network()
        async with running(c):
            assert await c.connect(place(b).partition("/p2p/")[0]) == b.me


def test_a_certificate_names_its_key_and_no_other() -> None:
    me = identity()
    certificate, _ = certificate_for(me.private_key)
    assert peer_in(certificate) == me.peer_id
    with pytest.raises(ValueError, match="none"):
        peer_in(None)
    other, _ = certificate_for(identity().private_key)
    extension = certificate.extensions[0].value
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:  # another's certificate with this one's extension
        patch.setattr(type(other.extensions), "get_extension_for_oid", lambda *_: certificate.extensions[0])
        with pytest.raises(ValueError, match="InvalidSignature"):
            peer_in(other)
    raw = extension.value
    for wrong in (raw[:-1], b"", b"\x30\x00", raw[:4] + b"\x08\x02" + raw[6:]):
        with monkey.context() as patch:
            patch.setattr(type(extension), "value", wrong)
            with pytest.raises(ValueError, match="no Ed25519 key"):
                peer_in(certificate)


def noise(kind: str) -> Iterator[bytes]:
    for size in (0, 1, 7, 20, 1200, 1472):
        raw = bytearray(os.urandom(size))
        if raw:
            raw[0] = raw[0] | 0xC0 if kind == "long" else raw[0] & 0x7F
        if kind == "long" and size > 6:
            raw[1:6] = b"\x00\x00\x00\x01\x08"  # version 1, connection ids of 8 bytes
        yield bytes(raw)


async def test_datagrams_that_make_no_sense_are_counted_and_cost_no_connection() -> None:
    a, b = network(), network()
    async with connected(a, b):
        target = ("127.0.0.1", port_of(place(b)))
        known = session(b, a).link.quic.host_cid
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for _ in range(30):
                for kind in ("long", "short"):
                    for datagram in noise(kind):
                        stranger.sendto(datagram, target)
                stranger.sendto(b"\x40" + known + os.urandom(40), target)  # at a connection that is there
                await trio.lowlevel.checkpoint()
        await until(lambda: b.quic.dropped["no connection"] >= 60)
        assert await ask(a, b, bytes(100_000)) == bytes(100_000)
        await until(lambda: not b._handshakes.waiting)


async def test_newcomers_prove_their_address_once_places_get_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = network(), network()
    async with running(a, b):
        monkeypatch.setattr(b._handshakes, "is_busy", lambda: True)
        await a.connect(place(b))
        assert b.quic.dropped["asked to come again"] >= 1


async def test_places_of_handshakes_are_bounded_and_free_again() -> None:
    a, b = network(), network(ConnectionLimits(handshakes=8, handshake=0.5))
    async with running(a, b):
        endpoint = a.quic.endpoint_for("127.0.0.1")
        assert endpoint is not None
        hellos = []
        for _ in range(40):  # first datagrams of clients that never go on
            link = endpoint.dial(("127.0.0.1", port_of(place(b))), None)
            hellos += link.quic.datagrams_to_send(trio.current_time())
            link.abort()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for datagram, remote in hellos:
                stranger.sendto(datagram, remote)
        await until(lambda: b.quic.dropped["asked to come again"] >= 30)
        assert len(b._handshakes.waiting) <= 8
        await a.connect(place(b))
        await until(lambda: not b._handshakes.waiting)
        assert set(b.quic.endpoints[0]._links.values()) == {session(b, a).link}


async def test_a_reader_that_takes_nothing_keeps_one_window_and_other_streams_go_on() -> None:
    a, b = network(), network()
    async with connected(a, b) as nursery:
        b.serve(IGNORE, never)
        for _ in range(3):
            stream = await a.open_stream(b.me, IGNORE)
            nursery.start_soon(stream.send_all, bytes(2 << 20))
        assert await ask(a, b, bytes(1 << 20)) == bytes(1 << 20)
        unread = session(b, a).allowance.unread
        assert 0 < unread <= 3 * INITIAL_WINDOW * 1.2  # with what pieces cost
        nursery.cancel_scope.cancel()


async def test_what_a_handler_left_unread_counts_no_more_when_it_is_done() -> None:
    async def answer(stream: Stream) -> None:
        while not stream.finished:  # type: ignore[attr-defined]  # noqa: ASYNC110 (it has no event)
            await trio.sleep(0.01)
        await stream.send_all(b"answer")

    a, b = network(), network()
    async with connected(a, b):
        b.serve(IGNORE, answer)
        stream = await a.open_stream(b.me, IGNORE)
        await stream.send_all(b"more than was asked for")
        await stream.send_eof()
        assert await stream.receive_some(100) == b"answer"
        assert await stream.receive_some(100) == b""
        share = session(b, a).allowance
        await until(lambda: not share.unread and not share.streams)


async def test_who_sends_beyond_its_window_is_disconnected_and_noted() -> None:
    a, b = network(), network()
    async with connected(a, b):
        b.serve(IGNORE, never)
        stream = await a.open_stream(b.me, IGNORE)
        assert isinstance(stream, QuicStream)
        inner = session(a, b).link.quic
        inner.stream(stream.stream_id).max_stream_data_remote = inner._remote_max_data = 1 << 40
        with pytest.raises(StreamReset):
            await stream.send_all(bytes(4 << 20))
        await until(lambda: a.me not in b.connections and b.me not in a.connections)
        assert b._allowance.violations.count(a.me) == 1 and a._allowance.violations.count(b.me) == 0


async def test_who_leaves_gaps_beyond_its_share_is_disconnected_and_why_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = network(), network()
    async with connected(a, b) as nursery:
        monkeypatch.setattr(session(b, a).link.quic, "out_of_order", lambda: ConnectionLimits().unread + 1)
        nursery.start_soon(ask, a, b, b"anything")
        await until(lambda: a.me not in b.connections)
        assert b.connections.history(a.me)[-1].why == "the direct connection ended: it left too much unread"
        nursery.cancel_scope.cancel()


async def test_who_used_its_credit_up_behind_a_gap_has_more_as_soon_as_the_gap_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = network(), network(down=1e6)
    async with connected(a, b):
        at_b, waits = session(b, a), 450 << 10
        monkeypatch.setattr(at_b.link.quic, "out_of_order", lambda: waits)
        credit = at_b.link.quic.credit
        credit.used = credit.value
        at_b.look()
        at_b._credit()  # the last bytes that came are paid for
        assert credit.value == credit.used
        waits = 0
        at_b.look()
        assert credit.value > credit.used


async def test_a_dial_that_is_cancelled_as_its_handshake_ends_leaves_no_connection() -> None:
    a = network()
    async with running(a):
        endpoint = a.quic.endpoint_for("127.0.0.1")
        assert endpoint is not None
        made = quic.Windowed(streams=1, configuration=a.quic.configuration(is_client=True))
        link = quic.QuicLink(endpoint, made, ("127.0.0.1", 1), None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.quic._session_of, link)
            await until(lambda: link.known.statistics().tasks_waiting)
            nursery.cancel_scope.cancel()
            link.session = QuicSession(link, identity().peer_id)
            link.known.set()
        assert link.ended.is_set()


async def test_streams_of_a_peer_are_bounded() -> None:
    a, b = network(), network(ConnectionLimits(streams=10))
    async with connected(a, b):
        b.serve(IGNORE, never)
        streams = []
        with trio.move_on_after(1.0):
            for _ in range(20):
                streams.append(await a.open_stream(b.me, IGNORE))
        assert len(streams) <= 10 and session(b, a).allowance.streams <= 10
        for stream in streams:
            await stream.aclose()
        assert await ask(a, b, b"there is room again") == b"there is room again"
        assert b._allowance.violations.count(a.me) == 0


async def test_streams_that_are_over_before_they_are_accepted_give_their_places_back() -> None:
    a, b = network(), network()
    async with connected(a, b):
        link = session(a, b).link

        def send_now() -> None:
            for datagram, remote in link.quic.datagrams_to_send(trio.current_time()):
                link.endpoint.send(datagram, remote)

        for stream_id in [link.quic.open() for _ in range(5)]:
            link.quic.send_stream_data(stream_id, b"", end_stream=True)
            send_now()
            link.quic.stop_stream(stream_id, 0)
            send_now()
        await ask(a, b, b"hello")
        await trio.sleep(1)
        assert session(b, a).allowance.streams == 0


async def test_connections_wait_together_for_room_in_their_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one task may wait for a socket, and all connections share one."""

    a, b, c = network(), network(), network()
    async with connected(a, b) as nursery:
        c.serve(ECHO, echo)
        await nursery.start(c.run)
        await a.connect(place(c))
        over_quic = [each.session for peer in (b, c) for each in a.connections.of(peer.me) if each.is_quic]
        send, full_until = quic_transport.UdpSocket.send, trio.current_time() + 0.2

        def full(self: quic_transport.UdpSocket, datagram: bytes, remote: tuple[str, int]) -> None:
            if self.transport is a.quic and trio.current_time() < full_until:
                raise BlockingIOError
            send(self, datagram, remote)

        monkeypatch.setattr(quic_transport.UdpSocket, "send", full)
        async with trio.open_nursery() as asking:
            for peer in (b, c):
                asking.start_soon(ask, a, peer, b"hello")
        assert len(over_quic) == 2 and not any(each.is_closed for each in over_quic)


async def test_a_connection_that_is_cut_in_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quic, "KEEPALIVE", 0.1 * quic.KEEPALIVE)
    monkeypatch.setattr(quic_transport, "SILENCE", 0.1 * quic_transport.SILENCE)
    a, b = network(), network()
    async with connected(a, b):
        await trio.sleep(1.6)
        assert b.me in a.connections  # it was idle, and lives
        session(b, a).link.endpoint.send = lambda *_: None  # type: ignore[method-assign]
        await until(lambda: b.me not in a.connections)


@pytest.mark.parametrize("cap", ["up", "down"])
def test_the_owners_caps_hold(cap: str) -> None:
    async def main() -> None:
        a, b = network(**({"up": 1e6} if cap == "up" else {})), network(**({"down": 1e6} if cap == "down" else {}))
        async with connected(a, b):
            taken = 0

            async def take(stream: Stream) -> None:
                nonlocal taken
                while chunk := await stream.receive_some(1 << 16):
                    taken += len(chunk)

            b.serve(IGNORE, take)
            stream = await a.open_stream(b.me, IGNORE)
            with trio.move_on_after(3.0):
                await stream.send_all(bytes(50 << 20))
            assert 1.5e6 < taken < 4.5e6  # with the first credit

    trio.run(main)
