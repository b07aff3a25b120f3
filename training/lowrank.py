"""Pseudo-gradients as factors of low rank: PowerSGD (arXiv 1905.13727), as DiLoCoX (2506.21263) exchanges them.

    factors = LowRank(layout, rank=16)
    p = factors.sketch(work, round)                     # of one member's work (P,), (left,)
    bases = factors.bases(mean_of_p)                    # the same on all members, bit for bit
    q = factors.project(work, bases)                    # (factors.right(bases),)
    mean = factors.expand(mean_of_q, bases)             # (P,), the same on all members, bit for bit
    left_over = work - factors.expand(q_as_sent, bases)

Algorithm 1 of PowerSGD, for each matrix M_i (n, m) of a member i, with `rank` r:

    P <- mean_i(M_i Q)  (n, r);   P^ <- orthogonalize(P);   Q <- mean_i(M_i^T P^)  (m, r);   M <- P^ Q^T

DiLoCoX sends both factors in int4, and lowers r as the spectrum of what was sent allows.

Departures:

- Q is drawn for each round, as in a randomised range finder (Halko et al. 0909.4061), and not that of the round before:
  so nothing but the number of the round has to be known to who joins.
- The rank is found in each round, for each matrix, from the P that all members have just decoded: Gram-Schmidt takes
  the longest column left first, and ends once what is left has a share of at most TAIL of P's squares. DiLoCoX lowers
  one rank for all from the spectra of past rounds, which a newcomer has not seen, and raises H as it falls; here H is
  what the run says, and a lower rank means fewer bytes.
- What is left over is a member's own work less its own factors, M_i - P^ Q_i^T, and not less the mean: both add up to
  the same, and so a member's work stays its own where some are missing from a mean.

Members must end bit-identical, and a matrix product is not: its order is the library's. So orthogonalisation is float64
in a fixed order, and what `expand` multiplies are whole numbers, of 16 and 22 bits: sums of 2^15 such products are
exact in float64 in any order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.outer import Layout, Slot, Vector, whole_numbers

# (n, k), whole numbers, in units of 2^-BASIS_BITS; its columns are orthonormal but for that
Basis = NDArray[np.float64]

TAIL = 0.01  # share of a sketch's squares that may be left out of a basis; the next rounds send it
BASIS_BITS = 15


@dataclass(frozen=True)
class Matrix:
    """A tensor that is exchanged by factors: of (n, m), or turned, so that n is the smaller."""

    slot: Slot
    turned: bool
    n: int
    m: int
    rank: int  # at the most

    def of(self, vector: Vector) -> Vector:
        """A view (n, m) of it in a vector (P,)."""
        matrix = vector[self.slot.place].reshape(self.slot.shape[0], -1)
        return matrix.T if self.turned else matrix


class LowRank:
    """The matrices of a layout, of which factors of at most `rank` columns are exchanged, and the rest, sent as it is.

    A tensor of more dimensions is a matrix of its first one by all others. The rest are vectors, and whatever has no
    fewer elements in factors.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        matrices, rest = [], []
        for slot in layout.slots:
            rows = slot.shape[0] if slot.shape else 1
            n, m = sorted((rows, slot.size // max(rows, 1)))
            if min(rank, n) * (n + m) < slot.size:
                matrices.append(Matrix(slot, rows > n, n, m, min(rank, n)))
            else:
                rest.append(slot)
        self.matrices, self._rest = tuple(matrices), tuple(rest)
        self._size = layout.parameters
        self.left = sum(matrix.n * matrix.rank for matrix in matrices)  # elements of all P

    def sketch(self, work: Vector, round: int) -> Vector:
        """P = M Q of all matrices of `work` (P,), (left,); Q is drawn by the round. Columns lie one behind another."""
        found = [
            (matrix.of(work) @ _signs(round, number, matrix)).T.reshape(-1)
            for number, matrix in enumerate(self.matrices)
        ]
        return np.concatenate([np.zeros(0, np.float32), *found])

    def bases(self, mean: Vector) -> tuple[Basis, ...]:
        """Of the mean of all sketches, (left,): for each matrix, what its work is projected on."""
        bases, done = [], 0
        for matrix in self.matrices:
            size = matrix.n * matrix.rank
            bases.append(_basis(mean[done : done + size].reshape(matrix.rank, matrix.n).T.astype(np.float64)))
            done += size
        return tuple(bases)

    def right(self, bases: Sequence[Basis]) -> int:
        """Elements of all Q and of the rest."""
        factors = sum(matrix.m * basis.shape[1] for matrix, basis in zip(self.matrices, bases, strict=True))
        return factors + sum(slot.size for slot in self._rest)

    def project(self, work: Vector, bases: Sequence[Basis]) -> Vector:
        """Q = M^T P^ of all matrices of `work` (P,), and behind them the rest of it, (right,)."""
        units = (np.ldexp(basis, -BASIS_BITS).astype(np.float32) for basis in bases)
        found = [(unit.T @ matrix.of(work)).reshape(-1) for matrix, unit in zip(self.matrices, units, strict=True)]
        return np.concatenate([*found, *(work[slot.place] for slot in self._rest)])

    def expand(self, factors: Vector, bases: Sequence[Basis]) -> Vector:
        """What `factors` (right,) stand for, (P,): P^ Q^T, and the rest. Bit-identical for equal arguments."""
        whole, done = np.empty(self._size, np.float32), 0
        for matrix, basis in zip(self.matrices, bases, strict=True):
            size = matrix.m * basis.shape[1]
            numbers, exponent = whole_numbers(factors[None, done : done + size])
            matrix.of(whole)[:] = np.ldexp(basis @ numbers.reshape(basis.shape[1], matrix.m), exponent - BASIS_BITS)
            done += size
        for slot in self._rest:
            whole[slot.place] = factors[done : done + slot.size]
            done += slot.size
        return whole


def _signs(round: int, number: int, matrix: Matrix) -> Vector:
    """Q (m, rank) of a round, of plus and minus one over the root of m; the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(f"{round} {number}".encode()).digest()[:16], "big")
    count = matrix.m * matrix.rank
    bits = np.unpackbits(np.random.Philox(key=seed).random_raw(-(-count // 64)).astype("<u8").view(np.uint8))[:count]
    signs = bits.astype(np.float32) * np.float32(2) - np.float32(1)
    return signs.reshape(matrix.m, matrix.rank) / np.float32(math.sqrt(matrix.m))


def _basis(columns: NDArray[np.float64]) -> Basis:
    """Orthonormal columns that span those of (n, r) but for a share of TAIL of their squares: (n, k), k <= r.

    Modified Gram-Schmidt with the longest column next. Sums run along rows one after another, as `accumulate` adds.
    """
    left = np.array(columns, order="C")
    squares = _sum(left * left)
    total = float(np.add.accumulate(squares)[-1])
    chosen: list[NDArray[np.float64]] = []
    while len(chosen) < left.shape[1] and np.add.accumulate(squares)[-1] > TAIL * total:
        longest = int(squares.argmax())
        column = left[:, longest] / math.sqrt(squares[longest])
        chosen.append(column)
        left -= column[:, None] * _sum(column[:, None] * left)
        left[:, longest] = 0
        squares = _sum(left * left)
    return np.rint(np.ldexp(np.array(chosen).reshape(-1, len(left)).T, BASIS_BITS))


def _sum(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of rows (n, r), in their order."""
    return np.add.accumulate(rows, axis=0)[-1]
