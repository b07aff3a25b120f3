"""LoRA (Hu et al., 2106.09685): a few trained numbers beside the frozen weights of a model. Torch only, no `peft`.

    base = Adapted(model, rank=16)                        # freezes it; sets hooks on its linear layers
    adapters = base.fresh(seed=1)                         # {layer: (A, B)}, B = 0: the model is as it was
    with base.using(adapters):
        model(tokens)                                     # W x + (alpha / rank) B A x in every layer

Several sets of adapters share one model: a policy and its reference cost one set of weights together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ALPHA = 2.0  # scale of the change is ALPHA, whatever the rank: alpha = 2 · rank, as is usual

Pair = tuple[Tensor, Tensor]  # A (rank, in), B (out, rank)


class Adapted:
    """A frozen model with places for adapters. `model` stays usable: without adapters it is as before."""

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        """Raises ValueError where the model has no linear layer but its head."""
        self.model, self.rank = model.requires_grad_(False), rank
        self._active: Mapping[str, Pair] | None = None
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self._shapes: dict[str, tuple[int, int]] = {}  # (in, out)
        for name, module in model.named_modules():
            shape = _in_out(module)
            if shape is not None and module is not head:
                self._shapes[name] = shape
                module.register_forward_hook(self._hook(name))
        if not self._shapes:
            raise ValueError("the model has no linear layers to adapt")

    def fresh(self, *, seed: int) -> dict[str, Pair]:
        """Adapters that change nothing yet; A is random, as `seed` says, uniform as in `nn.Linear`."""
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name, (inputs, outputs) in self._shapes.items():
            bound = 1 / math.sqrt(inputs)
            a = torch.empty(self.rank, inputs).uniform_(-bound, bound, generator=generator)
            pairs[name] = (a, torch.zeros(outputs, self.rank))
        return pairs

    @contextmanager
    def using(self, adapters: Mapping[str, Pair]) -> Iterator[None]:
        """The model with these adapters, for as long as the block lasts."""
        before, self._active = self._active, adapters
        try:
            yield
        finally:
            self._active = before

    @torch.no_grad()
    def merged(self, name: str, pair: Pair) -> Tensor:
        """The weight of one layer with its adapter in it, of the shape and type of the frozen one: W + ALPHA B A."""
        module = self.model.get_submodule(name)
        a, b = (part.detach().to(module.weight.device) for part in pair)
        change = ALPHA * (b @ a)  # (out, in)
        change = change if isinstance(module, nn.Linear) else change.T
        return (module.weight.float() + change).to(module.weight.dtype)

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self._active is None:
                return output
            a, b = self._active[name]
            x = given[0]  # (..., in)
            change: Tensor = (x.float() @ a.T.to(x.device)) @ b.T.to(x.device)  # (..., out)
            return output + (ALPHA * change).to(output.dtype)

        return add


def _in_out(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # of GPT-2 in transformers: a linear layer, its weight (in, out)
        inputs, outputs = module.weight.shape
        return int(inputs), int(outputs)
    return None
