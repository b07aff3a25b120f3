"""What a shard is: immutable bytes, cut into chunks, named by a hash over those of its chunks.

    leaf(i) = blake3("swarmnode shard 1 leaf", chunk i)              every chunk but the last has CHUNK bytes
    id      = blake3("swarmnode shard 1 id", size ‖ CHUNK ‖ leaves)  size in 8 bytes, CHUNK in 4, big-endian

Each hash has its own context (blake3's key derivation), so a leaf can never be shown as an id; and size and chunk size
are in the id, so that one id fixes every byte and every boundary.

The manifest is the list of all leaves: 32 bytes for 256 KiB, 512 KiB for the largest shard, so it fits one call. It is
checked against the id once, and then each chunk costs one hash, whoever sends it. CHUNK is 256 KiB: its hash takes 0.03
to 0.1 ms, less than passing it to a worker thread costs; at 1 Mbit/s it takes 2 s.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

CHUNK = 256 * 1024  # bytes
HASH = 32  # bytes
MAX_CHUNKS = 1 << 14  # of one shard, which is 4 GiB: its manifest has 512 KiB; larger things are several shards
MAX_SIZE = CHUNK * MAX_CHUNKS  # bytes

ShardId = bytes  # 32 bytes; people see 64 hex digits

_LEAF = "swarmnode shard 1 leaf"
_ID = "swarmnode shard 1 id"


def leaf(chunk: bytes | bytearray | memoryview) -> bytes:
    """The hash of a chunk, as it stands in the manifest."""
    return blake3(chunk, derive_key_context=_LEAF).digest()


def parse_id(text: str) -> ShardId:
    """The id that 64 hex digits stand for. Raises ValueError."""
    if len(text) != 2 * HASH or not set(text) <= set(string.hexdigits):
        raise ValueError(f"{text[:80]!r} is not a shard id; expected {2 * HASH} hex digits")
    return bytes.fromhex(text.lower())


def chunk_count(size: int) -> int:
    return -(-size // CHUNK)


def bits_of(first: int, count: int) -> int:
    """The bit set of `count` chunks in a row."""
    return ((1 << count) - 1) << first


def run_length(size: int, first: int, count: int = 1) -> int:
    """Bytes of `count` chunks in a row in a shard of `size` bytes, of which the last may be the shard's."""
    return min(count * CHUNK, size - first * CHUNK)


@dataclass(frozen=True)
class ShardManifest:
    """Size and leaves of one shard. Raises ValueError where the two do not fit each other or the limits."""

    size: int  # bytes
    leaves: bytes  # HASH bytes for each chunk, in order

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise ValueError(f"a shard of {self.size} bytes; at most {MAX_SIZE} are allowed")
        if len(self.leaves) != HASH * chunk_count(self.size):
            raise ValueError(f"{len(self.leaves)} bytes of leaves for a shard of {self.size} bytes")

    @classmethod
    def of(cls, content: bytes | bytearray | memoryview) -> ShardManifest:
        """What these bytes are as a shard; hashes them."""
        view = memoryview(content)
        return cls(len(view), b"".join(leaf(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK)))

    @property
    def chunks(self) -> int:
        return chunk_count(self.size)

    def leaf(self, index: int) -> bytes:
        return self.leaves[index * HASH : (index + 1) * HASH]

    @cached_property
    def id(self) -> ShardId:
        """The shard's id; hashes the leaves the first time."""
        head = self.size.to_bytes(8, "big") + CHUNK.to_bytes(4, "big")
        return blake3(head + self.leaves, derive_key_context=_ID).digest()

    def fit(self, first: int, chunks: bytes | memoryview) -> bool:
        """Whether `chunks` are the chunks of this shard from `first` on, whole ones and at least one."""
        count = chunk_count(len(chunks))
        if not 0 < count <= self.chunks - first or first < 0 or len(chunks) != run_length(self.size, first, count):
            return False
        return all(leaf(chunks[at * CHUNK : (at + 1) * CHUNK]) == self.leaf(first + at) for at in range(count))
