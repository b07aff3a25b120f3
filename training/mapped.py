"""Vectors that are large and seldom read lie in mapped files: what the machine's memory has no room for lies on disk.

    mapped.keep_in(folder)        # as a process starts; in one that does not, they lie in memory
    vector = mapped.zeros(size)   # float32 (size,)

The files have no name, so nothing is left of them when the process ends. The system keeps as much of them in memory
as nobody else needs, and writes the rest to disk; what they take is in no process's own memory. Their disk is taken at
once: a write into a map that a full disk cannot back would kill the process. Where the disk has no room, a vector lies
in memory after all, as do those of less than LARGE.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

LARGE = 16 << 20  # bytes; smaller ones are not worth a file
_folders: list[Path] = []  # none, or the one

logger = logging.getLogger(__name__)


def keep_in(folder: Path | None) -> None:
    """Where this process keeps its large vectors; None: in memory."""
    _folders[:] = [] if folder is None else [folder]


def room(size: int, *, large: int = LARGE) -> memoryview:
    """`size` bytes of zeros that can be written to; in memory where they are less than `large`."""
    if size >= large and _folders:
        try:
            return room_in(_folders[0], size)
        except OSError as error:
            logger.warning("%d MB lie in memory and not in %s: %s", size // 1_000_000, _folders[0], error.strerror)
    return np.zeros(size, np.uint8).data


def room_in(folder: Path, size: int) -> memoryview:
    """`size` bytes of a folder's disk. Raises OSError where there are fewer."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return memoryview(mmap.mmap(file.fileno(), size))


def zeros(size: int) -> Vector:
    """(size,) float32 of zeros."""
    return np.frombuffer(room(4 * size), np.float32)


def copied(vector: Vector) -> Vector:
    """A copy of (size,) float32."""
    copy = zeros(vector.size)
    np.copyto(copy, vector, casting="no")
    return copy
