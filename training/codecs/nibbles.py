"""int4 and e3m0: four bits an element and one bf16 scale a block of 64, 0.53 bytes an element.

    bytes = scales, one bf16 a block, little-endian ‖ codes, two a byte, the first in the low half
    int4:  value = integer * scale,  integers -7 to 7,  scale = absmax of the block / 7
    e3m0:  value = ±scale * 2^(e - 7) for e = 1 to 7, and zero for e = 0,  scale = absmax of the block

e3m0 (one sign bit, three of exponent) is what Streaming DiLoCo exchanges (2501.18512, section 2.4). Scales are rounded
up, so no element lies beyond its block's range. A scale has 8 significant bits and a code at most 3, so decoding rounds
nothing: every CPU gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import STEP, CodecError, Vector, checked_bytes, checked_values, room
from swarmnode.training.codecs.bf16 import from_bf16, to_bf16

BLOCK = 64  # elements that share a scale; divides STEP
_SMALLEST = 0x0400  # bf16 of 2^-119: the codes of smaller scales would be subnormal, which some CPUs take for zero
_LARGEST = 0x7F7F  # the largest finite bf16
_SIGN = np.uint8(8)


class Blockwise4(ABC):
    """What int4 and e3m0 share. Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made."""

    name: str
    top: np.float32  # the greatest multiple of a scale

    def encoded_size(self, elements: int) -> int:
        return 2 * _blocks(elements) + -(-elements // 2)

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        target = room(out, self.encoded_size(values.size))
        end = 2 * _blocks(values.size)
        scales, packed = np.frombuffer(target[:end], "<u2"), np.frombuffer(target[end:], np.uint8)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            blocks = np.pad(step, (0, -step.size % BLOCK)).reshape(-1, BLOCK)
            halves = self._scales(blocks)
            scales[start // BLOCK : start // BLOCK + halves.size] = halves
            scale = from_bf16(halves)[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                relative = np.where(scale > 0, blocks / scale, np.float32(0))
            codes = self._codes(relative).reshape(-1, 2)
            taken = -(-step.size // 2)
            packed[start // 2 : start // 2 + taken] = (codes[:, 0] | codes[:, 1] << 4)[:taken]
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> Vector:
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        end = 2 * _blocks(elements)
        halves, packed = np.frombuffer(view[:end], "<u2"), np.frombuffer(view[end:], np.uint8)
        if np.any((halves != 0) & (halves < _SMALLEST) | (halves > _LARGEST)):
            raise CodecError(f"{self.name}: a scale is negative, not finite or out of range")
        codes = np.empty((packed.size, 2), np.uint8)
        codes[:, 0], codes[:, 1] = packed & 15, packed >> 4
        flat = codes.reshape(-1)
        if (flat == _SIGN).any() or flat[elements:].any():
            raise CodecError(f"{self.name}: a code that no encoder makes")
        values = np.zeros(_blocks(elements) * BLOCK, np.float32)
        values[:elements] = self._multiples()[flat[:elements]]
        blocks = values.reshape(-1, BLOCK)
        np.multiply(blocks, from_bf16(halves)[:, None], out=blocks)
        return values[:elements]

    def _scales(self, blocks: Vector) -> NDArray[np.uint32]:
        """bf16 bits of one scale for each row, (n, BLOCK) -> (n,). Raises CodecError for NaN and infinity."""
        absmax = np.abs(np.maximum(blocks.max(axis=1), -blocks.min(axis=1)))
        if not np.isfinite(absmax).all():
            raise CodecError(f"{self.name}: values to encode contain NaN or infinity")
        halves = np.minimum(to_bf16(absmax / self.top, up=True), np.uint32(self._largest()))
        return np.where(halves < _SMALLEST, np.uint32(0), halves)

    def _largest(self) -> int:
        """bf16 bits of the largest scale whose multiples are all finite."""
        limit = np.array([np.finfo(np.float32).max / self.top], np.float32)
        return int(limit.view(np.uint32)[0] >> 16)

    @abstractmethod
    def _codes(self, relative: Vector) -> NDArray[np.uint8]:
        """The codes, 0 to 15, of values in units of their block's scale."""

    @abstractmethod
    def _multiples(self) -> Vector:
        """What each of the 16 codes stands for, in units of the scale; float32 (16,)."""


class Int4(Blockwise4):
    """The error of an element is at most half a step, absmax / 14 (and 1 % of that for the rounding of the scale)."""

    name = "int4"
    top = np.float32(7)

    def _codes(self, relative: Vector) -> NDArray[np.uint8]:
        # int8 keeps two's complement: the low four bits of -7 to 7
        return np.clip(np.rint(relative), -7, 7).astype(np.int8).view(np.uint8) & np.uint8(15)

    def _multiples(self) -> Vector:
        return np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, -7, -6, -5, -4, -3, -2, -1], np.float32)


class E3M0(Blockwise4):
    """The error of an element is at most a third of it, or absmax / 128 where that is more."""

    name = "e3m0"
    top = np.float32(1)

    def _codes(self, relative: Vector) -> NDArray[np.uint8]:
        # Halfway between neighbours 2^(e-8) and 2^(e-7) is 1.5 * 2^(e-8); below half the smallest lies zero.
        bounds = np.array([2.0**-7, *(1.5 * 2.0 ** (e - 8) for e in range(2, 8))], np.float32)
        exponents = np.searchsorted(bounds, np.abs(relative), side="right").astype(np.uint8)
        return exponents | np.where((relative < 0) & (exponents > 0), _SIGN, np.uint8(0))

    def _multiples(self) -> Vector:
        positive = [0.0, *(2.0 ** (e - 7) for e in range(1, 8))]
        return np.array([*positive, *(-value for value in positive)], np.float32)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)
