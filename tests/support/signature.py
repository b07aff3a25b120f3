"""A model in which every node's work can be told apart: each moves one coordinate of its own, by STRIDE a step.

So what became of a node's steps can be read off: in the shared state, in its residual, and in its local parameters.
The held-out loss falls in proportion to the sum of all coordinates, so that every step is worth the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.methods.streaming import StreamingRounds
from swarmnode.testing.toy import ToyModel
from swarmnode.training.outer import Vector

STRIDE = 1.0 / 64
AXES = 16
LOSS = 8.0  # at the start
GAIN = 1.0 / 256  # of loss, for a coordinate that grows by one


def origin_of(method: Method) -> Vector:
    """Where a node's work that is not settled begins, (P,): at the shared parameters, unless it keeps an origin."""
    rounds = method.rounds if isinstance(method, Diloco) else None
    return rounds._work.origin if isinstance(rounds, StreamingRounds) else method.saved().state.parameters


class SignatureModel(ToyModel):
    """Parameters: AXES + 1 coordinates, of which node number `axis` moves one."""

    def __init__(self, *, axis: int, peer_id: str) -> None:
        super().__init__(dimension=AXES, peer_id=peer_id)
        self.axis = axis
        self.work = 0.0  # how far this node has moved its coordinate in all

    def step(self, *, round: int, steps: int) -> float:
        self.vector[self.axis] += steps * STRIDE
        self.work += steps * STRIDE
        return self.heldout_loss()

    def heldout_loss(self, seed: int | None = None) -> float:
        return LOSS - GAIN * float(self.vector.sum())

    def drawn(self, peer_id: str, round: int, steps: Sequence[int]) -> float:
        return self.heldout_loss()

    def slope(self, seed: int, first: int, last: int) -> tuple[float, Vector]:
        return self.heldout_loss(), np.full_like(self.vector, -GAIN)
