"""Each loss is its formula, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from swarmnode.training.rl.grpo import (
    Batch,
    Clip,
    clipped_surrogate,
    decoupled_loss,
    grpo_loss,
    pack,
    supervised_loss,
    tapered_loss,
    token_logprobs,
    token_mean,
)
from swarmnode.training.rl.policies import PolicySpec, build

CLIP = Clip(low=0.2, high=0.28, cap=4.0)


@pytest.mark.parametrize(
    "ratio, advantage, value",
    [
        (1.0, 2.0, 2.0),
        (1.5, 2.0, 2.56),  # cut at 1.28
        (0.5, 2.0, 1.0),  # a good token that got rarer is not cut
        (0.5, -2.0, -1.6),  # cut at 0.8
        (1.5, -2.0, -3.0),  # a bad token that got likelier is not cut
        (9.0, -2.0, -8.0),  # but for the cap of 4
    ],
)
def test_the_surrogate_is_cut_where_it_would_carry_too_far(ratio: float, advantage: float, value: float) -> None:
    assert clipped_surrogate(torch.tensor(ratio), torch.tensor(advantage), CLIP).item() == pytest.approx(value)


def test_long_answers_weigh_as_much_as_they_have_tokens() -> None:
    values, mask = torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]]), torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    assert token_mean(values, mask).item() == pytest.approx(10 / 4)
    assert token_mean(values, torch.zeros(2, 3)).item() == 0


def a_batch(behaviour: list[list[float] | None] | None = None) -> Batch:
    """Two answers of one token to prompts of one: advantages 1 and −1."""
    return pack([[1], [1]], [[2], [3]], [1.0, -1.0], behaviour)


def test_the_one_step_of_a_sapo_round_is_the_policy_gradient() -> None:
    logprobs = torch.log(torch.tensor([[0.5], [0.25]])).requires_grad_()
    loss = grpo_loss(logprobs, logprobs.detach(), a_batch(), CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(0.0)
    # d/dlogp of −mean(ratio · A) at ratio 1 is −A / 2.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5], [0.5]]))


def test_a_second_step_is_held_by_the_clip() -> None:
    logprobs = torch.log(torch.tensor([[0.8], [0.1]])).requires_grad_()
    proximal = torch.log(torch.tensor([[0.5], [0.25]]))  # ratios 1.6 and 0.4
    loss = grpo_loss(logprobs, proximal, a_batch(), CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 - 0.8) / 2)
    torch.testing.assert_close(logprobs.grad, torch.zeros(2, 1))


def test_decoupled_ppo_weighs_by_how_much_likelier_the_proximal_policy_finds_a_token() -> None:
    logprobs = torch.log(torch.tensor([[0.6], [0.25]]))
    proximal = torch.log(torch.tensor([[0.5], [0.25]]))  # u: 1.2 and 1
    loss = decoupled_loss(logprobs, proximal, a_batch([[math.log(0.25)], None]), CLIP)  # weights 2 and, unknown, 1
    assert loss.item() == pytest.approx(-(2 * 1.2 - 1) / 2)
    far = decoupled_loss(logprobs, proximal, a_batch([[math.log(0.001)], None]), CLIP)  # weight 500, cut at 4
    assert far.item() == pytest.approx(-(4 * 1.2 - 1) / 2)


def test_on_policy_all_corrections_are_grpo() -> None:
    logprobs = torch.log(torch.tensor([[0.5], [0.25]]))
    batch = a_batch([[math.log(0.5)], [math.log(0.25)]])
    for loss in (decoupled_loss, tapered_loss):
        torch.testing.assert_close(loss(logprobs, logprobs, batch, CLIP), grpo_loss(logprobs, logprobs, batch, CLIP))


def test_a_wrong_answer_that_we_would_not_give_weighs_what_we_would_give_it() -> None:
    logprobs = torch.log(torch.tensor([[0.01], [0.02]]))
    batch = a_batch([[math.log(0.5)], [math.log(0.2)]])
    assert tapered_loss(logprobs, logprobs, batch, CLIP).item() == pytest.approx(-(1 - 0.1) / 2)
    liar = a_batch([[math.log(0.5)], [math.log(1e-9)]])  # no claim lifts a weight above 1
    assert tapered_loss(logprobs, logprobs, liar, CLIP).item() == pytest.approx(0.0)


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
