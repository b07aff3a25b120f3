"""Who sampled with a policy's weights passes its audit always; who did not, or proves nothing, is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from sentweights import as_sent

from swarmnode.training.rl.groups import RolloutGroup, Scored, score
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, TinyGPT, build, parameter_hash
from swarmnode.training.rl.proofs import BF16, FP32, RolloutAudit, Tolerance
from swarmnode.training.rl.sampling import Sampling, read
from swarmnode.training.rl.tasks import NAMES, TaskRef, regenerate, well_formed
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.rl.vocabulary import BYTES
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.tasks import Assignment

SPEC = PolicySpec(layers=1, width=48, heads=4)


@cache
def versions() -> list[TinyGPT]:
    """A policy before each of some updates that taught it something, and after the last."""
    learner = Learner("trainer", build(SPEC, seed=1), Settings(), seed=1)
    learner.warm_up(well_formed)
    seen = [as_sent(copy.deepcopy(learner.policy))]
    while len(seen) < 25:
        if learner.learn(learner.sample(), []).informative:
            seen.append(as_sent(copy.deepcopy(learner.policy)))
    return seen


def sampled(
    by: torch.nn.Module,
    *,
    says: torch.nn.Module | None = None,
    seed: int = 1,
    who: str = "s",
    how: Sampling | None = None,
) -> list[Scored]:
    """What a node writes with the weights of `by`, as written with those of `says`."""
    sampler = Learner(who, copy.deepcopy(by), Settings(sampling=how or Sampling()), seed=1)
    tasks = [TaskRef(NAMES[n % len(NAMES)], 5, 100 * seed + n) for n in range(8)]
    groups = sampler.answer(tasks, policy=parameter_hash(by if says is None else says))
    return [score(who, group) for group in groups]


def an_audit(share: float = 0.25, seed: int = 1, limits: Tolerance = FP32) -> RolloutAudit:
    """That of the trainer at the last version, which remembers the one before as well."""
    policy = copy.deepcopy(versions()[-1])
    audit = RolloutAudit(policy, share=share, seed=seed, limits=limits)
    for version in versions()[-2:]:
        policy.load_state_dict(version.state_dict())
        audit.remember(parameter_hash(version))
    return audit


def changed(scored: Scored, **fields: object) -> Scored:
    group = replace(scored.group, **fields)  # type: ignore[arg-type]
    return score(scored.author, group)


def test_honest_groups_of_remembered_versions_always_pass() -> None:
    audit = an_audit(share=1.0)
    for seed in range(60):
        groups = sampled(versions()[-1 - seed % 2], seed=seed)
        verdict = audit.check(groups)
        assert not verdict.caught and not verdict.refused
        assert len(verdict.passed) == verdict.checked["s"] == len(groups)


def test_a_policy_that_is_nearly_sure_condemns_nobody() -> None:
    policy = copy.deepcopy(versions()[-1])
    with torch.no_grad():
        policy.head.weight *= 8.0  # what training on and on comes to
    audit = RolloutAudit(policy, share=1.0, seed=1)
    audit.remember(parameter_hash(policy))
    assert not any(audit.check(sampled(policy, seed=seed)).caught for seed in range(60))


@pytest.mark.parametrize(
    ("behind", "reason"), [(1, "logprobs"), (4, "logprobs"), (24, "logprobs")], ids=["one update", "four", "many"]
)
def test_older_weights_under_a_newer_name_are_caught(behind: int, reason: str) -> None:
    for seed in range(5):
        groups = sampled(versions()[-1 - behind], says=versions()[-1], seed=seed)
        verdict = an_audit(seed=seed).check(groups)
        assert verdict.caught == {"s": reason} and not verdict.passed
        assert verdict.refused == {"dishonest": len(groups)}


def test_weights_rounded_to_8_bits_are_caught_in_one_batch() -> None:
    rounded = copy.deepcopy(versions()[-1])
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(torch.float8_e4m3fn).float())
    for seed in range(30):
        verdict = an_audit(seed=seed).check(sampled(rounded, says=versions()[-1], seed=seed))
        assert verdict.caught == {"s": "logprobs"} and not verdict.passed


def vouched(scored: Scored) -> Scored:
    """Somebody's answers with the log-probabilities that the right weights give for them."""
    (reading,) = read(versions()[-1], [scored])
    return changed(scored, logprobs=tuple(tuple(answer.logprobs.tolist()) for answer in reading if answer is not None))


