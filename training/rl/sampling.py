"""What a policy writes, and how likely it finds what others wrote: batches of answers, and log-probabilities. Torch.

    answers = sample(policy, prompts, Sampling(max_tokens=6, copies=8), generator)
    answers[3].tokens, answers[3].logprobs                # one of the eight answers to prompts[0]
    seen = read(policy, groups)                           # a reading a group, in numpy, by one forward pass
    seen[0][2].logprobs, seen[0][2].ranks                 # (T,), (T,)

Prompts are read once, not once a copy, and together with those of the same length; answers that have ended leave the
batch. The end token is part of an answer. Log-probabilities are of the distribution that was sampled from, after
temperature and top-k: the behaviour policy of decoupled PPO, and what a proof of sampling is about.

Where a proof is wanted, both ways also give the final activations from which each token was drawn, `traced`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.training.rl.defence import TokenReading
from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.policies import Policy
from swarmnode.training.rl.tasks import Question
from swarmnode.training.rl.vocabulary import translate

LOGITS = 1 << 26  # of one pass that reads, at the most: 256 MiB in float32


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_tokens: int = 8  # of an answer, the end token included
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # draw among the k likeliest only; 0: among all
    copies: int = 1  # answers to each prompt
    traced: bool = False  # with the activations that a proof commits to

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.copies) < 1 or self.temperature < 0 or self.top_k < 0:
            raise ValueError(f"{self} is not valid: max_tokens and copies are at least 1, temperature, top_k 0")


@dataclass(frozen=True)
class Completion:
    """One completion. It ended by itself if its last token is the end token; else it was cut at `max_tokens`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, one a token
    activations: Tensor | None = field(default=None, compare=False, repr=False)  # (T, C), each token's, where traced


class Sampler(Protocol):
    """Whatever writes answers as `sample` does; `engine.py` has others."""

    def __call__(
        self, policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling, generator: torch.Generator
    ) -> list[Completion]: ...


def prompt_of(policy: Policy, question: Question, how: Sampling) -> list[int]:
    """Tokens of a question; of one that leaves no room for an answer, the last ones."""
    tokens = policy.vocabulary.prompt(question.prompt)
    return tokens[max(0, len(tokens) + how.max_tokens - policy.context) :]


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
    policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling, generator: torch.Generator
) -> list[Completion]:
    """Answers to each prompt, those to one prompt in a row. Raises ValueError where one exceeds the context.

    All chance comes from `generator` (a CPU one).
    """
    check_room(policy, prompts, how)
    copies = how.copies
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: list[Completion | None] = [None] * (len(prompts) * copies)
    for indices in by_length.values():
        batch = torch.tensor([prompts[index] for index in indices])  # (B, T)
        written = _continue(policy, batch, how, generator)
        for position, index in enumerate(indices):
            answers[index * copies : (index + 1) * copies] = written[position * copies : (position + 1) * copies]
    return [answer for answer in answers if answer is not None]


def _continue(policy: Policy, prompts: Tensor, how: Sampling, generator: torch.Generator) -> list[Completion]:
    rows = len(prompts) * how.copies
    written: list[list[int]] = [[] for _ in range(rows)]
    chances: list[list[float]] = [[] for _ in range(rows)]
    traces: list[list[Tensor]] = [[] for _ in range(rows)]
    alive = list(range(rows))
    with _watched(policy) if how.traced else nullcontext() as seen:
        logits, state = policy.begin(prompts)
        final = seen.last.repeat_interleave(how.copies, dim=0) if seen else None
        logits, state = logits.repeat_interleave(how.copies, dim=0), state.repeat(how.copies)
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
                tokens, state = tokens[chosen], state.kept(chosen)
                alive = [alive[position] for position in going]
            logits, state = policy.step(tokens, state)
            final = seen.last if seen else None
    return [
        Completion(tuple(ids), tuple(values), torch.stack(trace) if trace else None)
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


@dataclass
class _HeadInput:
    """The activations of the last call; (B, T, C), or (B, C) where the policy gave its head one place only."""

    final: Tensor

    @property
    def last(self) -> Tensor:
        """Those of the last place, (B, C)."""
        return self.final[:, -1] if self.final.dim() == 3 else self.final


@contextmanager
def _watched(policy: Policy) -> Iterator[_HeadInput]:
    """See what `policy.head` is given, float32 on the CPU, for as long as the block lasts."""
    seen = _HeadInput(torch.empty(0))

    def see(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.final = given[0].detach().float().cpu()

    hook = policy.head.register_forward_pre_hook(see)
    try:
        yield seen
    finally:
        hook.remove()


# -- reading

HONEST = Sampling()


def read(policy: Policy, groups: Sequence[Scored], how: Sampling = HONEST) -> list[list[TokenReading | None]]:
    """Every answer of these groups, as likely as `policy` finds it when it samples as `how` says.

    An answer that cannot be written in the policy's vocabulary, or does not fit into its context, is read as None.
    """
    prompts, answers, places = [], [], []
    for number, scored in enumerate(groups):
        source = scored.vocabulary
        prompt = prompt_of(policy, scored.question, how)
        for index, ids in enumerate(scored.group.answers):
            try:
                tokens = translate(ids, source, policy.vocabulary)
            except ValueError:
                continue
            if tokens and len(prompt) + len(tokens) <= policy.context:
                prompts.append(prompt)
                answers.append(tokens)
                places.append((number, index))
    found: list[list[TokenReading | None]] = [[None] * len(scored.texts) for scored in groups]
    for (number, index), reading in zip(places, read_tokens(policy, prompts, answers, how), strict=True):
        found[number][index] = reading
    return found


@torch.no_grad()
def read_tokens(
    policy: Policy, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], how: Sampling = HONEST
) -> list[TokenReading]:
    """How likely `policy` finds answers in its own tokens, none of them empty, each to the prompt at its place."""
    texts = list(zip(prompts, answers, strict=True))
    longest = max((len(prompt) + len(answer) for prompt, answer in texts), default=1)
    rows = max(1, LOGITS // (longest * policy.vocabulary.size))
    return [
        reading
        for first in range(0, len(texts), rows)
        for reading in _one_pass(policy, texts[first : first + rows], how)
    ]


def _one_pass(
    policy: Policy, texts: Sequence[tuple[Sequence[int], Sequence[int]]], how: Sampling
) -> Iterator[TokenReading]:
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    padded = [[*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))] for prompt, answer in texts]
    tokens = torch.tensor(padded)  # (N, T)
    with _watched(policy) if how.traced else nullcontext() as seen:
        logits = tempered(policy(tokens[:, :-1]), how)  # (N, T - 1, V) log-probabilities
    final = seen.final.numpy() if seen else None  # (N, T - 1, C)
    following = tokens[:, 1:, None]
    logprobs = logits.gather(2, following)[..., 0]  # (N, T - 1)
    ranks = (logits > logprobs[..., None]).sum(dim=-1).cpu().numpy()
    chances = logits.exp()
    surprises = torch.where(chances > 0, -logits, torch.zeros_like(logits))
    entropy = (chances * surprises).sum(dim=-1)
    variance = (chances * surprises.square()).sum(dim=-1) - entropy.square()
    numbers, entropies, variances = (tensor.float().cpu().numpy() for tensor in (logprobs, entropy, variance))
    for row, (prompt, answer) in enumerate(texts):
        cut = row, slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        yield TokenReading(
            numbers[cut], ranks[cut], entropies[cut], variances[cut], final[cut] if final is not None else None
        )
