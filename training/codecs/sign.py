"""sign and sign3: one bit an element and the mean magnitude of its block of 1024; sign3 sends a third of them.

    sign   0.129 bytes an element
           bytes = magnitudes, one float32 a block, little-endian ‖ bits, the first element in the lowest,
           set for negative
           value = -magnitude where the bit is set, else +magnitude
    sign3  0.043 bytes an element, another third of the vector in each round
           bytes = turn, 0 to 2, one byte ‖ what `sign` makes of every third piece of 1024
           elements from that one on ‖ zeros

signSGD with the scale that keeps the sum of magnitudes (Bernstein et al. 1802.04434; with error feedback Karimireddy et
al. 1901.09847, section 4). Only of use with error feedback: alone it moves every element, however small it was.

With sign3 everybody sends the same elements in a round, so that the mean over many takes off the noise of one bit, and
no element waits longer than three rounds: the fragments of Streaming DiLoCo (2501.18512), striped, at the bits of 1-bit
Adam (2102.02888). Of a vector shorter than three pieces, pieces are a third of it. All turns take as many bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import Blockwise, Codec, CodecError, Vector, check_finite

BLOCK = 1024  # elements that share a magnitude; divides STEP


class Sign(Blockwise):
    """Stable: `encode(decode(raw)) == raw` for every `raw` that `encode` made."""

    name = "sign"
    packs = False

    block, scale, in_byte = BLOCK, np.dtype("<f4"), 8

    def _encode_blocks(
        self, blocks: Vector, elements: int, scales: NDArray[Any], codes: NDArray[np.uint8], scratch: Vector
    ) -> None:
        sums = np.abs(blocks, dtype=np.float64).sum(axis=1)
        if not np.isfinite(sums).all():
            raise CodecError("sign: values to encode contain NaN or infinity")
        sizes = np.full(sums.size, BLOCK)
        sizes[-1] -= blocks.size - elements
        scales[:] = sums / sizes
        scales[scales < np.finfo(np.float32).tiny] = 0  # subnormal: some CPUs take it for zero
        codes[:] = np.packbits((blocks < 0) & (scales > 0)[:, None], bitorder="little")

    def _check_scales(self, scales: NDArray[Any]) -> None:
        smallest = np.finfo(np.float32).tiny
        if not np.all((scales >= smallest) & np.isfinite(scales) | (scales.view("<u4") == 0)):
            raise CodecError("sign: a magnitude is negative, not finite or subnormal")

    def _decode_blocks(self, scales: NDArray[Any], codes: NDArray[np.uint8], blocks: Vector) -> None:
        # The bit of an element is the sign bit of its magnitude.
        bits = blocks.view(np.uint32)
        negative = np.unpackbits(codes, bitorder="little").astype(np.uint32)
        np.left_shift(negative.reshape(blocks.shape), 31, out=bits)
        np.bitwise_or(bits, scales.view("<u4")[:, None], out=bits)


TURNS = 3

_SIGN = Sign()


class Sign3(Codec):
    """Stable: encoding a decoded vector in the same turn gives the same bytes."""

    name = "sign3"
    packs = False

    def __init__(self, turn: int = 0) -> None:
        """`turn`: whose elements `encode` sends. What is decoded says which it was."""
        self.turn = turn % TURNS

    def encoded_size(self, elements: int) -> int:
        return 1 + max(_SIGN.encoded_size(_Cut(elements, turn).count) for turn in range(TURNS))

    def _encode(self, values: Vector, target: memoryview) -> None:
        check_finite(values)
        target[0] = self.turn
        used = 1 + len(_SIGN.encode(_Cut(values.size, self.turn).take(values), target[1:]))
        target[used:] = bytes(len(target) - used)

    def _decode(self, raw: memoryview, values: Vector) -> None:
        if raw[0] >= TURNS:
            raise CodecError(f"sign3: the first byte is none of the turns 0 to {TURNS - 1}")
        cut = _Cut(values.size, raw[0])
        used = 1 + _SIGN.encoded_size(cut.count)
        if any(raw[used:]):
            raise CodecError("sign3: bits are set beyond the last element")
        whole = values if values.flags.c_contiguous else np.empty(values.size, np.float32)
        whole[:] = 0
        cut.put(_SIGN.decode(raw[1:used], cut.count), whole)
        if whole is not values:
            np.copyto(values, whole)


class _Cut:
    """Which elements of a vector (n,) are sent in a turn."""

    def __init__(self, elements: int, turn: int) -> None:
        self._turn = turn
        self._piece = min(BLOCK, max(1, -(-elements // TURNS)))
        stripe = TURNS * self._piece
        self._whole = elements // stripe * stripe  # of the vector, in stripes with a piece for each turn
        self._rest = slice(
            min(elements, self._whole + turn * self._piece), min(elements, self._whole + (turn + 1) * self._piece)
        )
        self._striped = self._whole // TURNS
        self.count = self._striped + self._rest.stop - self._rest.start

    def take(self, values: Vector) -> Vector:
        """The elements (count,) of `values`."""
        return np.concatenate([self._pieces(values).reshape(-1), values[self._rest]])

    def put(self, sent: Vector, values: Vector) -> None:
        """Write what `take` took to where it stood in `values`, which is contiguous."""
        self._pieces(values)[:] = sent[: self._striped].reshape(-1, self._piece)
        values[self._rest] = sent[self._striped :]

    def _pieces(self, values: Vector) -> Vector:
        return values[: self._whole].reshape(-1, TURNS, self._piece)[:, self._turn]
