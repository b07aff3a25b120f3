"""How far a replay ends from what its author claims, and how far honest ones do.

    found = distance(start, claimed, replayed)
    tolerance = calibrated([...])                     # distances of this node's replays of its own work
    found.within(tolerance)

All three are relative: of the step vector (claimed end - start) from the replayed one, and of both moments. Two honest
machines differ in the order in which they add, which Adam amplifies where it divides small gradients by small second
moments; what was measured stands in docs/reputation.md. The cheapest lies are far away: another learning rate moves by
its difference (10 % more: 0.1), a step left out of ten by about 0.1, other data by 0.2 and more, noise by more than 1.
LEAST is between the two, and what a node measures on itself raises it, up to MOST: who would need more cannot audit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from swarmnode.training.verify.trace import State, Vector

LEAST = 0.02
MOST = 0.05
MARGIN = 10.0  # times what a node's replays of its own work differ by, as other hardware may add in other orders


@dataclass(frozen=True)
class Distance:
    """Relative Euclidean distances, 0 for equal ones; infinite where one is not finite."""

    parameters: float
    first: float
    second: float

    @property
    def greatest(self) -> float:
        return max(self.parameters, self.first, self.second)

    def within(self, tolerance: float) -> bool:
        """Whether all three are; the second moments, being squares, may be twice as far."""
        return max(self.parameters, self.first, self.second / 2) <= tolerance


def distance(start: State, claimed: State, replayed: State) -> Distance:
    """How far `claimed` is from `replayed`, which both began at `start`."""
    half = replayed.moments.size // 2
    if claimed.updates != replayed.updates or claimed.moments.size != replayed.moments.size:
        return Distance(math.inf, math.inf, math.inf)
    return Distance(
        _apart(claimed.parameters - start.parameters, replayed.parameters - start.parameters),
        _apart(claimed.moments[:half], replayed.moments[:half]),
        _apart(claimed.moments[half:], replayed.moments[half:]),
    )


def calibrated(own: Iterable[Distance]) -> float | None:
    """The tolerance of a node whose replays of its own work ended so far from it; None where it could not tell lies."""
    greatest = max((found.greatest for found in own), default=math.inf)
    if MARGIN * greatest > MOST:
        return None
    return max(LEAST, MARGIN * greatest)


def _apart(claimed: Vector, replayed: Vector) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        off = float(np.linalg.norm((claimed - replayed).astype(np.float64)))
        length = float(np.linalg.norm(replayed.astype(np.float64)))
    if not math.isfinite(off) or not math.isfinite(length):
        return math.inf
    return 0.0 if off == 0 else off / length if length > 0 else math.inf
