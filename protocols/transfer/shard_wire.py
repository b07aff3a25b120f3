"""What nodes say to one another about shards and on which streams, what that may take of a node, what a store promises.

The calls `shards.have` and `shards.manifest` go by `protocols.rpc`; ShardWant and Piece travel on streams of
`/swarmnode/shards/1`. `shards.py` tells the protocol's story.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.transfer.shard_tree import (
    CHUNK,
    MAX_CHUNKS,
    ShardId,
    ShardManifest,
    chunk_count,
    chunk_length,
    proves,
)
from swarmnode.protocols.wire import WireError, decode, encode

PROTOCOL = "/swarmnode/shards/1"
HAVE = "shards.have"
MANIFEST = "shards.manifest"
MAX_MESSAGE = 4096  # bytes of a ShardWant or a Piece
RUN = 4  # chunks that one answer has at most: 1 MiB, so that a request's own cost is small beside its bytes
RUN_BYTES = RUN * CHUNK
ASKERS_TOLD = 16  # peers that a holding names
NO_ROOM = memoryview(bytearray())


class ShardError(Exception):
    """A shard could not be had, kept or read. The text is fit for a person."""


class ShardNotHeld(ShardError):
    """This node does not have the shard, or not that chunk of it."""


class NoRoom(ShardError):
    """The disk or the store's cap has no room for it; nothing that was kept is lost."""


class Unavailable(ShardError):
    """Nobody who can be reached has what is missing. What has arrived is kept; the next fetch goes on from there."""


@dataclass(frozen=True)
class ShardLimits:
    """What shards may take of this node."""

    # serving
    streams: int = 4  # of one peer: one is enough for a fetch, and the old may outlive its successor's opening
    streams_in_all: int = 64  # each holds at most one answer in memory: 64 MiB; the one idle longest makes room
    serve_stall: float = 30.0  # seconds that an answer may wait for a peer that does not read
    asked: int = 64  # shards in one `have`: their bitmaps together stay below 128 KiB
    misses: int = 4096  # shards or chunks that a peer may ask for in vain at once: four data sets of 1000 shards
    misses_refill: float = 64.0  # of these a second
    # announcing
    announced: int = 32  # shards announced in the DHT: half of what the network lets a node announce
    # fetching
    fetches: int = 4  # shards at once; more wait
    sources: int = 16  # providers of one shard at once: each has one answer in memory, and four wait: 20 MiB
    window: tuple[int, int] = (2, 32)  # chunks under way from one provider: two keep it busy, 32 are 8 MiB
    ahead: float = 0.5  # seconds of work to have under way, at the provider's measured rate: a long round trip
    answer: float = 0.25  # seconds that one answer takes at that rate: a slow provider is asked for single chunks
    first_chunk: float = 60.0  # seconds for a chunk before the rate is known: 35 kbit/s, on which nobody trains
    least_wait: float = 5.0  # seconds that a provider may be silent whatever its rate: a loaded machine's pause
    call: float = 10.0  # seconds for `have` and `manifest`
    refresh: float = 3.0  # seconds between looks at what half-complete providers have
    search: float = 15.0  # seconds between searches for further providers
    patience: float = 30.0  # seconds without any provider after which a fetch gives up
    open: float = 10.0  # seconds to open a stream
    idle_streams: int = 2  # kept to one peer after a fetch


LIMITS = ShardLimits()


@dataclass(frozen=True)
class Have:
    """`shards.have`: asks which of these shards the peer has."""

    shards: tuple[bytes, ...]


@dataclass(frozen=True)
class Holding:
    """What a node has of one shard. `size` is that of the whole shard, 0 where it has nothing of it."""

    size: int = 0
    complete: bool = False
    chunks: bytes = b""  # one bit a chunk, the first in the lowest bit of the first byte; empty where complete
    askers: tuple[str, ...] = ()  # peers that asked for it of late, some of them: they will have it soon

    def bits(self) -> int:
        """The chunks as a bit set. Raises ValueError for what no shard can be."""
        count = chunk_count(self.size)
        if self.size < 0 or count > MAX_CHUNKS or len(self.chunks) > (count + 7) // 8 or len(self.askers) > ASKERS_TOLD:
            raise ValueError(f"a holding of {len(self.chunks)} bytes for a shard of {self.size}")
        everything = (1 << count) - 1
        return everything if self.complete else int.from_bytes(self.chunks, "little") & everything


@dataclass(frozen=True)
class Holdings:
    """The answer to Have, in its order."""

    shards: tuple[Holding, ...]


@dataclass(frozen=True)
class WantManifest:
    """`shards.manifest`: asks for size and leaves of a shard."""

    shard: bytes


@dataclass(frozen=True)
class Leaves:
    """The answer to WantManifest."""

    size: int
    leaves: bytes


@dataclass(frozen=True)
class ShardWant:
    """Asks for `count` chunks in a row, at most RUN; with `prove`, which goes for one, for what verifies it alone."""

    shard: bytes
    index: int
    prove: bool = False
    count: int = 1


@dataclass(frozen=True)
class Piece:
    """`size` raw bytes follow: whole chunks from the first on, up to the first that is not here; -1 where none is.

    `of` (the shard's size) and `proof` where asked for.
    """

    size: int = -1
    of: int = 0
    proof: tuple[bytes, ...] = ()


class ShardIntake(Protocol):
    """A file on its way into the store; the calls block."""

    def take(self) -> bool:
        """Copy and hash some more; False when all is read."""

    def finish(self) -> ShardId: ...

    def abandon(self) -> None:
        """Forget it, where `finish` was not reached."""


