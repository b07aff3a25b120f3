"""What is asked: a task is (name, difficulty, seed), and everything else about it is regenerated from these, locally.

    question = regenerate(TaskRef("digits/swap", 5, 7))
    question.prompt, question.key                         # 'a304=', '40'
    question.reward("40"), question.reward("#40"), question.reward("04")       # 1.0, 1.0, 0.0

Nobody's answer key or reward is ever believed: a rollout of a peer names its TaskRef, and the receiver makes the
question and the verifier itself. Code never comes from a peer either: names are looked up in what is built in here,
`digits/*` (digits.py) and, with the extra `rl`, `gym/*` (gym.py, over reasoning-gym).

Torch-free: the daemon checks rollouts of strangers with this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

MAX_NAME = 64  # characters
MAX_SEED = 2**53 - 1  # survives every encoding of integers


class TaskError(Exception):
    """There is no such task, difficulty or seed here. The message says which and what to do."""


@dataclass(frozen=True, order=True)
class TaskRef:
    """The name of one question: what travels instead of it."""

    name: str
    difficulty: int
    seed: int


@dataclass(frozen=True)
class Question:
    """What a policy is asked, and how its answers are judged.

    `exact` says that `key` followed by the end of the answer is what a policy should learn to write; then the chance of
    writing it is the expected reward of a policy that writes nothing around its answers.
    """

    ref: TaskRef
    prompt: str
    key: str
    verify: Callable[[str], float]
    judge: Callable[[str], float]
    exact: bool = True

    def reward(self, answer: str) -> float:
        """In [0, 1]: how right the final answer in the text `answer` is. Never raises, whatever the text."""
        return self.verify(answer)

    def judged_reward(self, answer: str) -> float:
        """reward × judge: what stands beside the final answer counts too ("Hail to the Thief", 2511.09780)."""
        reward = self.verify(answer)
        return reward * self.judge(answer) if reward else 0.0


class Generator(Protocol):
    """Makes the questions of one name."""

    def difficulties(self) -> range:
        """What may stand as difficulty."""

    def question(self, ref: TaskRef) -> Question:
        """The question of `ref`, the same on every machine. Its difficulty and seed are in range."""


@lru_cache(maxsize=4096)
def regenerate(ref: TaskRef) -> Question:
    """The question that `ref` names. Raises TaskError where there is none here."""
    if not 0 <= ref.seed <= MAX_SEED:
        raise TaskError(f"task {ref.name!r}: seed {ref.seed} is not in 0 to {MAX_SEED}")
    generator = find(ref.name)
    allowed = generator.difficulties()
    if ref.difficulty not in allowed:
        raise TaskError(
            f"task {ref.name!r}: difficulty {ref.difficulty} is not in {allowed.start} to {allowed.stop - 1}"
        )
    return generator.question(ref)


def find(name: str) -> Generator:
    """The generator called `name`. Raises TaskError."""
    from swarmnode.training.rl.tasks import digits

    if len(name) > MAX_NAME:
        raise TaskError(f"a task's name has at most {MAX_NAME} characters, this one has {len(name)}")
    if name in digits.GENERATORS:
        return digits.GENERATORS[name]
    if name.startswith("gym/"):
        from swarmnode.training.rl.tasks import gym

        return gym.find(name.removeprefix("gym/"))
    raise TaskError(
        f"there is no task {name!r}: built in are {', '.join(sorted(digits.GENERATORS))}, and gym/NAME of reasoning-gym"
    )
