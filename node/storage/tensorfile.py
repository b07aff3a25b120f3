"""Safetensors files, written and read in pieces: nothing is copied whole, and the hash is taken on the way.

A file (github.com/huggingface/safetensors, "Format") is the length of its header as u64 little-endian, the header, JSON
padded with spaces to a multiple of 8 bytes, and the tensors' bytes without gaps. `safetensors.numpy` reads what is
written here; its own writer gives neither the hash nor a file that is synced before it has its name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swarmnode.node.storage.datadir import replacing, write_all
from swarmnode.training import mapped

PIECE = 4 << 20  # bytes that are hashed and written at a time
MAX_HEADER = 16 << 20  # bytes; some hundred thousand tensors
_NAMES = {"float32": "F32", "uint8": "U8"}
_TYPES = {name: np.dtype(kind).newbyteorder("<") for kind, name in _NAMES.items()}


class NotTensors(ValueError):
    """The file is no safetensors file that this module reads; says why."""


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    """Replace `path`, whole or not at all; the sha-256 of the new file, 64 hex digits. Blocking.

    Tensors are float32 or uint8, contiguous; of one that changes meanwhile a mixture is written. Raises NoSpace or
    DataDirError; what was at `path` is then still there.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with replacing(path) as file:
        for raw in _pieces(encoded, tensors):
            piece = bytes(raw)  # what is hashed is what is written, whoever writes to it
            digest.update(piece)
            write_all(file, piece)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], str]:
    """Read a whole file into fresh memory; its tensors, and its sha-256. Blocking. Raises NotTensors or OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = int.from_bytes(_read(file, 8, digest), "little")
        if size > MAX_HEADER:
            raise NotTensors(f"its header would have {size} bytes")
        try:
            header = json.loads(bytes(_read(file, size, digest)))
            dict(header.pop("__metadata__", {}))  # has to be an object, and says nothing here
            plan = [
                (name, _TYPES[entry["dtype"]], tuple(map(int, entry["shape"])), tuple(map(int, entry["data_offsets"])))
                for name, entry in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise NotTensors(f"its header cannot be read: {error}") from error
        tensors: dict[str, NDArray[Any]] = {}
        left = os.fstat(file.fileno()).st_size - 8 - size
        at = 0
        for name, dtype, shape, span in sorted(plan, key=lambda entry: entry[3]):
            end = at + math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or span != (at, end) or end > left:
                raise NotTensors(f"its tensor {name[:80]!r} does not lie where the header says")
            raw, at = _read(file, end - at, digest), end
            tensors[name] = np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="), copy=False).reshape(shape)
        if at != left:
            raise NotTensors(f"{left - at} bytes follow its last tensor")
    return tensors, digest.hexdigest()


def _pieces(header: bytes, tensors: Mapping[str, NDArray[Any]]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in tensors.values():
        little = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
        raw = little.reshape(-1).view(np.uint8).data
        for start in range(0, len(raw), PIECE):
            yield raw[start : start + PIECE]


def _read(file: BinaryIO, size: int, digest: Any) -> memoryview:
    """The next `size` bytes, hashed as they come; memory is taken as far as the file goes. Raises NotTensors."""
    if size > os.fstat(file.fileno()).st_size:
        raise NotTensors("it is cut off")
    room, at = mapped.room(size), 0
    while at < size:
        count = file.readinto(room[at : at + PIECE])  # type: ignore[attr-defined]
        if not count:
            raise NotTensors("it is cut off")
        digest.update(room[at : at + count])
        at += count
    return room
