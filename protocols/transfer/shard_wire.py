"""What nodes say to one another about shards and on which streams, what that may take of a node, what a store promises.

The calls `shards.have` and `shards.manifest` go by `protocols.calls.rpc`; ShardWant and Piece travel on streams of
`/swarmnode/shards/2`. `shards.py` tells the protocol's story.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmnode.protocols.transfer.shard_manifest import CHUNK, MAX_CHUNKS, ShardId, ShardManifest, chunk_count

PROTOCOL = "/swarmnode/shards/2"
HAVE = "shards.have"
MANIFEST = "shards.manifest"
RUN = 4  # chunks that one answer has at most: 1 MiB, so that a request's own cost is small beside its bytes
RUN_BYTES = RUN * CHUNK
MOST_ASKERS = 16  # peers that a holding names


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
    fetches: int = 3  # shards at once; more wait. With a state in memory, as many streams as one provider serves
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
        if self.size < 0 or count > MAX_CHUNKS or len(self.chunks) > (count + 7) // 8 or len(self.askers) > MOST_ASKERS:
            raise ValueError(f"a holding of {len(self.chunks)} bytes for a shard of {self.size}")
        everything = (1 << count) - 1
        return everything if self.complete else int.from_bytes(self.chunks, "little") & everything


@dataclass(frozen=True)
class Holdings:
    """The answer to Have, in its order."""

    shards: tuple[Holding, ...]


@dataclass(frozen=True)
class WantManifest:
    """`shards.manifest`: asks for the `ShardManifest` of a shard."""

    shard: bytes


@dataclass(frozen=True)
class ShardWant:
    """Asks for `count` chunks in a row, at most RUN."""

    shard: bytes
    index: int
    count: int = 1


@dataclass(frozen=True)
class Piece:
    """`size` raw bytes follow: whole chunks from the first on, up to the first that is not here; -1 where none is."""

    size: int = -1


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

    def put(self, source: Path | memoryview) -> Generator[ShardId | None, None, None]:
        """Take in a file, or bytes, some ms of work a step; gives its id last, and None before. Each step may block.

        Raises NoRoom, or ShardError where it cannot be read. Closed before the last step, it forgets the file.
        """


def parts_of(store: Store, shard: ShardId) -> Iterator[memoryview]:
    """A complete shard part by part, verified, one after the other in the same memory. Raises ShardNotHeld."""
    chunks, first = store.manifest(shard).chunks, 0
    room = memoryview(bytearray(RUN_BYTES))
    while first < chunks:
        size = store.read(shard, first, room)
        yield room[:size]
        first += chunk_count(size)
