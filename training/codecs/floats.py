"""fp32, bf16 and fp16: the values themselves with all, or the first, of their bits, little-endian.

    fp32   4 bytes an element, exact: the baseline for parity tests
    bf16   2 bytes: the upper half of a float32, rounded half to even. The range of float32 with 8 significant bits, for
           values whose scale nobody knows beforehand. What would round to infinity becomes the largest finite value
    fp16   2 bytes: IEEE 754 binary16, rounded half to even. Finite values beyond ±65504 saturate there; what that loses
           is for the error feedback to bring later

numpy converts between float32 and float16 one element at a time, 3 to 4 ns each. Here both ways are a few operations on
whole vectors, at a third and a tenth of that, with the same result, bit for bit:

- encoding adds to each value B, the power of two beside which float32 has exactly as many places left as binary16 gives
  to that value: so the addition rounds, and the difference of the bits of the sum and of B is the significand;
- decoding moves the bits of exponent and significand to where float32 has them, which makes the value 2^-112 of what it
  is to be, and multiplies. Values below 2^-14 are subnormal numbers on that way. A processor that was told to take
  those for zeros must not: it is asked each time, and then numpy converts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import STEP, Codec, CodecError, Vector, check_finite


class Fp32(Codec):
    """`encode(decode(raw)) == raw` and `decode(encode(x))` is `x`, bit for bit."""

    name = "fp32"

    def encoded_size(self, elements: int) -> int:
        return 4 * elements

    def _encode(self, values: Vector, target: memoryview) -> None:
        check_finite(values)
        np.frombuffer(target, "<f4")[:] = values

    def _decode(self, raw: memoryview, values: Vector) -> None:
        np.copyto(values, np.frombuffer(raw, "<f4"))
        check_finite(values)


_BF16_LARGEST = np.uint32(0x7F7F)  # 3.39e38, without its sign
_BF16_SIGN = np.uint32(0x8000)


class Bf16(Codec):
    """Stable: `encode(decode(raw)) == raw` for every `raw` that decodes."""

    name = "bf16"

    def encoded_size(self, elements: int) -> int:
        return 2 * elements

    def _encode(self, values: Vector, target: memoryview) -> None:
        halves = np.frombuffer(target, "<u2")
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            check_finite(step)
            halves[start : start + STEP] = to_bf16(step)

    def _decode(self, raw: memoryview, values: Vector) -> None:
        bits = values.view(np.uint32)
        np.copyto(bits, np.frombuffer(raw, "<u2"))
        np.left_shift(bits, 16, out=bits)
        check_finite(values)


def to_bf16(values: Vector, *, up: bool = False) -> NDArray[np.uint32]:
    """The bits of finite `values` as bf16, below 2^16; rounded half to even, or `up` away from zero."""
    bits = values.view(np.uint32)
    bits = bits + (
        np.uint32(0xFFFF) if up else np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    ) >> np.uint32(16)
    return np.minimum(bits & ~_BF16_SIGN, _BF16_LARGEST) | bits & _BF16_SIGN


def from_bf16(halves: NDArray[np.uint16] | NDArray[np.uint32]) -> Vector:
    return (halves.astype(np.uint32) << 16).view(np.float32)


LARGEST = np.float32(np.finfo(np.float16).max)  # 65504

_SIGN = np.uint32(0x80000000)
_EXPONENT = np.uint32(0x7F800000)
_SHIFT = 13  # places that binary16 has fewer
_LEAST = np.uint32(113 << 23)  # 2^-14: below it the places of binary16 are those of 2^-14
_PLACES = np.uint32(_SHIFT << 23)  # B has this much more of an exponent than the value
_BIAS = np.uint32((113 + _SHIFT) << (23 - _SHIFT))  # what B's exponent is at 2^-14, where binary16 has it
_MOVED = np.int32(-0x70002000)  # 0x8FFFE000: the sign, exponent and significand of binary16 after a shift by 13
_UP = np.float32(2.0**112)
_INFINITY = 0x7C00
_SUBNORMAL = np.array([1 << _SHIFT], np.uint32).view(np.float32)


class Fp16(Codec):
    """Stable: `encode(decode(raw)) == raw` for every `raw` that decodes."""

    name = "fp16"

    def encoded_size(self, elements: int) -> int:
        return 2 * elements

    def _encode(self, values: Vector, target: memoryview) -> None:
        halves = np.frombuffer(target, "<u2")
        scratch = np.empty((4, min(STEP, values.size)), np.uint32)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            rows = scratch[:, : step.size]
            if check_finite(step) > LARGEST:
                step = np.clip(step, -LARGEST, LARGEST, out=rows[3].view(np.float32))
            _to_halves(step, rows[:3], halves[start : start + STEP])

    def _decode(self, raw: memoryview, values: Vector) -> None:
        halves = np.frombuffer(raw, "<i2")
        exact = (_SUBNORMAL * _UP)[0] > 0  # how this thread's processor goes about subnormal numbers
        for start in range(0, values.size, STEP):
            step, value = halves[start : start + STEP], values[start : start + STEP]
            # as integers, infinity and NaN are the greatest of either sign; negative ones begin at -0x8000
            if step.max() >= _INFINITY or (step.view("<u2")).max() >= _INFINITY | 0x8000:
                raise CodecError("fp16: NaN or infinity")
            if exact:
                bits = value.view(np.int32)
                np.copyto(bits, step)
                np.left_shift(bits, _SHIFT, out=bits)
                np.bitwise_and(bits, _MOVED, out=bits)
                np.multiply(value, _UP, out=value)
            else:
                np.copyto(value, step.view("<f2"))


def _to_halves(values: Vector, scratch: NDArray[np.uint32], halves: NDArray[np.uint16]) -> None:
    """Round `values`, float32 (n,), at most LARGEST, to binary16 bits; `scratch` is (3, n)."""
    bits = values.view(np.uint32)
    exponent, signed, sign = scratch
    np.bitwise_and(bits, _EXPONENT, out=exponent)
    np.maximum(exponent, _LEAST, out=exponent)
    np.add(exponent, _PLACES, out=exponent)  # the bits of B, without its sign
    np.bitwise_and(bits, _SIGN, out=sign)
    np.bitwise_or(exponent, sign, out=signed)
    np.right_shift(exponent, _SHIFT, out=exponent)
    np.right_shift(sign, 16, out=sign)
    np.add(exponent, sign, out=exponent)
    np.subtract(exponent, _BIAS, out=exponent)
    np.subtract(exponent, signed, out=exponent)  # B's bits go here, before its sum takes its place; both wrap around
    total = np.add(values, signed.view(np.float32), out=signed.view(np.float32))
    np.add(exponent, total.view(np.uint32), out=exponent)
    np.copyto(halves, exponent, casting="unsafe")
