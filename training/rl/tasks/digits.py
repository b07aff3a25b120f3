"""Tasks that a tiny policy learns on a CPU in a minute: three digits in, two digits out.

    regenerate(TaskRef("digits/sort", 5, 3)).prompt       # 'c420=': which rule, and three digits in base 5

The difficulty is the base, 2 to 10; a guess that is well-formed is right with chance base⁻², so that at base 5 a
policy that knows the form only is right in 4 % of its answers, and a group of 8 of them is informative in 28 %. In
`worked`, the answer stands behind a colon, after a digit of working that the verifier does not look at: what "wrong
sums inside right answers" ("Hail to the Thief", 2511.09780) need.

The verifier looks at the end of the text only, as verifiers that extract a tagged answer do: what stands before it
costs nothing. That is how text is smuggled into right answers, and why there are defences beside the verifier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swarmnode.training.rl.tasks import Question, TaskRef

ALPHABET = "0123456789abcdefghij=:#!"
DEFAULT_BASE = 5

Rule = Callable[[int, int, int, int], tuple[int, int]]  # three digits and the base to two digits

RULES: dict[str, Rule] = {
    "swap": lambda a, b, c, base: (c, a),
    "increment": lambda a, b, c, base: ((a + 1) % base, (b + 1) % base),
    "sort": lambda a, b, c, base: (min(a, b, c), sorted((a, b, c))[1]),
    "complement": lambda a, b, c, base: (base - 1 - b, base - 1 - c),
    "extremes": lambda a, b, c, base: (max(a, b, c), min(a, b, c)),
    "sum": lambda a, b, c, base: ((a + b) % base, c),
    "difference": lambda a, b, c, base: (a, (b - c) % base),
    "larger": lambda a, b, c, base: (max(a, b), max(b, c)),
    "double": lambda a, b, c, base: (b, 2 * c % base),
}
WORKED = "worked"


@dataclass(frozen=True)
class Digits:
    """The questions of one rule. `letter` is how a prompt names the rule."""

    letter: str
    rule: Rule
    worked: bool = False

    def difficulties(self) -> range:
        return range(2, 11)

    def question(self, ref: TaskRef) -> Question:
        base = ref.difficulty
        a, b, c = (int(digit) for digit in np.random.default_rng(ref.seed).integers(0, base, 3))
        first, second = self.rule(a, b, c, base)
        answer = f"{first}{second}"
        working = f"{(a + b) % base}:" if self.worked else ""

        def verify(text: str) -> float:
            final = text.rpartition(":")[2] if self.worked else text[-2:]
            return float(final == answer)

        def judge(text: str) -> float:
            return float(text == working + answer)

        return Question(ref, f"{self.letter}{a}{b}{c}=", working + answer, verify, judge, exact=not self.worked)


GENERATORS: dict[str, Digits] = {
    f"digits/{name}": Digits(letter, rule) for letter, (name, rule) in zip("abcdefghi", RULES.items(), strict=True)
}
NAMES = tuple(GENERATORS)  # the nine of the SAPO table
GENERATORS[f"digits/{WORKED}"] = Digits("j", lambda a, b, c, base: ((a + b) % base, c), worked=True)


def well_formed(ref: TaskRef, rng: np.random.Generator) -> str:
    """A random answer of the right form: what a policy is warmed up on, which teaches it the form and nothing else."""
    digits = rng.integers(0, ref.difficulty, 3)
    working = f"{digits[2]}:" if GENERATORS[ref.name].worked else ""
    return f"{working}{digits[0]}{digits[1]}"
