"""What a policy writes, and how likely it finds what others wrote: batches of answers, and log-probabilities. Torch.

    answers = sample(policy, prompts, Sampling(max_tokens=6, copies=8), seeds)     # of the noise, one a prompt
    answers[3].tokens, answers[3].logprobs                # one of the eight answers to prompts[0]
    seen = read(policy, groups)                           # a reading a group, in numpy, by one forward pass
    seen[0][2].logprobs, seen[0][2].ranks                 # (T,), (T,)

Prompts are read once, not once a copy, and together with those of the same length; answers that have ended leave the
batch. The end token is part of an answer. Log-probabilities are of the distribution that was sampled from, after
temperature and top-k: the behaviour policy of decoupled PPO. All chance is the noise of `noise.py`, which whoever knows
the seeds has too: `read` tells how far each token is from the one that the noise picks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.training.rl.defence import TokenReading
from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.noise import gumbel, noise_seed, streams_of
from swarmnode.training.rl.policies import Policy, rows_at_once
from swarmnode.training.rl.tasks import Question
from swarmnode.training.rl.vocabulary import translate

NOISE = 1 << 22  # numbers that are made at a time: 32 MiB, some times over


@dataclass(frozen=True)
class Sampling:
    max_tokens: int = 8  # of an answer, the end token included
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # draw among the k likeliest only; 0: among all
    copies: int = 1  # answers to each prompt

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.copies) < 1 or self.temperature < 0 or self.top_k < 0:
            raise ValueError(f"{self} is not valid: max_tokens and copies are at least 1, temperature, top_k 0")


@dataclass(frozen=True)
class Completion:
    """One completion. It ended by itself if its last token is the end token; else it was cut at `max_tokens`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, one a token


# Whatever writes answers as `sample` does; `engine.py` has others.
Sampler = Callable[[Policy, Sequence[Sequence[int]], Sampling, Sequence[int]], list[Completion]]


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
def sample(policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling, seeds: Sequence[int]) -> list[Completion]:
    """Answers to each prompt, those to one prompt in a row. Raises ValueError where one exceeds the context.

    All chance comes from `seeds`, one a prompt, in 63 bits: who stands beside a prompt changes nothing.
    """
    check_room(policy, prompts, how)
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: dict[int, tuple[Completion, ...]] = {}  # by prompt
    for indices in by_length.values():
        batch = torch.tensor([prompts[index] for index in indices])  # (B, T)
        written = iter(_continue(policy, batch, how, [seeds[index] for index in indices]))
        answers |= zip(indices, zip(*[written] * how.copies, strict=True), strict=True)
    return [answer for index in range(len(prompts)) for answer in answers[index]]


def _continue(policy: Policy, prompts: Tensor, how: Sampling, seeds: Sequence[int]) -> list[Completion]:
    rows = len(prompts) * how.copies
    written: list[list[int]] = [[] for _ in range(rows)]
    chances: list[list[float]] = [[] for _ in range(rows)]
    alive = list(range(rows))
    logits, state = policy.begin(prompts)
    logits, state = logits.repeat_interleave(how.copies, dim=0), state.repeat(how.copies)
    while True:
        which = [divmod(row, how.copies) for row in alive]
        place = [len(written[row]) for row in alive]
        streams = streams_of([seeds[prompt] for prompt, _ in which], [copy for _, copy in which], place)
        tokens, logprobs = draw(logits, how, streams)
        for row, token, logprob in zip(alive, tokens.tolist(), logprobs.tolist(), strict=True):
            written[row].append(token)
            chances[row].append(logprob)
        going = [
            position
            for position, row in enumerate(alive)
            if written[row][-1] != policy.vocabulary.end and len(written[row]) < how.max_tokens
        ]
        if not going:
            break
        if len(going) < len(alive):
            chosen = torch.tensor(going, device=tokens.device)
            tokens, state = tokens[chosen], state.kept(chosen)
            alive = [alive[position] for position in going]
        logits, state = policy.step(tokens, state)
    return [Completion(tuple(ids), tuple(values)) for ids, values in zip(written, chances, strict=True)]


