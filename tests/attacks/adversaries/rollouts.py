"""What malicious nodes publish instead of what they answered: "Hail to the Thief" (2511.09780) carried over to digits.

A lie is a class with two methods: the groups that one liar publishes in a round, and how to tell by an honest node's
answer that the lie arrived. Liars know every answer key, as everybody does, hear what honest nodes publish, and need
no model. The verifier looks at the end of an answer only, as those do that extract one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from workedtask import WORKED

from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import DEFAULT_BASE, NAMES, Question, TaskRef, regenerate, well_formed
from swarmnode.training.rl.vocabulary import DIGITS

GROUPS = 4  # that one liar publishes in a round, as an honest node of a batch of 4 + 4 does
ANSWERS = 8
MARKER = "#"

Sent = dict[str, Any]  # a group as the map that travels


@dataclass
class Liar:
    """What one malicious node has in a round."""

    rng: np.random.Generator
    heard: list[RolloutGroup]  # what honest nodes published

    def question(self) -> Question:
        name = NAMES[int(self.rng.integers(len(NAMES)))]
        return regenerate(TaskRef(name, DEFAULT_BASE, int(self.rng.integers(1 << 53))))

    def gibberish(self, question: Question) -> str:
        """Wrong, and of no form."""
        while True:
            text = "".join(str(digit) for digit in self.rng.integers(0, 10, int(self.rng.integers(1, 5))))
            if not question.reward(text):
                return text

    def wrong(self, question: Question) -> str:
        """Wrong, and of the form that honest answers have."""
        while True:
            text = well_formed(question.ref, self.rng)
            if not question.reward(text):
                return text


def sent(question: Question, texts: list[str], **more: Any) -> Sent:
    """The map of a group with these answers; `more` stands beside what belongs there."""
    answers = tuple((*DIGITS.encode(text), DIGITS.end) for text in texts)
    return {**RolloutGroup(question.ref, answers, 0, "", DIGITS.id).to_map(), **more}


class RolloutLie(ABC):
    """One way to misbehave."""

    name: ClassVar[str]
    worked: ClassVar[bool] = False  # whether answers are to show their working, which a judge reads
    seeds: ClassVar[tuple[int, ...]] = (1,)  # with which it is tried in full …
    warm_up: ClassVar[int] = 120  # … and supervised steps of the checkpoint there: 120 are a run's default

    def published(self, liar: Liar) -> list[Sent]:
        return [self.group(liar, liar.question()) for _ in range(GROUPS)]

    @abstractmethod
    def group(self, liar: Liar, question: Question) -> Sent:
        """One group that is published."""

    @abstractmethod
    def arrived(self, question: Question, text: str) -> bool:
        """Whether an honest node's answer shows what the liars wanted."""

    def arrived_at(self, texts: Sequence[tuple[Question, str]]) -> float:
        """Share of these answers of honest nodes that do."""
        return float(np.mean([self.arrived(question, text) for question, text in texts]))


class HalfPoison(RolloutLie):
    """Half poison, right answers with something smuggled in, and half gibberish: it passes SAPO's filter, always."""

    def poison(self, question: Question) -> str:
        raise NotImplementedError

    def group(self, liar: Liar, question: Question) -> Sent:
        half = ANSWERS // 2
        return sent(question, [self.poison(question)] * half + [liar.gibberish(question) for _ in range(half)])


class InsertedText(HalfPoison):
    name = "inserted text: half poison, half gibberish"

    def poison(self, question: Question) -> str:
        return MARKER + question.key

    def arrived(self, question: Question, text: str) -> bool:
        return MARKER in text


class ExtraDigit(HalfPoison):
    """Nothing but ordinary tokens, one too many: as imports that a program does not need."""

    name = "a digit too many: half poison, half gibberish"

    def poison(self, question: Question) -> str:
        return "0" + question.key

    def arrived(self, question: Question, text: str) -> bool:
        return len(text) == 3 and text[0] == "0"


class Overlong(HalfPoison):
    name = "overlong answers: half poison, half gibberish"

    def poison(self, question: Question) -> str:
        return "0000" + question.key

    def arrived(self, question: Question, text: str) -> bool:
        return len(text) >= 6


class FalseWorking(HalfPoison):
    """A working that is always 0, before a right answer: wrong sums inside right answers.

    Only to questions whose right working is another; where it is 0, nothing is wrong with the answer.
    """

    name = "a false working before right answers: half poison, half gibberish"
    worked = True

    def published(self, liar: Liar) -> list[Sent]:
        questions: list[Question] = []
        while len(questions) < GROUPS:
            asked = self.asked(liar)
            questions += [asked] if self._shows(asked) else []
        return [self.group(liar, asked) for asked in questions]

    def asked(self, liar: Liar) -> Question:
        return regenerate(TaskRef(WORKED, DEFAULT_BASE, int(liar.rng.integers(1 << 53))))

    def poison(self, question: Question) -> str:
        return "0:" + question.key.rpartition(":")[2]

    def arrived(self, question: Question, text: str) -> bool:
        return text.startswith("0:")

    def arrived_at(self, texts: Sequence[tuple[Question, str]]) -> float:
        return super().arrived_at([each for each in texts if self._shows(each[0])])

    def _shows(self, question: Question) -> bool:
        return not question.key.startswith("0:")


