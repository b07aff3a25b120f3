"""Vectors of states on disk, by their ids: one file each, in a folder that a trainer and its daemon both read.

    vectors = Vectors(folder, budget=bytes)
    id = vectors.put(vector)              # written, unless it is there
    vectors.get(id)                       # mapped, not read: a state may be larger than the memory
    into = vectors.room(id, most)         # for one that comes from elsewhere …
    vectors.fill(id, size)                # … and has come: of what it is

Who puts vectors removes the one longest unused where there are more than `budget` bytes; what is mapped stays readable.
Nobody trusts what stands there more than its id says: a name leads to a regular file or to nothing.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections import OrderedDict
from pathlib import Path

import numpy as np

from swarmnode.training.verify.trace import Vector, vector_id

FREE_SHARE = 0.5  # of what is free on the disk as a trainer starts, which its states may take


def states_in(scratch: str) -> tuple[Path, Path, Path]:
    """Where a trainer keeps its states, where its daemon puts what it offered, and where what it fetched of others."""
    own, offered, fetched = (Path(scratch, "states", name) for name in ("own", "offered", "fetched"))
    return own, offered, fetched


def free(folder: str) -> int:
    """Bytes that the disk has left."""
    return shutil.disk_usage(folder).free


class Vectors:
    """One process's view of a folder. Blocking; raises OSError where the disk takes nothing."""

    def __init__(self, folder: Path, *, budget: float = float("inf")) -> None:
        self.folder, self.budget = folder, budget
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # bytes, of what was put here; the longest unused first

    def put(self, vector: Vector) -> bytes:
        """Keep a vector; its id."""
        id = vector_id(vector)
        if not self.touch(id):
            part = self._path(id).with_suffix(".part")
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with part.open("wb", buffering=0) as file:
                    left = np.ascontiguousarray(vector, "<f4").view(np.uint8).data
                    while left:
                        left = left[file.write(left) or 0 :]
                part.replace(self._path(id))
            except OSError:
                part.unlink(missing_ok=True)
                raise
            self._sizes[id] = vector.nbytes
            while sum(self._sizes.values()) > self.budget and len(self._sizes) > 2:
                self._path(self._sizes.popitem(last=False)[0]).unlink(missing_ok=True)
        return id

    def touch(self, id: bytes) -> bool:
        """Whether this vector was put here and is not removed yet; it is used now."""
        if id in self._sizes:
            self._sizes.move_to_end(id)
        return id in self._sizes

    def get(self, id: bytes) -> Vector | None:
        """The vector under this id, read-only; what it says is what its writer wrote."""
        self.touch(id)
        try:
            file = os.open(self._path(id), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size % 4:
                return None
            if not found.st_size:
                return np.zeros(0, np.float32)
            return np.frombuffer(mmap.mmap(file, found.st_size, prot=mmap.PROT_READ), "<f4")
        finally:
            os.close(file)

    def room(self, id: bytes, most: int) -> memoryview:
        """`most` bytes to write what should have this id into. Raises OSError where the disk has not so many.

        They are taken at once: a write into a map that a full disk cannot back would kill the process (SIGBUS).
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path(id).open("w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, most)
                return memoryview(mmap.mmap(file.fileno(), most))
            except OSError:
                self._path(id).unlink()
                raise

    def fill(self, id: bytes, size: int) -> Vector | None:
        """What came, if it has its id; nothing is left of anything else."""
        os.truncate(self._path(id), size)
        vector = self.get(id)
        if vector is None or vector_id(vector) != id:
            self._path(id).unlink()
            return None
        return vector

    def clear(self) -> None:
        """Remove all of them."""
        self._sizes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, id: bytes) -> Path:
        return self.folder / id.hex()
