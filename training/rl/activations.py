"""What a policy's head is given: the final activations from which each token was drawn, seen by a hook. Torch.

with watched(policy) as seen:
    logits = policy(tokens)
    seen.final                                               # (B, T, C), float32, on the CPU
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.training.rl.policies import Policy


@dataclass
class Seen:
    """The activations of the last call; (B, T, C), or (B, C) where the policy gave its head one place only."""

    final: Tensor

    @property
    def last(self) -> Tensor:
        """Those of the last place, (B, C)."""
        return self.final[:, -1] if self.final.dim() == 3 else self.final


@contextmanager
def watched(policy: Policy) -> Iterator[Seen]:
    """See what `policy.head` is given, for as long as the block lasts."""
    seen = Seen(torch.empty(0))

    def see(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.final = given[0].detach().float().cpu()

    hook = policy.head.register_forward_pre_hook(see)
    try:
        yield seen
    finally:
        hook.remove()
