"""The group byte-lm: the worst attacks of the group gradient, where peers train the product's own language model.

    python tests/attacks byte-lm

`ByteTask` is a task of `openrounds.py`: model, inner loop and corpus are the product's, with a text for each peer.

task = ByteTask(seed=0, alpha=0.3)         # alpha: Dirichlet's, of sections in each peer's text; None: IID
deltas = task.train(phi, round=0)          # (n, P) float32 of n peers: how far each peer's steps take it, φ − θ
task.accuracy(phi)                         # bits that it predicts of each byte of a text that nobody has

A peer's steps are those of its trainer: AdamW on windows that run, peer, round and step draw from its own text, with
moments that it keeps from round to round. `InnerLoop.replayed` takes them, as it repeats another's steps in an audit.
Judges draw windows of the run's held-out text, on as many as the product's judges do after so few steps: one each.

What stands for accuracy is how many bits a model saves on each byte beside one that knows only how often each byte
occurs. Counted from the 8 bits of a model that knows nothing, most of the gain would be that of the first rounds.
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import trio
from adversaries import adaptive
from adversaries import gradient as adversaries
from adversaries.gradient import GradientLie
from clusters import PEERS, Floats, Labels
from gradient import Line, Setting, Wanted, measured
from numpy.typing import NDArray
from openrounds import Lie

from swarmnode.testing.runtext import RunText
from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.dataset import hash_of, place_of
from swarmnode.training.documents import Documents, Meter
from swarmnode.training.inner import InnerLoop
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment
from swarmnode.training.tokens import BYTES
from swarmnode.training.verify.trace import State

CONTEXT = 64  # bytes that are predicted in a sequence
MODEL = {"layers": 2, "heads": 2, "width": 32, "context": CONTEXT}
INNER = {"steps": 5, "lr": 3e-3}
SECTIONS = 10  # of the corpus, whose files lie in the order of their names
PIECES = 200  # documents that a peer has where texts are skewed
TESTED = 2  # of the 64 shards or so: nobody trains on them or judges by them
WINDOWS = 512  # of these, that are tested

ROUNDS = 40
SEEDS = (0, 1)


class Trained(ByteLM):
    """byte-lm, with a peer's own idea of which byte it is that follows."""

    labels: torch.Tensor | None = None  # (256,) int64, what is to be predicted in the place of each byte

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.labels is None:
            return super().loss(batch)
        logits = self.model(batch[:, :-1]).reshape(-1, BYTES)
        return torch.nn.functional.cross_entropy(logits, self.labels[batch[:, 1:]].reshape(-1)) / math.log(2)


