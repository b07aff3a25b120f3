"""How a part of the vector lies on the wire, and the memory that it passes through.

A part is encoded cell by cell, each on its own, and the encoded cells follow one another. So a cell can be sent while
the next is encoded, and reduced while the next arrives; and its 512 KiB stay in a core's cache through all of that.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs import Codec
from swarmnode.training.codecs.base import STEP

CELL = STEP  # elements; the blocks of all codecs divide it
BATCH = 8  # cells that are worth waking a thread for: about 2 ms of work


@dataclass(frozen=True)
class Cells:
    """Elements `start` to `stop` of the vector, cut into cells of CELL elements; the last may be shorter.

    So may those before one of the `cuts`, elements at which cells begin as well: what lies between two of them is
    encoded as if it stood alone.
    """

    start: int
    stop: int
    codec: Codec
    cuts: tuple[int, ...] = ()  # ascending, between start and stop

    @cached_property
    def _edges(self) -> list[int]:
        """The elements at which cells begin, and `stop`."""
        stretches = pairwise((self.start, *self.cuts, self.stop))
        return [edge for first, end in stretches for edge in range(first, end, CELL)] + [self.stop]

    @cached_property
    def _offsets(self) -> list[int]:
        """The bytes at which encoded cells begin, and `size`."""
        sizes = (self.codec.encoded_size(end - first) for first, end in pairwise(self._edges))
        return [0, *accumulate(sizes)]

    @property
    def count(self) -> int:
        return len(self._edges) - 1

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
        return slice(self._edges[cell], self._edges[cell + 1])

    def raw(self, cell: int, encoded: memoryview) -> memoryview:
        """The bytes of a cell within those of the part."""
        return encoded[self._offsets[cell] : self._offsets[cell + 1]]


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

    def give(self, view: memoryview) -> None:
        """Take back what `take` handed out; nobody reads or writes it any more."""
        self._free.append((self._round, view.obj))  # type: ignore[arg-type]

    def next_round(self) -> None:
        """Let go of what was not needed for a whole round."""
        self._free = [(used, memory) for used, memory in self._free if used >= self._round - 1]
        self._round += 1
