"""The tasks gpt and byte-lm: a GPT learns to predict the next token of the corpus; of byte-lm, that is the next byte.

Training windows start anywhere in the node's own slice: shards of the run's data, of which more may come while it
trains, or a part of its own corpus. Shards lie in the order of their file names, which are their ids, whenever they
came: so the windows of a step follow from which shards a node has, and others know where it read. They stay on disk,
however many there are; a window is read when it is drawn. The held-out loss is measured on windows spread evenly over
the part of the held-out text that no judge draws from, the same on every node, so losses of different nodes can be
compared digit by digit.

Losses are in bits per byte of text, so that runs with different tokenizers can be compared. In a figure for people,
each token counts for as many bytes as it stands for. In a loss that is trained on or judged by, each counts for the
mean of the held-out text: so the loss of many samples is the mean of their losses. Tokens that came without a tokenizer
stand for one byte each.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from swarmnode.training import tokens
from swarmnode.training.gpt import GPT
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import DataSection
from swarmnode.training.tasks import Assignment, TaskError, load_task
from swarmnode.training.tokens import CorpusError

QUICK_WINDOWS = 32  # a progress figure each round must cost no more than a few inner steps
THOROUGH_WINDOWS = 256
EVALUATION_BATCH = 32
REPORT_PART = 4  # the last quarter of the held-out text

Tokens = NDArray[Any]  # (n,), of the item that the vocabulary needs


class ByteLM:
    """A language model. Raises CorpusError where the corpus cannot be used, TaskError where a prompt cannot."""

    needs_text = True

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        self.device = device
        self.tokens_per_sample = spec.model.context
        self._window = spec.model.context + 1
        self.spelling = Spelling(spec.data, _read("tokenizer", assignment.tokenizer))
        self._text = Text(self.spelling.dtype)
        self.feed(assignment.texts)
        heldout = self.spelling.items(_read("held-out text", assignment.heldout, spec.task.heldout_sha256))
        self._check_long_enough(self._text.size)
        self._gate, self._report = divided(heldout)
        self._check_long_enough(len(self._report))
        self.bytes_per_token = self.spelling.bytes_in(heldout) / len(heldout) or 1.0
        torch.manual_seed(spec.run.seed)
        self.model = self.build(spec, assignment).to(device)

    @classmethod
    def build(cls, spec: RunSpec, assignment: Assignment) -> GPT:
        """The model with the run's initial parameters, on the CPU; torch is seeded with the run's seed."""
        return GPT(spec.model, spec.data.vocabulary)

    skeleton = build  # in a block that makes tensors without memory (torch's meta device)

    def feed(self, texts: Sequence[str]) -> None:
        self._text.add(map(Path, texts))

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        """Windows of text, (samples, context + 1) int64, at starts drawn uniformly. Raises CorpusError."""
        starts = self._starts(samples, generator, self._text.size)
        windows = np.stack([self._text.window(start, self._window) for start in starts])
        return torch.from_numpy(self.spelling.known(windows)).to(self.device)

    def places(self, samples: int, generator: torch.Generator, size: int) -> list[tuple[int, int]]:
        """Where `draw` reads in a text of `size` bytes: (start, stop) of each window. Raises CorpusError."""
        item = self.spelling.dtype.itemsize
        starts = self._starts(samples, generator, size // item)
        return [(start * item, (start + self._window) * item) for start in starts]

    @contextmanager
    def on(self, size: int, pieces: Sequence[tuple[int, bytes]]) -> Iterator[None]:
        own, self._text = self._text, Text(self.spelling.dtype)
        self._text.know(size, pieces)
        try:
            yield
        finally:
            self._text = own

    def _starts(self, samples: int, generator: torch.Generator, size: int) -> list[int]:
        self._check_long_enough(size)
        return torch.randint(size - self._window + 1, (samples, 1), generator=generator)[:, 0].tolist()

    def loss(self, batch: Tensor) -> Tensor:
        """Bits per byte of the windows (B, context + 1)."""
        return self.model.loss(batch) / (math.log(2) * self.bytes_per_token)

    @torch.no_grad()
    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        """Bits per byte of held-out windows: spread evenly where no judge draws, or a judge's few by `seed`."""
        if seed is not None:
            return float(self.loss(self.heldout(seed)))
        windows = self.spread(THOROUGH_WINDOWS if thorough else QUICK_WINDOWS)
        loss, self.accuracy = _measured(self.model, windows, self.spelling)
        return loss

    def heldout(self, seed: int) -> Tensor:
        """The held-out windows that `seed` draws for a judge, (SEQUENCES, context + 1): the same on every machine."""
        starts = self._starts(SEQUENCES, torch.Generator().manual_seed(seed), len(self._gate))
        return _windows(self._gate, starts, self._window).to(self.device)

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """`length` tokens after `prompt`, as text; an empty prompt starts from where a text or a line begins.

        Raises TaskError where the prompt cannot be encoded.
        """
        start = torch.tensor(self.spelling.prompt(prompt), device=self.device)
        generator = torch.Generator().manual_seed(seed)
        written = self.model.continue_text(start, length=length, temperature=temperature, generator=generator)
        return tokens.decode(written.tolist(), self.spelling.spelled)

    def spread(self, count: int) -> Tensor:
        """Windows of the report, (count, context + 1), at even distances."""
        starts = torch.linspace(0, len(self._report) - self._window, count, dtype=torch.float64).long()
        return _windows(self._report, starts.tolist(), self._window)

    def _check_long_enough(self, size: int) -> None:
        if size < self._window:
            raise CorpusError(
                f"{size} {self.spelling.unit} of text are too few for windows of {self._window}; name a larger corpus "
                "with --corpus or lower [model] context"
            )


