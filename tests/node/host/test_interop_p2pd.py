"""A go-libp2p node, the `p2pd` of hivemind's wheel, with swarmnode: connect, identify, ping, Kademlia, bulk, relays.

The binary is not ours to ship. Found in this order: $P2PD, beside an installed hivemind, on PATH; else the
tests are skipped. `make interop` fetches it and runs them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import base58
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hosts import network
from multiaddr import Multiaddr
from realnodes import PROGRAM, environment

from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.host.addresses import with_peer
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import agree
from swarmnode.node.nat.relay import RelayServer
from swarmnode.protocols.network import Stream

IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER, DHT = range(5)  # request types of p2pd.proto
FIND_PEER, PROVIDE = 0, 8  # of DHT
PATIENCE = 20.0  # seconds for anything
ECHO = "/swarmnode/test/echo/1"
BULK = 24 << 20  # bytes: many windows of either side
SAID = 32 << 10  # bytes through a relay


def p2pd() -> str | None:
    """Where the binary is, without importing hivemind."""
    named = os.environ.get("P2PD")
    if named:
        return named
    installed = importlib.util.find_spec("hivemind")
    if installed is not None and installed.origin is not None:
        beside = Path(installed.origin).parent / "hivemind_cli" / "p2pd"
        if beside.exists():
            return str(beside)
    return shutil.which("p2pd")


pytestmark = pytest.mark.skipif(p2pd() is None, reason="no p2pd binary: set P2PD to the one in hivemind 1.1.12's wheel")


# -- as much of protocol buffers as p2pd's control socket needs: (field, int or bytes) pairs


def packed(*fields: tuple[int, int | bytes]) -> bytes:
    out = bytearray()
    for number, value in fields:
        out += varint(number << 3 | (2 if isinstance(value, bytes) else 0))
        out += varint(len(value)) + value if isinstance(value, bytes) else varint(value)
    return bytes(out)


def unpacked(raw: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    while raw:
        tag, raw = leading_varint(raw)
        value, raw = leading_varint(raw)
        if tag & 7 == 2:
            found.setdefault(tag >> 3, []).append(raw[:value])
            raw = raw[value:]
        else:
            found.setdefault(tag >> 3, []).append(value)
    return found


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def leading_varint(raw: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for position, byte in enumerate(raw):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, raw[position + 1 :]
    raise AssertionError("a varint that does not end")


class GoNode:
    """A running p2pd and its control socket: one connection a request."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def request(self, kind: int, *fields: tuple[int, int | bytes]) -> tuple[dict[int, list[Any]], socket.socket]:
        """The answer, and the connection it came on, which goes on as the stream that was opened."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(str(self._control))
        message = packed((1, kind), *fields)
        connection.sendall(varint(len(message)) + message)
        answer = self.message(connection)
        assert answer[1] == [0], answer  # OK
        return answer, connection

    def message(self, connection: socket.socket) -> dict[int, list[Any]]:
        size = b""
        while not size or size[-1] > 0x7F:
            byte = connection.recv(1)
            assert byte, "p2pd closed its control connection"
            size += byte
        return unpacked(exactly(connection, leading_varint(size)[0]))

    def identity(self) -> tuple[str, list[str]]:
        answer, connection = self.request(IDENTIFY)
        connection.close()
        told = unpacked(answer[4][0])
        return base58.b58encode(told[1][0]).decode(), [str(Multiaddr(address)) for address in told[2]]

    def connect(self, address: str) -> None:
        place, _, peer = address.partition("/p2p/")
        self.request(CONNECT, (2, packed((1, base58.b58decode(peer)), (2, Multiaddr(place).to_bytes()))))[1].close()

    def open_stream(self, peer: str, protocol: str) -> socket.socket:
        return self.request(STREAM_OPEN, (3, packed((1, base58.b58decode(peer)), (2, protocol.encode()))))[1]

    @contextmanager
    def serving_echo(self, protocol: str) -> Iterator[None]:
        """Send back whatever comes on streams of `protocol`: p2pd passes each on to a connection of ours."""
        with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as threads:
            place = self._control.with_name("e")
            listener.bind(str(place))
            listener.listen()
            address = b"\x90\x03" + varint(len(str(place))) + str(place).encode()  # the multiaddr /unix/…
            handler = packed((1, address), (2, protocol.encode()), (3, 0))
            self.request(STREAM_HANDLER, (4, handler))[1].close()

            def accept() -> None:
                while True:
                    connection, _ = listener.accept()
                    threads.submit(echo, connection)

            def echo(connection: socket.socket) -> None:
                with connection:
                    self.message(connection)  # who opened the stream
                    while piece := connection.recv(1 << 16):
                        connection.sendall(piece)

            accepting = threads.submit(accept)
            try:
                yield
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
                assert isinstance(accepting.exception(), OSError)

    def dht(self, kind: int, *fields: tuple[int, int | bytes]) -> tuple[dict[int, list[Any]], socket.socket]:
        return self.request(DHT, (5, packed((1, kind), *fields, (7, int(PATIENCE) - 5))))


def exactly(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = connection.recv(size - len(got))
        assert piece, "the connection ended early"
        got += piece
    return got


def answers(control: Path) -> bool:
    """Whether somebody listens: the file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(control)) == 0


