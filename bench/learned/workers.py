"""Workers of one simulated swarm in one process: tasks, inner loops and parameters are the product's own.

    workers = Workers(Size(), seed=1)
    workers.begin(spec, stream="continued")                  # fresh optimizers, as a node that joins has
    deltas = workers.train([phi] * 8, round=0, steps=30)     # what each of them would offer

Workers train in threads of one torch thread each: on a machine with other work they wait for nobody at barriers. What a
worker computes does not depend on how many threads there are.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learned.words import next_word_accuracy
from swarmnode.testing.runtext import RunText
from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.inner import InnerLoop, Probes, flatten_into, layout_of
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import InnerSection, ModelSection, RunSection
from swarmnode.training.tasks import Assignment

Vector = NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Size:
    """How large the experiment is."""

    workers: int = 8
    batch: int = 4  # sequences of a worker in a step
    model: ModelSection = field(default_factory=ModelSection)
    corpus: str = ""  # file or folder; empty is the standard library
    precision: str = "fp32"

    def spec(self, *, seed: int, **inner: Any) -> RunSpec:
        """A RunSpec with these values in its table [inner]."""
        given = {"batch": self.batch, "precision": self.precision, **inner}
        return RunSpec(
            run=RunSection(name="learning", seed=seed),
            model=self.model,
            inner=InnerSection(**given),
        )


class Workers:
    """The nodes of a swarm: each has its own slice of the text, and a model that is a view of its vector."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size, self.seed = size, seed
        self.peers = tuple(f"worker-{number}" for number in range(size.workers))
        self._folder = tempfile.TemporaryDirectory(prefix="swarmnode-workers-")
        # Slices follow from the run and the peer; one run for all arms gives them all the same slices.
        self.text = RunText(size.spec(seed=seed), Path(self._folder.name), size.corpus)
        spec = self.text.spec
        self.tasks = [ByteLM(spec, Assignment(spec.run_id, peer, **self.text.files(peer))) for peer in self.peers]
        self.parameters = layout_of(self.tasks[0].model).parameters
        self.vectors = [torch.empty(self.parameters) for _ in self.tasks]  # (P,) each
        for task, vector in zip(self.tasks, self.vectors, strict=True):
            flatten_into(task.model, vector, keep=False)
        self.initial: Vector = self.vectors[0].numpy().copy()
        self._loops: list[InnerLoop] = []
        self._judge = copy.copy(self.tasks[0])  # the same held-out text, a model of its own
        self._judge.model = copy.deepcopy(self.tasks[0].model)
        self._judged = torch.empty(self.parameters)  # (P,)
        flatten_into(self._judge.model, self._judged, keep=False)
        self._pool = ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,))

    def begin(self, spec: RunSpec, *, stream: str) -> None:
        """New inner loops; `stream` makes them draw other windows than those of another stream."""
        loop = Probes if spec.exchange.method == "seed" else InnerLoop
        self._loops = [
            loop(spec, task, peer_id=f"{peer}/{stream}", vector=vector, keep=True)
            for task, peer, vector in zip(self.tasks, self.peers, self.vectors, strict=True)
        ]

    def train(self, starts: Sequence[Vector], *, round: int, steps: int | Sequence[int]) -> list[Vector]:
        """Each worker's pseudo-gradient, start - theta, float32 (P,), after `steps` inner steps from its start.

        Of the first workers only, where there are fewer starts; as many steps each, or each its own number.
        """
        taken = [steps] * len(starts) if isinstance(steps, int) else steps

        def work(number: int) -> Vector:
            vector = self.vectors[number].numpy()
            vector[:] = starts[number]
            self._loops[number].train(round=round, steps=taken[number], seconds=float("inf"), between=lambda: False)
            return starts[number] - vector

        return self.map(work, range(len(starts)))

    def probe(self, start: Vector, *, round: int, steps: int) -> list[bytes]:
        """What each worker tells of so many steps from `start`, in a run by seeds."""

        def work(number: int) -> bytes:
            self.vectors[number].numpy()[:] = start
            return self._loops[number].train(
                round=round, steps=steps, seconds=float("inf"), between=lambda: False
            ).told  # fmt: skip

        return self.map(work, range(len(self.peers)))

    def heldout(self, parameters: Vector) -> tuple[float, float]:
        """Thorough held-out loss, bits per byte, and next-word accuracy, 0 to 1, on the same windows."""
        self._judged.numpy()[:] = parameters
        return self.map(lambda task: (task.evaluate(thorough=True), next_word_accuracy(task)), [self._judge])[0]

    def drawn_by(self, number: int, parameters: Vector, *, stream: str, round: int, steps: Sequence[int]) -> float:
        """Loss on what a worker's steps draw from its own slice."""
        self.vectors[number].numpy()[:] = parameters
        return self._loops[number].drawn(f"{self.peers[number]}/{stream}", round, steps)

    def slope_on(self, number: int, parameters: Vector, *, seed: int, first: int, last: int) -> Vector:
        """Gradient (P,) at a worker, on some of the windows that a judge's seed draws."""
        self.vectors[number].numpy()[:] = parameters
        return self._loops[number].slope(self.tasks[number].heldout(seed)[first:last])[1].numpy().copy()

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`work` of each of `items`, on all cores, in order."""
        return list(self._pool.map(work, items))

    def close(self) -> None:
        self._pool.shutdown()
        self._folder.cleanup()


class DataParallel:
    """A task whose batches are those of all workers together: synchronous training.

    The inner loop around it takes one step with the gradient of their mean loss, as one data-parallel run does.
    """

    def __init__(self, workers: Workers) -> None:
        self._tasks = workers.tasks
        self.model = copy.deepcopy(workers.tasks[0].model)
        self.tokens_per_sample = workers.tasks[0].tokens_per_sample * len(workers.tasks)

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        """`samples` windows of each worker's text."""
        return torch.cat([task.draw(samples, generator) for task in self._tasks])

    def loss(self, batch: Tensor) -> Tensor:
        """Bits per byte of the windows (B, context + 1)."""
        loss: Tensor = self.model.loss(batch) / math.log(2)
        return loss

    def feed(self, texts: Sequence[str]) -> None:
        raise NotImplementedError("workers hold their text")

    def evaluate(self, *, thorough: bool) -> float:
        return self._tasks[0].evaluate(thorough=thorough)

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        return self._tasks[0].sample(prompt, length=length, temperature=temperature, seed=seed)
