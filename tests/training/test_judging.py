"""What judging costs, and that shares of a step's gain are what contributions are worth among one another."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training.codecs import codec
from swarmnode.training.open_step import (
    CLIP_UNIT,
    JUDGE_SHARE,
    SEQUENCES,
    Factor,
    apply_contributions,
    inner_product,
    opened,
    rise,
    sequences_for,
)
from swarmnode.training.outer import OuterState

SIZE = 40
CURVATURE = np.concatenate([[100.0], np.ones(SIZE - 1)])  # the first direction is the steepest


@pytest.mark.parametrize("trained", [1, 40, 160, 320, 640, 16_000])
def test_judging_costs_its_share_of_training_or_a_gradient_on_one_sequence(trained: int) -> None:
    count = sequences_for(trained)
    assert 1 <= count <= SEQUENCES
    assert count == 1 or count <= JUDGE_SHARE * trained
    assert count <= 0.05 * max(trained, 20)


@pytest.mark.parametrize("name", ["topk", "fp32", "sign3"])
def test_a_product_with_a_contribution_is_that_with_what_it_decodes_to(name: str) -> None:
    rng = np.random.default_rng(1)
    values, direction = rng.normal(size=(2, 5000)).astype(np.float32)
    raw = codec(name).encode(values)
    decoded = codec(name).decode(raw, values.size)
    held = opened(raw, values.size, codec_name=name)
    assert isinstance(held, tuple) == (name == "topk")
    for x in (raw, held if isinstance(held, tuple) else raw):
        assert inner_product(x, direction, codec_name=name) == pytest.approx(float(decoded @ direction), rel=1e-4)


def test_what_was_decoded_before_is_applied_to_the_same_bits() -> None:
    rng, state = np.random.default_rng(3), OuterState.start(np.zeros(5000, np.float32))
    raws = [bytes(codec("topk").encode(rng.normal(size=5000).astype(np.float32))) for _ in range(3)]
    factors = [Factor(1, CLIP_UNIT // number, 3) for number in (1, 2, 3)]
    held = [sparse for raw in raws if isinstance(sparse := opened(raw, 5000), tuple)]
    moved = [apply_contributions(state, work, factors, lr=1.0).parameters for work in (raws, held)]
    assert moved[0].tobytes() == moved[1].tobytes()


def test_the_rise_along_a_way_is_a_product_however_long_the_vectors_are() -> None:
    slope, before, now = np.random.default_rng(4).normal(size=(3, 200_000)).astype(np.float32)
    assert rise(slope, before, now) == pytest.approx(float(slope.astype(np.float64) @ (now - before)), rel=1e-4)


def loss(phi: np.ndarray) -> float:
    return float(0.5 * CURVATURE @ phi**2)


def shares(phi: np.ndarray, contributions: np.ndarray) -> np.ndarray:
    """Of contributions (n, P), each added as an n-th, as formula (1) of `training.open_step` has it."""
    step = contributions.mean(axis=0)
    direction = CURVATURE * (phi - step / 2)
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
