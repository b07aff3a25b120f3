"""A rollout group: several answers to one question, as they are shared; and what a receiver makes of them. Torch-free.

    group = RolloutGroup(TaskRef("digits/swap", 5, 7), answers, version=12, policy="ab…", vocabulary=DIGITS.id)
    again = RolloutGroup.from_map(group.to_map())                    # what travels, bounded and checked
    scored = score("12D3…", group)                                   # question, rewards, advantages: all made here
    scored.informative                                               # not all answers are equally right

A group says nothing about rewards or answer keys: `score` regenerates the question and verifies every answer itself.
Nor does it say who wrote it: its author is whoever signed the message around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.options import number_of
from swarmnode.training.rl.tasks import MAX_NAME, MAX_SEED, Question, TaskRef, UnknownTask, regenerate
from swarmnode.training.rl.vocabulary import BYTES, Vocabulary, known, translate

MAX_ANSWERS = 64  # in a group
MAX_TOKENS = 4096  # of an answer
MAX_ID = 128  # characters of a policy's hash or a vocabulary's id
LOGPROB = 2  # bytes of a log-probability
LOWEST = 64.0  # nats: no token is that unlikely and sampled; what is lower travels as −64
_STEPS = 65535
LEAST_DEVIATION = 1e-6  # of rewards in a group that is informative

Floats = NDArray[np.float32]
V = TypeVar("V")


class GroupError(ValueError):
    """What came is no rollout group. The message says why."""


class RefusedGroup(Exception):
    """A group that is well-formed and of no use here. `reason` is a word to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RolloutGroup:
    """Answers to one question, written by one policy at one version. Raises GroupError when built beyond its limits."""

    task: TaskRef
    answers: tuple[tuple[int, ...], ...]  # token ids, the end token included
    version: int  # updates that the policy had seen
    policy: str  # hash of its parameters
    vocabulary: str  # id; `bytes` where answers are text
    logprobs: tuple[tuple[float, ...], ...] | None = None  # of each token, by the policy that wrote it

    def __post_init__(self) -> None:
        task = self.task
        _check(isinstance(task.name, str) and 0 < len(task.name) <= MAX_NAME, "the task's name")
        _check(_is_int(task.difficulty, 0, 1 << 20), "the difficulty")
        _check(_is_int(task.seed, 0, MAX_SEED), "the seed")
        _check(_is_int(self.version, 0, MAX_SEED), "the version")
        _check(isinstance(self.policy, str) and len(self.policy) <= MAX_ID, "the policy's hash")
        _check(isinstance(self.vocabulary, str) and len(self.vocabulary) <= MAX_ID, "the vocabulary's id")
        _check(1 <= len(self.answers) <= MAX_ANSWERS, "the number of answers")
        for answer in self.answers:
            _check(1 <= len(answer) <= MAX_TOKENS, "the length of an answer")
            # `type` and not isinstance: True is no token.
            _check(set(map(type, answer)) == {int} and min(answer) >= 0 and max(answer) < 1 << 24, "a token id")
        if self.logprobs is not None:
            lengths = [len(values) for values in self.logprobs]
            _check(lengths == [len(answer) for answer in self.answers], "the number of log-probabilities")
            _check(all(_is_logprob(value) for values in self.logprobs for value in values), "a log-probability")

    def to_map(self) -> dict[str, Any]:
        """What travels: numbers, texts and bytes. The content is token ids, little-endian, `width` bytes each; then
        log-probabilities, 2 bytes each (`quantised`)."""
        greatest = max(map(max, self.answers))
        width = 1 if greatest < 1 << 8 else 2 if greatest < 1 << 16 else 3
        tokens = np.array([token for answer in self.answers for token in answer], "<u4")
        content = tokens.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
        if self.logprobs is not None:
            content += quantised(np.array([value for each in self.logprobs for value in each], np.float64)).tobytes()
        return {
            "task": (self.task.name, self.task.difficulty, self.task.seed),
            "version": self.version,
            "policy": self.policy,
            "vocabulary": self.vocabulary,
            "lengths": tuple(map(len, self.answers)),
            "width": width,
            "logprobs": self.logprobs is not None,
            "content": content,
        }

    def only(self, which: NDArray[np.bool_]) -> RolloutGroup:
        if which.all():
            return self
        kept = np.flatnonzero(which).tolist()
        logprobs = None if self.logprobs is None else tuple(self.logprobs[index] for index in kept)
        return replace(self, answers=tuple(self.answers[index] for index in kept), logprobs=logprobs)

    @staticmethod
    def from_map(sent: Mapping[str, Any]) -> RolloutGroup:
        """The group in a decoded message. Raises GroupError for whatever is none."""
        try:
            name, difficulty, seed = sent["task"]
            lengths, width, content = tuple(sent["lengths"]), sent["width"], sent["content"]
            _check(width in (1, 2, 3), "the width of a token id")
            total = sum(lengths)
            _check(min(lengths) > 0 and total <= MAX_ANSWERS * MAX_TOKENS, "the number of tokens")
            each = width + (LOGPROB if sent["logprobs"] else 0)
            _check(0 < total * each == len(content), "the length of the content")
            wide = np.zeros((total, 4), np.uint8)
            wide[:, :width] = np.frombuffer(content, np.uint8, total * width).reshape(total, width)
            tokens = wide.reshape(-1).view("<u4").tolist()
            logprobs = None
            if sent["logprobs"]:
                chances = dequantised(np.frombuffer(content, "<u2", total, total * width))
                logprobs = tuple(_cut(chances.tolist(), lengths))
            by = sent["version"], sent["policy"], sent["vocabulary"]
            return RolloutGroup(TaskRef(name, difficulty, seed), tuple(_cut(tokens, lengths)), *by, logprobs)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise GroupError(f"no rollout group: {type(error).__name__}: {error}") from error


