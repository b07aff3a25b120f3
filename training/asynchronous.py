"""Learners on their own clocks: what their work counts, and an outer step for work that comes in pieces.

    work = Aged()
    work.add(48)                                # samples of this learner's inner steps
    weight = work.weigh()                       # what they count in the mean, beside the others' samples
    work.offer()
    work.decided(counted=False)                 # a round is over without them; they count less in the next
    state = delayed_nesterov(state, mean_of_g, round=r, lr=0.7, momentum=0.9)

A mean weighs contributions by tokens (Decoupled DiLoCo, arXiv 2604.21428: tokens times tokens per step, which among
learners with one batch size is tokens), less a penalty for staleness. CO2 (2401.16265) divides an outer step by its
staleness gap, measured in parameters; here that gap is counted in rounds, which every learner knows exactly:

    w = sum_a n_a / (1 + a)                     n_a samples whose steps were taken a rounds before they are offered

Delayed Nesterov (2401.09135, algorithm 3, with c = 0) applies each pseudo-gradient as plain descent, and momentum once
in N of them, because momentum that is renewed by single learners' work amplifies what is particular to each.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from swarmnode.training import mapped
from swarmnode.training.outer import OuterState, outer_step

Vector = NDArray[np.float32]

DELAY = 2  # N, rounds: a quorum is half of the learners, so each was heard about once in as many


class Aged:
    """Samples of one learner's work that is in no result yet, by how many rounds ago they were drawn."""

    def __init__(self) -> None:
        self._by_age = [0]
        self._told: list[int] = []
        self._offered: list[int] = []

    def add(self, samples: int) -> None:
        """Drawn since the last round was decided."""
        self._by_age[0] += samples

    def weigh(self) -> int:
        """The weight of all of them in the present round; at least 1 if there are any."""
        self._told = list(self._by_age)
        weight = sum(samples / (1 + age) for age, samples in enumerate(self._by_age))
        return max(round(weight), 1) if any(self._by_age) else 0

    def offer(self) -> None:
        """Others were given the work of those that were weighed last."""
        self._offered = self._told

    def decided(self, counted: bool) -> None:
        """A round is over, and what was offered to it counted or did not; what is left is older by one."""
        gone = self._offered if counted else []
        left = [have - taken for have, taken in zip_longest(self._by_age, gone, fillvalue=0)]
        while left and not left[-1]:
            left.pop()
        self._by_age, self._offered = [0, *left], []


def delayed_nesterov(
    state: OuterState, mean: Vector, *, round: int, lr: float, momentum: float, delay: int = DELAY
) -> OuterState:
    """One outer step along g = `mean` (P,), the round's mean pseudo-gradient; bit-identical for equal arguments.

    With N = `delay` and t = `round` modulo N, each product and sum rounded to float32 on its own:

        t = 0:      m <- mu * m
        always:     m <- m + (1/N) * g;  phi <- phi - (lr * g)
        t = N - 1:  phi <- phi - (lr * (mu * m))

    With mu = `momentum` = 0 it is plain descent, and with N = 1 `outer_step`'s Nesterov but for the rounding. Raises
    ValueError as `outer_step`.
    """
    plain = outer_step(state, mean, lr=lr, momentum=0.0)
    if not momentum:
        return plain
    mu, turn = np.float32(momentum), round % delay
    velocity = mapped.zeros(state.momentum.size)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused where it moves parameters
        np.multiply(np.float32(1 / delay), mean, out=velocity)
        np.add(mu * state.momentum if turn == 0 else state.momentum, velocity, out=velocity)
    velocity.flags.writeable = False
    stepped = OuterState(plain.parameters, velocity)
    if turn < delay - 1:
        return stepped
    return OuterState(outer_step(stepped, mu * velocity, lr=lr, momentum=0.0).parameters, velocity)
