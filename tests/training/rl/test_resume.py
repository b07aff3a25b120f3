"""A policy that comes back from its checkpoint goes on as itself: what is stored, and what is made anew alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swarmnode.training.rl.groups import RolloutGroup, score
from swarmnode.training.rl.policies import parameter_hash
from swarmnode.training.rl.sampling import read
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment

ROUNDS = 6


def spec(**rollouts: Any) -> RunSpec:
    tables = {"run": {"name": "r"}, "task": {"name": "digits-rl"}, "rollouts": {"warm_up": 30, **rollouts}}
    return parse_runspec(tables, source="test")


def started(of: RunSpec, parameters: torch.Tensor | None = None, *, policy: str = "") -> Trainee:
    """The task as a trainer process makes it, with the parameters of a checkpoint where there is one."""
    task = Trainee(of, Assignment("r" * 64, "me", policy=policy))
    if parameters is not None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(parameters.clone(), task.model.parameters())
    return task


def vector(task: Trainee) -> torch.Tensor:
    return nn.utils.parameters_to_vector(task.model.parameters()).detach().clone()


def learned(task: Trainee, first: int, last: int) -> None:
    for version in range(first, last):
        task.rollouts(version=version)
        task.learn([])


@pytest.mark.parametrize("policy", ["", "gru:1x32"])
def test_the_reference_of_a_resumed_policy_is_the_one_it_had(policy: str) -> None:
    before = started(spec(), policy=policy)
    learned(before, 0, ROUNDS)
    after = started(spec(), vector(before), policy=policy)
    assert torch.equal(vector(before), vector(after))
    assert before.learner.reference is not None and after.learner.reference is not None
    assert parameter_hash(before.learner.reference) == parameter_hash(after.learner.reference)
    assert parameter_hash(after.learner.reference) != parameter_hash(after.model)


def test_what_a_resumed_node_refuses_is_what_it_refused() -> None:
    before = started(spec())
    learned(before, 0, ROUNDS)
    after = started(spec(), vector(before))
    sent = [RolloutGroup.from_map(group) for group in before.rollouts(version=ROUNDS)["groups"]]
    groups = [score("peer", group) for group in sent]
    for one, other in ((before.model, after.model), (before.learner.reference, after.learner.reference)):
        assert one is not None and other is not None
        for mine, theirs in zip(read(one, groups), read(other, groups), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a is not None and b is not None
                np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_two_that_resume_from_one_checkpoint_go_on_alike() -> None:
    before = started(spec())
    learned(before, 0, ROUNDS)
    resumed = [started(spec(), vector(before)) for _ in range(2)]
    for task in resumed:
        learned(task, ROUNDS, 2 * ROUNDS)
    assert torch.equal(vector(resumed[0]), vector(resumed[1]))


def test_a_resumed_policy_asks_other_questions_than_at_the_beginning() -> None:
    first = started(spec()).rollouts(version=0)["groups"]
    again = started(spec()).rollouts(version=ROUNDS)["groups"]
    asked = [{tuple(group["task"]) for group in groups} for groups in (first, again)]
    assert asked[0] and not asked[0] & asked[1]


@pytest.mark.slow
def test_who_is_on_probation_has_one_group_of_an_update_together_with_all_others_on_it() -> None:
    task = started(spec(batch=8, external=4, adaptive=False))
    others = [started(spec()).rollouts(version=n)["groups"] for n in range(1, 30)]
    pool = [(f"new {n}", group) for n, groups in enumerate(others) for group in groups]
    task.rollouts(version=0)
    assert task.learn(pool)["taken"] == 4
    task.rollouts(version=1)
    told = task.learn(pool, probation=[author for author, _ in pool])
    assert told["taken"] == 1 and told["refused"]["probation"] > 0
