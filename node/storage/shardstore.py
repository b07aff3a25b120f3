"""The shard store: complete and half-fetched shards in one folder, under a cap, whole again after any crash.

    shards/<id>.shard   a complete shard; its modification time is when it was last used
    shards/<id>.part    one that is being fetched: verified chunks at their places, room for the others
    shards/<id>.tree    size and leaf hashes of either, whole or not there
    shards/<id>.pin     empty: do not evict
    shards/.…           on its way in; left over where the daemon was killed

The folder is the index: at start it is listed, nothing is read. Contents are verified on the way in and on the way out.
A `.shard` was synced before it got that name; its `.tree` can be made again from it. A `.part` does not say which
chunks it has: when a fetch goes on, those that are there are hashed again (2 GB/s and more), which costs less than
syncing a bitmap with each chunk would, and believes nobody.

What goes where room is short is in docs/shards.md (What is kept). Open files stay readable after eviction.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from swarmnode.node.storage import datadir
from swarmnode.node.storage.datadir import DataDirError, NoSpace
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.transfer.shard_manifest import (
    CHUNK,
    MAX_SIZE,
    ShardId,
    ShardManifest,
    bits_of,
    chunk_count,
    leaf,
    run_length,
)
from swarmnode.protocols.transfer.shard_wire import Holding, NoRoom, ShardError, ShardNotHeld, parts_of

MARGIN = 64 << 20  # bytes of the disk that shards leave free: logs and checkpoints need some
STAMP_EVERY = 60.0  # seconds between two notes on disk that a shard is in use
TREES = 16  # manifests kept in memory: 8 MiB of the largest
BATCH = 32  # chunks that one step of `put` copies: some ms, so that it can be cancelled between
BLOCK = 4096  # bytes: what is written past the cache has a multiple of it
SIZE = 8  # bytes before the leaves in a tree: the shard's size
_NAME = re.compile(r"([0-9a-f]{64})\.(shard|part|tree|pin)")


class StoreFull(NoRoom, NoSpace):
    """The cap or the disk leaves no room, and nothing may be evicted for it."""


class Unreadable(ShardError, DataDirError):
    """The disk failed, or refuses this user."""


def explained(error: OSError | DataDirError, path: Path) -> ShardError:
    """`error`, met at `path`, as what the callers of the store expect."""
    said = datadir.explain(error, path) if isinstance(error, OSError) else error
    return StoreFull(str(said)) if isinstance(said, NoSpace) else Unreadable(str(said))


@contextlib.contextmanager
def explaining(path: Path) -> Iterator[None]:
    """What goes wrong with the disk in the block, as the callers of the store expect it."""
    try:
        yield
    except (OSError, DataDirError) as error:
        raise explained(error, path) from error


@dataclass
class ShardEntry:
    shard: ShardId
    size: int  # bytes
    complete: bool
    used: float  # seconds since the epoch
    pinned: bool = False
    fetches: int = 0  # in progress; more than none keeps it from being evicted
    have: int = 0  # bit set of verified chunks, where it is not complete
    stamped: float = 0.0  # when its use was last noted on disk
    checked: int = 0  # bit set of chunks whose bytes on disk were verified since then

    @property
    def chunks(self) -> int:
        """How many of them are here."""
        return chunk_count(self.size) if self.complete else self.have.bit_count()


class ShardStore:
    """The shards under one folder, at most `cap` bytes of them. Opening raises Unreadable.

    What has no docstring here is as in `Store`, and raises Unreadable where the disk fails. Any thread may call these.
    """

    def __init__(self, folder: Path, *, cap: int) -> None:
        self.folder = folder
        self.cap = cap
        self._lock = threading.RLock()  # held for looks at the index, never for reading or writing chunks
        self._entries: dict[ShardId, ShardEntry] = {}
        self._taking_in: dict[Path, int] = {}  # files on their way in, and the bytes reserved for them
        self._trees = Recent[ShardId, ShardManifest](TREES)
        with explaining(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._list()

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
                shard, pinned = bytes.fromhex(name), "pin" in files_of
                entry = ShardEntry(shard, content.st_size, whole is not None, content.st_mtime, pinned)
                self._entries[shard] = entry
            for suffix in files_of:
                if content is None or (suffix == "part" and whole is not None):
                    (self.folder / f"{name}.{suffix}").unlink()

    # -- looking; from memory

    def holding(self, shard: ShardId) -> Holding:
        entry = self._entries.get(shard)
        if entry is None or not (entry.complete or entry.have):
            return Holding()
        if entry.complete:
            return Holding(entry.size, True)
        return Holding(entry.size, False, entry.have.to_bytes((chunk_count(entry.size) + 7) // 8, "little"))

    def recent(self, limit: int) -> tuple[ShardId, ...]:
        with self._lock:
            whole = [(not entry.pinned, -entry.used, shard) for shard, entry in self._entries.items() if entry.complete]
        return tuple(shard for _, _, shard in sorted(whole)[:limit])

    def kept(self) -> tuple[ShardEntry, ...]:
        """All that is here, the one used last first. Does not block."""
        with self._lock:
            return tuple(sorted(self._entries.values(), key=lambda entry: (-entry.used, entry.shard)))

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
            if entry.pinned == pinned:
                return
            with explaining(path):
                if pinned:
                    path.touch(mode=0o600)
                else:
                    path.unlink(missing_ok=True)
                datadir.sync_directory(self.folder)
            entry.pinned = pinned

    def drop(self, shard: ShardId) -> None:
        with self._lock, contextlib.suppress(OSError):  # what cannot be deleted still counts
            entry = self._entries.get(shard)
            if entry is not None and not entry.pinned and not entry.fetches:
                self._forget(shard)

    def collect(self, *, unpinned: bool = False) -> dict[ShardId, int]:
        """Delete half-fetched shards that nobody fetches and what is over the cap; `unpinned`: all but the pinned.

        Returns what went, with its bytes.
        """
        with self._lock:
            doomed = [
                shard
                for shard, entry in self._entries.items()
                if not entry.fetches and not entry.pinned and (unpinned or not entry.complete)
            ]
            gone = {shard: self._forget(shard) for shard in doomed}
            excess = self._evictable(max(0, self.used - self.cap)) or []
            return gone | {shard: self._forget(shard) for shard in excess}

    def _make_room(self, size: int) -> None:
        """Evict until `size` more bytes fit. Raises StoreFull, with nothing evicted, where they cannot."""
        over = self.used + size - self.cap
        free = os.statvfs(self.folder)
        short = size + MARGIN - free.f_bavail * free.f_frsize
        doomed = self._evictable(max(over, short))
        if doomed is None:
            why, cure = f"the cap of {self.cap} bytes", "raise shards_cap (GB)"
            if short >= over:
                why, cure = f"the disk, of which {MARGIN >> 20} MiB stay free,", "make room on the disk"
            raise StoreFull(
                f"{self.folder}: {size} bytes more do not fit: {why} leaves no room, and the rest is pinned or in use. "
                f"Unpin or collect shards (swarmnode shards ls, gc), or {cure}."
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

    def _forget(self, shard: ShardId) -> int:
        """Delete a shard; its bytes."""
        with self._lock:
            for suffix in ("shard", "part", "pin", "tree"):  # the tree last: without it the others mean nothing
                self._file(shard, suffix).unlink(missing_ok=True)
            entry = self._entries.pop(shard, None)
        return entry.size if entry is not None else 0

    def _damaged(self, shard: ShardId, *, readable: bool) -> None:
        """The disk changed a shard: it is as if half fetched, and fetching it again replaces what is bad.

        What cannot be read is begun anew in another file.
        """
        with self._lock, explaining(self._file(shard, "part")):
            entry = self._entries.get(shard)
            if entry is not None:
                if entry.complete and readable:
                    # It keeps its name, by which a trainer opens it; there may be a fetch that began before it was put.
                    with contextlib.suppress(FileExistsError):
                        os.link(self._file(shard, "shard"), self._file(shard, "part"))
                entry.complete, entry.have, entry.checked = False, 0, 0

    def _stamp(self, shard: ShardId, entry: ShardEntry) -> None:
        """The shard is in use now; from time to time the disk is told."""
        entry.used = time.time()
        if entry.used - entry.stamped >= STAMP_EVERY:
            entry.stamped, entry.checked = entry.used, 0
            if entry.complete:
                with contextlib.suppress(OSError):  # evicted in this moment, or the disk takes nothing
                    os.utime(self._file(shard, "shard"), (entry.used, entry.used))

    def _file(self, shard: ShardId, suffix: str) -> Path:
        return self.folder / f"{shard.hex()}.{suffix}"

    # -- reading

    def manifest(self, shard: ShardId) -> ShardManifest:
        with self._lock:
            if shard not in self._entries:
                raise ShardNotHeld(f"shard {shard.hex()} is not here")
            known = self._trees.get(shard)
            if known is not None:
                self._trees[shard] = known
                return known
        try:
            manifest = read_tree(self._file(shard, "tree"))
            if manifest.id != shard:
                raise ValueError("its tree has another root")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO):
                raise explained(error, self._file(shard, "tree")) from error
            manifest = self._hashed_again(shard)
        self._remember(manifest)
        return manifest

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
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
            if error.errno != errno.EIO:
                raise explained(error, self._file(shard, "shard")) from error
            got = -1  # a bad sector is as good as other bytes
        if got != len(chunks) or not manifest.fit(index, chunks):
            self._damaged(shard, readable=got >= 0)
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
        if entry is None or time.time() - entry.stamped >= STAMP_EVERY or not hasattr(os, "RWF_NOWAIT"):  # not macOS
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
        entry.used = time.time()
        return got if got == len(chunks) else 0

    def export(self, shard: ShardId, target: Path) -> None:
        """Copy a complete shard to a file, which appears whole. Raises ShardNotHeld, NoRoom or Unreadable."""
        self.path(shard)
        with explaining(target), datadir.replacing(target, by_owner=True) as file:
            for part in parts_of(self, shard):
                datadir.write_all(file, part)

    # -- fetching

    def begin(self, manifest: ShardManifest) -> int:
        """Make room for a shard; the bit set of verified chunks that are here already. Raises NoRoom or Unreadable.

        Until as many calls of `finish` or `suspend`, it is not evicted.
        """
        shard = manifest.id
        with self._lock:
            entry = self._entries.get(shard)
            fresh = entry is None
            if entry is None:
                with explaining(self.folder):
                    self._make_room(manifest.size)
                entry = self._entries[shard] = ShardEntry(shard, manifest.size, False, time.time())
            entry.size = manifest.size  # that of the file is less where the disk cut it off
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
                self.drop(shard)
            raise explained(error, self._file(shard, "part")) from error
        self._remember(manifest)
        return (1 << manifest.chunks) - 1 if entry.complete else entry.have

    def write(self, shard: ShardId, verified: Sequence[tuple[int, memoryview]]) -> None:
        path = self._file(shard, "part")
        with explaining(path):
            write_pieces(path, [(index * CHUNK, chunks) for index, chunks in verified])
        with self._lock:
            for index, chunks in verified:
                self._entries[shard].have |= bits_of(index, chunk_count(len(chunks)))

    def finish(self, shard: ShardId) -> None:
        entry = self._entries[shard]
        part = self._file(shard, "part")
        with explaining(part):
            if not entry.complete:
                with open(part, "r+b") as file:
                    os.fsync(file.fileno())
                os.replace(part, self._file(shard, "shard"))  # a power cut may undo this: it is then hashed again
            part.unlink(missing_ok=True)  # where the same shard was put meanwhile, or both names are one file's
        with self._lock:
            entry.complete, entry.used = True, time.time()
            entry.fetches -= 1

    def suspend(self, shard: ShardId) -> None:
        with self._lock:
            entry = self._entries.get(shard)
            if entry is not None and entry.fetches:
                entry.fetches -= 1

    # -- putting

    def put(self, source: Path | memoryview) -> Generator[ShardId | None, None, None]:
        if isinstance(source, memoryview):
            chunks = (source[at : at + CHUNK] for at in range(0, len(source), CHUNK))
            with explaining(self.folder):
                yield from self._copied(chunks, len(source), "what is in memory")
            return
        try:
            file = open(source, "rb")  # noqa: SIM115 (closed by the block below)
        except OSError as error:
            raise explained(datadir.unusable(error, source, "cannot be read"), source) from error
        with file, explaining(self.folder):
            yield from self._copied(iter(partial(file.read, CHUNK), b""), os.fstat(file.fileno()).st_size, file.name)

    def _copied(self, source: Iterator[bytes | memoryview], size: int, name: str) -> Iterator[ShardId | None]:
        """Copy and hash chunks of `size` bytes in all, sync them and let them be a shard."""
        if size > MAX_SIZE:
            raise StoreFull(f"{name}: {size} bytes; a shard has at most {MAX_SIZE}. Cut the file into several.")
        with self._lock:
            self._make_room(size)
            descriptor, new = tempfile.mkstemp(prefix=".in-", dir=self.folder)
            copy = Path(new)
            self._taking_in[copy] = size
        try:
            leaves = bytearray()
            with os.fdopen(descriptor, "wb") as file:
                for chunk in source:
                    if file.tell() + len(chunk) > size:
                        raise Unreadable(f"{name}: grew while it was read; put it again when it is finished")
                    file.write(chunk)
                    leaves += leaf(chunk)
                    if file.tell() % (BATCH * CHUNK) == 0:
                        yield None
                file.flush()
                os.fsync(file.fileno())
                manifest = ShardManifest(file.tell(), bytes(leaves))
            self._admit(copy, manifest)
        finally:
            with self._lock:
                self._taking_in.pop(copy, None)
                copy.unlink(missing_ok=True)  # admitted, it has another name
        yield manifest.id

    def _admit(self, copy: Path, manifest: ShardManifest) -> None:
        """Give a synced copy in this folder its name."""
        shard = manifest.id
        write_tree(self._file(shard, "tree"), manifest)
        with self._lock:
            entry = self._entries.get(shard)
            os.replace(copy, self._file(shard, "shard"))
            self._taking_in.pop(copy, None)
            if entry is None:
                entry = self._entries[shard] = ShardEntry(shard, manifest.size, True, time.time())
            elif not entry.complete and not entry.fetches:
                self._file(shard, "part").unlink(missing_ok=True)
            entry.complete, entry.used = True, time.time()
        datadir.sync_directory(self.folder)
        self._remember(manifest)

    # -- files and their manifests

    def _opened(self, shard: ShardId, entry: ShardEntry) -> BinaryIO:
        if not entry.complete:
            with contextlib.suppress(FileNotFoundError):  # finished in this moment
                return open(self._file(shard, "part"), "rb", buffering=0)
        return open(self._file(shard, "shard"), "rb", buffering=0)

    def _remember(self, manifest: ShardManifest) -> None:
        with self._lock:
            self._trees[manifest.id] = manifest

    def _hashed_again(self, shard: ShardId) -> ShardManifest:
        """The manifest of a complete shard whose tree was lost. Raises ShardNotHeld for bytes of another id."""
        path = self.path(shard)
        with explaining(path):
            with path.open("rb") as file:
                leaves = b"".join(map(leaf, iter(partial(file.read, CHUNK), b"")))
                manifest = ShardManifest(file.tell(), leaves)
            if manifest.id != shard:
                self._forget(shard)
                raise ShardNotHeld(f"{path} does not hold the shard of its name and was deleted")
            write_tree(self._file(shard, "tree"), manifest)
        return manifest


# -- files


def read_tree(path: Path) -> ShardManifest:
    """Raises OSError, or ValueError where it is torn."""
    raw = path.read_bytes()
    return ShardManifest(int.from_bytes(raw[:SIZE], "big"), raw[SIZE:])


def write_tree(path: Path, manifest: ShardManifest) -> None:
    """Whole or not at all, but not synced: what a power cut takes is hashed again or asked of peers again."""
    with datadir.beside(path) as (file, written):
        datadir.write_all(file, manifest.size.to_bytes(SIZE, "big") + manifest.leaves)
        os.replace(written, path)


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
            try:
                good = manifest.fit(index, os.pread(file.fileno(), CHUNK, index * CHUNK))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                good = False  # it is written anew, for which the disk takes another sector
            have |= good << index
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
            _write_at(path, fitting, os.O_DIRECT)
            rest = [piece for piece in pieces if len(piece[1]) % BLOCK]
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system cannot, or not from that memory
                raise
    _write_at(path, rest)


def _write_at(path: Path, pieces: Sequence[tuple[int, memoryview]], how: int = 0) -> None:
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
