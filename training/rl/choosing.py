"""What a node learns from in a round: I groups of its own and J of others', so that no peer owns the batch. Torch-free.

    split = Split(own=4, external=4)
    chosen = choose(own, pool, split, Limits(), rng)
    chosen.groups, chosen.refused                                    # what to learn from, and why the rest is left out

SAPO (2509.08721) drops external groups without advantage, then draws J uniformly: that filter is what makes sharing
work. Added here: a cap on what one author may have in a batch and on the length of answers, because half poison and
half gibberish passes the filter by design ("Hail to the Thief", 2511.09780), a bound on staleness, and a choice by
advantage.

How many to take from others is learned too (`AdaptiveSplit`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

import numpy as np

from swarmnode.training.rl.groups import Scored

Standing = Callable[[str], float]  # how far an author is trusted, 0 to 1
ESTABLISHED = 0.5  # standing from which on an author has a share of its own; those below have one together


def everyone_equal(author: str) -> float:
    """The standing until there is a reputation: everybody has all of the cap."""
    return 1.0


@dataclass(frozen=True)
class Split:
    """I and J: groups of one's own and of others in a batch."""

    own: int = 4
    external: int = 4

    @property
    def total(self) -> int:
        return self.own + self.external

    def room(self, own: Sequence[Scored], external: int) -> Split:
        """I and J of a batch in which these own groups stand."""
        return Split(len(own), external)


@dataclass(frozen=True)
class Limits:
    """What may be learned from."""

    share: float = 0.25  # of a batch that one author may have; at least one group
    probation: float = 0.125  # of a batch that all authors below ESTABLISHED may have together; at least one group
    max_tokens: int = 4096  # of an answer; a group with a longer one is refused
    staleness: int | None = None  # versions that a group may be behind ours; only where versions are of one policy
    filtered: bool = True  # drop external groups without advantage; False only to show what that costs
    by_advantage: bool = False  # take those with the greatest mean |advantage| instead of drawing uniformly
    standing: Standing = everyone_equal


@dataclass(frozen=True)
class Chosen:
    """A batch and what was left out of it."""

    groups: tuple[Scored, ...]  # own ones first
    # external groups not taken, by reason: uninformative, too-long, stale, own, capped, probation, not-drawn
    refused: Counter[str]

    @property
    def authors(self) -> frozenset[str]:
        return frozenset(group.author for group in self.groups)

    def external(self, author: str) -> int:
        """How many are of others than `author`."""
        return sum(group.author != author for group in self.groups)


def poison_budget(batch: int, share: float, standing: float) -> int:
    """How many groups one author may have in a batch of `batch`: the cap scaled by standing.

    At least one while there is standing, none without: whatever else gets past the defences, an author's part in what
    is learned is at most this.
    """
    return max(1, int(batch * share * standing)) if standing > 0 else 0


def choose(
    own: Sequence[Scored],
    pool: Sequence[Scored],
    split: Split,
    limits: Limits,
    rng: np.random.Generator,
    *,
    author: str = "",
    version: int = 0,
) -> Chosen:
    """The batch of a round; `author` and `version` are our own. Fewer than J come where the pool has no more."""
    refused: Counter[str] = Counter()
    fit: list[Scored] = []
    for scored in pool:
        reason = _unfit(scored, limits, author, version)
        if reason:
            refused[reason] += 1
        else:
            fit.append(scored)
    order = [int(index) for index in rng.permutation(len(fit))]
    if limits.by_advantage:
        order.sort(key=lambda index: -float(np.abs(fit[index].advantages).mean()))
    taken: list[Scored] = []
    shares: Counter[str] = Counter()
    on_probation = 0
    for index in order:
        scored = fit[index]
        standing = limits.standing(scored.author)
        if len(taken) == split.external:
            refused["not-drawn"] += 1
        elif shares[scored.author] >= poison_budget(split.total, limits.share, standing):
            refused["capped"] += 1
        elif standing < ESTABLISHED and on_probation >= poison_budget(split.total, limits.probation, 1.0):
            refused["probation"] += 1
        else:
            taken.append(scored)
            shares[scored.author] += 1
            on_probation += standing < ESTABLISHED
    return Chosen((*own[: split.own], *taken), refused)


def _unfit(scored: Scored, limits: Limits, author: str, version: int) -> str:
    if scored.author == author:
        return "own"
    if max(map(len, scored.group.answers)) > limits.max_tokens:
        return "too-long"
    if limits.staleness is not None and abs(version - scored.group.version) > limits.staleness:
        return "stale"
    if limits.filtered and not scored.informative:
        return "uninformative"
    return ""


@dataclass(frozen=True)
class AdaptiveSplit:
    """How many groups to take from others: as many as own ones leave room for, unless they hurt.

    A group that is all right or all wrong teaches nothing. So a node asks itself a whole batch, as if it were alone,
    and others' groups take the places of those of its own that teach nothing, `external` of them at most. A weak
    policy, whose own groups seldom teach, so takes many, and fewer as it learns.

    Now and then a node tries several bounds of J on the groups of one round, each a step from the same parameters, and
    measures how much that step gains on the same held-out questions (`observe`). What a good bound adds to that is a
    quarter of what chance does (docs/results.md), so that trials can show harm, and not which of two good bounds is
    better: the bound is the greatest that gained no less than any smaller one, within `sure` standard errors over the
    last trials; 0 where all hurt. Trials go on then, and the bound rises again once they show no harm.
    """

    total: int = 8  # groups of a batch
    candidates: tuple[int, ...] = (0, 4, 8)  # bounds of J
    memory: int = 12  # trials that count
    least: int = 5  # trials before the bound moves
    every: int = 10  # rounds between two trials
    sure: float = 2.0  # standard errors
    external: int = 8  # the bound now
    trials: tuple[Mapping[int, float], ...] = ()  # what a step with each bound gained, the latest last

    def __post_init__(self) -> None:
        if self.external not in self.candidates or not all(0 <= external <= self.total for external in self.candidates):
            raise ValueError(
                f"external = {self.external} must be one of the candidates {self.candidates}, each 0 to {self.total}"
            )

    @property
    def own(self) -> int:
        """I, the questions that a node asks itself."""
        return self.total

    def room(self, own: Sequence[Scored], external: int) -> Split:
        """Own groups that teach, and how many of others' there is room for beside them, `external` at most."""
        teaching = sum(scored.informative for scored in own)
        return Split(teaching, min(external, max(0, self.total - teaching)))

    def due(self, round: int) -> bool:
        """Whether this round is one of trials."""
        return round % self.every == 0

    def observe(self, gained: Mapping[int, float]) -> AdaptiveSplit:
        """After a trial: what a step with each bound gained on held-out questions."""
        trials = (*self.trials, gained)[-self.memory :]
        if len(trials) < self.least:
            return replace(self, trials=trials)

        def hurts(external: int, fewer: int) -> bool:
            lost = [trial[fewer] - trial[external] for trial in trials]
            return mean(lost) > self.sure * stdev(lost) / math.sqrt(len(lost))

        bounds = sorted(self.candidates)
        fit = [bound for at, bound in enumerate(bounds) if not any(hurts(bound, fewer) for fewer in bounds[:at])]
        return replace(self, trials=trials, external=fit[-1])