class ByteTask:
    """What each peer has, what judges measure on, and what the result is tested on."""

    classes = BYTES

    def __init__(self, *, seed: int, alpha: float | None, peers: int = PEERS) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # as the trainer's process does
        self.peers, self.names = peers, [f"{seed} peer-{place:02d}" for place in range(peers)]
        self.labels: Labels = np.tile(np.arange(BYTES), (peers, 1))  # (n, 256)
        text, spec = text_of(seed), text_of(seed).spec
        tested = np.frombuffer(text.tested, np.uint8)
        rng = np.random.default_rng([seed, 1])
        self.texts = (
            [text.slice(name) for name in self.names]
            if alpha is None
            else [_skewed(documents(seed), alpha, rng) for _ in self.names]
        )
        self.trained = spec.inner.steps * spec.inner.batch
        self._steps = spec.inner.steps
        self._task = Trained(spec, Assignment(spec.run_id, self.names[0], **text.files(self.names[0])))
        self.parameters = sum(parameter.numel() for parameter in self._task.model.parameters())
        self._vector = torch.empty(self.parameters)
        self._loop = InnerLoop(spec, self._task, peer_id=self.names[0], vector=self._vector, keep=False)
        self._first = self._loop.state()
        self._moments: list[State] = []  # after each peer's last step
        starts = np.linspace(0, len(tested) - CONTEXT - 1, WINDOWS).astype(int)[:, None]
        self._tested = torch.from_numpy(tested[starts + np.arange(CONTEXT + 1)].astype(np.int64))
        shares = np.bincount(self._tested[:, 1:].reshape(-1), minlength=BYTES) / self._tested[:, 1:].numel()
        self._plain = float(-np.sum(shares * np.log2(np.maximum(shares, 1e-12))))  # bits, by how often each byte occurs

    def start(self) -> Floats:
        """The parameters before round 0, (P,)."""
        return self._first.parameters.copy()

    def train(self, phi: Floats, *, round: int) -> Floats:
        """φ − θ of each peer after its steps on its own text, (n, P), from `phi`, (P,) or (n, P)."""
        if round == 0:
            self._moments = [self._first] * self.peers
        starts = np.array(np.broadcast_to(phi, (self.peers, self.parameters)))
        deltas = np.empty_like(starts)
        for place, (name, text) in enumerate(zip(self.names, self.texts, strict=True)):
            kept, labels = self._moments[place], torch.from_numpy(self.labels[place])
            self._task.labels = None if labels.equal(torch.arange(BYTES)) else labels
            begin = State(starts[place], kept.moments, kept.updates)
            with (
                self._task.on(len(text), [(0, text)]),
                self._loop.replayed(begin, peer_id=name, round=round, step=0, steps=self._steps) as end,
            ):
                np.subtract(starts[place], end.parameters, out=deltas[place])
                self._moments[place] = State(end.parameters, end.moments.copy(), end.updates)
        self._task.labels = None
        return deltas

    def losses(self, vectors: Floats, *, seed: int, samples: int = SEQUENCES * CONTEXT) -> NDArray[np.float64]:
        """Bits per byte of each of `vectors`, (k, P) -> (k,), on as many predictions in sequences that `seed` draws."""
        drawn = self._drawn(seed, max(1, samples // CONTEXT))
        return np.array([self._loss(vector, drawn) for vector in vectors])

    def slope(self, phi: Floats, seed: int, first: int, last: int) -> Floats:
        """Gradient (P,) of the loss, in bits, on the sequences from `first` to before `last` that `seed` draws."""
        self._vector.copy_(torch.from_numpy(np.array(phi)))
        return self._loop.slope(self._drawn(seed, last)[first:last])[1].numpy().copy()

    def accuracy(self, phi: Floats) -> float:
        """Bits saved on each byte of the tested text by what the model knows besides how often each byte occurs."""
        saved = self._plain - self._loss(phi, self._tested)
        return max(0.0, saved) if math.isfinite(saved) else 0.0

    def _drawn(self, seed: int, count: int) -> torch.Tensor:
        """The first `count` sequences that a judge draws by `seed`, and where these do not do, by the next ones."""
        return torch.cat([self._task.heldout(seed + more) for more in range(-(-count // SEQUENCES))])[:count]

    @torch.no_grad()
    def _loss(self, vector: Floats, windows: torch.Tensor) -> float:
        self._vector.copy_(torch.from_numpy(np.array(vector)))
        return sum(float(self._task.loss(part)) * len(part) for part in windows.split(32)) / len(windows)


def spec_of(seed: int) -> RunSpec:
    """The run that all peers take part in."""
    return parse_runspec({"run": {"name": "byte-lm", "seed": seed}, "model": MODEL, "inner": INNER}, source="attacks")


@cache
def text_of(seed: int) -> RunText:
    """The run's text, cut once; its shards lie on the disk until this process ends."""
    folder = tempfile.mkdtemp(prefix="swarmnode-byte-lm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return RunText(spec_of(seed), Path(folder), apart=TESTED)


@cache
def documents(seed: int) -> tuple[bytes, ...]:
    """What peers train on, in the order of the files' names."""
    index, after = text_of(seed).index, text_of(seed).after
    found = dict.fromkeys(Documents("", vocabulary=BYTES).read(index.piece, Meter()))
    return tuple(text for text in found if place_of(hash_of(text, index.seed)) > after)


def _skewed(documents: tuple[bytes, ...], alpha: float, rng: np.random.Generator) -> bytes:
    """The text of one peer: documents of a few sections."""
    sections = np.array_split(np.arange(len(documents)), SECTIONS)
    drawn = rng.choice(SECTIONS, size=PIECES, p=rng.dirichlet([alpha] * SECTIONS))
    return b"".join(documents[rng.choice(sections[section])] for section in drawn)


# --- the group --------------------------------------------------------------------------------------------------------


class ByteSetting(Setting):
    """One where peers learn to write Python."""

    def task(self, seed: int) -> ByteTask:  # type: ignore[override]  # it does what the other does
        return ByteTask(seed=seed, alpha=self.alpha, peers=self.peers)


WITHOUT_LIARS = (
    ByteSetting("IID 0/16", None, 0, 0.95, codec="topk", seeds=SEEDS),
    ByteSetting("Dirichlet 0/16", 0.3, 0, 0.95, codec="topk", seeds=SEEDS),
)
SETTINGS = (
    replace(WITHOUT_LIARS[0], name="IID 5/16", liars=5),
    replace(WITHOUT_LIARS[1], name="Dirichlet 4/16", liars=4),
)

HEADING = "byte-lm, by the trainers' own inner loop"
EXPLAINED = f"""
Two of the attacks of the table above that cost most at 40 rounds before there were audits (the others in
`bytelm.py` have no lines yet), where the peers train the product's language model: a GPT of two layers, 32 wide, 43,168
parameters, on Python's standard library. A round (H)
is {INNER["steps"]} steps of AdamW on four sequences of {CONTEXT} bytes each, at a learning rate of {INNER["lr"]}. The
product's own are the model, the steps, the moments that a peer keeps from round to round, the windows that run, peer,
round and step draw, and the windows of judges, one for each judge after so few steps; the network is left out, and
audits are modelled as above. IID: each peer has the quarter of the corpus that the product gives it. Dirichlet(0.3):
{PIECES} documents, by shares of {SECTIONS} sections of the corpus, whose files lie in the order of their names.
Label flip: what follows is trained to be 255 - b, not b. In the place of accuracy stands what a model saves of the
bits of each byte beside one that knows only how often each byte occurs, on text that nobody trains on or judges by;
so worst is (plain - attacked) / (plain - clean). All else is as above.
"""


def lies(rounds: int) -> list[GradientLie]:
    """The four that cost most before audits, one that ruined runs under earlier rules, one that audits seldom find."""
    return [
        adaptive.OffersNothing(),
        adaptive.FreshNoise(),
        adversaries.LabelFlip(),
        adversaries.InnerProduct(),
        adaptive.RidesThenFlips(rounds // 2),
        adaptive.InOneStretch(adaptive.OffersNothing()),
    ]


def wanted() -> Iterator[Wanted]:
    """The lines of the group."""
    yield Wanted("nobody lies", Lie(), WITHOUT_LIARS, ROUNDS)
    yield from (Wanted(lie.name, lie, SETTINGS, ROUNDS) for lie in lies(ROUNDS))


async def outcomes() -> AsyncIterator[Line]:
    """Each line as soon as it is there; an hour on two cores."""
    found = measured(wanted())
    while (line := await trio.to_thread.run_sync(next, found, None)) is not None:
        yield line
