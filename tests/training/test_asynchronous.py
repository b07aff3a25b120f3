"""The arithmetic of `async`: weights of stale work, and delayed Nesterov."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training.asynchronous import Aged, delayed_nesterov
from swarmnode.training.outer import OuterState, outer_step


def test_samples_count_less_for_each_round_that_is_over_without_them() -> None:
    work = Aged()
    assert work.weigh() == 0
    work.add(12)
    assert work.weigh() == 12
    work.decided(counted=False)
    work.add(10)
    assert work.weigh() == 12 / 2 + 10
    work.decided(counted=False)
    assert work.weigh() == 12 / 3 + 10 / 2


def test_the_stalest_sample_counts_something() -> None:
    work = Aged()
    work.add(1)
    for _ in range(10):
        work.decided(counted=False)
    assert work.weigh() == 1


def test_what_counted_is_what_was_given_and_not_what_came_later() -> None:
    work = Aged()
    work.add(8)
    work.weigh()
    work.offer()
    work.add(6)  # beside the exchange
    work.weigh()  # in another call for the same round, which gives nothing to anybody
    work.decided(counted=True)
    assert work.weigh() == 6 / 2
    work.offer()
    work.decided(counted=True)
    assert work.weigh() == 0


def test_what_was_not_given_to_anybody_cannot_count() -> None:
    work = Aged()
    work.add(8)
    work.weigh()
    work.decided(counted=True)
    assert work.weigh() == 8 / 2


def state(size: int = 5) -> OuterState:
    draw = np.random.default_rng(1)
    vectors = draw.standard_normal((2, size)).astype(np.float32)
    return OuterState(vectors[0], vectors[1])


def test_delayed_momentum_is_that_of_the_mean_of_a_cycle() -> None:
    """Against the paper's algorithm with a buffer of its own, in float64."""
    lr, mu, delay = 0.7, 0.6, 3
    now = state()
    phi, m, buffer = now.parameters.astype(float), now.momentum.astype(float), np.zeros(5)
    for round in range(7):
        g = np.random.default_rng(round).standard_normal(5).astype(np.float32)
        now = delayed_nesterov(now, g, round=round, lr=lr, momentum=mu, delay=delay)
        buffer += g
        phi -= lr * g
        if (round + 1) % delay == 0:
            m = mu * m + buffer / delay
            phi -= lr * mu * m
            buffer = np.zeros(5)
        np.testing.assert_allclose(now.parameters, phi, rtol=1e-5, atol=1e-6)
    assert not now.parameters.flags.writeable and not now.momentum.flags.writeable


def test_without_momentum_it_is_plain_and_without_delay_nesterov() -> None:
    g = np.linspace(-1, 1, 5, dtype=np.float32)
    plain = delayed_nesterov(state(), g, round=3, lr=0.5, momentum=0.0)
    assert np.array_equal(plain.parameters, outer_step(state(), g, lr=0.5, momentum=0.0).parameters)
    assert np.array_equal(plain.momentum, state().momentum)
    usual = outer_step(state(), g, lr=0.5, momentum=0.9)
    mine = delayed_nesterov(state(), g, round=3, lr=0.5, momentum=0.9, delay=1)
    np.testing.assert_allclose(mine.parameters, usual.parameters, rtol=1e-6)
    assert np.array_equal(mine.momentum, usual.momentum)


def test_a_step_to_no_finite_state_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        delayed_nesterov(state(), np.full(5, np.inf, np.float32), round=0, lr=1.0, momentum=0.5)
    huge = OuterState(np.zeros(5, np.float32), np.full(5, 3e38, np.float32))
    with pytest.raises(ValueError, match="NaN or infinity"):
        delayed_nesterov(huge, np.full(5, 3e38, np.float32), round=0, lr=1.0, momentum=0.999, delay=1)
