"""How a judge's scores of contributions agree with what they are worth, and what they cost, as JSON lines.

    python bench/judging.py [--rounds 1 4] [--windows 384]        # five minutes on two cores
    python bench/judging.py --small --rounds 1 4 12               # a model of a tenth of the cost

Eight workers train the model of examples/open.toml in its rounds of 80 steps. In some rounds their contributions are
looked at, beside those of liars who know them (tests/attacks/adversaries/gradient.py; on text), and of one whom only a
look at curvature tells: half of the honest mean's norm, and all that the norm leaves along the steepest curvature.
What each is worth is its gain on `--windows` held-out windows. Judges draw few of these, and measure

    exact k        the loss before and after an eighth of the contribution, on k windows
    first order m  the product of that step and the gradient of the loss, on m windows: one gradient for all
    both m, k      that gradient's, and on k windows what it does not see (training/open_step.py)

`right` is how often one judge has the sign right; `counted` how often a contribution counts where all sixteen peers
judge, nine votes are needed but for the author's, and seven liars call what is honest worthless and what is a lie good.
`passes` is what a judge of sixteen contributions spends, in forward passes of one window.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from learned import methods
from learned.workers import Size, Vector, Workers
from numpy.typing import NDArray

from swarmnode.training.codecs import codec
from swarmnode.training.gpt import VOCABULARY
from swarmnode.training.inner import InnerLoop, flatten_into
from swarmnode.training.open_step import TRIAL, SamplePlan, gain_of
from swarmnode.training.runspec import ModelSection, load_runspec

ROOT = Path(__file__).parents[1]
EXACT = (1, 2, 8, 16)  # windows
FIRST_ORDER = (8, 16)
BOTH = ((4, 1), (8, 1), (8, 2))
DRAWS = 400  # of judges' windows
PEERS, LIARS = 16, 7

Floats = NDArray[np.float64]


class Recorded(methods.Open):
    """Rounds of the open exchange that keep what was offered."""

    raws: list[bytes]
    before: Vector
    every: list[list[bytes]]  # of each round

    def _gains(self, round: int, raws: list[memoryview]) -> np.ndarray:
        self.raws, self.before = [bytes(raw) for raw in raws], self._state.parameters
        self.every = [*getattr(self, "every", []), self.raws]
        return super()._gains(round, raws)


class Mislabelled:
    """The task of a worker, with each byte b to predict replaced by 255 - b."""

    def __init__(self, workers: Workers) -> None:
        self._task, self.model, self.tokens_per_sample = workers._judge, workers._judge.model, 0
        self.draw = workers.tasks[-1].draw

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1])
        flipped = 255 - batch[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), flipped.reshape(-1)) / math.log(2)


class Heldout:
    """Loss and gradient of single held-out windows, the same ones for all."""

    def __init__(self, workers: Workers, windows: int) -> None:
        self._task, self._vector = workers._judge, workers._judged
        text = self._task._heldout
        starts = torch.from_numpy(np.random.default_rng(1).integers(0, len(text) - len(self._task._window), windows))
        self.windows = text[starts[:, None] + self._task._window].long()

    @torch.no_grad()
    def losses(self, parameters: Vector) -> Floats:
        """(windows,)"""
        self._vector.numpy()[:] = parameters
        found = []
        for batch in self.windows.split(16):
            logits = self._task.model(batch[:, :-1])
            each = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1) / math.log(2)
            found.append(each.double())
        return torch.cat(found).numpy()

    def gradient(self, parameters: Vector, batch: torch.Tensor) -> Vector:
        """(P,)"""
        self._vector.numpy()[:] = parameters
        model = self._task.model
        loss = self._task.loss(batch)
        found = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([each.reshape(-1) for each in found]).numpy()


def steepest(heldout: Heldout, phi: Vector, times: int = 12) -> Vector:
    """The direction of the greatest curvature, by power iteration on differences of gradients; down the slope."""
    batch = heldout.windows[:32]
    slope = heldout.gradient(phi, batch)
    direction = slope / np.linalg.norm(slope)
    for _ in range(times):
        direction = heldout.gradient(phi + np.float32(0.05) * direction, batch) - slope
        direction /= np.linalg.norm(direction)
    return direction if slope @ direction > 0 else -direction


def lies(
    honest: Vector, own: Vector, moved: Vector | None, stale: Vector | None, flipped: Vector, curved: Vector
) -> dict[str, Vector]:
    """What liars offer beside `honest` (h, P), by name; `own`: what one of them trained, (P,)."""
    mean, deviation = honest.mean(axis=0), honest.std(axis=0)
    norm = float(np.median(np.linalg.norm(honest, axis=1)))
    most = max(np.linalg.norm(honest - one, axis=1).max() for one in honest)
    far = [np.linalg.norm(honest - (mean - k * deviation), axis=1).max() for k in np.arange(0.1, 20, 0.1)]
    wander = np.random.default_rng(5).normal(size=mean.size).astype(np.float32)
    little = max(NormalDist().inv_cdf(max(0.5, (9 - 2) / 9)), 0.3)
    found = {
        "sign flip": -own,
        "sign flip x1000": -1000 * own,
        "label flip": flipped,
        "ALIE": mean - np.float32(little) * deviation,
        "IPM 0.1": -0.1 * mean,
        "IPM 0.6": -0.6 * mean,
        "min-max": mean - np.float32(0.1 * max(1, sum(each <= most for each in far))) * deviation,
        "slow drift": mean + wander * (0.25 * np.linalg.norm(mean) / np.linalg.norm(wander)),
        "random": wander * (norm / np.linalg.norm(wander)),
    }
    along = 0.5 * norm * mean / np.linalg.norm(mean)
    found["curvature"] = along + np.sqrt(0.75) * norm * curved / np.linalg.norm(curved)
    found["curvature x0.25"] = 0.25 * found["curvature"]
    if moved is not None:
        found["free riding"] = moved
    if stale is not None:
        found["stale"] = stale
    return {name: lie.astype(np.float32) for name, lie in found.items()}


def counted(good: NDArray[np.bool_], honest: bool) -> float:
    """How often enough votes come together of honest judges, who are drawn from `good`, (contributions, DRAWS)."""
    judges, needed = (PEERS - LIARS - 1, PEERS // 2) if honest else (PEERS - LIARS, PEERS // 2 - (LIARS - 1))
    drawn = np.random.default_rng(3).integers(0, good.shape[1], (DRAWS, judges))
    return float((good[:, drawn].sum(axis=2) >= needed).mean())


def agreement(rows: list[int], scores: Floats, truth: Floats, honest: bool, passes: int) -> dict[str, Any]:
    """`scores`: (contributions, DRAWS)."""
    right = (scores > 0) == (truth > 0)[:, None]
    found: dict[str, Any] = {
        "right": round(float(right[rows].mean()), 4),
        "counted": round(counted(scores[rows] > 0, honest), 4),
        "mean": round(float(scores[rows].mean()), 6),
        "noise": round(float(scores[rows].std(axis=1).mean()), 6),
        "passes": passes,
    }
    if honest:
        medians = np.median(scores[rows][:, : PEERS - LIARS], axis=1)
        found["correlation"] = round(float(np.corrcoef(medians, truth[rows])[0, 1]), 3)
    return found


def look(heldout: Heldout, phi: Vector, offers: dict[str, list[Vector]], round: int) -> Iterator[dict[str, Any]]:
    """How scores of these contributions, by kind, agree with what they are worth."""
    names = [name for name, several in offers.items() for _ in several]
    steps = [np.float32(TRIAL) * each for several in offers.values() for each in several]
    before = heldout.losses(phi)
    gains = np.stack([before - heldout.losses(phi - step) for step in steps])  # (C, windows)
    slopes = np.empty_like(gains)
    for window in range(len(heldout.windows)):
        gradient = heldout.gradient(phi, heldout.windows[window : window + 1])
        slopes[:, window] = [float(gradient @ step) for step in steps]
    rng = np.random.default_rng(2)
    truth = gains.mean(axis=1)
    drawn = np.stack([rng.permutation(len(heldout.windows))[:16] for _ in range(DRAWS)])

    def means(of_windows: Floats, first: int) -> Floats:
        return np.asarray(of_windows[:, drawn[:, :first]].mean(axis=2))

    scores = {f"exact {k}": (means(gains, k), SamplePlan(0, k).passes(PEERS)) for k in EXACT}
    scores |= {f"first order {m}": (means(slopes, m), SamplePlan(m, 0).passes(PEERS)) for m in FIRST_ORDER}
    scores |= {
        f"both {m}, {k}": (
            np.vectorize(gain_of)(means(gains, k), means(slopes, k), means(slopes, m) - means(slopes, k)),
            SamplePlan(m, k).passes(PEERS),
        )
        for m, k in BOTH
    }
    for kind in offers:
        rows = [number for number, name in enumerate(names) if name == kind]
        line: dict[str, Any] = {"bench": "judging", "round": round, "loss": float(before.mean().round(3)), "kind": kind}
        line["gain"] = float(truth[rows].mean().round(6))
        for name, (given, passes) in scores.items():
            line[name] = agreement(rows, given, truth, kind == "honest", passes)
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description="how a judge's scores agree with what contributions are worth")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 4], help="in which contributions are looked at")
    parser.add_argument("--windows", type=int, default=384, help="held-out windows that tell what one is worth")
    parser.add_argument("--small", action="store_true", help="two layers of width 64, on windows of 64 bytes")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    spec = load_runspec(ROOT / "examples" / "open.toml")
    arm = methods.Arm(
        "open", steps=0, lr=spec.inner.lr, interval=spec.inner.steps, codec="topk", decay=0.95, judged=TRIAL
    )
    size = Size(model=ModelSection(layers=2, heads=2, width=64, context=64)) if options.small else Size()
    workers = Workers(size, options.seed)
    inner = workers.size.spec(seed=options.seed, lr=arm.lr, steps=arm.interval)
    method = Recorded(arm, workers, inner, workers.initial, "judging")
    heldout, found = Heldout(workers, options.windows), codec(arm.codec)
    phi = previous = workers.initial
    for number in range(max(options.rounds) + 1):
        before, phi = phi, method.advance(number)
        if number in options.rounds:
            elements = workers.parameters
            honest = np.stack([found.decode(raw, elements) for raw in method.raws])
            task = Mislabelled(workers)
            loop = InnerLoop(inner, task, peer_id="flipped", vector=workers._judged, keep=True)  # type: ignore[arg-type]
            workers._judged.numpy()[:] = before
            loop.train(round=number, steps=arm.interval, seconds=math.inf, between=lambda: False)
            flipped = before - workers._judged.numpy()
            flatten_into(workers._judge.model, workers._judged, keep=True)
            stale = found.decode(method.every[max(0, number - 12)][0], elements) if number else None
            told = lies(
                honest, honest[-1], previous - before if number else None, stale, flipped, steepest(heldout, before)
            )
            coded = {name: [found.decode(bytes(found.encode(lie)), elements)] for name, lie in told.items()}
            for line in look(heldout, before, {"honest": list(honest), **coded}, number):
                print(json.dumps(line), flush=True)
        previous = before
    workers.close()


if __name__ == "__main__":
    main()
