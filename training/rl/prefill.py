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
from swarmnode.training.rl.vocabulary import KNOWN, translate

HONEST = Sampling()


@torch.no_grad()
def read(policy: Policy, groups: Sequence[Scored], how: Sampling = HONEST, *, traced: bool = False) -> list[Reading]:
    """Every answer of these groups, as likely as `policy` finds it when it samples as `how` says.

    An answer that cannot be written in the policy's vocabulary, or does not fit into its context, is read as None. With
    `traced`, readings have the activations that a proof commits to.
    """
    prompts, answers, places = [], [], []
    found: list[list[TokenReading | None]] = [[None] * len(scored.texts) for scored in groups]
    for number, scored in enumerate(groups):
        source = KNOWN[scored.group.vocabulary]
        prompt = policy.vocabulary.encode(scored.question.prompt)
        for index, ids in enumerate(scored.group.answers):
            try:
                tokens = translate(ids, source, policy.vocabulary)
            except ValueError:
                continue
            if tokens and len(prompt) + len(tokens) <= policy.context:
                prompts.append(prompt)
                answers.append(tokens)
                places.append((number, index))
    if prompts:
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        padded = [
            [*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
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
        for row, (number, index) in enumerate(places):
            begin = len(prompts[row]) - 1
            cut = slice(begin, begin + len(answers[row]))
            found[number][index] = TokenReading(
                arrays[0][row, cut],
                ranked[row, cut],
                arrays[1][row, cut],
                arrays[2][row, cut],
                final[row, cut] if final is not None else None,
            )
    return [Reading(tuple(of_group)) for of_group in found]
