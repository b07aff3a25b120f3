"""What is wrong with rollouts of strangers, seen from one pass of one's own model over them. numpy only.

    kept = gate([reading_of_policy, reading_of_reference], TokenGate())  # unequal models: which answers to keep
    wrong = misclaimed(reading, claimed, 1e-3)               # equal models: are these the sender's log-probabilities?

A reading is how one model finds a group: a TokenReading of each answer, None for an answer that it cannot read.

**Equal models**: the receiver holds the sender's parameters, so the sender's log-probabilities can be recomputed, and
claimed ones must be within a threshold. Because those can be copied from a prefill, the tokens must also be the drawn
ones: `proofs.py`.

**Unequal models** (`gate`): nobody can recompute what the sender saw. An answer is refused where a token is one that
the receiver would not write: out of the top k, or under a floor of likelihood, by its policy *and* by its reference,
the policy before reinforcement. The reference never learns, so that what is smuggled in slowly stays as strange as on
the first day; and it is wide, so that a right answer which the policy does not know yet is not strange. A group in
which many answers are refused is refused whole: half poison, half gibberish; and so is all that an author sends of
whose last groups several were (`Suspects`). What a receiver's own model finds likely passes: that takes a judge
(Question.judged_reward) and the cap on an author's share (grpo.poison_budget).

After "Hail to the Thief" (2511.09780), with the numbers of METHODS: an honest decode differs from a prefill by 1e-6, a
policy one step older by 3e-2, another model by 0.5.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MAX_AUTHORS = 1024  # of whom is remembered how often the gate refused them
POOLED = 8  # groups of an author that are judged together, those read last
BAD = 3  # refused groups among these from which on all of the author's are refused


@dataclass(frozen=True)
class TokenReading:
    """How one model finds the tokens of one answer; all arrays (T,)."""

    logprobs: Floats  # nats
    ranks: NDArray[np.int64]  # how many tokens are likelier
    margins: Floats | None = None  # nats below the token that the sampler's noise picks; None where not asked for


Reading = Sequence[TokenReading | None]  # of a group, by answer


@dataclass(frozen=True)
class TokenGate:
    """What a receiver reads without suspicion."""

    top_k: int = 12  # ranks beyond are strange
    floor: float = 5e-3  # likelihood under which a token is strange
    share: float = 0.25  # of a group's answers that may be refused before the group is
    tokens: float = 0.0  # of an answer's tokens that may be strange; long texts of large vocabularies have some


def gate(readings: Sequence[Reading], limits: TokenGate) -> NDArray[np.bool_]:
    """Which answers (G,) of one group to keep, by what one or more readers, the policy and its reference, find of it.

    A token is strange if it is to every reader; an answer with more strange tokens than `tokens`, or that cannot be
    read, is refused; none is kept of a group in which more than `share` are.
    """
    floor = np.log(limits.floor)
    kept = []
    for of_answer in zip(*readings, strict=True):
        known = [reading for reading in of_answer if reading is not None]
        familiar = [(reading.ranks < limits.top_k) & (reading.logprobs >= floor) for reading in known]
        kept.append(bool(familiar) and float(np.mean(~np.logical_or.reduce(familiar))) <= limits.tokens)
    passed = np.array(kept, bool)
    return passed & ((~passed).sum() <= limits.share * len(passed))


class Suspects:
    """Authors so many of whose last groups the gate refused that their other groups are not trusted either.

    Poison that is right by chance now and then passes the gate then; pooled over some groups it does not. Of honest
    authors' groups one in a hundred is refused, of poison that is right one time in five three in four
    (docs/results.md).
    """

    def __init__(self) -> None:
        self._lately: OrderedDict[str, deque[bool]] = OrderedDict()  # by author, who was read last at the end

    def saw(self, author: str, *, refused: bool) -> None:
        self._lately.setdefault(author, deque(maxlen=POOLED)).append(refused)
        self._lately.move_to_end(author)
        if len(self._lately) > MAX_AUTHORS:
            self._lately.popitem(last=False)

    def __contains__(self, author: str) -> bool:
        return sum(self._lately.get(author, ())) >= BAD


def misclaimed(reading: Reading, claimed: Sequence[Sequence[float]] | None, most: float) -> str:
    """Why the claimed log-probabilities of a group are not those of the policy that `reading` is of; "" where they are.

    `most`: nats, mean |claimed − recomputed| of all tokens; 1e-4 is rounding in float32 on a CPU.
    Reasons: unreadable, no-logprobs (who claims nothing proves nothing), logprobs.
    """
    if claimed is None or len(claimed) != len(reading):
        return "no-logprobs"
    apart = []
    for answer, values in zip(reading, claimed, strict=True):
        if answer is None:
            return "unreadable"
        if len(values) != len(answer.logprobs):
            return "no-logprobs"
        apart.append(np.abs(np.asarray(values, np.float64) - answer.logprobs))
    return "" if float(np.concatenate(apart).mean()) <= most else "logprobs"  # nor where it is no number
