"""int4 and e3m0: four bits an element and one bf16 scale a block of 64, 0.53 bytes an element.

    bytes = scales, one bf16 a block, little-endian ‖ codes, two a byte, the first in the low half
    int4:  value = integer * scale,  integers -7 to 7,  scale = absmax of the block / 7
    e3m0:  value = ±scale * 2^(e - 7) for e = 1 to 7, and zero for e = 0,  scale = absmax of the block

e3m0 (one sign bit, three of exponent) is what Streaming DiLoCo exchanges (2501.18512, section 2.4). Scales are rounded
up, so no element lies beyond its block's range. A scale has 8 significant bits and a code at most 3, so decoding rounds
nothing: every CPU gives the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import Blockwise, CodecError, Vector
from swarmnode.training.codecs.floats import from_bf16, to_bf16

BLOCK = 64  # elements that share a scale; divides STEP
_SMALLEST = 0x0400  # bf16 of 2^-119: the codes of smaller scales would be subnormal, which some CPUs take for zero
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)  # magnitudes from here on are infinite or NaN
_MINUS_ZERO = 8  # the one code that no encoder makes: bit 3 with nothing below it


class FourBits(Blockwise):
    """What int4 and e3m0 share. Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made."""

    block, scale, in_byte = BLOCK, np.dtype("<u2"), 2
    multiples: Vector  # what each of the 16 codes stands for, in units of the scale
    _top: np.float32  # the greatest of them
    _largest: int  # bf16 bits of the largest scale whose multiples are all finite
    _pairs: NDArray[np.complex64]  # the two values that each byte of codes stands for, in units of the scale; (256,)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._top = cls.multiples.max()
        cls._largest = int((np.finfo(np.float32).max / cls._top).view(np.uint32) >> np.uint32(16))
        codes = np.arange(256)
        cls._pairs = np.stack([cls.multiples[codes & 15], cls.multiples[codes >> 4]], axis=1).view(np.complex64)[:, 0]

    def _encode_blocks(
        self, blocks: Vector, elements: int, scales: NDArray[Any], codes: NDArray[np.uint8], scratch: Vector
    ) -> None:
        scales[:] = self._scales(np.bitwise_and(blocks.view(np.uint32), _MAGNITUDE, out=scratch.view(np.uint32)))
        scale = from_bf16(scales)
        scale[scales == 0] = np.inf  # all of such a block becomes zero
        pairs = self._codes(np.divide(blocks, scale[:, None], out=scratch)).reshape(-1).view("<u2")
        np.copyto(codes, pairs | pairs >> 4, casting="unsafe")

    def _check_scales(self, scales: NDArray[Any]) -> None:
        if np.any((scales != 0) & (scales < _SMALLEST) | (scales > self._largest)):
            raise CodecError(f"{self.name}: a scale is negative, not finite or out of range")

    def _decode_blocks(self, scales: NDArray[Any], codes: NDArray[np.uint8], blocks: Vector) -> None:
        if ((codes & 15 == _MINUS_ZERO) | (codes >> 4 == _MINUS_ZERO)).any():
            raise CodecError(f"{self.name}: a code that no encoder makes")
        # `clip` takes without a check of its own: there are 256 values, for any byte
        np.take(self._pairs, codes.astype(np.intp), out=blocks.reshape(-1).view(np.complex64), mode="clip")
        np.multiply(blocks, from_bf16(scales)[:, None], out=blocks)

    def _scales(self, magnitudes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """bf16 bits of one scale for each row of float32 bits without their signs, (n, BLOCK) -> (n,).

        Raises CodecError for NaN and infinity. Such bits are in the order of their values, NaN the greatest; and
        integers have a fast maximum, where that of floats looks for NaN.
        """
        greatest = magnitudes.max(axis=1)
        if (greatest >= _INFINITY).any():
            raise CodecError(f"{self.name}: values to encode contain NaN or infinity")
        halves = np.minimum(to_bf16(greatest.view(np.float32) / self._top, up=True), np.uint32(self._largest))
        return np.where(halves < _SMALLEST, np.uint32(0), halves)

    @staticmethod
    @abstractmethod
    def _codes(relative: Vector) -> NDArray[np.uint8]:
        """The codes, 0 to 15, of values in units of their block's scale, which this may overwrite."""


class Int4(FourBits):
    """The error of an element is at most half a step, absmax / 14 (and 1 % of that for the rounding of the scale)."""

    name = "int4"
    multiples = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, -7, -6, -5, -4, -3, -2, -1], np.float32)

    @staticmethod
    def _codes(relative: Vector) -> NDArray[np.uint8]:
        # Beside 1.5 * 2^23 a float32 has no room for fractions: the sum is rounded half to even, and its low four bits
        # are the two's complement of the integer. A scale is too small by less than 1/127, so none goes beyond 7.
        bits = np.add(relative, np.float32(1.5 * 2**23), out=relative).view(np.uint32)
        return np.bitwise_and(bits, np.uint32(15), out=bits).astype(np.uint8)


class E3M0(FourBits):
    """The error of an element is at most a third of it, or absmax / 128 where that is more."""

    name = "e3m0"
    multiples = np.outer([1, -1], [0, *np.ldexp(1.0, np.arange(-6, 1))]).astype(np.float32).reshape(16)

    @staticmethod
    def _codes(relative: Vector) -> NDArray[np.uint8]:
        # Halfway between neighbours 2^(e-8) and 2^(e-7) is 1.5 * 2^(e-8), from which on half of a significand carries
        # into the exponent. Below 2^-7, half of the smallest (and the exponent 120), lies zero.
        bits = relative.view(np.uint32)
        magnitudes = bits & _MAGNITUDE
        exponents = magnitudes + np.uint32(1 << 22) >> np.uint32(23)
        codes = np.clip(exponents, 121, 127, out=exponents) - np.uint32(120) | bits >> np.uint32(28) & np.uint32(8)
        return (codes * (magnitudes >= np.uint32(120 << 23))).astype(np.uint8)
