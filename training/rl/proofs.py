"""Whether groups that others wrote for this node's policy were drawn from its weights: proofs and spot checks. Torch.

    proofs = commit([activations])                        # of each group, (N, C) of all its answers' tokens in a row
    distance = distance_of(proofs[0], recomputed)         # None where the proof is empty or malformed
    distance.fits(Tolerance())                            # HALF for models of 16 bits

    audit = RolloutAudit(policy, share=0.25, seed=1)
    audit.remember(policy_hash)                           # the weights that the policy has now, for later
    audited = audit.check(groups)                         # a random share of each author's, at least one
    audited.passed, audited.caught                        # groups to learn from; authors who lied, and why

**The proof** is TOPLOC's (2501.16007): of each CHUNK tokens the TOP final activations of greatest magnitude, a =
(token, channel), are written down as a polynomial over GF(P) that at `a mod m` has the 16 bits of the value in
bfloat16. Whoever recomputes the activations takes the TOP of his own, evaluates there, and compares exponents and
mantissas: the same weights give the same bits but for rounding, others give noise. 2 bytes for each of TOP + 1 numbers:
258 bytes for 32 tokens. The length is a function of the number of tokens and channels, so nothing can be left out. A
proof says that the sender had these weights, not that it drew the tokens from them: that is the sampling test's
(`defence.looks_drawn`).

**The audit**: a group that is looked at must have the proof of its activations, log-probabilities that the same weights
give again, and tokens that look drawn from them, pooled over the author's last groups (`defence`). Nothing else passes:
an empty proof, a copied one, or one of other weights, older ones included. In all groups, looked at or not, answers
must not be more alike than their log-probabilities let expect. One lie costs an author all of its groups.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from swarmnode.training.rl.defence import Floats, Reading, SumOfDraws, improbable, looks_drawn, misclaimed, repetition
from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.patches import rounded
from swarmnode.training.rl.sampling import Sampling, read

CHUNK = 32  # tokens
TOP = 128  # activations of a chunk; fewer where there are fewer
P = 65497  # a prime; the bits of all finite bfloat16 numbers are below

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tolerance:
    """How far recomputed activations may be from those committed to, where both sides compute in 32 bits.

    Measured with tiny policies: 0 on one machine; 0.04, 0.6 and 0 at the least for answers to one question under the
    proof of others to it, 0.07, 2 and 1 to another question.
    """

    exponents: float = 0.03  # of activations whose sign and exponent differ: the least of the TOP change with rounding
    mantissa: float = 0.25  # mean difference of the others, in units of the last of 7 bits
    median: float = 0.0


HALF = Tolerance(exponents=0.3, mantissa=10.0, median=8.0)  # TOPLOC's for 16 bits on all hardware, section 5


@dataclass(frozen=True)
class ActivationDistance:
    """The worst chunk's."""

    exponents: float  # part of the activations whose sign or exponent differs, 0 to 1
    mantissa: float  # mean difference of the others, in units of the last bit; inf where there are none
    median: float

    def fits(self, limits: Tolerance) -> bool:
        return self.exponents <= limits.exponents and self.mantissa <= limits.mantissa and self.median <= limits.median


def proof_size(tokens: int, channels: int) -> int:
    """Bytes of the proof of so many tokens."""
    return sum(2 + 2 * min(TOP, rows * channels) for rows in _rows(tokens))


def commit(groups: Sequence[Floats]) -> list[bytes]:
    """The proof of each group's activations (N, C), those of its answers in a row."""
    chunks = [chunk for group in groups for chunk in _chunks(group)]
    sealed: list[bytes] = [b""] * len(chunks)
    for indices in _by_shape(chunks):
        values = np.stack([chunks[index] for index in indices])  # (B, n)
        places = _greatest(values)  # (B, K)
        modulus = [_modulus(row) for row in places]
        x = places % np.array(modulus)[:, None]
        y = _bits(np.take_along_axis(values, places, axis=1))
        for index, m, row in zip(indices, modulus, _interpolated(x, y), strict=True):
            sealed[index] = np.array([m, *row], "<u2").tobytes()
    parts = iter(sealed)
    return [b"".join(next(parts) for _ in _rows(len(group))) for group in groups]