class Text:
    """Tokens that lie one behind another in files and in memory. Nothing is read before it is asked for."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.size = 0  # tokens
        self._parts: list[tuple[str, int, Path | Tokens]] = []  # name, tokens, where they are; in order
        self._starts: list[int] = []

    def add(self, paths: Iterable[Path]) -> None:
        """More text, each file in the place that its name has among those that are there. Raises CorpusError."""
        for path in paths:
            try:
                size = path.stat().st_size // self.dtype.itemsize
            except OSError as error:
                raise CorpusError(f"text {path}: cannot be read: {error.strerror}; restart the node") from error
            self._parts.insert(bisect_left(self._parts, (path.name,)), (path.name, size, path))
        self._starts = list(accumulate((size for _, size, _ in self._parts), initial=0))
        self.size = self._starts.pop()

    def know(self, size: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """Be a text of `size` bytes, of which these, by offset, are known, and all else is zeros."""
        item = self.dtype.itemsize
        self.size, known = size // item, 0
        for offset, text in sorted(pieces):
            start = max(known, offset // item)
            part = np.frombuffer(text[: len(text) // item * item], self.dtype)[start - offset // item :]
            self._starts.append(start)
            self._parts.append(("", len(part), part))
            known = start + len(part)

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from `start` on. Raises CorpusError."""
        found = np.zeros(length, np.int64)
        for place in range(max(0, bisect_right(self._starts, start) - 1), len(self._parts)):
            begin, (_, size, part) = self._starts[place], self._parts[place]
            first, last = max(start, begin), min(start + length, begin + size)
            if begin >= start + length:
                break
            if first < last:
                found[first - start : last - start] = self._read(part, first - begin, last - begin)
        return found

    def _read(self, part: Path | Tokens, first: int, last: int) -> Tokens:
        if not isinstance(part, Path):
            return part[first:last]
        try:
            # Not mapped: Python keeps a file open for each mapping, and there may be thousands.
            read = np.fromfile(part, self.dtype, count=last - first, offset=first * self.dtype.itemsize)
        except OSError as error:
            raise CorpusError(f"text {part}: cannot be read: {error.strerror}; restart the node") from error
        if len(read) != last - first:
            raise CorpusError(f"text {part}: it is shorter than it was; restart the node")
        return read


