"""The arithmetic of low rank: what two factors hold of work, and that all members come to the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training import lowrank
from swarmnode.training.lowrank import LowRank
from swarmnode.training.outer import Layout, Vector, whole_numbers

LAYOUT = Layout.of([("wide", (24, 80)), ("bias", (24,)), ("tall", (60, 4, 5)), ("small", (4, 5)), ("one", ())])


def _random(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def _of_rank(rank: int) -> Vector:
    """Work whose matrices have this rank, with singular values that fall a little."""
    work = _random(LAYOUT.parameters)
    for matrix in LowRank(LAYOUT, 3).matrices:
        falling = np.float32(0.9) ** np.arange(rank, dtype=np.float32)
        matrix.of(work)[:] = (_random(matrix.n * rank, 1).reshape(-1, rank) * falling) @ _random(
            rank * matrix.m, 2
        ).reshape(rank, -1)
    return work


def _through(factors: LowRank, work: Vector, round: int = 0) -> Vector:
    bases = factors.bases(factors.sketch(work, round))
    return factors.expand(factors.project(work, bases), bases)


def test_tensors_that_would_be_no_smaller_as_factors_are_sent_whole() -> None:
    factors = LowRank(LAYOUT, 3)
    assert [(m.slot.name, m.n, m.m, m.rank) for m in factors.matrices] == [("wide", 24, 80, 3), ("tall", 20, 60, 3)]
    assert factors.left == 3 * (24 + 20)
    work = _random(LAYOUT.parameters)
    bases = factors.bases(factors.sketch(work, 0))
    assert factors.right(bases) == factors.project(work, bases).size == 3 * (80 + 60) + 24 + 20 + 1
    rest = np.ones(LAYOUT.parameters, bool)
    for matrix in factors.matrices:
        rest[matrix.slot.offset : matrix.slot.offset + matrix.slot.size] = False
    assert np.array_equal(_through(factors, work)[rest], work[rest])


def test_work_of_low_rank_passes_whole_and_other_work_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = LowRank(LAYOUT, 3)
    work = _of_rank(3)
    monkeypatch.setattr(lowrank, "TAIL", 1e-9)
    np.testing.assert_allclose(_through(factors, work), work, atol=2e-4 * np.abs(work).max())
    work = _random(LAYOUT.parameters)
    left = work - _through(factors, work)
    for matrix in factors.matrices:
        assert 0.5 < np.linalg.norm(matrix.of(left)) / np.linalg.norm(matrix.of(work)) < 0.99


def test_what_is_left_over_gets_through_in_later_rounds() -> None:
    factors, work = LowRank(LAYOUT, 3), _random(LAYOUT.parameters)
    left = work
    for round in range(30):
        left = left - _through(factors, left, round)
    assert np.linalg.norm(left) < 0.1 * np.linalg.norm(work)


def test_the_mean_of_all_is_what_their_factors_add_up_to() -> None:
    factors, works = LowRank(LAYOUT, 3), [_random(LAYOUT.parameters, seed) for seed in range(3)]
    bases = factors.bases(np.mean([factors.sketch(work, 1) for work in works], axis=0, dtype=np.float32))
    given = [factors.project(work, bases) for work in works]
    mean = factors.expand(np.mean(given, axis=0, dtype=np.float32), bases)
    np.testing.assert_allclose(mean, np.mean([factors.expand(one, bases) for one in given], axis=0), atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_basis_has_no_more_columns_than_the_work_has_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "TAIL", 1e-9)
    factors = LowRank(LAYOUT, 3)
    bases = factors.bases(factors.sketch(_of_rank(rank), 0))
    assert [basis.shape[1] for basis in bases] == [rank, rank]
    for basis in bases:
        unit = basis / 2**lowrank.BASIS_BITS
        np.testing.assert_allclose(unit.T @ unit, np.eye(rank), atol=1e-3)


def test_a_basis_leaves_out_what_is_short_beside_the_rest() -> None:
    columns = np.diag([1.0, 1.0, 0.9 * np.sqrt(2 * lowrank.TAIL)])
    assert lowrank._basis(columns).shape == (3, 2)
    columns[2, 2] = 1.1 * np.sqrt(2 * lowrank.TAIL)
    assert lowrank._basis(columns).shape == (3, 3)


def test_no_work_has_no_basis_and_moves_nothing() -> None:
    factors = LowRank(LAYOUT, 3)
    none = np.zeros(LAYOUT.parameters, np.float32)
    bases = factors.bases(factors.sketch(none, 0))
    assert [basis.shape for basis in bases] == [(24, 0), (20, 0)]
    assert not factors.expand(factors.project(none, bases), bases).any()


def test_what_is_multiplied_is_exact_in_any_order() -> None:
    """So that members end with one hash whatever their library does: the products in reverse give the same bits."""
    factors, work = LowRank(LAYOUT, 3), _random(LAYOUT.parameters)
    bases = factors.bases(factors.sketch(work, 0))
    for matrix, basis in zip(factors.matrices, bases, strict=True):
        factor = (basis.T @ matrix.of(work)).astype(np.float32)
        numbers = whole_numbers(factor.reshape(1, -1))[0].reshape(factor.shape)
        assert np.array_equal(basis, np.rint(basis)) and np.array_equal(numbers, np.rint(numbers))
        largest = np.abs(basis).max() * np.abs(numbers).max() * 2**15
        assert largest <= 2**53
        straight, reverse = basis @ numbers, basis[:, ::-1] @ numbers[::-1]
        assert np.array_equal(straight, reverse)
        fused = sum(basis[:, [k]] * numbers[[k]] for k in range(basis.shape[1]))
        assert np.array_equal(straight, fused)


def test_a_basis_is_the_same_bits_wherever_its_columns_lie() -> None:
    """Numpy may add a contiguous row another way than one that is not: sums must not depend on it."""
    columns = _random(300 * 3).reshape(300, 3).astype(np.float64)
    expected = lowrank._basis(columns)
    wide = np.zeros((300, 7))
    wide[:, 1:7:2] = columns
    assert np.array_equal(lowrank._basis(wide[:, 1:7:2]), expected)
    assert np.array_equal(lowrank._basis(np.asfortranarray(columns)), expected)
    by_hand = 0.0
    for row in columns:
        by_hand += float(row[1] * row[1])
    assert lowrank._sum(columns * columns)[1] == by_hand


def test_the_golden_signs_of_a_round() -> None:
    """They are part of the protocol: members that drew others would take another basis for the same work."""
    (matrix, _) = LowRank(LAYOUT, 3).matrices
    signs = lowrank._signs(5, 0, matrix)
    assert signs.shape == (80, 3) and np.allclose(np.abs(signs), 1 / np.sqrt(80))
    assert "".join("+" if sign > 0 else "-" for sign in signs.reshape(-1)[:16]) == "++-+++-+---+-++-"
    assert not np.array_equal(signs, lowrank._signs(6, 0, matrix))
