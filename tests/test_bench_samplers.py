"""bench/samplers.py in miniature: real policies over the simulated network, and one sampler that cheats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from policytrainer import InProcess
from simswarm import SimSwarm

from swarmnode.protocols.methods.rollouts.sapo import Sapo
from swarmnode.protocols.methods.trainer import Answered
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import TaskRef, regenerate
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.tasks import Assignment

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import samplers


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_trainers_learn_from_six_samplers_and_the_one_with_other_weights_is_caught_in_three_rounds() -> None:
    told = samplers.run_arm("cheated", 1, updates=12, sampling=0.5, update=0.2)
    assert told["accepted"] > 100 and told["staleness_worst_update"] <= 4
    for found in told["cheat"]:
        assert found["rounds"] <= 3 and found["learned_from"] == 0
    assert set(told["refused"]) <= {"stale", "for-another", "no-standing", "logprobs", "not-drawn"}
    assert 0 < told["reward_per_update"] < 1


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sampler_that_joins_late_is_in_step_within_two_updates() -> None:
    told = samplers.run_arm("late", 1, updates=samplers.LATE + 2, sampling=0.5, update=0.2)
    assert told["late"]["in_step"] <= 2 and told["late"]["learned_from"] <= 4


@pytest.mark.thorough
@pytest.mark.slow
def test_six_samplers_write_for_two_language_models_and_one_that_joins_late_is_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    monkeypatch.setattr(samplers, "LATE", 2)
    policy = samplers.a_llama(tmp_path)
    told = samplers.run_arm("late", 1, updates=5, sampling=0.5, update=0.2, policy=policy)
    assert told["policy"] == "hf-full" and told["accepted"] > 20
    assert told["late"]["in_step"] <= 2 and told["late"]["learned_from"] <= 4
    assert set(told["refused"]) <= {"stale", "for-another"}


def test_who_is_alone_asks_itself_as_many_questions_as_three_samplers_would() -> None:
    told = samplers.run_arm("colocated", 1, updates=2, sampling=0.5, update=0.2)
    assert told["came"] == 0 and told["informative_per_update"] > 4


class Copies(InProcess):
    """Gives what an honest sampler answered to questions that read like its own, and samples the rest itself."""

    def __init__(self, task: Trainee, seen: dict[tuple[str, str], RolloutGroup]) -> None:
        super().__init__(task, sampling=0.5, update=0.2)
        self._seen, self.copied = seen, 0

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        own = await super().answer(tasks, version=version, policy=policy)
        theirs = [self._seen.get((policy, regenerate(task).prompt)) for task in tasks]
        self.copied += sum(each is not None for each in theirs)
        given = [
            replace(copied, task=task, version=version) if copied is not None else group
            for copied, task, group in zip(theirs, tasks, own.groups, strict=True)
        ]
        return replace(own, groups=given)


class Copied(InProcess):
    """Samples honestly, and is overheard."""

    def __init__(self, task: Trainee, seen: dict[tuple[str, str], RolloutGroup]) -> None:
        super().__init__(task, sampling=0.5, update=0.2)
        self._seen = seen

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        answered = await super().answer(tasks, version=version, policy=policy)
        self._seen |= {(policy, regenerate(group.task).prompt): group for group in answered.groups}
        return answered


def test_whoever_was_copied_keeps_its_score_and_the_copier_alone_pays() -> None:
    """Question, answers and log-probabilities are right: only whose noise drew them tells the two apart."""
    rollouts = {**samplers.rollouts_of("samplers"), "difficulty": 2, "audit": 1.0, "warm_up": 10}
    tables = {"run": {"name": "copied", "seed": 1}, "task": {"name": "digits-rl"}, "rollouts": rollouts}
    spec = parse_runspec(tables, source="test")
    seen: dict[tuple[str, str], RolloutGroup] = {}
    kinds: dict[str, Callable[[Trainee], InProcess]] = {
        "b": lambda task: Copied(task, seen),
        "c": lambda task: Copies(task, seen),
    }

    async def main(nursery: trio.Nursery) -> None:

        def make(name: str, peer: str) -> InProcess:
            usual = lambda task: InProcess(task, sampling=0.5, update=0.2)  # noqa: E731
            return kinds.get(name, usual)(Trainee(spec, Assignment("", peer)))

        world = SimWorld(latency=0.05)
        swarm = SimSwarm(nursery, world=world, method="sapo", trainer=make, rollouts=rollouts, seed=1)
        for name in "abc":
            await swarm.start(name, join=None if name == "a" else "a", samples=name in "bc")
        method = swarm.nodes["a"].method
        assert isinstance(method, Sapo)
        found = method.samplers
        await swarm.until(lambda: bool(found.tally(swarm.peer("c")).caught), within=600)
        assert found.tally(swarm.peer("c")).caught == "not-drawn" and found.standing(swarm.peer("c")) == 0
        await swarm.until(lambda: found.tally(swarm.peer("b")).proved > 50, within=600)
        assert not found.tally(swarm.peer("b")).caught and found.standing(swarm.peer("b")) == 1

    run_with_nursery(main)
