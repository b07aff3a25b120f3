"""A model of one's own that learns to write: causal convolutions in the place of the built-in GPT.

    swarmnode task check examples/convolution.py:Convolution
    swarmnode local --task examples/convolution.py:Convolution --rounds 20
    swarmnode init convolution.toml --task examples/convolution.py:Convolution --data ~/texts --yes

The last one writes a run file, and prints the command that begins the run.
"""

import torch.nn.functional as F
from torch import nn

from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.gpt import GPT

KERNEL = 4  # tokens that a layer sees; what the tables of a run file have no key for stands in this file


class Convolutions(GPT):
    """Tokens in, logits out; `loss` and `continue_text` are those of GPT."""

    def __init__(self, model, vocabulary):
        nn.Module.__init__(self)  # without the layers of GPT
        self.context, self.vocabulary = model.context, vocabulary
        self.tokens = nn.Embedding(vocabulary, model.width)
        self.layers = nn.ModuleList(nn.Conv1d(model.width, model.width, KERNEL) for _ in range(model.layers))
        self.head = nn.Linear(model.width, vocabulary)

    def forward(self, tokens):
        """Logits (B, T, V) of what follows each of `tokens` (B, T)."""
        x = self.tokens(tokens).transpose(1, 2)  # (B, C, T)
        for layer in self.layers:
            x = x + layer(F.pad(F.gelu(x), (KERNEL - 1, 0)))  # padded on the left: no token sees a later one
        return self.head(x.transpose(1, 2))


class Convolution(ByteLM):
    needs_text = True  # the daemon reads this line in this class, and runs nothing

    @classmethod
    def build(cls, spec, assignment):
        """The model with the run's initial parameters; torch is seeded already."""
        return Convolutions(spec.model, spec.data.vocabulary)

    skeleton = build  # once more, or memory would be that of the GPT
