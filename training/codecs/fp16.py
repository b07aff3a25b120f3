"""fp16: IEEE 754 binary16, little-endian, 2 bytes an element, rounded half to even.

Finite values beyond ±65504 saturate there; what that loses is for the error feedback to bring later.
"""

from __future__ import annotations

import numpy as np

from swarmnode.training.codecs.base import STEP, Vector, check_finite, checked_bytes, checked_values, room

LARGEST = np.float32(np.finfo(np.float16).max)  # 65504


class Fp16:
    """Implements `Codec`. Stable: `encode(decode(raw)) == raw` for every `raw` that decodes."""

    name = "fp16"

    def encoded_size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        target = room(out, self.encoded_size(values.size))
        halves = np.frombuffer(target, "<f2")
        clipped = np.empty(min(STEP, values.size), np.float32)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            check_finite(step)
            halves[start : start + STEP] = np.clip(step, -LARGEST, LARGEST, out=clipped[: step.size])
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> Vector:
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        values = np.frombuffer(view, "<f2").astype(np.float32)
        check_finite(values)
        return values
