"""A task with many parameters and little work: `swarmnode run --task wide_task.py:Wide`.

A step sleeps for as many milliseconds as the run's `[model] context`, as a node waits whose accelerator computes, and
then takes a dense gradient of layers × width² parameters. So several nodes with large models fit on a few cores, and
what their exchange costs shows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment


class Matrices(nn.Module):
    """`layers` matrices of width × width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))
        self.register_buffer("noise", torch.randn(width, width))

    def distance(self, places: Sequence[int]) -> Tensor:
        """Mean squared distance from the noise as it is turned to each of these places, a scalar."""
        near = [self.noise.view(-1).roll(place).view_as(self.noise) for place in places]
        apart = [(matrix - sum(near) / len(near)).square().mean() for matrix in self.matrices]
        return torch.stack(apart).mean()


class Wide:
    """Its loss is a distance from noise, which each sample turns elsewhere: what members learn differs, as it does."""

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        self.tokens_per_sample = spec.model.context
        self._pause = spec.model.context / 1000
        torch.manual_seed(spec.run.seed)
        self.model = Matrices(spec.model.layers, spec.model.width).to(device)

    def feed(self, texts: Sequence[str]) -> None:
        """There is nothing to read."""

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.model.noise.numel(), (samples,), generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        time.sleep(self._pause)
        return self.model.distance(batch.tolist())

    @torch.no_grad()
    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        return float(self.model.distance(range(4)))

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        return b""
