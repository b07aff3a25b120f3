"""The arithmetic of decoupled momentum: the transform and its inverse, the same bits for all, and the step by signs."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training import demo
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.demo import BETA, SIDE, dct, idct, signed_step
from swarmnode.training.outer import WHOLE_BITS, Layout, OuterState, Vector, whole_numbers

SIZES = [1, 63, 64, 200, SIDE**2, 3 * SIDE**2 + 2 * SIDE + 7]


def _random(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_the_inverse_gives_back_what_was_transformed_and_lengths_stay(size: int) -> None:
    values = _random(size)
    found = dct(values)
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(values), rel=1e-3)
    np.testing.assert_allclose(idct(found), values, atol=2e-3)
    assert np.array_equal(values, _random(size))  # neither is written to


def test_a_chunk_is_transformed_along_both_sides() -> None:
    """A product of two cosines is one coefficient."""
    place = (np.arange(SIDE) + 0.5) * np.pi / SIDE
    chunk = np.outer(np.cos(3 * place), np.cos(5 * place)).astype(np.float32)
    found = dct(chunk.reshape(-1)).reshape(SIDE, SIDE)
    assert found[3, 5] == pytest.approx(SIDE / 2, rel=1e-3)
    found[3, 5] = 0
    assert np.abs(found).max() < 1e-2
    row = np.cos(7 * place).astype(np.float32)
    assert np.abs(dct(row)).argmax() == 7


def test_the_inverse_is_exact_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no library's order of sums turns a sign: columns and rows the other way round give the same bits."""
    coefficients = _random(2 * SIDE**2 + 3 * SIDE)
    expected = idct(coefficients)
    numbers, _ = whole_numbers(coefficients[: SIDE**2].reshape(1, -1))
    assert SIDE * 2 ** (WHOLE_BITS + 3) * np.abs(demo._WHOLE).max() < 2**53 and np.abs(numbers).max() <= 2**22
    matmul = np.matmul

    def reversed_sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        assert np.array_equal(other, np.rint(other)) and SIDE * np.abs(one).max() * np.abs(other).max() < 2**53
        return matmul(one[..., ::-1].copy(), other[..., ::-1, :].copy())

    monkeypatch.setattr(np, "matmul", reversed_sums)
    assert np.array_equal(idct(coefficients), expected)


def test_the_golden_cosines() -> None:
    """Each is so far from the middle of two whole numbers that no library's last bit rounds it another way."""
    rows = np.sqrt(2 / SIDE) * np.cos(np.pi / SIDE * np.outer(np.arange(SIDE), np.arange(SIDE) + 0.5))
    rows[0] /= np.sqrt(2)
    scaled = np.ldexp(rows, demo.BITS)
    assert np.abs(np.abs(scaled - np.floor(scaled)) - 0.5).min() > 1e-9
    assert int(demo._WHOLE[0, 0]) == 4096 and demo._WHOLE[1, :3].astype(int).tolist() == [5791, 5777, 5749]


def test_all_of_the_momentum_is_sent_or_kept_and_old_momentum_fades() -> None:
    size = 2 * SIDE**2
    momentum, work = ErrorFeedback(codec("topk"), size, decay=BETA), _random(size)
    kept = np.zeros(size, np.float32)
    for _ in range(3):
        raw = momentum.encode(dct(work))
        momentum.commit()
        wanted = BETA * kept + work
        kept = idct(momentum.export())
        np.testing.assert_allclose(idct(codec("topk").decode(raw, size)) + kept, wanted, atol=2e-2)


def test_a_step_moves_each_parameter_by_the_rate_and_matrices_fade() -> None:
    layout = Layout.of([("matrix", (2, 2)), ("vector", (3,))])
    state = OuterState.start(np.full(7, 4, np.float32))
    mean = np.array([5, -1e-9, 0, 2, -3, 0, 1], np.float32)
    after = signed_step(state, mean, layout, lr=0.5, decay=0.25)
    assert after.parameters.tolist() == [3.0, 4.0, 3.5, 3.0, 4.5, 4.0, 3.5]
    assert signed_step(state, mean, layout, lr=0.5, decay=0).parameters.tolist() == [3.5, 4.5, 4, 3.5, 4.5, 4, 3.5]
