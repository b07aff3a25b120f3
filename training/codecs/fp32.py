"""fp32: the values themselves, little-endian, 4 bytes an element. Exact; the baseline for parity tests."""

from __future__ import annotations

import numpy as np

from swarmnode.training.codecs.base import Vector, check_finite, checked_bytes, checked_values, room


class Fp32:
    """Implements `Codec`. `encode(decode(raw)) == raw` and `decode(encode(x))` is `x`, bit for bit."""

    name = "fp32"

    def encoded_size(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        check_finite(values)
        target = room(out, self.encoded_size(values.size))
        np.frombuffer(target, "<f4")[:] = values
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int, out: Vector | None = None) -> Vector:
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        values = np.empty(elements, np.float32) if out is None else out
        np.copyto(values, np.frombuffer(view, "<f4"))
        check_finite(values)
        return values
