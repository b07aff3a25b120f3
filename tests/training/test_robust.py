"""Aggregation rules: what each does without liars, and what liars can do to each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.training import robust
from swarmnode.training.robust import RULES

every_rule = pytest.mark.parametrize("name", RULES)
sturdy = pytest.mark.parametrize("name", [n for n in RULES if n not in ("mean", "median-norm-clip", "trimmed-mean")])


def swarm(honest: int, liars: int, *, dimensions: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Contributions around the vector of ones; the liars' rows come last and are theirs to fill."""
    rng = np.random.default_rng(seed)
    rows = 1 + 0.3 * rng.standard_normal((honest + liars, dimensions))
    return rows.astype(np.float32), np.ones(honest + liars, np.float32)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@every_rule
def test_alike_contributions_give_themselves(name: str) -> None:
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    assert np.allclose(RULES[name](np.tile(row, (7, 1)), np.ones(7, np.float32)), row, atol=1e-6)


@every_rule
@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_swarms_get_a_result(name: str, count: int) -> None:
    rows, weights = swarm(count, 0)
    assert cosine(RULES[name](rows, weights), np.ones(200, np.float32)) > 0.9


@every_rule
def test_without_liars_the_result_is_close_to_the_mean(name: str) -> None:
    rows, weights = swarm(16, 0)
    assert np.linalg.norm(RULES[name](rows, weights) - 1) < 0.5 * np.linalg.norm(rows[0] - 1)


@every_rule
def test_the_order_of_contributions_does_not_matter(name: str) -> None:
    rows, weights = swarm(9, 0)
    assert np.allclose(RULES[name](rows, weights), RULES[name](rows[::-1], weights[::-1]), atol=1e-5)


@sturdy
def test_five_of_sixteen_who_send_a_thousandfold_opposite_do_not_turn_the_result(name: str) -> None:
    rows, weights = swarm(11, 5)
    rows[11:] *= -1000
    assert np.linalg.norm(robust.mean(rows, weights)) > 100  # the attack is real
    result = RULES[name](rows, weights)
    assert cosine(result, np.ones(200, np.float32)) > 0.9 and np.linalg.norm(result) < 2 * np.linalg.norm(rows[0])


def test_median_norm_clip_takes_the_size_from_a_lie_and_leaves_its_direction() -> None:
    rows, weights = swarm(11, 5)
    rows[11:] *= -1000
    result = robust.median_norm_clip(rows, weights)
    assert cosine(result, np.ones(200, np.float32)) > 0.9
    assert np.linalg.norm(result) == pytest.approx((11 - 5) / 16 * np.sqrt(200), rel=0.15)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=20))
def test_no_clipped_norm_exceeds_the_median(values: list[float]) -> None:
    norms = np.array(values)
    factors = robust.clip_factors(norms)
    assert ((factors >= 0) & (factors <= 1)).all()
    assert (norms * factors <= np.median(norms) * (1 + 1e-12)).all()
    assert (factors[norms <= np.median(norms)] == 1).all()


def test_trimmed_mean_survives_a_quarter_and_no_more() -> None:
    rows, weights = swarm(12, 4)
    rows[12:] = 1e6
    assert np.abs(robust.trimmed_mean(rows, weights)).max() < 3
    rows, weights = swarm(11, 5)
    rows[11:] = 1e6
    assert np.abs(robust.trimmed_mean(rows, weights)).max() > 1e4


def test_weights_count_where_the_rule_has_weights() -> None:
    rows = np.stack([np.zeros(4, np.float32), np.full(4, 4, np.float32)])
    assert robust.mean(rows, np.array([3, 1], np.float32)).tolist() == [1] * 4


def test_centered_clip_starts_where_it_is_told_and_moves_no_further_than_its_radius() -> None:
    rows, weights = swarm(11, 5)
    rows[11:] *= -1000
    start = np.ones(200, np.float32)
    moved = robust.centered_clip(rows, weights, radius=0.01, start=start) - start
    assert 0 < np.linalg.norm(moved) <= 0.01 * robust.CLIP_ITERATIONS


def test_clipped_mean_is_a_fold_in_the_order_given() -> None:
    """Golden bits: float32 multiplication, then addition, one contribution after another."""
    rows = [
        np.array([0.1, 1e8, 3.0], np.float32),
        np.array([0.2, 1.0, -3.0], np.float32),
        np.array([0.3, -1e8, 0.1], np.float32),
    ]
    result = robust.clipped_mean(rows, [1.0, 0.5, 1.0], [0.25, 0.5, 0.25])
    expected = np.zeros(3, np.float32)
    for row, product in zip(rows, (0.25, 0.25, 0.25), strict=True):
        expected = expected + row * np.float32(product)
    assert result.tobytes() == expected.tobytes()
    assert robust.clipped_mean(rows[::-1], [1.0, 0.5, 1.0], [0.25, 0.5, 0.25]).tobytes() != expected.tobytes()
    assert result.tobytes().hex() == "9a99193e00000000cdcccc3c"


def test_the_gate_takes_the_median_of_those_who_judged() -> None:
    nan = np.nan
    gains = np.array(
        [[0.1, -0.1, 0.1, 9.0, nan, 0.0], [0.1, 0.2, 0.1, -0.1, nan, 0.0], [0.1, -0.2, nan, -0.1, 0.5, 0.0]]
    )
    assert robust.gate(gains, noise=0.01).tolist() == [True, False, True, False, False, False]


def test_the_flag_of_two_directions_of_three_is_by_hand() -> None:
    rows = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32)
    # m = 2 of the two directions that there are: nothing is left out.
    assert robust.flag(rows, np.ones(3, np.float32)) == pytest.approx([2 / 3, 1 / 3, 0], abs=1e-6)


def test_the_flag_of_one_direction_is_that_of_the_many() -> None:
    rows = np.array([[1, 0]] * 3 + [[0, 1]] * 2, np.float32)
    assert robust.flag(rows, np.ones(5, np.float32), dimensions=1) == pytest.approx([3 / 5, 0], abs=1e-6)


def test_five_of_sixteen_with_a_direction_of_their_own_are_left_out_of_a_flag_of_one_direction() -> None:
    rows, weights = swarm(11, 5)
    rows[11:] = np.where(np.arange(200) % 2, 1, -1)
    apart = rows[15] / np.linalg.norm(rows[15])
    assert abs(robust.flag(rows, weights, dimensions=1) @ apart) < 0.1 * abs(robust.mean(rows, weights) @ apart)


def test_a_few_lone_directions_pass_the_flag_at_its_usual_width() -> None:
    rows, weights = swarm(11, 5)
    rows[11:] = 20 * np.eye(200, dtype=np.float32)[:5]
    lone = robust.flag(rows, weights)[:5] - robust.flag(rows[:11], weights[:11])[:5]
    assert lone.min() > 0.3
