"""Whether groups that others wrote for this node's policy were drawn from its weights: spot checks. Torch.

    audit = RolloutAudit(policy, share=0.25, seed=1)      # limits=BF16 where samplers may compute in 16 bits
    audit.remember(policy_hash)                           # the weights that the policy has now, for later
    audited = audit.check(groups)                         # a random share of each author's, at least one
    audited.passed, audited.caught                        # groups to learn from; authors who lied, and why

A group needs no proof beside it, as its tokens are one. What is drawn follows from the weights, the question and who
answers (`noise.py`), so that one pass with the same weights tells each token: Token-DiFR (2511.20621). Given tokens are
others only where two were all but equally good, by how much two machines round differently. Of a group that is looked
at, all must hold:

- the log-probabilities that came with it are those of these weights on average (`defence.misclaimed`);
- each of its answers is whole: it ends with the end token, or has as many tokens as an answer may have;
- its tokens are the drawn ones: what they fall short of them, in nats and at most CLIP each, adds up to no more than
  rounding, in it and in the author's last groups together.

So it is found who has other weights, older ones included, who draws otherwise, more than once, or from another's
identity, and who changes what was drawn, whatever log-probabilities he claims. Whose answers are copied has lost
nothing: under the copier's name they are not drawn. One lie costs an author all of its groups.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from swarmnode.training.rl.defence import Reading, misclaimed
from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.sampling import HONEST, Sampling, read

AUTHORS = 256  # of whom something is remembered; the one met first is forgotten first
POOLED = 64  # groups of an author that were looked at and count together
CLIP = 1.0  # nats: a token that cannot be drawn at all is no more of a lie than one that hardly can


@dataclass(frozen=True)
class Tolerance:
    """How far an honest sampler is from who reads it. Measured: `bench/proofs.py`, docs/rollouts.md."""

    logprobs: float  # nats, mean |claimed − recomputed| of a group's tokens
    margins: float  # nats, of all tokens together; for each thousand of them where there are more
    edge: float  # nats, of the last of the top k (`sampling.read_tokens`)


# Both compute in 32 bits: of log-probabilities, 8e-5 is seen, most of which is the 16 bits with which they travel.
FP32 = Tolerance(logprobs=2e-4, margins=1e-3, edge=1e-3)
BF16 = Tolerance(logprobs=0.018, margins=0.4, edge=0.1)  # one of them may compute in bf16


@dataclass(frozen=True)
class Audited:
    passed: tuple[Scored, ...]
    checked: Mapping[str, int]  # groups looked at, by author
    caught: Mapping[str, str]  # authors whose groups are lies, and by what they are
    refused: Counter[str]  # groups not passed, by reason: unknown-weights, dishonest


class RolloutAudit:
    """Holds the last weights of one policy, flat, and judges by a copy of it."""

    def __init__(
        self,
        policy: nn.Module,
        *,
        share: float,
        seed: int | None = None,
        how: Sampling = HONEST,
        keep: int = 5,
        limits: Tolerance = FP32,
    ) -> None:
        """`share` of each author's groups is looked at, by a lot that `seed` tells; `keep` versions are remembered."""
        self._policy, self._share, self._how, self._keep, self._limits = policy, share, how, keep, limits
        self._rng = np.random.default_rng(seed)
        self._judge: nn.Module | None = None
        self._weights: OrderedDict[str, torch.Tensor] = OrderedDict()  # by hash, (P,) each, the oldest first
        # What tokens fall short of the drawn ones, in nats, and how many they are, by author and group.
        self._short: dict[str, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=POOLED))

    def remember(self, policy_hash: str) -> None:
        """Keep the weights that others sample with from now on, called `policy_hash`: the policy's, as bf16."""
        with torch.no_grad():
            self._weights[policy_hash] = nn.utils.parameters_to_vector(self._policy.parameters()).bfloat16().cpu()
        self._weights.move_to_end(policy_hash)
        while len(self._weights) > self._keep:
            self._weights.popitem(last=False)

    def check(self, groups: Sequence[Scored]) -> Audited:
        """Look at some groups of each author; those of others than liars pass, if their weights are known here."""
        refused, checked = Counter[str](), Counter[str]()
        caught: dict[str, str] = {}
        known = [scored for scored in groups if scored.group.policy in self._weights]
        refused["unknown-weights"] += len(groups) - len(known)
        by_policy: dict[str, list[Scored]] = defaultdict(list)
        for scored in self._drawn_by_lot(known):
            by_policy[scored.group.policy].append(scored)
            checked[scored.author] += 1
        for policy_hash, chosen in by_policy.items():
            readings = read(self._judged(policy_hash), chosen, self._how, edge=self._limits.edge)
            for scored, reading in zip(chosen, readings, strict=True):
                reason = self._lie(scored, reading)
                if reason:
                    caught.setdefault(scored.author, reason)
        while len(self._short) > AUTHORS:
            del self._short[next(iter(self._short))]
        passed = tuple(scored for scored in known if scored.author not in caught)
        refused["dishonest"] += len(known) - len(passed)
        return Audited(passed, checked, caught, +refused)

    def _drawn_by_lot(self, groups: Sequence[Scored]) -> list[Scored]:
        of_author: dict[str, list[Scored]] = defaultdict(list)
        for scored in groups:
            of_author[scored.author].append(scored)
        return [
            theirs[int(index)]
            for theirs in of_author.values()
            for index in self._rng.permutation(len(theirs))[: max(1, int(np.ceil(self._share * len(theirs))))]
        ]

    def _judged(self, policy_hash: str) -> nn.Module:
        """A copy of the policy with the weights of that hash."""
        if self._judge is None:
            self._judge = copy.deepcopy(self._policy)
        with torch.no_grad():
            whole = self._weights[policy_hash].to(next(self._policy.parameters()), copy=True)
            nn.utils.vector_to_parameters(whole, self._judge.parameters())
        return self._judge

    def _lie(self, scored: Scored, reading: Reading) -> str:
        """Why this group is not what it claims: unreadable, no-logprobs, logprobs, unfinished, not-drawn; or ""."""
        reason = misclaimed(reading, scored.group.logprobs, self._limits.logprobs)
        if reason:
            return reason
        most, end = self._how.max_tokens, scored.vocabulary.end
        if any(len(each) > most or (len(each) < most and each[-1] != end) for each in scored.group.answers):
            return "unfinished"
        short = np.concatenate([each.margins for each in reading if each is not None and each.margins is not None])
        pooled = self._short[scored.author]
        pooled.append((float(np.minimum(short, CLIP).sum()), len(short)))
        return "" if self._is_rounding(pooled[-1]) and self._is_rounding(*pooled) else "not-drawn"

    def _is_rounding(self, *groups: tuple[float, int]) -> bool:
        nats, tokens = sum(nats for nats, _ in groups), sum(tokens for _, tokens in groups)
        return nats <= self._limits.margins * max(1.0, tokens / 1000)
