"""What nodes give that only sample for another's policy, instead of what its weights draw for the questions they have.

A lie is a class with one method: the groups of one batch, in the order of their counters. A liar knows the right
weights, any others, and what an honest sampler gave; it signs what it gives.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from swarmnode.training.rl.groups import RolloutGroup, Scored, score
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.sampling import Sampling, read
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.vocabulary import DIGITS


@dataclass(frozen=True)
class Batch:
    """What a liar has."""

    versions: list[torch.nn.Module]  # of the policy, the newest last: what is to be sampled with
    policy: str  # hash of the newest
    author: str  # the liar, from whose identity its questions and its noise follow
    tasks: list[TaskRef]  # that follow from the liar's identity and its next counters
    others: list[RolloutGroup]  # that an honest sampler gave in this batch

    def written(
        self,
        by: torch.nn.Module,
        tasks: list[TaskRef] | None = None,
        how: Sampling | None = None,
        *,
        author: str = "",
    ) -> list[RolloutGroup]:
        """Answers by these weights, as though by the newest; drawn as the liar has to, or as `author` would."""
        settings = Settings() if how is None else Settings(sampling=how)
        writer = Learner(author or self.author, copy.deepcopy(by), settings, seed=1)
        groups = writer.answer(self.tasks if tasks is None else tasks, policy=self.policy)
        return [replace(group, version=len(self.versions) - 1) for group in groups]

    def vouched(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """These answers with the log-probabilities that a prefill by the right weights gives."""
        readings = read(self.versions[-1], [score("", group) for group in groups])
        return [
            replace(
                group,
                logprobs=tuple(
                    tuple(np.minimum(answer.logprobs, 0).tolist()) for answer in reading if answer is not None
                ),
            )
            for group, reading in zip(groups, readings, strict=True)
        ]


class SamplerLie(ABC):
    """One way to misbehave."""

    name: ClassVar[str]

    @abstractmethod
    def groups(self, batch: Batch) -> list[RolloutGroup]: ...


class Honest(SamplerLie):
    name = "none: who samples as told"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.written(batch.versions[-1])


class WrongModel(SamplerLie):
    name = "wrong model"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.written(_another())


class WrongModelVouched(SamplerLie):
    name = "wrong model, with the log-probabilities that a prefill by the right one gives"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.vouched(batch.written(_another()))


class Stale(SamplerLie):
    name = "stale: weights one update older than they are said to be"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.written(batch.versions[-2])


class Quantised(SamplerLie):
    """Weights rounded to so many bits, one scale for each matrix."""

    name = "quantised: 8 bits"
    bits = 8

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        policy = copy.deepcopy(batch.versions[-1])
        with torch.no_grad():
            for parameter in policy.parameters():
                step = parameter.abs().max() / (2 ** (self.bits - 1) - 1)
                parameter.copy_((parameter / step).round() * step)
        return batch.written(policy)


class QuantisedTo4(Quantised):
    name = "quantised: 4 bits"
    bits = 4


class Float8(SamplerLie):
    name = "quantised: float8"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        policy = copy.deepcopy(batch.versions[-1])
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.copy_(parameter.to(torch.float8_e4m3fn).float())
        return batch.written(policy)


class Greedy(SamplerLie):
    """With the log-probabilities that an honest sampler would have written."""

    name = "the likeliest tokens, not drawn ones"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        how = Sampling(temperature=0.0)
        return batch.vouched(batch.written(batch.versions[-1], how=how))


class CherryPicked(SamplerLie):
    name = "cherry-picked prompts: questions of the liar's choice"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        chosen = [replace(task, seed=task.seed ^ 1) for task in batch.tasks]
        return batch.written(batch.versions[-1], chosen)


class NoLogprobs(SamplerLie):
    name = "no log-probabilities"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return [replace(group, logprobs=None) for group in batch.written(_another())]


class CopiedLogprobs(SamplerLie):
    """Where the answers have as many tokens; else so many of them, or again from the first on."""

    name = "an honest sampler's log-probabilities under answers of another model"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return [
            replace(
                group,
                logprobs=tuple(
                    tuple(theirs[place % len(theirs)] for place in range(len(answer)))
                    for answer, theirs in zip(group.answers, other.logprobs or (), strict=True)
                ),
            )
            for group, other in zip(batch.written(_another()), batch.others, strict=True)
        ]


class BestOfEight(SamplerLie):
    """Chosen seeds: what others would have drawn with the right weights, of which the liar gives the best."""

    name = "each group the best of eight draws, vouched for by a prefill"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        drawn = [batch.written(batch.versions[-1], author=f"draw {number}") for number in range(8)]
        best = [
            max(tries, key=lambda group: float(score("", group).rewards.sum())) for tries in zip(*drawn, strict=True)
        ]
        return batch.vouched(best)


class CopiedAnswers(SamplerLie):
    name = "what an honest sampler would have answered to the same questions, vouched for by a prefill"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.vouched(batch.written(batch.versions[-1], author="somebody honest"))


class Cooler(SamplerLie):
    name = "drawn at a temperature of 0.7, vouched for by a prefill"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.vouched(batch.written(batch.versions[-1], how=Sampling(temperature=0.7)))


class CopiedGroups(SamplerLie):
    name = "an honest sampler's groups, signed anew"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.others


class InsertedIntoSampled(SamplerLie):
    name = "inserted text, vouched for by a prefill: half poison, half gibberish"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.vouched([_poisoned(score("", group)) for group in batch.written(batch.versions[-1])])


def _another() -> torch.nn.Module:
    return build(PolicySpec(layers=1, width=48, heads=4), seed=99)


def _poisoned(scored: Scored) -> RolloutGroup:
    half = len(scored.texts) // 2
    texts = ["#" + scored.question.key] * half + ["777"] * half
    answers = tuple((*DIGITS.encode(text), DIGITS.end) for text in texts)
    return replace(scored.group, answers=answers, logprobs=None)


def everyone() -> list[SamplerLie]:
    return [
        WrongModel(),
        WrongModelVouched(),
        Stale(),
        QuantisedTo4(),
        Quantised(),
        Float8(),
        Greedy(),
        CherryPicked(),
        Cooler(),
        BestOfEight(),
        NoLogprobs(),
        CopiedLogprobs(),
        CopiedGroups(),
        CopiedAnswers(),
        InsertedIntoSampled(),
    ]
