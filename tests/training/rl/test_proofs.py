"""A commitment to activations holds for the weights that gave them, and for no others; an empty one holds for none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from swarmnode.training.rl.proofs import (
    CHUNK,
    HALF,
    TOP,
    ActivationDistance,
    P,
    Tolerance,
    commit,
    distance_of,
    proof_size,
)

SAME = Tolerance()


def activations(seed: int, tokens: int = 40, channels: int = 48) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((tokens, channels)).astype(np.float32)


def fits(proof: bytes, of: NDArray[np.float32]) -> bool:
    distance = distance_of(proof, of)
    return distance is not None and distance.fits(SAME)


@pytest.mark.parametrize(("tokens", "channels"), [(1, 8), (24, 48), (32, 48), (65, 48), (33, 4096)])
def test_the_same_activations_are_at_no_distance(tokens: int, channels: int) -> None:
    given = activations(1, tokens, channels)
    (proof,) = commit([given])
    assert len(proof) == proof_size(tokens, channels)
    assert distance_of(proof, given) == ActivationDistance(0.0, 0.0, 0.0)
    assert fits(proof, given * np.float32(1 + 1e-4)), "rounding of other hardware passes"
    rounded = distance_of(proof, given * np.float32(1.01))
    assert rounded is not None and rounded.fits(HALF) and not rounded.fits(SAME)


def test_thirty_two_tokens_take_258_bytes() -> None:
    assert proof_size(CHUNK, 4096) == 2 * TOP + 2 == 258
    assert proof_size(CHUNK + 1, 4096) == 2 * 258


def test_groups_of_unequal_length_are_committed_to_apart() -> None:
    groups = [activations(n, tokens) for n, tokens in enumerate((24, 24, 31, 70))]
    proofs = commit(groups)
    assert all(fits(proof, group) for proof, group in zip(proofs, groups, strict=True))
    assert commit(groups[2:]) == proofs[2:], "who stands beside does not matter"


def test_others_activations_copies_and_nothing_at_all_never_pass() -> None:
    given, other = activations(1), activations(2)
    (proof,), (copied,) = commit([given]), commit([other])
    assert not fits(copied, given)
    assert not fits(proof, given + np.float32(0.02) * other), "a little noise is other weights"
    for malformed in (b"", proof[:-2], proof + b"\0\0", proof[: len(proof) // 2]):
        assert distance_of(malformed, given) is None
    for forged in (bytes(len(proof)), b"\xff" * len(proof), proof[:2] + bytes(len(proof) - 2)):
        assert not fits(forged, given)
    half = proof_size(CHUNK, 48)
    assert not fits(proof[:half] + copied[half:], given), "one wrong chunk is enough"


def test_no_proof_fits_activations_that_are_not_there() -> None:
    assert distance_of(b"", np.zeros((0, 48), np.float32)) is None


def test_the_field_is_one() -> None:
    assert all(P % n for n in range(2, int(P**0.5) + 1))
