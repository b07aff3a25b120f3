"""Deadlines that follow what this swarm was seen to need.

A constant timeout is a guess: too short on a slow link, minutes too long when a peer is gone. `AdaptiveDeadline` keeps
the last durations of one phase and allows the median plus several median absolute deviations (MAD), within the floor
and ceiling of the RunSpec.
"""

from __future__ import annotations

from collections import deque
from statistics import median

HISTORY = 16  # durations kept: long enough for a median, short enough to follow a changed link
SPREAD = 5.0  # deviations allowed above the median; 5 MAD is about 3.4 standard deviations of normal noise
SLACK = 2.0  # a phase may also take this multiple of its median, for durations that hardly vary


class AdaptiveDeadline:
    """Seconds to allow for a phase, from the durations observed so far."""

    def __init__(self, *, floor: float, ceiling: float) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._seen: deque[float] = deque(maxlen=HISTORY)

    def observe(self, seconds: float) -> None:
        """Record how long the phase took when it succeeded."""
        self._seen.append(seconds)

    @property
    def usual(self) -> float | None:
        """Median duration in seconds; None before the first observation."""
        return median(self._seen) if self._seen else None

    def seconds(self, *, first: float = float("inf")) -> float:
        """What to allow now: `median + SPREAD · MAD`, at least `SLACK · median`, within floor and ceiling.

        Before anything was observed it is `first`, seconds, within the same bounds: the ceiling where nothing else is
        known, as a first round may be slow and must not be cut.
        """
        if not self._seen:
            return min(max(first, self._floor), self._ceiling)
        middle = median(self._seen)
        deviation = median(abs(s - middle) for s in self._seen)
        return min(max(middle + SPREAD * deviation, SLACK * middle, self._floor), self._ceiling)
