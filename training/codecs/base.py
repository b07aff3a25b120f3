"""What every codec promises, and the checks that all of them share."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]  # (n,), contiguous or not

# Elements worked on at a time: 512 KiB of float32 and its temporaries stay in a core's cache, and memory beside the
# input and the output stays constant however large the model is. Half as many cost a tenth more in a busy process, for
# each operation of numpy gives up the interpreter's lock and takes it again.
STEP = 128 << 10


class CodecError(ValueError):
    """Values that cannot be encoded (NaN or infinity), or bytes that no encoder makes."""


class Codec(Protocol):
    """A stateless encoding of a vector whose length both sides know."""

    @property
    def name(self) -> str:
        """The name in `[exchange] codec`."""

    def encoded_size(self, elements: int) -> int:
        """Bytes that `encode` makes of `elements` values, exactly."""

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        """Encode `values`, float32 (n,), into the first `encoded_size(n)` bytes of `out` or of new memory.

        Raises CodecError where a value is NaN or infinite (`out` may then be partly written), ValueError for another
        dtype or shape or an `out` that is too small.
        """

    def decode(self, raw: bytes | bytearray | memoryview, elements: int, out: Vector | None = None) -> Vector:
        """The `elements` values that `raw` stands for, all finite: in `out`, float32 (elements,), or in new memory.

        Raises CodecError for bytes that no encoder makes: another size, or anything that would decode to NaN or
        infinity; `out` may then be partly written.
        """


def checked_values(values: Vector) -> Vector:
    """`values` as a contiguous vector. Raises ValueError where it is not float32 (n,)."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise ValueError(f"a codec takes a float32 vector, not {values.dtype} of shape {values.shape}")
    return np.ascontiguousarray(values)


def check_finite(values: Vector) -> float:
    """The largest absolute value. Raises CodecError unless all values are finite.

    NaN passes through both extremes, so no mask is made.
    """
    if not values.size:
        return 0.0
    highest, lowest = float(values.max()), float(values.min())
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        raise CodecError("values to encode or decoded values contain NaN or infinity")
    return max(highest, -lowest)


def handed(values: Vector, out: Vector | None) -> Vector:
    """`values`, copied into `out` where the caller gave one."""
    if out is None:
        return values
    np.copyto(out, values)
    return out


def room(out: memoryview | None, size: int) -> memoryview:
    """The first `size` bytes of `out`, or `size` new bytes. Raises ValueError where `out` is too small or read-only."""
    if out is None:
        return np.empty(size, np.uint8).data
    if out.readonly or out.nbytes < size:
        raise ValueError(f"encoding needs {size} writable bytes, the buffer has {out.nbytes}")
    return out.cast("B")[:size]


def checked_bytes(raw: bytes | bytearray | memoryview, size: int, name: str) -> memoryview:
    """`raw` as plain bytes. Raises CodecError where it is not `size` bytes long."""
    view = memoryview(raw)
    if view.nbytes != size:
        raise CodecError(f"{name}: {view.nbytes} bytes where {size} were expected")
    return view.cast("B")