def quantised(logprobs: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Log-probabilities in nats as the 16 bits that travel; `dequantised` goes back.

    q = round(65535·sqrt(−logp / 64)), so that the error grows with the square root: 6e-5 nats on average for a token of
    probability 1/e. float16 would be off by 1.2e-4 there and by 5e-4 at e^-3, and the check of equal models
    (`proofs.py`) is to tell 1e-4 from 3e-2.
    """
    depth = np.clip(-logprobs, 0.0, LOWEST)
    return np.rint(_STEPS * np.sqrt(depth / LOWEST)).astype("<u2")


def dequantised(steps: NDArray[np.uint16]) -> NDArray[np.float64]:
    """What `quantised` made, in nats."""
    roots = np.asarray(steps, np.float64) / _STEPS
    return np.negative(LOWEST * np.square(roots))


def _cut(values: Sequence[V], lengths: Sequence[int]) -> list[tuple[V, ...]]:
    """Values of all answers in a row, by answer."""
    return [tuple(values[end - length : end]) for length, end in zip(lengths, accumulate(lengths), strict=True)]


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise GroupError(f"{what} is not valid")


def _is_int(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_logprob(value: object) -> bool:
    # A little above 0 is rounding; -inf is no chance that a sampled token can have had.
    return (type(value) is int or type(value) is float) and math.isfinite(value) and value < 1e-3


@dataclass(frozen=True)
class Scored:
    author: str
    group: RolloutGroup
    question: Question
    texts: tuple[str, ...]
    rewards: Floats  # (G,)
    kept: NDArray[np.bool_] = field(repr=False)  # (G,) answers that no defence refused
    vocabulary: Vocabulary = field(repr=False)  # in which the answers are written

    @cached_property
    def advantages(self) -> Floats:
        """(G,) (reward − mean) / deviation among the answers kept, 0 for others (GRPO 2402.03300, section 4.1)."""
        return group_advantages(self.rewards, self.kept)

    @property
    def informative(self) -> bool:
        """Whether some answers are better than others: a group without is a zero gradient, and SAPO drops it."""
        return bool(np.any(self.advantages))


def group_advantages(rewards: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """(G,) advantages of the `chosen` (G,) rewards (G,) among one another; all 0 where these are equal."""
    advantages = np.zeros(len(rewards), np.float32)
    if chosen.sum() > 1:
        among = rewards[chosen].astype(np.float64)
        centred = among - among.sum() / len(among)
        deviation = math.sqrt(float(centred @ centred) / len(among))
        if deviation > LEAST_DEVIATION:
            advantages[chosen] = centred / deviation
    return advantages


def score(author: str, group: RolloutGroup, *, judged: bool = False, seconds: float = math.inf) -> Scored:
    """Regenerate the question and verify every answer.

    Raises RefusedGroup: unknown-task, unknown-vocabulary, bad-token, or too-slow at the first answer whose check takes
    more than `seconds` of CPU.

    `judged` multiplies rewards by the question's judge. An answer that did not end by itself earns nothing: the public
    SAPO code leaves the end out, and its policies never learn to stop.
    """
    try:
        question = regenerate(group.task)
    except UnknownTask as error:
        raise RefusedGroup("unknown-task", str(error)) from error
    vocabulary = known(group.vocabulary)
    if vocabulary is None:
        raise RefusedGroup("unknown-vocabulary", f"vocabulary {group.vocabulary!r} is not known here")
    if max(map(max, group.answers)) >= vocabulary.size:
        raise RefusedGroup("bad-token", f"a token is beyond the {vocabulary.size} of vocabulary {group.vocabulary}")
    if any(vocabulary.end in answer[:-1] for answer in group.answers):
        raise RefusedGroup("bad-token", "an answer goes on behind its end")
    texts = tuple(vocabulary.decode(answer) for answer in group.answers)
    earn = question.judged_reward if judged else question.reward
    rewards = []
    for text, answer in zip(texts, group.answers, strict=True):
        began = time.thread_time()
        rewards.append(earn(text) if answer[-1] == vocabulary.end else 0.0)
        if time.thread_time() - began > seconds:
            raise RefusedGroup("too-slow", f"checking an answer took longer than {seconds:g} s")
    return Scored(author, group, question, texts, np.array(rewards, np.float32), np.ones(len(texts), bool), vocabulary)


@dataclass(frozen=True)
class Learned:
    reward: float  # mean over this node's own answers to questions drawn alike of all that are asked, 0 to 1
    own: int  # groups
    informative: int  # of these, with better and worse answers
    taken: int  # others' groups that were learned from
    authors: int  # whose they are
    external: int  # others' groups that are taken where there are enough (J)
    refused: Mapping[str, int]  # others' groups that were not, by reason
    refused_answers: Mapping[str, int]  # others' answers that the gate refused, by author
    tokens: int  # generated
    read_answers: Mapping[str, int] = field(default_factory=dict)  # others' answers that the gate looked at, by author
    sampled: int = 0  # groups that others wrote for this policy and that it learned from
    checked: Mapping[str, int] = field(default_factory=dict)  # of these, how many were audited, by author
    caught: Mapping[str, str] = field(default_factory=dict)  # authors whose groups are lies, and by what they are
    by_task: Mapping[str, float] = field(default_factory=dict)  # `reward`, by the task that was asked
    taken_of: Mapping[str, int] = field(default_factory=dict)  # `taken`, by author
    staleness: float = 0.0  # updates between the weights that wrote those groups and the present ones, mean
    loss: float = 0.0  # of the update
    heldout: float = float("nan")  # expected reward on fresh questions, after the update
    seconds: float = 0.0  # of the update, and of measuring it

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not all(0.0 <= reward <= 1.0 for reward in (self.reward, *self.by_task.values())):
            raise ValueError("a reward is from 0 to 1")

    def in_words(self) -> str:
        groups, peers = number_of(self.taken, "group"), number_of(self.authors, "peer")
        text = f"reward {self.reward:.3f}, learned from {groups} of {peers}"
        if self.sampled:
            text += f" and {self.sampled} that others sampled, {self.staleness:.1f} updates old"
        refused = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refused.items()))
        return f"{text} ({refused} left out)" if refused else text


def told(scored: Scored) -> dict[str, Any]:
    told_of = zip(scored.texts, scored.rewards, scored.advantages, scored.group.answers, strict=True)
    return {
        "question": scored.question.prompt,
        "key": scored.question.key,
        "answers": [
            {"text": text, "reward": float(reward), "advantage": round(float(advantage), 4), "tokens": len(tokens)}
            for text, reward, advantage, tokens in told_of
        ],
    }


def as_text(group: RolloutGroup, source: Vocabulary) -> RolloutGroup:
    """The same answers as text, for nodes that do not know their vocabulary; the tokens' chances are left out.

    Raises GroupError where an answer is too long.
    """
    texts = [tuple(translate(answer, source, BYTES)) or (BYTES.end,) for answer in group.answers]
    return replace(group, answers=tuple(texts), vocabulary=f"{BYTES.id}/{source.id}", logprobs=None)


def reward_by_task(scored: Sequence[Scored]) -> dict[str, float]:
    by_task: dict[str, list[Scored]] = {}
    for group in scored:
        by_task.setdefault(group.question.ref.name, []).append(group)
    return {name: mean_reward(groups) for name, groups in sorted(by_task.items())}


def mean_reward(scored: Sequence[Scored]) -> float:
    """Mean reward of all answers of these groups; 0 for none."""
    return float(np.mean([group.rewards.mean() for group in scored])) if scored else 0.0
