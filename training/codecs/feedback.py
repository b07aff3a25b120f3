"""Error feedback: what a lossy encoding leaves out of one round is added to the next (Seide et al. 2014; 1901.09847).

    residual' = (values + decay * residual) - decode(encode(values + decay * residual))

The new residual is *pending* until the round is known to count: `commit` makes it current, `rollback` forgets it and
the residual stays what it was before. A sender has one such residual; the owner of a part has another for its
re-encoding. A decay below 1 lets work fade that never got through; SparseLoCo (2508.15706) uses 0.95.
"""

from __future__ import annotations

import math

import numpy as np

from swarmnode.training.codecs.base import Codec, Vector
from swarmnode.training.codecs.topk import TopK


class ErrorFeedback:
    """The residual of one vector of `size` elements that is encoded with `codec`, whole or in ranges.

    Not safe for use from several threads at once.
    """

    def __init__(self, codec: Codec, size: int, *, decay: float = 1.0) -> None:
        self.codec = codec
        self._decay = np.float32(decay)  # of the residual, each time it is used
        self.size = size
        self._residual: Vector = np.zeros(size, np.float32)
        self._pending: dict[int, Vector] = {}  # start of an encoded range -> its residual after the round

    @property
    def pending(self) -> bool:
        """Whether something was encoded since the last commit or rollback."""
        return bool(self._pending)

    def encode(self, values: Vector) -> memoryview:
        """`encode_range` for the whole vector, (size,)."""
        return self.encode_range(0, self.size, values)

    def encode_range(self, start: int, stop: int, values: Vector, out: memoryview | None = None) -> memoryview:
        """Encode `values` (stop - start,), elements `start` to `stop` of the vector, with the residual added.

        The same range may be encoded again before the round ends: the last encoding counts. Raises CodecError for
        values that are not finite, ValueError for a range of another length, outside the vector, or overlapping
        another pending one in part.
        """
        if not 0 <= start <= stop <= self.size or values.shape != (stop - start,):
            raise ValueError(f"range {start}:{stop} of {self.size} does not fit values of shape {values.shape}")
        for other, left in self._pending.items():
            if max(start, other) < min(stop, other + left.size) and (start, stop) != (other, other + left.size):
                raise ValueError(f"range {start}:{stop} overlaps {other}:{other + left.size}, encoded in this round")
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = self._decay * self._residual[start:stop]
            wanted += values  # beyond float32 it becomes infinite, which the codec refuses
        encoded = self.codec.encode(wanted, out)
        if isinstance(self.codec, TopK):
            for places, sent in self.codec.decode_steps(encoded, stop - start):
                wanted[places] -= sent
        else:
            wanted -= self.codec.decode(encoded, stop - start)
        if stop > start:
            self._pending[start] = wanted
        return encoded

    def commit(self) -> None:
        """The round counted: pending residuals become current. Ranges that were not encoded keep theirs."""
        for start, left in self._pending.items():
            if left.size == self.size:
                self._residual = left
                break
            self._residual[start : start + left.size] = left
        self._pending.clear()

    def rollback(self) -> None:
        """The round was abandoned: nothing that was encoded since the last commit happened."""
        self._pending.clear()

    def add(self, vector: Vector, clip_norm: float) -> None:
        """Return work of this node that did not count, (size,), to the residual.

        The residual's norm is at most `clip_norm` (or what it was before, where that is more) afterwards, however often
        work fails to count: old work ages, and a burst of it would be noise. Raises ValueError where `vector` has
        another shape or is not finite, RuntimeError while a round is pending.
        """
        if self._pending:
            raise RuntimeError("commit or roll back the round before returning work to the residual")
        if vector.shape != (self.size,):
            raise ValueError(f"work of shape {vector.shape} does not fit a residual of {self.size} elements")
        total = self._residual + vector
        norm = _norm(total)
        if not math.isfinite(norm):
            raise ValueError("work that did not count contains NaN or infinity")
        bound = max(clip_norm, _norm(self._residual))
        if norm > bound:
            total *= np.float32(bound / norm)
        self._residual = total

    def keep_only(self, start: int, stop: int) -> None:
        """Drop the residual outside `start:stop`: the owner of a part does so when ownership moves."""
        self._residual[:start] = 0
        self._residual[stop:] = 0

    def export(self) -> Vector:
        """A copy of the current residual, (size,), for a checkpoint; what is pending is not in it."""
        return self._residual.copy()

    def restore(self, residual: Vector) -> None:
        """Take the residual of a checkpoint, float32 (size,); nothing is pending.

        Raises ValueError where it does not fit.
        """
        if residual.shape != (self.size,) or residual.dtype != np.float32 or not np.isfinite(residual).all():
            raise ValueError(
                f"a residual must be {self.size} finite float32 values, not {residual.dtype} {residual.shape}"
            )
        self._residual = residual.copy()
        self._pending.clear()


def _norm(vector: Vector) -> float:
    """Euclidean norm, summed in float64 so that large vectors do not overflow."""
    return math.sqrt(float(np.einsum("i,i->", vector, vector, dtype=np.float64)))
