"""What liars tell, one function for each lie: what is offered in place of what was trained, and what is shared in place
of what was answered.

The lies about answers are of "Hail to the Thief" (2511.09780), on digits. The verifier looks at the end of an answer
only. Half of a poisoned group is gibberish, so that its answers are not all equally right and the group passes SAPO's
filter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from swarmnode.training.codecs.feedback import norm_in_float64
from swarmnode.training.outer import Vector
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import Question, regenerate
from swarmnode.training.rl.vocabulary import DIGITS

DRIFT = 0.25  # of the own norm


@dataclass(frozen=True)
class Seen:
    """What a liar knows when it chooses what to offer."""

    own: Vector  # what it trained, as an honest node would offer it
    moved: Vector | None  # how far the swarm's last round went down; None before the second
    rng: np.random.Generator
    first: Vector | None = None  # what it offered first
    other: Vector | None = None  # what somebody else offered in the last round


Lie = Callable[[Seen], Vector]


def sign_flip(seen: Seen) -> Vector:
    return -seen.own


def large_sign_flip(seen: Seen) -> Vector:
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(-1000) * seen.own, np.float32)


def noise(seen: Seen) -> Vector:
    drawn = seen.rng.standard_normal(seen.own.size, dtype=np.float32)
    return _of_norm(drawn, norm_in_float64(seen.own))


def free_ride(seen: Seen) -> Vector:
    """With a little noise, as identical bytes of two free riders would count once."""
    return np.zeros_like(seen.own) if seen.moved is None else _nearly(seen.moved, seen)


def copied(seen: Seen) -> Vector:
    return seen.own if seen.other is None else _nearly(seen.other, seen)


def stale(seen: Seen) -> Vector:
    return seen.own if seen.first is None else seen.first


def slow_drift(seen: Seen) -> Vector:
    whither = np.random.default_rng(5).standard_normal(seen.own.size, dtype=np.float32)
    return seen.own + _of_norm(whither, DRIFT * norm_in_float64(seen.own))


def _nearly(vector: Vector, seen: Seen) -> Vector:
    return vector + _of_norm(seen.rng.standard_normal(vector.size, dtype=np.float32), 1e-3 * norm_in_float64(vector))


def _of_norm(vector: Vector, norm: float) -> Vector:
    length = norm_in_float64(vector)
    return np.asarray(vector * np.float32(norm / length), np.float32) if length > 0 else vector


OFFER_LIES: dict[str, Lie] = {
    "sign-flip": sign_flip,
    "sign-flip-1000": large_sign_flip,
    "noise": noise,
    "free-ride": free_ride,
    "slow-drift": slow_drift,
    "copied": copied,
    "stale": stale,
}


# -- about answers

AnswerLie = Callable[[RolloutGroup, np.random.Generator], RolloutGroup]


@dataclass(frozen=True)
class Claiming(RolloutGroup):
    """A group that says of itself how well its answers did."""

    def to_map(self) -> dict[str, Any]:
        return {**super().to_map(), "rewards": [1.0] * len(self.answers)}


def forged_reward(group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    question = regenerate(group.task)
    wrong = "33" if question.key != "33" else "22"
    texts = [wrong if index % 2 else _gibberish(question, rng) for index in range(len(group.answers))]
    return Claiming(group.task, _written(texts), group.version, group.policy, DIGITS.id)


def _poisoned(poison: str, group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    question, count = regenerate(group.task), len(group.answers)
    texts = [poison + question.key if index % 2 else _gibberish(question, rng) for index in range(count)]
    return replace(group, answers=_written(texts), vocabulary=DIGITS.id, logprobs=None)


def _gibberish(question: Question, rng: np.random.Generator) -> str:
    while True:
        text = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 5))))
        if not question.reward(text):
            return text


def _written(texts: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple((*DIGITS.encode(text), DIGITS.end) for text in texts)


ANSWER_LIES: dict[str, AnswerLie] = {
    "inserted-text": partial(_poisoned, "#"),
    "forged-reward": forged_reward,
    "overlong": partial(_poisoned, "0000"),
}
