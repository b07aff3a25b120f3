"""Next-word accuracy: the share of held-out words that a language model would write as they are.

next_word_accuracy(task)            # of a ByteLM, 0 to 1
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarmnode.training.byte_lm import EVALUATION_BATCH, THOROUGH_WINDOWS, ByteLM, Spelling


@torch.no_grad()
def next_word_accuracy(task: ByteLM, windows: int = THOROUGH_WINDOWS) -> float:
    """Share of held-out words that the task's model would write as they are, after the text before them.

    Words of as many windows as of a thorough evaluation. A word begins with the token that begins with white space
    and ends before the next such token, in bytes as in other tokens; words of white space alone do not count. It is
    right where each of its tokens is the likeliest after those before (as in LAMBADA, 1606.06031). To count, it must
    begin in the second half of a window, so that there is text before it, and end in it. Where tokens have no
    tokenizer, each is a word. nan where there is no word.
    """
    begins, solid = _words(task.spelling)  # (V,) each
    right = counted = 0
    for batch in task.spread(windows).split(EVALUATION_BATCH):
        B, T = batch.shape[0], batch.shape[1] - 1
        hits = task.model(batch[:, :-1].to(task.device)).argmax(-1).cpu() == batch[:, 1:]  # (B, T)
        opening = begins[batch[:, 1:]]  # (B, T)
        word = opening.cumsum(1) + (T + 1) * torch.arange(B)[:, None]  # (B, T): 0 of a row is what it begins within
        late = opening & (torch.arange(T) >= T // 2)
        # Of each word, how many tokens begin it so late, have more than white space, are not what is expected:
        tokens_of = [torch.bincount(word[each], minlength=B * (T + 1)) for each in (late, solid[batch[:, 1:]], ~hits)]
        counts = (tokens_of[0] > 0) & (tokens_of[1] > 0)
        counts[word[:, -1]] = False  # it may go on
        right += int((counts & (tokens_of[2] == 0)).sum())
        counted += int(counts.sum())
    return right / counted if counted else math.nan


def _words(spelling: Spelling) -> tuple[Tensor, Tensor]:
    """Of each token, (vocabulary,): whether it begins with white space, and whether it has anything else."""
    if not spelling.spelled:
        return torch.ones(spelling.vocabulary, dtype=torch.bool), torch.ones(spelling.vocabulary, dtype=torch.bool)
    begins = torch.tensor([text[:1].isspace() for text in spelling.spelled])
    return begins, torch.tensor([bool(text.strip()) for text in spelling.spelled])
