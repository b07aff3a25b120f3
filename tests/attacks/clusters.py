"""A classification task so small that sixteen peers learn it in a second: ten clusters, a network of one hidden layer.

task = Task(seed=0, alpha=0.3)             # alpha: Dirichlet's, of the classes that each peer has; None: IID
deltas = task.train(phi, round=0)          # (n, P) float32 of n peers: how far each peer's steps take it, φ − θ
task.accuracy(phi)                         # share of the test samples
task.told(phi)                             # loss as it would be reported, and on text that nobody saw
Task(seed=0, alpha=None, hidden=LARGE)     # the same with ten times as many parameters

Held-out samples have three parts: judges draw from one, the loss that is reported is of another, which no judge draws
from, and accuracy is of a third, of which nobody trains or judges on anything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.open_step import SEQUENCES

PEERS = 16
CLASSES = 10
FEATURES, HIDDEN = 16, 24
SAMPLES = 200  # of each peer
HELDOUT = 4000  # samples that all judges draw from
SEQUENCE = 64  # of them that stand for one of a judge's sequences, in which byte-lm makes twice as many predictions
JUDGED = SEQUENCES * SEQUENCE  # that one judge draws
TESTED = 4000
REPORTED = 400_000  # samples of a reported loss: so many that chance moves it by 0.2 %
STEPS, BATCH, LR = 5, 32, 0.08  # inner steps of a round
SPREAD = 0.7  # of the clusters' centres; a sample lies about four from its own, in all features together

LARGE = 244  # hidden units of the task ten times as large

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


class Task:
    """What each peer has, what judges measure on, and what the result is tested on."""

    classes = CLASSES
    trained = 320  # sequences of a round's training that judging is measured by, as in examples/open.toml

    def __init__(self, *, seed: int, alpha: float | None, peers: int = PEERS, hidden: int = HIDDEN) -> None:
        """`hidden`: units of the hidden layer, in which the parameters are counted."""
        self.peers, self.hidden = peers, hidden
        self.names = [f"{seed} peer-{place:02d}" for place in range(peers)]  # drawn by: others with each seed
        self.by_heart = 0  # of the last peers: they train on what judges draw from
        self.parameters = (FEATURES + 1) * hidden + (hidden + 1) * CLASSES
        rng = np.random.default_rng([seed, 1])
        self._seed = seed
        self._centres = rng.normal(0, SPREAD, (CLASSES, FEATURES)).astype(np.float32)
        shares = np.full((peers, CLASSES), 1 / CLASSES) if alpha is None else rng.dirichlet([alpha] * CLASSES, peers)
        self.labels: Labels = np.stack([rng.choice(CLASSES, SAMPLES, p=share) for share in shares])  # (n, S)
        self._inputs = self._draw(rng, self.labels)  # (n, S, F)
        self._heldout_labels = rng.integers(0, CLASSES, HELDOUT)
        self._heldout = self._draw(rng, self._heldout_labels)
        self._test_labels = rng.integers(0, CLASSES, TESTED)
        self._test = self._draw(rng, self._test_labels)

    def start(self) -> Floats:
        """The parameters before round 0, (P,)."""
        rng = np.random.default_rng([self._seed, 2])
        phi = np.zeros(self.parameters, np.float32)
        phi[: FEATURES * self.hidden] = rng.normal(0, FEATURES**-0.5, FEATURES * self.hidden)
        after = (FEATURES + 1) * self.hidden
        phi[after : after + self.hidden * CLASSES] = rng.normal(0, self.hidden**-0.5, self.hidden * CLASSES)
        return phi

    def train(self, phi: Floats, *, round: int) -> Floats:
        """φ − θ of each peer after its steps on its own data, (n, P), from `phi`, (P,) or (n, P)."""
        rng = np.random.default_rng([self._seed, 3, round])
        theta = np.array(np.broadcast_to(phi, (self.peers, self.parameters)))
        rows = np.arange(self.peers)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):  # where an attack has made them infinite
            for _ in range(STEPS):
                drawn = rng.integers(0, SAMPLES, (self.peers, BATCH))
                inputs, labels = self._inputs[rows, drawn], self.labels[rows, drawn]
                if self.by_heart:
                    learned = drawn[-self.by_heart :] * (HELDOUT // SAMPLES) + round % (HELDOUT // SAMPLES)
                    inputs[-self.by_heart :] = self._heldout[learned]
                    labels[-self.by_heart :] = self._heldout_labels[learned]
                theta -= np.float32(LR) * _gradients(theta, inputs, labels)
        return phi - theta

    def losses(self, vectors: Floats, *, seed: int, samples: int = JUDGED) -> NDArray[np.float64]:
        """Mean cross-entropy in bits of each of `vectors`, (k, P) -> (k,), on held-out samples that `seed` draws."""
        drawn = np.random.default_rng(seed).integers(0, HELDOUT, max(samples, JUDGED))[:samples]
        inputs = np.broadcast_to(self._heldout[drawn], (len(vectors), samples, FEATURES))
        with np.errstate(over="ignore", invalid="ignore"):
            logits = _forward(vectors, inputs)[1].astype(np.float64)
            logits -= logits.max(axis=2, keepdims=True)
            right = logits[:, np.arange(samples), self._heldout_labels[drawn]]
            return np.asarray((np.log(np.exp(logits).sum(axis=2)) - right).mean(axis=1) / np.log(2))

    def slope(self, phi: Floats, seed: int, first: int, last: int) -> Floats:
        """Gradient (P,) of the loss, in bits, on the sequences from `first` to before `last` that `seed` draws."""
        whole = np.random.default_rng(seed).integers(0, HELDOUT, max(JUDGED, last * SEQUENCE))
        drawn = whole[first * SEQUENCE : last * SEQUENCE]
        with np.errstate(over="ignore", invalid="ignore"):
            found = _gradients(phi[None], self._heldout[drawn][None], self._heldout_labels[drawn][None])
        return found[0] / np.float32(np.log(2))

    def accuracy(self, phi: Floats) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            logits = _forward(phi[None], self._test[None])[1][0]
        return float(np.mean(logits.argmax(axis=1) == self._test_labels)) if np.isfinite(phi).all() else 0.0

    def told(self, phi: Floats) -> tuple[float, float]:
        """Mean loss in bits on text that is reported on and never judged by, and on as much that nobody saw."""
        rng = np.random.default_rng([self._seed, 4])
        found = []
        for _ in range(2):
            labels = rng.integers(0, CLASSES, REPORTED)
            with np.errstate(over="ignore", invalid="ignore"):
                logits = _forward(phi[None], self._draw(rng, labels)[None])[1][0].astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(REPORTED), labels]
            found.append(float(losses.mean() / np.log(2)))
        return found[0], found[1]

    def _draw(self, rng: np.random.Generator, labels: Labels) -> Floats:
        return self._centres[labels] + rng.normal(0, 1.0, (*labels.shape, FEATURES)).astype(np.float32)


def _layers(theta: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Weights (k, F, H) and biases (k, 1, H) of the hidden layer; (k, H, C) and (k, 1, C) of the last."""
    hidden = (theta.shape[1] - CLASSES) // (FEATURES + 1 + CLASSES)
    sizes = np.cumsum([FEATURES * hidden, hidden, hidden * CLASSES])
    first, bias, last, bias_last = np.split(theta, sizes, axis=1)
    return (
        first.reshape(-1, FEATURES, hidden),
        bias[:, None],
        last.reshape(-1, hidden, CLASSES),
        bias_last[:, None],
    )


def _forward(theta: Floats, inputs: Floats) -> tuple[Floats, Floats]:
    """Hidden values (k, B, H) and logits (k, B, C) of `theta` (k, P) on `inputs` (k, B, F)."""
    first, bias, last, bias_last = _layers(theta)
    hidden = np.maximum(inputs @ first + bias, 0)
    return hidden, hidden @ last + bias_last


def _gradients(theta: Floats, inputs: Floats, labels: Labels) -> Floats:
    """Gradients of the mean cross-entropy, (k, P)."""
    hidden, logits = _forward(theta, inputs)
    error = np.exp(logits - logits.max(axis=2, keepdims=True))
    error /= error.sum(axis=2, keepdims=True)
    np.put_along_axis(error, labels[..., None], np.take_along_axis(error, labels[..., None], 2) - 1, 2)
    error /= np.float32(inputs.shape[1])
    back = (error @ _layers(theta)[2].transpose(0, 2, 1)) * (hidden > 0)
    parts = (inputs.transpose(0, 2, 1) @ back, back.sum(1), hidden.transpose(0, 2, 1) @ error, error.sum(1))
    return np.concatenate([part.reshape(len(theta), -1) for part in parts], axis=1)
