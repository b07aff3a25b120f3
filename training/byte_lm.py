"""The task byte-lm: a GPT learns to predict the next byte of the corpus.

Training windows start anywhere in the node's own slice: shards of the run's data, of which more may come while it
trains, or a part of its own corpus. Shards lie in the order of their file names, which are their ids, whenever they
came: so the windows of a step follow from which shards a node has, and others know where it read. The held-out loss is
measured on windows spread evenly over the part of the held-out text that no judge draws from, the same on every node,
so losses of different nodes can be compared digit by digit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from swarmnode.training.corpus import CorpusError, corpus_for_run, divide_heldout, read_heldout
from swarmnode.training.gpt import GPT
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment

QUICK_WINDOWS = 32  # a progress figure each round must cost no more than a few inner steps
THOROUGH_WINDOWS = 256
EVALUATION_BATCH = 32


class ByteLM:
    """A language model on bytes. Raises CorpusError where the corpus cannot be used."""

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        self.device = device
        self.tokens_per_sample = spec.model.context
        self._window = torch.arange(spec.model.context + 1)
        if assignment.texts:
            self._text = torch.empty(assignment.room, dtype=torch.uint8)  # (room,), taken from the system as it fills
            self._filled = 0
            self._files: list[tuple[str, int]] = []  # names, in order, and bytes
            self.feed(assignment.texts)
            heldout = read_heldout(Path(assignment.heldout), sha256=spec.task.heldout_sha256)
        else:
            fetched = Path(assignment.heldout) if assignment.heldout else None
            corpus = corpus_for_run(assignment.corpus, heldout_sha256=spec.task.heldout_sha256, heldout=fetched)
            heldout = corpus.heldout
            self._text = _as_tensor(corpus.slice_for(assignment.run_id, assignment.peer_id))
            self._filled = len(self._text)
        self._check_long_enough(self._filled)
        self._gate, self._report = map(_as_tensor, divide_heldout(heldout))
        self._check_long_enough(len(self._report))
        torch.manual_seed(spec.run.seed)
        self.model = self.build(spec, assignment).to(device)

    def build(self, spec: RunSpec, assignment: Assignment) -> GPT:
        """The model with the run's initial parameters, on the CPU; torch is seeded with the run's seed."""
        return GPT(spec.model)

    @classmethod
    def skeleton(cls, spec: RunSpec, assignment: Assignment) -> nn.Module:
        """The same model, in a block that makes tensors without memory (torch's meta device)."""
        return GPT(spec.model)

    def feed(self, texts: Sequence[str]) -> None:
        """Train on these files as well. Raises CorpusError."""
        for path in sorted(map(Path, texts), key=lambda path: path.name):
            try:
                text = path.read_bytes()
            except OSError as error:
                raise CorpusError(f"text {path}: cannot be read: {error.strerror}; restart the node") from error
            if self._filled + len(text) > len(self._text):
                raise CorpusError(f"text {path}: {len(text)} bytes are more than were announced; restart the node")
            place = bisect_left(self._files, (path.name,))
            start = sum(size for _, size in self._files[:place])
            behind = self._text[start : self._filled].clone()
            self._filled += len(text)
            self._text[start : start + len(text)] = _as_tensor(text)
            self._text[start + len(text) : self._filled] = behind
            self._files.insert(place, (path.name, len(text)))

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        """Windows of text, (samples, context + 1) int64, at starts drawn uniformly."""
        starts = self._starts(samples, generator, self._filled)
        return self._text[starts + self._window].long().to(self.device)

    def places(self, samples: int, generator: torch.Generator, size: int) -> list[tuple[int, int]]:
        """Where `draw` reads in a text of `size` bytes: (start, stop) of each window. Raises CorpusError."""
        self._check_long_enough(size)
        return [(start, start + len(self._window)) for start in self._starts(samples, generator, size)[:, 0].tolist()]

    @contextmanager
    def on(self, size: int, pieces: Sequence[tuple[int, bytes]]) -> Iterator[None]:
        """Draw from a text of `size` bytes for as long as the block lasts, of which these, by offset, are known."""
        own = self._text, self._filled
        self._text, self._filled = torch.zeros(size, dtype=torch.uint8), size
        for offset, text in pieces:
            self._text[offset : offset + len(text)] = _as_tensor(text)
        try:
            yield
        finally:
            self._text, self._filled = own

    def _starts(self, samples: int, generator: torch.Generator, size: int) -> Tensor:
        """(samples, 1), uniform in a text of `size` bytes."""
        return torch.randint(size - len(self._window) + 1, (samples, 1), generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        """Bits per byte of the windows (B, context + 1)."""
        loss: Tensor = self.model.loss(batch) / math.log(2)
        return loss

    @torch.no_grad()
    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        """Bits per byte of held-out windows: spread evenly where no judge draws, or a judge's few by `seed`."""
        if seed is not None:
            return float(self.loss(self.heldout(seed)))
        count = THOROUGH_WINDOWS if thorough else QUICK_WINDOWS
        starts = torch.linspace(0, len(self._report) - len(self._window), count, dtype=torch.float64).long()
        return _mean_loss(self.model, self._report[starts[:, None] + self._window].to(self.device))

    def heldout(self, seed: int) -> Tensor:
        """The held-out windows that `seed` draws for a judge, (SEQUENCES, context + 1): the same on every machine."""
        starts = self._starts(SEQUENCES, torch.Generator().manual_seed(seed), len(self._gate))
        return self._gate[starts + self._window].long().to(self.device)

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """`length` bytes after `prompt`; an empty prompt starts from a line's end."""
        start = torch.tensor(list(prompt or b"\n"), device=self.device)
        generator = torch.Generator().manual_seed(seed)
        text = self.model.continue_text(start, length=length, temperature=temperature, generator=generator)
        return bytes(text.tolist())

    def _check_long_enough(self, size: int) -> None:
        if size < len(self._window):
            raise CorpusError(
                f"{size} bytes of text are too few for windows of {len(self._window)} bytes; name a larger corpus with "
                "--corpus or lower [model] context"
            )


@torch.no_grad()
def loss_on(text: bytes, spec: RunSpec, parameters: NDArray[np.float32]) -> float:
    """Bits per byte of a whole text, in windows side by side, for the run's model with these parameters, (P,).

    Raises CorpusError where it has less than one window, ValueError for parameters of another model.
    """
    model, window = GPT(spec.model), spec.model.context + 1
    if len(text) < window:
        raise CorpusError(f"{len(text)} bytes of text are less than a window of {window}")
    if parameters.size != sum(parameter.numel() for parameter in model.parameters()):
        raise ValueError(f"{parameters.size} parameters are not those of the run's model")
    torch.nn.utils.vector_to_parameters(torch.tensor(parameters), model.parameters())
    return _mean_loss(model, _as_tensor(text[: len(text) // window * window]).view(-1, window))


def _mean_loss(model: GPT, windows: Tensor) -> float:
    """Bits per byte of uint8 windows, (n, context + 1)."""
    losses = [float(model.loss(batch.long())) * len(batch) for batch in windows.split(EVALUATION_BATCH)]
    return sum(losses) / len(windows) / math.log(2)


def _as_tensor(text: bytes) -> Tensor:
    """Text as uint8 (n,)."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
