"""Keeps a trainer's states between stretches of steps on disk, so that others may repeat them.

    recorder = Recorder(loop.view, Vectors(folder, budget=room(parameters)), every=10)
    recorder.before(round, step, texts)        # before each step
    recorder.mark(round, step)                 # before somebody else touches the parameters: the stretches since then

A stretch ends after `every` steps, where the round or the texts change, and at a mark. A state is hashed and written
where it lies, never copied in memory; of what did not change since the point before, nothing is written again. Where
the disk takes no more, what was trained until then cannot be shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from swarmnode.training.verify.trace import MAX_TRACE, Point, State, Stretch
from swarmnode.training.verify.vectors import Vectors

STRETCHES = 32  # into which the steps of a round are divided …
SHORTEST = 3  # … of so many steps at the least, as keeping a state takes a ninth of a step of 512 tokens …
FEWEST = 4  # … or so few, where the states of so many would take more than …
STATES = 32 << 30  # … these bytes of disk
SPARE = 4  # more points of a round: where legs begin and end
LEAST = 1 << 30  # bytes of disk: who waits for others trains on, and has more stretches
WINDOWS = 2  # contributions whose states are kept: the one that is looked at, and the next


def stretch_steps(steps: int, parameters: int) -> int:
    """Steps of a stretch, where rounds have `steps` (H) and the model so many parameters.

    A function of the run alone, so that nobody can say that its own work cannot be looked at.
    """
    points = STATES // (12 * max(1, parameters) * WINDOWS)  # parameters and at most two moments of float32
    return max(min(SHORTEST, steps), -(-steps // max(FEWEST, min(STRETCHES, points - SPARE))))


def room(steps: int, parameters: int) -> int:
    """Bytes of disk that the states of WINDOWS contributions take; LEAST of a model whose steps may be quick."""
    points = WINDOWS * (-(-steps // stretch_steps(steps, parameters)) + SPARE)
    return max(LEAST, points * 12 * parameters)


def shown_room(parameters: int) -> int:
    """Bytes of disk for copies that auditors fetch: those of two audits, or of up to eight where they are small."""
    audit = 12 * 4 * parameters + MAX_TRACE  # a dozen vectors, and the record
    return max(2 * audit, min(8 * audit, LEAST))


class Recorder:
    """The states of one life of a trainer."""

    def __init__(self, view: Callable[[], State], vectors: Vectors, *, every: int) -> None:
        """`view` is the present state, which may be the memory that is trained; `every` steps are a stretch."""
        self._view, self._vectors, self._every = view, vectors, every
        self._point: Point | None = None  # the newest
        self._open: Stretch | None = None  # of no steps yet
        self._next = 0  # step after the newest
        self._done: list[Stretch] = []
        self.last: Stretch | None = None  # the newest whole one, for calibration
        self.life = os.urandom(8)  # another after what came between is not known

    @property
    def is_open(self) -> bool:
        """Whether a stretch has begun: then nobody may touch the parameters."""
        return self._open is not None

    def before(self, round: int, step: int, texts: int) -> None:
        """A step of this round follows, on so many texts."""
        ended, self._next = self._next, step + 1
        begun = self._open
        if begun is not None:
            same = begun.round == round and begun.texts == texts
            if same and step - begun.step < self._every:
                return
            if (begun.round == round and step > begun.step) or (begun.round < round and not step):
                end = self._close(begun, step or ended)
                self._begin(end, round, step, texts)
                return
            self.lose()  # steps were left out or repeated
        self._begin(self._keep(), round, step, texts)

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

    def _begin(self, start: Point | None, round: int, step: int, texts: int) -> None:
        self._open = Stretch(start, start, round, step, 0, texts) if start is not None else None

    def _close(self, begun: Stretch, step: int) -> Point | None:
        end = self._keep()
        if end is not None:
            self.last = replace(begun, end=end, steps=step - begun.step)
            self._done.append(self.last)
        return end

    def _keep(self) -> Point | None:
        """The point of the present state, now on disk; None where the disk does not take it."""
        state, before = self._view(), self._point
        try:
            same = before is not None and before.updates == state.updates and self._vectors.touch(before.moments)
            moments = before.moments if same and before is not None else self._vectors.put(state.moments)
            self._point = Point(self._vectors.put(state.parameters), moments, state.updates)
        except OSError:
            self.lose()
            return None
        return self._point
