"""Aggregation rules: one vector from the contributions of many, some of whom may lie.

    rule = RULES["centered-clip"]
    aggregate = rule(contributions, weights)          # (n, d) float32, (n,) float32 -> (d,) float32

Breakdown point: the share of liars beyond which they choose the result. Cost is for n contributions of d elements. All
rules are deterministic for the same build of numpy, and none is bit-identical across machines: what every node of a
swarm must compute alike is `clipped_mean`, whose factors travel as numbers and whose arithmetic is elementwise, in
order.

`training.similarity` has what makes weights for these rules out of how contributions resemble one another, or the
aggregate, over rounds.

What no rule here can do: tell an honest contribution on unusual data from a modest lie, or a backdoor that moves few
elements from learning. The held-out gate (`gate`) sees the former, neither sees the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]  # (d,)
Contributions: TypeAlias = NDArray[np.float32]  # (n, d), finite
Weights: TypeAlias = NDArray[np.float32]  # (n,), positive
Rule = Callable[[Contributions, Weights], Vector]

CLIP_ITERATIONS = 20  # of CenteredClip
WEISZFELD_ITERATIONS = 32  # of the geometric median
TRIM_SHARE = 0.25  # of the contributions, left out at either end
FLAG_ITERATIONS = 5  # of the flag aggregator
FLAG_LEAST = 1e-6  # of what lies outside, so that who lies within is not trusted without bound


def mean(contributions: Contributions, weights: Weights) -> Vector:
    """Weighted mean. Breakdown point 0; O(nd)."""
    return _average(contributions, weights)


def clip_factors(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors (n,) in [0, 1] that bring every norm down to the median norm."""
    median = float(np.median(norms)) if norms.size else 0.0
    return median / np.maximum(norms, median) if median > 0 else (norms == 0).astype(np.float64)


def median_norm_clip(contributions: Contributions, weights: Weights) -> Vector:
    """Mean of the contributions, each scaled down to the median of their norms (SparseLoCo, Gauntlet).

    Bounds what one liar can add to one honest step; many liars of ordinary size still turn the mean. Breakdown point
    1/2 for the size, 0 for the direction; O(nd).
    """
    factors = clip_factors(norms(contributions)).astype(np.float32)
    return _average(contributions * factors[:, None], weights)


def clipped_mean(contributions: Sequence[Vector], factors: Sequence[float], weights: Sequence[float]) -> Vector:
    """Σ wᵢ fᵢ xᵢ with given factors and weights, added in the order given, in float32: the same bits on every CPU.

    wᵢ fᵢ is rounded to float32 once; every product and every sum is one elementwise operation.
    """
    total = np.zeros_like(contributions[0])
    product = np.empty_like(total)
    for values, factor, weight in zip(contributions, factors, weights, strict=True):
        np.multiply(values, np.float32(factor * weight), out=product)
        np.add(total, product, out=total)
    return total


def coordinate_median(contributions: Contributions, weights: Weights) -> Vector:
    """Median of each element (Yin et al. 1803.01498); `weights` only decide who counts. Breakdown point 1/2; O(nd)."""
    return np.median(contributions, axis=0).astype(np.float32)


def trimmed_mean(contributions: Contributions, weights: Weights) -> Vector:
    """Mean of each element without its lowest and highest quarter (1803.01498). Breakdown point 1/4; O(nd log n)."""
    count = contributions.shape[0]
    trimmed = int(TRIM_SHARE * count)
    order = np.sort(contributions, axis=0)[trimmed : count - trimmed]
    return order.mean(axis=0, dtype=np.float64).astype(np.float32)


def geometric_median(contributions: Contributions, weights: Weights) -> Vector:
    """The point with the least weighted sum of distances, by Weiszfeld's iteration (RFA, Pillutla et al. 1912.13445).

    Breakdown point 1/2 for the distance, and slow attacks bias it long before; O(nd) an iteration.
    """
    point = _average(contributions, weights)
    for _ in range(WEISZFELD_ITERATIONS):
        distances = np.maximum(norms(contributions - point), 1e-9)
        point = _average(contributions, (weights / distances).astype(np.float32))
    return point


def centered_clip(
    contributions: Contributions, weights: Weights, *, radius: float | None = None, start: Vector | None = None
) -> Vector:
    """v ← v + mean((x − v) min(1, τ / ‖x − v‖)) from `start` or the coordinate median (Karimireddy et al. 2012.10333).

    `radius` is τ; without it the median distance to v, found anew in each iteration. Breakdown point 1/2; O(nd) an
    iteration. The rule of BTARD (2106.11257) for swarms that cannot evaluate.
    """
    centre = coordinate_median(contributions, weights) if start is None else start.copy()
    for _ in range(CLIP_ITERATIONS):
        apart = contributions - centre
        distances = norms(apart)
        limit = float(np.median(distances)) if radius is None else radius
        factors = np.minimum(1.0, limit / np.maximum(distances, np.finfo(np.float64).tiny)).astype(np.float32)
        centre = centre + _average(apart * factors[:, None], weights)
    return centre