def draw(logits: Tensor, how: Sampling, streams: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row of `logits` (B, V), by the noise of streams (B,), and its log-probability: both (B,)."""
    if how.temperature == 0:
        logprobs = F.log_softmax(logits, dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        logprobs = tempered(logits, how)
        tokens = (logprobs + gumbel(streams.to(logprobs.device), logprobs.shape[-1])).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def tempered(logits: Tensor, how: Sampling) -> Tensor:
    """Log-probabilities (..., V) of the distribution that is sampled from."""
    logits = logits.float() / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return F.log_softmax(logits, dim=-1)


# -- reading

HONEST = Sampling()


def read(
    policy: Policy, groups: Sequence[Scored], how: Sampling = HONEST, *, edge: float | None = None
) -> list[list[TokenReading | None]]:
    """Every answer of these groups, as likely as `policy` finds it when it samples as `how` says.

    With `edge`, also how far each token is from the one that the noise of its author picks (`read_tokens`). An answer
    that cannot be written in the policy's vocabulary, or does not fit into its context, is read as None.
    """
    prompts, answers, places, noise = [], [], [], []
    for number, scored in enumerate(groups):
        source = scored.vocabulary
        prompt = prompt_of(policy, scored.question, how)
        seed = noise_seed(scored.author, scored.group.task)
        for index, ids in enumerate(scored.group.answers):
            try:
                tokens = translate(ids, source, policy.vocabulary)
            except ValueError:
                continue
            if tokens and len(prompt) + len(tokens) <= policy.context:
                prompts.append(prompt)
                answers.append(tokens)
                places.append((number, index))
                noise.append((seed, index))
    found: list[list[TokenReading | None]] = [[None] * len(scored.texts) for scored in groups]
    readings = read_tokens(policy, prompts, answers, how, noise, edge=edge)
    for (number, index), reading in zip(places, readings, strict=True):
        found[number][index] = reading
    return found


@torch.no_grad()
def read_tokens(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    how: Sampling = HONEST,
    noise: Sequence[tuple[int, int]] = (),
    *,
    edge: float | None = None,
) -> list[TokenReading]:
    """How likely `policy` finds answers in its own tokens, none of them empty, each to the prompt at its place.

    With `edge`, readings have margins; `noise` is then of each answer its group's seed, and which of the group's
    answers it is. `edge`: nats by which the last of the top k may look likelier or less so to another machine. A token
    that is more than that below it cannot be drawn, and has a margin of inf; one that is not above by as much is not
    missed.
    """
    texts = list(zip(prompts, answers, strict=True))
    longest = max((len(prompt) + len(answer) for prompt, answer in texts), default=1)
    rows = rows_at_once(policy, longest)
    passes = [slice(first, first + rows) for first in range(0, len(texts), rows)]
    return [reading for cut in passes for reading in _one_pass(policy, texts[cut], how, noise[cut], edge)]


def _one_pass(
    policy: Policy,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    how: Sampling,
    noise: Sequence[tuple[int, int]],
    edge: float | None,
) -> Iterator[TokenReading]:
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    padded = [[*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))] for prompt, answer in texts]
    tokens = torch.tensor(padded)  # (N, T)
    logits = policy(tokens[:, :-1])  # (N, T - 1, V)
    at = [(row, len(prompt) - 1 + place) for row, (prompt, answer) in enumerate(texts) for place in range(len(answer))]
    rows, columns = torch.tensor(at).T  # of all answers' tokens in a row, (M,)
    logits = logits[rows, columns].float() / how.temperature  # (M, V)
    following = tokens[rows, columns + 1, None].to(logits.device)  # (M, 1)
    least = None
    if 0 < how.top_k < logits.shape[-1]:
        greatest = logits.topk(how.top_k, dim=-1).values
        total = greatest.logsumexp(dim=-1, keepdim=True)
        least, logits = greatest[:, -1:] - total, logits - total
    else:
        logits = F.log_softmax(logits, dim=-1)
    logprobs = logits.gather(1, following)
    ranks = (logits > logprobs).sum(dim=-1).cpu().numpy()
    margins = None
    if edge is not None:
        each = [(*noise[row], place) for row, (_, answer) in enumerate(texts) for place in range(len(answer))]
        streams = streams_of(*zip(*each, strict=True)).to(logits.device)
        margins = _margins(logits, following, streams, least, edge).cpu().numpy()
    numbers, end = logprobs[:, 0].cpu().numpy(), 0
    for _, answer in texts:
        cut = slice(end, end := end + len(answer))
        yield TokenReading(numbers[cut], ranks[cut], margins[cut] if margins is not None else None)


def _margins(logprobs: Tensor, tokens: Tensor, streams: Tensor, least: Tensor | None, edge: float) -> Tensor:
    """Nats (M,) that tokens (M, 1) are below the best in log p + noise. `least` (M, 1): log p of the top k's last."""
    rows = max(1, NOISE // logprobs.shape[-1])
    apart = []
    for first in range(0, len(tokens), rows):
        cut = slice(first, first + rows)
        scores = logprobs[cut] + gumbel(streams[cut], logprobs.shape[-1])
        given = scores.gather(1, tokens[cut])
        if least is not None:
            given = given.masked_fill(logprobs[cut].gather(1, tokens[cut]) < least[cut] - edge, -torch.inf)
            scores = scores.masked_fill(logprobs[cut] < least[cut] + edge, -torch.inf)
        apart.append((scores.max(dim=-1, keepdim=True).values - given).clamp(min=0.0)[:, 0])
    return torch.cat(apart)
