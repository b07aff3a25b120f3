"""Weights that travel light: what bf16 keeps of a policy, and between two versions of it only what changed.

    words = rounded(parameters)                 # (P,) uint16: the bf16 nearest to each parameter
    patch = between(before, words)              # bytes
    applied(before, patch) == words             # bit for bit; raises BadPatch
    parameters = from_bf16(words)               # (P,) float32, what a policy samples with

PULSE (arXiv 2602.03839): at the learning rates of reinforcement learning some 99 % of a policy's float32 updates are
lost where its weights are rounded to bf16, so hardly any change what it samples. There the changed weights travel as
raw float32 and both sides keep float32; here whoever samples has the rounded policy itself, which is what its groups
are audited against, and the changed words travel as differences of two bytes.

A patch is zlib of: the number of changed words (8 bytes); the gap before each, as bytes of 255 and the rest below 255;
the low bytes of the differences of words, modulo 2^16; the high bytes. All little-endian.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]
COUNT = 8  # bytes
LEVEL = 1  # of zlib: higher ones take several times as long for some per cent


class BadPatch(Exception):
    """These bytes are no patch of weights of this size."""


def rounded(parameters: NDArray[np.float32]) -> Words:
    """The nearest bf16 of each parameter (P,), ties to even; beyond them infinity, which samplers refuse."""
    bits = parameters.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def between(before: Words, after: Words) -> bytes:
    """What makes `after` of `before`, both (P,)."""
    changed = np.flatnonzero(before != after)
    whole, rest = np.divmod(np.diff(changed, prepend=-1) - 1, 255)
    ends = np.cumsum(whole + 1) - 1
    gaps = np.full(ends[-1] + 1 if len(ends) else 0, 255, np.uint8)
    gaps[ends] = rest
    differences = after[changed] - before[changed]
    low, high = (differences & 0xFF).astype(np.uint8), (differences >> 8).astype(np.uint8)
    count = len(changed).to_bytes(COUNT, "little")
    return zlib.compress(b"".join((count, gaps.tobytes(), low.tobytes(), high.tobytes())), LEVEL)


def applied(before: Words, patch: bytes) -> Words:
    """What `between` was given as `after`. Raises BadPatch."""
    most = COUNT + len(before) // 255 + 3 * len(before)  # bytes, where all words have changed
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(patch, most + 1)
    except zlib.error as error:
        raise BadPatch(f"a patch cannot be unpacked: {error}") from error
    count = int.from_bytes(raw[:COUNT], "little")
    if not unpacking.eof or len(raw) < COUNT + 3 * count:
        raise BadPatch(f"a patch of {len(raw)} bytes does not have {count} words")
    numbers = np.frombuffer(raw, np.uint8, offset=COUNT)
    gaps, (low, high) = numbers[: len(numbers) - 2 * count], numbers[len(numbers) - 2 * count :].reshape(2, count)
    ends = np.flatnonzero(gaps != 255)
    if len(ends) != count or (count and ends[-1] != len(gaps) - 1):
        raise BadPatch(f"a patch has {len(ends)} gaps before {count} words")
    changed = np.cumsum(255 * (np.diff(ends, prepend=-1) - 1) + gaps[ends].astype(np.int64) + 1) - 1
    if count and changed[-1] >= len(before):
        raise BadPatch(f"a patch changes word {changed[-1]} of {len(before)}")
    after = before.copy()
    after[changed] += low.astype(np.uint16) | (high.astype(np.uint16) << 8)
    return after
