"""A GPT on bytes, whole on this page: embeddings, pre-norm blocks of causal attention and MLP, a head of 256 logits.

    logits = GPT(ModelSection())(torch.zeros(8, 128, dtype=torch.long))      # (8, 128, 256)

Architecture after GPT-2 (Radford et al. 2019) as nanoGPT writes it, without biases and with a cheaper activation. A
byte is a token, so the mean cross-entropy in nats over ln 2 is bits per byte, and no tokenizer has to agree between
machines.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.training.runspec import ModelSection

VOCABULARY = 256


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.heads = model.heads
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.out = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)  # (B, T, 3, h, C/h)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, h, T, C/h)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, h, T, C/h)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)
        return mixed


class MLP(nn.Module):
    """Two layers, four times as wide in between."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.up = nn.Linear(model.width, 4 * model.width, bias=False)
        self.down = nn.Linear(4 * model.width, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Squared ReLU (Primer, 2109.08668) learns as well as GELU, whose two passes take a sixth of a step on a CPU.
        y: Tensor = self.down(F.relu(self.up(x)).square())  # (B, T, C)
        return y


class TransformerBlock(nn.Module):
    """x + attention, then + MLP, each on a normalised copy."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.width, bias=False)
        self.attention = Attention(model)
        self.norm2 = nn.LayerNorm(model.width, bias=False)
        self.mlp = MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Parameters depend on the torch seed alone, not on threads or device."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.context = model.context
        self.bytes = nn.Embedding(VOCABULARY, model.width)
        self.positions = nn.Embedding(model.context, model.width)
        self.blocks = nn.ModuleList(TransformerBlock(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.width, bias=False)
        self.head = nn.Linear(model.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches start smaller, so that depth does not widen the stream (GPT-2, section 2.3).
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * model.layers) if branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, 256) of what follows each of `tokens` (B, T), T at most the context."""
        T = tokens.shape[1]
        x = self.bytes(tokens) + self.positions.weight[:T]  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # (B, T, 256)
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy in nats of predicting text[:, 1:] from text[:, :-1]; text is (B, T + 1)."""
        logits = self(text[:, :-1])  # (B, T, 256)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    @torch.no_grad()
    def continue_text(self, prompt: Tensor, *, length: int, temperature: float, generator: torch.Generator) -> Tensor:
        """`length` further bytes after `prompt` (T,), one at a time; temperature 0 takes the likeliest byte."""
        text = prompt.view(1, -1)  # (1, T)
        for _ in range(length):
            logits = self(text[:, -self.context :])[0, -1].float().cpu()  # (256,)
            if temperature > 0:
                chances = F.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(chances, 1, generator=generator)  # (1,)
            else:
                following = logits.argmax(-1, keepdim=True)
            text = torch.cat([text, following.to(text.device).view(1, 1)], dim=1)
        return text[0, len(prompt) :]
