"""Rollouts that were not drawn from the model they claim are told from those that were; strange ones are kept out."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnode.training.rl.defence import (
    TokenGate,
    TokenReading,
    gate,
    misclaimed,
)
from swarmnode.training.rl.groups import RolloutGroup, Scored, score
from swarmnode.training.rl.policies import PolicySpec, TinyGPT, build
from swarmnode.training.rl.sampling import Sampling, read, sample
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.vocabulary import DIGITS

APART = 1e-4  # nats
POOLED = 8  # groups that a test pools, of 8 answers each


def token_reading(logits: NDArray[np.floating], tokens: NDArray[np.int64]) -> TokenReading:
    """A reading from logits (T, V), before each of `tokens` (T,)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # (T, V)
    of_tokens = logp[np.arange(len(tokens)), tokens]
    return TokenReading(of_tokens.astype(np.float32), (logp > of_tokens[:, None]).sum(axis=-1))


@cache
def a_policy(seed: int = 1) -> TinyGPT:
    return build(PolicySpec(layers=1, width=32), seed=seed)


def rollouts(policy: TinyGPT, seed: int, how: Sampling | None = None) -> list[Scored]:
    refs = [TaskRef("digits/swap", 5, 1000 * seed + n) for n in range(POOLED)]
    prompts = [DIGITS.encode(score_question(ref)) for ref in refs]
    answers = sample(policy, prompts, replace(how or Sampling(), copies=8), [ref.seed for ref in refs])
    return [
        score(
            "peer",
            RolloutGroup(
                ref,
                tuple(answer.tokens for answer in answers[8 * n : 8 * n + 8]),
                0,
                "",
                DIGITS.id,
                tuple(answer.logprobs for answer in answers[8 * n : 8 * n + 8]),
            ),
        )
        for n, ref in enumerate(refs)
    ]


def score_question(ref: TaskRef) -> str:
    from swarmnode.training.rl.tasks import regenerate

    return regenerate(ref).prompt


def verdict(groups: list[Scored]) -> str:
    readings, claimed = read(a_policy(), groups), [scored.group.logprobs for scored in groups]
    return max(misclaimed(reading, of_group, APART) for reading, of_group in zip(readings, claimed, strict=True))


def test_honest_rollouts_are_never_refused() -> None:
    assert [verdict(rollouts(a_policy(), seed)) for seed in range(40)] == [""] * 40


def test_another_model_is_always_refused() -> None:
    assert {verdict(rollouts(a_policy(2), seed)) for seed in range(20)} == {"logprobs"}


def test_a_policy_some_steps_stale_is_refused_by_its_log_probabilities() -> None:
    stale = copy.deepcopy(a_policy())
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert {verdict(rollouts(stale, seed)) for seed in range(10)} == {"logprobs"}


def test_who_claims_nothing_or_too_little_proves_nothing() -> None:
    groups = rollouts(a_policy(), 1)
    readings = read(a_policy(), groups)
    claimed = [scored.group.logprobs for scored in groups]
    assert misclaimed(readings[0], None, APART) == "no-logprobs"
    assert misclaimed(readings[0], (), APART) == "no-logprobs"
    assert misclaimed(readings[0], ((),) * 8, APART) == "no-logprobs"
    assert misclaimed([None, *readings[0][1:]], claimed[0], APART) == "unreadable"


def test_claims_that_are_no_numbers_do_not_pass() -> None:
    groups = rollouts(a_policy(), 1)
    readings = read(a_policy(), groups)
    claimed = tuple(tuple(float("nan") for _ in values) for values in groups[0].group.logprobs or ())
    assert misclaimed(readings[0], claimed, APART) == "logprobs"


def test_numpy_and_torch_read_alike() -> None:
    [scored] = rollouts(a_policy(), 1)[:1]
    [reading] = read(a_policy(), [scored])
    prompt = DIGITS.encode(scored.question.prompt)
    for answer, seen in zip(scored.group.answers, reading, strict=True):
        with torch.no_grad():
            logits = a_policy()(torch.tensor([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :].numpy()
        again = token_reading(logits, np.array(answer))
        assert seen is not None
        np.testing.assert_allclose(seen.logprobs, again.logprobs, atol=1e-5)
        np.testing.assert_array_equal(seen.ranks, again.ranks)


def of_likelihood(*chances: float) -> TokenReading:
    values = np.log(np.array(chances, np.float32))
    return TokenReading(values, np.where(values < np.log(0.01), 20, 0))


USUAL, STRANGE = of_likelihood(0.2, 0.2, 0.9), of_likelihood(1e-4, 0.2, 0.9)


def test_one_strange_answer_is_left_out_and_many_cost_the_group() -> None:
    assert gate([(STRANGE, *[USUAL] * 7)], TokenGate()).tolist() == [False] + [True] * 7
    assert not gate([(STRANGE,) * 4 + (USUAL,) * 4], TokenGate()).any()


def test_what_the_policy_or_its_reference_knows_is_not_strange() -> None:
    assert gate([(STRANGE,) * 8, (USUAL,) * 8], TokenGate()).all()
    assert gate([(USUAL,) * 8, (STRANGE,) * 8], TokenGate()).all()


def test_an_answer_that_cannot_be_read_is_refused() -> None:
    assert gate([(None, *[USUAL] * 7)], TokenGate()).tolist() == [False] + [True] * 7


def test_rank_counts_beside_likelihood() -> None:
    far = TokenReading(USUAL.logprobs, np.array([0, 12, 0]))
    assert not gate([(far,) * 8], TokenGate(top_k=12)).any()
    assert gate([(far,) * 8], TokenGate(top_k=13)).all()