@pytest.mark.parametrize(
    ("by", "how"),
    [
        (lambda: build(SPEC, seed=9), Sampling()),
        (lambda: versions()[0], Sampling()),
        (lambda: versions()[-1], Sampling(temperature=0.0)),
        (lambda: versions()[-1], Sampling(temperature=0.7)),
        (lambda: versions()[-1], Sampling(top_k=4)),
    ],
    ids=["another policy", "many updates old", "greedy", "cooler", "top 4"],
)
def test_tokens_that_are_not_drawn_are_found_whatever_is_claimed(
    by: Callable[[], torch.nn.Module], how: Sampling
) -> None:
    for seed in range(20):
        forged = [vouched(scored) for scored in sampled(by(), says=versions()[-1], seed=seed, how=how)]
        verdict = an_audit(share=1.0).check(forged)
        assert verdict.caught == {"s": "not-drawn"} and not verdict.passed


def test_who_draws_more_than_once_and_gives_the_best_is_found() -> None:
    for seed in range(20):
        drawn = [sampled(versions()[-1], seed=seed, who=name) for name in ("s", *map(str, range(7)))]
        best = [max(tries, key=lambda each: float(each.rewards.sum())) for tries in zip(*drawn, strict=True)]
        given = [score("s", each.group) for each in best]
        assert an_audit(share=1.0).check(given).caught == {"s": "not-drawn"}


def test_whose_answers_are_copied_passes_and_the_copier_does_not() -> None:
    for seed in range(20):
        honest = sampled(versions()[-1], seed=seed, who="h")
        copies = [score("c", scored.group) for scored in honest]
        verdict = an_audit(seed=seed).check([*copies, *honest])
        assert verdict.caught == {"c": "not-drawn"}
        assert [scored.author for scored in verdict.passed] == ["h"] * len(honest)


def test_one_edited_token_of_a_group_is_enough() -> None:
    for seed in range(20):
        first = sampled(versions()[-1], seed=seed)[0]
        (token, *rest), *others = first.group.answers
        edited = vouched(changed(first, answers=((token ^ 1, *rest), *others)))
        assert an_audit(share=1.0).check([edited]).caught == {"s": "not-drawn"}
        assert not an_audit(share=1.0).check([vouched(first)]).caught


def test_who_cuts_an_answer_short_or_lets_one_go_on_is_found() -> None:
    """Drawn tokens all, with their chances: but whoever may end an answer chooses which are right."""
    for seed in range(5):
        scored = sampled(versions()[-1], seed=seed)[0]
        answers, chances = ([*each] for each in (scored.group.answers, scored.group.logprobs or ()))
        answers[3], chances[3] = answers[3][:-1], chances[3][:-1]
        cut = changed(scored, answers=tuple(answers), logprobs=tuple(chances))
        assert an_audit(share=1.0).check([cut]).caught == {"s": "unfinished"}
    for most, caught in ((2, {}), (1, {"s": "unfinished"})):
        audit = RolloutAudit(versions()[-1], share=1.0, seed=1, how=Sampling(max_tokens=most))
        audit.remember(parameter_hash(versions()[-1]))
        assert audit.check(sampled(versions()[-1], how=Sampling(max_tokens=2))).caught == caught


def test_rounding_is_borne_and_adds_up_over_groups() -> None:
    """In bf16, tokens are others here and there: an audit for such samplers lets that pass, and finds the rest."""
    honest = [sampled(copy.deepcopy(versions()[-1]).bfloat16(), says=versions()[-1], seed=seed) for seed in range(60)]
    half, exact = an_audit(share=1.0, limits=BF16), an_audit(share=1.0)
    assert not any(half.check(groups).caught for groups in honest)
    assert all(exact.check(groups).caught for groups in honest)
    for seed in range(20):
        cooler = sampled(versions()[-1], seed=seed, how=Sampling(temperature=0.7))
        forged = [vouched(scored) for scored in cooler]
        assert an_audit(share=1.0, limits=BF16).check(forged).caught == {"s": "not-drawn"}


