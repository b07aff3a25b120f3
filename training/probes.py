"""The inner loop of a run by seeds (training/seed.py): its steps move nothing, and tell a byte each.

A step draws the batch that any inner step of this node, round and number draws, and a direction by the same names. It
needs two forward passes and no gradient, so no activations are kept; where gradients would lie, the parameters wait
meanwhile, so that they are afterwards what they were, bit for bit. So of vectors it holds two, and z as a byte each.

    loop.train(round=3, steps=20, ...).told     # 20 bytes, what `seed.Tally.add` takes of this node's round 3

What a step measures is in the run's precision. Two losses differ by some thousandths, which bf16 cannot tell apart for
a single batch as well as fp32 can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarmnode.training.inner import InnerLoop
from swarmnode.training.seed import EPSILON, bits_of, blocks, byte_of
from swarmnode.training.tasks import TaskError


class Probes(InnerLoop):
    """Two-sided losses along directions, at the parameters that are in the vector when `train` is called."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As of `InnerLoop`. Raises TaskError where several ranks were to share the steps."""
        super().__init__(*arguments, **named)
        if self._ranks.count > 1:
            raise TaskError("a run by seeds needs no gradients to share: start the node with --ranks 1")

    @torch.no_grad()
    def _step(self) -> Tensor:
        inner, place = self._spec.inner, self.place
        batch = self._task.draw(inner.batch, self._chance(self._peer_id, *place))
        bits = bits_of(self._spec.run.seed, self._peer_id, *place, self._vector.numel())
        signs = torch.empty(self._vector.numel(), dtype=torch.int8)
        for part, ones in blocks(bits, signs.numel()):
            signs[part] = torch.from_numpy(ones)
        signs = signs.to(self._vector.device).mul_(2).sub_(1)
        here = self._gradients.copy_(self._vector)
        losses = []
        try:
            for side in (EPSILON, -EPSILON):
                torch.add(here, signs, alpha=side, out=self._vector)
                losses.append(self._whole(batch))
        finally:
            self._vector.copy_(here)
        slope = float(losses[0] - losses[1]) / (2 * EPSILON)
        self._told += byte_of(slope * inner.rate_at(*place), inner.clip)
        self._step_in_round += 1
        return (losses[0] + losses[1]) / 2

    def _whole(self, batch: Tensor) -> Tensor:
        """Loss of a batch, so many samples at a time as the owner of this machine allows; float64."""
        parts = batch.split(self.micro_batch)
        losses = (self._loss(part).double() * (len(part) / len(batch)) for part in parts)
        return sum(losses, torch.zeros(()).double())
