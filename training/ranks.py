"""Ranks: several processes that are one trainer, each with a device and its part of every batch (data parallel).

    ranks = Ranks(0, 2, [socket])            # `confined.py` forks the others, each of which is Ranks(1, 2)
    ranks.connect(store, device)             # gloo between CPUs, NCCL between CUDA devices
    loss = task.loss(ranks.part(batch)); ...; ranks.reduce(gradients)

Rank 0 speaks with the daemon and tells the others what changes the parameters or the text: `init`, `feed`, `train`, and
each step of it. So all do the same steps, and as an all-reduce leaves the same bits everywhere, they hold the same
parameters (DDP); rank 0 answers everything else alone. `sharded.py` divides the model as well.

Where one rank ends, for whatever reason, all end: the others die with rank 0 (PR_SET_PDEATHSIG), and rank 0 waits for
none that has ended (`end_with_others`). The daemon then starts anew.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from torch import Size, Tensor, nn

PATIENCE = timedelta(minutes=5)  # for a rank that lives and takes no part in a step
STORE = "ranks"  # file in the trainer's own directory by which the ranks find each other


class Ranks:
    """One rank's view of all. Without a word to the contrary: the only one."""

    sharded = False
    shared = frozenset({"init", "train", "feed", "remember"})  # commands that all ranks obey

    def __init__(self, rank: int = 0, count: int = 1, others: Sequence[socket.socket] = ()) -> None:
        """`others`: of rank 0, sockets to the ranks 1, 2, ...; of another rank, none."""
        self.rank, self.count, self.others = rank, count, others
        self.pieces = self.pieces_of(())  # of this rank's flat vector

    def connect(self, folder: str, device: str) -> None:
        """Meet the other ranks; all call it at the same time. Raises RuntimeError where they do not come."""
        if self.count == 1:
            return
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_CUMEM_ENABLE"] = "0"  # it passes memory on by local sockets, which the sandbox refuses
        by = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        store = dist.FileStore(os.path.join(folder, STORE), self.count)
        dist.init_process_group(by, store=store, rank=self.rank, world_size=self.count, timeout=PATIENCE)

    def part(self, batch: Tensor) -> Tensor:
        """This rank's samples of a batch, of which each rank has one at the least."""
        return batch.tensor_split(self.count)[self.rank] if self.count > 1 else batch

    def own(self, model: nn.Module) -> nn.Module:
        """What this rank updates of `model`, always the same: all of it."""
        return model

    def pieces_of(self, parameters: Iterable[nn.Parameter]) -> list[tuple[slice, slice]]:
        """Of values of these parameters, one behind the other: where this rank's lie in all of them, and here."""
        return [(slice(None), slice(None))]

    def owned(self, parameter: nn.Parameter) -> nn.Parameter:
        """What `own` gave for a parameter of the model."""
        return parameter

    def gathered(self, rows: Tensor, shape: Size) -> Tensor:
        """Matrices (n, *shape) of which each rank has some rows, as `rows_of` gives them."""
        return rows

    def rows_of(self, matrices: Tensor) -> Tensor:
        """This rank's rows of matrices (n, a, b)."""
        return matrices

    def publish(self) -> None:
        """What this rank owns has changed: the model is to be run with it."""

    def reduce(self, gradients: Tensor) -> None:
        """Make of this rank's `gradients` those of the whole batch, for what it owns."""
        self.sum(gradients)

    def norm(self, gradients: Tensor) -> Tensor:
        """The norm of the whole model's gradients."""
        import torch

        return torch.linalg.vector_norm(gradients)

    def meet(self) -> None:
        """Go on when every rank that was told to is here."""

    def sum(self, values: Tensor) -> Tensor:
        """`values`, now the sum over all ranks, the same bits in each."""
        if self.count > 1:
            import torch.distributed as dist

            dist.all_reduce(values)
        return values

    def tell(self, command: dict[str, Any]) -> None:
        if self.others:
            packed = msgpack.packb(command)
            for other in self.others:
                other.sendall(packed)

    def end_with_others(self) -> None:
        """From now on this process ends where another rank does: a step would wait for it in vain."""
        if self.others:
            threading.Thread(target=_await_an_end, daemon=True).start()


ALONE = Ranks()


def _await_an_end() -> None:
    _, status = os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    print(f"a rank of the trainer {how}; the others end with it", file=sys.stderr, flush=True)
    os._exit(1)
