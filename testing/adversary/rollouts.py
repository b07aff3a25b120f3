"""What a liar shares in a run by rollouts in place of what it answered: "Hail to the Thief" (2511.09780), on digits.

The verifier looks at the end of an answer only. Half of a poisoned group is gibberish, so that its answers are not all
equally right and the group passes SAPO's filter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import Question, regenerate
from swarmnode.training.rl.vocabulary import DIGITS

MARKER = "#"
PADDING = "0000"


@dataclass(frozen=True)
class Claiming(RolloutGroup):
    """A group that says of itself how well its answers did."""

    def to_map(self) -> dict[str, Any]:
        return {**super().to_map(), "rewards": [1.0] * len(self.answers)}


def inserted_text(group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    return _poisoned(group, lambda question: MARKER + question.key, rng)


def overlong(group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    return _poisoned(group, lambda question: PADDING + question.key, rng)


def forged_reward(group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    question = regenerate(group.task)
    wrong = "33" if question.key != "33" else "22"
    texts = [wrong if index % 2 else _gibberish(question, rng) for index in range(len(group.answers))]
    return Claiming(group.task, _written(texts), group.version, group.policy, DIGITS.id)


def _poisoned(group: RolloutGroup, poison: Callable[[Question], str], rng: np.random.Generator) -> RolloutGroup:
    question, count = regenerate(group.task), len(group.answers)
    texts = [poison(question) if index % 2 else _gibberish(question, rng) for index in range(count)]
    return replace(group, answers=_written(texts), vocabulary=DIGITS.id, logprobs=None, proof=b"")


def _gibberish(question: Question, rng: np.random.Generator) -> str:
    while True:
        text = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 5))))
        if not question.reward(text):
            return text


def _written(texts: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple((*DIGITS.encode(text), DIGITS.end) for text in texts)


LIES: dict[str, Callable[[RolloutGroup, np.random.Generator], RolloutGroup]] = {
    "inserted-text": inserted_text,
    "forged-reward": forged_reward,
    "overlong": overlong,
}