@contextmanager
def go_node(folder: Path, *more: str) -> Iterator[GoNode]:
    """A p2pd that serves Kademlia on loopback, with an Ed25519 identity; `more` are flags beside or instead."""
    folder.mkdir()
    control = folder / "c"
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    (folder / "id").write_bytes(packed((1, 1), (2, secret)))  # KeyType Ed25519
    places = "/ip4/127.0.0.1/tcp/0,/ip4/127.0.0.1/udp/0/quic-v1"
    command = [str(p2pd()), f"-listen=/unix{control}", f"-hostAddrs={places}", f"-id={folder / 'id'}"]
    command += ["-dhtServer=1", "-b=0", "-relay=0", "-relayDiscovery=0", "-natPortMap=0", "-tls=0", "-q=1", *more]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(control))
        yield GoNode(control)
    finally:
        child.kill()
        child.wait()


@contextmanager
def relay_daemon(home: Path) -> Iterator[tuple[list[str], ControlClient]]:
    """`swarmnode run --role relay`: its addresses and its control socket."""
    command = [str(PROGRAM), "run", "--role", "relay", "--data-dir", str(home), "--port", "0"]
    command += ["--listen", "127.0.0.1", "--quic", "--no-mdns", "--json"]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        client = ControlClient(home)

        def addresses() -> list[str]:
            try:
                return list(client.call("status", timeout=5)["addresses"])
            except (NotRunning, ControlError):
                assert child.poll() is None, "the daemon ended"
                return []

        until(lambda: bool(addresses()))
        yield addresses(), client
    finally:
        child.terminate()
        try:
            child.wait(PATIENCE)
        finally:
            child.kill()


over_both = pytest.mark.parametrize("over", ["tcp", "quic-v1"])
mostly_over_quic = pytest.mark.parametrize("over", [pytest.param("tcp", marks=pytest.mark.thorough), "quic-v1"])


def at(over: str, places: Sequence[str]) -> str:
    """The first of the addresses over that transport."""
    return next(place for place in places if f"/{over}" in place)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


@over_both
def test_a_go_node_connects_identifies_pings_and_finds_a_peer_through_the_daemon(tmp_path: Path, over: str) -> None:
    with (
        relay_daemon(tmp_path / "relay") as (addresses, client),
        go_node(tmp_path / "a") as a,
        go_node(tmp_path / "b") as b,
    ):
        address = at(over, addresses)
        relay = address.rpartition("/")[2]
        (a_id, _), (b_id, b_addresses) = a.identity(), b.identity()
        for node in (a, b):
            node.connect(address)

        def agents() -> dict[str, str]:
            return {peer["peer_id"]: peer["agent"] for peer in client.call("peers", timeout=5)["peers"]}

        until(lambda: all(agents().get(peer) for peer in (a_id, b_id)))

        with a.open_stream(relay, "/ipfs/ping/1.0.0") as ping:
            payload = os.urandom(32)
            ping.sendall(payload)
            assert exactly(ping, 32) == payload

        def found_by_a() -> bool:
            answer, connection = a.dht(FIND_PEER, (2, base58.b58decode(b_id)))
            connection.close()
            found = unpacked(unpacked(answer[5][0])[2][0])
            assert base58.b58encode(found[1][0]).decode() == b_id
            return bool(set(b_addresses) & {str(Multiaddr(place)) for place in found.get(2, [])})

        until(found_by_a)  # only the daemon knows both: a finds b by asking it


