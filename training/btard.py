"""The arithmetic of BTARD (Gorbunov et al. 2106.11257): CenteredClip of one part, and the checksums that test it.

    centre, radius = clipped_centre(contributions, shares)      # what the part's owner computes
    sums, distance = checksum(own, centre, radius, seed, part)  # what each member tells, once the seed is known
    is_suspect(…)                                               # what everybody tests: Σ shareᵢ sumsᵢ is about 0

Whoever holds the contributions to a part can compute it again and must get the same bytes, on any CPU: all arithmetic
is elementwise and in a stated order, sums over elements are folded in halves (`folded_sum`), and random directions come
out of a hash. So an accusation is decided by repeating the work, with no tolerance: an honest owner is never wrong. The
paper takes one random direction, along which a lie may happen to be short; here the mean square along DIRECTIONS of
them tells the length of what was moved to a quarter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.outer import Vector

Contributions = NDArray[np.float32]  # (n, m), finite
ONE = np.float32(1)

ITERATIONS = 20  # of CenteredClip; the paper's converges in fewer
CONVERGED = 1e-7  # of the radius: a step shorter than that is the last
RESIDUAL_SHARE = 0.1  # of the radius, that encoding the centre may move the clipped mean without suspicion
DIRECTIONS = 16  # that contributions are projected on
SURPRISE = 2.0  # times what its owner told, that the length of a residual may seem by chance: once in 10^7
SLACK = 1e-5  # of the median distance, for what rounding adds
RADIUS_SHARE = 2.0  # of the median distance, that an honest owner's radius may be


def folded_sum(values: NDArray[np.float64]) -> float:
    """Σ values (m,), float64, added in halves: the last half onto the first, again and again. `values` is used up."""
    left = values.size
    while left > 1:
        half = left // 2
        values[:half] += values[left - half : left]
        left -= half
    return float(values[0]) if left else 0.0


def norm(vector: Vector) -> float:
    """Euclidean norm of (m,): squares in float64, added by `folded_sum`."""
    wide = vector.astype(np.float64)
    return float(np.sqrt(folded_sum(wide * wide)))


def clipped_centre(contributions: Contributions, shares: Sequence[np.float32]) -> tuple[Vector, float]:
    """CenteredClip (2012.10333) of (n, m) with weights `shares`, which add up to 1: the centre (m,), and its radius τ.

    From the coordinate median, v ← v + Σ shareᵢ min(1, τ/‖xᵢ − v‖)(xᵢ − v), where τ is the median distance to that
    start. Breakdown point 1/2; O(nm) an iteration, O(m n log n) for the start. Bit-identical on every CPU.
    """
    centre = _coordinate_median(contributions)
    radius = float(np.median([clipped(row, centre, 0.0)[1] for row in contributions]))
    for _ in range(ITERATIONS):
        step = _clipped_mean(contributions, shares, centre, radius)
        np.add(centre, step, out=centre)
        if norm(step) <= CONVERGED * radius:
            break
    return centre, radius


def _coordinate_median(contributions: Contributions) -> Vector:
    ordered, count = np.sort(contributions, axis=0), len(contributions)
    half = np.float32(0.5)
    return half * ordered[(count - 1) // 2] + half * ordered[count // 2]  # halved first: their sum may be infinite


def _clipped_mean(contributions: Contributions, shares: Sequence[np.float32], centre: Vector, radius: float) -> Vector:
    """Σ shareᵢ clip(xᵢ − v), (m,)."""
    total = np.zeros_like(centre)
    for row, share in zip(contributions, shares, strict=True):
        total += clipped(row, centre, radius, share)[0]
    return total


def residual(contributions: Contributions, shares: Sequence[np.float32], centre: Vector, radius: float) -> float:
    """‖Σ shareᵢ clip(xᵢ − v)‖ at v = `centre`: 0 at the fixed point; what encoding the centre leaves of it."""
    return norm(_clipped_mean(contributions, shares, centre, radius))


def clipped(own: Vector, centre: Vector, radius: float, share: np.float32 = ONE) -> tuple[Vector, float]:
    """share · clip(x − v) = share · (x − v) min(1, τ/‖x − v‖), (m,), and ‖x − v‖.

    Where x − v is beyond float32 the first is zero and the second infinite: NaN, which equals nothing, would make an
    honest member's word seem false when it is computed again.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # an owner may tell any radius; who computes it again finds out
        apart = own - centre
        distance = norm(apart)
        if not math.isfinite(distance):
            return np.zeros_like(apart), math.inf
        factor = 1.0 if distance <= radius or not distance else radius / distance  # an owner may tell a radius below 0
        return np.multiply(apart, np.float32(float(share) * factor), out=apart), distance


def directions(seed: bytes, part: int, size: int) -> Iterator[NDArray[np.float64]]:
    """DIRECTIONS vectors z (size,) of ±1, drawn by SHAKE-256 from what nobody knew when the centres were fixed."""
    for number in range(DIRECTIONS):
        name = seed + part.to_bytes(4, "big") + number.to_bytes(4, "big")
        bits = np.unpackbits(np.frombuffer(hashlib.shake_256(name).digest(-(-size // 8)), np.uint8))[:size]
        yield bits.astype(np.float64) * 2 - 1


def checksum(own: Vector, centre: Vector, radius: float, seed: bytes, part: int) -> tuple[tuple[float, ...], float]:
    """⟨z, clip(x − v)⟩ for each direction z, and ‖x − v‖: what a member tells of a part that it contributed to."""
    inside, distance = clipped(own, centre, radius)
    wide = inside.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return tuple(folded_sum(wide * z) for z in directions(seed, part, own.size)), distance


def is_suspect(
    sums: Sequence[Sequence[float]],
    distances: Sequence[float],
    shares: Sequence[np.float32],
    *,
    radius: float,
    residual: float,
) -> bool:
    """Whether what members tell of a part does not fit what its owner told: the part is to be computed again.

    `sums` (n, DIRECTIONS) and `distances` (n,) are the members', `radius` and `residual` the owner's. Over directions
    of ±1 the root mean square of Σ shareᵢ sᵢ is the length of the true residual, give or take a quarter. An owner may
    claim a residual of RESIDUAL_SHARE of the radius, and a radius of RADIUS_SHARE median distances: a lie that moves
    the centre by less than a fifth of the radius passes here, and is found by audits alone. An honest owner whose codec
    is too coarse is suspected for nothing, and cleared.
    """
    if not sums:
        return False
    projected = np.asarray(sums, np.float64)
    if (
        projected.shape != (len(distances), DIRECTIONS)
        or not np.isfinite([*projected.flat, *distances, radius, residual]).all()
    ):
        return True  # NaN is neither above nor below anything
    total = np.asarray(shares, np.float64) @ projected
    usual = float(np.median(distances))
    slack = SLACK * usual
    return bool(
        residual > RESIDUAL_SHARE * radius + slack
        or radius > RADIUS_SHARE * usual + slack
        or float(np.sqrt(np.mean(total * total))) > SURPRISE * residual + slack
    )
