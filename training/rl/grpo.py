"""The losses: GRPO as SAPO uses it, and decoupled PPO for rollouts that an older policy wrote.

    logprobs = token_logprobs(policy, batch)                         # (N, T - 1), with a gradient
    loss = grpo_loss(logprobs, logprobs.detach(), batch, Clip())     # the one step of a SAPO round

With one step a round the ratio is 1 everywhere: a peer's text is learned from as if the own policy had written it,
and the clip does nothing yet. There is no KL term. Where several steps are taken on one batch, `proximal` is the
policy before the first of them; where log-probabilities of the policy that wrote the text are known, `decoupled_loss`
weighs each token by how much likelier the proximal policy finds it than its writer did. Texts that are known to be by
an older version of this very policy (`Batch.stale`) always are, whatever the others' correction is.

Shapes: N texts of T tokens at most, padded at the right; column t of a (N, T - 1) tensor is about token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.training.rl.policies import Policy


@dataclass(frozen=True)
class Clip:
    """How far one token's ratio may carry the policy."""

    low: float = 0.2  # below 1
    high: float = 0.28  # above 1: wider, so that unlikely tokens can rise (DAPO 2503.14476, section 3.1)
    cap: float = 4.0  # of the ratio where the advantage is negative, and of π_prox / π_behav (INTELLECT-2)


@dataclass(frozen=True)
class Batch:
    """Texts to learn from."""

    tokens: Tensor  # (N, T) prompts with answers, padded at the right with 0
    mask: Tensor  # (N, T - 1) float, 1 where the next token belongs to an answer
    advantages: Tensor  # (N,)
    behaviour: Tensor  # (N, T - 1) log-probabilities by the policy that wrote the tokens; 0 where unknown or masked
    known: Tensor  # (N,) bool: where `behaviour` is known
    stale: Tensor  # (N,) bool: written by an older version of this policy, as is proved


def pack(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    advantages: Sequence[float],
    behaviour: Sequence[Sequence[float] | None] | None = None,
    stale: Sequence[bool] | None = None,
) -> Batch:
    """Texts of unequal length as one batch; where `behaviour` is None, the writer's chances are unknown."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    N, T = len(lengths), max(lengths)
    mask, chances = torch.zeros(N, T - 1), torch.zeros(N, T - 1)
    known = torch.zeros(N, dtype=torch.bool)
    rows: list[int] = []
    columns: list[int] = []
    padded = [[*prompt, *answer, *[0] * (T - n)] for prompt, answer, n in zip(prompts, answers, lengths, strict=True)]
    tokens = torch.tensor(padded)
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        rows.extend([row] * (n - len(prompt)))
        columns.extend(range(len(prompt) - 1, n - 1))
    mask[rows, columns] = 1.0
    for row, given in enumerate(behaviour or ()):
        if given is not None:
            begin = len(prompts[row]) - 1
            chances[row, begin : begin + len(given)] = torch.tensor(given)
            known[row] = True
    older = torch.tensor(stale, dtype=torch.bool) if stale is not None else torch.zeros(N, dtype=torch.bool)
    return Batch(tokens, mask, torch.tensor(advantages, dtype=torch.float32), chances, known, older)


def token_logprobs(policy: Policy, tokens: Tensor) -> Tensor:
    """log π(token t + 1 | tokens up to t): (N, T - 1) from tokens (N, T)."""
    logits = policy(tokens[:, :-1])  # (N, T - 1, V)
    N, T, V = logits.shape
    return -F.cross_entropy(logits.reshape(N * T, V), tokens[:, 1:].reshape(N * T), reduction="none").view(N, T)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """min(r A, clip(r, 1 − low, 1 + high) A), the term of GRPO (2402.03300, eq. 3) with DAPO's bounds (eq. 8).

    Where A < 0 the term has no bound above; there r is first cut at `cap` (two-sided clipping, INTELLECT-2 2505.07291).
    """
    bounded = torch.where(advantages < 0, ratio.clamp(max=clip.cap), ratio)
    return torch.minimum(bounded * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all answer tokens of the batch (DAPO, eq. 12): long answers weigh as much as they have tokens."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def grpo_loss(logprobs: Tensor, proximal: Tensor, batch: Batch, clip: Clip) -> Tensor:
    """−J of GRPO without KL, token-level: SAPO's loss. `proximal` has no gradient."""
    return _weighed(torch.ones_like(proximal), logprobs, proximal, batch, clip)


def decoupled_loss(logprobs: Tensor, proximal: Tensor, batch: Batch, clip: Clip) -> Tensor:
    """−J of decoupled PPO (AReaL, 2505.24298): E Σ (π_prox / π_behav) · min(u A, clip(u) A), u = π / π_prox.

    Rollouts whose writer's chances are unknown count with weight 1, as in `grpo_loss`. The weight is cut at `cap`.
    """
    return _weighed(_decoupled(proximal, batch, clip), logprobs, proximal, batch, clip)


def tapered_loss(logprobs: Tensor, proximal: Tensor, batch: Batch, clip: Clip) -> Tensor:
    """−J of GRPO where answers worse than their group weigh min(1, π_prox / π_behav) of the answer (TOPR, 2503.14286).

    A wrong answer that this policy would never give teaches it nothing, but pushing it further down sharpens whatever
    the policy does already; policies that drift apart stop exploring so. Right answers weigh 1, however unlikely. A
    sender that lies about `behaviour` can lessen the weight of its own answers and never raise it above 1.
    """
    ratio = ((proximal - batch.behaviour) * batch.mask).sum(dim=1).exp().clamp(max=1.0)  # (N,)
    weight = torch.where(batch.known & (batch.advantages < 0), ratio, torch.ones_like(ratio))
    return _weighed(weight[:, None].expand_as(proximal), logprobs, proximal, batch, clip)


def _decoupled(proximal: Tensor, batch: Batch, clip: Clip) -> Tensor:
    """min(cap, π_prox / π_behav) of each token (N, T - 1), 1 where the writer's chances are unknown."""
    weight = (proximal - batch.behaviour).exp().clamp(max=clip.cap)
    return torch.where(batch.known[:, None], weight, torch.ones_like(weight))


def _weighed(weight: Tensor, logprobs: Tensor, proximal: Tensor, batch: Batch, clip: Clip) -> Tensor:
    """−J with these weights (N, T - 1) of the clipped surrogate."""
    weight = torch.where(batch.stale[:, None], _decoupled(proximal, batch, clip), weight)
    surrogate = clipped_surrogate((logprobs - proximal).exp(), batch.advantages[:, None], clip)
    return -token_mean(weight * surrogate, batch.mask)


def supervised_loss(logprobs: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats of the answers' tokens: the warm-up that teaches a form."""
    return -token_mean(logprobs, batch.mask)
