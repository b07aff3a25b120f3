"""Shards kept in memory, for simulations: what `node.storage.shardstore` promises, without a disk, a cap or an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.protocols.transfer.shard_tree import (
    CHUNK,
    ShardId,
    ShardManifest,
    bits_of,
    chunk_count,
    leaf,
    run_length,
)
from swarmnode.protocols.transfer.shard_wire import Holding, ShardError, ShardNotHeld


@dataclass
class Kept:
    manifest: ShardManifest
    content: bytearray
    have: int  # bit set of chunks that are here

    @property
    def complete(self) -> bool:
        return self.have == (1 << self.manifest.chunks) - 1


class MemoryShards:
    """Implements `Store`."""

    def __init__(self) -> None:
        self._kept: dict[ShardId, Kept] = {}

    def holding(self, shard: ShardId) -> Holding:
        kept = self._kept.get(shard)
        if kept is None:
            return Holding()
        chunks = b"" if kept.complete else kept.have.to_bytes((kept.manifest.chunks + 7) // 8, "little")
        return Holding(kept.manifest.size, kept.complete, chunks)

    def recent(self, limit: int) -> tuple[ShardId, ...]:
        return tuple(shard for shard, kept in reversed(self._kept.items()) if kept.complete)[:limit]

    def manifest(self, shard: ShardId) -> ShardManifest:
        return self._of(shard).manifest

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        kept = self._of(shard)
        count = 0
        while count < len(room) // CHUNK and kept.have >> (index + count) & 1:
            count += 1
        if not count:
            raise ShardNotHeld(f"chunk {index} of shard {shard.hex()} is not here")
        size = run_length(kept.manifest.size, index, count)
        room[:size] = kept.content[index * CHUNK : index * CHUNK + size]
        return size

    def read_now(self, shard: ShardId, index: int, room: memoryview) -> int:
        return 0

    def begin(self, manifest: ShardManifest) -> int:
        return self._kept.setdefault(manifest.id, Kept(manifest, bytearray(manifest.size), 0)).have

    def write(self, shard: ShardId, verified: Sequence[tuple[int, memoryview]]) -> None:
        kept = self._of(shard)
        for index, chunks in verified:
            kept.content[index * CHUNK : index * CHUNK + len(chunks)] = chunks
            kept.have |= bits_of(index, chunk_count(len(chunks)))

    def finish(self, shard: ShardId) -> None:
        pass

    def suspend(self, shard: ShardId) -> None:
        pass

    def drop(self, shard: ShardId) -> None:
        self._kept.pop(shard, None)

    def intake(self, source: Path) -> MemoryIntake:
        try:
            return MemoryIntake(self, source.read_bytes())
        except OSError as error:
            raise ShardError(f"{source}: cannot be read: {error.strerror}") from error

    def keep(self, content: bytes) -> ShardId:
        """Have these bytes as a complete shard."""
        leaves = b"".join(leaf(content[at : at + CHUNK]) for at in range(0, len(content), CHUNK))
        manifest = ShardManifest(len(content), leaves)
        self._kept[manifest.id] = Kept(manifest, bytearray(content), (1 << manifest.chunks) - 1)
        return manifest.id

    def _of(self, shard: ShardId) -> Kept:
        try:
            return self._kept[shard]
        except KeyError:
            raise ShardNotHeld(f"shard {shard.hex()} is not here") from None


class MemoryIntake:
    """Implements `ShardIntake`, in one step."""

    def __init__(self, store: MemoryShards, content: bytes) -> None:
        self._store = store
        self._content = content

    def take(self) -> bool:
        return False

    def finish(self) -> ShardId:
        return self._store.keep(self._content)

    def abandon(self) -> None:
        pass
