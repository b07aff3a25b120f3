"""Weights from how contributions resemble one another, or the aggregate, over rounds. For the rules of `robust`.

    factors = foolsgold(histories)                                  # (n, d) -> (n,) in [0, 1]
    factors = foolsgold(histories, witnesses)                       # with histories that others passed on
    reputations = cosine_reputation(reputations, contributions, aggregate)
    result = RULES["mean"](contributions, weights * factors)

`histories` are sums of what each peer offered over all rounds, so they take n·d floats. numpy only, and deterministic
for one build of it only: for what a node decides alone, never for what all must compute alike.

Where these hold. Similarity finds copies and Sybils that push one way; it takes honest peers for Sybils where data are
IID, as their sums point one way too, and misses Sybils that add different noise. Cosines with the aggregate find who
pulls elsewhere; where most pull elsewhere, they find the honest. Neither sees a lie along honest directions. In open
runs the held-out gate and audited work decide instead (docs/reputation.md); these are for swarms that cannot measure.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.robust import Contributions, Vector, norms

Factors: TypeAlias = NDArray[np.float64]  # (n,), in [0, 1]

KAPPA = 1.0  # confidence of FoolsGold: steepness of the logit
ALMOST = 0.99  # what the least suspect peer counts as, where the logit would be infinite
REMEMBERED = 0.95  # of a cosine reputation, from one round to the next (RFFL, α)
DISMISSED = 1.0 / 3.0  # of a fair share of all reputation; who has less counts no more (RFFL, β = 1 / 3N)


def foolsgold(histories: Contributions, witnesses: Contributions | None = None, *, kappa: float = KAPPA) -> Factors:
    """How little each history resembles another: 1 for who is like nobody, 0 for who is like somebody.

    FoolsGold (Fung et al. 1808.04866, algorithm 1): cosines, pardoned where the other is more alike to somebody else,
    rescaled to the greatest, through a logit. `witnesses` (w, d) are compared with and get no factor: with histories
    that neighbours passed on this is SybilWall's weighing (Werthenbach & Pouwelse 2306.15044), which finds Sybils that
    show themselves once to each node. Any number of Sybils that push alike is found; breakdown point 0 against those
    that do not, and against honest peers that are alike. O((n + w) n d).
    """
    count = histories.shape[0]
    known = histories if witnesses is None else np.concatenate([histories, witnesses])
    if known.shape[0] < 2:
        return np.ones(count)
    alike = cosines(known, known)
    np.fill_diagonal(alike, -np.inf)
    most = np.maximum(alike.max(axis=1), 0.0)  # (n + w,): how much each is like somebody
    pardon = np.divide(most[:, None], most[None, :], out=np.ones_like(alike), where=most[None, :] > 0)
    alike = np.where(alike > 0, alike * np.minimum(pardon, 1.0), alike)
    factors = np.clip(1.0 - alike.max(axis=1), 0.0, 1.0)[:count]
    if not factors.max(initial=0.0) > 0:
        return np.zeros(count)
    shares = np.minimum(factors / factors.max(), ALMOST)
    with np.errstate(divide="ignore"):
        return np.clip(kappa * (np.log(shares / (1.0 - shares)) + 0.5), 0.0, 1.0)


def cosine_reputation(before: Factors, contributions: Contributions, aggregate: Vector) -> Factors:
    """Reputations after a round: a moving mean of the cosine with the aggregate, summing to 1.

    RFFL (Xu & Lyu 2011.10464): rᵢ ← α rᵢ + (1 − α) max(0, cos(gᵢ, g)), normalised; who falls below a third of a fair
    share is dismissed, with 0, for good. Begin with 1/n each. The aggregate is made with the reputations before, so
    liars who begin with half of all reputation keep it: breakdown point 1/2. O(nd).
    """
    staying = before > 0
    agree = np.maximum(cosines(contributions, aggregate[None, :])[:, 0], 0.0)
    after = np.where(staying, REMEMBERED * before + (1.0 - REMEMBERED) * agree, 0.0)
    after = _shared(after)
    return _shared(np.where(after < DISMISSED / max(1, int(staying.sum())), 0.0, after))


def cosines(rows: Contributions, others: Contributions) -> NDArray[np.float64]:
    """Cosine of every row with every other, (n, d), (m, d) -> (n, m); 0 with what is nothing."""
    lengths = norms(rows)[:, None] * norms(others)[None, :]
    products = rows.astype(np.float64) @ others.astype(np.float64).T
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)


def _shared(values: Factors) -> Factors:
    total = float(values.sum())
    return values / total if total > 0 else values
