"""bf16: the upper half of a float32, little-endian, 2 bytes an element, rounded half to even.

The range of float32 with 8 significant bits: for values whose scale nobody knows beforehand. What would round to
infinity becomes the largest finite value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import STEP, Vector, check_finite, checked_bytes, checked_values, room

_LARGEST = np.uint32(0x7F7F)  # 3.39e38, without its sign
_SIGN = np.uint32(0x8000)


class Bf16:
    """Implements `Codec`. Stable: `encode(decode(raw)) == raw` for every `raw` that decodes."""

    name = "bf16"

    def encoded_size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        target = room(out, self.encoded_size(values.size))
        halves = np.frombuffer(target, "<u2")
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            check_finite(step)
            halves[start : start + STEP] = to_bf16(step)
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int, out: Vector | None = None) -> Vector:
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        values = np.empty(elements, np.float32) if out is None else out
        bits = values.view(np.uint32)
        np.copyto(bits, np.frombuffer(view, "<u2"))
        np.left_shift(bits, 16, out=bits)
        check_finite(values)
        return values


def to_bf16(values: Vector, *, up: bool = False) -> NDArray[np.uint32]:
    """The bits of finite `values` as bf16, below 2^16; rounded half to even, or `up` away from zero."""
    bits = values.view(np.uint32)
    bits = bits + (
        np.uint32(0xFFFF) if up else np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    ) >> np.uint32(16)
    return np.minimum(bits & ~_SIGN, _LARGEST) | bits & _SIGN


def from_bf16(halves: NDArray[np.uint16] | NDArray[np.uint32]) -> Vector:
    """The float32 values of bf16 bits, exactly."""
    return (halves.astype(np.uint32) << 16).view(np.float32)
