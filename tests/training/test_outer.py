"""The outer step: bit-exact, like torch's Nesterov, and never in place; the state hash names every bit of the state."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from swarmnode.testing.consensus import weighted_sum
from swarmnode.training.outer import Layout, OuterState, outer_step, state_hash

LAYOUT = Layout.of([("w", (2, 2)), ("b", (1,))])


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def hexed(x: np.ndarray) -> str:
    return x.astype("<f4").tobytes().hex()


PHI = vector(1.0, -0.1, 3.3333333, 1e-40, -7.25)
G = vector(0.1, 0.7, -0.3, 1e-41, 1e-8)


def after(rounds: int, momentum: float, lr: float = 0.7) -> OuterState:
    state = OuterState.start(PHI)
    for _ in range(rounds):
        state = outer_step(state, G, lr=lr, momentum=momentum)
    return state


def test_golden_bits_of_the_outer_step() -> None:
    """Computed once; a CPU, a numpy or a rewrite that gives other bits would tear swarms apart."""
    nesterov, plain = after(3, 0.9), after(3, 0.0)
    assert hexed(nesterov.parameters) == "1a86df3e866881c085c1a040b47900000000e8c0"
    assert hexed(nesterov.momentum) == "83c08a3ee4d0f23fc52050bf8a4b000088c9e832"
    assert hexed(plain.parameters) == "713d4a3fc2f5c8bf41a77d4039dc00000000e8c0"
    assert state_hash(3, LAYOUT, nesterov) == "c8a29859acc28cc18add65cbe2d044e73629df0978b0bf29622034a27b9cb150"


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_each_operation_rounds_on_its_own_in_the_stated_order(momentum: float) -> None:
    """The same formula in scalar float32, element by element."""
    rate, mu = np.float32(0.7), np.float32(momentum)
    phi, m = list(PHI), [np.float32(0)] * 5
    for _ in range(3):
        for i, g in enumerate(G):
            m[i] = mu * m[i] + g if mu else m[i]
            phi[i] = phi[i] - rate * (g + mu * m[i]) if mu else phi[i] - rate * g
    state = after(3, momentum)
    assert hexed(state.parameters) == hexed(vector(*phi)) and hexed(state.momentum) == hexed(vector(*m))


def test_the_step_is_that_of_torch_sgd_with_nesterov() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    state = OuterState.start(rng.standard_normal(1000).astype(np.float32))
    theta = torch.nn.Parameter(torch.tensor(state.parameters.copy()))
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        g = rng.standard_normal(1000).astype(np.float32)
        state = outer_step(state, g, lr=0.7, momentum=0.9)
        theta.grad = torch.tensor(g)
        optimizer.step()
    assert np.allclose(state.parameters, theta.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_the_old_state_stays_valid_and_the_new_one_cannot_be_written() -> None:
    state = OuterState.start(PHI)
    held = hexed(state.parameters), hexed(state.momentum)
    new = outer_step(state, G, lr=0.7, momentum=0.9)
    assert (hexed(state.parameters), hexed(state.momentum)) == held
    for array in (new.parameters, new.momentum):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_long_vectors_step_as_short_ones_do() -> None:
    """The work is cut into steps; no element may be missed or taken twice at their borders."""
    size = 3 * (64 << 10) + 17
    rng = np.random.default_rng(1)
    phi, g = rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    whole = outer_step(OuterState.start(phi), g, lr=0.7, momentum=0.9)
    for part in (slice(0, 10), slice(65530, 65545), slice(size - 20, size)):
        short = outer_step(OuterState.start(phi[part]), g[part], lr=0.7, momentum=0.9)
        assert hexed(short.parameters) == hexed(whole.parameters[part])
    mean = weighted_sum([phi, g], [1, 2])
    assert hexed(mean) == hexed(np.float32(1 / 3) * phi + np.float32(2 / 3) * g)


def test_a_step_to_nan_or_infinity_is_refused() -> None:
    for bad in (np.nan, np.inf, 3e38):
        with pytest.raises(ValueError, match="does not count"):
            outer_step(OuterState.start(PHI), vector(0, 0, bad, 0, 0), lr=10.0, momentum=0.9)
    for wrong in (G[:4], G.astype(np.float64)):
        with pytest.raises(ValueError, match="pseudo-gradient"):
            outer_step(OuterState.start(PHI), wrong, lr=1.0, momentum=0.0)


def test_weighted_sum_adds_in_the_order_given() -> None:
    parts = [vector(1e8, 1), vector(-1e8, 2), vector(1, 3)]
    acc = vector(0, 0)
    for part in parts:
        acc = acc + np.float32(1 / 3) * part
    assert hexed(weighted_sum(parts, [1, 1, 1])) == hexed(acc)
    assert hexed(weighted_sum(parts, [1, 1, 1])) != hexed(weighted_sum(parts[::-1], [1, 1, 1]))
    assert hexed(weighted_sum([PHI, G], [3, 7])) == "a470bd3e1e85eb3e703d4a3f2467000034330bc0"


def test_weights_are_shares_of_their_sum_and_zero_counts_for_nothing() -> None:
    assert weighted_sum([vector(2, 4), vector(100, 100)], [5, 0]).tolist() == [2, 4]
    assert weighted_sum([vector(1), vector(5)], [3 * 10**15, 10**15]).tolist() == [2]


def test_state_hash_is_the_stated_sha256() -> None:
    state, table = after(1, 0.9), LAYOUT.encode()
    packed = b"swarmnode/state/1\0" + (7).to_bytes(8, "little") + len(table).to_bytes(8, "little") + table
    packed += state.parameters.astype("<f4").tobytes() + state.momentum.astype("<f4").tobytes()
    assert state_hash(7, LAYOUT, state) == hashlib.sha256(packed).hexdigest()


def test_state_hash_changes_with_every_part_of_the_state() -> None:
    state = after(1, 0.9)
    hashes = {
        state_hash(1, LAYOUT, state),
        state_hash(2, LAYOUT, state),
        state_hash(1, Layout.of([("w", (4,)), ("b", (1,))]), state),
        state_hash(1, LAYOUT, dataclasses.replace(state, parameters=np.nextafter(state.parameters, np.float32(9)))),
        state_hash(1, LAYOUT, dataclasses.replace(state, momentum=np.nextafter(state.momentum, np.float32(9)))),
    }
    assert len(hashes) == 5
    with pytest.raises(ValueError, match="layout of 4 elements"):
        state_hash(1, Layout.of([("w", (4,))]), state)
