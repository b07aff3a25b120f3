"""How much memory a task's model takes, before any of it is taken: a step of it on torch's meta device.

Tensors there have shapes and no values, so a step forward and back takes none of the memory that is counted: the most
that its tensors take together, as autocast and activation checkpointing have it. Attention is taken to keep no matrix
of all pairs, which no device of today needs.

A small model of a task of this program takes its step with values: on `meta`, torch imports its compiler for the first
division, two seconds of CPU time and 70 MB.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from swarmnode.training.memory import FLOAT, Weight
from swarmnode.training.optimizer import hidden_matrices
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment

SMALL = 64 << 20  # bytes that the step of a small model takes at the most, about
OUTPUTS = 3  # times the largest tensor of a step, as the loss takes logits, their softmax and its gradient
PRODUCTS = (F.linear, torch.matmul, torch.bmm, torch.addmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__)


def weigh(task: type[Any], spec: RunSpec, assignment: Assignment, micro_batch: int = 0) -> Weight | None:
    """The weight of the run's model, of whose steps so many samples are computed at once, 0: all of them.

    None where the task does not tell (`Task.skeleton`).
    """
    if not hasattr(task, "skeleton"):
        return None
    with torch.device("cpu" if task.__module__.startswith("swarmnode.") and _is_small(spec) else "meta"):
        model: nn.Module = task.skeleton(spec, assignment)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        if hasattr(model, "checkpointing"):
            model.checkpointing = spec.inner.checkpointing
        step = FLOAT * max(parameter.numel() for parameter in trained)  # its gradient, before it is added up
        if hasattr(model, "loss"):
            sequences = min(spec.inner.batch, micro_batch or spec.inner.batch)
            batch = torch.zeros(sequences, spec.model.context + 1, dtype=torch.long)
            try:
                step = _most(model, batch, bf16=spec.inner.precision == "bf16")
            except RuntimeError:  # it looks at values, which there are none of
                step += _by_layers(model, batch.numel())
    return Weight(
        sum(parameter.numel() for parameter in trained),
        sum(parameter.nbytes for parameter in frozen),
        sum(matrix.numel() for matrix in hidden_matrices(model) if matrix.requires_grad),
        step,
    )


def _is_small(spec: RunSpec) -> bool:
    """As a transformer of the run's shape is, at the least as large as our other models of this shape."""
    shape, vocabulary = spec.model, spec.data.vocabulary
    weights = 12 * shape.layers * shape.width**2 + 2 * vocabulary * shape.width
    activations = spec.inner.batch * (shape.context + 1) * (32 * shape.layers * shape.width + OUTPUTS * vocabulary)
    return not shape.base and FLOAT * (weights + activations) <= SMALL


def _by_layers(model: nn.Module, tokens: int) -> int:
    """About the same, where no loss can be computed: what goes into and comes out of each matrix, and logits."""
    matrices = [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2]
    widest = max((max(shape) for shape in matrices), default=0)
    return FLOAT * tokens * (sum(map(sum, matrices)) + OUTPUTS * widest)


def _most(model: nn.Module, batch: Tensor, *, bf16: bool) -> int:
    """Bytes that a step takes at the most beside parameters and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with _Computed(bf16) as computed, _Taken(model) as taken:
        loss: Tensor = model.loss(batch)
        computed.cast = None
        # `backward` would leave these modes, in which checkpointing has to compute layers anew.
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
    return taken.most


class _Taken(TorchDispatchMode):
    """Adds up the bytes of tensors while there are any, but of those of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._now = self.most = 0
        self._seen = WeakIdKeyDictionary()
        for parameter in model.parameters():
            for own in (parameter, parameter if parameter.grad is None else parameter.grad):
                self._seen[own.untyped_storage()] = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nobody compiles this; to be kept from it, torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(Tensor, self._count, func(*args, **(kwargs or {})))

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen[storage] = True
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return tensor

    def _add(self, size: int) -> None:
        self._now += size
        self.most = max(self.most, self._now)


class _Computed(TorchFunctionMode):
    """Has products and attention be computed as on a device: torch has no autocast and no such kernel on `meta`."""

    def __init__(self, bf16: bool) -> None:
        super().__init__()
        self._bf16 = bf16
        self.cast: Any = WeakIdKeyDictionary()  # weights, of which autocast keeps what it cast going forward; or None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len(args) >= 3:
            q, k, v = (self._lower(each) for each in args[:3])
            if (groups := q.shape[1] // k.shape[1]) > 1:
                k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        if func in PRODUCTS:
            args = tree_map_only(Tensor, self._lower, args)
        elif func is F.cross_entropy:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))

    def _lower(self, tensor: Tensor) -> Tensor:
        if not self._bf16 or tensor.dtype != torch.float32:
            return tensor
        if self.cast is None or not isinstance(tensor, nn.Parameter):
            return tensor.bfloat16()
        if tensor not in self.cast:
            self.cast[tensor] = tensor.bfloat16()
        return self.cast[tensor]
