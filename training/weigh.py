"""How much memory a task's model takes, before any of it is taken: its shapes on torch's meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from swarmnode.training.memory import FLOAT, Weight
from swarmnode.training.optimizer import hidden_matrices
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment

OUTPUTS = 2  # times the largest tensor of a step, as the loss takes logits, their softmax and its gradient
ARRIVING = 2  # gradients of the largest parameter that are added up: of the embedding and of a head tied to it


def weigh(task: type[Any], spec: RunSpec, assignment: Assignment, micro_batch: int = 0) -> Weight | None:
    """The weight of the run's model, of whose steps so many samples are computed at once, 0: all of them.

    None where the task does not tell (`Task.skeleton`).
    """
    if not hasattr(task, "skeleton"):
        return None
    with torch.device("meta"):
        model: nn.Module = task.skeleton(spec, assignment)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        step = ARRIVING * FLOAT * max(parameter.numel() for parameter in trained)
        if hasattr(model, "checkpointing"):
            model.checkpointing = spec.inner.checkpointing
        if hasattr(model, "loss"):
            sequences = min(spec.inner.batch, micro_batch or spec.inner.batch)
            batch = torch.zeros(sequences, spec.model.context + 1, dtype=torch.long)
            try:
                step += _saved(model, batch)
            except RuntimeError:  # it looks at values, which there are none of
                step += _by_layers(model, batch.numel())
    return Weight(
        sum(parameter.numel() for parameter in trained),
        sum(parameter.nbytes for parameter in frozen),
        sum(matrix.numel() for matrix in hidden_matrices(model) if matrix.requires_grad),
        step,
    )


def _by_layers(model: nn.Module, tokens: int) -> int:
    """About the same, where no loss can be computed: what goes into and comes out of each matrix, and logits."""
    matrices = [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2]
    widest = max((max(shape) for shape in matrices), default=0)
    return FLOAT * tokens * (sum(map(sum, matrices)) + OUTPUTS * widest)


def _saved(model: nn.Module, batch: Tensor) -> int:
    """Bytes that the backward pass of a loss needs, beside parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # or a storage could be freed, and another get its address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            sizes[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(batch)  # type: ignore[operator]
    return sum(sizes.values()) + OUTPUTS * max(sizes.values(), default=0)
