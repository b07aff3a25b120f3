"""Weights from similarity: by hand-made numbers, by the authors' own loop, and by what they are for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training import robust
from swarmnode.training.similarity import cosine_reputation, cosines, foolsgold


def by_the_paper(histories: np.ndarray) -> np.ndarray:
    """FoolsGold as its authors wrote it, loop by loop (algorithm 1; no cosine below 0 is pardoned)."""
    count = len(histories)
    alike = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(count):
            if i != j:
                a, b = histories[i].astype(float), histories[j].astype(float)
                alike[i][j] = float(a @ b / np.sqrt((a @ a) * (b @ b)))
    most = [max(alike[i][j] for j in range(count) if j != i) for i in range(count)]
    found = []
    for i in range(count):
        row = []
        for j in range(count):
            if i != j:
                pardoned = most[i] < most[j] and alike[i][j] > 0 and most[i] > 0
                row.append(alike[i][j] * most[i] / most[j] if pardoned else alike[i][j])
        found.append(min(1.0, max(0.0, 1.0 - max(row))))
    greatest = max(found)
    logits = [min(value / greatest, 0.99) for value in found]
    with np.errstate(divide="ignore"):
        return np.clip([np.log(value / (1 - value)) + 0.5 for value in map(np.float64, logits)], 0.0, 1.0)


def directions(count: int, dimensions: int = 500, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dimensions)).astype(np.float32)


@given(st.integers(3, 12), st.integers(0, 50))
def test_foolsgold_is_what_its_authors_wrote(count: int, seed: int) -> None:
    rows = directions(count, 6, seed)
    assert np.allclose(foolsgold(rows), by_the_paper(rows), atol=1e-9)


def test_foolsgold_of_two_equal_and_one_other_direction() -> None:
    rows = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    assert foolsgold(rows).tolist() == [0.0, 0.0, 1.0]


def test_ten_sybils_who_push_alike_count_for_nothing_and_honest_peers_on_data_of_their_own_in_full() -> None:
    rows = directions(16)
    rows[6:] = rows[6] + 0.01 * directions(10, seed=1)
    factors = foolsgold(rows)
    assert factors[6:].max() == 0.0
    assert factors[:6].min() > 0.9


def test_honest_peers_on_equal_data_are_taken_for_sybils_beside_one_who_is_different() -> None:
    rows = 1 + 0.1 * directions(8)
    rows[7] = directions(1, seed=4)[0]
    factors = foolsgold(rows)
    assert factors[:7].max() == 0.0
    assert factors[7] == 1.0


def test_sybils_that_show_themselves_once_to_each_node_are_found_by_what_neighbours_passed_on() -> None:
    rows, others = directions(6), directions(9, seed=2)
    rows[5] = others[0]
    others[1:] = others[0]
    assert foolsgold(rows)[5] > 0.9
    assert foolsgold(rows, others)[5] == 0.0
    assert foolsgold(rows, others)[:5].min() > 0.9


def test_nobody_to_compare_with_is_like_nobody() -> None:
    assert foolsgold(directions(1)).tolist() == [1.0]


def test_who_offered_nothing_resembles_nobody() -> None:
    rows = directions(4)
    rows[0] = 0
    assert np.isfinite(foolsgold(rows)).all()
    assert foolsgold(rows)[0] == 1.0


def test_a_cosine_reputation_by_hand() -> None:
    rows = np.array([[1, 0], [3, 4], [-1, 0]], np.float32)
    after = cosine_reputation(np.full(3, 1 / 3), rows, np.array([2, 0], np.float32))
    raw = np.array([0.95 / 3 + 0.05, 0.95 / 3 + 0.03, 0.95 / 3])
    assert after == pytest.approx(raw / raw.sum())


def test_sign_flippers_are_dismissed_for_good_and_honest_peers_share_what_they_had() -> None:
    rng = np.random.default_rng(3)
    reputations, dismissed = np.full(16, 1 / 16), 0
    for round in range(60):
        rows = (1 + 0.3 * rng.standard_normal((16, 200))).astype(np.float32)
        rows[11:] *= -1
        weights = np.where(reputations > 0, reputations, 1e-12).astype(np.float32)
        reputations = cosine_reputation(reputations, rows, robust.mean(rows, weights))
        if not dismissed and not reputations[11:].any():
            dismissed = round
    assert 0 < dismissed < 60
    assert reputations[11:].tolist() == [0.0] * 5
    assert reputations[:11] == pytest.approx(np.full(11, 1 / 11), rel=0.05)


@given(st.integers(1, 8), st.integers(0, 20))
def test_cosines_lie_between_opposite_and_equal(count: int, seed: int) -> None:
    found = cosines(directions(count, 5, seed), directions(3, 5, seed + 1))
    assert found.shape == (count, 3)
    assert (np.abs(found) <= 1 + 1e-12).all()
