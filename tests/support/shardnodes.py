"""Nodes with shards on one simulated network, and peers that answer as they like.

server = await nodes.start("a", holds=CONTENT)
liar = await nodes.liar("b", falsehood)
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import PeerId, Stream
from swarmnode.protocols.runner import Runner, inline
from swarmnode.protocols.transfer.channels import MAX_MESSAGE
from swarmnode.protocols.transfer.shard_fetch import PromiseLog
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardManifest
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    MANIFEST,
    PROTOCOL,
    Have,
    Holding,
    Holdings,
    Piece,
    ShardLimits,
    ShardWant,
    WantManifest,
)
from swarmnode.protocols.transfer.shards import Shards, Standings
from swarmnode.protocols.wire import decode, encode
from swarmnode.testing.simnet import SimNetwork, SimWorld

CONTENT = random.Random(11).randbytes(40 * CHUNK + 12_345)
CHUNKS = 41


MANIFEST_OF_CONTENT = ShardManifest.of(CONTENT)
SHARD = MANIFEST_OF_CONTENT.id


@dataclass
class Node:
    name: str
    network: SimNetwork
    rpc: Rpc
    store: ShardStore
    shards: Shards
    scope: trio.CancelScope

    @property
    def me(self) -> PeerId:
        return self.network.me


class Nodes:
    """Makes nodes with shards on one simulated network."""

    def __init__(self, world: SimWorld, nursery: trio.Nursery, folder: Path) -> None:
        self.world = world
        self._nursery = nursery
        self._folder = folder

    async def start(
        self,
        name: str,
        *,
        holds: bytes | None = None,
        cap: int = 1 << 30,
        limits: ShardLimits | None = None,
        runner: Runner = inline,
        promises: PromiseLog | None = None,
        standings: Standings | None = None,
    ) -> Node:
        network = self.world.node(name)
        rpc = Rpc(network)
        store = ShardStore(self._folder / name, cap=cap)
        shards = Shards(
            network,
            rpc,
            store,
            runner=runner,
            limits=limits or ShardLimits(),
            seed=len(name),
            promises=promises,
            standings=standings,
        )
        node = Node(name, network, rpc, store, shards, trio.CancelScope())
        await self._nursery.start(self._run, node)
        hub = self.world.node("hub")  # has no shards; through it the DHT is reached
        if not hub.up:
            await self._nursery.start(hub.run)
        await network.connect(hub.me)
        if holds is not None:
            source = self._folder / f"{name}.source"
            source.write_bytes(holds)
            await shards.put(source)
            await trio.sleep(0.1)  # until it is announced
        return node

    async def liar(self, name: str, answer: Answer, *, holding: Holding | None = None) -> SimNetwork:
        """A peer that says it has CONTENT and answers each ShardWant as `answer(stream, want)` does."""
        network = self.world.node(name)
        rpc = Rpc(network)

        async def have(_peer: PeerId, request: Have) -> Holdings:
            return Holdings((holding or Holding(len(CONTENT), True),) * len(request.shards))

        async def manifest(_peer: PeerId, _request: WantManifest) -> ShardManifest:
            return MANIFEST_OF_CONTENT

        async def serve(stream: Stream) -> None:
            reader = FrameReader(stream, limit=MAX_MESSAGE)
            while (raw := await reader.frame()) is not None:
                await answer(stream, decode(ShardWant, raw))

        rpc.serve(HAVE, Have, have)
        rpc.serve(MANIFEST, WantManifest, manifest)
        network.serve(PROTOCOL, serve)
        await self._nursery.start(network.run)
        await self._nursery.start(rpc.run)
        return network

    async def _run(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        with node.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.network.run)
                await nursery.start(node.rpc.run)
                await nursery.start(node.shards.run)
                task_status.started()


Answer = Callable[[Stream, ShardWant], Awaitable[None]]


def chunk(index: int, count: int = 1) -> bytes:
    return CONTENT[index * CHUNK : (index + count) * CHUNK]


async def truth(stream: Stream, want: ShardWant) -> None:
    chunks = chunk(want.index, want.count)
    await stream.send_all(frame(encode(Piece(len(chunks)))) + chunks)


async def falsehood(stream: Stream, want: ShardWant) -> None:
    await stream.send_all(frame(encode(Piece(len(chunk(want.index))))) + bytes(len(chunk(want.index))))


def is_whole(node: Node) -> bool:
    return node.store.holding(SHARD).complete and node.store.path(SHARD).read_bytes() == CONTENT
