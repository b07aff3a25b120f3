"""Reading others' answers with a policy: one forward pass, and what the defences want to know of every token. Torch.

seen = read(policy, groups)                                      # one Reading a group, in numpy
seen[0].answers[2].logprobs, seen[0].answers[2].ranks            # (T,), (T,)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from swarmnode.training.rl.activations import watched
from swarmnode.training.rl.defence import Reading, TokenReading
from swarmnode.training.rl.groups import Scored
from swarmnode.training.rl.policies import Policy
from swarmnode.training.rl.sampling import Sampling, tempered
from swarmnode.training.rl.vocabulary import translate

Text = tuple[Sequence[int], Sequence[int], tuple[int, int]]  # prompt, answer, where its reading goes
HONEST = Sampling()
LOGITS = 1 << 26  # of one pass at the most: 256 MiB in float32


@torch.no_grad()
def read(policy: Policy, groups: Sequence[Scored], how: Sampling = HONEST, *, traced: bool = False) -> list[Reading]:
    """Every answer of these groups, as likely as `policy` finds it when it samples as `how` says.

    An answer that cannot be written in the policy's vocabulary, or does not fit into its context, is read as None. With
    `traced`, readings have the activations that a proof commits to.
    """
    prompts, answers, places = [], [], []
    found: list[list[TokenReading | None]] = [[None] * len(scored.texts) for scored in groups]
    for number, scored in enumerate(groups):
        source = scored.vocabulary
        prompt = policy.vocabulary.prompt(scored.question.prompt)
        for index, ids in enumerate(scored.group.answers):
            try:
                tokens = translate(ids, source, policy.vocabulary)
            except ValueError:
                continue
            if tokens and len(prompt) + len(tokens) <= policy.context:
                prompts.append(prompt)
                answers.append(tokens)
                places.append((number, index))
    _read_all(policy, list(zip(prompts, answers, places, strict=True)), how, traced, found)
    return [Reading(tuple(of_group)) for of_group in found]


@torch.no_grad()
def reread(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    how: Sampling = HONEST,
    *,
    traced: bool = False,
) -> list[TokenReading]:
    """How likely `policy` finds answers in its own tokens, none of them empty, each to the prompt at its place."""
    texts = [(prompt, answer, (0, n)) for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]
    found: list[list[TokenReading | None]] = [[None] * len(texts)]
    _read_all(policy, texts, how, traced, found)
    return [reading for reading in found[0] if reading is not None]


def _read_all(
    policy: Policy, texts: Sequence[Text], how: Sampling, traced: bool, found: list[list[TokenReading | None]]
) -> None:
    longest = max((len(prompt) + len(answer) for prompt, answer, _ in texts), default=1)
    rows = max(1, LOGITS // (longest * policy.vocabulary.size))
    for first in range(0, len(texts), rows):
        _read(policy, texts[first : first + rows], how, traced, found)


def _read(
    policy: Policy,
    texts: Sequence[Text],
    how: Sampling,
    traced: bool,
    found: list[list[TokenReading | None]],
) -> None:
    """One pass over prompts and answers; each reading goes to its place in `found`."""
    longest = max(len(prompt) + len(answer) for prompt, answer, _ in texts)
    padded = [[*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))] for prompt, answer, _ in texts]
    tokens = torch.tensor(padded)  # (N, T)
    with watched(policy) if traced else nullcontext() as seen:
        logits = tempered(policy(tokens[:, :-1]), how)  # (N, T - 1, V) log-probabilities
    final = seen.final.numpy() if seen else None  # (N, T - 1, C)
    following = tokens[:, 1:, None]
    logprobs = logits.gather(2, following)[..., 0]  # (N, T - 1)
    ranks = (logits > logprobs[..., None]).sum(dim=-1)
    chances = logits.exp()
    surprises = torch.where(chances > 0, -logits, torch.zeros_like(logits))
    entropy = (chances * surprises).sum(dim=-1)
    variance = (chances * surprises.square()).sum(dim=-1) - entropy.square()
    arrays = [tensor.float().cpu().numpy() for tensor in (logprobs, entropy, variance)]
    ranked = ranks.cpu().numpy()
    for row, (prompt, answer, (number, index)) in enumerate(texts):
        begin = len(prompt) - 1
        cut = slice(begin, begin + len(answer))
        found[number][index] = TokenReading(
            arrays[0][row, cut],
            ranked[row, cut],
            arrays[1][row, cut],
            arrays[2][row, cut],
            final[row, cut] if final is not None else None,
        )
