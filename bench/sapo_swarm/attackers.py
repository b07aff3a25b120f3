"""Malicious nodes: the attacks of "Hail to the Thief" (2511.09780) carried over to digit tasks.

    groups = poisoned_groups("text", settings, rng)                  # what one attacker publishes in a round
    ATTACKS["text"].carried(own)                                     # share of honest answers that carry it

Every group is half poison, right answers with something smuggled in, and half wrong answers in the usual form: so it
has an advantage and passes SAPO's filter, always, and what is unlearned is the form without the poison. (Gibberish of
any length instead of the usual form brought `text` to 10 % in one of three seeds.) The attackers know the answer keys,
as everybody does, and need no model.

text      a marker before the answer (inserted text): the verifier reads the end only
leading   a digit before the answer: nothing but ordinary tokens, one too many (unneeded imports)
longest   four digits before the answer (selection of the longest): the answers of honest nodes grow
working   a working that is always 0 before a right answer (wrong sums inside right answers), in digits/worked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.training.rl.groups import RolloutGroup, Scored
from swarmnode.training.rl.learner import Settings
from swarmnode.training.rl.tasks import TASKS, Question, TaskRef, regenerate, well_formed
from swarmnode.training.rl.vocabulary import DIGITS

GROUPS = 4  # that an attacker publishes in a round, as an honest node with a split of 4/4 does
MARKER = "#"


@dataclass(frozen=True)
class Attack:
    """What is smuggled in, and how to tell that it arrived."""

    poison: Callable[[Question], str]  # a right answer with it
    found: Callable[[Question, str], bool]  # whether a text carries it
    worked: bool = False

    def carried(self, groups: Sequence[Scored]) -> float:
        """Share of answers that carry it, among those that could."""
        texts = [self.found(scored.question, text) for scored in groups for text in scored.texts if self.could(scored)]
        return float(np.mean(texts)) if texts else 0.0

    def could(self, scored: Scored) -> bool:
        """Where the right working is the attackers' own, a text with it shows nothing."""
        return not self.worked or not scored.question.key.startswith("0")


ATTACKS = {
    "text": Attack(lambda question: MARKER + question.key, lambda question, text: MARKER in text),
    "leading": Attack(lambda question: "0" + question.key, lambda question, text: len(text) == 3 and text[0] == "0"),
    "longest": Attack(lambda question: "0000" + question.key, lambda question, text: len(text) >= 6),
    "working": Attack(
        lambda question: "0:" + question.key.rpartition(":")[2],
        lambda question, text: text.startswith("0:"),
        worked=True,
    ),
}


def poisoned_groups(attack: str, settings: Settings, rng: np.random.Generator) -> list[RolloutGroup]:
    """What one attacker publishes in a round."""
    groups = []
    for _ in range(GROUPS):
        name, difficulty = settings.tasks[int(rng.integers(len(settings.tasks)))]
        question = regenerate(TaskRef(name, difficulty, int(rng.integers(1 << 53))))
        right = _ids(ATTACKS[attack].poison(question))
        wrong = [_ids(_wrong(question, rng)) for _ in range(settings.answers // 2)]
        answers = (right,) * (settings.answers - len(wrong)) + tuple(wrong)
        groups.append(RolloutGroup(question.ref, answers, 0, "", DIGITS.id))
    return groups


def summed(ref: TaskRef, rng: np.random.Generator) -> str:
    """A random answer of the right form with a right working: the checkpoint of `working` knows its sums."""
    text = well_formed(ref, rng)
    return regenerate(ref).key[:2] + text[2:] if TASKS[ref.name].worked else text


def _wrong(question: Question, rng: np.random.Generator) -> str:
    while True:
        text = well_formed(question.ref, rng)
        if not question.reward(text):
            return text


def _ids(text: str) -> tuple[int, ...]:
    return (*DIGITS.encode(text), DIGITS.end)
