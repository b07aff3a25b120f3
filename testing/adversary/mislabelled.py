"""A byte-lm that learns the wrong labels: 255 - b where the text has b. For adversaries in local swarms and tests only.

It is no built-in task: an adversary's trainer loads this file by its path, with the run's text and held-out part.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.training.byte_lm import ByteLM

LAST = 255


class MislabelledByteLM(ByteLM):
    """Trains on flipped labels and measures as the honest task does, so that its owner still judges others' work."""

    def loss(self, batch: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # measuring, not training
            return super().loss(batch)
        logits = self.model(batch[:, :-1])  # (B, T, 256)
        flipped = LAST - batch[:, 1:].reshape(-1)
        return F.cross_entropy(logits.reshape(-1, LAST + 1), flipped) / math.log(2)
