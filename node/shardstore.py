"""Shards on disk: files named by their ids, under a cap, readable again after any crash.

    shards/<id>.shard   a complete shard; its modification time is when it was last used
    shards/<id>.part    one that is being fetched: verified chunks at their places, room for the others
    shards/<id>.tree    size and leaf hashes of either
    shards/<id>.pin     empty: do not evict
    shards/.…           on its way in; left over where the daemon was killed

The folder is the index: at start it is listed, nothing is read. A `.shard` was synced before it got that name; its
`.tree` can be made again from it. A `.part` says nothing about which chunks it has: when the fetch goes on, the
chunks that are there are hashed again (2 GB/s), which costs less than syncing a bitmap with each chunk would, and
believes nobody.

The cap counts whole sizes, half-fetched shards included, so a fetch that began has its room. Where room is short,
half-fetched shards that nobody fetches go first, then unpinned ones, the one used longest ago first. Where even that
would not do, nothing is evicted and the newcomer is refused. Open files stay readable after eviction.

All methods block but those that say so; they may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from swarmnode.node.datadir import DataDirError, sync_directory
from swarmnode.node.shardfiles import (
    FileIntake,
    StoreFull,
    explained,
    hashed,
    read_tree,
    verified_chunks,
    write_tree,
)
from swarmnode.protocols.shard_tree import CHUNK, MAX_SIZE, Manifest, ShardId, chunk_count
from swarmnode.protocols.shard_wire import Holding, NotHeld

MARGIN = 64 << 20  # bytes of the disk that shards leave free: logs and checkpoints need some
STAMP_EVERY = 60.0  # seconds between two notes on disk that a shard is in use
TREES = 16  # manifests kept in memory: 8 MiB of the largest

_NAME = re.compile(r"([0-9a-f]{64})\.(shard|part|tree|pin)")


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
class _Entry:
    size: int
    complete: bool
    used: float
    pinned: bool = False
    fetches: int = 0  # in progress; more than none keeps it from being evicted
    have: int = 0  # bit set of verified chunks, where it is not complete
    stamped: float = 0.0


class ShardStore:
    """The shards under one folder, at most `cap` bytes of them. Opening raises Unreadable.

    `clock` gives seconds since the epoch.
    """

    def __init__(self, folder: Path, *, cap: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.cap = cap
        self._clock = clock
        self._lock = threading.RLock()  # held for looks at the index, never for reading or writing chunks
        self._entries: dict[ShardId, _Entry] = {}
        self._taking_in: dict[Path, int] = {}  # files on their way in, and the bytes reserved for them
        self._trees: OrderedDict[ShardId, Manifest] = OrderedDict()
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
                entry = _Entry(content.st_size, whole is not None, content.st_mtime, pinned="pin" in files_of)
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
        """The file of a complete shard, to be opened at once and never written. Raises NotHeld. Does not block."""
        entry = self._entries.get(shard)
        if entry is None or not entry.complete:
            raise NotHeld(f"shard {shard.hex()} is not here, or not all of it")
        return self._file(shard, "shard")

    # -- reading

    def manifest(self, shard: ShardId) -> Manifest:
        """Size and leaves, checked against the id. Raises NotHeld or Unreadable."""
        with self._lock:
            known = self._trees.pop(shard, None)
            if known is not None:
                self._trees[shard] = known
                return known
        if shard not in self._entries:
            raise NotHeld(f"shard {shard.hex()} is not here")
        try:
            manifest = read_tree(self._file(shard, "tree"))
            if manifest.id != shard:
                raise ValueError("its tree has another root")
        except (FileNotFoundError, ValueError):
            manifest = self._hashed_again(shard)
        except OSError as error:
            raise explained(error, self._file(shard, "tree")) from error
        self._remember(manifest)
        return manifest

    def read(self, shard: ShardId, index: int) -> bytes:
        """Chunk `index`, verified. Raises NotHeld, also where the disk gives other bytes than were stored."""
        entry = self._entries.get(shard)
        if entry is None or not (entry.complete or entry.have >> index & 1):
            raise NotHeld(f"chunk {index} of shard {shard.hex()} is not here")
        manifest = self.manifest(shard)
        if index >= manifest.chunks:
            raise NotHeld(f"shard {shard.hex()} has {manifest.chunks} chunks")
        try:
            with self._opened(shard, entry) as file:
                chunk = os.pread(file.fileno(), CHUNK, index * CHUNK)
        except FileNotFoundError:
            raise NotHeld(f"shard {shard.hex()} was evicted in this moment") from None
        except OSError as error:
            raise explained(error, self._file(shard, "shard")) from error
        if not manifest.fits(index, chunk):
            self._damaged(shard)
            raise NotHeld(f"shard {shard.hex()}: the disk changed chunk {index}; fetch the shard again to mend it")
        self._stamp(shard, entry)
        return chunk

    def export(self, shard: ShardId, target: Path) -> None:
        """Copy a complete shard to a file, which appears whole and verified. Raises NotHeld, NoRoom or Unreadable."""
        self.path(shard)
        manifest = self.manifest(shard)
        try:
            descriptor, beside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    for index in range(manifest.chunks):
                        file.write(self.read(shard, index))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, target)
            except BaseException:
                os.unlink(beside)
                raise
        except OSError as error:
            raise explained(error, target) from error

    # -- fetching

    def begin(self, manifest: Manifest) -> int:
        """Make room for a shard; the bit set of verified chunks that are here already. Raises NoRoom or Unreadable.

        Until as many calls of `finish` or `suspend`, it is not evicted.
        """
        shard = manifest.id
        with self._lock:
            entry = self._entries.get(shard)
            if entry is None:
                self._make_room(manifest.size)
                entry = self._entries[shard] = _Entry(manifest.size, False, self._clock())
                fresh = True
            else:
                fresh = False
            entry.fetches += 1
        try:
            if not entry.complete:
                write_tree(self._file(shard, "tree"), manifest)
                have = verified_chunks(self._file(shard, "part"), manifest)
                with self._lock:
                    entry.have |= have
        except (OSError, DataDirError) as error:
            self.suspend(shard)
            if fresh:
                self._forget(shard)
            raise explained(error, self._file(shard, "part")) from error
        self._remember(manifest)
        return (1 << manifest.chunks) - 1 if entry.complete else entry.have

    def write(self, shard: ShardId, index: int, chunk: bytes | memoryview) -> bool:
        """Keep a chunk of a shard that was begun; False, and nothing kept, where it is not the right one.

        Raises NoRoom or Unreadable; what was written before stays good.
        """
        manifest = self.manifest(shard)
        if not manifest.fits(index, chunk):
            return False
        path = self._file(shard, "part")
        try:
            with open(path, "r+b", buffering=0) as file:
                if os.pwrite(file.fileno(), chunk, index * CHUNK) != len(chunk):
                    raise OSError(errno.ENOSPC, "only a part was written")
        except OSError as error:
            raise explained(error, path) from error
        with self._lock:
            self._entries[shard].have |= 1 << index
        return True

    def finish(self, shard: ShardId) -> None:
        """All chunks were written: sync and rename, after which the shard is complete. Raises NoRoom or Unreadable."""
        entry = self._entries[shard]
        part = self._file(shard, "part")
        try:
            if not entry.complete:
                with open(part, "r+b") as file:
                    os.fsync(file.fileno())
                os.replace(
                    part, self._file(shard, "shard")
                )  # a power cut may undo this: all of it is then hashed again
            part.unlink(missing_ok=True)  # where the same shard was put meanwhile
        except OSError as error:
            raise explained(error, part) from error
        with self._lock:
            entry.complete, entry.used = True, self._clock()
            entry.fetches -= 1

    def suspend(self, shard: ShardId) -> None:
        """A fetch ended early; what is here can be continued."""
        with self._lock:
            entry = self._entries.get(shard)
            if entry is not None and entry.fetches:
                entry.fetches -= 1

    # -- putting

    def intake(self, source: Path) -> FileIntake:
        """Begin to take in a file. Raises NoRoom or Unreadable."""
        try:
            file = open(source, "rb")  # noqa: SIM115 (the intake closes it)
        except OSError as error:
            raise explained(error, source) from error
        try:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_SIZE:
                raise StoreFull(f"{source}: {size} bytes; a shard has at most {MAX_SIZE}. Cut the file into several.")
            with self._lock:
                self._make_room(size)
                descriptor, name = tempfile.mkstemp(prefix=".in-", dir=self.folder)
                self._taking_in[Path(name)] = size
            return FileIntake(self, file, os.fdopen(descriptor, "wb"), Path(name), size)
        except OSError as error:
            file.close()
            raise explained(error, source) from error
        except BaseException:
            file.close()
            raise

    def admit(self, copy: Path, manifest: Manifest) -> None:
        """Give a synced copy in this folder its name. For FileIntake."""
        shard = manifest.id
        write_tree(self._file(shard, "tree"), manifest)
        with self._lock:
            entry = self._entries.get(shard)
            os.replace(copy, self._file(shard, "shard"))
            self._taking_in.pop(copy, None)
            if entry is None:
                entry = self._entries[shard] = _Entry(manifest.size, True, self._clock())
            elif not entry.complete and not entry.fetches:
                self._file(shard, "part").unlink(missing_ok=True)
            entry.complete, entry.used = True, self._clock()
        sync_directory(self.folder)
        self._remember(manifest)

    def discard(self, copy: Path) -> None:
        """Forget a copy that was not admitted. For FileIntake."""
        with self._lock:
            if self._taking_in.pop(copy, None) is not None:
                copy.unlink(missing_ok=True)

    # -- keeping and losing

    def pin(self, shard: ShardId, pinned: bool = True) -> None:
        """Keep a shard whatever room is needed, or no longer. Raises NotHeld, NoRoom or Unreadable."""
        path = self._file(shard, "pin")
        with self._lock:
            entry = self._entries.get(shard)
            if entry is None:
                raise NotHeld(f"shard {shard.hex()} is not here; get it first")
            try:
                if pinned:
                    path.touch(mode=0o600)
                else:
                    path.unlink(missing_ok=True)
                sync_directory(self.folder)
            except OSError as error:
                raise explained(error, path) from error
            entry.pinned = pinned

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
            self._trees.pop(shard, None)
            for suffix in ("shard", "part", "pin", "tree"):  # the tree last: without it the others mean nothing
                self._file(shard, suffix).unlink(missing_ok=True)

    def _damaged(self, shard: ShardId) -> None:
        """The disk changed a shard: it is as if half fetched, and fetching it again replaces what is bad."""
        with self._lock:
            entry = self._entries.get(shard)
            if entry is not None:
                if entry.complete:
                    os.replace(self._file(shard, "shard"), self._file(shard, "part"))
                entry.complete, entry.have = False, 0

    def _stamp(self, shard: ShardId, entry: _Entry) -> None:
        entry.used = self._clock()
        if entry.complete and entry.used - entry.stamped >= STAMP_EVERY:
            entry.stamped = entry.used
            try:
                os.utime(self._file(shard, "shard"), (entry.used, entry.used))
            except FileNotFoundError:  # evicted in this moment
                return

    # -- files

    def _opened(self, shard: ShardId, entry: _Entry) -> BinaryIO:
        if not entry.complete:
            with contextlib.suppress(FileNotFoundError):  # finished in this moment
                return open(self._file(shard, "part"), "rb", buffering=0)
        return open(self._file(shard, "shard"), "rb", buffering=0)

    def _file(self, shard: ShardId, suffix: str) -> Path:
        return self.folder / f"{shard.hex()}.{suffix}"

    def _remember(self, manifest: Manifest) -> None:
        with self._lock:
            self._trees[manifest.id] = manifest
            while len(self._trees) > TREES:
                self._trees.popitem(last=False)

    def _hashed_again(self, shard: ShardId) -> Manifest:
        """The manifest of a complete shard whose tree was lost. Raises NotHeld where its bytes are not the id's."""
        path = self.path(shard)
        try:
            manifest = hashed(path)
            if manifest.id != shard:
                self._forget(shard)
                raise NotHeld(f"{path} does not hold the shard of its name and was deleted")
            write_tree(self._file(shard, "tree"), manifest)
        except OSError as error:
            raise explained(error, path) from error
        return manifest
