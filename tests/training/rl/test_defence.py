"""Rollouts that were not drawn from the model they claim are told from those that were; strange ones are kept out."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarmnode.training.rl.defence import (
    SumOfDraws,
    TokenGate,
    TokenReading,
    gate,
    improbable,
    looks_drawn,
    misclaimed,
    repetition,
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
    p = np.exp(logp)
    surprise = np.where(p > 0, -logp, 0.0)
    entropy = (p * surprise).sum(axis=-1)
    of_tokens = logp[np.arange(len(tokens)), tokens]
    return TokenReading(
        of_tokens.astype(np.float32),
        (logp > of_tokens[:, None]).sum(axis=-1),
        entropy.astype(np.float32),
        ((p * surprise**2).sum(axis=-1) - entropy**2).astype(np.float32),
    )


@cache
def a_policy(seed: int = 1) -> TinyGPT:
    return build(PolicySpec(layers=1, width=32), seed=seed)


def rollouts(policy: TinyGPT, seed: int, how: Sampling | None = None) -> list[Scored]:
    refs = [TaskRef("digits/swap", 5, 1000 * seed + n) for n in range(POOLED)]
    prompts = [DIGITS.encode(score_question(ref)) for ref in refs]
    generator = torch.Generator().manual_seed(seed)
    answers = sample(policy, prompts, replace(how or Sampling(), copies=8), generator)
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


def verdict(groups: list[Scored], *, copied: bool = False) -> str:
    """With `copied`, the sender claims what a prefill says, as a liar can."""
    readings = read(a_policy(), groups)
    claimed = [scored.group.logprobs for scored in groups]
    if copied:
        claimed = [tuple(tuple(a.logprobs.tolist()) for a in reading if a) for reading in readings]
    reasons = {misclaimed(reading, of_group, APART) for reading, of_group in zip(readings, claimed, strict=True)}
    if reasons != {""}:
        return max(reasons)
    pooled = [SumOfDraws.of([answer for answer in reading if answer]) for reading in readings]
    return "" if looks_drawn(pooled) else "not-sampled"


def test_honest_rollouts_are_never_refused() -> None:
    assert [verdict(rollouts(a_policy(), seed)) for seed in range(40)] == [""] * 40


def test_another_model_is_always_refused_also_with_copied_claims() -> None:
    other = a_policy(2)
    assert {verdict(rollouts(other, seed)) for seed in range(20)} == {"logprobs"}
    assert [verdict(rollouts(other, seed), copied=True) for seed in range(20)] == ["not-sampled"] * 20


def test_a_policy_some_steps_stale_is_refused_by_its_log_probabilities() -> None:
    stale = copy.deepcopy(a_policy())
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert {verdict(rollouts(stale, seed)) for seed in range(10)} == {"logprobs"}


@pytest.mark.parametrize("how", [Sampling(temperature=0), Sampling(temperature=0.5), Sampling(top_k=4)], ids=str)
def test_tokens_that_were_picked_and_not_drawn_are_refused_with_copied_claims(how: Sampling) -> None:
    assert [verdict(rollouts(a_policy(), seed, how), copied=True) for seed in range(10)] == ["not-sampled"] * 10


def test_an_empty_or_short_proof_proves_nothing() -> None:
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
        for name in ("logprobs", "entropy", "variance"):
            np.testing.assert_allclose(getattr(seen, name), getattr(again, name), atol=1e-5)
        np.testing.assert_array_equal(seen.ranks, again.ranks)


def test_the_sampling_test_is_its_formula() -> None:
    # One place with chances 1/4 and 3/4: H and Var of log p by hand, and the rarer token was seen twice.
    p = np.array([0.25, 0.75])
    entropy = float(-(p * np.log(p)).sum())
    variance = float((p * np.log(p) ** 2).sum() - entropy**2)
    seen = token_reading(np.log(p)[None], np.array([0]))
    twice = SumOfDraws.of([seen, seen])
    assert twice.excess == pytest.approx(2 * (np.log(0.25) + entropy), rel=1e-5)
    assert twice.variance == pytest.approx(2 * variance, rel=1e-5)
    sure = token_reading(np.array([[0.0, -np.inf]]), np.array([0]))
    assert SumOfDraws.of([sure]) == SumOfDraws(0.0, 0.0, 0.0) and looks_drawn([SumOfDraws.of([sure])])


def of_likelihood(*chances: float) -> TokenReading:
    values = np.log(np.array(chances, np.float32))
    zeros = np.zeros(len(chances), np.float32)
    return TokenReading(values, np.where(values < np.log(0.01), 20, 0), zeros, zeros)


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
    far = TokenReading(USUAL.logprobs, np.array([0, 12, 0]), USUAL.entropy, USUAL.variance)
    assert not gate([(far,) * 8], TokenGate(top_k=12)).any()
    assert gate([(far,) * 8], TokenGate(top_k=13)).all()


def test_answers_that_are_more_alike_than_their_chances_are_improbable() -> None:
    alike, chance = [(4, 0, 24)] * 8, [np.log(0.04)] * 8
    assert repetition(alike, chance) > 15
    assert repetition(alike, [np.log(0.999)] * 8) == 0.0  # who is nearly sure answers alike
    assert repetition([(4, n, 24) for n in range(8)], chance) == 0.0


def test_honest_answers_are_not_improbable_however_many_are_pooled() -> None:
    rng = np.random.default_rng(1)
    for shape in (0.02, 0.2, 2.0):  # from nearly sure to nearly uniform
        surprises = []
        for _ in range(2000):
            p = rng.dirichlet([shape] * 25)
            drawn = rng.choice(25, 8, p=p)
            surprises.append(repetition([(int(answer),) for answer in drawn], [float(np.log(p[n])) for n in drawn]))
        assert max(improbable(surprises[n : n + 64]) for n in range(0, 2000, 8)) < 8.0
        assert np.mean(np.array(surprises) > 3.0) <= np.exp(-3.0)
    greedy = repetition([(1,)] * 8, [np.log(0.3)] * 8)
    assert improbable([greedy] * 8) > 20.0 > improbable([greedy])
