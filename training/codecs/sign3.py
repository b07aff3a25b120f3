"""sign3: one bit an element of a third of the vector, another third in each round; 0.043 bytes an element.

    bytes = turn, 0 to 2, one byte ‖ what `sign` makes of every third piece of 1024 elements from that one on ‖ zeros

Everybody sends the same elements in a round, so that the mean over many takes off the noise of one bit, and no element
waits longer than three rounds: the fragments of Streaming DiLoCo (2501.18512), striped, at the bits of 1-bit Adam
(2102.02888). Of a vector shorter than three pieces, pieces are a third of it. All turns take as many bytes.
"""

from __future__ import annotations

import numpy as np

from swarmnode.training.codecs.base import CodecError, Vector, check_finite, checked_bytes, checked_values, handed, room
from swarmnode.training.codecs.sign import BLOCK, Sign

TURNS = 3

_SIGN = Sign()


class Sign3:
    """Implements `Codec`. Stable: encoding a decoded vector in the same turn gives the same bytes."""

    name = "sign3"

    def __init__(self, turn: int = 0) -> None:
        """`turn`: whose elements `encode` sends. What is decoded says which it was."""
        self.turn = turn % TURNS

    def encoded_size(self, elements: int) -> int:
        return 1 + max(_SIGN.encoded_size(_Cut(elements, turn).count) for turn in range(TURNS))

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        check_finite(values)
        target = room(out, self.encoded_size(values.size))
        target[0] = self.turn
        used = 1 + len(_SIGN.encode(_Cut(values.size, self.turn).take(values), target[1:]))
        target[used:] = bytes(len(target) - used)
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int, out: Vector | None = None) -> Vector:
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        cut = _Cut(elements, turn_of(view))
        used = 1 + _SIGN.encoded_size(cut.count)
        if any(view[used:]):
            raise CodecError("sign3: bits are set beyond the last element")
        values = np.zeros(elements, np.float32)
        cut.put(_SIGN.decode(view[1:used], cut.count), values)
        return handed(values, out)


def turn_of(raw: bytes | bytearray | memoryview) -> int:
    """Whose turn it was when this was encoded. Raises CodecError."""
    if not len(raw) or raw[0] >= TURNS:
        raise CodecError(f"sign3: the first byte is none of the turns 0 to {TURNS - 1}")
    return int(raw[0])


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
