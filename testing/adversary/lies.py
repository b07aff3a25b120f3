"""What a liar offers in place of what it trained: one function of what it knows for each lie. Numpy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]  # (P,)
DRIFT = 0.25  # of the own norm


@dataclass(frozen=True)
class Seen:
    """What a liar knows when it chooses what to offer."""

    own: Vector  # what it trained, as an honest node would offer it
    moved: Vector | None  # how far the swarm's last round went down; None before the second
    rng: np.random.Generator


Lie = Callable[[Seen], Vector]


def sign_flip(seen: Seen) -> Vector:
    return -seen.own


def large_sign_flip(seen: Seen) -> Vector:
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(-1000) * seen.own, np.float32)


def noise(seen: Seen) -> Vector:
    drawn = seen.rng.standard_normal(seen.own.size, dtype=np.float32)
    return _of_norm(drawn, _norm(seen.own))


def free_ride(seen: Seen) -> Vector:
    """With a little noise, as identical bytes of two free riders would count once."""
    if seen.moved is None:
        return np.zeros_like(seen.own)
    return seen.moved + _of_norm(seen.rng.standard_normal(seen.own.size, dtype=np.float32), 1e-3 * _norm(seen.moved))


def slow_drift(seen: Seen) -> Vector:
    whither = np.random.default_rng(5).standard_normal(seen.own.size, dtype=np.float32)
    return seen.own + _of_norm(whither, DRIFT * _norm(seen.own))


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def _of_norm(vector: Vector, norm: float) -> Vector:
    length = _norm(vector)
    return np.asarray(vector * np.float32(norm / length), np.float32) if length > 0 else vector


LIES: dict[str, Lie] = {
    "sign-flip": sign_flip,
    "sign-flip-1000": large_sign_flip,
    "noise": noise,
    "free-ride": free_ride,
    "slow-drift": slow_drift,
    "slander": sign_flip,
}
