"""LtHash: the hash of a set follows from those of its parts, and says which set, under which salt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt import lthash

SALT = bytes(range(32))
elements = st.sets(st.binary(min_size=1, max_size=40), max_size=12)


@given(elements, elements)
def test_the_sum_of_a_union_is_the_sum_of_the_sums(some: set[bytes], others: set[bytes]) -> None:
    others -= some
    whole = lthash.sum_of(some | others)
    assert np.array_equal(whole, lthash.sum_of(some) + lthash.sum_of(others))
    assert np.array_equal(whole - lthash.sum_of(others), lthash.sum_of(some))


@given(st.lists(st.binary(max_size=40), unique=True, max_size=12), st.randoms())
def test_order_does_not_matter_to_a_sum(some: list[bytes], rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(some)
    rng.shuffle(shuffled)
    assert np.array_equal(lthash.sum_of(some), lthash.sum_of(shuffled))


def test_sums_of_many_elements_are_those_of_one_after_another() -> None:
    many = [bytes([a, b]) for a in range(3) for b in range(100)]  # more than are hashed at once
    total = lthash.zero()
    for element in many:
        total += lthash.vector(element)
    assert np.array_equal(lthash.sum_of(many), total)


def test_a_fingerprint_tells_sets_counts_and_salts_apart() -> None:
    total = lthash.sum_of([b"a", b"b"])
    seen = {
        lthash.fingerprint(total, 2, SALT),
        lthash.fingerprint(total, 3, SALT),
        lthash.fingerprint(total, 2, bytes(32)),
        lthash.fingerprint(lthash.sum_of([b"a", b"c"]), 2, SALT),
    }
    assert len(seen) == 4
    assert all(len(fingerprint) == lthash.FINGERPRINT_SIZE for fingerprint in seen)


def test_replicas_of_other_versions_and_machines_make_the_same_fingerprint() -> None:
    """Pinned: a change here is a change of the protocol."""
    total = lthash.sum_of([bytes(40), b"\xff" * 40])
    assert lthash.fingerprint(total, 2, SALT).hex() == "96dd8e7ddd5b54fc195786d84ad4d6ad"


def test_a_salt_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError):
        lthash.fingerprint(lthash.zero(), 0, b"short")
