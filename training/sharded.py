"""FSDP2: ranks that divide a model among them, parameters, gradients and moments, as well as each batch.

    ranks = Sharded(ranks, device, model)
    own = ranks.own(model)               # a stand-in with this rank's rows of each parameter, for loop and optimizer
    for place, part in ranks.pieces: ... # where those rows lie in the whole flat vector, and in this rank's

Each block of the model (a child of a ModuleList) is gathered as it is used and dropped behind it (`fully_shard`,
2304.11277). So a device holds its share of 20 bytes a parameter and a block or two whole; as it starts, it holds the
model once. A rank has whole rows, of each parameter those that `torch.chunk` gives it. They lie in a flat vector as the
whole model does in a trainer of one rank, so that the inner loop is the same; FSDP2 gathers from copies of them. Ranks
hand over no parameters: all map the memory that the daemon reads, and each writes its rows there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swarmnode.training.ranks import Ranks


class Sharded(Ranks):
    """One rank's view of all, and its part of the model. All ranks do all that runs the model, each on all of it."""

    sharded = True
    shared = Ranks.shared | {"evaluate", "heldout", "slope", "sample", "drawn"}

    def __init__(self, ranks: Ranks, device: str, model: nn.Module) -> None:
        super().__init__(ranks.rank, ranks.count, ranks.others)
        mesh = init_device_mesh(device, (self.count,))
        for module in (*_blocks(model), model):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_force_sum_reduction_for_comms(True)  # losses are shares of the batch's already
            sharded.set_gradient_divide_factor(1.0)
        self._model = model
        self._stand_in, self._owned = nn.Module(), dict[Tensor, nn.Parameter]()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            own = nn.Parameter(_rows(parameter).clone())
            self._stand_in.register_parameter(name.replace(".", "/"), own)
            self._owned[parameter] = own
            parameter.register_post_accumulate_grad_hook(self._collect)
        self.pieces = self.pieces_of(self._owned)

    def own(self, model: nn.Module) -> nn.Module:
        return self._stand_in

    def pieces_of(self, parameters: Iterable[Tensor]) -> list[tuple[slice, slice]]:
        pieces, offset, at = [], 0, 0
        for parameter in parameters:
            start = offset + self._first(len(parameter)) * (parameter.numel() // len(parameter))
            size = _rows(parameter).numel()
            pieces.append((slice(start, start + size), slice(at, at + size)))
            offset, at = offset + parameter.numel(), at + size
        return pieces

    def _first(self, rows: int) -> int:
        """The first of so many rows that is this rank's, or was, if there were enough."""
        return min(rows, self.rank * -(-rows // self.count))

    def owned(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._owned[parameter]

    def gathered(self, rows: Tensor, shape: torch.Size) -> Tensor:
        most = -(-shape[0] // self.count)  # rows of a rank
        mine = torch.nn.functional.pad(rows, (0, 0, 0, most - rows.shape[1]))
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(parts, mine)
        return torch.cat(parts, dim=1)[:, : shape[0]]

    def rows_of(self, matrices: Tensor) -> Tensor:
        rows = matrices.shape[1]
        return matrices[:, self._first(rows) :][:, : -(-rows // self.count)]

    @torch.no_grad()
    def publish(self) -> None:
        self._model.reshard()  # what a forward pass without a backward pass left gathered is of old rows
        torch._foreach_copy_([_rows(theirs) for theirs in self._owned], [own.data for own in self._owned.values()])

    @torch.no_grad()
    def _collect(self, parameter: Tensor) -> None:
        """Take the gradient of rows as soon as it is summed up over the ranks, in the backward pass."""
        gradient, own = parameter.grad, self._owned[parameter]
        own.grad.add_(_rows(gradient))
        parameter.grad = None

    def reduce(self, gradients: Tensor) -> None:
        """They are: `_collect`."""

    def norm(self, gradients: Tensor) -> Tensor:
        return self.sum(torch.linalg.vector_norm(gradients).square()).sqrt()

    def meet(self) -> None:
        dist.barrier()


def _rows(tensor: Tensor) -> Tensor:
    """This rank's, the very memory."""
    return tensor.data.to_local()


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The children of all ModuleLists that are in no other one."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
    return found
