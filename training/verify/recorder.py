"""Keeps a trainer's states between stretches of steps, so that others may repeat them. In memory, of a bounded size.

    recorder = Recorder(loop.state, every=10, budget=room(parameters))
    recorder.before(round, step, texts)        # before each step
    recorder.mark(round, step)                 # before somebody else touches the parameters: the stretches since then
    recorder.kept(id)                          # a vector of a point, while it is kept

A stretch ends after `every` steps, where the round or the texts change, and at a mark. Vectors are kept by their ids,
those asked for or made longest ago are let go of first.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.training.verify.trace import Point, State, Stretch, Vector

MEMORY = 512 << 20  # bytes of states that a trainer keeps: enough for eight stretches of 1.8 M parameters
STRETCHES = 8  # into which the steps of a round are divided, where there is memory for it …
SPARE = 4  # … and for so many more points: where legs begin and end
WINDOWS = 2  # contributions whose states are kept: the one that is looked at, and the next


@dataclass(frozen=True)
class _Open:
    """A stretch that has begun."""

    start: Point
    round: int
    step: int
    texts: int


def stretch_steps(steps: int, parameters: int) -> int:
    """Steps of a stretch, where rounds have `steps` (H) and the model so many parameters; 0: it is too large to audit.

    A function of the run alone, so that nobody can say that its own work cannot be looked at.
    """
    points = MEMORY // (12 * max(1, parameters) * WINDOWS)  # parameters and two moments of float32
    stretches = min(STRETCHES, points - SPARE)
    return -(-steps // stretches) if stretches > 0 else 0


def room(parameters: int) -> int:
    """Bytes that the states of WINDOWS contributions take, of a model of so many parameters; MEMORY at the most."""
    return min(MEMORY, WINDOWS * (STRETCHES + SPARE) * 12 * parameters)


class Recorder:
    """The states of one life of a trainer."""

    def __init__(self, capture: Callable[[], State], *, every: int, budget: int) -> None:
        """`capture` copies the present state; `every` steps are a stretch; `budget` bytes are kept."""
        self._capture, self._every, self._budget = capture, every, budget
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()  # the longest unused first
        self._bytes = 0
        self._open: _Open | None = None
        self._done: list[Stretch] = []
        self.last: Stretch | None = None  # the newest whole one, for calibration
        self.life = os.urandom(8)  # another after what came between is not known

    @property
    def is_open(self) -> bool:
        """Whether a stretch has begun: then nobody may touch the parameters."""
        return self._open is not None

    def before(self, round: int, step: int, texts: int) -> None:
        """A step of this round follows, on so many texts."""
        begun = self._open
        if begun is not None:
            same = begun.round == round and begun.texts == texts
            if same and step - begun.step < self._every:
                return
            if begun.round == round and step > begun.step:
                self._close(begun, step)
                self._open = _Open(self._done[-1].end, round, step, texts)
                return
            self.lose()  # the end of the round before was not told
        self._open = _Open(self._point(), round, step, texts)

    def mark(self, round: int, step: int) -> list[Stretch]:
        """The stretches since the last mark; `step` of `round` would be next."""
        if self._open is not None and step > self._open.step and self._open.round == round:
            self._close(self._open, step)
        self._open = None
        done, self._done = self._done, []
        return done

    def lose(self) -> None:
        """Something else happened to the parameters: what follows is not linked to what was before."""
        self._open, self._done, self.last = None, [], None
        self.life = os.urandom(8)

    def kept(self, id: bytes) -> Vector | None:
        """The vector with this id, unless it was let go of."""
        if id in self._vectors:
            self._vectors.move_to_end(id)
        return self._vectors.get(id)

    def state(self, point: Point) -> State | None:
        """The state at a point, unless it was let go of."""
        parameters, moments = self.kept(point.parameters), self.kept(point.moments)
        return State(parameters, moments, point.updates) if parameters is not None and moments is not None else None

    def _close(self, begun: _Open, step: int) -> None:
        steps = step - begun.step
        self.last = Stretch(begun.start, self._point(), begun.round, begun.step, steps, begun.texts)
        self._done.append(self.last)

    def _point(self) -> Point:
        state = self._capture()
        point = state.point
        for id, vector in ((point.parameters, state.parameters), (point.moments, state.moments)):
            if id not in self._vectors:
                self._bytes += vector.nbytes
            self._vectors[id] = vector
            self._vectors.move_to_end(id)
        while self._bytes > self._budget and len(self._vectors) > 2:
            self._bytes -= self._vectors.popitem(last=False)[1].nbytes
        return point
