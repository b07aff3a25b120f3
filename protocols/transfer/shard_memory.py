"""Shards that live in memory for as long as their owner wants them: the states of a run.

They are served and fetched as those on disk are, and need neither a disk nor a cap: the owner brings the memory, so a
peer cannot make this node take any. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.protocols.transfer.shard_manifest import (
    CHUNK,
    ShardId,
    ShardManifest,
    bits_of,
    chunk_count,
    leaf,
    run_length,
)
from swarmnode.protocols.transfer.shard_wire import Holding, NoRoom, ShardNotHeld


@dataclass
class _InMemory:
    content: memoryview
    manifest: ShardManifest | None = None  # None: it is expected, and no fetch has begun
    have: int = 0  # bit set of chunks that are here

    @property
    def complete(self) -> bool:
        return self.manifest is not None and self.have == bits_of(0, self.manifest.chunks)


class MemoryShards:
    """Implements `Store`, but takes in no files."""

    def __init__(self) -> None:
        self._kept: dict[ShardId, _InMemory] = {}

    def __contains__(self, shard: ShardId) -> bool:
        """Whether the shard is here, whole or not, or is expected."""
        return shard in self._kept

    def offer(self, manifest: ShardManifest, content: memoryview) -> None:
        """Have these bytes as a complete shard. They must not change before `drop`."""
        self._kept[manifest.id] = _InMemory(content, manifest, bits_of(0, manifest.chunks))

    def expect(self, shard: ShardId, room: memoryview) -> None:
        """Let a fetch of `shard` fill `room`, all zeros, of just its size; nothing changes where the shard is here."""
        self._kept.setdefault(shard, _InMemory(room))

    def content(self, shard: ShardId) -> memoryview:
        """The bytes of a complete shard: the memory that `offer` or `expect` was given for it. Raises ShardNotHeld."""
        kept = self._kept.get(shard)
        if kept is None or not kept.complete:
            raise ShardNotHeld(f"shard {shard.hex()} is not here, or not all of it")
        return kept.content

    def recent(self, limit: int) -> tuple[ShardId, ...]:
        return tuple(shard for shard, kept in reversed(self._kept.items()) if kept.complete)[:limit]

    def holding(self, shard: ShardId) -> Holding:
        kept = self._kept.get(shard)
        if kept is None or not (kept.complete or kept.have):
            return Holding()
        chunks = b"" if kept.complete else kept.have.to_bytes((chunk_count(len(kept.content)) + 7) // 8, "little")
        return Holding(len(kept.content), kept.complete, chunks)

    def manifest(self, shard: ShardId) -> ShardManifest:
        kept = self._kept.get(shard)
        if kept is None or kept.manifest is None:
            raise ShardNotHeld(f"shard {shard.hex()} is not here")
        return kept.manifest

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        size = self.read_now(shard, index, room)
        if not size:
            raise ShardNotHeld(f"chunk {index} of shard {shard.hex()} is not here")
        return size

    def read_now(self, shard: ShardId, index: int, room: memoryview) -> int:
        kept = self._kept.get(shard)
        count = 0
        while kept is not None and count < len(room) // CHUNK and kept.have >> (index + count) & 1:
            count += 1
        if kept is None or not count:
            return 0
        size = run_length(len(kept.content), index, count)
        room[:size] = kept.content[index * CHUNK : index * CHUNK + size]
        return size

    def begin(self, manifest: ShardManifest) -> int:
        """As `Store.begin`. Chunks of zeros are here from the beginning, so they need not travel."""
        kept = self._kept.get(manifest.id)
        if kept is None or manifest.size != len(kept.content):
            raise NoRoom(f"shard {manifest.id.hex()} of {manifest.size} bytes is not expected here")
        if kept.manifest is None:
            zeros = {size: leaf(bytes(size)) for size in {CHUNK, run_length(manifest.size, manifest.chunks - 1)}}
            for index in range(manifest.chunks):
                if manifest.leaf(index) == zeros[run_length(manifest.size, index)]:
                    kept.have |= 1 << index
            kept.manifest = manifest
        return kept.have

    def write(self, shard: ShardId, verified: Sequence[tuple[int, memoryview]]) -> None:
        kept = self._kept[shard]
        for index, chunks in verified:
            if not bits_of(index, chunk_count(len(chunks))) & ~kept.have:
                continue  # it was offered here meanwhile, and is not to be written to
            kept.content[index * CHUNK : index * CHUNK + len(chunks)] = chunks
            kept.have |= bits_of(index, chunk_count(len(chunks)))

    def finish(self, shard: ShardId) -> None:
        """Nothing is left to do."""

    def suspend(self, shard: ShardId) -> None:
        """What is here stays for the next fetch."""

    def drop(self, shard: ShardId) -> None:
        self._kept.pop(shard, None)

    def put(self, source: Path | memoryview) -> Generator[ShardId | None, None, None]:
        raise NoRoom(f"{source}: files are kept on disk")
