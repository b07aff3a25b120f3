"""What a member computes in an all-reduce (`allreduce.py`), a batch of cells at a time, in threads.

Every cell goes through it while a core's cache holds it, and no step takes new memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarmnode.protocols.exchange.cells import CELL, Cells
from swarmnode.training.codecs import Codec, CodecError
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.outer import fold_in, shares_of

Vector = NDArray[np.float32]


class Undecodable(Exception):
    """The contribution with this index is no encoding."""

    def __init__(self, index: int) -> None:
        super().__init__(f"contribution {index} is no encoding")
        self.index = index


class Reduction:
    """The arithmetic of one node, with the two residuals that live across rounds.

    `encode`, `reduce` and `decode` may run at the same time, each in one thread.
    """

    def __init__(self, codec: Codec, parameters: int) -> None:
        self._codec = codec
        self.sent = ErrorFeedback(codec, parameters)  # what this node's own encoded parts left out
        self.reduced = ErrorFeedback(codec, parameters)  # what the re-encoding of its reduced part left out
        self._owned: tuple[int, int] | None = None  # range that `reduced` belongs to
        self._scratch = np.empty((2, min(CELL, parameters)), np.float32)

    def own(self, cells: Cells) -> None:
        """This node reduces this part now: of its residual, what lies elsewhere is dropped."""
        if self._owned != (cells.start, cells.stop):
            self.reduced.keep_only(cells.start, cells.stop)
            self._owned = (cells.start, cells.stop)

    def encode(self, cells: Cells, batch: range, values: Vector, out: memoryview) -> int:
        """Encode this node's `values`, float32 (P,), into the part's bytes `out`.

        Returns how many cells could not be encoded and are sent as zeros.
        """
        lost = 0
        for cell in batch:
            place = cells.elements(cell)
            lost += not self._encoded(self.sent, place, values[place], cells.raw(cell, out))
        return lost

    def reduce(
        self,
        cells: Cells,
        batch: range,
        contributions: Sequence[memoryview],
        weights: Sequence[int],
        out: memoryview,
        mean: Vector,
    ) -> int:
        """Encode the weighted mean of all `contributions` to the part into `out`, and decode that into `mean` (P,).

        Returns how many cells have a mean that cannot be encoded and counts as zeros. Raises Undecodable.
        """
        lost = 0
        shares = shares_of(weights)
        for cell in batch:
            place = cells.elements(cell)
            size = place.stop - place.start
            total, decoded = self._scratch[:, :size]
            total.fill(0)
            for index, (share, raw) in enumerate(zip(shares, contributions, strict=True)):
                try:
                    self._codec.decode(cells.raw(cell, raw), size, decoded)
                except CodecError as error:
                    raise Undecodable(index) from error
                fold_in(total, share, decoded, decoded)
            lost += not self._encoded(self.reduced, place, total, cells.raw(cell, out))
            self._codec.decode(cells.raw(cell, out), size, mean[place])
        return lost

    def decode(self, cells: Cells, batch: range, raw: memoryview, mean: Vector) -> None:
        """Decode cells of a part into `mean` (P,). Raises CodecError."""
        for cell in batch:
            place = cells.elements(cell)
            self._codec.decode(cells.raw(cell, raw), place.stop - place.start, mean[place])

    def commit(self) -> None:
        """The round counted: what its encodings left out is sent with the next."""
        self.sent.commit()
        self.reduced.commit()

    def rollback(self) -> None:
        """The attempt did not count: its encodings never happened."""
        self.sent.rollback()
        self.reduced.rollback()

    def _encoded(self, feedback: ErrorFeedback, place: slice, values: Vector, out: memoryview) -> bool:
        """Encode `values`, which stand at `place`, into `out`; zeros, and False, where that is not possible."""
        try:
            feedback.encode_range(place.start, place.stop, values, out)
        except CodecError:
            feedback.drop_range(place.start, place.stop)
            self._codec.encode(np.zeros(values.size, np.float32), out)
            return False
        return True
