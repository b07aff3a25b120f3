"""Whether groups that others wrote for this node's policy were drawn from its weights: spot checks. Torch.

    audit = Audit(policy, share=0.25, seed=1)
    audit.remember(policy_hash)                           # the weights that the policy has now, for later
    verdict = audit.check(groups)                         # a random share of each author's, at least one
    verdict.passed, verdict.caught                        # groups to learn from; authors who lied, and why

A group that is looked at must have the proof of its activations (`proofs`), log-probabilities that the same weights
give again, and tokens that look drawn from them, pooled over the author's last groups (`defence`). Nothing else passes:
an empty proof, a copied one, or one of other weights, older ones included. In all groups, looked at or not, answers
must not be more alike than their log-probabilities let expect. One lie costs an author all of its groups.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from swarmnode.training.rl.defence import Proof, Reading, TokenReading, improbable, proven, repetition
from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.prefill import read
from swarmnode.training.rl.proofs import HALF, Tolerance, distances
from swarmnode.training.rl.sampling import Sampling

# Log-probabilities travel rounded, and bfloat16 on a GPU moves them by 1.2e-3; one update moves them by 3e-2.
SAME_WEIGHTS = Proof(top_k=1 << 30, logprob=5e-3, z=float("inf"))
POOLED = (16, 256)  # groups of an author that the sampling test pools: few tell soon, many tell small differences
EXACT = 5e-4  # nats, where both sides compute in 32 bits: 1.5e-4 at most was seen, 7e-4 at least of bfloat16 weights
AUTHORS = 256  # of whom something is remembered; the one met first is forgotten first
CLAIMED = 64  # groups of an author of which the answers' likeness is pooled
SURE = 20.0  # of `improbable`: 2e-9 of honest authors are beyond
Z = 6.0  # of the sampling test, which honest authors take in each round: 2e-9 of them are beyond


@dataclass(frozen=True)
class Audited:
    """What a check came to."""

    passed: tuple[Scored, ...]
    checked: Mapping[str, int]  # groups looked at, by author
    caught: Mapping[str, str]  # authors whose groups are lies, and by what they are
    refused: Counter[str]  # groups not passed, by reason: unknown-weights, dishonest


class Audit:
    """Holds the last weights of one policy, flat, and judges by a copy of it."""

    def __init__(
        self, policy: nn.Module, *, share: float, seed: int, how: Sampling | None = None, keep: int = 5
    ) -> None:
        """`share` of each author's groups is looked at; `keep` versions are remembered."""
        self._policy, self._share, self._keep = policy, share, keep
        self._how = how or Sampling()
        exact = all(parameter.dtype == torch.float32 for parameter in policy.parameters())
        self._tolerance = Tolerance() if exact else HALF
        self._same = replace(SAME_WEIGHTS, logprob=EXACT) if exact else SAME_WEIGHTS
        self._rng = np.random.default_rng([seed, 5])
        self._judge: nn.Module | None = None
        self._weights: OrderedDict[str, torch.Tensor] = OrderedDict()  # by hash, (P,) each, the oldest first
        self._alike: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=CLAIMED))
        self._drawn: dict[str, deque[tuple[float, float, float]]] = defaultdict(lambda: deque(maxlen=max(POOLED)))

    def remember(self, policy_hash: str) -> None:
        """Keep the weights that the policy has now, called `policy_hash`."""
        with torch.no_grad():
            self._weights[policy_hash] = nn.utils.parameters_to_vector(self._policy.parameters()).cpu().clone()
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
            readings = read(self._judged(policy_hash), chosen, self._how, traced=True)
            for scored, reading in zip(chosen, readings, strict=True):
                reason = self._lie(scored, reading)
                if reason:
                    caught.setdefault(scored.author, reason)
        for scored in known:  # by what its author claims: it takes no pass, and false claims are caught above
            alike = self._alike[scored.author]
            if scored.group.logprobs is not None:
                alike.append(repetition(scored.group.answers, [sum(chances) for chances in scored.group.logprobs]))
            if alike and improbable(alike) > SURE:
                caught.setdefault(scored.author, "not-sampled")
        for remembered in (self._alike, self._drawn):
            while len(remembered) > AUTHORS:
                del remembered[next(iter(remembered))]
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
            device = next(self._judge.parameters()).device
            nn.utils.vector_to_parameters(self._weights[policy_hash].to(device).clone(), self._judge.parameters())
        return self._judge

    def _lie(self, scored: Scored, reading: Reading) -> str:
        """Why this group is not what it claims; "" where it may be.

        Reasons: no-proof, other-activations, unreadable, no-logprobs, logprobs, not-sampled.
        """
        reason = proven([reading], [scored.group.logprobs], self._same)
        if reason:
            return reason
        tokens = [answer for answer in reading.answers if answer is not None]
        activations = np.concatenate([answer.activations for answer in tokens if answer.activations is not None])
        (distance,) = distances([scored.group.proof], [activations])
        if distance is None:
            return "no-proof"
        if not distance.fits(self._tolerance):
            return "other-activations"
        pooled = self._drawn[scored.author]
        pooled.append(_drawing(tokens))
        return "not-sampled" if any(not _looks_drawn(list(pooled)[-count:]) for count in POOLED) else ""


def _looks_drawn(pooled: Sequence[tuple[float, float, float]]) -> bool:
    excess, variance = sum(each[0] for each in pooled), sum(each[1] for each in pooled)
    # One rare token of a policy that is nearly sure is many deviations away, and must not condemn anybody.
    worst = max(each[2] for each in pooled)
    return bool(abs(excess) <= Z * np.sqrt(variance) + worst)


def _drawing(answers: Sequence[TokenReading]) -> tuple[float, float, float]:
    """Σ(log p + H), ΣVar and the greatest |log p + H| of these answers' tokens, in nats."""
    apart = np.concatenate([answer.logprobs + answer.entropy for answer in answers])
    variance = sum(float(answer.variance.sum()) for answer in answers)
    return float(apart.sum()), variance, float(np.abs(apart).max())
