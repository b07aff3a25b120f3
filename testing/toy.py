"""A model so small that a thousand of them train in one process: linear regression by noisy gradient descent.

    toy = ToyModel(dimension=32, seed=0, peer_id="12D3…")
    loss = toy.step(round=0, steps=10)

All nodes of a run look for the same weights, each in data of its own, so the mean of their steps is better than any one
of them: what an exchange should show can be seen here in microseconds. A batch is a function of (seed, peer, round,
step), as in the inner loop of real models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.outer import Layout, Vector

HELDOUT_SAMPLES = 256
JUDGED_SAMPLES = HELDOUT_SAMPLES // SEQUENCES  # in the place of one of a judge's sequences


class ToyModel:
    """Parameters: `weight` (D,) and `bias` (), targets y = x·w* + b* + noise. Losses are mean squared errors."""

    def __init__(
        self,
        *,
        dimension: int = 32,
        seed: int = 0,
        peer_id: str = "",
        lr: float = 0.02,
        batch: int = 4,
        noise: float = 0.5,
    ) -> None:
        self.layout = Layout.of([("weight", (dimension,)), ("bias", (1,))])
        self.batch = batch
        self.vector: Vector = np.zeros(dimension + 1, np.float32)  # (D + 1,), the initial parameters of every node
        self._seed, self._peer_id, self._lr, self._noise = seed, peer_id, lr, noise
        self.place = (-1, 0)  # round and step of the next batch, in that round
        self.before_step: Callable[[int, int], None] | None = None  # told round and step
        truth = _generator(f"truth {seed}")
        self._truth = truth.standard_normal(dimension + 1).astype(np.float32)
        self._heldout = self._draw(_generator(f"heldout {seed}"), HELDOUT_SAMPLES)

    def step(self, *, round: int, steps: int) -> float:
        """Take `steps` gradient steps on batches of this node and round; their mean loss, nan for none."""
        if round != self.place[0]:
            self.place = (round, 0)
        losses = []
        for _ in range(steps):
            if self.before_step is not None:
                self.before_step(*self.place)
            generator = self._batch(self._peer_id, round, self.place[1])
            self.place = (round, self.place[1] + 1)
            x, y = self._draw(generator, self.batch)
            error = x @ self.vector - y  # (B,)
            self.vector -= np.float32(self._lr * 2 / self.batch) * (x.T @ error)
            losses.append(float(np.mean(error**2)))
        return float(np.mean(losses)) if losses else float("nan")

    def drawn(self, peer_id: str, round: int, steps: Sequence[int]) -> float:
        """Mean squared error on what a node's steps in a round are taken on."""
        losses = []
        for step in steps:
            x, y = self._draw(self._batch(peer_id, round, step), self.batch)
            losses.append(float(np.mean((x @ self.vector - y) ** 2)))
        return float(np.mean(losses))

    def replay(self, parameters: Vector, *, peer_id: str, round: int, step: int, steps: int) -> Vector:
        """Where a node's steps from `parameters` (D + 1,) lead; this model is then what it was before."""
        mine, place, who, told = self.vector.copy(), self.place, self._peer_id, self.before_step
        try:
            self.vector[:], self.place, self._peer_id, self.before_step = parameters, (round, step), peer_id, None
            self.step(round=round, steps=steps)
            return self.vector.copy()
        finally:
            self.vector[:], self.place, self._peer_id, self.before_step = mine, place, who, told

    def heldout_loss(self, seed: int | None = None) -> float:
        """Mean squared error on samples that are the same on every node; with `seed` on others that it draws."""
        x, y = self._heldout if seed is None else self._judged(seed)
        return float(np.mean((x @ self.vector - y) ** 2))

    def slope(self, seed: int, first: int, last: int) -> tuple[float, Vector]:
        """Loss and its gradient (D + 1,) on some of the SEQUENCES parts of the samples that `seed` draws."""
        part = slice(first * JUDGED_SAMPLES, last * JUDGED_SAMPLES)
        x, y = (values[part] for values in self._judged(seed))
        error = x @ self.vector - y
        return float(np.mean(error**2)), np.asarray(2 / len(x) * (x.T @ error), np.float32)

    def _batch(self, peer_id: str, round: int, step: int) -> np.random.Generator:
        return _generator(f"batches {self._seed} {peer_id} {round} {step}")

    def _judged(self, seed: int) -> tuple[Vector, Vector]:
        return self._draw(_generator(f"heldout {self._seed} {seed}"), HELDOUT_SAMPLES)

    def _draw(self, generator: np.random.Generator, samples: int) -> tuple[Vector, Vector]:
        """Inputs (samples, D + 1), the last column ones for the bias, and targets (samples,)."""
        x = generator.standard_normal((samples, len(self._truth)), dtype=np.float32)
        x[:, -1] = 1.0
        noise = generator.standard_normal(samples, dtype=np.float32)
        return x, x @ self._truth + np.float32(self._noise) * noise


def _generator(purpose: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big"))
