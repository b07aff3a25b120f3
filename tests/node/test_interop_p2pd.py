"""A go-libp2p node, the `p2pd` of hivemind's wheel, with a swarmnode daemon: connect, identify, ping, Kademlia.

The binary is not ours to ship. Found in this order: $SWARMNODE_P2PD, beside an installed hivemind, on PATH; else the
tests are skipped. To have it: pip download --no-deps hivemind==1.1.12, unzip it, and point SWARMNODE_P2PD to
hivemind/hivemind_cli/p2pd.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import base58
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from multiaddr import Multiaddr
from realnodes import PROGRAM, environment

from swarmnode.node.addresses import with_peer
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.host import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity, peer_id_of

IDENTIFY, CONNECT, STREAM_OPEN, DHT = 0, 1, 2, 4  # request types of p2pd.proto
FIND_PEER, PROVIDE = 0, 8  # of DHT
PATIENCE = 20.0  # seconds for anything


def p2pd() -> str | None:
    """Where the binary is, without importing hivemind."""
    named = os.environ.get("SWARMNODE_P2PD")
    if named:
        return named
    installed = importlib.util.find_spec("hivemind")
    if installed is not None and installed.origin is not None:
        beside = Path(installed.origin).parent / "hivemind_cli" / "p2pd"
        if beside.exists():
            return str(beside)
    return shutil.which("p2pd")


pytestmark = pytest.mark.skipif(
    p2pd() is None, reason="no p2pd binary: set SWARMNODE_P2PD to the one in hivemind 1.1.12's wheel"
)


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

    def dht(self, kind: int, *fields: tuple[int, int | bytes]) -> tuple[dict[int, list[Any]], socket.socket]:
        return self.request(DHT, (5, packed((1, kind), *fields, (7, int(PATIENCE) - 5))))


def exactly(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = connection.recv(size - len(got))
        assert piece, "the connection ended early"
        got += piece
    return got


@contextmanager
def go_node(folder: Path) -> Iterator[GoNode]:
    """A p2pd that serves Kademlia on loopback, with an Ed25519 identity."""
    folder.mkdir()
    control = folder / "c"
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    (folder / "id").write_bytes(packed((1, 1), (2, secret)))  # KeyType Ed25519
    command = [str(p2pd()), f"-listen=/unix{control}", "-hostAddrs=/ip4/127.0.0.1/tcp/0", f"-id={folder / 'id'}"]
    command += ["-dhtServer=1", "-b=0", "-relay=0", "-relayDiscovery=0", "-natPortMap=0", "-tls=0", "-q=1"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(control.exists)
        yield GoNode(control)
    finally:
        child.kill()
        child.wait()


@contextmanager
def relay_daemon(home: Path) -> Iterator[tuple[str, ControlClient]]:
    """`swarmnode run --role relay`: its address and its control socket."""
    command = [str(PROGRAM), "run", "--role", "relay", "--data-dir", str(home), "--port", "0"]
    command += ["--listen", "127.0.0.1", "--no-mdns", "--json"]
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
        yield addresses()[0], client
    finally:
        child.terminate()
        try:
            child.wait(PATIENCE)
        finally:
            child.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def test_a_go_node_connects_identifies_pings_and_finds_a_peer_through_the_daemon(tmp_path: Path) -> None:
    with (
        relay_daemon(tmp_path / "relay") as (address, client),
        go_node(tmp_path / "a") as a,
        go_node(tmp_path / "b") as b,
    ):
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


def test_providers_are_found_across_a_go_node_both_ways(tmp_path: Path) -> None:
    """Two of our hosts know only a go node; each finds the other's provider record there, and the go node its own."""

    async def main(go: GoNode) -> None:
        go_id, places = await trio.to_thread.run_sync(go.identity)
        hosts = []
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                key = Ed25519PrivateKey.generate()
                identity = Identity(key, peer_id_of(key.public_key().public_bytes_raw()))
                host = Libp2pNetwork(identity, HostSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
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
