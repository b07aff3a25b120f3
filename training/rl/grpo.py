"""From groups of answers to one loss: which groups a batch has, then GRPO as SAPO uses it. Torch.

    taken, refused = choose(pool, Split(own=4, external=4), BatchLimits(), rng)      # of others, beside the own groups
    logprobs = token_logprobs(policy, batch)                         # (N, T - 1), with a gradient
    loss = grpo_loss(logprobs, batch, correction="taper")             # an update: one in a SAPO round

**The choice**: I groups of a node's own and J of others', so that no peer owns the batch. SAPO (2509.08721) drops
external groups without advantage, then draws J uniformly: that filter is what makes sharing work. Added here: a cap on
what one author may have in a batch, because half poison and half gibberish passes the filter by design ("Hail to the
Thief", 2511.09780). How many to take from others is learned too (`AdaptiveSplit`).

**The loss**: each group is in one update only, so the ratio is 1 everywhere, and there is nothing to clip: a peer's
text is learned from as if the own policy had written it. There is no KL term. Where log-probabilities of the policy
that wrote a text are known, `correction` may weigh them: "taper" lets wrong answers weigh as much as this policy is
likely to give them, "decoupled" weighs each token by decoupled PPO. Texts that are known to be by an older version of
this very policy (`Batch.stale`) are weighed by that, whatever is done with others'.

Shapes: N texts of T tokens at most, padded at the right; column t of a (N, T - 1) tensor is about token t + 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.policies import Policy, rows_at_once

ON_PROBATION = 0.25  # of the share of an author, for one on probation


@dataclass(frozen=True)
class Split:
    """I and J: groups of one's own and of others in a batch."""

    own: int = 4
    external: int = 4
    least: int = 0  # groups of which an author has its share, where fewer are there; 0: of all of these

    def room(self, own: Sequence[Scored], external: int) -> Split:
        """I and J of a batch in which these own groups stand."""
        return Split(len(own), external)

    def updates(self, groups: Sequence[Scored], rng: np.random.Generator) -> list[Sequence[Scored]]:
        """The groups of each update of a round: one of all."""
        return [groups]


@dataclass(frozen=True)
class BatchLimits:
    share: float = 0.25  # of what there is to learn from, that one author may have; at least one group
    probation: float = 0.125  # of that, what all authors on probation may have together; at least one group
    filtered: bool = True  # drop external groups without advantage; False only to show what that costs


def poison_budget(batch: int, share: float) -> int:
    """How many groups are `share` of a batch of `batch`, at least one.

    Whatever else gets past the defences, an author's part in what is learned is at most this.
    """
    return max(1, int(batch * share))


def choose(
    pool: Sequence[Scored],
    split: Split,
    limits: BatchLimits,
    rng: np.random.Generator,
    *,
    author: str = "",
    probation: Collection[str] = (),
) -> tuple[list[Scored], Counter[str]]:
    """Others' groups in the batch of a round, and how many are left out, by reason.

    Fewer than J come where the pool has no more. `author` is our own name; `probation` are authors of whom little is
    known yet. Reasons: own, uninformative, capped, probation, not-drawn.
    """
    refused: Counter[str] = Counter()
    fit: list[Scored] = []
    for scored in pool:
        if scored.author == author:
            refused["own"] += 1
        elif limits.filtered and not scored.informative:
            refused["uninformative"] += 1
        else:
            fit.append(scored)
    held = Counter(scored.author for scored in fit if scored.author not in probation)
    total = split.own + split.external
    least = split.least or total
    for _ in range(total):  # until nobody's share is wider by what is too many of its own, or by newcomers
        most = poison_budget(total, limits.share)
        total = max(least, split.own + min(split.external, sum(min(count, most) for count in held.values())))
    taken: list[Scored] = []
    shares: Counter[str] = Counter()
    of_probation = 0
    for index in rng.permutation(len(fit)).tolist():
        scored = fit[index]
        on_probation = scored.author in probation
        share = limits.share * ON_PROBATION if on_probation else limits.share
        if len(taken) == split.external:
            refused["not-drawn"] += 1
        elif shares[scored.author] >= poison_budget(total, share):
            refused["capped"] += 1
        elif on_probation and of_probation >= poison_budget(total, limits.probation):
            refused["probation"] += 1
        else:
            taken.append(scored)
            shares[scored.author] += 1
            of_probation += on_probation
    return taken, refused