async def echoed(send: Callable[[bytes], Awaitable[None]], receive: Callable[[], Awaitable[bytes]]) -> None:
    """BULK bytes go out and come back unchanged, both ways at once."""
    piece = os.urandom(1 << 20)
    back = hashlib.sha256()

    async def pour() -> None:
        for _ in range(BULK // len(piece)):
            await send(piece)

    with trio.fail_after(2 * PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour)
            left = BULK
            while left:
                got = await receive()
                assert got
                back.update(got)
                left -= len(got)
    assert back.digest() == hashlib.sha256(piece * (BULK // len(piece))).digest()


@over_both
def test_bulk_goes_both_ways_on_a_stream_opened_here(tmp_path: Path, over: str) -> None:
    async def main(go: GoNode) -> None:
        go_id, places = await trio.to_thread.run_sync(go.identity)
        host = network(quic=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            await host.connect(with_peer(at(over, places), go_id))
            stream = await host.open_stream(go_id, ECHO)
            await echoed(stream.send_all, lambda: stream.receive_some(1 << 16))
            nursery.cancel_scope.cancel()

    with go_node(tmp_path / "go") as go, go.serving_echo(ECHO):
        trio.run(main, go)


@mostly_over_quic
def test_bulk_goes_both_ways_on_a_stream_opened_by_the_go_node(tmp_path: Path, over: str) -> None:
    async def main(go: GoNode) -> None:
        host = network(quic=True)

        async def echo(stream: Stream) -> None:
            while piece := await stream.receive_some(1 << 16):
                await stream.send_all(piece)

        host.serve(ECHO, echo)
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            await trio.to_thread.run_sync(go.connect, at(over, host.addresses))
            opened = await trio.to_thread.run_sync(go.open_stream, host.me, ECHO)
            opened.settimeout(None)
            opened.setblocking(False)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(opened)) as stream:
                await echoed(stream.send_all, stream.receive_some)
            nursery.cancel_scope.cancel()

    with go_node(tmp_path / "go") as go:
        trio.run(main, go)


async def said_and_heard(host: Libp2pNetwork, peer: str, relay: str) -> None:
    """So much goes to the peer through a relay and comes back: less than what go-libp2p carries, 128 KiB a circuit."""
    (circuit,) = (each for each in host.connections.of(peer) if not each.direct)  # the go node may have dialled as well
    assert circuit.relay == relay
    stream = await circuit.session.open_stream()
    await agree(stream, ECHO)
    said = os.urandom(SAID)
    await stream.send_all(said)
    heard = b""
    while len(heard) < SAID:
        piece = await stream.receive_some(SAID)
        assert piece
        heard += piece
    assert heard == said


@over_both
def test_ours_meet_through_a_go_node_that_relays(tmp_path: Path, over: str) -> None:
    async def main(go: GoNode) -> None:
        go_id, places = await trio.to_thread.run_sync(go.identity)
        a, b = network(quic=True), network(quic=True)

        async def echo(stream: Stream) -> None:
            while piece := await stream.receive_some(1 << 16):
                await stream.send_all(piece)

        a.serve(ECHO, echo)
        with trio.fail_after(3 * PATIENCE):
            async with trio.open_nursery() as nursery:
                for host in (a, b):
                    await nursery.start(host.run)
                    await host.connect(with_peer(at(over, places), go_id))
                place = await a.relay_client.reserve(go_id)
                assert all(address.endswith(f"/p2p/{go_id}/p2p-circuit/p2p/{a.me}") for address in place.addresses)
                await b.relay_client.dial(go_id, a.me)
                await said_and_heard(b, a.me, go_id)
                nursery.cancel_scope.cancel()

    with go_node(tmp_path / "go", "-relay=1", "-relayService=1", "-forceReachabilityPublic=1") as go:
        trio.run(main, go)


@mostly_over_quic
def test_a_go_node_is_reached_through_a_relay_of_ours(tmp_path: Path, over: str) -> None:
    async def main() -> None:
        relay, b = network(quic=True), network(quic=True)
        server = RelayServer(relay, relay.policy)
        with trio.fail_after(3 * PATIENCE):
            async with trio.open_nursery() as nursery:
                for host in (relay, b):
                    await nursery.start(host.run)
                await nursery.start(server.run)
                where = f"-trustedRelays={at(over, relay.addresses)}"
                flags = ("-relay=1", "-autoRelay=1", where, "-forceReachabilityPrivate=1")
                with go_node(tmp_path / "go", *flags) as go, go.serving_echo(ECHO):
                    go_id, _ = await trio.to_thread.run_sync(go.identity)
                    await b.connect(at(over, relay.addresses))
                    while go_id not in server.reservations:  # noqa: ASYNC110 (the go node has no event)
                        await trio.sleep(0.1)
                    await b.relay_client.dial(relay.me, go_id)
                    await said_and_heard(b, go_id, relay.me)
                    assert server.bytes_relayed > 2 * SAID
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_providers_are_found_across_a_go_node_both_ways(tmp_path: Path) -> None:
    """Two of our hosts know only a go node; each finds the other's provider record there, and the go node its own."""

    async def main(go: GoNode) -> None:
        go_id, places = await trio.to_thread.run_sync(go.identity)
        hosts = []
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                host = network(quic=True)
                await nursery.start(host.run)
                await host.connect(with_peer(places[0], go_id))
                while not all(view.agent for view in host.peers()):  # noqa: ASYNC110 (no event upstream)
                    await trio.sleep(0.05)
                hosts.append(host)
            ours, other = hosts
            digest = b"\x12\x20" + hashlib.sha256(b"a shard").digest()  # go-libp2p's keys are multihashes
            await ours.provide(digest)
            while await other.find_providers(digest) != (ours.me,):  # noqa: ASYNC110 (the go node has no event)
                await trio.sleep(0.1)

            theirs = b"\x12\x20" + hashlib.sha256(b"theirs").digest()
            cid = b"\x01\x55" + theirs  # CID version 1, raw
            _, connection = await trio.to_thread.run_sync(lambda: go.dht(PROVIDE, (3, cid)))
            connection.close()
            while go_id not in await other.find_providers(theirs):  # noqa: ASYNC110
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    with go_node(tmp_path / "go") as go:

        async def bounded() -> None:
            with trio.fail_after(2 * PATIENCE):
                await main(go)

        trio.run(bounded)
