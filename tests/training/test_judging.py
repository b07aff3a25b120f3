"""What judging costs, and that shares of a step's gain are what contributions are worth among one another."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training.codecs import codec
from swarmnode.training.open_step import BACKWARD, JUDGE_SHARE, SEQUENCES, inner_product, sequences_for

SIZE = 40
CURVATURE = np.concatenate([[100.0], np.ones(SIZE - 1)])  # the first direction is the steepest


@pytest.mark.parametrize("trained", [1, 40, 160, 320, 640, 16_000])
def test_judging_costs_its_share_of_training_or_two_gradients_on_one_sequence(trained: int) -> None:
    count = sequences_for(trained)
    cost = (2 * BACKWARD + 1) * count
    assert 1 <= count <= SEQUENCES
    assert count == 1 or cost <= JUDGE_SHARE * BACKWARD * trained
    assert cost <= 0.1 * BACKWARD * max(trained, 24)


@pytest.mark.parametrize("name", ["topk", "fp32", "sign3"])
def test_a_product_with_a_contribution_is_that_with_what_it_decodes_to(name: str) -> None:
    rng = np.random.default_rng(1)
    values, direction = rng.normal(size=(2, 5000)).astype(np.float32)
    raw = codec(name).encode(values)
    decoded = codec(name).decode(raw, values.size)
    assert inner_product(raw, direction, codec_name=name) == pytest.approx(float(decoded @ direction), rel=1e-4)


def loss(phi: np.ndarray) -> float:
    return float(0.5 * CURVATURE @ phi**2)


def shares(phi: np.ndarray, contributions: np.ndarray) -> np.ndarray:
    """Of contributions (n, P), each added as an n-th, as formula (1) of `training.open_step` has it."""
    step = contributions.mean(axis=0)
    direction = (CURVATURE * phi + CURVATURE * (phi - step)) / 2
    return np.array(
        [
            inner_product(codec("fp32").encode(np.float32(x)), np.float32(direction), codec_name="fp32")
            for x in contributions
        ]
    )


def test_shares_sum_to_the_gain_of_the_whole_step() -> None:
    rng = np.random.default_rng(2)
    phi, contributions = rng.normal(size=SIZE), rng.normal(0, 0.1, (7, SIZE))
    assert shares(phi, contributions).mean() == pytest.approx(
        loss(phi) - loss(phi - contributions.mean(axis=0)), rel=1e-4
    )


def test_a_contribution_along_the_steepest_curvature_is_seen_to_harm_where_the_gradient_praises_it() -> None:
    phi = np.full(SIZE, 0.05)
    contributions = np.tile(0.1 * phi, (4, 1))
    contributions[3, 0] = 0.6  # alone it leads to the other side of the bottom, and twice as high
    assert CURVATURE * phi @ contributions[3] > 0 > shares(phi, contributions)[3]


def test_work_on_skewed_data_that_harms_alone_helps_among_others() -> None:
    """Each goes too far in one direction of its own; their mean goes as far as it should."""
    phi = np.ones(SIZE) / CURVATURE
    contributions = np.diag(phi) * SIZE * 0.9
    alone = [loss(phi) - loss(phi - x) for x in contributions]
    assert max(alone) < 0 < min(shares(phi, contributions))