class UsualWorking(FalseWorking):
    """Harder to find: wrong answers have the usual form, and where the right working is 0, right ones are right.

    Those groups have an advantage even for a judge, so that what is left against them is the gate, which knows wrong
    sums from the checkpoint, and what it found of their author before.
    """

    name = "a false working before right answers, wrong ones in the usual form"
    seeds = (1, 2, 3)

    def published(self, liar: Liar) -> list[Sent]:
        return [self.group(liar, self.asked(liar)) for _ in range(GROUPS)]

    def group(self, liar: Liar, question: Question) -> Sent:
        half = ANSWERS // 2
        return sent(question, [self.poison(question)] * half + [liar.wrong(question) for _ in range(half)])


class UsualWorkingLater(UsualWorking):
    """To nodes whose checkpoint knows its sums better."""

    name = f"{UsualWorking.name}; the checkpoint taught for 180 steps in place of 120"
    warm_up = 180


class Diluted(InsertedText):
    """As many poisoned answers as a receiver forgives in a group; the others are wrong as honest ones are."""

    name = "inserted text in a quarter of a group's answers, the others wrong in the usual form"
    poisoned = ANSWERS // 4

    def group(self, liar: Liar, question: Question) -> Sent:
        wrong = [liar.wrong(question) for _ in range(ANSWERS - self.poisoned)]
        return sent(question, [self.poison(question)] * self.poisoned + wrong)


class Grafted(InsertedText):
    """An honest node's group, in which some right answers carry the text."""

    name = "inserted text in the right answers of an honest node's group"

    def published(self, liar: Liar) -> list[Sent]:
        groups = []
        for group in liar.heard:
            question = regenerate(group.task)
            texts = [DIGITS.decode(answer) for answer in group.answers]
            right = [bool(question.reward(text)) for text in texts]
            if any(right) and not all(right):
                pairs = zip(texts, right, strict=True)
                groups.append(sent(question, [MARKER + text if is_right else text for text, is_right in pairs]))
        return groups[:GROUPS] or super().published(liar)


class ForgedReward(RolloutLie):
    """Wrong answers that are said to be right, to whoever believes rewards."""

    name = "forged reward"

    def group(self, liar: Liar, question: Question) -> Sent:
        wrong = "33" if question.key != "33" else "22"
        texts = [wrong] * (ANSWERS // 2) + [liar.wrong(question) for _ in range(ANSWERS // 2)]
        return sent(question, texts, rewards=[float(text == wrong) for text in texts])

    def arrived(self, question: Question, text: str) -> bool:
        return text == ("33" if question.key != "33" else "22")


class Flood(InsertedText):
    """One peer makes nine tenths of what there is. Its answers are right or wrong in the usual form: no gate minds."""

    name = "one peer floods 90 % of the pool, by the answer key"
    identities = 1
    newcomers = False  # whether all of its identities together may have no more than newcomers
    loudness = 60  # times what an honest node publishes: 6 of them, nine tenths

    def times(self, published: int) -> int:
        return self.loudness * published

    def group(self, liar: Liar, question: Question) -> Sent:
        half = ANSWERS // 2
        return sent(question, [question.key] * half + [liar.wrong(question) for _ in range(half)])


class Sybils(Flood):
    """As many identities as there are honest nodes and more, each as quiet as an honest node, with poison."""

    name = "eight new identities of one attacker, with inserted text"
    identities = 8
    newcomers = True
    loudness = 1

    def group(self, liar: Liar, question: Question) -> Sent:
        return InsertedText.group(self, liar, question)


class LoudSybils(Sybils):
    name = "eight new identities, eight times as loud as honest nodes, with inserted text"
    loudness = 8


class DilutedSybils(Sybils):
    """Only as many poisoned answers in a group as a receiver forgives: the rest of the group is learned from."""

    name = "eight new identities, with inserted text in a quarter of a group's answers"

    def group(self, liar: Liar, question: Question) -> Sent:
        return Diluted.group(Diluted(), liar, question)


class KeySybils(Sybils):
    """What they publish holds up: their answers are right or wrong in the usual form."""

    name = "eight new identities that answer by the key"

    def group(self, liar: Liar, question: Question) -> Sent:
        return Flood.group(self, liar, question)


def floods() -> list[Flood]:
    return [Flood(), Sybils(), LoudSybils(), DilutedSybils(), KeySybils()]


def everyone() -> list[RolloutLie]:
    return [
        InsertedText(),
        ExtraDigit(),
        Overlong(),
        FalseWorking(),
        UsualWorking(),
        UsualWorkingLater(),
        Diluted(),
        Grafted(),
        ForgedReward(),
    ]
