"""How surely a peer's work is better than none: an OpenSkill rating, from matches against the player that does nothing.

    rating = match(Rating(), Match.WON)                # its contribution lowered the held-out loss
    better_than_idle(rating)                           # 0.64; a newcomer has 0.5, which earns nothing

The update is Plackett–Luce of Weng & Lin (JMLR 12, 2011, algorithm 4) for two players, with OpenSkill's numbers (25,
25/3, 25/6) and its γ = σ/c. Gauntlet (2505.21684) lets all contributions of a round play one game. We do not:

- there, how high a peer stands depends on who else plays: ten identities that contribute rubbish lift an eleventh, and
  whoever is slow among the quick stands near the bottom although each of its contributions helps. Here a rating
  follows from the peer's own contributions alone, so no number of identities moves anybody else's;
- in one game of sixteen, σ falls from 8.3 to 7.9 in twenty rounds, so that μ − 3σ tells nothing by then; in twenty
  matches it falls to 4.8;
- the idle player's skill is known, so the scale has a point that means something, and a swarm of liars cannot shift it.

The package `openskill` has these formulas among many others; tests hold ours to its numbers. Floats of two machines
may differ in their last bits: a rating is one node's view, and no part of what all nodes compute alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

MU, SIGMA = 25.0, 25.0 / 3  # of who was never seen
BETA = 25.0 / 6  # spread of one performance about the skill
TAU = 0.1  # what a skill may have moved since the match before, so that no rating is ever certain (Gauntlet)
KAPPA = 1e-4  # a variance never falls to less than this share of itself at once
IDLE_MU, IDLE_SIGMA = MU, 0.5  # of the player that does nothing; they never change


class Match(Enum):
    """How a contribution did against doing nothing."""

    WON = "won"
    DRAWN = "drawn"
    LOST = "lost"


@dataclass(frozen=True)
class Rating:
    """A skill as a normal distribution."""

    mu: float = MU
    sigma: float = SIGMA


NEW = Rating()


def match(rating: Rating, outcome: Match) -> Rating:
    """The rating after one more match against the idle player."""
    variance = rating.sigma**2 + TAU**2
    c = math.sqrt(variance + IDLE_SIGMA**2 + TAU**2 + 2 * BETA**2)
    p = 1.0 / (1.0 + math.exp((IDLE_MU - rating.mu) / c))  # of winning
    omega = {Match.WON: 1.0 - p, Match.DRAWN: 0.5 - p, Match.LOST: -p}[outcome]
    gamma = math.sqrt(variance) / c
    delta = gamma * variance / c**2 * p * (1.0 - p)
    return Rating(rating.mu + omega * variance / c, math.sqrt(variance * max(1.0 - delta, KAPPA)))


def better_than_idle(rating: Rating, *, sigmas: float = 0.0) -> float:
    """Probability that the peer's next work is better than none: Φ((μ − μ₀) / √(2β² + σ² + σ₀²)), in [0, 1].

    Doubt pulls it to 1/2. `sigmas`: ask this of a skill so many standard deviations beside the rating's.
    """
    apart = rating.mu + sigmas * rating.sigma - IDLE_MU
    spread = math.sqrt(2 * BETA**2 + rating.sigma**2 + IDLE_SIGMA**2)
    return 0.5 * (1.0 + math.erf(apart / (spread * math.sqrt(2.0))))


def unseen(rating: Rating, rounds: int) -> Rating:
    """A rating after so many rounds without a match: as good as before, less certain, never less than a newcomer's."""
    return Rating(rating.mu, min(SIGMA, math.sqrt(rating.sigma**2 + rounds * TAU**2)))
