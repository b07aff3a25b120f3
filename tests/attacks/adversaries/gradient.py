"""What liars offer instead of what they trained: attacks on the mean of all contributions.

All liars of a swarm act as one and know what honest peers offer. Where a lie is one vector, each liar offers it with a
little noise of its own, as identical bytes count once. To audits all of a round is false in which a liar offers
anything but its own steps on the data drawn for it (`false`), unless its class says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import NormalDist

import numpy as np
from audited import ALL, NONE
from clusters import Floats
from openrounds import Lie, Seen

NOISE = 1e-4  # of the norm of a lie


def each(seen: Seen, lie: Floats) -> Floats:
    """One lie (P,) for each liar, told apart by noise: (f, P)."""
    size = NOISE * np.abs(lie).max()
    return lie[None] + seen.rng.normal(0, max(float(size), 1e-9), seen.own.shape).astype(np.float32)


class GradientLie(Lie):
    """An attack of this group."""

    name: str

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [ALL if seen.round >= self.begins else NONE] * len(seen.own)


class SignFlip(GradientLie):
    name = "sign flip"
    scale = 1.0

    def offer(self, seen: Seen) -> Floats:
        return -np.float32(self.scale) * seen.own


class LargeSignFlip(SignFlip):
    name = "sign flip × 1000"
    scale = 1000.0


class ClaimedSamples(SignFlip):
    """Nobody in an open run reads what an author says of itself: its weight is what judges measured of its work."""

    name = "sign flip, with 1e9 samples claimed for each that was seen"
    claims = 10**9


class LabelFlip(GradientLie):
    name = "label flip"

    def labels(self, labels: np.ndarray, classes: int) -> np.ndarray:
        return np.asarray(classes - 1 - labels)


class LittleIsEnough(GradientLie):
    """Baruch et al. 1902.06156: as far from the mean as a majority hides, in units of the standard deviation."""

    name = "ALIE: a little is enough"

    def offer(self, seen: Seen) -> Floats:
        honest, liars = len(seen.honest), len(seen.own)
        needed = (honest + liars) // 2 + 1 - liars
        far = NormalDist().inv_cdf(max(0.5, (honest - needed) / honest))
        return each(seen, seen.honest.mean(axis=0) - np.float32(max(far, 0.3)) * seen.honest.std(axis=0))


class InnerProduct(GradientLie):
    """Xie et al. 1903.03936: against the mean, as small or large as `epsilon` says."""

    name = "IPM 0.1: inner product manipulation"
    epsilon = 0.1

    def offer(self, seen: Seen) -> Floats:
        return each(seen, -np.float32(self.epsilon) * seen.honest.mean(axis=0))


class LargerInnerProduct(InnerProduct):
    name = "IPM 0.6"
    epsilon = 0.6


class MinMax(GradientLie):
    """Shejwalkar and Houmansadr 2021: as far against the deviation as no honest peer is from another."""

    name = "min–max"

    def offer(self, seen: Seen) -> Floats:
        honest = seen.honest.astype(np.float64)
        centre, away = honest.mean(axis=0), -honest.std(axis=0)
        most = max(np.linalg.norm(honest - one, axis=1).max() for one in honest)
        low, high = 0.0, 100.0
        for _ in range(30):
            middle = (low + high) / 2
            far = np.linalg.norm(honest - (centre + middle * away), axis=1).max()
            low, high = (middle, high) if far <= most else (low, middle)
        return each(seen, (centre + low * away).astype(np.float32))


class SlowDrift(GradientLie):
    """The honest mean, and in every round a step of a quarter of its norm in one direction that stays the same."""

    name = "slow drift"

    def offer(self, seen: Seen) -> Floats:
        centre = seen.honest.mean(axis=0)
        whither = np.random.default_rng(5).normal(size=centre.size).astype(np.float32)
        whither *= np.float32(0.25 * np.linalg.norm(centre) / np.linalg.norm(whither))
        return each(seen, centre + whither)


class FreeRiding(GradientLie):
    """What the swarm did in the round before, as though it were one's own work."""

    name = "free riding"

    def offer(self, seen: Seen) -> Floats:
        return each(seen, seen.moved[-1] if seen.moved else np.zeros_like(seen.own[0]))