class Spelling:
    """What the tokens of a run's data stand for. Raises TokenizerError where its tokenizer cannot be used."""

    def __init__(self, data: DataSection, tokenizer: bytes) -> None:
        self.vocabulary = data.vocabulary
        self.dtype = tokens.dtype_of(data.vocabulary)
        self.unit = "tokens" if data.vocabulary != tokens.BYTES else "bytes"
        self.spelled: tuple[bytes, ...] = ()  # none for tokens that came without a tokenizer
        self._tokenizer = tokenizer
        if tokenizer:
            self.spelled = tokens.spellings(tokenizer, data.vocabulary)
        elif data.vocabulary == tokens.BYTES:
            self.spelled = tuple(bytes([byte]) for byte in range(tokens.BYTES))
        self._lengths = np.array([len(spelling) for spelling in self.spelled] or [1] * data.vocabulary)

    def items(self, shard: bytes) -> Tokens:
        """Raises CorpusError."""
        return self.known(np.frombuffer(shard[: len(shard) // self.dtype.itemsize * self.dtype.itemsize], self.dtype))

    def known(self, text: NDArray[Any]) -> NDArray[Any]:
        """The same. Raises CorpusError where it has tokens beyond the vocabulary."""
        if (most := text.max(initial=0)) >= self.vocabulary:
            raise CorpusError(
                f"the text has the token {most}, and [data] vocabulary = {self.vocabulary}; begin a new run with a "
                "larger one"
            )
        return text

    def encode(self, text: bytes) -> Tokens:
        """The tokens of a text; where there is no tokenizer, it is tokens already."""
        if not self._tokenizer:
            return self.items(text)
        return tokens.Encoder(self._tokenizer, self.vocabulary).encode([text])[0]

    def bytes_in(self, text: Tokens) -> int:
        return int(self._lengths[text].sum())

    def prompt(self, text: bytes) -> list[int]:
        """The tokens that a text begins with, one at the least. Raises TaskError."""
        if not self.spelled:
            raise TaskError("the run's tokens came without a tokenizer, so the model cannot read or write text")
        if not self._tokenizer:
            return list(text or b"\n")
        end = tokens.end_of(self._tokenizer)
        if not text and end is not None:
            return [end]  # a text follows where another one has ended
        found: list[int] = self.encode(text or b"\n").tolist()
        found = found[:-1] if found[-1:] == [end] else found
        if not found:
            raise TaskError(f"the run's tokenizer has no token for the prompt {text!r}; try another")
        return found


@torch.no_grad()
def loss_on(
    text: bytes, spec: RunSpec, parameters: NDArray[np.float32], *, tokenizer: bytes = b"", base: str = ""
) -> float:
    """Bits per byte of a whole text, in windows side by side, for the run's model with these parameters, (P,).

    A run with a tokenizer needs its tokenizer.json, one by hf-lm the folder of its base. Raises CorpusError where the
    text has less than one window, ValueError for parameters of another model, TaskError where the base is not one.
    """
    if spec.data.tokenizer and not tokenizer:
        raise CorpusError("the run trains on tokens, so its tokenizer is needed to measure the loss on a text")
    spelling, window = Spelling(spec.data, tokenizer), spec.model.context + 1
    task = load_task(spec.task.name, "")
    given = Assignment("", "", base=base)
    with torch.device("meta"):  # a stranger's record may name a model of any size
        shape = task.skeleton(spec, given)
    if parameters.size != sum(parameter.numel() for parameter in shape.parameters() if parameter.requires_grad):
        raise ValueError(f"{parameters.size} parameters are not those of the run's model")
    model = task.build(spec, given)
    encoded = spelling.encode(text)
    if len(encoded) < window:
        raise CorpusError(f"{len(encoded)} {spelling.unit} of text are less than a window of {window}; name more")
    torch.nn.utils.vector_to_parameters(torch.tensor(parameters), [p for p in model.parameters() if p.requires_grad])
    return _measured(model, _windows(encoded, range(0, len(encoded) - window + 1, window), window), spelling)[0]


def divided(heldout: Tokens) -> tuple[Tokens, Tokens]:
    """The gate, from which judges draw, and the report, on which the loss is measured that people read.

    Documents lie in it by their hashes, so either is a random sample of the text. Who trains on what it is judged by
    moves no figure that people read, as long as nobody trains on the report too. What nobody can have trained on is
    text that the run's creator keeps back (`[data] sealed`).
    """
    middle = len(heldout) - len(heldout) // REPORT_PART
    return heldout[:middle], heldout[middle:]


def _measured(model: GPT, windows: Tensor, spelling: Spelling) -> tuple[float, float]:
    """Bits per byte of windows, (n, context + 1), and the share of tokens that are the likeliest after those before."""
    device = next(model.parameters()).device
    nats = hits = 0.0
    for batch in windows.to(device).split(EVALUATION_BATCH):
        logits, following = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()  # (B * T, V), (B * T,)
        nats += float(F.cross_entropy(logits, following)) * len(following)
        hits += int((logits.argmax(-1) == following).sum())
    predicted = windows[:, 1:].numpy()
    return nats / math.log(2) / (spelling.bytes_in(predicted) or 1), hits / predicted.size


def _windows(text: Tokens, starts: Sequence[int], length: int) -> Tensor:
    """(n, length) int64."""
    return torch.from_numpy(text[np.array(starts)[:, None] + np.arange(length)].astype(np.int64))


def _read(what: str, path: str, sha256: str | None = None) -> bytes:
    """A file, nothing where none is named. Raises CorpusError where it does not hash to `sha256`, if that is given."""
    try:
        content = Path(path).read_bytes() if path else b""
    except OSError as error:
        raise CorpusError(f"{what} {path}: cannot be read: {error.strerror}; restart the node") from error
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        said = f"{what} {path} hashes to {found[:12]}…, the run's to {sha256[:12]}…"
        raise CorpusError(f"{said}; remove it to fetch it again")
    return content
