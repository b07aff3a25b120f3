"""The trainer as a daemon sees it: something that moves one flat vector of parameters and measures its loss.

Implementations: `node.trainer.TrainerProcess` (a child process that owns torch) and in-process ones for simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.layout import Layout

Vector = NDArray[np.float32]


class TrainerDied(Exception):
    """The trainer ended during a call and has been, or is being, restarted; its last parameters are kept."""


@dataclass(frozen=True)
class Worked:
    """What one `train` call did."""

    steps: int  # inner steps completed
    samples: int  # sequences seen, steps × batch
    tokens: int
    loss: float  # mean training loss over the steps, bits per byte; nan when steps == 0
    seconds: float  # wall time inside inner steps


NOTHING = Worked(steps=0, samples=0, tokens=0, loss=float("nan"), seconds=0.0)


class Trainer(Protocol):
    @property
    def layout(self) -> Layout: ...

    @property
    def pid(self) -> int | None:
        """Process id of the child; None in process."""

    def parameters(self) -> Vector:
        """A copy of the local parameters, shape (P,). Not while `train` runs."""

    def load(self, vector: Vector) -> None:
        """Overwrite the local parameters, shape (P,). The inner optimizer keeps its state. Not while `train` runs."""

    async def train(self, *, round: int, steps: int, seconds: float) -> Worked:
        """Run inner steps until `steps` are done or `seconds` of wall time have passed, whichever is first.

        Cancelling stops after the step in hand. Raises TrainerDied; the parameters then are those of the last step.
        """

    async def interrupt(self) -> None:
        """Have the `train` that runs, if one does, end after the step in hand and tell what it did."""

    async def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        """Held-out loss of the local parameters in bits per byte; on a small fixed sample unless `thorough`.

        With `seed` on a few sequences that it draws, the same ones on every node.
        """

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """Let the model continue `prompt` by `length` bytes."""
