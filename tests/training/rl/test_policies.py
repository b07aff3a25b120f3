"""A policy samples from its cache what it would write without one, and says how likely that was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from swarmnode.training.rl.policies import PolicySpec, build, parameter_hash
from swarmnode.training.rl.sampling import Sampling, sample, tempered
from swarmnode.training.rl.vocabulary import BYTES, DIGITS

SPECS = [
    PolicySpec("gpt", layers=2, width=32, heads=4),
    PolicySpec("gpt", layers=1, width=16, vocabulary=BYTES.id, context=24),
    PolicySpec("gru", layers=2, width=24),
    PolicySpec("gru", layers=1, width=32, vocabulary=BYTES.id),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_cache_changes_no_logit(spec: PolicySpec) -> None:
    policy = build(spec, seed=1)
    tokens = torch.randint(policy.vocabulary.size, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = policy(tokens)  # (3, 9, V)
        logits, state = policy.begin(tokens[:, :4])
        torch.testing.assert_close(logits, whole[:, 3], atol=1e-5, rtol=1e-4)
        state = state.repeat(2).kept(torch.tensor([0, 2, 4]))  # each row once again
        for place in range(4, 9):
            logits, state = policy.step(tokens[:, place], state)
            torch.testing.assert_close(logits, whole[:, place], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_follows_does_not_change_what_came_before(spec: PolicySpec) -> None:
    policy = build(spec, seed=1)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    other = tokens.clone()
    other[0, 6] = 3
    with torch.no_grad():
        torch.testing.assert_close(policy(tokens)[:, :6], policy(other)[:, :6])
        assert not torch.equal(policy(tokens)[:, 6], policy(other)[:, 6])


def test_parameters_follow_from_the_seed_and_leave_torchs_own_chance_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (build(PolicySpec(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert parameter_hash(first) == parameter_hash(again) != parameter_hash(other)
    with torch.no_grad():
        next(again.parameters())[0, 0] += 1e-6
    assert parameter_hash(first) != parameter_hash(again)


def test_log_probabilities_are_those_of_a_prefill() -> None:
    policy = build(PolicySpec(), seed=1)
    prompts = [DIGITS.encode("a304="), DIGITS.encode("a3="), DIGITS.encode("b111=")]
    how = Sampling(max_tokens=6, temperature=0.8, top_k=12, copies=4)
    answers = sample(policy, prompts, how, [1, 2, 3])
    assert len(answers) == 12
    for index, answer in enumerate(answers):
        prompt = prompts[index // 4]
        tokens = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            logprobs = tempered(policy(tokens[:, :-1]), how)[0, len(prompt) - 1 :]  # (T, V)
        expected = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=1e-4)


def test_answers_end_with_the_end_token_or_at_the_limit() -> None:
    policy = build(PolicySpec(), seed=1)
    answers = sample(policy, [[1, 2]], Sampling(max_tokens=5, copies=200), [1])
    ends = [answer.tokens.index(DIGITS.end) if DIGITS.end in answer.tokens else None for answer in answers]
    assert any(end is not None for end in ends) and any(end is None for end in ends)
    for answer, end in zip(answers, ends, strict=True):
        assert len(answer.tokens) == len(answer.logprobs) == (5 if end is None else end + 1)


def test_tokens_are_drawn_as_often_as_the_policy_says() -> None:
    policy = build(PolicySpec(), seed=1)
    with torch.no_grad():
        chances = F.softmax(policy(torch.tensor([[1, 2]]))[0, -1], dim=-1)  # (V,)
    answers = sample(policy, [[1, 2]], Sampling(max_tokens=1, copies=20_000), [1])
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=DIGITS.size)
    expected = 20_000 * chances
    chi_squared = float(((counts - expected).square() / expected).sum())
    assert chi_squared < 52  # 99.9 % of draws with 24 degrees of freedom


def test_temperature_zero_is_greedy_and_top_k_leaves_the_rest_out() -> None:
    policy = build(PolicySpec(), seed=1)
    greedy = sample(policy, [[1, 2]], Sampling(max_tokens=3, temperature=0, copies=3), [1])
    assert len({answer.tokens for answer in greedy}) == 1
    with torch.no_grad():
        best = set(policy(torch.tensor([[1, 2]]))[0, -1].topk(3).indices.tolist())
    drawn = sample(policy, [[1, 2]], Sampling(max_tokens=1, top_k=3, copies=300), [1])
    assert {answer.tokens[0] for answer in drawn} == best


def test_a_prompt_beyond_the_context_is_an_error() -> None:
    policy = build(PolicySpec(context=8), seed=1)
    with pytest.raises(ValueError, match="context of 8"):
        sample(policy, [[1] * 5], Sampling(max_tokens=4), [1])
