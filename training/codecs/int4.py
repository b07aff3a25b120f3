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

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import STEP, Codec, CodecError, Vector
from swarmnode.training.codecs.floats import from_bf16, to_bf16

BLOCK = 64  # elements that share a scale; divides STEP
_SMALLEST = 0x0400  # bf16 of 2^-119: the codes of smaller scales would be subnormal, which some CPUs take for zero
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)  # magnitudes from here on are infinite or NaN
_MINUS_ZERO = 8  # the one code that no encoder makes: bit 3 with nothing below it


class Blockwise4(Codec):
    """What int4 and e3m0 share. Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made."""

    name: str
    top: np.float32  # the greatest multiple of a scale
    _largest: int  # bf16 bits of the largest scale whose multiples are all finite
    _pairs: NDArray[np.complex64]  # the two values that each byte of codes stands for, in units of the scale; (256,)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._largest = int((np.finfo(np.float32).max / cls.top).view(np.uint32) >> np.uint32(16))
        codes = np.arange(256)
        multiples = cls._multiples()
        cls._pairs = np.stack([multiples[codes & 15], multiples[codes >> 4]], axis=1).view(np.complex64)[:, 0]

    def encoded_size(self, elements: int) -> int:
        return 2 * _blocks(elements) + -(-elements // 2)

    def _encode(self, values: Vector, target: memoryview) -> None:
        scales, packed = _sections(target, values.size)
        scratch = np.empty(min(STEP, _blocks(values.size) * BLOCK), np.float32)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            blocks = (np.pad(step, (0, -step.size % BLOCK)) if step.size % BLOCK else step).reshape(-1, BLOCK)
            relative = scratch[: blocks.size].reshape(blocks.shape)
            halves = self._scales(np.bitwise_and(blocks.view(np.uint32), _MAGNITUDE, out=relative.view(np.uint32)))
            scales[start // BLOCK : start // BLOCK + halves.size] = halves
            scale = from_bf16(halves)
            scale[halves == 0] = np.inf  # all of such a block becomes zero
            pairs = self._codes(np.divide(blocks, scale[:, None], out=relative)).reshape(-1).view("<u2")
            taken = -(-step.size // 2)
            packed[start // 2 : start // 2 + taken] = (pairs | pairs >> 4).astype(np.uint8)[:taken]

    def _decode(self, raw: memoryview, values: Vector) -> None:
        halves, packed = _sections(raw, values.size)
        if np.any((halves != 0) & (halves < _SMALLEST) | (halves > self._largest)):
            raise CodecError(f"{self.name}: a scale is negative, not finite or out of range")
        if values.size % 2 and packed[-1] > 15:
            raise CodecError(f"{self.name}: a code that no encoder makes")
        index = np.empty(min(STEP // 2, packed.size), np.intp)
        for start in range(0, values.size, STEP):
            pairs = packed[start // 2 : (start + STEP) // 2]
            if ((pairs & 15 == _MINUS_ZERO) | (pairs >> 4 == _MINUS_ZERO)).any():
                raise CodecError(f"{self.name}: a code that no encoder makes")
            index[: pairs.size] = pairs
            step = values[start : start + STEP]
            whole = step.size % BLOCK == 0 and step.flags.c_contiguous
            blocks = (step if whole else np.zeros(_blocks(step.size) * BLOCK, np.float32)).reshape(-1, BLOCK)
            # `clip` takes without a check of its own: there are 256 values, for any byte
            taken = blocks.reshape(-1)[: 2 * pairs.size].view(np.complex64)
            np.take(self._pairs, index[: pairs.size], out=taken, mode="clip")
            scale = from_bf16(halves[start // BLOCK : (start + STEP) // BLOCK])
            np.multiply(blocks, scale[:, None], out=blocks)
            if not whole:
                step[:] = blocks.reshape(-1)[: step.size]

    def _scales(self, magnitudes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """bf16 bits of one scale for each row of float32 bits without their signs, (n, BLOCK) -> (n,).

        Raises CodecError for NaN and infinity. Such bits are in the order of their values, NaN the greatest; and
        integers have a fast maximum, where that of floats looks for NaN.
        """
        greatest = magnitudes.max(axis=1)
        if (greatest >= _INFINITY).any():
            raise CodecError(f"{self.name}: values to encode contain NaN or infinity")
        halves = np.minimum(to_bf16(greatest.view(np.float32) / self.top, up=True), np.uint32(self._largest))
        return np.where(halves < _SMALLEST, np.uint32(0), halves)

    @staticmethod
    @abstractmethod
    def _codes(relative: Vector) -> NDArray[np.uint8]:
        """The codes, 0 to 15, of values in units of their block's scale, which this may overwrite."""

    @staticmethod
    @abstractmethod
    def _multiples() -> Vector:
        """What each of the 16 codes stands for, in units of the scale; float32 (16,)."""


class Int4(Blockwise4):
    """The error of an element is at most half a step, absmax / 14 (and 1 % of that for the rounding of the scale)."""

    name = "int4"
    top = np.float32(7)

    @staticmethod
    def _codes(relative: Vector) -> NDArray[np.uint8]:
        # Beside 1.5 * 2^23 a float32 has no room for fractions: the sum is rounded half to even, and its low four bits
        # are the two's complement of the integer. A scale is too small by less than 1/127, so none goes beyond 7.
        bits = np.add(relative, np.float32(1.5 * 2**23), out=relative).view(np.uint32)
        return np.bitwise_and(bits, np.uint32(15), out=bits).astype(np.uint8)

    @staticmethod
    def _multiples() -> Vector:
        return np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, -7, -6, -5, -4, -3, -2, -1], np.float32)


class E3M0(Blockwise4):
    """The error of an element is at most a third of it, or absmax / 128 where that is more."""

    name = "e3m0"
    top = np.float32(1)

    @staticmethod
    def _codes(relative: Vector) -> NDArray[np.uint8]:
        # Halfway between neighbours 2^(e-8) and 2^(e-7) is 1.5 * 2^(e-8), from which on half of a significand carries
        # into the exponent. Below 2^-7, half of the smallest (and the exponent 120), lies zero.
        bits = relative.view(np.uint32)
        magnitudes = bits & _MAGNITUDE
        exponents = magnitudes + np.uint32(1 << 22) >> np.uint32(23)
        codes = np.clip(exponents, 121, 127, out=exponents) - np.uint32(120) | bits >> np.uint32(28) & np.uint32(8)
        return (codes * (magnitudes >= np.uint32(120 << 23))).astype(np.uint8)

    @staticmethod
    def _multiples() -> Vector:
        positive = [0.0, *(2.0 ** (e - 7) for e in range(1, 8))]
        return np.array([*positive, *(-value for value in positive)], np.float32)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _sections(raw: memoryview, elements: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """The scales (blocks,) as bf16 bits and the packed codes inside encoded bytes."""
    end = 2 * _blocks(elements)
    return np.frombuffer(raw[:end], "<u2"), np.frombuffer(raw[end:], np.uint8)
