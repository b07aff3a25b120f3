"""int8: a signed byte an element and one float32 scale a block of 1024, 1.0039 bytes an element.

    bytes = scales, one float32 a block, little-endian ‖ integers, one int8 an element
    value = integer * scale,  integer = round half even(value * (1 / scale)),  scale = absmax of the block / 127

Scales are rounded up to 17 significant bits. An integer has at most 7, so `integer * scale` has at most 24 and is
*exact* in float32: decoding rounds nothing, and gives the same bits on every CPU, also where a compiler fuses a
multiplication with the addition behind it. For the same reason a re-encoding of decoded values makes the same bytes.
The price is a step that is wider by less than 2^-16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import STEP, Codec, CodecError, Vector

# Elements that share a scale. RMS error at sigma 1 and bytes an element, measured: 256: 0.0070, 1.0156;
# 512: 0.0074, 1.0078; 1024: 0.0079, 1.0039; 2048: 0.0083, 1.0020. The permitted 1.01 includes headers and frames:
# 1024 leaves them 0.6 %, for an error 6 % above that of 512.
BLOCK = 1024
STEPS = np.float32(127)

_DROPPED_BITS = np.uint32(0x7F)  # of the 24 bits of a scale's significand, the last 7 are zero
# A scale is zero or at least 2^-120, far enough above float32's subnormals that a CPU which flushes those to zero makes
# the same integers; and 127 of the largest are finite.
_SMALLEST = int(np.float32(2.0**-120).view(np.uint32))
_LARGEST = int((np.finfo(np.float32).max / STEPS).view(np.uint32) & ~_DROPPED_BITS)


class Int8(Codec):
    """Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made.

    The error of an element is at most half a step: absmax of its block / 254 (plus 2^-16 of that); in a block whose
    absmax is below 127 * 2^-120 all elements become zero.
    """

    name = "int8"

    def encoded_size(self, elements: int) -> int:
        return 4 * _blocks(elements) + elements

    def _encode(self, values: Vector, target: memoryview) -> None:
        scales, integers = _views(target, values.size)
        scratch = np.empty(min(STEP, values.size), np.float32)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            whole = step.size - step.size % BLOCK
            for first, last in ((0, whole), (whole, step.size)):
                if first == last:
                    continue
                blocks = step[first:last].reshape(-1, min(BLOCK, last - first))  # (blocks, BLOCK), or (1, tail)
                block = (start + first) // BLOCK
                scale = _scales(blocks)
                scales[block : block + len(scale)] = scale
                with np.errstate(divide="ignore"):
                    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
                rounded = scratch[: last - first].reshape(blocks.shape)
                np.multiply(blocks, inverse[:, None], out=rounded)
                np.rint(rounded, out=rounded)
                integers[start + first : start + last].reshape(blocks.shape)[:] = rounded

    def _decode(self, raw: memoryview, values: Vector) -> None:
        scales, integers = _views(raw, values.size)
        bits = scales.view("<u4")
        if np.any((bits & _DROPPED_BITS) | ((bits != 0) & (bits < _SMALLEST)) | (bits > _LARGEST)):
            raise CodecError("int8: a scale is negative, not finite, out of range or has more than 17 significant bits")
        if values.size and integers.min() < -STEPS:
            raise CodecError("int8: an integer is -128; the range is -127 to 127")
        whole = values.size - values.size % BLOCK
        np.multiply(
            integers[:whole].reshape(-1, BLOCK),
            scales[: whole // BLOCK, None],
            out=values[:whole].reshape(-1, BLOCK),
            dtype=np.float32,
        )
        np.multiply(integers[whole:], scales[whole // BLOCK :], out=values[whole:], dtype=np.float32)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _views(raw: memoryview, elements: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """The scales (blocks,) and the integers (elements,) inside encoded bytes."""
    end = 4 * _blocks(elements)
    return np.frombuffer(raw[:end], "<f4"), np.frombuffer(raw[end:], np.int8)


def _scales(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """One scale for each row of `blocks`, (n, k) -> (n,).

    Raises CodecError for NaN and infinity, which the extremes keep.
    """
    absmax = np.abs(np.maximum(blocks.max(axis=1), -blocks.min(axis=1)))  # abs: a block of zeros may give -0.0
    if not np.isfinite(absmax).all():
        raise CodecError("int8: values to encode contain NaN or infinity")
    bits = (absmax / STEPS).view(np.uint32)
    bits = np.where(bits < _SMALLEST, np.uint32(0), (bits + _DROPPED_BITS) & ~_DROPPED_BITS)
    return np.minimum(bits, np.uint32(_LARGEST)).view(np.float32)
