"""sign: one bit an element and the mean magnitude of its block of 1024, 0.129 bytes an element.

    bytes = magnitudes, one float32 a block, little-endian ‖ bits, the first element in the lowest, set for negative
    value = -magnitude where the bit is set, else +magnitude

signSGD with the scale that keeps the sum of magnitudes (Bernstein et al. 1802.04434; with error feedback Karimireddy et
al. 1901.09847, section 4). Only of use with error feedback: alone it moves every element, however small it was.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import STEP, CodecError, Vector, checked_bytes, checked_values, room

BLOCK = 1024  # elements that share a magnitude; divides STEP


class Sign:
    """Implements `Codec`. Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made."""

    name = "sign"

    def encoded_size(self, elements: int) -> int:
        return 4 * _blocks(elements) + -(-elements // 8)

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        target = room(out, self.encoded_size(values.size))
        end = 4 * _blocks(values.size)
        magnitudes, bits = np.frombuffer(target[:end], "<f4"), np.frombuffer(target[end:], np.uint8)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            sums = np.add.reduceat(np.abs(step, dtype=np.float64), np.arange(0, step.size, BLOCK))
            if not np.isfinite(sums).all():
                raise CodecError("sign: values to encode contain NaN or infinity")
            sizes = np.full(sums.size, BLOCK)
            sizes[-1] = step.size - (sums.size - 1) * BLOCK
            means = (sums / sizes).astype(np.float32)
            means[means < np.finfo(np.float32).tiny] = 0  # subnormal: some CPUs take it for zero
            magnitudes[start // BLOCK : start // BLOCK + means.size] = means
            negative = (step < 0) & (np.repeat(means, BLOCK)[: step.size] > 0)
            packed = np.packbits(negative, bitorder="little")
            bits[start // 8 : start // 8 + packed.size] = packed
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int, out: Vector | None = None) -> Vector:
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        end = 4 * _blocks(elements)
        magnitudes, packed = np.frombuffer(view[:end], "<f4"), np.frombuffer(view[end:], np.uint8)
        smallest = np.finfo(np.float32).tiny
        if not np.all((magnitudes >= smallest) & np.isfinite(magnitudes) | (magnitudes.view("<u4") == 0)):
            raise CodecError("sign: a magnitude is negative, not finite or subnormal")
        if elements % 8 and packed[-1] >> elements % 8:
            raise CodecError("sign: bits are set beyond the last element")
        values = np.empty(elements, np.float32) if out is None else out
        for start in range(0, elements, STEP):
            step = values[start : start + STEP]
            whole = step.size % BLOCK == 0 and step.flags.c_contiguous
            bits = (step if whole else np.empty(_blocks(step.size) * BLOCK, np.float32)).view(np.uint32)
            # The bit of an element is the sign bit of its magnitude.
            np.left_shift(_unpacked(packed[start // 8 : (start + STEP) // 8], bits.size), 31, out=bits)
            magnitude = magnitudes[start // BLOCK : (start + STEP) // BLOCK].view("<u4")
            np.bitwise_or(bits.reshape(-1, BLOCK), magnitude[:, None], out=bits.reshape(-1, BLOCK))
            if not whole:
                step[:] = bits.view(np.float32)[: step.size]
        return values


def _unpacked(packed: NDArray[np.uint8], size: int) -> NDArray[np.uint32]:
    """The first `size` bits, lowest first; zeros beyond the last."""
    return np.unpackbits(packed, count=size, bitorder="little").astype(np.uint32)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)
