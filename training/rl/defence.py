"""What is wrong with rollouts of strangers, seen from one pass of one's own model over them. numpy only.

    verdict = gate([reading_of_policy, reading_of_reference], TokenGate())  # unequal models: which answers to keep
    proof = proven(readings, claimed, ProofLimits())                         # equal models: was it this policy?

**Equal models** (`proven`): the receiver holds the sender's parameters, so the sender's log-probabilities can be
recomputed. Every token must be among the top k; claimed log-probabilities must be within a threshold; and because
those can be copied from a prefill, the tokens must also look drawn: z = Σ(log p + H) / √ΣVar pooled over answers,
which another temperature, greedy choice or another model shifts.

**Unequal models** (`gate`): nobody can recompute what the sender saw. An answer is refused where a token is one that
the receiver would not write: out of the top k, or under a floor of likelihood, by its policy *and* by its reference,
the policy before reinforcement. The reference never learns, so that what is smuggled in slowly stays as strange as on
the first day; and it is wide, so that a right answer which the policy does not know yet is not strange. A group in
which many answers are refused is refused whole: half poison, half gibberish. What a receiver's own model finds likely
passes: that takes a judge (Question.judged_reward) and the cap on an author's share (choosing.poison_budget).

After "Hail to the Thief" (2511.09780), with the numbers of METHODS: an honest decode differs from a prefill by 1e-6, a
policy one step older by 3e-2, another model by 0.5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TokenReading:
    """How one model finds the tokens of one answer; all arrays (T,)."""

    logprobs: Floats  # nats
    ranks: NDArray[np.int64]  # how many tokens are likelier
    entropy: Floats  # H of the distribution at each place, nats
    variance: Floats  # of log p under that distribution
    activations: Floats | None = None  # (T, C), final, from which each token follows; None where not asked for


@dataclass(frozen=True)
class Reading:
    """How one model finds a group; None for an answer that it cannot read."""

    answers: tuple[TokenReading | None, ...]


@dataclass(frozen=True)
class TokenGate:
    """What a receiver reads without suspicion."""

    top_k: int = 12  # ranks beyond are strange
    floor: float = 5e-3  # likelihood under which a token is strange
    share: float = 0.25  # of a group's answers that may be refused before the group is
    tokens: float = 0.0  # of an answer's tokens that may be strange; long texts of large vocabularies have some


@dataclass(frozen=True)
class GateVerdict:
    """Which answers (G,) of a group to keep; `reason` is set where none is."""

    kept: NDArray[np.bool_]
    reason: str = ""  # unlikely


def gate(readings: Sequence[Reading], limits: TokenGate) -> GateVerdict:
    """Judge one group by what one or more readers, the policy and its reference, find of it.

    A token is strange if it is to every reader; an answer with more strange tokens than `tokens`, or that cannot be
    read, is refused.
    """
    floor = np.log(limits.floor)
    kept = []
    for of_answer in zip(*(reading.answers for reading in readings), strict=True):
        known = [reading for reading in of_answer if reading is not None]
        familiar = [(reading.ranks < limits.top_k) & (reading.logprobs >= floor) for reading in known]
        kept.append(bool(familiar) and float(np.mean(~np.logical_or.reduce(familiar))) <= limits.tokens)
    passed = np.array(kept, bool)
    if (~passed).sum() > limits.share * len(passed):
        return GateVerdict(np.zeros(len(passed), bool), "unlikely")
    return GateVerdict(passed)


@dataclass(frozen=True)
class ProofLimits:
    """What a rollout must look like to have been drawn from parameters that the receiver holds."""

    top_k: int = 50  # every token; sampling without top-k from a large vocabulary leaves it once in a while
    logprob: float = 1e-3  # nats, mean |claimed − recomputed| of an answer; 1e-4 where both compute in float32 on a CPU
    z: float = 4.0  # of the sampling test, pooled over all answers given


def proven(
    readings: Sequence[Reading], claimed: Sequence[Sequence[Sequence[float]] | None], limits: ProofLimits
) -> str:
    """Why these groups were not drawn from the policy that `readings` are of; "" where they may have been.

    Reasons: unreadable, no-logprobs (an empty proof proves nothing), top-k, logprobs, not-sampled.
    """
    drawn: list[TokenReading] = []
    for reading, of_group in zip(readings, claimed, strict=True):
        if any(answer is None for answer in reading.answers):
            return "unreadable"
        if of_group is None or len(of_group) != len(reading.answers):
            return "no-logprobs"
        for answer, values in zip(reading.answers, of_group, strict=True):
            assert answer is not None
            if len(values) != len(answer.logprobs):
                return "no-logprobs"
            if answer.ranks.max(initial=0) >= limits.top_k:
                return "top-k"
            if not logprob_distance(answer, values) <= limits.logprob:
                return "logprobs"
            drawn.append(answer)
    return "not-sampled" if abs(sampling_z(drawn)) > limits.z else ""


def repetition(answers: Sequence[Sequence[int]], logprobs: Sequence[float]) -> float:
    """How little chance explains that answers of a group are alike: −ln of a bound of its probability, 0 at the least.

    `logprobs` (G,) are those of the whole answers, in nats. That some answer of probability p or less stands k times
    among G draws has a probability of at most Σ C(G, k) p_a^k ≤ C(G, k) p^(k − 1), as the p_a add up to 1; and k may
    be 2 to G. Greedy answers are alike, also where each of them is as likely as honest ones are, so that z says little.
    """
    times = Counter(map(tuple, answers))
    count = len(answers)
    bounds = [
        math.log(count - 1) + math.log(math.comb(count, times[tuple(answer)])) + (times[tuple(answer)] - 1) * logprob
        for answer, logprob in zip(answers, logprobs, strict=True)
        if times[tuple(answer)] > 1
    ]
    return max(0.0, -min(bounds, default=0.0))


def improbable(surprises: Sequence[float]) -> float:
    """−ln of a bound of the chance that the sum of these `repetition`s of as many groups is so great, 0 at the least.

    Each is at most exponential, so that their sum is at most Gamma; Chernoff's bound of its tail.
    """
    total, count = sum(surprises), len(surprises)
    return total - count - count * math.log(total / count) if total > count else 0.0


def logprob_distance(reading: TokenReading, claimed: Sequence[float]) -> float:
    """Mean |claimed − recomputed| log-probability of an answer's tokens, nats; NaN if one is."""
    return float(np.abs(np.asarray(claimed, np.float64) - reading.logprobs).mean())


def sampling_z(drawn: Sequence[TokenReading]) -> float:
    """z = Σ(log p + H) / √ΣVar over all tokens: about normal for tokens that were drawn; 0 where nothing was open.

    Above for tokens likelier than chance (greedy, low temperature), below for another model's.
    """
    excess = sum(float((answer.logprobs + answer.entropy).sum()) for answer in drawn)
    variance = sum(float(answer.variance.sum()) for answer in drawn)
    return excess / float(np.sqrt(variance)) if variance > 0 else 0.0