def multi_krum(contributions: Contributions, weights: Weights, *, liars: int | None = None) -> Vector:
    """Mean of the n − f contributions that lie closest to their n − f − 2 nearest (Blanchard et al. 2017).

    `liars` is f; without it the greatest that the rule allows, ⌊(n − 3) / 2⌋. Breakdown point 1/2 − 1/n where honest
    contributions are alike, far less where they are not; O(n²d).
    """
    count = contributions.shape[0]
    f = max(0, (count - 3) // 2) if liars is None else liars
    if count <= 2:
        return _average(contributions, weights)
    flat = contributions.astype(np.float64)
    gram = flat @ flat.T
    squares = np.diag(gram)
    apart = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0)
    np.fill_diagonal(apart, np.inf)
    nearest = np.sort(apart, axis=1)[:, : max(1, count - f - 2)]
    kept = np.sort(np.argsort(nearest.sum(axis=1), kind="stable")[: max(1, count - f)])
    return _average(contributions[kept], weights[kept])


def flag(contributions: Contributions, weights: Weights, *, dimensions: int | None = None) -> Vector:
    """Mean, clipped to the median norm, of what lies in the subspace that most directions agree on.

    Flag Aggregator (Almasi et al. 2302.05865): Y, (d, m) orthonormal with m = ⌈(n + 1) / 2⌉, minimises
    Σ √(1 − ‖Yᵀ gᵢ‖² / ‖gᵢ‖²) by reweighted singular value decompositions; its pairwise regulariser is left out
    (λ = 0). `dimensions` is m. Y says nothing of lengths, hence the clip. A lie along honest directions passes, as it
    does the mean, and so do fewer than m lone directions: breakdown point 1/2 for size, 0 for direction; O(n²d).
    """
    count = contributions.shape[0]
    rows = contributions.astype(np.float64) * clip_factors(norms(contributions))[:, None]
    lengths = norms(contributions)
    moving = np.flatnonzero(lengths > 0)
    if not moving.size:
        return np.zeros(contributions.shape[1], np.float32)
    # Everything lies in the span of the contributions: the work is done in coordinates of an orthonormal basis of it.
    basis, _ = np.linalg.qr((contributions[moving].astype(np.float64) / lengths[moving, None]).T)  # (d, k)
    directions = basis.T @ (contributions[moving].astype(np.float64) / lengths[moving, None]).T  # (k, k)
    kept = min(directions.shape[0], math.ceil((count + 1) / 2) if dimensions is None else dimensions)
    trust = np.ones(moving.size)
    for _ in range(FLAG_ITERATIONS):
        within, _, _ = np.linalg.svd(directions * np.sqrt(trust))
        inside = np.sum((within[:, :kept].T @ directions) ** 2, axis=0)  # squared share of each that lies in Y
        trust = 1.0 / np.sqrt(np.maximum(1.0 - inside, FLAG_LEAST))
    frame = basis @ within[:, :kept]  # (d, m)
    middle = weights.astype(np.float64) @ rows / float(weights.sum(dtype=np.float64))
    return np.asarray(frame @ (frame.T @ middle), np.float32)


def gate(gains: NDArray[np.float64], noise: float) -> NDArray[np.bool_]:
    """Who is let in: rows with a median gain above `noise`.

    `gains` (judges, n) are losses before minus losses after each contribution alone, in bits per byte, on batches drawn
    after the contributions were fixed; NaN where a judge did not evaluate. Contributions that fewer than half of the
    judges evaluated stay out.
    """
    judged = np.sum(~np.isnan(gains), axis=0) * 2 >= gains.shape[0]
    medians = np.array(
        [np.median(column[~np.isnan(column)]) if ok else -np.inf for column, ok in zip(gains.T, judged, strict=True)]
    )
    return np.asarray(medians > noise, np.bool_)


def norms(contributions: Contributions) -> NDArray[np.float64]:
    """Euclidean norm of each row, (n, d) -> (n,), summed in float64."""
    return np.sqrt(np.einsum("nd,nd->n", contributions, contributions, dtype=np.float64))


def _average(contributions: Contributions, weights: Weights) -> Vector:
    shares = weights.astype(np.float64) / float(weights.sum(dtype=np.float64))
    return np.einsum("n,nd->d", shares, contributions, dtype=np.float64).astype(np.float32)


RULES: dict[str, Rule] = {
    "mean": mean,
    "median-norm-clip": median_norm_clip,
    "median": coordinate_median,
    "trimmed-mean": trimmed_mean,
    "geometric-median": geometric_median,
    "centered-clip": centered_clip,
    "multi-krum": multi_krum,
    "flag": flag,
}
