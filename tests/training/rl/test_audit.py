"""Who sampled with a policy's weights passes its audit always; who did not, or proves nothing, is caught."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from sentweights import as_sent

from swarmnode.training.rl.groups import RolloutGroup, Scored, score
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, TinyGPT, build, parameter_hash
from swarmnode.training.rl.proofs import RolloutAudit
from swarmnode.training.rl.sampling import Sampling
from swarmnode.training.rl.tasks import NAMES, TaskRef, well_formed

SPEC = PolicySpec(layers=1, width=48, heads=4)
TASKS = [TaskRef(NAMES[n % len(NAMES)], 5, n) for n in range(8)]


@cache
def versions() -> list[TinyGPT]:
    """A policy before each of some updates, and after the last."""
    learner = Learner("trainer", build(SPEC, seed=1), Settings(), seed=1)
    learner.warm_up(well_formed)
    seen = [as_sent(copy.deepcopy(learner.policy))]
    for _ in range(24):
        learner.learn(learner.sample(), [])
        seen.append(as_sent(copy.deepcopy(learner.policy)))
    return seen


def sampled(by: torch.nn.Module, *, says: torch.nn.Module | None = None, seed: int = 1, who: str = "s") -> list[Scored]:
    """What a node writes with the weights of `by`, as written with those of `says`."""
    sampler = Learner(who, copy.deepcopy(by), Settings(), seed=seed)
    groups = sampler.answer(TASKS, policy=parameter_hash(by if says is None else says))
    return [score(who, group) for group in groups]


def an_audit(share: float = 0.25, seed: int = 1) -> RolloutAudit:
    """That of the trainer at the last version, which remembers the one before as well."""
    policy = copy.deepcopy(versions()[-1])
    audit = RolloutAudit(policy, share=share, seed=seed)
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


def test_another_policy_is_caught_though_it_claims_what_a_prefill_says() -> None:
    claims = Learner("s", copy.deepcopy(versions()[-1]), Settings(), seed=1)
    other = sampled(build(SPEC, seed=9), says=versions()[-1])
    forged = [changed(scored, **_prefilled(claims.policy, scored)) for scored in other]
    verdict = an_audit(share=1.0).check(forged)
    assert verdict.caught == {"s": "not-sampled"}, (
        "activations and log-probabilities are right, the tokens are not drawn"
    )


def _prefilled(policy: torch.nn.Module, scored: Scored) -> dict[str, object]:
    """Log-probabilities and proof that these weights give for somebody else's tokens."""
    from swarmnode.training.rl.proofs import commit
    from swarmnode.training.rl.sampling import read

    (reading,) = read(policy, [scored], Sampling(traced=True))
    tokens = [answer for answer in reading if answer is not None]
    (proof,) = commit([np.concatenate([answer.activations for answer in tokens if answer.activations is not None])])
    return {"logprobs": tuple(tuple(answer.logprobs.tolist()) for answer in tokens), "proof": proof}


def test_empty_copied_and_malformed_proofs_never_pass() -> None:
    groups = sampled(versions()[-1])
    others = sampled(versions()[-1], seed=2)
    for forged, reason in (
        ([changed(each, proof=b"") for each in groups], "no-proof"),
        ([changed(each, proof=each.group.proof[:-2]) for each in groups], "no-proof"),
        ([changed(each, proof=bytes(len(each.group.proof))) for each in groups], "other-activations"),
        ([changed(each, logprobs=None) for each in groups], "no-logprobs"),
    ):
        assert an_audit().check(forged).caught == {"s": reason}
    shifted = [
        changed(each, proof=other.group.proof) for each, other in zip(groups, others[1:] + others[:1], strict=True)
    ]
    assert set(an_audit(share=1.0).check(shifted).caught) == {"s"}


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


def test_groups_keep_their_proof_on_the_way() -> None:
    group = sampled(versions()[-1])[0].group
    again = RolloutGroup.from_map(group.to_map())
    assert again == replace(group, logprobs=again.logprobs) and group.proof


@pytest.mark.parametrize(("temperature", "batches"), [(0.0, 1), (0.5, 40)])
def test_who_draws_otherwise_is_caught_though_it_claims_what_a_prefill_says(temperature: float, batches: int) -> None:
    audit, policy = an_audit(share=0.25), versions()[-1]
    sampler = Learner("s", copy.deepcopy(policy), Settings(sampling=Sampling(temperature=temperature)), seed=1)
    for number in range(batches):
        tasks = [TaskRef(NAMES[n % len(NAMES)], 5, 100 * number + n) for n in range(8)]
        groups = [score("s", group) for group in sampler.answer(tasks, policy=parameter_hash(policy))]
        verdict = audit.check([changed(each, **_prefilled(policy, each)) for each in groups])
        if verdict.caught:
            break
    assert verdict.caught == {"s": "not-sampled"}
