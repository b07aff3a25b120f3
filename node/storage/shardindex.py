"""The folder of the shard store: which shards it has, which of them go when room is short, and its files.

    shards/<id>.shard   a complete shard; its modification time is when it was last used
    shards/<id>.part    one that is being fetched: verified chunks at their places, room for the others
    shards/<id>.tree    size and leaf hashes of either
    shards/<id>.pin     empty: do not evict
    shards/.…           on its way in; left over where the daemon was killed

The folder is the index: at start it is listed, nothing is read. What is in the files is `shardstore`'s.

The cap counts whole sizes, half-fetched shards included, so a fetch that began has its room. Where room is short,
half-fetched shards that nobody fetches go first, then unpinned ones, the one used longest ago first. Where even that
would not do, nothing is evicted and the newcomer is refused. Open files stay readable after eviction.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from swarmnode.node.storage.datadir import DataDirError, NoSpace, explain, sync_directory
from swarmnode.protocols.transfer.shard_tree import CHUNK, ShardId, ShardManifest, chunk_count, leaf
from swarmnode.protocols.transfer.shard_wire import Holding, NoRoom, ShardError, ShardNotHeld

MARGIN = 64 << 20  # bytes of the disk that shards leave free: logs and checkpoints need some
STAMP_EVERY = 60.0  # seconds between two notes on disk that a shard is in use

_NAME = re.compile(r"([0-9a-f]{64})\.(shard|part|tree|pin)")

BATCH = 32  # chunks that one step of an intake copies: some ms, so that it can be cancelled between
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


def unusable(error: OSError, path: Path, what: str) -> ShardError:
    """`error`, met at a file that a person named; `what` cannot be done with it."""
    kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unreadable
    return kind(f"{path} cannot be {what}: {error.strerror or error}")


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
            if manifest.fits(index, os.pread(file.fileno(), CHUNK, index * CHUNK)):
                have |= 1 << index
            position = (index + 1) * CHUNK
    return have


def write_all(path: Path, pieces: Sequence[tuple[int, memoryview]]) -> None:
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


class Admitting(Protocol):
    """What an intake needs of the store."""

    def admit(self, copy: Path, manifest: ShardManifest) -> None: ...

    def discard(self, copy: Path) -> None: ...


class FileIntake:
    """A file that is copied into the store and hashed on the way."""

    def __init__(self, store: Admitting, source: BinaryIO, copy: BinaryIO, path: Path, size: int) -> None:
        self._store = store
        self._source = source
        self._copy = copy
        self._path = path
        self._size = size  # bytes for which there is room
        self._leaves = bytearray()

    def take(self) -> bool:
        """Copy and hash some more; False when all is read. Raises NoRoom or Unreadable."""
        try:
            for _ in range(BATCH):
                chunk = self._source.read(CHUNK)
                if not chunk:
                    return False
                if self._copy.tell() + len(chunk) > self._size:
                    raise Unreadable(f"{self._source.name}: grew while it was read; put it again when it is finished")
                self._copy.write(chunk)
                self._leaves += leaf(chunk)
        except OSError as error:
            raise explained(error, self._path) from error
        return True

    def finish(self) -> ShardId:
        """Sync it and let it be a shard. Raises NoRoom or Unreadable."""
        try:
            self._copy.flush()
            os.fsync(self._copy.fileno())
            manifest = ShardManifest(self._copy.tell(), bytes(self._leaves))
            self._store.admit(self._path, manifest)
        except (OSError, DataDirError) as error:
            raise explained(error, self._path) from error
        return manifest.id

    def abandon(self) -> None:
        """Close the files; delete the copy where it was not finished."""
        self._source.close()
        with contextlib.suppress(OSError):  # what it could not flush is deleted here
            self._copy.close()
        self._store.discard(self._path)


@dataclass(frozen=True)
class Kept:
    """One shard in the store, as a person sees it."""

    shard: ShardId
    size: int  # bytes
    chunks: int
    complete: bool
    pinned: bool
    used: float  # seconds since the epoch
    fetching: bool


@dataclass(frozen=True)
class Collected:
    """What a collection freed."""

    shards: tuple[ShardId, ...]
    size: int  # bytes


@dataclass
class ShardEntry:
    """One shard in the index."""

    size: int
    complete: bool
    used: float
    pinned: bool = False
    fetches: int = 0  # in progress; more than none keeps it from being evicted
    have: int = 0  # bit set of verified chunks, where it is not complete
    stamped: float = 0.0  # when its use was last noted on disk
    checked: int = 0  # bit set of chunks whose bytes on disk were verified since then


class ShardIndex:
    """The shards under one folder, at most `cap` bytes of them. Opening raises Unreadable.

    `clock` gives seconds since the epoch. Methods may be called from any thread; all block but those that say so.
    """

    def __init__(self, folder: Path, *, cap: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.cap = cap
        self._clock = clock
        self._lock = threading.RLock()  # held for looks at the index, never for reading or writing chunks
        self._entries: dict[ShardId, ShardEntry] = {}
        self._taking_in: dict[Path, int] = {}  # files on their way in, and the bytes reserved for them
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._list()
        except OSError as error:
            raise explained(error, folder) from error

    def _list(self) -> None:
        """Make the index from the folder; files that belong to nothing are deleted."""
        found: dict[str, dict[str, os.stat_result]] = {}
        with os.scandir(self.folder) as files:
            for file in files:
                named = _NAME.fullmatch(file.name)
                if named is not None:
                    found.setdefault(named[1], {})[named[2]] = file.stat(follow_symlinks=False)
                elif file.name.startswith("."):
                    os.unlink(file.path)
        for name, files_of in found.items():
            whole = files_of.get("shard")
            content = whole or (files_of.get("part") if "tree" in files_of else None)
            if content is not None:
                entry = ShardEntry(content.st_size, whole is not None, content.st_mtime, pinned="pin" in files_of)
                self._entries[bytes.fromhex(name)] = entry
            for suffix in files_of:
                if content is None or (suffix == "part" and whole is not None):
                    (self.folder / f"{name}.{suffix}").unlink()

    # -- looking; from memory

    def holding(self, shard: ShardId) -> Holding:
        """What is here and verified. Does not block."""
        entry = self._entries.get(shard)
        if entry is None or not (entry.complete or entry.have):
            return Holding()
        if entry.complete:
            return Holding(entry.size, True)
        return Holding(entry.size, False, entry.have.to_bytes((chunk_count(entry.size) + 7) // 8, "little"))

    def recent(self, limit: int) -> tuple[ShardId, ...]:
        """Complete shards, pinned ones first, then those used last. Does not block."""
        with self._lock:
            whole = [(not entry.pinned, -entry.used, shard) for shard, entry in self._entries.items() if entry.complete]
        return tuple(shard for _, _, shard in sorted(whole)[:limit])

    def kept(self) -> tuple[Kept, ...]:
        """All that is here, the one used last first. Does not block."""
        with self._lock:
            listed = [
                Kept(
                    shard,
                    entry.size,
                    chunk_count(entry.size) if entry.complete else entry.have.bit_count(),
                    entry.complete,
                    entry.pinned,
                    entry.used,
                    entry.fetches > 0,
                )
                for shard, entry in self._entries.items()
            ]
        return tuple(sorted(listed, key=lambda kept: (-kept.used, kept.shard)))

    @property
    def used(self) -> int:
        """Bytes that count against the cap. Does not block."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values()) + sum(self._taking_in.values())

    def path(self, shard: ShardId) -> Path:
        """The file of a complete shard, to be opened at once and never written. Raises ShardNotHeld. Does not block."""
        entry = self._entries.get(shard)
        if entry is None or not entry.complete:
            raise ShardNotHeld(f"shard {shard.hex()} is not here, or not all of it")
        return self._file(shard, "shard")

    # -- keeping and losing

    def pin(self, shard: ShardId, pinned: bool = True) -> None:
        """Keep a shard whatever room is needed, or no longer. Raises ShardNotHeld, NoRoom or Unreadable."""
        path = self._file(shard, "pin")
        with self._lock:
            entry = self._entries.get(shard)
            if entry is None:
                raise ShardNotHeld(f"shard {shard.hex()} is not here; get it first")
            try:
                if pinned:
                    path.touch(mode=0o600)
                else:
                    path.unlink(missing_ok=True)
                sync_directory(self.folder)
            except OSError as error:
                raise explained(error, path) from error
            entry.pinned = pinned

    def drop(self, shard: ShardId) -> None:
        """Delete a shard, unless it is pinned or being fetched."""
        with self._lock:
            entry = self._entries.get(shard)
            if entry is not None and not entry.pinned and not entry.fetches:
                self._forget(shard)

    def collect(self, *, unpinned: bool = False) -> Collected:
        """Delete half-fetched shards that nobody fetches and what is over the cap; `unpinned`: all but the pinned."""
        with self._lock:
            doomed = [
                shard
                for shard, entry in self._entries.items()
                if not entry.fetches and not entry.pinned and (unpinned or not entry.complete)
            ]
            size = sum(self._entries[shard].size for shard in doomed)
            for shard in doomed:
                self._forget(shard)
            excess = self._evictable(max(0, self.used - self.cap)) or []
            size += sum(self._entries[shard].size for shard in excess)
            for shard in excess:
                self._forget(shard)
        return Collected((*doomed, *excess), size)

    def _make_room(self, size: int) -> None:
        """Evict until `size` more bytes fit. Raises StoreFull, with nothing evicted, where they cannot."""
        over = self.used + size - self.cap
        free = os.statvfs(self.folder)
        short = size + MARGIN - free.f_bavail * free.f_frsize
        doomed = self._evictable(max(over, short))
        if doomed is None:
            why = (
                f"the cap of {self.cap} bytes" if over > short else f"the disk, of which {MARGIN >> 20} MiB stay free,"
            )
            raise StoreFull(
                f"{self.folder}: {size} bytes more do not fit: {why} leaves no room, and the rest is pinned or in use. "
                "Unpin or collect shards (swarmnode shards ls, gc), or raise the cap."
            )
        for shard in doomed:
            self._forget(shard)

    def _evictable(self, size: int) -> list[ShardId] | None:
        """The shards to evict for `size` bytes, none too many; None where all together do not suffice."""
        candidates = sorted(
            (entry.complete, entry.used, shard)
            for shard, entry in self._entries.items()
            if not entry.pinned and not entry.fetches
        )
        chosen: list[ShardId] = []
        for _, _, shard in candidates:
            if size <= 0:
                break
            chosen.append(shard)
            size -= self._entries[shard].size
        return chosen if size <= 0 else None

    def _forget(self, shard: ShardId) -> None:
        with self._lock:
            self._entries.pop(shard, None)
            for suffix in ("shard", "part", "pin", "tree"):  # the tree last: without it the others mean nothing
                self._file(shard, suffix).unlink(missing_ok=True)

    def _damaged(self, shard: ShardId) -> None:
        """The disk changed a shard: it is as if half fetched, and fetching it again replaces what is bad."""
        with self._lock:
            entry = self._entries.get(shard)
            if entry is not None:
                if entry.complete:
                    os.replace(self._file(shard, "shard"), self._file(shard, "part"))
                entry.complete, entry.have, entry.checked = False, 0, 0

    def _stamp(self, shard: ShardId, entry: ShardEntry) -> None:
        """The shard is in use now; from time to time the disk is told."""
        entry.used = self._clock()
        if entry.used - entry.stamped >= STAMP_EVERY:
            entry.stamped, entry.checked = entry.used, 0
            if entry.complete:
                with contextlib.suppress(FileNotFoundError):  # evicted in this moment
                    os.utime(self._file(shard, "shard"), (entry.used, entry.used))

    def _file(self, shard: ShardId, suffix: str) -> Path:
        return self.folder / f"{shard.hex()}.{suffix}"