def distance_of(proof: bytes, activations: Floats) -> ActivationDistance | None:
    """How far a proof is from recomputed activations (N, C); None where it is not of the size that it must have."""
    if not len(activations) or len(proof) != proof_size(*activations.shape):
        return None
    at, worst = 0, ActivationDistance(0.0, 0.0, 0.0)
    for chunk in _chunks(activations):
        size = 2 + 2 * min(TOP, len(chunk))
        one = _distance(np.frombuffer(proof, "<u2", size // 2, at), chunk)
        at += size
        worst = ActivationDistance(*map(max, zip(astuple(worst), astuple(one), strict=True)))
    return worst


def _distance(sealed: NDArray[np.uint16], chunk: Floats) -> ActivationDistance:
    modulus, coefficients = int(sealed[0]), sealed[1:].astype(np.int64)
    if modulus == 0:
        return ActivationDistance(1.0, np.inf, np.inf)
    (places,) = _greatest(chunk[None])
    x, claimed = places % modulus, np.zeros(len(places), np.int64)
    for coefficient in coefficients[::-1]:  # Horner
        claimed = (claimed * x + coefficient) % P
    found = _bits(chunk[places])
    alike = claimed >> 7 == found >> 7  # sign and exponent
    if not alike.any():
        return ActivationDistance(1.0, np.inf, np.inf)
    apart = np.abs((claimed & 127) - (found & 127))[alike]
    return ActivationDistance(float(1.0 - alike.mean()), float(apart.mean()), float(np.median(apart)))


def _rows(tokens: int) -> list[int]:
    return [min(CHUNK, tokens - at) for at in range(0, tokens, CHUNK)]


def _chunks(group: Floats) -> list[Floats]:
    return [group[at : at + CHUNK].reshape(-1) for at in range(0, len(group), CHUNK)]


def _by_shape(chunks: Sequence[Floats]) -> list[list[int]]:
    sizes: dict[int, list[int]] = {}
    for index, chunk in enumerate(chunks):
        sizes.setdefault(len(chunk), []).append(index)
    return list(sizes.values())


def _greatest(values: Floats) -> Ints:
    """Places (B, K) of the TOP greatest magnitudes of values (B, n)."""
    top = min(TOP, values.shape[1])
    return np.argpartition(-np.abs(values), top - 1, axis=1)[:, :top].astype(np.int64)


def _bits(values: Floats) -> Ints:
    """The 16 bits of each value in bfloat16, rounded to nearest even; below P for finite numbers."""
    return np.minimum(rounded(np.ascontiguousarray(values, np.float32)).astype(np.int64), P - 1)


def _modulus(places: Ints) -> int:
    """The greatest number up to P modulo which the places differ."""
    if int(places.max()) < P:
        return P
    return next(m for m in range(P, 0, -1) if len(np.unique(places % m)) == len(places))


def _interpolated(x: Ints, y: Ints) -> Ints:
    """Coefficients (B, K) over GF(P) of the polynomials through the points (B, K); Newton's divided differences."""
    inverses, count = _inverses(), x.shape[1]
    divided = y.copy()
    for order in range(1, count):
        apart = inverses[(x[:, order:] - x[:, :-order]) % P]
        divided[:, order:] = (divided[:, order:] - divided[:, order - 1 : -1]) % P * apart % P
    coefficients = np.zeros_like(y)
    for order in range(count - 1, -1, -1):  # c(X) ← c(X) · (X − x) + d
        shifted = np.roll(coefficients, 1, axis=1)
        shifted[:, 0] = 0
        coefficients = (shifted - coefficients * x[:, order : order + 1]) % P
        coefficients[:, 0] = (coefficients[:, 0] + divided[:, order]) % P
    return coefficients


@lru_cache(maxsize=1)
def _inverses() -> Ints:
    """1 / n over GF(P), (P,): n to the power P − 2."""
    base, result, exponent = np.arange(P, dtype=np.int64), np.ones(P, np.int64), P - 2
    while exponent:
        if exponent & 1:
            result = result * base % P
        base = base * base % P
        exponent >>= 1
    return result


# -- the audit

# Nats: log-probabilities travel rounded, and bfloat16 on a GPU moves them by 1.2e-3; one update moves them by 3e-2.
ROUNDED = 5e-3
POOLED = (16, 256)  # groups of an author that the sampling test pools: few tell soon, many tell small differences
EXACT = 5e-4  # nats, where both sides compute in 32 bits: 1.5e-4 at most was seen, 7e-4 at least of other weights
AUTHORS = 256  # of whom something is remembered; the one met first is forgotten first
CLAIMED = 64  # groups of an author of which the answers' likeness is pooled
SURE = 20.0  # of `improbable`: 2e-9 of honest authors are beyond


@dataclass(frozen=True)
class Audited:
    """What a check came to."""

    passed: tuple[Scored, ...]
    checked: Mapping[str, int]  # groups looked at, by author
    caught: Mapping[str, str]  # authors whose groups are lies, and by what they are
    refused: Counter[str]  # groups not passed, by reason: unknown-weights, dishonest


class RolloutAudit:
    """Holds the last weights of one policy, flat, and judges by a copy of it."""

    def __init__(
        self, policy: nn.Module, *, share: float, seed: int, how: Sampling | None = None, keep: int = 5
    ) -> None:
        """`share` of each author's groups is looked at; `keep` versions are remembered."""
        self._policy, self._share, self._keep = policy, share, keep
        self._how = replace(how or Sampling(), traced=True)
        exact = all(parameter.dtype == torch.float32 for parameter in policy.parameters())
        self._tolerance = Tolerance() if exact else HALF
        self._apart = EXACT if exact else ROUNDED  # nats, at the most
        self._rng = np.random.default_rng([seed, 5])
        self._judge: nn.Module | None = None
        self._weights: OrderedDict[str, torch.Tensor] = OrderedDict()  # by hash, (P,) each, the oldest first
        self._alike: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=CLAIMED))
        self._drawn: dict[str, deque[SumOfDraws]] = defaultdict(lambda: deque(maxlen=max(POOLED)))

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
            readings = read(self._judged(policy_hash), chosen, self._how)
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
            whole = self._weights[policy_hash].to(next(self._policy.parameters()), copy=True)
            nn.utils.vector_to_parameters(whole, self._judge.parameters())
        return self._judge

    def _lie(self, scored: Scored, reading: Reading) -> str:
        """Why this group is not what it claims; "" where it may be.

        Reasons: no-proof, other-activations, unreadable, no-logprobs, logprobs, not-sampled.
        """
        reason = misclaimed(reading, scored.group.logprobs, self._apart)
        if reason:
            return reason
        tokens = [answer for answer in reading if answer is not None]
        activations = np.concatenate([answer.activations for answer in tokens if answer.activations is not None])
        distance = distance_of(scored.group.proof, activations)
        if distance is None:
            return "no-proof"
        if not distance.fits(self._tolerance):
            return "other-activations"
        pooled = self._drawn[scored.author]
        pooled.append(SumOfDraws.of(tokens))
        return "not-sampled" if any(not looks_drawn(list(pooled)[-count:]) for count in POOLED) else ""
