"""The chance in sampling, from a seed that others know too, so that they can tell which token is drawn. Torch.

    seed = noise_seed("12D3…", TaskRef("digits/swap", 5, 7))         # who answers, and what
    streams = streams_of([seed, seed], [0, 1], [3, 3])               # the fourth tokens of its first two answers
    tokens = (logprobs + gumbel(streams, logprobs.shape[-1])).argmax(dim=-1)            # draws from logprobs (2, V)

With g = −log(−log u), u uniform, argmax(log p + g) is a draw from p (Gumbel-max). Whoever has the same p and the same
seed finds the same token, but for ties within the rounding of p: Token-DiFR (2511.20621). So tokens prove themselves,
and a sampler has no choice among answers.

The numbers are those of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), whose n-th output is a function of its state and
n. Each is reached without those before it: what stands beside an answer in a batch, on which device and in which type
the policy computes change nothing. A seed leads to a state for each answer, that to one for each of its tokens, and
that to a number for each entry of the vocabulary. All of it is arithmetic of 64-bit integers, the same everywhere; the
two logarithms are of float64, so that their rounding is lost in that to float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.training.rl.tasks import TaskRef

DRAWN = b"swarmnode/noise/1\0"  # what is hashed to a seed begins so
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as int64, which wraps around
FIRST, SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def noise_seed(author: str, task: TaskRef) -> int:
    """The seed of what `author` answers to this question, in 63 bits.

    Where a trainer assigns questions, the task's own seed follows from run, author, counter and weights
    (`tasks.assigned_task`): then nobody chooses this one.
    """
    said = "\0".join((author, task.name, str(task.difficulty), str(task.seed)))
    return int.from_bytes(hashlib.sha256(DRAWN + said.encode()).digest()[:8], "big") >> 1


def streams_of(seeds: Sequence[int], answers: Sequence[int], positions: Sequence[int]) -> Tensor:
    """States (N,) of tokens' noise: each of that position, from 0 on, in that answer of the group of that seed."""
    of_answers = numbers(torch.tensor(seeds), torch.tensor(answers))
    return numbers(of_answers, torch.tensor(positions))


def numbers(states: Tensor, which: Tensor) -> Tensor:
    """Outputs of SplitMix64, 64 bits each in an int64: of each state the one at that place, from 0 on. Broadcasts."""
    mixed = states + (which + 1) * GAMMA
    mixed ^= _shifted(mixed, 30)
    mixed *= FIRST
    mixed ^= _shifted(mixed, 27)
    mixed *= SECOND
    mixed ^= _shifted(mixed, 31)
    return mixed


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def gumbel(streams: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise (N, size) in float32 for the vocabulary's entries, from streams (N,), where these are."""
    bits = numbers(streams[:, None], torch.arange(size, device=streams.device))
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)  # (0, 1): neither end is reached
    return uniform.log_().neg_().log_().neg_().float()
