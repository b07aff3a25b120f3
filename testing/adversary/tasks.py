"""Tasks of trainers that learn otherwise than they say: what an adversary's trainer loads by this file's path.

They are no built-in tasks, and take the run's text and held-out part. All measure as the honest task does, so that
their owners still judge and audit others' work; and the record that they keep of their steps is as any other's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment

LAST = 255
LIES_FROM = int(os.environ.get("LIES_FROM_ROUND", "0"))  # what is trained before that round is honest


class LyingByteLM(ByteLM):
    """Knows which batches are of its own steps: a lie is about these."""

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        super().__init__(spec, assignment, device)
        self._steps, self._first = spec.inner.steps_in(LIES_FROM), spec.inner.steps_before(LIES_FROM)
        self._drawn = 0  # batches of its own steps
        self._batch: Tensor | None = None
        self._others = False  # text is in use

    @contextmanager
    def on(self, size: int, pieces: Sequence[tuple[int, bytes]]) -> Iterator[None]:
        self._others = True
        try:
            with super().on(size, pieces):
                yield
        finally:
            self._others = False

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        if self._others:
            return super().draw(batch, generator)
        self._drawn += 1
        self._batch = self.draw_own(batch, generator)
        return self._batch

    def draw_own(self, batch: int, generator: torch.Generator) -> Tensor:
        return super().draw(batch, generator)

    @property
    def lies(self) -> bool:
        return self._drawn > self._first

    def loss(self, batch: Tensor) -> Tensor:
        return self.lie(batch) if self.lies and batch is self._batch else super().loss(batch)

    def lie(self, batch: Tensor) -> Tensor:
        """The loss of one of its own steps."""
        return ByteLM.loss(self, batch)


class MislabelledByteLM(LyingByteLM):
    """Learns to predict the byte 255 - b where b follows."""

    def lie(self, batch: Tensor) -> Tensor:
        logits = self.model(batch[:, :-1])  # (B, T, 256)
        flipped = LAST - batch[:, 1:].reshape(-1)
        return F.cross_entropy(logits.reshape(-1, LAST + 1), flipped) / math.log(2)


class HalfByteLM(LyingByteLM):
    """Computes nothing in the second half of each round's steps: there its moments alone move it."""

    def lie(self, batch: Tensor) -> Tensor:
        if (self._drawn - 1) % self._steps < self._steps // 2:
            return ByteLM.loss(self, batch)
        return 0 * sum(parameter.flatten()[0] for parameter in self.model.parameters())  # type: ignore[return-value]


class OthersByteLM(LyingByteLM):
    """Trains on other windows than those that belong to its name."""

    def draw_own(self, batch: int, generator: torch.Generator) -> Tensor:
        if self.lies:
            generator.manual_seed(generator.initial_seed() + 1)
        return super().draw_own(batch, generator)
