"""Each loss is its formula, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from swarmnode.training.rl.grpo import (
    Batch,
    grpo_loss,
    pack,
    supervised_loss,
    token_logprobs,
    token_mean,
)
from swarmnode.training.rl.policies import PolicySpec, build


def test_long_answers_weigh_as_much_as_they_have_tokens() -> None:
    values, mask = torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]]), torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    assert token_mean(values, mask).item() == pytest.approx(10 / 4)
    assert token_mean(values, torch.zeros(2, 3)).item() == 0


def a_batch(behaviour: list[list[float] | None] | None = None, *, stale: bool = False) -> Batch:
    """Two answers of one token to prompts of one: advantages 1 and −1."""
    return pack([[1], [1]], [[2], [3]], [1.0, -1.0], behaviour, [stale, stale])


def test_the_one_step_of_a_sapo_round_is_the_policy_gradient() -> None:
    logprobs = torch.log(torch.tensor([[0.5], [0.25]])).requires_grad_()
    loss = grpo_loss(logprobs, a_batch())
    loss.backward()
    assert loss.item() == pytest.approx(0.0)
    # d/dlogp of −mean(ratio · A) at ratio 1 is −A / 2.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5], [0.5]]))


def test_decoupled_ppo_weighs_by_how_much_likelier_the_policy_finds_a_token_than_its_older_self() -> None:
    logprobs = torch.log(torch.tensor([[0.5], [0.25]])).requires_grad_()
    loss = grpo_loss(logprobs, a_batch([[math.log(0.25)], None], stale=True))  # weights 2 and, unknown, 1
    loss.backward()
    assert loss.item() == pytest.approx(-(2 - 1) / 2)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0], [0.5]]))
    older = a_batch([[math.log(0.001)], None], stale=True)  # weight 500, cut at 4
    far = grpo_loss(logprobs, older, correction="taper")
    assert far.item() == pytest.approx(-(4 - 1) / 2)


def test_on_policy_all_corrections_are_grpo() -> None:
    logprobs = torch.log(torch.tensor([[0.5], [0.25]]))
    known = [[math.log(0.5)], [math.log(0.25)]]
    plain = grpo_loss(logprobs, a_batch(known))
    torch.testing.assert_close(grpo_loss(logprobs, a_batch(known), correction="taper"), plain)
    torch.testing.assert_close(grpo_loss(logprobs, a_batch(known, stale=True)), plain)


def test_decoupled_weighs_others_tokens_as_those_of_an_older_self() -> None:
    logprobs = torch.log(torch.tensor([[0.5], [0.25]]))
    behaviour = [[math.log(0.25)], [math.log(0.5)]]  # weights 2 and 0.5
    assert grpo_loss(logprobs, a_batch(behaviour), correction="decoupled").item() == pytest.approx(-(2 - 0.5) / 2)
    assert grpo_loss(logprobs, a_batch(behaviour), correction="none").item() == pytest.approx(0.0)


def test_a_wrong_answer_that_we_would_not_give_weighs_what_we_would_give_it() -> None:
    logprobs = torch.log(torch.tensor([[0.01], [0.02]]))
    batch = a_batch([[math.log(0.5)], [math.log(0.2)]])
    assert grpo_loss(logprobs, batch, correction="taper").item() == pytest.approx(-(1 - 0.1) / 2)
    liar = a_batch([[math.log(0.5)], [math.log(1e-9)]])  # no claim lifts a weight above 1
    assert grpo_loss(logprobs, liar, correction="taper").item() == pytest.approx(0.0)


def test_a_batch_is_padded_at_the_right_and_masks_all_but_answers() -> None:
    batch = pack([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]], [0.5, -0.5], [None, [-1.0, -2.0, -3.0]])
    assert batch.tokens.tolist() == [[1, 2, 3, 5, 6], [4, 7, 8, 9, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 0]]
    assert batch.behaviour.tolist() == [[0, 0, 0, 0], [-1, -2, -3, 0]]
    assert batch.known.tolist() == [False, True]


def test_token_logprobs_are_the_chances_of_what_follows() -> None:
    policy = build(PolicySpec(), seed=1)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = F.log_softmax(policy(tokens), dim=-1)[0, torch.arange(3), tokens[0, 1:]]
        torch.testing.assert_close(token_logprobs(policy, tokens)[0], expected)


def test_supervision_is_cross_entropy_of_answers() -> None:
    assert supervised_loss(torch.log(torch.tensor([[0.5], [0.25]])), a_batch()).item() == pytest.approx(math.log(8) / 2)
