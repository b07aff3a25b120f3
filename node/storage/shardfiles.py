"""The files of the shard store: how they are read and written, and what their errors become.

A `.tree` is the shard's size and the hashes of its chunks, whole or not there. A `.part` says nothing about which
chunks it has: when a fetch goes on, those that are there are hashed again (2 GB/s and more), which costs less than
syncing a bitmap with each chunk would, and believes nobody.

All of it blocks.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swarmnode.node.storage.datadir import DataDirError, NoSpace, explain
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardManifest, leaf
from swarmnode.protocols.transfer.shard_wire import NoRoom, ShardError

BLOCK = 4096  # bytes: what is written past the cache has a multiple of it
SIZE = 8  # bytes before the leaves in a tree: the shard's size


class StoreFull(NoRoom, NoSpace):
    """The cap or the disk leaves no room, and nothing may be evicted for it."""


class Unreadable(ShardError, DataDirError):
    """The disk failed, or refuses this user."""


def explained(error: OSError | DataDirError, path: Path) -> ShardError:
    """`error`, met at `path`, as what the callers of the store expect."""
    said = explain(error, path) if isinstance(error, OSError) else error
    return StoreFull(str(said)) if isinstance(said, NoSpace) else Unreadable(str(said))


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """What goes wrong with the disk in the block, as the callers of the store expect it."""
    try:
        yield
    except (OSError, DataDirError) as error:
        raise explained(error, path) from error


def read_tree(path: Path) -> ShardManifest:
    """Raises OSError, or ValueError where it is torn."""
    raw = path.read_bytes()
    return ShardManifest(int.from_bytes(raw[:SIZE], "big"), raw[SIZE:])


def write_tree(path: Path, manifest: ShardManifest) -> None:
    """Whole or not at all, but not synced: what a power cut takes is hashed again or asked of peers again."""
    beside = path.with_name(f".{path.name}.{threading.get_ident()}")
    beside.write_bytes(manifest.size.to_bytes(SIZE, "big") + manifest.leaves)
    beside.chmod(0o600)
    os.replace(beside, path)


def hashed(path: Path) -> ShardManifest:
    """The manifest of what a file contains. Raises OSError, or ValueError where it is too large for a shard."""
    leaves = bytearray()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            leaves += leaf(chunk)
        return ShardManifest(file.tell(), bytes(leaves))


def verified_chunks(part: Path, manifest: ShardManifest) -> int:
    """Make the file where there is none, and hash the chunks that it has; the bit set of the good ones."""
    have = 0
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        os.ftruncate(file.fileno(), manifest.size)
        take_room(file.fileno(), manifest.size)
        position = 0
        while position < manifest.size:
            try:
                position = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest was never written
                    break
                raise
            index = position // CHUNK
            if manifest.fit(index, os.pread(file.fileno(), CHUNK, index * CHUNK)):
                have |= 1 << index
            position = (index + 1) * CHUNK
    return have


def write_pieces(path: Path, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Write (offset, bytes) to an existing file, past the kernel's cache where file system, size and memory allow that.

    Cached pages must be found, filled and written back, which costs the processor more than receiving the bytes does
    (10 to 150 ms for 64 MB on a virtual machine, against 4 ms), and 4 GiB of them would push out everything else.
    Raises OSError.
    """
    rest = [*pieces]
    if hasattr(os, "O_DIRECT"):  # macOS has none
        fitting = [piece for piece in pieces if len(piece[1]) % BLOCK == 0]
        try:
            _write(path, fitting, os.O_DIRECT)
            rest = [piece for piece in pieces if len(piece[1]) % BLOCK]
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system cannot, or not from that memory
                raise
    _write(path, rest)


def _write(path: Path, pieces: Sequence[tuple[int, memoryview]], how: int = 0) -> None:
    if not pieces:
        return
    descriptor = os.open(path, os.O_WRONLY | how)
    try:
        for offset, piece in pieces:
            if os.pwrite(descriptor, piece, offset) != len(piece):
                raise OSError(errno.ENOSPC, "only a part was written")
    finally:
        os.close(descriptor)


def take_room(descriptor: int, size: int) -> None:
    """Have the disk set `size` bytes aside now, so that it is not found full in the middle of a fetch."""
    if size and hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # some file systems cannot
                raise
