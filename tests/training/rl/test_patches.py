"""Patches of weights: whatever changed comes back bit for bit, and bytes of strangers are refused or change nothing."""

from __future__ import annotations

import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training.codecs.floats import from_bf16
from swarmnode.training.rl.patches import BadPatch, applied, between, rounded

RNG = np.random.default_rng(0)


def words(size: int) -> np.ndarray:
    return RNG.integers(0, 1 << 16, size, np.uint16)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_words_are_torchs_bf16(values: list[float]) -> None:
    parameters = np.array(values, np.float32)
    expected = torch.from_numpy(parameters).bfloat16().float().numpy()
    np.testing.assert_array_equal(from_bf16(rounded(parameters)), expected)
    np.testing.assert_array_equal(rounded(from_bf16(rounded(parameters))), rounded(parameters))


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.003, 0.1, 1.0])
def test_what_changed_comes_back_bit_for_bit(share: float) -> None:
    before, after = words(300_000), words(300_000)
    after = np.where(RNG.random(len(before)) < share, after, before)
    for ends in ((), (0,), (-1,), (0, -1)):
        changed = after.copy()
        changed[list(ends)] ^= 1
        np.testing.assert_array_equal(applied(before, between(before, changed)), changed)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 509, 510, 511])
def test_gaps_of_every_length_come_back(gap: int) -> None:
    before = words(2000)
    after = before.copy()
    after[::gap] += 1
    np.testing.assert_array_equal(applied(before, between(before, after)), after)


def test_updates_at_the_rates_of_reinforcement_learning_are_small() -> None:
    """1 % of the words by one unit each, as PULSE reports: a patch is below 1.5 % of full bf16 weights."""
    before = words(1_000_000)
    after = before.copy()
    after[RNG.random(len(before)) < 0.01] += 1
    assert len(between(before, after)) < 0.015 * before.nbytes


def made_of(count: int, gaps: bytes, differences: bytes) -> bytes:
    return zlib.compress(count.to_bytes(8, "little") + gaps + differences)


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (b"no zlib", "unpacked"),
        (zlib.compress(b"abc"), "words"),
        (made_of(0, b"", b"")[:-3], "words"),
        (made_of(1, b"\1", b"\1"), "words"),
        (made_of(1 << 60, b"\1", b"\1\0"), "words"),
        (made_of(1, b"\1\1", b"\1\0"), "gaps"),
        (made_of(1, b"\1\xff", b"\1\0"), "gaps"),
        (made_of(1, b"\xff\xff\xff", b"\1\0"), "gaps"),
        (made_of(1, b"\xff" * 3 + b"\xeb", b"\1\0"), "word 1000 of 1000"),
        (zlib.compress(bytes(1 << 24)), "words"),
    ],
)
def test_bytes_that_are_no_patch_are_refused(patch: bytes, why: str) -> None:
    with pytest.raises(BadPatch, match=why):
        applied(words(1000), patch)


@given(st.binary(max_size=200))
def test_bytes_of_strangers_are_refused_or_change_words(raw: bytes) -> None:
    before = words(500)
    for patch in (raw, zlib.compress(raw)):
        with suppress(BadPatch):
            assert len(applied(before, patch)) == len(before)
