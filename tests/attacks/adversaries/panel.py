"""What liars can know of a round before they offer anything: how judges would measure it, by drawing as they draw.

    panel = Panel(seen)
    panel.shares(lie)     # (judges,): what each of them would say is gained by `lie`, in bits, if all liars offer it
    panel.weight(lie)     # by the rules of the chain: 1, less, or 0 where it is refused
    panel.loss(lie)       # of the public text, after the round

Text and rules are public, judges' draws are not: so liars draw their own, and know what to expect but for the luck of
one round.
"""

from __future__ import annotations

import numpy as np
from clusters import SEQUENCES, Floats
from openrounds import Seen

from swarmnode.training.open_step import CLIP_AT

JUDGES = 16
POOL = 16  # sequences by which liars estimate what all judges together see
ERROR = 1.2533 * 1.4826  # of a median of n normal values, by their median deviation and the root of n


class Panel:
    """Sixteen imagined judges of one round, with the liars' own among them."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self.norm = longest(seen)
        seeds = seen.rng.integers(0, 1 << 31, JUDGES)
        slopes = np.stack([seen.task.slope(seen.phi, int(seed), 0, SEQUENCES) for seed in seeds])
        self.slope: Floats = slopes.mean(axis=0)  # (P,), at the shared parameters
        self.noise: Floats = slopes - self.slope  # (judges, P)
        self._pool = int(seen.rng.integers(0, 1 << 31))
        self._sum = _clipped(seen.honest, self.norm).sum(axis=0)  # (P,)
        self._peers = len(seen.honest) + len(seen.own)

    def slope_at(self, phi: Floats) -> Floats:
        """(P,), by what all judges see together."""
        return self._seen.task.slope(phi, self._pool, 0, POOL)

    def curved(self, steps: int = 6) -> Floats:
        """The direction (P,), of norm 1, in which the loss is curved most: power iteration on differences of slopes."""
        found = self._seen.rng.normal(size=self.slope.size).astype(np.float32)
        here, small = self.slope_at(self._seen.phi), np.float32(0.02)
        for _ in range(steps):
            found = unit(self.slope_at(self._seen.phi + small * unit(found)) - here)
        return found

    def noisiest(self) -> Floats:
        """The direction (P,), of norm 1, in which judges differ most and that neither gains nor loses anything."""
        direction = np.linalg.svd(self.noise, full_matrices=False)[2][0].astype(np.float32)
        along = unit(self.slope)
        return unit(direction - np.float32(direction @ along) * along)

    def shares(self, lie: Floats) -> Floats:
        """What each judge says is gained by one of the liars' contributions (P,)."""
        lie = _clipped(lie[None], self.norm)[0]
        halfway = self._seen.phi - (self._sum + len(self._seen.own) * lie) / np.float32(2 * self._peers)
        return np.asarray((self.noise + self.slope_at(halfway)) @ lie)

    def errors(self, lie: Floats) -> float:
        """By how many standard errors honest judges find it to harm; negative where it helps."""
        shares = self.shares(lie)
        middle = np.median(shares)
        error = ERROR * np.median(np.abs(shares - middle)) / np.sqrt(len(shares))
        return float(-middle / max(error, 1e-12))

    def weight(self, lie: Floats) -> float:
        """What the rules give it, where liars praise it as judges."""
        shares = self.shares(lie)
        shares[: len(shares) * len(self._seen.own) // self._peers] = np.inf
        middle = np.median(shares)
        error = ERROR * np.median(np.abs(shares - middle)) / np.sqrt(len(shares))
        harm = -middle / max(error, 1e-12)
        return 0.0 if harm > 4 else float(np.clip(1 - 0.45 * (harm - 1), 0.1, 1))

    def loss(self, lie: Floats) -> float:
        """Of the public text, where all liars offer it, after the round."""
        weighed = np.float32(len(self._seen.own) * self.weight(lie))
        moved = self._sum + weighed * _clipped(lie[None], self.norm)[0]
        after = self._seen.phi - moved / (np.float32(len(self._seen.honest)) + weighed)
        return float(self._seen.task.losses(after[None], seed=self._pool)[0])


def longest(seen: Seen) -> float:
    """The norm to which contributions are clipped, but for what the rounds before bound."""
    return CLIP_AT * float(np.median(np.linalg.norm(seen.honest, axis=1)))


def unit(vector: Floats) -> Floats:
    return np.asarray(vector / np.float32(max(float(np.linalg.norm(vector)), 1e-20)), np.float32)


def _clipped(vectors: Floats, norm: float) -> Floats:
    norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-20)
    return np.asarray(vectors * np.minimum(1, norm / norms), np.float32)
