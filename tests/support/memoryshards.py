"""Shards kept in memory, for simulations: what `node.storage.shardstore` promises, without a disk, a cap or an end."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from swarmnode.protocols.transfer.shard_manifest import ShardId, ShardManifest
from swarmnode.protocols.transfer.shard_memory import MemoryShards
from swarmnode.protocols.transfer.shard_wire import ShardError


class UnboundedShards(MemoryShards):
    """Takes in files, and whatever a fetch brings."""

    def begin(self, manifest: ShardManifest) -> int:
        self.expect(manifest.id, memoryview(bytearray(manifest.size)))
        return super().begin(manifest)

    def put(self, source: Path | memoryview) -> Generator[ShardId | None, None, None]:
        try:
            content = source.read_bytes() if isinstance(source, Path) else bytes(source)
        except OSError as error:
            raise ShardError(f"{source}: cannot be read: {error.strerror}") from error
        yield self.keep(content)

    def keep(self, content: bytes) -> ShardId:
        """Have these bytes as a complete shard."""
        manifest = ShardManifest.of(content)
        self.offer(manifest, memoryview(content))
        return manifest.id
