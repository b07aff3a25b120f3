"""BTARD's arithmetic: what liars can do to a centre is bounded, and a centre that was moved shows."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training.btard import (
    DIRECTIONS,
    checksum,
    clipped,
    clipped_centre,
    folded_sum,
    is_suspect,
    norm,
    residual,
)
from swarmnode.training.codecs import codec

SIZES = st.integers(1, 4000)
MEMBERS = st.integers(2, 12)


def honest(members: int, size: int, seed: int) -> np.ndarray:
    """Contributions (n, m) about a common direction."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) + rng.normal(size=(members, size))).astype(np.float32)


def equal(members: int) -> list[np.float32]:
    return [np.float32(1 / members)] * members


def told(rows: np.ndarray, centre: np.ndarray, radius: float, seed: bytes = b"z") -> tuple[list, list[float]]:
    pairs = [checksum(row, centre, radius, seed, 0) for row in rows]
    return [s for s, _ in pairs], [d for _, d in pairs]


@given(st.lists(st.floats(-1e6, 1e6), max_size=50))
def test_folding_adds_everything(values: list[float]) -> None:
    assert folded_sum(np.array(values, np.float64)) == pytest.approx(sum(values), abs=1e-6)


@given(MEMBERS, SIZES, st.integers(0, 1000))
def test_an_honest_centre_is_no_suspect_in_any_direction(members: int, size: int, seed: int) -> None:
    rows = honest(members, size, seed)
    centre, radius = clipped_centre(rows, equal(members))
    left = residual(rows, equal(members), centre, radius)
    sums, distances = told(rows, centre, radius, seed=str(seed).encode())
    assert not is_suspect(sums, distances, equal(members), radius=radius, residual=left)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8"])
def test_what_a_fine_codec_rounds_off_is_no_reason_for_suspicion(name: str) -> None:
    for seed in range(50):
        rows = honest(8, 2048, seed)
        centre, radius = clipped_centre(rows, equal(8))
        centre = codec(name).decode(codec(name).encode(centre), centre.size)
        left = residual(rows, equal(8), centre, radius)
        sums, distances = told(rows, centre, radius, seed=bytes([seed]))
        assert not is_suspect(sums, distances, equal(8), radius=radius, residual=left)


@given(MEMBERS.filter(lambda n: n >= 4), st.integers(0, 1000), st.floats(1.0, 100))
def test_a_centre_that_was_moved_is_a_suspect_whatever_its_owner_claims(members: int, seed: int, far: float) -> None:
    rows = honest(members, 2048, seed)
    centre, radius = clipped_centre(rows, equal(members))
    away = np.random.default_rng(seed + 1).normal(size=2048).astype(np.float32)
    moved = centre + away * np.float32(far * radius / norm(away))
    left = residual(rows, equal(members), moved, radius)
    sums, distances = told(rows, moved, radius, seed=str(seed).encode())
    for claimed in (0.0, left, 0.1 * radius):
        assert is_suspect(sums, distances, equal(members), radius=radius, residual=claimed), (claimed, left, radius)


def test_a_radius_that_lets_a_lie_in_is_a_suspect() -> None:
    rows = honest(8, 2048, 1)
    rows[7] *= -1000
    mean = rows.mean(axis=0)
    sums, distances = told(rows, mean, 1e9)
    assert is_suspect(sums, distances, equal(8), radius=1e9, residual=0.0)


@pytest.mark.parametrize("scale", [-1.0, -1000.0, 1e30])
def test_three_liars_of_eight_move_the_centre_by_less_than_the_honest_spread(scale: float) -> None:
    rows = honest(8, 2048, 3)
    true = rows[:5].mean(axis=0)
    rows[5:] = np.float32(scale) * true
    centre, _ = clipped_centre(rows, equal(8))
    spread = max(norm(row - true) for row in rows[:5])
    assert norm(centre - true) < 2 * spread
    if scale < -1:
        assert norm(rows.mean(axis=0) - true) > 100 * spread, "the mean is not moved: the attack is none"


def test_claims_that_are_no_numbers_are_suspect() -> None:
    assert is_suspect([[float("nan")] * DIRECTIONS], [1.0], equal(1), radius=1.0, residual=0.0)
    assert is_suspect([[0.0] * DIRECTIONS], [float("inf")], equal(1), radius=1.0, residual=0.0)


@pytest.mark.parametrize("claim", [float("nan"), float("inf"), -float("inf"), -1e308])
def test_an_owner_whose_claims_are_no_numbers_is_suspect(claim: float) -> None:
    rows = honest(5, 500, 4)
    centre, radius = clipped_centre(rows, equal(5))
    moved = centre + np.float32(radius)
    for told_radius, told_residual in ((claim, 0.0), (radius, claim)):
        sums, distances = told(rows, moved, told_radius)
        assert is_suspect(sums, distances, equal(5), radius=told_radius, residual=told_residual)


EXTREMES = (
    [[3e38, -3e38], [-3e38, 3e38], [1e38, -3e38]],
    [[3e38, -3e38], [-3e38, 3e38]],
    [[-3e38, 1.0], [2.0, 1.0], [3e38, 1.0], [3e38, 1.0]],
    [[3e38, 3e38], [1.0, 2.0], [1.5, 2.5], [-3e38, 3e38]],
)


@pytest.mark.parametrize("rows", EXTREMES)
def test_whatever_is_computed_again_equals_itself_up_to_the_limits_of_float32(rows: list[list[float]]) -> None:
    """NaN would not, and whoever told it honestly would be convicted."""
    contributions = np.array(rows, np.float32)
    shares = equal(len(rows))
    centre, radius = clipped_centre(contributions, shares)
    assert np.isfinite(centre).all()
    for at in (centre, np.zeros_like(centre), np.full_like(centre, 3e38)):
        left = residual(contributions, shares, at, radius)
        assert left == residual(contributions, shares, at, radius)
        for row in contributions:
            assert checksum(row, at, radius, b"z", 0) == checksum(row, at, radius, b"z", 0)


def test_members_that_are_all_alike_are_no_suspects() -> None:
    rows = np.tile(honest(1, 500, 2), (4, 1))
    centre, radius = clipped_centre(rows, equal(4))
    np.testing.assert_array_equal(centre, rows[0])
    sums, distances = told(rows, centre, radius)
    assert not is_suspect(sums, distances, equal(4), radius=radius, residual=0.0)


def test_clipping_keeps_what_is_near_and_shortens_what_is_far() -> None:
    near, far = np.array([0.6, 0.8], np.float32), np.array([60, 80], np.float32)
    origin = np.zeros(2, np.float32)
    np.testing.assert_array_equal(clipped(near, origin, 2.0)[0], near)
    inside, distance = clipped(far, origin, 2.0)
    assert norm(inside) == pytest.approx(2.0, rel=1e-6) and distance == pytest.approx(100.0)


@pytest.mark.parametrize("radius", [-1.0, math.nan])
def test_a_radius_that_is_none_fails_nobody_whose_work_is_the_centre(radius: float) -> None:
    own = np.ones(2, np.float32)
    assert clipped(own, own.copy(), radius)[1] == 0.0


def test_the_centre_has_these_bits_on_every_machine() -> None:
    rows = (np.arange(7 * 1000, dtype=np.int64).reshape(7, 1000) * 2654435761 % 65536).astype(np.float32) / 4096 - 8
    centre, _ = clipped_centre(rows, equal(7))
    assert hashlib.sha256(centre.tobytes()).hexdigest()[:16] == "044237449084cdf0"
