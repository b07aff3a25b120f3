"""Error feedback: what a lossy encoding leaves out of one round is added to the next (Seide et al. 2014; 1901.09847).

    residual' = (values + decay * residual) - decode(encode(values + decay * residual))

The new residual is *pending* until the round is known to count: `commit` makes it current, `rollback` forgets it and
the residual stays what it was before. A sender has one such residual; the owner of a part has another for its
re-encoding. A decay below 1 lets work fade that never got through; SparseLoCo (2508.15706) uses 0.95.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from contextlib import suppress

import numpy as np

from swarmnode.training import mapped
from swarmnode.training.codecs.base import STEP, Codec, CodecError, Vector


class ErrorFeedback:
    """The residual of one vector of `size` elements that is encoded with `codec`, whole or in ranges.

    `codec` may be another one in each round, as where rounds take turns (`sign3`).

    Not safe for use from several threads at once.
    """

    def __init__(self, codec: Codec, size: int, *, decay: float = 1.0) -> None:
        self.codec = codec
        self._decay = np.float32(decay)  # of the residual, each time it is used
        self.size = size
        self._residual: Vector = np.zeros(size, np.float32)
        self._used = (0, 0)  # all outside is zero, and was never touched: such memory costs nothing
        self._next: Vector = np.empty(0, np.float32)  # the residual after the round, in the pending ranges only
        self._pending: list[tuple[int, int]] = []  # ranges encoded in this round, ascending
        self._decoded: Vector = np.empty(min(size, STEP), np.float32)

    @property
    def pending(self) -> bool:
        """Whether something was encoded since the last commit or rollback."""
        return bool(self._pending)

    def encode(self, values: Vector) -> memoryview:
        return self.encode_range(0, self.size, values)

    def encode_range(self, start: int, stop: int, values: Vector, out: memoryview | None = None) -> memoryview:
        """Encode `values` (stop - start,), elements `start` to `stop` of the vector, with the residual added.

        The same range may be encoded again before the round ends: the last encoding counts. Raises CodecError for
        values that are not finite, ValueError for a range of another length, outside the vector, or overlapping
        another pending one in part. Fastest for at most STEP elements, all of which a core's cache holds.
        """
        if values.shape != (stop - start,):
            raise ValueError(f"range {start}:{stop} of {self.size} does not fit values of shape {values.shape}")
        is_new = self._is_new(start, stop)
        wanted = self._after(start, stop)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float32 it becomes infinite, which codecs refuse
            residual = self._residual[start:stop]
            faded = residual if self._decay == 1 else np.multiply(self._decay, residual, out=wanted)
            np.add(faded, values, out=wanted)
        try:
            encoded = self.codec.encode(wanted, out)
        except CodecError:
            with suppress(ValueError):  # what was pending in the range is lost
                self._pending.remove((start, stop))
            raise
        fits = stop - start <= self._decoded.size
        self.codec.take_off(encoded, wanted, self._decoded[: stop - start] if fits else None)
        if is_new:
            insort(self._pending, (start, stop))
        return encoded

    def drop_range(self, start: int, stop: int) -> None:
        """Elements `start` to `stop` start anew: once the round counts, nothing is left over in them.

        Raises ValueError as `encode_range` does.
        """
        if self._is_new(start, stop):
            insort(self._pending, (start, stop))
        self._after(start, stop).fill(0)

    def _is_new(self, start: int, stop: int) -> bool:
        """Whether nothing of a range is pending; False where all of it is, as one range. Raises ValueError."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"range {start}:{stop} does not fit a vector of {self.size} elements")
        at = bisect_left(self._pending, (start, stop))
        if self._pending[at : at + 1] == [(start, stop)]:
            return False
        for other, end in self._pending[max(at - 1, 0) : at + 1]:
            if max(start, other) < min(stop, end):
                raise ValueError(f"range {start}:{stop} overlaps {other}:{end}, encoded in this round")
        return stop > start

    def _after(self, start: int, stop: int) -> Vector:
        """Where the residual of a range after the round is kept."""
        if not self._next.size:
            self._next = np.empty(self.size, np.float32)
        return self._next[start:stop]

    def commit(self) -> None:
        """The round counted: pending residuals become current. Ranges that were not encoded keep theirs."""
        if self._pending:
            low, high = self._used if self._used != (0, 0) else self._pending[0]
            self._used = min(low, self._pending[0][0]), max(high, self._pending[-1][1])
        if sum(stop - start for start, stop in self._pending) == self.size:
            self._residual, self._next = self._next, self._residual
        else:
            for start, stop in self._pending:
                self._residual[start:stop] = self._next[start:stop]
        self._pending.clear()

    def rollback(self) -> None:
        """The round was abandoned: nothing that was encoded since the last commit happened."""
        self._pending.clear()

    def fade(self) -> None:
        """The round refused what was encoded: what was left over before it is a round older all the same.

        To be called after `rollback`. Otherwise a residual that grew large while nothing counted, as during an outage,
        would stay as large, and be refused for its age for ever.
        """
        low, high = self._used
        self._residual[low:high] *= self._decay

    def give_back(self, work: Vector, norm: float | None = None) -> bool:
        """Return work of this node that did not count, (size,), to the residual; False where it is worth nothing.

        That is work of zeros, or that is not finite. The residual's norm is at most `norm`, if not given that of
        `work` (or what it was before, where that is more), afterwards, however often work fails to count: old work
        ages, and a burst of it would be noise. Raises ValueError for another shape, RuntimeError while
        a round is pending.
        """
        norm = norm_in_float64(work) if norm is None else norm
        if norm == 0 or not math.isfinite(norm):
            return False
        if self._pending:
            raise RuntimeError("commit or roll back the round before returning work to the residual")
        if work.shape != (self.size,):
            raise ValueError(f"work of shape {work.shape} does not fit a residual of {self.size} elements")
        total = np.add(self._residual, work, out=self._after(0, self.size))
        length, bound = norm_in_float64(total), max(norm, norm_in_float64(self._residual))
        if not math.isfinite(length):
            return False
        if length > bound:
            total *= np.float32(bound / length)
        self._residual, self._next = total, self._residual
        self._used = (0, self.size)
        return True

    def keep_only(self, *ranges: tuple[int, int]) -> None:
        """Drop the residual outside these ranges, which are ascending: owners of parts do so when ownership moves."""
        low, high = self._used
        kept = [(max(start, low), min(stop, high)) for start, stop in ranges if start < high and stop > low]
        done = low
        for start, stop in [*kept, (high, high)]:
            self._residual[done:start] = 0
            done = stop
        self._used = (kept[0][0], kept[-1][1]) if kept else (0, 0)

    def taken_from(self, vector: Vector) -> Vector:
        """`vector` (size,) less what is left over: where whoever sends pseudo-gradients from it has really come to."""
        return np.subtract(vector, self._residual, out=mapped.zeros(self.size))

    def is_zero(self) -> bool:
        """Whether nothing is left over from earlier rounds."""
        low, high = self._used
        return not self._residual[low:high].any()

    def export(self) -> Vector:
        """A copy of the current residual, (size,), for a checkpoint; what is pending is not in it."""
        return mapped.copied(self._residual)

    def after(self) -> Vector:
        """A copy of what the residual is if what is pending counts, (size,)."""
        after = self.export()
        for start, stop in self._pending:
            after[start:stop] = self._next[start:stop]
        return after

    def restore(self, residual: Vector) -> None:
        """Take the residual of a checkpoint, float32 (size,); nothing is pending.

        Raises ValueError where it does not fit.
        """
        if residual.shape != (self.size,) or residual.dtype != np.float32 or not is_finite(residual):
            raise ValueError(
                f"a residual must be {self.size} finite float32 values, not {residual.dtype} {residual.shape}"
            )
        self._residual = residual.copy()
        self._used = (0, self.size)
        self._pending.clear()


def norm_in_float64(vector: Vector) -> float:
    """The Euclidean norm of float32 (n,), summed in float64 so that large vectors do not overflow; takes no memory."""
    return math.sqrt(float(np.einsum("i,i->", vector, vector, dtype=np.float64)))


def is_finite(vector: Vector) -> bool:
    """Whether all of float32 (n,) are; takes no memory. Squares of float32 do not overflow float64."""
    return math.isfinite(norm_in_float64(vector))
