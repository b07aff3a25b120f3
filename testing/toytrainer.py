"""A `Trainer` for simulations: a toy model in this process whose steps take virtual time.

trainer = SimTrainer(ToyModel(seed=0, peer_id=peer_id), seconds_per_step=0.1)
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import trio

from swarmnode.protocols.methods.trainer import (
    Batches,
    Marked,
    Replayed,
    Slice,
    Trainer,
    TrainStats,
    Vector,
)
from swarmnode.testing.toy import ToyModel
from swarmnode.training.outer import Layout
from swarmnode.training.sections import InnerSection
from swarmnode.training.verify.recorder import Recorder
from swarmnode.training.verify.replay import Distance, distance
from swarmnode.training.verify.trace import Point, State
from swarmnode.training.verify.vectors import Vectors, states_in

ROOM = 1 << 20  # bytes of states
_NONE = np.zeros(0, np.float32)  # moments of plain gradient descent


class SimTrainer(Trainer):
    """With `seconds_per_step` 0 training takes no time at all, only a checkpoint."""

    def __init__(self, toy: ToyModel, *, seconds_per_step: float = 0.0) -> None:
        self.toy = toy
        self.seconds_per_step = seconds_per_step
        self._interrupted = trio.Event()
        self._recorder: Recorder | None = None
        self.steered: InnerSection | None = None
        self.remembered = (_NONE, 0)  # moments, as another trainer's optimizer has them, and their updates

    def moments(self) -> tuple[Vector, int]:
        return self.remembered

    async def remember(self, moments: Vector, updates: int) -> None:
        self.remembered = (moments, updates)

    @property
    def layout(self) -> Layout:
        return self.toy.layout

    def parameters(self) -> Vector:
        return self.toy.vector.copy()

    def load(self, vector: Vector) -> None:
        np.copyto(self.toy.vector, vector, casting="no")

    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
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
        return TrainStats(steps, samples, samples, loss, steps * self.seconds_per_step)

    def steer(self, inner: InnerSection) -> None:
        """Nothing but to be looked at: the toy has a rate of its own."""
        self.steered = inner

    def _taken_since(self, started: float) -> int:
        return int((trio.current_time() - started) / self.seconds_per_step) if self.seconds_per_step > 0 else 0

    async def interrupt(self) -> None:
        self._interrupted.set()
        await trio.lowlevel.checkpoint()

    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        await trio.lowlevel.checkpoint()
        return self.toy.heldout_loss()

    async def heldout(self, *, seed: int, sequences: int) -> float:
        await trio.lowlevel.checkpoint()
        return self.toy.slope(seed, 0, sequences)[0]

    async def gradient(self, *, seed: int, first: int, last: int) -> tuple[float, Vector] | None:
        await trio.lowlevel.checkpoint()
        return self.toy.slope(seed, first, last)

    # --- what others may repeat ---------------------------------------------------------------------------------------

    @property
    def records(self) -> bool:
        return self._recorder is not None

    def record(self, every: int) -> None:
        """Keep states every so many steps from now on."""
        self._folder = tempfile.TemporaryDirectory(prefix="swarmnode-toy-")
        self._recorder = recorder = Recorder(self._state, Vectors(self.states[0], budget=ROOM), every=every)
        self.toy.before_step = lambda round, step: recorder.before(round, step, 0)

    @property
    def states(self) -> tuple[Path, Path, Path]:
        return states_in(self._folder.name)

    def _state(self) -> State:
        return State(self.toy.vector, _NONE, 0)

    async def mark(self) -> Marked:
        await trio.lowlevel.checkpoint()
        if self._recorder is None:
            return Marked(b"", ())
        return Marked(self._recorder.life, tuple(self._recorder.mark(*self.toy.place)))

    async def places(self, batches: Batches) -> list[tuple[int, int]]:
        await trio.lowlevel.checkpoint()
        return []

    async def drawn(self, batches: Batches) -> float | None:
        await trio.lowlevel.checkpoint()
        return self.toy.drawn(batches.author, batches.round, batches.steps)

    async def replay(self, slice: Slice) -> Replayed:
        """Takes the virtual time of the steps."""
        whose = {"round": slice.stretch.round, "step": slice.stretch.step, "steps": slice.stretch.steps}
        start, claimed = (self._fetched(point) for point in (slice.stretch.start, slice.stretch.end))
        parameters = self.toy.replay(start.parameters, peer_id=slice.author, **whose)
        seconds = slice.stretch.steps * self.seconds_per_step
        await trio.sleep(seconds)
        return Replayed((distance(start, claimed, State(parameters, start.moments, start.updates)),), seconds)

    def _fetched(self, point: Point) -> State:
        parameters, moments = (Vectors(self.states[2]).get(id) for id in point.vectors)
        assert parameters is not None and moments is not None
        return State(parameters, moments, point.updates)

    async def calibrate(self) -> Replayed:
        """Simulated machines are all the same."""
        await trio.lowlevel.checkpoint()
        return Replayed((Distance(0.0, 0.0, 0.0),), 0.0)

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """The prompt over and over: the toy cannot write."""
        await trio.lowlevel.checkpoint()
        return ((prompt or b"\n") * length)[:length]
