"""Which task and level a node asks itself: partly at random, partly those that are solved about half of the time.

    curriculum = Curriculum(tasks, part=0.5)
    curriculum.saw(own)                        # after each round: all groups that this policy answered
    asked = curriculum.drawn(8, rng)           # (name, difficulty) of four of eight questions; the rest is drawn alike

A question that is always solved, or never, teaches nothing: the rewards of its group do not differ, which they do the
more the greater p(1 − p) is (learnability, 2502.12272; a curriculum over kinds of questions by what they teach,
2505.14970). So each task at its level has a score, the mean variance of the rewards in its groups of late, and is
drawn by it. What was not asked yet counts as solved half of the time. A level that became easy, or is too hard still,
is left to the other part of the questions, which is drawn alike of all tasks and levels: that finds out when a score is
no longer true, and is what the reward of a node is measured by, so that rewards mean the same whatever is chosen.

Others' groups do not count. Those that teach nothing do not travel, so that of a level which everybody knows, or
nobody, the pool shows only the exceptions (docs/results.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.rl.groups import Scored

Level = tuple[str, int]  # a task's name and its difficulty

KEPT = 0.9  # of what a group counts, from one round to the next: the last ten rounds make most of a score
UNASKED = 0.25  # p(1 − p) at 1/2
LEAST = 1e-3  # score of a level of which no group teaches


class Curriculum:
    """Scores of a run's levels, by what one node saw. Nothing of it travels, and who starts again begins anew."""

    def __init__(self, levels: Sequence[Level], part: float) -> None:
        """`part`, 0 to 1: of the questions, that are drawn by score."""
        self._levels, self._part = tuple(levels), part
        self._place = {level: place for place, level in enumerate(self._levels)}
        self._groups = np.ones(len(self._levels))  # seen lately
        self._spread = np.full(len(self._levels), UNASKED)  # variance of their rewards, summed

    @property
    def scores(self) -> NDArray[np.float64]:
        """(levels,) mean p(1 − p), where answers are right or wrong."""
        return np.maximum(self._spread / self._groups, LEAST)

    def saw(self, groups: Sequence[Scored]) -> None:
        """A round is over in which this policy answered these."""
        self._groups *= KEPT
        self._spread *= KEPT
        for scored in groups:
            task = scored.group.task
            place = self._place.get((task.name, task.difficulty))
            if place is not None:
                self._groups[place] += 1
                self._spread[place] += float(scored.rewards.var())

    def drawn(self, count: int, rng: np.random.Generator) -> list[Level]:
        """Of so many questions, those that are drawn by score: all but one at the most."""
        chosen = max(0, min(int(count * self._part), count - 1))
        if not chosen:
            return []
        scores = self.scores
        return [self._levels[each] for each in rng.choice(len(scores), size=chosen, p=scores / scores.sum())]
