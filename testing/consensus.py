"""What vectors of several nodes have in common: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.training.outer import Vector, fold_in, shares_of


def weighted_sum(parts: Sequence[Vector], weights: Sequence[int]) -> Vector:
    """The weighted mean of parts (n,) in the order given, with the bits that nodes compute."""
    total = np.zeros_like(parts[0])
    for share, part in zip(shares_of(weights), parts, strict=True):
        fold_in(total, share, part.copy())
    return total


def consensus_distance(states: list[Vector]) -> float:
    """How far nodes are apart: the root mean square over nodes of |phi_i - mean phi|, by |mean phi|; 0 for one node."""
    mean = np.mean(states, axis=0, dtype=np.float64)
    apart = np.sqrt(np.mean([float(np.sum((state - mean) ** 2)) for state in states]))
    return float(apart / max(float(np.linalg.norm(mean)), 1e-30))
