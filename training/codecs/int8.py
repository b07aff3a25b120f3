"""int8: a signed byte an element and one float32 scale a block of 1024, 1.0039 bytes an element.

    bytes = scales, one float32 a block, little-endian ‖ integers, one int8 an element
    value = integer * scale,  integer = round half even(value * (1 / scale)),  scale = absmax of the block / 127

Scales are rounded up to 17 significant bits. An integer has at most 7, so `integer * scale` has at most 24 and is
*exact* in float32: decoding rounds nothing, and gives the same bits on every CPU, also where a compiler fuses a
multiplication with the addition behind it. For the same reason a re-encoding of decoded values makes the same bytes.
The price is a step that is wider by less than 2^-16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import Blockwise, CodecError, Vector

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


class Int8(Blockwise):
    """Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made.

    The error of an element is at most half a step: absmax of its block / 254 (plus 2^-16 of that); in a block whose
    absmax is below 127 * 2^-120 all elements become zero.
    """

    name = "int8"
    block, scale, in_byte = BLOCK, np.dtype("<f4"), 1

    def _encode_blocks(
        self, blocks: Vector, elements: int, scales: NDArray[Any], codes: NDArray[np.uint8], scratch: Vector
    ) -> None:
        scales[:] = _scales(blocks)
        with np.errstate(divide="ignore"):
            inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        np.multiply(blocks, inverse[:, None], out=scratch)
        np.rint(scratch, out=scratch)
        codes.view(np.int8).reshape(blocks.shape)[:] = scratch

    def _check_scales(self, scales: NDArray[Any]) -> None:
        bits = scales.view("<u4")
        if np.any((bits & _DROPPED_BITS) | ((bits != 0) & (bits < _SMALLEST)) | (bits > _LARGEST)):
            raise CodecError("int8: a scale is negative, not finite, out of range or has more than 17 significant bits")

    def _decode_blocks(self, scales: NDArray[Any], codes: NDArray[np.uint8], blocks: Vector) -> None:
        integers = codes.view(np.int8)
        if integers.min() < -STEPS:
            raise CodecError("int8: an integer is -128; the range is -127 to 127")
        np.multiply(integers.reshape(blocks.shape), scales[:, None], out=blocks, dtype=np.float32)


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
