"""Shards on disk: their contents, verified on the way in and on the way out, whole again after any crash.

Which files there are, and which of them go when room is short, is `shardindex`'s.

A `.shard` was synced before it got that name; its `.tree` can be made again from it. A `.part` says nothing about
which chunks it has: when the fetch goes on, the chunks that are there are hashed again (2 GB/s and more), which costs
less than syncing a bitmap with each chunk would, and believes nobody.

All methods block but those that say so; they may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from swarmnode.node.storage.datadir import DataDirError, sync_directory
from swarmnode.node.storage.shardindex import (
    BATCH,
    STAMP_EVERY,
    Collected,
    FileIntake,
    Kept,
    ShardEntry,
    ShardIndex,
    StoreFull,
    explained,
    hashed,
    read_tree,
    unusable,
    verified_chunks,
    write_all,
    write_tree,
)
from swarmnode.protocols.transfer.shard_tree import (
    CHUNK,
    MAX_SIZE,
    ShardId,
    ShardManifest,
    bits_of,
    chunk_count,
    run_length,
)
from swarmnode.protocols.transfer.shard_wire import ShardNotHeld

__all__ = ["Collected", "Kept", "ShardStore"]

TREES = 16  # manifests kept in memory: 8 MiB of the largest


class ShardStore(ShardIndex):
    """The shards under one folder, at most `cap` bytes of them. Opening raises Unreadable.

    `clock` gives seconds since the epoch.
    """

    def __init__(self, folder: Path, *, cap: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(folder, cap=cap, clock=clock)
        self._trees: OrderedDict[ShardId, ShardManifest] = OrderedDict()

    # -- reading

    def manifest(self, shard: ShardId) -> ShardManifest:
        """Size and leaves, checked against the id. Raises ShardNotHeld or Unreadable."""
        with self._lock:
            if shard not in self._entries:
                raise ShardNotHeld(f"shard {shard.hex()} is not here")
            known = self._trees.pop(shard, None)
            if known is not None:
                self._trees[shard] = known
                return known
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

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        """Read chunks from `index` on into `room`, as many as fit and are here, verified; their bytes.

        Raises ShardNotHeld where the first is not here, also where the disk gives other bytes than were stored.
        """
        entry = self._entries.get(shard)
        if entry is None or not (entry.complete or entry.have >> index & 1):
            raise ShardNotHeld(f"chunk {index} of shard {shard.hex()} is not here")
        manifest = self.manifest(shard)
        if index >= manifest.chunks:
            raise ShardNotHeld(f"shard {shard.hex()} has {manifest.chunks} chunks")
        count, most = 1, min(len(room) // CHUNK, manifest.chunks - index)
        while count < most and (entry.complete or entry.have >> index + count & 1):
            count += 1
        chunks = room[: run_length(manifest.size, index, count)]
        try:
            with self._opened(shard, entry) as file:
                got = os.preadv(file.fileno(), [chunks], index * CHUNK)
        except FileNotFoundError:
            raise ShardNotHeld(f"shard {shard.hex()} was evicted in this moment") from None
        except OSError as error:
            raise explained(error, self._file(shard, "shard")) from error
        if got != len(chunks) or not manifest.fit(index, chunks):
            self._damaged(shard)
            raise ShardNotHeld(
                f"shard {shard.hex()}: the disk changed one of {count} chunks from {index} on; fetch it again "
                "to mend it"
            )
        self._stamp(shard, entry)
        with self._lock:
            entry.checked |= bits_of(index, count)
        return len(chunks)

    def read_now(self, shard: ShardId, index: int, room: memoryview) -> int:
        """What `read` gives where that takes neither the disk nor a hash, else 0. Does not block.

        That is where the chunks were verified within the last minute and the kernel still has them in memory.
        """
        entry = self._entries.get(shard)
        if entry is None or self._clock() - entry.stamped >= STAMP_EVERY or not hasattr(os, "RWF_NOWAIT"):  # not macOS
            return 0
        count = min(len(room) // CHUNK, chunk_count(entry.size) - index)
        wanted = bits_of(index, max(0, count))
        if not wanted or entry.checked & wanted != wanted:
            return 0
        chunks = room[: run_length(entry.size, index, count)]
        try:
            with self._opened(shard, entry) as file:
                got = os.preadv(file.fileno(), [chunks], index * CHUNK, os.RWF_NOWAIT)
        except OSError:  # what is wrong, and whether it matters, `read` will find
            return 0
        entry.used = self._clock()
        return got if got == len(chunks) else 0

    def export(self, shard: ShardId, target: Path) -> None:
        """Copy a complete shard to a file, which appears whole. Raises ShardNotHeld, NoRoom or Unreadable."""
        self.path(shard)
        manifest = self.manifest(shard)
        try:
            descriptor, beside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
            try:
                room = memoryview(bytearray(BATCH * CHUNK))
                with os.fdopen(descriptor, "wb") as file:
                    for index in range(0, manifest.chunks, BATCH):
                        file.write(room[: self.read(shard, index, room)])
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, target)
            except BaseException:
                os.unlink(beside)
                raise
        except OSError as error:
            raise unusable(error, target, "written") from error

    # -- fetching

    def begin(self, manifest: ShardManifest) -> int:
        """Make room for a shard; the bit set of verified chunks that are here already. Raises NoRoom or Unreadable.

        Until as many calls of `finish` or `suspend`, it is not evicted.
        """
        shard = manifest.id
        with self._lock:
            entry = self._entries.get(shard)
            if entry is None:
                self._make_room(manifest.size)
                entry = self._entries[shard] = ShardEntry(manifest.size, False, self._clock())
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

    def write(self, shard: ShardId, verified: Sequence[tuple[int, memoryview]]) -> None:
        """Keep chunks of a shard that was begun, which fit its manifest: (the first one's index, some in a row).

        Raises NoRoom or Unreadable; what was written before stays good.
        """
        path = self._file(shard, "part")
        try:
            write_all(path, [(index * CHUNK, chunks) for index, chunks in verified])
        except OSError as error:
            raise explained(error, path) from error
        with self._lock:
            for index, chunks in verified:
                self._entries[shard].have |= bits_of(index, chunk_count(len(chunks)))

    def finish(self, shard: ShardId) -> None:
        """All chunks were written: sync and rename, after which the shard is complete. Raises NoRoom or Unreadable."""
        entry = self._entries[shard]
        part = self._file(shard, "part")
        try:
            if not entry.complete:
                with open(part, "r+b") as file:
                    os.fsync(file.fileno())
                os.replace(part, self._file(shard, "shard"))  # a power cut may undo this: it is then hashed again
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
            raise unusable(error, source, "read") from error
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
            raise explained(error, self.folder) from error
        except BaseException:
            file.close()
            raise

    def admit(self, copy: Path, manifest: ShardManifest) -> None:
        """Give a synced copy in this folder its name. For FileIntake."""
        shard = manifest.id
        write_tree(self._file(shard, "tree"), manifest)
        with self._lock:
            entry = self._entries.get(shard)
            os.replace(copy, self._file(shard, "shard"))
            self._taking_in.pop(copy, None)
            if entry is None:
                entry = self._entries[shard] = ShardEntry(manifest.size, True, self._clock())
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

    # -- files

    def _opened(self, shard: ShardId, entry: ShardEntry) -> BinaryIO:
        if not entry.complete:
            with contextlib.suppress(FileNotFoundError):  # finished in this moment
                return open(self._file(shard, "part"), "rb", buffering=0)
        return open(self._file(shard, "shard"), "rb", buffering=0)

    def _remember(self, manifest: ShardManifest) -> None:
        with self._lock:
            self._trees[manifest.id] = manifest
            while len(self._trees) > TREES:
                self._trees.popitem(last=False)

    def _hashed_again(self, shard: ShardId) -> ShardManifest:
        """The manifest of a complete shard whose tree was lost. Raises ShardNotHeld for bytes of another id."""
        path = self.path(shard)
        try:
            manifest = hashed(path)
            if manifest.id != shard:
                self._forget(shard)
                raise ShardNotHeld(f"{path} does not hold the shard of its name and was deleted")
            write_tree(self._file(shard, "tree"), manifest)
        except OSError as error:
            raise explained(error, path) from error
        return manifest
