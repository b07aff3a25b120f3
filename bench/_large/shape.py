"""A language model of 135 M parameters with random weights, which learns random tokens: `--task shape.py:Shape`.

The shape is SmolLM2-135M's: 30 layers, width 576, 9 heads of which 3 have keys and values, SwiGLU of 1536, a head tied
to the embedding of 49 152 tokens. `[run] name = "tiny"` makes it a hundred times smaller, to try the program.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment

VOCABULARY, WIDTH, LAYERS, HEADS, GROUPS, INSIDE = 49_152, 576, 30, 9, 3, 1536


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inside: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = self.qkv(self.norm1(x)).view(B, T, -1, self.size).transpose(1, 2)  # (B, h + 2 g, T, C / h)
        q, k, v = heads.split((self.heads, self.groups, self.groups), dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        down: Tensor = x + self.down(F.silu(gate) * value)
        return down


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, groups: int, inside: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, groups, inside) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def loss(self, batch: Tensor) -> Tensor:
        """Nats per token of (B, T + 1) tokens."""
        x = self.tokens(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Shape:
    """The task."""

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        torch.manual_seed(spec.run.seed)
        self.device, self.tokens_per_sample = device, spec.model.context
        self.model = self.skeleton(spec, assignment).to(device)
        self.vocabulary = self.model.tokens.num_embeddings
        self._heldout = self.draw(1, torch.Generator().manual_seed(1))

    @classmethod
    def skeleton(cls, spec: RunSpec, assignment: Assignment) -> Model:
        """The model."""
        if spec.run.name == "tiny":
            return Model(VOCABULARY // 24, 192, 2, 3, 1, 512)
        return Model(VOCABULARY, WIDTH, LAYERS, HEADS, GROUPS, INSIDE)

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.vocabulary, (samples, self.tokens_per_sample + 1), generator=generator).to(
            self.device
        )

    def loss(self, batch: Tensor) -> Tensor:
        return self.model.loss(batch)

    @torch.no_grad()
    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        return float(self.loss(self._heldout))

    def heldout(self, seed: int) -> Tensor:
        return self.draw(8, torch.Generator().manual_seed(seed))
