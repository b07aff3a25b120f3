"""Others' words, weighed so that slander is bounded: weighted medians, with the speakers' own verified work as weight.

    weighted_median([(0.9, 1.0), (0.8, 0.5), (0.0, 0.7)])        # (value, weight) pairs -> 0.8

Where liars hold less than half of the weight, the median lies between two honest values, whatever they say. A ring that
vouches for itself without verified work has weight 0, and is not heard. One's own observation is one more voice. It has
as much weight as all others together once FEW rounds were seen, twice that after twice as many, so what a node saw
itself outvotes everybody; where it saw nothing, it believes what others say only if they are loud enough together.

A judge's voice about a round is full from half of a median peer's work on (`judge_voice`). Were it in proportion, liars
who lower honest scores a little would lower honest voices with them, and so on: 40 % of the judges then turned all
scores within 40 rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

FEW = 4.0  # rounds of own observation that weigh as much as all others' words together
DOUBT = 0.5  # weight of having seen nothing, in full voices: one weak voice convinces nobody
OWN_AMONG_JUDGES = 0.5  # weight of a judge's own measurement of one round, as a share of that of all others together
FULL_VOICE = 0.5  # weight from which on a judge's voice is full
LEAST_VOICE = 0.05  # of a judge of whom no work was verified here: electors were, by the chain


def judge_voice(weight: float) -> float:
    """How loud a judge of this weight is among the judges of a round, at most 1."""
    return max(LEAST_VOICE, min(1.0, weight / FULL_VOICE))


def weighted_median(voices: Iterable[tuple[float, float]]) -> float | None:
    """The value at which half of the weight is reached, from below; None where nobody has weight.

    Where exactly half is reached between two values, their mean.
    """
    heard = sorted((value, weight) for value, weight in voices if weight > 0)
    if not heard:
        return None
    half = sum(weight for _, weight in heard) / 2.0
    reached = 0.0
    for index, (value, weight) in enumerate(heard):
        reached += weight
        if reached > half * (1 + 1e-12):
            return value
        if reached >= half * (1 - 1e-12) and index + 1 < len(heard):
            return (value + heard[index + 1][0]) / 2.0
    return heard[-1][0]


def with_own(own: float, rounds: int, others: Iterable[tuple[float, float]]) -> float:
    """What a node believes that saw `own` in so many rounds, and hears these (value, weight) pairs of others."""
    heard = [(value, weight) for value, weight in others if weight > 0]
    total = sum(weight for _, weight in heard)
    if not total:
        return own
    believed = weighted_median([*heard, (own, max(DOUBT, max(1.0, total) * rounds / FEW))])
    assert believed is not None  # somebody has weight
    return believed
