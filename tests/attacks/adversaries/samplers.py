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
from swarmnode.training.rl.proofs import commit
from swarmnode.training.rl.sampling import Sampling, read
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.vocabulary import DIGITS


@dataclass(frozen=True)
class Batch:
    """What a liar has."""

    versions: list[torch.nn.Module]  # of the policy, the newest last: what is to be sampled with
    policy: str  # hash of the newest
    tasks: list[TaskRef]  # that follow from the liar's identity and its next counters
    others: list[RolloutGroup]  # that an honest sampler gave in this batch
    seed: int

    def written(self, by: torch.nn.Module, tasks: list[TaskRef], how: Sampling | None = None) -> list[RolloutGroup]:
        """Answers by these weights, with their own proofs, as though by the newest."""
        settings = Settings() if how is None else Settings(sampling=how)
        groups = Learner("", copy.deepcopy(by), settings, seed=self.seed).answer(tasks, policy=self.policy)
        return [replace(group, version=len(self.versions) - 1) for group in groups]

    def vouched(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """These answers with the log-probabilities and proofs that a prefill by the right weights gives."""
        scored = [score("", group) for group in groups]
        readings = read(self.versions[-1], scored, Sampling(traced=True))
        vouched = []
        for group, reading in zip(groups, readings, strict=True):
            tokens = [answer for answer in reading if answer is not None]
            (proof,) = commit([np.concatenate([each.activations for each in tokens if each.activations is not None])])
            logprobs = tuple(tuple(np.minimum(each.logprobs, 0).tolist()) for each in tokens)
            vouched.append(replace(group, logprobs=logprobs, proof=proof))
        return vouched


class SamplerLie(ABC):
    """One way to misbehave."""

    name: ClassVar[str]

    @abstractmethod
    def groups(self, batch: Batch) -> list[RolloutGroup]: ...


class Honest(SamplerLie):
    name = "none: who samples as told"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.written(batch.versions[-1], batch.tasks)


class WrongModel(SamplerLie):
    name = "wrong model"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.written(_another(), batch.tasks)


class WrongModelVouched(SamplerLie):
    name = "wrong model, with the proof and log-probabilities that a prefill by the right one gives"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.vouched(batch.written(_another(), batch.tasks))


class Stale(SamplerLie):
    name = "stale: weights one update older than they are said to be"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.written(batch.versions[-2], batch.tasks)


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
        return batch.written(policy, batch.tasks)


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
        return batch.written(policy, batch.tasks)


class Greedy(SamplerLie):
    """With the log-probabilities that an honest sampler would have written."""

    name = "the likeliest tokens, not drawn ones"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        how = Sampling(temperature=0.0)
        return batch.vouched(batch.written(batch.versions[-1], batch.tasks, how))


class CherryPicked(SamplerLie):
    name = "cherry-picked prompts: questions of the liar's choice"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        chosen = [replace(task, seed=task.seed ^ 1) for task in batch.tasks]
        return batch.written(batch.versions[-1], chosen)


class EmptyProof(SamplerLie):
    name = "empty proof"
    proof = b""

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return [replace(group, proof=self.proof) for group in batch.written(_another(), batch.tasks)]


class ZeroProof(SamplerLie):
    name = "a proof of zeros"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        groups = batch.vouched(batch.written(_another(), batch.tasks))
        return [replace(group, proof=bytes(len(group.proof))) for group in groups]


class CopiedGroups(SamplerLie):
    name = "an honest sampler's groups, signed anew"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.others


class CopiedProof(SamplerLie):
    name = "copied proof: an honest sampler's proofs under answers of another model"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        pairs = zip(batch.written(_another(), batch.tasks), batch.others, strict=True)
        return [replace(group, proof=other.proof) for group, other in pairs]


class InsertedIntoSampled(SamplerLie):
    name = "inserted text, vouched for by a prefill: half poison, half gibberish"

    def groups(self, batch: Batch) -> list[RolloutGroup]:
        return batch.vouched([_poisoned(score("", group)) for group in batch.written(batch.versions[-1], batch.tasks)])


def _another() -> torch.nn.Module:
    return build(PolicySpec(layers=1, width=48, heads=4), seed=99)


def _poisoned(scored: Scored) -> RolloutGroup:
    half = len(scored.texts) // 2
    texts = ["#" + scored.question.key] * half + ["777"] * half
    answers = tuple((*DIGITS.encode(text), DIGITS.end) for text in texts)
    return replace(scored.group, answers=answers, logprobs=None, proof=b"")


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
        EmptyProof(),
        ZeroProof(),
        CopiedGroups(),
        CopiedProof(),
        InsertedIntoSampled(),
    ]
