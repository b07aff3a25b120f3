"""A judge that measures on few sequences costs little, is right on average, and is not fooled by curvature."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training.codecs import codec
from swarmnode.training.open_step import (
    BACKWARD,
    JUDGE_SHARE,
    SEQUENCES,
    SHORT,
    SamplePlan,
    TrialStep,
    control_variate,
    gain_of,
    plan_for,
    trial,
)

EXAMPLE = 80 * 4  # sequences of a round of examples/open.toml
SIZE = 40


@pytest.mark.parametrize("contributions", [1, 4, 8, 16])
def test_judging_costs_its_share_of_training(contributions: int) -> None:
    plan = plan_for(contributions=contributions, trained=EXAMPLE)
    assert plan.passes(contributions) <= JUDGE_SHARE * BACKWARD * EXAMPLE
    assert plan.each >= 1


def test_judging_as_many_contributions_as_there_are_in_a_round_costs_less_than_a_tenth() -> None:
    for count, share in ((32, 0.05), (64, 0.1)):
        assert plan_for(contributions=count, trained=EXAMPLE).passes(count) <= share * BACKWARD * EXAMPLE


def test_rounds_that_train_on_next_to_nothing_measure_all_contributions_on_all_sequences_too() -> None:
    assert plan_for(contributions=16, trained=SHORT - 1) == SamplePlan(gradient=0, each=SEQUENCES)


def test_long_rounds_measure_all_contributions_on_all_sequences() -> None:
    assert plan_for(contributions=64, trained=500 * 32) == SamplePlan(gradient=0, each=SEQUENCES)


def test_few_contributions_are_each_measured_whole_and_more_of_them_by_a_gradient() -> None:
    assert [plan_for(contributions=n, trained=EXAMPLE) for n in (1, 4, 8, 16, 64)] == [
        SamplePlan(gradient=0, each=11),
        SamplePlan(gradient=7, each=1),
        SamplePlan(gradient=6, each=1),
        SamplePlan(gradient=4, each=1),
        SamplePlan(gradient=4, each=1),
    ]


@pytest.mark.parametrize("trained", [1, 40, 320, 1000, 2000, 4000, 16000])
@pytest.mark.parametrize("contributions", [1, 5, 16, 64, 96])
def test_every_contribution_is_looked_at_and_no_sequence_beyond_those_drawn(contributions: int, trained: int) -> None:
    plan = plan_for(contributions=contributions, trained=trained)
    assert 1 <= plan.each <= SEQUENCES
    assert plan.gradient == 0 or plan.each < plan.gradient <= SEQUENCES


class Bowl:
    """Losses ½ (φ - c)ᵀ A (φ - c) of sequences that differ in c."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.curvature = np.ones(SIZE)
        self.curvature[0] = 100.0  # the steepest direction
        self.centres = rng.normal(0, 0.5, (SEQUENCES, SIZE))

    def loss(self, phi: np.ndarray, first: int, last: int) -> float:
        away = phi - self.centres[first:last]
        return float((0.5 * away**2 @ self.curvature).mean())

    def gradient(self, phi: np.ndarray, first: int, last: int) -> np.ndarray:
        return np.float32(self.curvature * (phi - self.centres[first:last]).mean(axis=0))

    def gain(self, phi: np.ndarray, step: TrialStep, plan: SamplePlan) -> float:
        """As `Bench` computes it."""
        measured = self.loss(phi, 0, plan.each) - self.loss(step.taken_from(phi), 0, plan.each)
        if not plan.gradient:
            return measured
        slopes = [self.gradient(phi, 0, plan.each), self.gradient(phi, plan.each, plan.gradient)]
        return gain_of(measured, step.derivative(slopes[0]), step.derivative(control_variate(*slopes, plan)))


FLAT = TrialStep(np.float32([0.0] + [0.1] * (SIZE - 1)))
STEEP = TrialStep(np.float32([0.2] + [0.0] * (SIZE - 1)))  # from 0.05 it leads over the bottom and up on the other side


def start() -> np.ndarray:
    phi = np.full(SIZE, 1.0, np.float32)
    phi[0] = 0.05
    return phi


def gains(step: TrialStep, plan: SamplePlan) -> np.ndarray:
    return np.array([Bowl(seed).gain(start(), step, plan) for seed in range(300)])


def test_gains_on_few_sequences_are_those_on_all_on_average_and_quieter_than_few_alone() -> None:
    whole, few, quiet = (gains(FLAT, plan) for plan in (SamplePlan(0, SEQUENCES), SamplePlan(0, 1), SamplePlan(8, 1)))
    assert whole.mean() > 0
    assert quiet.mean() == pytest.approx(whole.mean(), rel=0.05)
    assert quiet.std() < 0.5 * few.std()


def test_a_step_along_the_steepest_curvature_is_seen_to_harm_where_the_gradient_praises_it() -> None:
    truth = gains(STEEP, SamplePlan(0, SEQUENCES))
    praised = np.array([STEEP.derivative(Bowl(seed).gradient(start(), 0, SEQUENCES)) for seed in range(300)])
    assert truth.mean() < 0 < praised.mean()
    assert gains(STEEP, SamplePlan(8, 1)).mean() <= 0.8 * truth.mean()


def test_where_curvature_takes_much_off_what_the_gradient_promises_the_measured_loss_has_the_last_word() -> None:
    assert gain_of(-0.2, 0.05, 0.3) == -0.2  # a sequence on which the slope is small, and the harm seen
    assert gain_of(0.09, 0.1, 0.02) == pytest.approx(0.11)  # little curvature: quieter with the gradient
    assert gain_of(-0.01, -0.009, 0.03) == pytest.approx(0.02)  # an unlucky sequence


@pytest.mark.parametrize("name", ["topk", "fp32"])
def test_a_trial_is_an_eighth_of_the_contribution_shrunk_where_it_is_too_long(name: str) -> None:
    values = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    raw = codec(name).encode(values)
    decoded, phi = codec(name).decode(raw, values.size), np.ones(values.size, np.float32)
    for shrink in (1.0, 0.5):
        step = trial(raw, values.size, lr=0.5, codec_name=name, shrink=shrink)
        assert np.array_equal(step.taken_from(phi), phi - np.float32(0.0625 * shrink) * decoded)
        assert step.derivative(values) == pytest.approx(0.0625 * shrink * float(decoded @ values), rel=1e-4)
