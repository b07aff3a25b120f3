"""Liars who know the rules of the open chain, and choose the worst moment or the worst contribution that passes.

As judges they do not say that honest work is missing: they say that it harms as much as can be said, which moves the
median and widens the error of what is measured. Some say other things, or nothing that is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import ClassVar

import numpy as np
from adversaries.gradient import FreeRiding, GradientLie, SignFlip, each
from adversaries.panel import Panel, longest, unit
from audited import ALL, NONE
from clusters import Floats
from openrounds import Bench, Seen

from swarmnode.protocols.chain.statements import MAX_GAIN


class Adaptive(GradientLie):
    """One that slanders."""

    def scores(self, bench: Bench) -> Mapping[bytes, int | None]:
        return dict.fromkeys(bench.own, MAX_GAIN) | dict.fromkeys(bench.honest, -MAX_GAIN)


class Unseen(GradientLie):
    """One that says as a judge what honest judges say, so that nobody can prove anything against it."""

    def scores(self, bench: Bench) -> Mapping[bytes, int | None]:
        return {id: median_low([said[id] for said in bench.said.values()]) for id in (*bench.own, *bench.honest)}


class WorksThenFlips(SignFlip):
    """Honest work until a round; they lie as judges from the first."""

    def __init__(self, begins: int = 49) -> None:
        self.begins = begins
        self.name = f"honest work and false scores, sign flip from round {begins}"

    def again(self) -> WorksThenFlips:
        return type(self)(self.begins)

    def offer(self, seen: Seen) -> Floats:
        return seen.own if seen.round < self.begins else super().offer(seen)


class SlandersThenFlips(WorksThenFlips, Adaptive):
    """The same, and they say that all honest work harms."""

    def __init__(self, begins: int = 49) -> None:
        super().__init__(begins)
        self.name = f"honest work and slander, sign flip from round {begins}"


class RidesThenFlips(FreeRiding, Adaptive):
    """Free riding until a round, then against the honest mean."""

    def __init__(self, turns: int = 65) -> None:
        self.turns = turns
        self.name = f"free riding, against the mean from round {turns}"

    def again(self) -> RidesThenFlips:
        return type(self)(self.turns)

    def offer(self, seen: Seen) -> Floats:
        return super().offer(seen) if seen.round < self.turns else each(seen, -seen.honest.mean(axis=0))


class Alternates(SignFlip, Adaptive):
    name = "three rounds of honest work, one of sign flip"

    def offer(self, seen: Seen) -> Floats:
        return super().offer(seen) if seen.round % 4 == 3 else seen.own

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [ALL if seen.round % 4 == 3 else NONE] * len(seen.own)


class BelowOneError(Unseen):
    """In every round as much harm as stays below one standard error, in the direction in which judges differ most."""

    name = "harm just below one standard error, honest as judges"
    errors: ClassVar[float] = 0.9

    def offer(self, seen: Seen) -> Floats:
        panel = Panel(seen)
        hidden, harmful = panel.noisiest(), -unit(panel.slope)
        if seen.moved and hidden @ np.sum(seen.moved[-4:], axis=0) < 0:
            hidden = -hidden  # on in the direction of the rounds before
        low, high = 0.0, 1.0
        for _ in range(12):
            middle = (low + high) / 2
            far = panel.errors(_turned(hidden, harmful, middle, panel.norm))
            low, high = (middle, high) if far <= self.errors else (low, middle)
        return each(seen, _turned(hidden, harmful, low, panel.norm))


class BelowFourErrors(BelowOneError, Adaptive):
    """As much harm as is not refused, behind slander and praise."""

    name = "harm just below four standard errors, with praise and slander"
    errors = 3.8

    def scores(self, bench: Bench) -> Mapping[bytes, int | None]:
        return Adaptive.scores(self, bench)


class PastTheBottom(Adaptive):
    """Along the steepest curvature: downhill where the round begins, and far up on the other side where it ends."""

    name = "with the slope at first and against it after the step (curvature)"

    def offer(self, seen: Seen) -> Floats:
        panel = Panel(seen)
        steep = panel.curved()
        if panel.slope @ steep < 0:
            steep = -steep
        return each(seen, np.float32(panel.norm) * unit(steep + np.float32(0.1) * unit(panel.slope)))


class OneDirection(Adaptive):
    """As long as nothing is clipped, in one random direction that stays the same."""

    name = "full-norm noise in one direction that stays the same"

    def offer(self, seen: Seen) -> Floats:
        whither = np.random.default_rng(11).normal(size=seen.own.shape[1]).astype(np.float32)
        return each(seen, np.float32(longest(seen)) * unit(whither))


class FreshNoise(Adaptive):
    """As long as nothing is clipped, anew in each round and for each liar."""

    name = "full-norm noise"

    def offer(self, seen: Seen) -> Floats:
        noise = seen.rng.normal(size=seen.own.shape).astype(np.float32)
        return np.asarray(noise * np.float32(longest(seen)) / np.linalg.norm(noise, axis=1, keepdims=True), np.float32)


class OffersNothing(Adaptive):
    """Next to nothing, which harms nobody and makes the median norm, to which all are clipped, that of the shortest."""

    name = "contributions of next to no length"

    def offer(self, seen: Seen) -> Floats:
        return each(seen, np.float32(1e-3) * seen.honest.mean(axis=0))


class WidensThenStrikes(SignFlip):
    """One of two says the best of all that liars offer and the worst of the rest, the other the contrary."""

    def __init__(self, begins: int = 33) -> None:
        self.begins = begins
        self.name = f"judges who widen the spread, sign flip from round {begins}"

    def again(self) -> WidensThenStrikes:
        return type(self)(self.begins)

    def offer(self, seen: Seen) -> Floats:
        return seen.own if seen.round < self.begins else super().offer(seen)

    def scores(self, bench: Bench) -> Mapping[bytes, int | None]:
        best = MAX_GAIN if bench.place % 2 else -MAX_GAIN
        return dict.fromkeys(bench.own, best) | dict.fromkeys(bench.honest, -best)


class StrikesWhenItLeads(SignFlip, Adaptive):
    """Honest work but in the rounds that one of them leads."""

    name = "sign flip only in rounds that a liar leads"

    def offer(self, seen: Seen) -> Floats:
        return super().offer(seen) if seen.leads else seen.own

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [ALL if seen.leads else NONE] * len(seen.own)


class KnowsTheDraw(SignFlip, Adaptive):
    """Where they know what will be audited, as a liar leads and the judge beside it lies too, all else is false."""

    name = "sign flip in rounds in which two liars know what audits will ask for, but for that"

    def offer(self, seen: Seen) -> Floats:
        return super().offer(seen) if seen.asked else seen.own

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [ALL - asked for asked in seen.asked] or [NONE] * len(seen.own)


class RidesWhereItKnows(KnowsTheDraw):
    """The same with as little work as audits permit."""

    name = "free riding in rounds in which two liars know what audits will ask for, but for that"

    def offer(self, seen: Seen) -> Floats:
        return each(seen, seen.moved[-1]) if seen.asked and seen.moved else seen.own


class UntilConvicted(SignFlip, Adaptive):
    """Who was convicted works until it is forgiven, and then lies again."""

    name = "sign flip until convicted, work until forgiven, again and again"

    def offer(self, seen: Seen) -> Floats:
        return np.where(np.array(seen.shunned)[:, None], seen.own, super().offer(seen))

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [NONE if shunned else ALL for shunned in seen.shunned]


class TakesTurns(SignFlip, Adaptive):
    """One of them flips in each round, the others work: so each is caught rarely."""

    name = "sign flip by one liar in each round, in turn"

    def offer(self, seen: Seen) -> Floats:
        offered, turn = seen.own.copy(), seen.round % len(seen.own)
        offered[turn] = super().offer(seen)[turn]
        return offered

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [ALL if place == seen.round % len(seen.own) else NONE for place in range(len(seen.own))]


class WorstThatPasses(Adaptive):
    """Of some twenty contributions the one after which the loss is worst, by what the rules would make of it."""

    name = "the worst of 20 contributions by the liars' own judging"

    def offer(self, seen: Seen) -> Floats:
        panel = Panel(seen)
        against, mean = -unit(panel.slope), unit(seen.honest.mean(axis=0))
        steep, hidden = panel.curved(), panel.noisiest()
        candidates = [mean, -mean, against, np.zeros_like(mean)]
        for sideways in (steep, -steep, hidden, -hidden):
            candidates += [_turned(sideways, against, share, 1.0) for share in (0.0, 0.15, 0.4)]
            candidates.append(_turned(sideways, mean, 0.3, 1.0))
        lies = [np.float32(panel.norm) * one for one in candidates]
        return each(seen, max(lies, key=panel.loss))


class InOneStretch(Adaptive):
    """Another lie, as a jump within one stretch of the round, drawn anew each time; the others are honest steps."""

    def __init__(self, lie: Adaptive) -> None:
        self._lie = lie
        self.name = f"{lie.name}, by a jump in one stretch of the round"

    def again(self) -> InOneStretch:
        return InOneStretch(self._lie)

    def offer(self, seen: Seen) -> Floats:
        return self._lie.offer(seen)

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        return [{int(at)} for at in seen.rng.integers(0, len(ALL), len(seen.own))]


class ComesLate(SignFlip, Adaptive):
    """Members who behave until round 64."""

    name = "sign flip and slander from round 64 on, honest in everything before"
    sleeps = 64


class JoinsLater(SignFlip, Adaptive):
    """Newcomers of round 8, who earn their seats by honest work and lie once they have had time to take all of them."""

    name = "newcomers of round 8 who work, then sign flip from round 113"
    joins, begins = 8, 113

    def offer(self, seen: Seen) -> Floats:
        return seen.own if seen.round < self.begins else super().offer(seen)


def _turned(from_: Floats, towards: Floats, share: float, norm: float) -> Floats:
    """Of this norm, between two directions."""
    return np.asarray(np.float32(norm) * unit(np.float32(1 - share) * from_ + np.float32(share) * towards), np.float32)


def everyone(rounds: int) -> list[GradientLie]:
    """New liars of every kind that have time to lie within so many rounds."""
    late = (49, 97) if rounds > 97 else (rounds // 2,)
    found: list[GradientLie] = [kind(at) for kind in (WorksThenFlips, SlandersThenFlips) for at in late]
    found += [RidesThenFlips(at) for at in ((33, 65) if rounds > 65 else (rounds // 2,))]
    found += [
        Alternates(),
        BelowOneError(),
        BelowFourErrors(),
        PastTheBottom(),
        OneDirection(),
        FreshNoise(),
        OffersNothing(),
    ]
    found += [WidensThenStrikes(rounds // 4 + 1), StrikesWhenItLeads(), TakesTurns(), WorstThatPasses()]
    found += [KnowsTheDraw(), RidesWhereItKnows(), UntilConvicted()]
    found += [InOneStretch(lie) for lie in (FreshNoise(), OffersNothing(), WorstThatPasses())]
    found += [lie for lie in (ComesLate(), JoinsLater()) if rounds > max(lie.sleeps, lie.begins)]
    return found
