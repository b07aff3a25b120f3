"""A toy that is trained by seeds, in virtual time: a step tells a byte and moves nothing."""

from __future__ import annotations

import numpy as np
import trio

from swarmnode.protocols.methods.trainer import TrainStats
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.seed import EPSILON, bits_of, blocks, byte_of

CLIP = 1.0  # of [inner], by default


class ProbingTrainer(SimTrainer):
    """`told` has what each step told, by round and step. As in the trainer's process, one that is cancelled counts."""

    def __init__(self, peer: str, *, seconds_per_step: float, dimension: int = 8) -> None:
        super().__init__(ToyModel(dimension=dimension, seed=0, peer_id=peer), seconds_per_step=seconds_per_step)
        self.peer = peer
        self._place = (-1, 0)
        self.told: dict[tuple[int, int], int] = {}

    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        assert steps == 1
        if round != self._place[0]:
            self._place = (round, 0)
        toy, step = self.toy, self._place[1]
        self._place = (round, step + 1)
        await trio.sleep(self.seconds_per_step)
        signs = np.empty(toy.vector.size, np.float32)
        for part, ones in blocks(bits_of(0, self.peer, round, step, signs.size), signs.size):
            signs[part] = 2.0 * ones - 1.0
        here, losses = toy.vector.copy(), []
        for side in (EPSILON, -EPSILON):
            toy.vector[:] = here + np.float32(side) * signs
            losses.append(toy.drawn(self.peer, round, [step]))
        toy.vector[:] = here
        told = byte_of((losses[0] - losses[1]) / (2 * EPSILON), CLIP)
        self.told[round, step] = told[0]
        return TrainStats(1, toy.batch, toy.batch, sum(losses) / 2, self.seconds_per_step, told)
