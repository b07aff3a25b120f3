"""A GPT, whole on this page: a residual stream, normalised copies of it through attention and MLPs, a head of logits.

    logits = GPT(ModelSection(), vocabulary=256)(torch.zeros(8, 128, dtype=torch.long))      # (8, 128, 256)

The decoder that small language models are trained with since modded-nanogpt and nanochat: rotary positions (RoFormer,
2104.09864), RMSNorm (1910.07467), queries and keys normalised (2010.04245), ReLU² (Primer, 2109.08668) or SwiGLU
(2002.05202), and no biases. Norms have no weights, since the matrix behind each can take them on: so all parameters but
a few scalars are matrices, and each matrix is one linear map of the stream, as Muon wants it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarmnode.training.sections import ModelSection
from swarmnode.training.tokens import BYTES

ROTARY_BASE = 10_000.0  # wavelengths of up to 2 π times as many tokens


def normalised(x: Tensor) -> Tensor:
    """x (..., C) with a root mean square of 1 along its last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


class Rotary(nn.Module):
    """Turns pairs of channels by angles that grow with the position, so that products see distances alone."""

    def __init__(self, channels: int, context: int) -> None:
        super().__init__()
        wavelengths = ROTARY_BASE ** (torch.arange(0, channels, 2) / channels)  # (D/2,)
        angles = (torch.arange(context)[:, None] / wavelengths)[:, None]  # (context, 1, D/2)
        self.register_buffer("cos", torch.cat([angles.cos(), angles.cos()], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, h, D), turned: a channel's partner is half of the channels away."""
        T, D = x.shape[1], x.shape[3]
        cos, sin = self.cos[:T].to(x.dtype), self.sin[:T].to(x.dtype)  # (T, 1, D)
        return torch.addcmul(x * cos, x.roll(D // 2, dims=-1), sin)


class Attention(nn.Module):
    """Causal multi-head self-attention. With `values`, each token also gives a value that is its own everywhere."""

    def __init__(self, model: ModelSection, values: nn.Embedding | None) -> None:
        super().__init__()
        self.heads = model.heads
        self.q = nn.Linear(model.width, model.width, bias=False)
        self.k = nn.Linear(model.width, model.width, bias=False)
        self.v = nn.Linear(model.width, model.width, bias=False)
        self.out = nn.Linear(model.width, model.width, bias=False)
        self.rotary = Rotary(model.width // model.heads, model.context)
        self.values = values
        self.mix = None if values is None else nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        B, T, C = x.shape
        # One product, but three matrices: Muon makes each an orthogonal map of its own.
        qkv = F.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight])).view(B, T, 3 * self.heads, -1)
        qk, v = qkv.split([2 * self.heads, self.heads], dim=2)  # (B, T, 2 h, D) and (B, T, h, D)
        if self.values is not None and self.mix is not None:
            v = self.mix[0] * v + self.mix[1] * self.values(tokens).view(v.shape)
        q, k = self.rotary(normalised(qk)).transpose(1, 2).chunk(2, dim=1)  # (B, h, T, D) each
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)  # (B, h, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    """ReLU² between two matrices, or SwiGLU between three of about as many parameters together."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        gated = model.activation == "swiglu"
        inside = max(8, model.width * 8 // 3 // 8 * 8) if gated else 4 * model.width
        self.up = nn.Linear(model.width, inside, bias=False)
        self.gate = nn.Linear(model.width, inside, bias=False) if gated else None
        self.down = nn.Linear(inside, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)  # (B, T, inside)
        return self.down(F.relu(up).square() if self.gate is None else F.silu(self.gate(x)) * up)  # (B, T, C)


class TransformerBlock(nn.Module):
    """x + attention, then + MLP, each on a normalised copy."""

    def __init__(self, model: ModelSection, values: nn.Embedding | None) -> None:
        super().__init__()
        self.attention = Attention(model, values)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.attention(normalised(x), tokens)
        return x + self.mlp(normalised(x))


class GPT(nn.Module):
    """Tokens in, logits of the next token out. Parameters depend on the torch seed alone, not on threads or device."""

    def __init__(self, model: ModelSection, vocabulary: int = BYTES) -> None:
        super().__init__()
        self.context = model.context
        self.vocabulary = vocabulary
        self.checkpointing = False  # compute each block's activations anew in the backward pass, rather than keep them
        self.tokens = nn.Embedding(vocabulary, model.width)
        self.blocks = nn.ModuleList()
        for index in range(model.layers):
            # Every other block, and the last one: as good as all of them at half of the size (nanochat).
            gives = model.value_embeddings and (model.layers - index) % 2
            self.blocks.append(TransformerBlock(model, nn.Embedding(vocabulary, model.width) if gives else None))
        self.head = None if model.tied else nn.Linear(model.width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                # A block that adds nothing yet: depth does not widen the stream, and steps are large from the first on.
                nn.init.zeros_(parameter)
            elif name.endswith("head.weight"):
                nn.init.normal_(parameter, std=0.001)  # next to nothing, but one text is not as likely as another
            elif name.endswith(("tokens.weight", "values.weight")):
                # What also predicts is small, or each token would expect itself at the start.
                nn.init.normal_(parameter, std=1 / model.width if model.tied else 0.02)
            elif parameter.dim() == 2:
                # Half of what keeps activations' size (modded-nanogpt): what steps add then counts for more.
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of what follows each of `tokens` (B, T), T at most the context."""
        x = normalised(self.tokens(tokens))  # (B, T, C)
        for block in self.blocks:
            x = checkpoint(block, x, tokens, use_reentrant=False) if self.checkpointing else block(x, tokens)
        x = normalised(x)
        return F.linear(x, self.tokens.weight if self.head is None else self.head.weight)  # (B, T, V)

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy in nats of predicting text[:, 1:] from text[:, :-1]; text is (B, T + 1)."""
        logits = self(text[:, :-1])  # (B, T, V)
        return F.cross_entropy(logits.reshape(-1, self.vocabulary), text[:, 1:].reshape(-1))

    @torch.no_grad()
    def continue_text(self, prompt: Tensor, *, length: int, temperature: float, generator: torch.Generator) -> Tensor:
        """`length` further tokens after `prompt` (T,), one at a time; temperature 0 takes the likeliest token."""
        text, read = prompt.view(1, -1), None  # (1, T)
        for _ in range(length):
            logits, read = self.following(text, read)  # (V,)
            logits = logits.float().cpu()
            if temperature > 0:
                chances = F.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(chances, 1, generator=generator)  # (1,)
            else:
                following = logits.argmax(-1, keepdim=True)
            text = torch.cat([text, following.to(text.device).view(1, 1)], dim=1)
        return text[0, len(prompt) :]

    def following(self, text: Tensor, read: Any) -> tuple[Tensor, Any]:
        """Logits (V,) of what follows `text` (1, T), and what is left of reading it, for the text one token longer."""
        return self(text[:, -self.context :])[0, -1], None
