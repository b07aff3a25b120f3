"""Policies that a node trains from nothing: a small GPT and a GRU, of any width and depth.

    policy = build(PolicySpec("gpt", layers=2, width=48), seed=1)
    logits = policy(torch.zeros(8, 12, dtype=torch.long))            # (8, 12, V)
    logits, state = policy.begin(prompts)                            # prompts (B, T) -> (B, V) and a cache
    logits, state = policy.step(tokens, state.repeat(8))             # tokens (8 B,): each prompt goes on eight ways

Both read left to right, so that a batch of texts of unequal length is padded at its right end and needs no mask. What
one of them writes is text to the other: policies that learn from each other share nothing but a vocabulary's text.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.training.rl.vocabulary import DIGITS, KNOWN, Vocabulary

LOGITS = 1 << 26  # of one pass over texts, at the most: 256 MiB in float32


class PolicyState(Protocol):
    """The cache of a batch. What it is changed into uses it up."""

    def repeat(self, times: int) -> PolicyState:
        """That of a batch in which each row stands `times` times in a row."""

    def kept(self, rows: Tensor) -> PolicyState:
        """That of the rows `rows` (indices) of the batch."""


@dataclass
class LayerStates:
    """Implements `PolicyState`: of each layer, tensors with the batch in front."""

    layers: list[tuple[Tensor, ...]]

    def repeat(self, times: int) -> LayerStates:
        return LayerStates([tuple(each.repeat_interleave(times, dim=0) for each in layer) for layer in self.layers])

    def kept(self, rows: Tensor) -> LayerStates:
        return LayerStates([tuple(each.index_select(0, rows) for each in layer) for layer in self.layers])


class Policy(nn.Module):
    """What sampling and learning need; `hf.py` has another kind. Tokens may be anywhere, logits are where it is."""

    vocabulary: Vocabulary
    context: int  # tokens of a prompt and its answer together

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of what follows each of `tokens` (B, T)."""
        return self._run(self._here(tokens), None, cached=False)[0]

    def begin(self, tokens: Tensor) -> tuple[Tensor, PolicyState]:
        """Logits (B, V) of what follows prompts (B, T) of one length, and the cache to go on from."""
        logits, state = self._run(self._here(tokens), None)
        return logits[:, -1], state

    def step(self, tokens: Tensor, state: PolicyState) -> tuple[Tensor, PolicyState]:
        """Logits (B, V) of what follows one token more (B,), and the cache after it."""
        logits, state = self._run(self._here(tokens.view(-1, 1)), state)
        return logits[:, 0], state

    def _run(self, tokens: Tensor, state: Any, *, cached: bool = True) -> tuple[Tensor, PolicyState]:
        """Logits (B, T, V) in float32 of texts that are padded at their right end, and the cache after them."""
        raise NotImplementedError

    def _here(self, tokens: Tensor) -> Tensor:
        return tokens.to(next(self.parameters()).device)


@dataclass(frozen=True)
class PolicySpec:
    """The shape of a policy: what two nodes may choose differently."""

    kind: str = "gpt"  # gpt, gru
    layers: int = 2
    width: int = 48
    heads: int = 2  # of a gpt; divides the width
    context: int = 16  # tokens
    vocabulary: str = DIGITS.id


def rows_at_once(policy: Policy, length: int) -> int:
    """Texts of so many tokens for which one pass is made, at least 1."""
    return max(1, LOGITS // (length * policy.vocabulary.size))


def build(spec: PolicySpec, *, seed: int) -> TinyGPT | TinyGRU:
    """A policy with random parameters that `seed` alone decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyGPT(spec) if spec.kind == "gpt" else TinyGRU(spec)


def parameter_hash(policy: nn.Module) -> str:
    """sha-256 of the parameters in order, as hex: which weights wrote a rollout. Frozen ones count by `base_hash`."""
    digest = hashlib.sha256(getattr(policy, "base_hash", "").encode())
    for name, parameter in policy.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).float().numpy().tobytes())
    return digest.hexdigest()


class _Block(nn.Module):
    """Attention and MLP on normalised copies (GPT-2), squared ReLU (Primer, 2109.08668), no biases."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        C = spec.width
        self.heads = spec.heads
        self.norm1 = nn.LayerNorm(C, bias=False)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        self.norm2 = nn.LayerNorm(C, bias=False)
        self.up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x (B, T, C) after `past` keys and values (B, h, P, C/h); also all of P + T keys and values."""
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, h, T, C/h)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        # With a past, T is 1: the one new token sees everything.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)  # (B, h, T, C/h)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        x = x + self.down(F.relu(self.up(self.norm2(x))).square())
        return x, (k, v)


class TinyGPT(Policy):
    """A decoder-only transformer with learned positions."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.vocabulary = KNOWN[spec.vocabulary]
        self.context = spec.context
        self.tokens = nn.Embedding(self.vocabulary.size, spec.width)
        self.positions = nn.Embedding(spec.context, spec.width)
        self.blocks = nn.ModuleList(_Block(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width, bias=False)
        self.head = nn.Linear(spec.width, self.vocabulary.size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Wider than GPT-2's 0.02: with vocabularies this small, embeddings must stand apart from the start.
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.1 / math.sqrt(2 * spec.layers) if branch else 0.1)

    def _run(self, tokens: Tensor, state: Any, *, cached: bool = True) -> tuple[Tensor, PolicyState]:
        P = 0 if state is None else state.layers[0][0].shape[2]
        x = self.tokens(tokens) + self.positions.weight[P : P + tokens.shape[1]]  # (B, T, C)
        after: list[tuple[Tensor, ...]] = []
        for index, block in enumerate(self.blocks):
            x, cache = block(x, None if state is None else state.layers[index])
            after.append(cache)
        return self.head(self.norm(x)), LayerStates(after)  # (B, T, V)


class TinyGRU(Policy):
    """Gated recurrent layers (Cho et al. 2014): its cache is one vector a layer."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.vocabulary = KNOWN[spec.vocabulary]
        self.context = spec.context
        self.tokens = nn.Embedding(self.vocabulary.size, spec.width)
        self.gru = nn.GRU(spec.width, spec.width, spec.layers, batch_first=True)
        self.head = nn.Linear(spec.width, self.vocabulary.size, bias=False)

    def _run(self, tokens: Tensor, state: Any, *, cached: bool = True) -> tuple[Tensor, PolicyState]:
        before = None if state is None else torch.stack([layer[0] for layer in state.layers])
        hidden, last = self.gru(self.tokens(tokens), before)  # (B, T, C), (layers, B, C)
        return self.head(hidden), LayerStates([(layer,) for layer in last])