class Stale(GradientLie):
    """What was trained twelve rounds ago, or in the first."""

    name = "stale by twelve rounds"

    def __init__(self) -> None:
        self._trained: list[Floats] = []

    def offer(self, seen: Seen) -> Floats:
        self._trained.append(seen.own)
        return self._trained[max(0, len(self._trained) - 13)]


class Duplicates(GradientLie):
    name = "duplicates: one contribution, committed by every liar"

    def offer(self, seen: Seen) -> Floats:
        return np.repeat(seen.own[:1], len(seen.own), axis=0)

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [NONE, *super().false(seen)[1:]]  # data belong to a name: it is the work of one of them


class ManyNames(Duplicates):
    """One peer that works, and whose other names offer its work told apart by noise."""

    name = "one delta under all of the liars' names, with noise of 1e-4"
    one_name = True

    def offer(self, seen: Seen) -> Floats:
        return np.concatenate([seen.own[:1], each(seen, seen.own[0])[1:]])


class Zero(GradientLie):
    """Zeros, but for what tells them apart."""

    name = "contributions of zeros"

    def offer(self, seen: Seen) -> Floats:
        return each(seen, np.zeros_like(seen.own[0]))


class Replayed(GradientLie):
    """What honest peers offered in the round before, with a little noise."""

    name = "others' contributions of the last round, with noise"

    def __init__(self) -> None:
        self._before: Floats | None = None

    def offer(self, seen: Seen) -> Floats:
        theirs, self._before = self._before, seen.honest[: len(seen.own)]
        return np.stack([each(seen, one)[0] for one in (seen.own if theirs is None else theirs)])


class HalfOfTheWork(GradientLie):
    """Half of the steps, told as all of them."""

    name = "half of the steps, told as all of them"

    def offer(self, seen: Seen) -> Floats:
        return np.float32(0.5) * seen.own

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [frozenset(sorted(ALL)[len(ALL) // 2 :])] * len(seen.own)


class LearnsByHeart(GradientLie):
    """They train on the text that judges draw from, in place of what is drawn for them."""

    name = "training on the text that judges draw from"
    by_heart = True


class Copies(GradientLie):
    """Each liar copies what an honest peer revealed; liars' cuts have the copies, and not what was copied."""

    name = "copies of what was revealed, vouched for by the liars"
    late = True

    def offer(self, seen: Seen) -> Floats:
        return seen.honest[: len(seen.own)]


class FirstStrike(LargeSignFlip):
    """Validators who behaved for twenty rounds offer, when one of them leads, what all judges are fooled by."""

    name = "first strike of trusted identities that fool every judge"
    sleeps = 20
    strikes_once = True
    fools = True


def everyone() -> list[GradientLie]:
    """New liars of every kind."""
    return [
        SignFlip(),
        LargeSignFlip(),
        ClaimedSamples(),
        LabelFlip(),
        LittleIsEnough(),
        InnerProduct(),
        LargerInnerProduct(),
        MinMax(),
        SlowDrift(),
        FreeRiding(),
        Stale(),
        Replayed(),
        Zero(),
        HalfOfTheWork(),
        Duplicates(),
        ManyNames(),
        Copies(),
    ]


def before_a_committee() -> list[GradientLie]:
    """Those that are tried where not all validators judge."""
    return [SignFlip(), LabelFlip(), LittleIsEnough(), LargerInnerProduct()]


def without_audits() -> list[GradientLie]:
    """Those that are tried where nobody audits as well."""
    return [SignFlip(), FreeRiding(), ManyNames(), Zero()]


def breaking() -> list[GradientLie]:
    """Those that break the plain mean of sixteen with seven."""
    return [SignFlip(), LargeSignFlip()]
