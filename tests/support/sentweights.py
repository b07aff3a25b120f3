"""Weights as those who only sample get them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

P = TypeVar("P", bound=nn.Module)


@torch.no_grad()
def as_sent(policy: P) -> P:
    """The policy, with each parameter rounded to bf16."""
    for parameter in policy.parameters():
        parameter.copy_(parameter.bfloat16())
    return policy