class Store(Protocol):
    """Where shards are kept: on disk (`node.storage.shardstore`) or in memory.

    All but `holding`, `recent` and `read_now` may block on the disk.
    """

    def holding(self, shard: ShardId) -> Holding:
        """What is here and verified; from memory."""

    def recent(self, limit: int) -> tuple[ShardId, ...]:
        """Complete shards, pinned ones first, then those used last; from memory."""

    def manifest(self, shard: ShardId) -> ShardManifest:
        """Raises ShardNotHeld."""

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        """Read chunks from `index` on into `room`, as many as fit and are here, verified; their bytes.

        Raises ShardNotHeld where the first is not here.
        """

    def read_now(self, shard: ShardId, index: int, room: memoryview) -> int:
        """What `read` gives, where that takes neither the disk nor a hash; else 0. Does not block."""

    def begin(self, manifest: ShardManifest) -> int:
        """Make room for a shard that is being fetched; the bit set of its chunks that are here already and verified.

        Raises NoRoom. Until `finish` or `suspend` it is not evicted.
        """

    def write(self, shard: ShardId, verified: Sequence[tuple[int, memoryview]]) -> None:
        """Keep chunks that fit the manifest: the first one's index, and one or more in a row. Raises NoRoom."""

    def finish(self, shard: ShardId) -> None:
        """All chunks are here: from now on it is a shard like the others. Raises NoRoom."""

    def suspend(self, shard: ShardId) -> None:
        """The fetch ended early; what is here may be continued, or evicted."""

    def drop(self, shard: ShardId) -> None:
        """Delete it where it is here, not pinned, and not being fetched."""

    def intake(self, source: Path) -> ShardIntake:
        """Begin to take in a file. Raises NoRoom, or ShardError where it cannot be read."""


class ShardChannel:
    """A stream to a provider, used for one fetch after another."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._reader = FrameReader(stream, limit=MAX_MESSAGE)
        self.room = NO_ROOM  # where answers are received, one after the other
        self.left_behind = False  # the provider has a better path now

    async def ask(self, wants: list[ShardWant]) -> None:
        await self.stream.send_all(b"".join(frame(encode(want)) for want in wants))

    async def piece(self) -> Piece:
        raw = await self._reader.frame()
        if raw is None:
            raise StreamBroken("the provider ended the stream")
        return decode(Piece, raw, limit=MAX_MESSAGE)

    async def raw(self, size: int) -> memoryview:
        """The next `size` bytes, at most RUN_BYTES, at the beginning of `room`."""
        if len(self.room) < size:
            self.room = memoryview(mmap.mmap(-1, size))  # whole pages: a disk can take chunks from there directly
        if not await self._reader.fill(self.room[:size]):
            raise StreamBroken("the provider ended the stream in the middle of a chunk")
        return self.room[:size]


class ShardChannels:
    """Open streams to providers, kept between fetches."""

    def __init__(self, network: Network, limits: ShardLimits) -> None:
        self._network = network
        self._limits = limits
        self._idle: dict[PeerId, list[ShardChannel]] = {}
        self._in_use: set[ShardChannel] = set()
        self._moves = 0

    async def take(self, peer: PeerId) -> ShardChannel:
        """An idle stream, or a new one. Raises Unreachable or ProtocolUnsupported."""
        idle = self._idle.get(peer)
        if idle:
            channel = idle.pop()
            if not idle:
                del self._idle[peer]
        else:
            moves = self._moves
            channel = ShardChannel(await self._network.open_stream(peer, PROTOCOL, timeout=self._limits.open))
            channel.left_behind = self._moves > moves  # perhaps another peer moved: then a stream is opened in vain
        self._in_use.add(channel)
        return channel

    async def give_back(self, channel: ShardChannel, *, good: bool) -> None:
        """Keep a stream on which nothing is under way; close any other."""
        self._in_use.discard(channel)
        idle = self._idle.setdefault(channel.stream.peer, [])
        if good and not channel.left_behind and len(idle) < self._limits.idle_streams:
            channel.room = NO_ROOM  # no memory while nothing is asked for
            idle.append(channel)
            return
        if not idle:
            del self._idle[channel.stream.peer]
        with trio.CancelScope(shield=True):  # a cancelled task still closes; aclose never waits long
            await channel.stream.aclose()

    async def leave_behind(self, peer: PeerId) -> None:
        """There is a better path to `peer`: close the idle streams, and use none again that is open now."""
        self._moves += 1
        for channel in self._in_use:
            channel.left_behind |= channel.stream.peer == peer
        await self.drop(peer)

    async def drop(self, peer: PeerId) -> None:
        for channel in self._idle.pop(peer, []):
            with trio.CancelScope(shield=True):
                await channel.stream.aclose()

    async def drop_all(self) -> None:
        for peer in list(self._idle):
            await self.drop(peer)

    async def read_one(self, peer: PeerId, shard: ShardId, index: int) -> bytes:
        """One chunk with its proof. Raises NetworkError, or WireError where it is not the chunk asked for."""
        channel = await self.take(peer)
        good = False
        try:
            with trio.move_on_after(self._limits.first_chunk) as scope:
                await channel.ask([ShardWant(shard, index, prove=True)])
                piece = await channel.piece()
                if piece.size >= 0 and not 0 < piece.size == chunk_length(piece.of, index):
                    raise WireError(f"Piece: {piece.size} bytes for chunk {index} of {piece.of} bytes")
                chunk = bytes(await channel.raw(max(piece.size, 0)))
                good = True
            if scope.cancelled_caught:
                raise StreamBroken(f"no chunk within {self._limits.first_chunk:g} s")
        finally:
            await self.give_back(channel, good=good)
        if piece.size < 0:
            raise NetworkError("it does not have the chunk")
        if not proves(shard, piece.of, index, chunk, piece.proof):
            raise WireError("Piece: the proof does not lead to the id")
        return chunk