def test_missing_log_probabilities_never_pass() -> None:
    groups = [changed(each, logprobs=None) for each in sampled(versions()[-1])]
    assert an_audit().check(groups).caught == {"s": "no-logprobs"}


def test_a_liar_costs_nobody_else_anything_and_one_of_each_author_is_always_looked_at() -> None:
    honest, liar = sampled(versions()[-1], who="h"), sampled(build(SPEC, seed=9), says=versions()[-1], who="l")
    for seed in range(10):
        verdict = an_audit(share=0.01, seed=seed).check([*honest, *liar])
        assert verdict.checked == {"h": 1, "l": 1}
        assert {scored.author for scored in verdict.passed} == {"h"} and set(verdict.caught) == {"l"}


def test_weights_that_are_not_remembered_are_no_lie() -> None:
    groups = sampled(versions()[0])
    verdict = an_audit().check(groups)
    assert not verdict.caught and not verdict.passed and verdict.refused == {"unknown-weights": len(groups)}


def test_what_others_sampled_is_learned_from_by_decoupled_ppo() -> None:
    def learned(groups: list[Scored]) -> tuple[str, int]:
        learner = Learner("trainer", copy.deepcopy(versions()[-1]), Settings(), seed=1)
        report = learner.learn([], [], groups)
        return parameter_hash(learner.policy), report.sampled

    groups = sampled(versions()[-5])
    after, count = learned(groups)
    assert count == sum(scored.informative for scored in groups) > 0
    assert after != parameter_hash(versions()[-1])
    as_own = [
        changed(each, logprobs=tuple(tuple(-30.0 for _ in answer) for answer in each.group.answers)) for each in groups
    ]
    assert learned(as_own)[0] != after, "what the writer's chances were matters"


@pytest.mark.parametrize(("precision", "caught"), [("fp32", {"s": "logprobs"}), ("bf16", {})])
def test_samplers_may_compute_in_bf16_where_the_run_does(precision: str, caught: dict[str, str]) -> None:
    tables = {"run": {"name": "r"}, "task": {"name": "digits-rl"}, "inner": {"precision": precision}}
    task = Trainee(parse_runspec({**tables, "rollouts": {"warm_up": 5}}, source="test"), Assignment("", "t"))
    task.audit.remember("these")
    sampler = Learner("s", copy.deepcopy(task.model).bfloat16(), Settings(), seed=1)
    groups = sampler.answer([TaskRef("digits/swap", 5, seed) for seed in range(64)], policy="these")
    assert task.audit.check([score("s", group) for group in groups]).caught == caught


def test_who_gives_what_the_policy_cannot_read_is_caught() -> None:
    spec = parse_runspec(
        {"run": {"name": "r"}, "task": {"name": "digits-rl"}, "rollouts": {"warm_up": 5}}, source="test"
    )
    task = Trainee(spec, Assignment("", "t"))
    task.audit.remember("these")
    answer = (*BYTES.encode("hello!!"), BYTES.end)
    chances = tuple(-1.0 for _ in answer)
    lie = RolloutGroup(TaskRef("digits/swap", 5, 1), (answer,) * 2, 0, "these", BYTES.id, (chances,) * 2)
    assert task.learn([], [("liar", lie.to_map())])["caught"] == {"liar": "unreadable"}


@pytest.mark.parametrize(
    ("text", "reason"), [("00" * 50, "too-long"), ("hello", "unreadable")], ids=["no room", "no tokens"]
)
def test_what_the_policy_cannot_read_is_refused_also_where_it_is_not_looked_at(text: str, reason: str) -> None:
    learner = Learner("trainer", build(SPEC, seed=1), Settings(), seed=1)
    task = TaskRef("digits/swap", 5, 1)
    answers = tuple((*BYTES.encode(words), BYTES.end) for words in (text, regenerate(task).key))
    report = learner.learn([], [], [score("s", RolloutGroup(task, answers, 0, "these", BYTES.id))])
    assert report.refused == {reason: 1} and not report.sampled


def test_which_groups_are_looked_at_follows_from_nothing_that_others_know() -> None:
    drawn = [RolloutAudit(versions()[-1], share=0.25)._rng.integers(1 << 40) for _ in range(2)]
    assert drawn[0] != drawn[1]
