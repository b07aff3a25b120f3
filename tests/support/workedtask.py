"""`digits/worked`: answers stand behind a digit of working, which may be wrong where they are right.

Known to whoever imports this; no run asks it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarmnode.training.rl.tasks import RULES, Digits, register

WORKED = "digits/worked"
Problem = tuple[int, int, int, int]


@dataclass(frozen=True)
class Worked(Digits):
    exact: bool = False

    def key(self, problem: Problem) -> str:
        a, b, _, base = problem
        return f"{(a + b) % base}:{super().key(problem)}"

    def verify(self, problem: Problem, answer: str) -> float:
        return float(answer.rpartition(":")[2] == super().key(problem))

    def form(self, difficulty: int, rng: np.random.Generator) -> str:
        digits = rng.integers(0, difficulty, 3)
        return f"{digits[2]}:{digits[0]}{digits[1]}"


register(WORKED, Worked("j", RULES["sum"]))
