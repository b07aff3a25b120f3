"""How far nodes are apart that each have parameters of their own: for tests and benchmarks."""

from __future__ import annotations

import numpy as np

from swarmnode.training.outer import Vector


def consensus_distance(states: list[Vector]) -> float:
    """How far nodes are apart: the root mean square over nodes of |phi_i - mean phi|, by |mean phi|; 0 for one node."""
    mean = np.mean(states, axis=0, dtype=np.float64)
    apart = np.sqrt(np.mean([float(np.sum((state - mean) ** 2)) for state in states]))
    return float(apart / max(float(np.linalg.norm(mean)), 1e-30))
