"""The inner loop: steps on one node's own text, between two exchanges.

All parameters are views into one flat float32 vector and all gradients into another, in the order of the layout. So
what is exchanged is the very memory that is trained, clipping is one norm, and nothing is gathered or scattered.

The batch of a step is a function of (run, node, round, step) and of the node's text alone, and the moments lie in one
flat vector too (`optimizer.py`): so whoever has the state before some steps can repeat them (`training/verify`).
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.training import mapped
from swarmnode.training.optimizer import Optimizer
from swarmnode.training.outer import Layout
from swarmnode.training.ranks import ALONE, Ranks
from swarmnode.training.runspec import RunSpec
from swarmnode.training.seed import EPSILON, bits_of, blocks, byte_of
from swarmnode.training.tasks import Task, TaskError
from swarmnode.training.verify.trace import State


@dataclass(frozen=True)
class Progress:
    steps: int
    samples: int  # steps × batch
    tokens: int
    loss: float  # mean over the steps, in the task's unit; nan without a step
    seconds: float  # wall time inside inner steps
    told: bytes = b""  # of each step, in a run by seeds


def layout_of(model: nn.Module) -> Layout:
    """The layout of a model's trainable parameters, in the model's order."""
    return Layout.of([(name, tuple(parameter.shape)) for name, parameter in trained(model)])


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that require a gradient, shared ones once: what is trained, and so what is exchanged."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def flatten_into(model: nn.Module, vector: Tensor, *, keep: bool) -> Tensor:
    """Make the trainable parameters of `model` views of `vector` (P,) float32; all of their gradients, (P,) as well.

    With `keep` the model takes the vector's values, otherwise the vector takes the model's. The gradients stay in place
    for good: they are zeroed, never dropped.
    """
    gradients = torch.zeros_like(vector)
    for slot, (_, parameter) in zip(layout_of(model).slots, trained(model), strict=True):
        view = vector[slot.place].view(slot.shape)
        if not keep:
            view.copy_(parameter.data)
        parameter.data = view
        parameter.grad = gradients[slot.place].view(slot.shape)
    return gradients


class InnerLoop:
    """Inner steps of one task. The optimizer's moments live on from round to round and are never exchanged."""

    def __init__(
        self,
        spec: RunSpec,
        task: Task,
        *,
        peer_id: str,
        vector: Tensor,
        keep: bool,
        ranks: Ranks = ALONE,
        moments: Tensor | None = None,
    ) -> None:
        """`ranks`: who shares the steps of `train`; everything else is done alone. `moments`: where they shall lie.

        Raises TaskError where the run wants what the task's model cannot do.
        """
        if spec.inner.checkpointing:
            if not hasattr(task.model, "checkpointing"):
                raise TaskError(
                    "[inner] checkpointing: the task's model has no attribute `checkpointing` to set; leave the key "
                    "out, or have the model call torch.utils.checkpoint where that is set"
                )
            task.model.checkpointing = True  # it computes its activations anew in the backward pass
        own = ranks.own(task.model)
        self._gradients = flatten_into(own, vector, keep=keep)
        self._spec = spec
        self.micro_batch = spec.inner.batch  # samples that are computed together: fewer where memory is short
        self._task = task
        self._peer_id = peer_id
        self._ranks = ranks
        self._vector = vector
        self.optimizer = Optimizer(task.model, spec, ranks, moments)
        self._round = -1
        self._step_in_round = 0
        self._generator = torch.Generator()
        self._told = bytearray()  # by the steps of one `train`, in a run by seeds

    @property
    def place(self) -> tuple[int, int]:
        """Round and step of the next batch, where the next call is for the same round as the last."""
        return self._round, self._step_in_round

    def view(self) -> State:
        """All that the next step depends on, besides its batch: on a CPU the memory itself, which steps overwrite."""
        moments = self.optimizer.moments if self.optimizer.updates else self._vector.new_empty(0)
        return State(self._vector.cpu().numpy(), moments.cpu().numpy(), self.optimizer.updates)

    def state(self) -> State:
        """A copy of the same."""
        now = self.view()
        return State(mapped.copied(now.parameters), mapped.copied(now.moments), now.updates)

    def fits(self, state: State) -> bool:
        moments = self.optimizer.moments.numel() if state.updates else 0
        return state.parameters.shape == self._vector.shape and state.moments.shape == (moments,)

    def take(self, state: State) -> None:
        """Go on from this state, which fits."""
        moments = self.optimizer.moments
        with warnings.catch_warnings(action="ignore"):  # that a mapped file cannot be written to: it is only read
            self._vector.copy_(torch.from_numpy(state.parameters))
            if state.updates:
                moments.copy_(torch.from_numpy(state.moments))
            else:
                moments.zero_()
        self.optimizer.count(state.updates)

    @contextmanager
    def replayed(self, state: State, *, peer_id: str, round: int, step: int, steps: int) -> Iterator[State]:
        """Where a node's steps from `state`, which fits, lead on the task's present text, while the block lasts.

        This loop is then what it was before.
        """
        mine, place, who, ranks = self.state(), self.place, self._peer_id, self._ranks
        try:
            self.take(state)
            self._peer_id, self._round, self._step_in_round, self._ranks = peer_id, round, step, ALONE
            for _ in range(steps):
                self._step()
            yield self.view()
        finally:
            self.take(mine)
            self._peer_id, (self._round, self._step_in_round), self._ranks = who, place, ranks

    def places(self, peer_id: str, round: int, steps: Iterable[int], *, size: int) -> list[tuple[int, int]]:
        """Which bytes of a text of `size` a node's steps are drawn from; the task must have `places`."""
        batch, drawn = self._spec.inner.batch, (self._chance(peer_id, round, step) for step in steps)
        return [place for chance in drawn for place in self._task.places(batch, chance, size)]

    @torch.no_grad()
    def drawn(self, peer_id: str, round: int, steps: Sequence[int]) -> float:
        """Mean loss of the present parameters on what a node's steps draw from the task's present text."""
        total = 0.0
        for step in steps:
            total += float(self._loss(self._task.draw(self._spec.inner.batch, self._chance(peer_id, round, step))))
        return total / len(steps)

    def train(self, *, round: int, steps: int, seconds: float, between: Callable[[], bool]) -> Progress:
        """Run inner steps until `steps` are done or `seconds` have passed, at least one unless `between` says stop.

        `between` is called before every step and returns whether to stop; the time it takes does not count. A further
        call for the same round goes on where the last one ended.
        """
        if round != self._round:
            self._round, self._step_in_round = round, 0
        self._told.clear()
        losses = torch.zeros((), dtype=torch.float64)
        done, spent = 0, 0.0
        while done < steps and spent < seconds and not between():
            started = time.perf_counter()
            losses += self._step().double().cpu()
            spent += time.perf_counter() - started
            done += 1
        samples, loss = done * self._spec.inner.batch, float(losses) / done if done else math.nan
        return Progress(done, samples, samples * self._task.tokens_per_sample, loss, spent, bytes(self._told))

    def mend(self) -> bool:
        """Where parameters or moments are no numbers, begin with moments of zero: they would spoil every later step.

        Whether that was so. Between two `train`; all ranks call it together.
        """
        if self.optimizer.updates:
            whole = bool(self._vector.isfinite().all()) and bool(self.optimizer.moments.isfinite().all())
            if bool(self._ranks.sum(torch.tensor(float(not whole)))):
                self.optimizer.moments.zero_()
                self.optimizer.count(0)
                return True
        return False

    def steer(self, values: Mapping[str, Any]) -> None:
        """Other values of [inner] from the next step on, by key; the others stay as they are."""
        if values:
            self._spec = self._spec.updated(inner=values)
            self.optimizer.inner = self._spec.inner

    def slope(self, batch: Tensor) -> tuple[float, Tensor]:
        """Loss of the present parameters on a batch, and its gradient (P,), which the next step overwrites.

        As many samples at a time as a step takes, so that it needs no more memory than a step.
        """
        self._gradients.zero_()
        total = torch.zeros((), dtype=torch.float64)
        for part in batch.split(self.micro_batch):
            loss = self._task.loss(part) * (len(part) / len(batch))
            # Ranks that divide the model all do the same, and what they have is summed up.
            (loss / self._ranks.count if self._ranks.sharded else loss).backward()
            total += loss.detach().double().cpu()
        return float(total), self._gradients

    def _chance(self, peer_id: str, round: int, step: int) -> torch.Generator:
        """What draws the batch of one step: another for each node, round and step, the same whoever repeats it."""
        return self._generator.manual_seed(seed_of(self._spec.run.seed, peer_id, round, step))

    def _step(self) -> Tensor:
        """One inner step; returns its loss, a scalar without gradient."""
        inner = self._spec.inner
        batch = self._task.draw(inner.batch, self._chance(self._peer_id, *self.place))
        loss = self._accumulate(self._ranks.part(batch), len(batch))
        self._ranks.reduce(self._gradients)
        if inner.clip > 0:
            norm = self._ranks.norm(self._gradients)
            self._gradients.mul_((inner.clip / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step(inner.rate_at(*self.place))
        self._ranks.publish()
        self._step_in_round += 1
        return self._ranks.sum(loss)

    def _accumulate(self, part: Tensor, size: int) -> Tensor:
        """Gradients of this part of a batch of `size`, and its share of the loss: the same however it is divided.

        Where a device has too little memory for so many samples at once, half as many are tried, from then on.
        """
        most = -(-size // self._ranks.count)  # of a rank: all pass equally often, as those that divide the model meet
        while True:
            self._gradients.zero_()
            total = torch.zeros((), device=self._vector.device)
            try:
                passes = -(-most // self.micro_batch)
                for some in part.tensor_split(passes) if passes > 1 else [part]:
                    loss = self._loss(some if len(some) else part[:1]) * (len(some) / size)
                    loss.backward()
                    total += loss.detach()
                return total
            except torch.OutOfMemoryError:
                at_once = min(len(part), self.micro_batch)
                if at_once == 1 or self._ranks.sharded:  # such ranks meet within a step
                    raise
                self.micro_batch = at_once // 2
            torch.cuda.empty_cache()

    def _loss(self, batch: Tensor) -> Tensor:
        """The task's loss, computed in the run's precision; float32."""
        bf16 = self._spec.inner.precision == "bf16"
        with torch.autocast(self._vector.device.type, torch.bfloat16, enabled=bf16):
            return self._task.loss(batch).float()


class Probes(InnerLoop):
    """The loop of a run by seeds (training/seed.py): its steps move nothing, and tell a byte each, as `Progress.told`.

    A step draws the batch that any inner step of this node, round and number draws, and a direction by the same names.
    It needs two forward passes and no gradient, so no activations are kept; where gradients would lie, the parameters
    wait meanwhile, so that they are afterwards what they were, bit for bit. So of vectors it holds two, and z as a byte
    each. What it measures is in the run's precision: two losses differ by some thousandths, which bf16 cannot tell
    apart for a single batch as well as fp32 can.
    """

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


def seed_of(*names: object) -> int:
    """A seed that follows from these alone, in 56 bits."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, names)).encode()).digest()[:7], "big")
