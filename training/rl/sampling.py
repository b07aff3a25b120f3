"""What a policy writes: batches of answers with a KV cache, and the log-probability of every token in them.

    answers = sample(policy, prompts, copies=8, how=Sampling(max_tokens=6), generator=generator)
    answers[3].tokens, answers[3].logprobs                # one of the eight answers to prompts[0]

Prompts are read once, not once a copy, and together with those of the same length; answers that have ended leave the
batch. The end token is part of an answer. Log-probabilities are of the distribution that was sampled from, after
temperature and top-k: the behaviour policy of decoupled PPO, and what a proof of sampling is about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.training.rl.activations import watched
from swarmnode.training.rl.policies import Policy, kept, repeat


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_tokens: int = 8  # of an answer, the end token included
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # draw among the k likeliest only; 0: among all

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature < 0 or self.top_k < 0:
            raise ValueError(f"{self} is not valid: max_tokens is at least 1, temperature and top_k at least 0")


@dataclass(frozen=True)
class Answer:
    """One completion. It ended by itself if its last token is the end token; else it was cut at `max_tokens`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, one a token
    activations: Tensor | None = field(default=None, compare=False, repr=False)  # (T, C), each token's, where traced


class Sampler(Protocol):
    """Whatever writes answers as `sample` does; `vllm_sampling.py` has another."""

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        copies: int,
        how: Sampling,
        generator: torch.Generator,
        traced: bool = False,
    ) -> list[Answer]: ...


def check_room(policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling) -> None:
    """Raises ValueError where a prompt and its answer may exceed the context."""
    for prompt in prompts:
        if not 0 < len(prompt) <= policy.context - how.max_tokens:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {how.max_tokens} of an answer do not fit into the policy's "
                f"context of {policy.context}"
            )


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    copies: int,
    how: Sampling,
    generator: torch.Generator,
    traced: bool = False,
) -> list[Answer]:
    """`copies` answers to each prompt, those to one prompt in a row. Raises ValueError where one exceeds the context.

    All chance comes from `generator` (a CPU one). With `traced`, answers have the activations that a proof commits to.
    """
    check_room(policy, prompts, how)
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: list[Answer | None] = [None] * (len(prompts) * copies)
    for indices in by_length.values():
        batch = torch.tensor([prompts[index] for index in indices])  # (B, T)
        written = _continue(policy, batch, copies, how, generator, traced)
        for position, index in enumerate(indices):
            answers[index * copies : (index + 1) * copies] = written[position * copies : (position + 1) * copies]
    return [answer for answer in answers if answer is not None]


def _continue(
    policy: Policy, prompts: Tensor, copies: int, how: Sampling, generator: torch.Generator, traced: bool
) -> list[Answer]:
    rows = len(prompts) * copies
    written: list[list[int]] = [[] for _ in range(rows)]
    chances: list[list[float]] = [[] for _ in range(rows)]
    traces: list[list[Tensor]] = [[] for _ in range(rows)]
    alive = list(range(rows))
    with watched(policy) if traced else nullcontext() as seen:
        logits, state = policy.begin(prompts)
        final = seen.last.repeat_interleave(copies, dim=0) if seen else None
        logits, state = logits.repeat_interleave(copies, dim=0), repeat(state, copies)
        while True:
            tokens, logprobs = draw(logits, how, generator)
            for row, token, logprob in zip(alive, tokens.tolist(), logprobs.tolist(), strict=True):
                written[row].append(token)
                chances[row].append(logprob)
            if final is not None:
                for row, activations in zip(alive, final, strict=True):
                    traces[row].append(activations)
            going = [
                position
                for position, row in enumerate(alive)
                if written[row][-1] != policy.vocabulary.end and len(written[row]) < how.max_tokens
            ]
            if not going:
                break
            if len(going) < len(alive):
                chosen = torch.tensor(going)
                tokens, state = tokens[chosen], kept(state, chosen)
                alive = [alive[position] for position in going]
            logits, state = policy.step(tokens, state)
            final = seen.last if seen else None
    return [
        Answer(tuple(ids), tuple(values), torch.stack(trace) if trace else None)
        for ids, values, trace in zip(written, chances, traces, strict=True)
    ]


def draw(logits: Tensor, how: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token for each row of `logits` (B, V), and its log-probability: both (B,)."""
    if how.temperature == 0:
        logprobs = F.log_softmax(logits, dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        logprobs = tempered(logits, how)
        # Exponential race: the least E/p is a draw from p, in one pass (as torch.multinomial does for one sample).
        race = torch.empty_like(logprobs).exponential_(generator=generator)
        tokens = (logprobs - race.log()).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def tempered(logits: Tensor, how: Sampling) -> Tensor:
    """Log-probabilities (..., V) of the distribution that is sampled from."""
    logits = logits / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return F.log_softmax(logits, dim=-1)
