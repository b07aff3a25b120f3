"""The task image: a small classifier learns handwritten digits, in a minute. The extra `image`.

    swarmnode local --nodes 4 examples/image.toml --rounds 10

The data come along: scikit-learn brings 1797 pictures of 8 × 8 pixels (Alpaydin & Kaynak 1998), the same on every
machine. So nothing is published or fetched, and who repeats another's steps needs no more than their place in the run.
A third is held out; of that, judges draw from one half, and people read the loss on the other. Losses are in bits per
picture; who knows nothing needs log2 10 = 3.32.
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.options import lacking
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import ModelSection
from swarmnode.training.tasks import Assignment, TaskError

PIXELS = 64
DIGITS = 10
BRIGHTEST = 16.0
HELDOUT = 600  # pictures


class Perceptron(nn.Module):
    """Pictures in, logits of the ten digits out: as many hidden layers, each as wide, as the run's [model] says."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        widths = [PIXELS, *[model.width] * model.layers]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(model.width, DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 10) of pictures (B, 64)."""
        for layer in self.hidden:
            x = F.relu(layer(x))  # (B, width)
        return self.head(x)  # (B, 10)


class DigitImages:
    """Learns to tell handwritten digits apart. Raises TaskError without scikit-learn."""

    needs_text = False
    tokens_per_sample = 1

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        pictures = _pictures().to(device)
        self._gate, self._report, self._training = pictures.tensor_split((HELDOUT // 2, HELDOUT))
        torch.manual_seed(spec.run.seed)
        self.model = self.skeleton(spec, assignment).to(device)

    @classmethod
    def skeleton(cls, spec: RunSpec, assignment: Assignment) -> Perceptron:
        return Perceptron(spec.model)

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        """Pictures, each with its digit behind its pixels: (samples, 65)."""
        return self._training[torch.randint(len(self._training), (samples,), generator=generator)]

    def places(self, samples: int, generator: torch.Generator, size: int) -> list[tuple[int, int]]:
        """None: whoever repeats a step draws the same pictures."""
        return []

    def loss(self, batch: Tensor) -> Tensor:
        """Bits per picture of (B, 65)."""
        return F.cross_entropy(self.model(batch[:, :PIXELS]), batch[:, PIXELS].long()) / math.log(2)

    @torch.no_grad()
    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        """Bits per picture on all that no judge draws from, or on a judge's few by `seed`."""
        pictures = self._report if seed is None else self.heldout(seed)
        self.accuracy = float((self.model(pictures[:, :PIXELS]).argmax(-1) == pictures[:, PIXELS]).float().mean())
        return float(self.loss(pictures))

    def heldout(self, seed: int) -> Tensor:
        """The pictures that `seed` draws for a judge, (SEQUENCES, 65): the same on every machine."""
        return self._gate[torch.randint(len(self._gate), (SEQUENCES,), generator=torch.Generator().manual_seed(seed))]

    @torch.no_grad()
    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """A held-out picture that `seed` draws, in characters, and what the model takes it for."""
        picture = self._report[seed % len(self._report)]
        rows = (picture[:PIXELS].cpu().view(8, 8) * 4).long().clamp(max=4)
        drawn = "\n".join("".join(" .+#@"[pixel] * 2 for pixel in row) for row in rows.tolist())
        found = int(self.model(picture[None, :PIXELS]).argmax())
        return f"{drawn}\nfound {found}, and it is {int(picture[PIXELS])}\n".encode()


def _pictures() -> Tensor:
    """All pictures with their digits, (1797, 65), in an order that is the same everywhere. Raises TaskError."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        what = "the task image has its pictures from scikit-learn"
        raise TaskError(lacking(what, error, "swarmnode[image]")) from error
    pixels, digits = load_digits(return_X_y=True)
    rows = np.column_stack([pixels / BRIGHTEST, digits]).astype(np.float32)
    by_hash = sorted(range(len(rows)), key=lambda row: hashlib.sha256(rows[row].tobytes()).digest())
    return torch.from_numpy(rows[by_hash])
