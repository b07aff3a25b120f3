"""The outer step of a pair, held against the paper's equations in float64, and what repeated pairs come to."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.testing.consensus import consensus_distance
from swarmnode.training.codecs import CODECS, codec
from swarmnode.training.gossip import gossip_step, weights_codec
from swarmnode.training.outer import OuterState

P = 70_001  # not a multiple of the elements worked on at a time


def vectors(count: int, *, seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [(scale * generator.standard_normal(P)).astype(np.float32) for _ in range(count)]


def test_the_step_is_that_of_the_paper_with_gamma_as_eta() -> None:
    phi, other_phi, m, g, other_g = vectors(5)
    eta, mu = 0.7, 0.5
    state = OuterState(phi, m)
    after = gossip_step(state, g, other_g, other_phi, lr=eta, momentum=mu)
    exact = [each.astype(np.float64) for each in (phi, other_phi, m, g, other_g)]
    momentum = mu * exact[2] + eta * (exact[3] + exact[4]) / 2 + eta * (exact[0] - (exact[0] + exact[1]) / 2)
    np.testing.assert_allclose(after.momentum, momentum, atol=1e-5)
    np.testing.assert_allclose(after.parameters, exact[0] - momentum, atol=1e-5)
    assert not after.parameters.flags.writeable


def test_who_meets_nobody_steps_by_its_own_work_alone() -> None:
    phi, m, g = vectors(3)
    after = gossip_step(OuterState(phi, m), g, None, None, lr=1.0, momentum=0.0)
    assert np.array_equal(after.parameters, phi - g)  # where its inner steps led, bit for bit
    assert after.momentum is m


def test_a_pair_without_momentum_meets_at_the_mean_of_where_both_came_to() -> None:
    phi, other_phi, g, other_g = vectors(4)
    zero = np.zeros(P, np.float32)
    one = gossip_step(OuterState(phi, zero), g, other_g, other_phi, lr=1.0, momentum=0.0).parameters
    two = gossip_step(OuterState(other_phi, zero), other_g, g, phi, lr=1.0, momentum=0.0).parameters
    np.testing.assert_allclose(one, two, atol=1e-6)
    np.testing.assert_allclose(one, (phi - g + other_phi - other_g) / 2, atol=1e-6)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.5)])
def test_random_pairs_keep_nodes_together_without_moving_their_mean(lr: float, momentum: float) -> None:
    """Of 16 nodes that only meet the distance falls; of 16 that also take random steps it stays bounded."""
    draw = np.random.default_rng(3)
    for noise, bound in ((0.0, 0.02), (0.05, 1.0)):
        states = [OuterState(vector, np.zeros(P, np.float32)) for vector in vectors(16, seed=5)]
        mean = np.mean([state.parameters for state in states], axis=0)
        began = consensus_distance([state.parameters - mean + 1 for state in states])
        for _ in range(30):
            order = draw.permutation(16)
            steps = [(noise * draw.standard_normal(P)).astype(np.float32) for _ in states]
            after = list(states)
            for i, j in zip(order[::2], order[1::2], strict=True):
                for mine, other in ((i, j), (j, i)):
                    after[mine] = gossip_step(
                        states[mine], steps[mine], steps[other], states[other].parameters, lr=lr, momentum=momentum
                    )
            states = after
        if not noise:
            np.testing.assert_allclose(np.mean([state.parameters for state in states], axis=0), mean, atol=1e-4)
        assert consensus_distance([state.parameters - mean + 1 for state in states]) < bound * began


@pytest.mark.parametrize("name", sorted(CODECS))
def test_weights_travel_as_they_are_beside_fp32_and_in_16_bits_else(name: str) -> None:
    (phi,) = vectors(1)
    way = weights_codec(name)
    came = way.decode(way.encode(phi), P)
    assert way.encoded_size(P) == (4 if name == "fp32" else 2) * P
    assert np.array_equal(came, phi) if name == "fp32" else np.abs(came - phi).max() < 2**-10 * np.abs(phi).max()


def test_what_is_not_finite_or_does_not_fit_is_refused() -> None:
    phi, m, g = vectors(3)
    state = OuterState(phi, m)
    with pytest.raises(ValueError, match="of the pair"):
        gossip_step(state, g[:-1], None, None, lr=1.0, momentum=0.0)
    with pytest.raises(ValueError, match="of the pair"):
        gossip_step(state, g, g.astype(np.float64), phi, lr=1.0, momentum=0.0)
    g[7] = np.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        gossip_step(state, g, None, None, lr=1.0, momentum=0.0)
    assert codec("int8").encoded_size(P) < 1.1 * P
