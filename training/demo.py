"""Decoupled momentum (DeMo, arXiv 2411.19870): a cosine transform in chunks, and the outer step by signs.

    m <- beta * m + dct(lr * g)                 of each member, by its own gradient g; m stays with it
    q <- the largest coefficients of m, in each chunk;  m <- m - q
    phi <- signed_step(phi, mean_of_q)          the same on all members, bit for bit

Algorithm 1 of the paper, with the momentum kept as coefficients: the transform is linear, so that changes nothing. Then
m is what an error feedback with decay beta keeps (`codecs/feedback.py`), and q what its codec sends:

    theta <- theta - eta * sign(idct(mean_i q_i))

Departures:

- Chunks are 64 x 64 elements of the flat vector, and at its end rows of 64, and then single ones: not tiles of each
  tensor. That is how `topk` cuts it, which sends 64 of 4096 coefficients with two levels of magnitude, where the paper
  sends values as they are.
- A mean is weighted by samples, as in all methods here, and is that of all senders, not of those of a coefficient:
  signs are the same unless members send different numbers of samples.
- Weight decay is part of the outer step. Sharding inside a node (DeToNATION, 2502.06728) is left out: a node that has
  several devices divides a step among them (`training/sharded.py`), and is one member.

Members must end bit-identical, and at signs a last bit counts. So `idct` multiplies whole numbers only, of 16 and at
most 25 bits: sums of 64 such products are exact in float64 in any order. What is rounded between its two halves is
rounded one by one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.outer import Layout, OuterState, Vector, outer_step, whole_numbers

BETA = 0.999
SIDE = 64  # of a chunk
BITS = 15  # after the point, of the transform's own numbers


def _cosines() -> NDArray[np.float64]:
    """The orthonormal DCT-II of SIDE values, a row for each frequency, as whole numbers in units of 2^-BITS."""
    place, frequency = np.arange(SIDE) + 0.5, np.arange(SIDE)
    rows = np.sqrt(2 / SIDE) * np.cos(np.pi / SIDE * np.outer(frequency, place))
    rows[0] /= math.sqrt(2)
    return np.rint(np.ldexp(rows, BITS))


_WHOLE = _cosines()
_SINGLE = np.ldexp(_WHOLE, -BITS).astype(np.float32)


def dct(values: Vector) -> Vector:
    """Coefficients (n,) of values, float32 (n,): 64 x 64 of them together, and in rows of 64 at the end."""
    found = values.copy()
    chunks, rows = _cut(found)
    if chunks.size:
        along = (chunks.reshape(-1, SIDE) @ _SINGLE.T).reshape(chunks.shape)
        np.matmul(_SINGLE, along, out=chunks)
    rows[:] = rows @ _SINGLE.T
    return found


def idct(coefficients: Vector) -> Vector:
    """The values (n,) of coefficients, float32 (n,), all finite. Bit-identical for equal arguments."""
    found = coefficients.copy()
    chunks, rows = _cut(found)
    if chunks.size:
        numbers, exponents = whole_numbers(chunks.reshape(-1, SIDE * SIDE))
        half = np.rint(np.ldexp(numbers.reshape(-1, SIDE) @ _WHOLE, -BITS)).reshape(chunks.shape)
        chunks[:] = np.ldexp(np.matmul(_WHOLE.T, half), exponents[:, None] - BITS)
    numbers, exponents = whole_numbers(rows)
    rows[:] = np.ldexp(numbers @ _WHOLE, exponents - BITS)
    return found


def signed_step(state: OuterState, mean: Vector, layout: Layout, *, lr: float, decay: float) -> OuterState:
    """phi <- phi - lr * (sign(mean) + decay * phi), the latter for matrices alone; bit-identical on all members.

    Raises ValueError as `outer_step`.
    """
    direction = np.sign(mean)
    for slot in layout.slots:
        if decay and len(slot.shape) >= 2:
            direction[slot.place] += np.float32(decay) * state.parameters[slot.place]
    return outer_step(state, direction, lr=lr, momentum=0.0)


def _cut(vector: Vector) -> tuple[Vector, Vector]:
    """Views of a vector: its chunks (k, SIDE, SIDE), and its rows (l, SIDE) behind them."""
    end = vector.size // SIDE**2 * SIDE**2
    last = vector.size // SIDE * SIDE
    return vector[:end].reshape(-1, SIDE, SIDE), vector[end:last].reshape(-1, SIDE)
