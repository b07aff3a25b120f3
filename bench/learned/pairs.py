"""Arms without a step of all workers: random pairs (`gossip`), and training apart with one merge at the end (`merge`).

    outcome = train(Arm("gossip", steps=480, lr=2e-3, interval=30, codec="int8"), workers, …)
    outcome = train(Arm("merge", steps=480, lr=2e-3, interval=480, codec="int8"), workers, …)

As nodes of a run by `gossip` do: a meeting after each round, and MERGES meetings more after the last; with one round as
long as the run, that is one merge. Arithmetic and codecs are the product's, on bytes that were really encoded. Workers
hold different parameters; what is measured are the first one's, which at the end are about the mean of all.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from learned.workers import Vector, Workers
from swarmnode.protocols.methods.gossip.method import MERGES
from swarmnode.testing.consensus import consensus_distance
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.gossip import gossip_step, weights_codec
from swarmnode.training.outer import OuterState
from swarmnode.training.runspec import RunSpec

if TYPE_CHECKING:
    from learned.methods import Arm


class Gossip:
    """Every round the workers are paired at random; one that is left over goes on alone."""

    overlap = 0  # of work, and of all that is sent in a meeting without steps; weights travel during a round's steps

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._arm, self._workers, self._done = arm, workers, 0
        self.states = [OuterState.start(start) for _ in workers.peers]
        # Of the last round: bytes of all workers, steps that they take meanwhile, exchanges.
        self.met: list[tuple[int, int, int]] = []
        self.apart: list[float] = []  # consensus distance after each meeting
        self._codec, self._weights = codec(arm.codec), weights_codec(arm.codec)
        self._left = [ErrorFeedback(self._codec, workers.parameters, decay=arm.decay) for _ in workers.peers]
        self._draw = random.Random(f"pairs {workers.seed} {stream}")
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        deltas = self._workers.train([state.parameters for state in self.states], round=round, steps=steps)
        weights, work = self._meet(deltas, lr=self._arm.outer_lr, momentum=self._arm.momentum)
        self.met = [(weights, steps, 1), (work, self.overlap, 1)]
        self.offered += len(deltas)
        self.counted += len(deltas)
        self._done += steps
        if self._done == self._arm.steps:
            nothing = [np.zeros_like(delta) for delta in deltas]
            merges = [self._meet(nothing, lr=1.0, momentum=0.0) for _ in range(MERGES)]
            self.met.append((sum(map(sum, merges)), self.overlap, MERGES))
        return self.states[0].parameters

    def _meet(self, deltas: list[Vector], *, lr: float, momentum: float) -> tuple[int, int]:
        """Pair all workers at random, with these pseudo-gradients; bytes of weights and of work that all send."""
        workers, before, size = self._workers, self.states, self._workers.parameters
        order = self._draw.sample(range(len(deltas)), len(deltas))
        met = {a: b for pair in zip(order[::2], order[1::2], strict=False) for a, b in (pair, pair[::-1])}
        sent = workers.map(lambda number: self._left[number].encode(deltas[number]), met)
        raws = dict(zip(met, sent, strict=True))

        def step(number: int) -> OuterState:
            if number not in met:
                return gossip_step(before[number], deltas[number], None, None, lr=lr, momentum=momentum)
            own, theirs = (self._codec.decode(raws[each], size) for each in (number, met[number]))
            weights = self._weights.decode(self._weights.encode(before[met[number]].parameters), size)
            return gossip_step(before[number], own, theirs, weights, lr=lr, momentum=momentum)

        self.states = workers.map(step, range(len(deltas)))
        for number in raws:
            self._left[number].commit()
        self.apart.append(consensus_distance([state.parameters for state in self.states]))
        told = len(raws) * self._weights.encoded_size(size), sum(map(len, sent))
        self.sent += sum(told)
        return told
