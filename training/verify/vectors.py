"""Vectors of states on disk, by their ids: one file each, in a folder that a trainer and its daemon both read.

    vectors = Vectors(folder, budget=bytes)
    id = vectors.put(vector)              # written, unless it is there
    vectors.get(id)                       # mapped, not read: a state may be larger than the memory
    vectors.copied(id, most)              # the same where somebody else may write to the folder
    into = vectors.room(most)             # for one that comes from elsewhere

Who puts vectors removes the one longest unused where there are more than `budget` bytes; what is mapped stays readable.
Nobody trusts what stands there more than its id says: a name leads to a regular file or to nothing.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from swarmnode.training.mapped import Vector, room_in
from swarmnode.training.verify.trace import vector_id

BLOCK = 1 << 20  # bytes that are copied at once
FREE_SHARE = 0.5  # of what is free on the disk, which the states of a trainer may take


def states_in(scratch: str) -> tuple[Path, Path, Path]:
    """Where a trainer keeps its states, where its daemon puts what it offered, and where what it fetched of others."""
    own, offered, fetched = (Path(scratch, "states", name) for name in ("own", "offered", "fetched"))
    return own, offered, fetched


class Vectors:
    """One process's view of a folder. Blocking; raises OSError where the disk takes nothing."""

    def __init__(self, folder: Path, *, budget: float = float("inf"), share: float = 1.0) -> None:
        """`share`: of the most that was free on the disk since then; what is put here takes no more than that."""
        self.folder, self.budget, self.share = folder, budget, share
        self._free = 0  # bytes, the most
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # bytes, of what was put here; the longest unused first

    def put(self, vector: Vector) -> bytes:
        id = vector_id(vector)
        if not self.touch(id):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made anew: a link that somebody put in the place of a known name would have another file overwritten.
            descriptor, part = tempfile.mkstemp(suffix=".part", dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(np.ascontiguousarray(vector, "<f4").data)
                os.replace(part, self._path(id))
            except OSError:
                os.unlink(part)
                raise
            self._sizes[id] = vector.nbytes
            self._free = max(self._free, shutil.disk_usage(self.folder).free)  # a disk that was full may be so no more
            most = min(self.budget, self.share * self._free)
            while sum(self._sizes.values()) > most and len(self._sizes) > 2:
                self._path(self._sizes.popitem(last=False)[0]).unlink(missing_ok=True)
        return id

    def touch(self, id: bytes) -> bool:
        """Whether this vector was put here and is not removed yet; it is used now."""
        if id in self._sizes:
            self._sizes.move_to_end(id)
            if not self._path(id).exists():  # the folder was emptied, as where a trainer is started again
                del self._sizes[id]
        return id in self._sizes

    def get(self, id: bytes) -> Vector | None:
        """The vector under this id, mapped and read-only; what it says is what its writer wrote."""
        self.touch(id)
        with suppress(FileNotFoundError), self._open(id) as file:
            return _mapped(file)
        return None

    def copied(self, id: bytes, most: int) -> Vector | None:
        """The same, of at most so many bytes, where somebody else writes to the folder. Raises OSError: a full disk.

        Whoever shortens a file that another process has mapped kills that (SIGBUS), so what is mapped has no name.
        """
        with suppress(FileNotFoundError), self._open(id) as file:
            if os.fstat(file.fileno()).st_size <= most:
                with tempfile.TemporaryFile(dir=self.folder) as own:
                    while most > 0 and (some := file.read(min(most, BLOCK))):
                        own.write(some)
                        most -= len(some)
                    own.flush()
                    return _mapped(own)
        return None

    @contextmanager
    def _open(self, id: bytes) -> Iterator[BinaryIO]:
        """The file of this id. Raises FileNotFoundError where that is none, or no regular one."""
        try:
            file = os.open(self._path(id), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise FileNotFoundError from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError
        with os.fdopen(file, "rb", buffering=0) as opened:
            yield opened

    def room(self, most: int) -> memoryview:
        """`most` bytes of disk to write a vector into that comes from elsewhere. Raises as `room_in`."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return room_in(self.folder, most)

    def clear(self) -> None:
        self._sizes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, id: bytes) -> Path:
        return self.folder / id.hex()


def _mapped(file: IO[bytes]) -> Vector | None:
    """What a file holds, read-only; None where that is no vector. It outlives the file's name."""
    size = os.fstat(file.fileno()).st_size
    if size % 4:
        return None
    return np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"", "<f4")
