"""What a sampler commits to while it samples, so that whoever holds the weights can tell by one prefill whether these
were used: the greatest final activations, as the coefficients of a polynomial. numpy only.

    proofs = commit([activations])                        # of each group, (N, C) of all its answers' tokens in a row
    distance = distances(proofs, [recomputed])[0]         # None where the proof is empty or malformed
    distance.fits(Tolerance())                            # HALF for models of 16 bits

TOPLOC (2501.16007): of each CHUNK tokens the TOP activations of greatest magnitude, a = (token, channel), are written
down as a polynomial over GF(P) that at `a mod m` has the 16 bits of the value in bfloat16. Whoever recomputes the
activations takes the TOP of his own, evaluates there, and compares exponents and mantissas: the same weights give the
same bits but for rounding, others give noise. 2 bytes for each of TOP + 1 numbers: 258 bytes for 32 tokens.

A proof says that the sender had these weights, not that it drew the tokens from them: that is the sampling test's
(`defence.sampling_z`). The length is a function of the number of tokens and channels, so nothing can be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CHUNK = 32  # tokens
TOP = 128  # activations of a chunk; fewer where there are fewer
P = 65497  # a prime; the bits of all finite bfloat16 numbers are below

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tolerance:
    """How far recomputed activations may be from those committed to, where both sides compute in 32 bits.

    Measured with tiny policies: 0 on one machine; 0.04, 0.6 and 0 at the least for answers to one question under the
    proof of others to it, 0.07, 2 and 1 to another question.
    """

    exponents: float = 0.03  # of activations whose sign and exponent differ: the least of the TOP change with rounding
    mantissa: float = 0.25  # mean difference of the others, in units of the last of 7 bits
    median: float = 0.0


HALF = Tolerance(exponents=0.3, mantissa=10.0, median=8.0)  # TOPLOC's for 16 bits on all hardware, section 5


@dataclass(frozen=True)
class Distance:
    """The worst chunk's."""

    exponents: float  # part of the activations whose sign or exponent differs, 0 to 1
    mantissa: float  # mean difference of the others, in units of the last bit; inf where there are none
    median: float

    def fits(self, limits: Tolerance) -> bool:
        return self.exponents <= limits.exponents and self.mantissa <= limits.mantissa and self.median <= limits.median


def proof_size(tokens: int, channels: int) -> int:
    """Bytes of the proof of so many tokens."""
    return sum(2 + 2 * min(TOP, rows * channels) for rows in _rows(tokens))


def commit(groups: Sequence[Floats]) -> list[bytes]:
    """The proof of each group's activations (N, C), those of its answers in a row."""
    chunks = [chunk for group in groups for chunk in _chunks(group)]
    sealed: list[bytes] = [b""] * len(chunks)
    for indices in _by_shape(chunks):
        values = np.stack([chunks[index] for index in indices])  # (B, n)
        places = _greatest(values)  # (B, K)
        modulus = [_modulus(row) for row in places]
        x = places % np.array(modulus)[:, None]
        y = _bits(np.take_along_axis(values, places, axis=1))
        for index, m, row in zip(indices, modulus, _interpolated(x, y), strict=True):
            sealed[index] = np.array([m, *row], "<u2").tobytes()
    parts = iter(sealed)
    return [b"".join(next(parts) for _ in _rows(len(group))) for group in groups]


def distances(proofs: Sequence[bytes], groups: Sequence[Floats]) -> list[Distance | None]:
    """How far each proof is from recomputed activations (N, C); None where it is not of the size that it must have."""
    found: list[Distance | None] = []
    for proof, group in zip(proofs, groups, strict=True):
        if not len(group) or len(proof) != proof_size(*group.shape):
            found.append(None)
            continue
        at, worst = 0, Distance(0.0, 0.0, 0.0)
        for chunk in _chunks(group):
            size = 2 + 2 * min(TOP, len(chunk))
            one = _distance(np.frombuffer(proof, "<u2", size // 2, at), chunk)
            at += size
            worst = Distance(*map(max, zip(_numbers(worst), _numbers(one), strict=True)))
        found.append(worst)
    return found


def _distance(sealed: NDArray[np.uint16], chunk: Floats) -> Distance:
    modulus, coefficients = int(sealed[0]), sealed[1:].astype(np.int64)
    if modulus == 0:
        return Distance(1.0, np.inf, np.inf)
    (places,) = _greatest(chunk[None])
    x, claimed = places % modulus, np.zeros(len(places), np.int64)
    for coefficient in coefficients[::-1]:  # Horner
        claimed = (claimed * x + coefficient) % P
    found = _bits(chunk[places])
    alike = claimed >> 7 == found >> 7  # sign and exponent
    if not alike.any():
        return Distance(1.0, np.inf, np.inf)
    apart = np.abs((claimed & 127) - (found & 127))[alike]
    return Distance(float(1.0 - alike.mean()), float(apart.mean()), float(np.median(apart)))


def _numbers(distance: Distance) -> tuple[float, float, float]:
    return distance.exponents, distance.mantissa, distance.median


def _rows(tokens: int) -> list[int]:
    return [min(CHUNK, tokens - at) for at in range(0, tokens, CHUNK)]


def _chunks(group: Floats) -> list[Floats]:
    return [group[at : at + CHUNK].reshape(-1) for at in range(0, len(group), CHUNK)]


def _by_shape(chunks: Sequence[Floats]) -> list[list[int]]:
    sizes: dict[int, list[int]] = {}
    for index, chunk in enumerate(chunks):
        sizes.setdefault(len(chunk), []).append(index)
    return list(sizes.values())


def _greatest(values: Floats) -> Ints:
    """Places (B, K) of the TOP greatest magnitudes of values (B, n)."""
    top = min(TOP, values.shape[1])
    return np.argpartition(-np.abs(values), top - 1, axis=1)[:, :top].astype(np.int64)


def _bits(values: Floats) -> Ints:
    """The 16 bits of each value in bfloat16, rounded to nearest even; below P for finite numbers."""
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    rounded = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.minimum(rounded, P - 1)


def _modulus(places: Ints) -> int:
    """The greatest number up to P modulo which the places differ."""
    if int(places.max()) < P:
        return P
    return next(m for m in range(P, 0, -1) if len(np.unique(places % m)) == len(places))


def _interpolated(x: Ints, y: Ints) -> Ints:
    """Coefficients (B, K) over GF(P) of the polynomials through the points (B, K); Newton's divided differences."""
    inverses, count = _inverses(), x.shape[1]
    divided = y.copy()
    for order in range(1, count):
        apart = inverses[(x[:, order:] - x[:, :-order]) % P]
        divided[:, order:] = (divided[:, order:] - divided[:, order - 1 : -1]) % P * apart % P
    coefficients = np.zeros_like(y)
    for order in range(count - 1, -1, -1):  # c(X) ← c(X) · (X − x) + d
        shifted = np.roll(coefficients, 1, axis=1)
        shifted[:, 0] = 0
        coefficients = (shifted - coefficients * x[:, order : order + 1]) % P
        coefficients[:, 0] = (coefficients[:, 0] + divided[:, order]) % P
    return coefficients


@lru_cache(maxsize=1)
def _inverses() -> Ints:
    """1 / n over GF(P), (P,): n to the power P − 2."""
    base, result, exponent = np.arange(P, dtype=np.int64), np.ones(P, np.int64), P - 2
    while exponent:
        if exponent & 1:
            result = result * base % P
        base = base * base % P
        exponent >>= 1
    return result
