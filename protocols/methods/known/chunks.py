"""How a part of the vector lies on the wire, and the memory that it passes through.

A part is encoded cell by cell, each on its own, and the encoded cells follow one another. So a cell can be sent while
the next is encoded, and reduced while the next arrives; and its 512 KiB stay in a core's cache through all of that.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs import Codec
from swarmnode.training.codecs.base import STEP

CELL = STEP  # elements; the blocks of all codecs divide it
BATCH = 8  # cells that are worth waking a thread for: about 2 ms of work


@dataclass(frozen=True)
class Cells:
    """Stretches of the vector, one after another, each cut into cells of CELL elements; its last may be shorter."""

    stretches: tuple[tuple[int, int], ...]  # elements from and to which each goes
    codec: Codec

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """The elements at which each cell begins and ends."""
        return [
            (first, min(first + CELL, stop)) for start, stop in self.stretches for first in range(start, stop, CELL)
        ]

    @cached_property
    def _offsets(self) -> list[int]:
        """The bytes at which encoded cells begin, and `size`."""
        return [0, *accumulate(self.codec.encoded_size(stop - start) for start, stop in self._places)]

    @property
    def count(self) -> int:
        return len(self._places)

    @property
    def size(self) -> int:
        """Bytes of the encoded part."""
        return self._offsets[-1]

    def bytes_until(self, cell: int) -> int:
        """Bytes of the first `cell` cells."""
        return self._offsets[cell]

    def whole_in(self, ready: int) -> int:
        """How many whole cells the first `ready` bytes hold."""
        return bisect_right(self._offsets, ready) - 1

    def elements(self, cell: int) -> slice:
        """The elements of a cell, in the vector."""
        return slice(*self._places[cell])

    def raw(self, cell: int, encoded: memoryview) -> memoryview:
        """The bytes of a cell within those of the part."""
        return encoded[self._offsets[cell] : self._offsets[cell + 1]]

    def begins_like(self, other: Cells) -> int:
        """How many bytes hold the cells with which both begin."""
        pairs = enumerate(zip(self._places, other._places, strict=False))
        alike = next((cell for cell, (one, two) in pairs if one != two), min(self.count, other.count))
        return self.bytes_until(alike)


class Pool:
    """Memory that is used again: the system takes longer to hand out fresh pages than a codec to fill them.

    It keeps what was used in the last two rounds, and no more.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, NDArray[np.uint8]]] = []  # and the round in which it was last used
        self._round = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes of which nobody knows what is in them."""
        fitting = [i for i, (_, memory) in enumerate(self._free) if size <= memory.nbytes <= 4 * size]
        if not fitting:
            # what nobody writes to takes no memory; and parts grow when a round is tried again without somebody
            return np.empty(size + size // 2, np.uint8).data[:size]
        best = min(fitting, key=lambda i: self._free[i][1].nbytes)
        return self._free.pop(best)[1].data[:size]

    def enlarge(self, view: memoryview, size: int, *, used: int) -> memoryview:
        """`size` bytes in place of what `take` handed out, the first `used` of them as they are."""
        memory: NDArray[np.uint8] = view.obj  # type: ignore[assignment]
        if size <= memory.nbytes:
            return memory.data[:size]
        larger = self.take(size)
        larger[:used] = view[:used]
        self.give(view)
        return larger

    def give(self, view: memoryview) -> None:
        """Take back what `take` handed out; nobody reads or writes it any more."""
        self._free.append((self._round, view.obj))  # type: ignore[arg-type]

    def next_round(self) -> None:
        """Let go of what was not needed for a whole round."""
        self._free = [(used, memory) for used, memory in self._free if used >= self._round - 1]
        self._round += 1
