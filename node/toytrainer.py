"""A `Trainer` for simulations: a toy model in this process whose steps take virtual time.

trainer = SimTrainer(ToyModel(seed=0, peer_id=peer_id), seconds_per_step=0.1)
"""

from __future__ import annotations

import math

import numpy as np
import trio

from swarmnode.protocols.trainer import Vector, Worked
from swarmnode.training.layout import Layout
from swarmnode.training.toy import ToyModel


class SimTrainer:
    """Implements `Trainer`. With `seconds_per_step` 0 training takes no time at all, only a checkpoint."""

    def __init__(self, toy: ToyModel, *, seconds_per_step: float = 0.0) -> None:
        self.toy = toy
        self.seconds_per_step = seconds_per_step
        self._interrupted = trio.Event()

    @property
    def layout(self) -> Layout:
        return self.toy.layout

    @property
    def pid(self) -> int | None:
        return None

    def parameters(self) -> Vector:
        return self.toy.vector.copy()

    def load(self, vector: Vector) -> None:
        np.copyto(self.toy.vector, vector, casting="no")

    async def train(self, *, round: int, steps: int, seconds: float) -> Worked:
        """As in `Trainer`; the steps are taken at once, at the end of their virtual time."""
        if self.seconds_per_step > 0:
            steps = min(steps, math.ceil(seconds / self.seconds_per_step)) if math.isfinite(seconds) else steps
        started = trio.current_time()
        self._interrupted = trio.Event()
        try:
            with trio.move_on_after(steps * self.seconds_per_step):
                await self._interrupted.wait()
        except trio.Cancelled:
            self.toy.step(round=round, steps=self._taken_since(started))
            raise
        if self._interrupted.is_set() and self.seconds_per_step > 0:
            steps = min(steps, math.ceil((trio.current_time() - started) / self.seconds_per_step))
            await trio.sleep_until(started + steps * self.seconds_per_step)  # the step in hand
        loss = self.toy.step(round=round, steps=steps)
        samples = steps * self.toy.batch
        return Worked(steps, samples, samples, loss, steps * self.seconds_per_step)

    def _taken_since(self, started: float) -> int:
        return int((trio.current_time() - started) / self.seconds_per_step) if self.seconds_per_step > 0 else 0

    async def interrupt(self) -> None:
        self._interrupted.set()
        await trio.lowlevel.checkpoint()

    async def evaluate(self, *, thorough: bool, seed: int | None = None, wait: bool = True) -> float:
        await trio.lowlevel.checkpoint()
        return self.toy.heldout_loss(seed)

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """The prompt over and over: the toy cannot write."""
        await trio.lowlevel.checkpoint()
        return ((prompt or b"\n") * length)[:length]