@dataclass(frozen=True)
class AdaptiveSplit:
    """How many groups to take from others: all that teach, `external` of them at most, unless they hurt.

    A group that is all right or all wrong teaches nothing. So a node asks itself as much as if it were alone, and what
    others ask and answer comes on top. All of it in one update would move a policy as far as a few groups do, since a
    step of Adam is as long whatever the gradient: a round has an update for every `step` groups, in random order.

    Now and then a node tries several bounds of J on the groups of one round, each from the same parameters, and
    measures how much its updates gain on the same held-out questions (`observe`). What a good bound adds to that is a
    quarter of what chance does (docs/results.md), so that trials can show harm, and not which of two good bounds is
    better: the bound is the greatest that gained no less than any smaller one, within `sure` standard errors over the
    last trials; 0 where all hurt. Trials go on then, and the bound rises again once they show no harm.
    """

    own: int = 8  # I, the questions that a node asks itself
    candidates: tuple[int, ...] = (0, 8, 24)  # bounds of J
    step: int = 3  # groups of an update
    memory: int = 12  # trials that count
    least: int = 5  # trials before the bound moves
    every: int = 10  # rounds between two trials
    sure: float = 2.0  # standard errors
    external: int = 24  # the bound now
    trials: tuple[Mapping[int, float], ...] = ()  # what a step with each bound gained, the latest last

    def room(self, own: Sequence[Scored], external: int) -> Split:
        """Own groups that teach, and how many of others' are taken beside them."""
        return Split(sum(scored.informative for scored in own), external, self.own)

    def updates(self, groups: Sequence[Scored], rng: np.random.Generator) -> list[Sequence[Scored]]:
        """The groups of each update of a round, alike in number: those that teach, in random order."""
        teaching = [scored for scored in groups if scored.informative]
        parts = np.array_split(rng.permutation(len(teaching)), max(1, -(-len(teaching) // self.step)))
        return [[teaching[index] for index in part] for part in parts]

    def due(self, round: int) -> bool:
        return round % self.every == 0

    def observe(self, gained: Mapping[int, float]) -> AdaptiveSplit:
        """After a trial: what a step with each bound gained on held-out questions."""
        trials = (*self.trials, gained)[-self.memory :]
        if len(trials) < self.least:
            return replace(self, trials=trials)

        def hurts(external: int, fewer: int) -> bool:
            lost = [trial[fewer] - trial[external] for trial in trials]
            return mean(lost) > self.sure * stdev(lost) / math.sqrt(len(lost))

        bounds = sorted(self.candidates)
        fit = [bound for at, bound in enumerate(bounds) if not any(hurts(bound, fewer) for fewer in bounds[:at])]
        return replace(self, trials=trials, external=fit[-1])


# -- losses


CAP = 4.0  # of π / π_behav, by which text of an older version weighs (INTELLECT-2, 2505.07291)


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # (N, T) prompts with answers, padded at the right with 0
    mask: Tensor  # (N, T - 1) float, 1 where the next token belongs to an answer
    advantages: Tensor  # (N,)
    behaviour: Tensor  # (N, T - 1) log-probabilities by the policy that wrote the tokens; 0 where unknown or masked
    known: Tensor  # (N,) bool: where `behaviour` is known
    stale: Tensor  # (N,) bool: written by an older version of this policy, as is proved

    def passes(self, policy: Policy) -> Iterator[tuple[Batch, float]]:
        """The texts in parts for which one pass is made, each with its share of the tokens that are learned from."""
        rows, answers = rows_at_once(policy, self.tokens.shape[1]), self.mask.sum().clamp(min=1)
        for first in range(0, len(self.tokens), rows):
            part = Batch(**{name: values[first : first + rows] for name, values in vars(self).items()})
            yield part, float(part.mask.sum() / answers)


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
    padded = [[*prompt, *answer, *[0] * (T - n)] for prompt, answer, n in zip(prompts, answers, lengths, strict=True)]
    tokens = torch.tensor(padded)
    following = torch.arange(1, T)
    begins = torch.tensor([[len(prompt)] for prompt in prompts])
    mask = ((begins <= following) & (following < torch.tensor(lengths)[:, None])).float()
    chances, known = torch.zeros(N, T - 1), torch.zeros(N, dtype=torch.bool)
    for row, given in enumerate(behaviour or ()):
        if given is not None:
            begin = len(prompts[row]) - 1
            chances[row, begin : begin + len(given)] = torch.tensor(given)
            known[row] = True
    older = torch.tensor(stale, dtype=torch.bool) if stale is not None else torch.zeros(N, dtype=torch.bool)
    return Batch(tokens, mask, torch.tensor(advantages, dtype=torch.float32), chances, known, older)


def token_logprobs(policy: Policy, tokens: Tensor) -> Tensor:
    """log π(token t + 1 | tokens up to t): (N, T - 1) from tokens (N, T), where these are."""
    logits = policy(tokens[:, :-1])  # (N, T - 1, V)
    N, T, V = logits.shape
    following = tokens[:, 1:].reshape(N * T).to(logits.device)
    losses = F.cross_entropy(logits.reshape(N * T, V), following, reduction="none").view(N, T)
    return -losses.to(tokens.device)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all answer tokens of the batch (DAPO, eq. 12): long answers weigh as much as they have tokens."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def grpo_loss(logprobs: Tensor, batch: Batch, *, correction: str = "none") -> Tensor:
    """−J of GRPO (2402.03300, eq. 3) without KL, by token; `logprobs` (N, T - 1) are those of the policy that steps.

    `correction`, of texts that others wrote: none, taper or decoupled.
    """
    now = logprobs.detach()
    weight = tapering(now, batch)[:, None].expand_as(now) if correction == "taper" else torch.ones_like(now)
    weight = torch.where(batch.stale[:, None] | (correction == "decoupled"), decoupling(now, batch), weight)
    ratio = (logprobs - now).exp()  # 1; its gradient is that of `logprobs`
    return -token_mean(weight * ratio * batch.advantages[:, None], batch.mask)


def decoupling(now: Tensor, batch: Batch) -> Tensor:
    """min(CAP, π / π_behav) of each token (N, T - 1): decoupled PPO (AReaL, 2505.24298) before its second step.

    1 where the writer's chances are unknown.
    """
    weight = (now - batch.behaviour).exp().clamp(max=CAP)
    return torch.where(batch.known[:, None], weight, torch.ones_like(weight))


def tapering(now: Tensor, batch: Batch) -> Tensor:
    """(N,) min(1, π / π_behav) of answers that are worse than their group, 1 of others (TOPR, 2503.14286).

    A wrong answer that this policy would never give teaches it nothing, but pushing it further down sharpens whatever
    the policy does already; policies that drift apart stop exploring so. Right answers weigh 1, however unlikely. A
    sender that lies about `behaviour` can lessen the weight of its own answers and never raise it above 1.
    """
    ratio = ((now - batch.behaviour) * batch.mask).sum(dim=1).exp().clamp(max=1.0)
    return torch.where(batch.known & (batch.advantages < 0), ratio, torch.ones_like(ratio))


def supervised_loss(logprobs: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats of the answers' tokens: the warm-up that teaches a form."""
    return -token_mean(logprobs, batch.mask)
