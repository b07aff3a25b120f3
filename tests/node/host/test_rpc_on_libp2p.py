"""Calls and buffers over real libp2p connections on loopback: what the simulated network might be too kind to show."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
from hosts import network, running

from swarmnode.protocols.calls.frames import CALL, REPLY, Frame
from swarmnode.protocols.calls.rpc import PROTOCOL, Rpc, RpcLimits
from swarmnode.protocols.calls.server import RESTING
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.bulk import CHUNK, Bulk, BulkConnection, BulkWant
from swarmnode.protocols.wire import decode, encode

PATIENCE = 30.0  # seconds for a whole test
NORMAL = RpcLimits()


@dataclass(frozen=True)
class Note:
    text: bytes = b""


class Node:
    """Calls and buffers on a host of its own."""

    def __init__(self, limits: RpcLimits) -> None:
        self.network = network()
        self.rpc = Rpc(self.network, limits=limits)
        self.bulk = Bulk(self.network)
        self.rpc.serve("echo", Note, self._echo)

    @property
    def me(self) -> PeerId:
        return self.network.me

    async def _echo(self, peer: PeerId, note: Note) -> Note:
        return note

    async def ask(self, other: Node, method: str = "echo", note: Note = Note(), timeout: float = PATIENCE) -> Note:
        return await self.rpc.call(other.me, method, note, Note, timeout=timeout)


@asynccontextmanager
async def nodes(count: int, limits: RpcLimits = NORMAL) -> AsyncIterator[list[Node]]:
    """Nodes that are all connected to the first."""
    made = [Node(limits) for _ in range(count)]
    async with running(*(part for node in made for part in (node.network, node.rpc, node.bulk))):
        for node in made[1:]:
            await node.network.connect(made[0].network.addresses[0])
        yield made


async def test_handlers_that_wait_delay_no_other_call_of_their_peer() -> None:
    release, waiting = trio.Event(), 0

    async def wait(peer: PeerId, note: Note) -> Note:
        nonlocal waiting
        waiting += 1
        await release.wait()
        return note

    async with nodes(2) as (server, client), trio.open_nursery() as nursery:
        server.rpc.serve("wait", Note, wait)
        for number in range(1, 3 * RESTING):
            nursery.start_soon(client.ask, server, "wait")
            while waiting < number:
                await trio.lowlevel.checkpoint()
            assert (await client.ask(server, note=Note(b"%d" % number))).text == b"%d" % number
        async with trio.open_nursery() as crowd:  # and after a pause, all at once
            for _ in range(3 * RESTING):
                crowd.start_soon(client.ask, server)
        release.set()


async def test_a_cancelled_call_ends_its_handler_on_the_other_side() -> None:
    began, ended = trio.Event(), trio.Event()

    async def wait(peer: PeerId, note: Note) -> Note:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return note

    async with nodes(2) as (server, client):
        server.rpc.serve("wait", Note, wait)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, server, "wait")
            await began.wait()
            nursery.cancel_scope.cancel()
        await ended.wait()
        assert (await client.ask(server, note=Note(b"on"))).text == b"on"  # the stream goes on


def test_a_peer_that_reads_no_answers_is_not_read_from_and_delays_nobody() -> None:
    """Its answers fill its window, then their queue; once it reads, every one of them comes."""
    calls, answer = 60, bytes(128 << 10)

    async def main() -> None:
        async with nodes(3, RpcLimits(queued=1 << 20)) as (server, sulker, other), trio.open_nursery() as nursery:
            carried_out = 0

            async def give(peer: PeerId, note: Note) -> Note:
                nonlocal carried_out
                carried_out += 1
                return Note(answer)

            server.rpc.serve("give", Note, give)
            stream = await sulker.network.open_stream(server.me, PROTOCOL)
            padding = Note(bytes(64 << 10))  # so that what is not read from it is more than its window

            async def ask() -> None:
                for number in range(1, calls + 1):
                    await stream.send_all(frame(encode(Frame(CALL, number, "give", PATIENCE, encode(padding)))))

            nursery.start_soon(ask)
            while carried_out < 8:
                await trio.lowlevel.checkpoint()
            for number in range(100):
                assert (await other.ask(server, note=Note(b"%d" % number))).text == b"%d" % number
            assert carried_out < calls
            reader, answered = FrameReader(stream), set()
            while len(answered) < calls:
                raw = await reader.frame()
                assert raw is not None
                reply = decode(Frame, raw)
                assert reply.kind == REPLY
                answered.add(reply.id)
            assert answered == set(range(1, calls + 1))

    trio.run(main)


async def test_a_fetch_goes_on_from_a_whole_chunk_when_its_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(3).randbytes(40 * CHUNK + 5)
    offsets = []
    serve = BulkConnection._serve

    async def recorded(connection: BulkConnection, want: BulkWant) -> None:
        offsets.append(want.offset)
        await serve(connection, want)

    monkeypatch.setattr(BulkConnection, "_serve", recorded)
    async with nodes(2) as (server, client), trio.open_nursery() as nursery:
        server.bulk.offer(("it",), content)
        late = trio.Event()

        async def break_connection() -> None:
            await late.wait()
            connection = client.network.connections.best(server.me)
            assert connection is not None
            await connection.session.abandon("cut by the test")

        def progress(received: int) -> None:
            if received > 20 * CHUNK:
                late.set()

        nursery.start_soon(break_connection)
        before = client.network.traffic().bytes_in
        assert await client.bulk.fetch(server.me, ("it",), max_size=len(content), progress=progress) == content
        assert client.network.traffic().bytes_in - before < 1.3 * len(content)
    first, second = offsets
    assert first == 0
    assert second >= 20 * CHUNK
    assert second % CHUNK == 0
