"""What was tried and not built: MT-DAO, AdLoCo, DGC and SAVIC beside `diloco` as the product has it, at equal tokens.

    python bench/tried.py [--seeds 3] [--steps 240] [--width 48]        # JSON lines; minutes a seed

Eight workers train a GPT of six layers on bytes, two windows of 32 each a step (learned/workers.py), AdamW inside. An
exchange comes after every 12 steps and is exact (`fp32`) but for the rows of `topk`. Each row is one arm of one seed:
`loss` held out, `above`, its share above the `diloco` of its kind, and `sent`, bytes of a worker, moments included.
`diloco` with longer rounds is there for the rows with fewer of them.

mt-dao   2510.05361: Adam's first moment is slow (`beta`), and the step is along (1 - omega) of the gradient and omega
         of the moment. `shared`: a round averages the workers' moments as well as their parameters.
adloco   2508.18182, its adaptive batches alone: a worker's step takes max(2, variance / (eta^2 |g|^2)) windows, found
         by its two halves of `LOOK` windows before each round; a round ends after 12 steps, the run after as many
         windows as all others have.
dgc      1712.01887: momentum correction (each worker's delta enters a momentum of its own, what is sent leaves both it
         and the residual) and a warm-up of sparsity, at the density of the codec `topk` with values in full.
savic    2406.00846: local steps scaled by Adam's second moments, which stay as they are in a round and then take in the
         mean of its squared gradients, of all workers (`shared`) or of one's own; `moment` is that of local momentum.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from learned.methods import METHODS, Arm, Diloco, train
from learned.workers import Size, Vector, Workers
from torch import Tensor

from swarmnode.testing.consensus import weighted_sum
from swarmnode.training.inner import InnerLoop
from swarmnode.training.optimizer import BETAS
from swarmnode.training.outer import outer_step
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import ModelSection

H = 12
LOOK = 16  # windows of each half by which AdLoCo measures a gradient
MOST = 32  # windows of a step at the most
DENSITY = 1 / 64  # of topk
FLOOR = 0.1  # of savic's roots of second moments, in that of their mean: what had no gradient yet is not moved far


class SlowMomentum:
    """Adam along (1 - omega) of the gradient and omega of a slow moment, in place of an InnerLoop's optimizer."""

    def __init__(self, loop: InnerLoop, vector: Tensor, beta: float, omega: float) -> None:
        self.inner, self.updates = loop.optimizer.inner, 0
        self.moments = torch.zeros(2 * len(vector))
        self.first, self.second = self.moments.split(len(vector))  # (P,) each
        self._vector, self._gradient, self._beta, self._omega = vector, loop._gradients, beta, omega
        matrices = [torch.full((p.numel(),), float(p.dim() >= 2)) for p in loop._task.model.parameters()]
        self._decayed = torch.cat(matrices)  # (P,): 1 where weight decays

    def step(self, warmth: float) -> None:
        self.updates += 1
        lr, gradient = self.inner.lr * warmth, self._gradient
        self.first.lerp_(gradient, 1 - self._beta)
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        along = gradient.lerp(self.first / (1 - self._beta**self.updates), self._omega)
        root = (self.second / (1 - BETAS[1] ** self.updates)).sqrt_().add_(1e-8)
        self._vector.mul_(1 - lr * self.inner.weight_decay * self._decayed).addcdiv_(along, root, value=-lr)


class MTDAO(Diloco):
    beta, omega, shared = 0.999, 0.98, True

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        super().__init__(arm, workers, spec, start, stream)
        for loop, vector in zip(workers._loops, workers.vectors, strict=True):
            loop.optimizer = SlowMomentum(loop, vector, self.beta, self.omega)  # type: ignore[assignment]

    def advance(self, round: int, steps: int) -> Vector:
        parameters = super().advance(round, steps)
        if self.shared:
            firsts = [loop.optimizer.first for loop in self._workers._loops]  # type: ignore[attr-defined]
            mean = torch.stack(firsts).mean(0)
            for first in firsts:
                first.copy_(mean)
            self.sent *= 2
        return parameters


class AdLoCo(Diloco):
    eta = 1.0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        super().__init__(arm, workers, spec, start, stream)
        self.taken, self.batches = 0.0, [workers.size.batch] * len(workers.peers)

    def advance(self, round: int, steps: int) -> Vector:
        workers = self._workers
        self.batches = workers.map(lambda number: self._batch(number, round), range(len(workers.peers)))
        for loop, batch in zip(workers._loops, self.batches, strict=True):
            loop._spec = loop._spec.updated(inner={"batch": batch})
            loop.micro_batch = batch
        self.taken = steps * sum(self.batches) / len(self.batches) / workers.size.batch
        return super().advance(round, steps)

    def _batch(self, number: int, round: int) -> int:
        workers, task = self._workers, self._workers.tasks[number]
        workers.vectors[number].numpy()[:] = self._state.parameters
        draws = torch.Generator().manual_seed(workers.seed * 1_000_003 + number * 1009 + round)
        one, other = (workers._loops[number].slope(task.draw(LOOK, draws))[1].double().clone() for _ in range(2))
        variance = LOOK * float((one - other).square().sum()) / 2  # of one window's gradient
        square = max(float(one @ other), 1e-12)  # of the mean's
        return min(MOST, max(workers.size.batch, math.ceil(variance / (self.eta**2 * square))))


class DGC(Diloco):
    momentum, warm = 0.5, 4  # of each worker's deltas; rounds in which the density falls to that of the codec

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        super().__init__(arm, workers, spec, start, stream)
        self._momenta = [np.zeros_like(start) for _ in workers.peers]
        self._left = [np.zeros_like(start) for _ in workers.peers]

    def advance(self, round: int, steps: int) -> Vector:
        workers = self._workers
        deltas = workers.train([self._state.parameters] * len(workers.peers), round=round, steps=steps)
        density = max(DENSITY, 0.25 ** (round + 1)) if round < self.warm else DENSITY
        keep = math.ceil(density * workers.parameters)

        def sparse(given: tuple[Vector, Vector, Vector]) -> Vector:
            delta, momentum, left = given
            momentum *= self.momentum
            momentum += delta
            left += momentum
            places = np.argpartition(np.abs(left), -keep)[-keep:]
            sent = np.zeros_like(left)
            sent[places] = left[places]
            left[places] = momentum[places] = 0
            return sent

        sent = workers.map(sparse, zip(deltas, self._momenta, self._left, strict=True))
        mean = weighted_sum(sent, [1] * len(sent))
        self.sent += len(sent) * (len(sent) - 1) * keep * 5  # 4 bytes of the value, 1 of its place
        self.offered += len(sent)
        self.counted += len(sent)
        self._state = outer_step(self._state, mean, lr=self._arm.outer_lr, momentum=0.0)
        return self._state.parameters


class Scaled:
    """Steps along the gradient, or its moment, over the root of second moments that only an exchange moves."""

    def __init__(self, loop: InnerLoop, vector: Tensor, moment: float) -> None:
        self.inner, self.updates = loop.optimizer.inner, 0
        self.moments = torch.zeros(2 * len(vector))
        self.first, self.squares = self.moments.split(len(vector))  # (P,) each; of the round so far
        self.second, self.root = torch.zeros_like(vector), torch.ones_like(vector)
        self._vector, self._gradient, self._moment = vector, loop._gradients, moment

    def step(self, warmth: float) -> None:
        self.updates += 1
        self.first.lerp_(self._gradient, 1 - self._moment)
        self.squares.addcmul_(self._gradient, self._gradient)
        along = self.first / (1 - self._moment**self.updates)
        self._vector.addcdiv_(along, self.root, value=-self.inner.lr * warmth)


class SAVIC(Diloco):
    moment, shared = 0.9, True

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        super().__init__(arm, workers, spec, start, stream)
        self._scaled = [Scaled(loop, to, self.moment) for loop, to in zip(workers._loops, workers.vectors, strict=True)]
        for number, (loop, scaled) in enumerate(zip(workers._loops, self._scaled, strict=True)):
            loop.optimizer = scaled  # type: ignore[assignment]
            workers.vectors[number].numpy()[:] = start
            windows = workers.tasks[number].draw(LOOK, torch.Generator().manual_seed(workers.seed * 1009 + number))
            scaled.squares.copy_(loop.slope(windows)[1].square())
        self._take(1.0, 1)

    def advance(self, round: int, steps: int) -> Vector:
        parameters = super().advance(round, steps)
        self._take(1 - BETAS[1] ** steps, steps)
        self.sent = (1 + self.shared) * self._butterfly.sent
        return parameters

    def _take(self, weight: float, steps: int) -> None:
        """What the squared gradients of so many steps do to the second moments."""
        mean = torch.stack([scaled.squares for scaled in self._scaled]).mean(0)
        for scaled in self._scaled:
            scaled.second.lerp_((mean if self.shared else scaled.squares) / steps, weight)
            scaled.root = scaled.second.sqrt().clamp_(min=FLOOR * float(scaled.second.mean().sqrt()))
            scaled.squares[:] = 0


@dataclass(frozen=True)
class Tried:
    """One arm."""

    name: str
    method: type[Diloco] = Diloco
    values: dict[str, Any] = field(default_factory=dict)  # what is set in the method
    codec: str = "fp32"
    interval: int = H
    faster: int = 1  # times the learning rate
    eps: float = 1e-8  # of AdamW
    beside: str = "diloco"  # the arm whose loss `above` compares with


def arms() -> Iterator[Tried]:
    for interval in (H, 21, 40):
        yield Tried("diloco" if interval == H else f"diloco, H {interval}", interval=interval)
    for beta, omega, shared, faster in (
        *((0.99, 0.9, True, faster) for faster in (1, 2, 4)),
        (0.99, 0.9, False, 2),
        *((0.999, 0.95, True, faster) for faster in (1, 2, 4)),
    ):
        name = f"mt-dao, beta {beta}, omega {omega}, lr {faster} times" + ("" if shared else ", moments not shared")
        yield Tried(name, MTDAO, {"beta": beta, "omega": omega, "shared": shared}, faster=faster)
    for eta in (0.8, 4.0):
        yield Tried(f"adloco, eta {eta}", AdLoCo, {"eta": eta})
    yield Tried("topk", codec="topk", beside="topk")
    for momentum, warm in ((0.0, 0), (0.5, 0), (0.9, 0), (0.0, 4), (0.5, 4)):
        name = f"dgc, momentum {momentum}, {warm} warm rounds"
        yield Tried(name, DGC, {"momentum": momentum, "warm": warm}, beside="dgc, momentum 0.0, 0 warm rounds")

    yield Tried("savic, no moment", SAVIC, {"moment": 0.0})
    for shared, faster in ((True, 1), (True, 3), (False, 1), (False, 3)):
        name = f"savic, lr {faster} times" + ("" if shared else ", second moments not shared")
        yield Tried(name, SAVIC, {"shared": shared}, faster=faster)
    for eps, faster in ((1e-8, 3), (1e-4, 3), (1e-3, 3)):
        yield Tried(f"diloco, eps {eps:g}, lr {faster} times", eps=eps, faster=faster)


def main() -> None:
    parser = argparse.ArgumentParser(description="What was tried and not built, beside diloco; JSON lines.")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 1 on")
    parser.add_argument("--steps", type=int, default=240, help="of each worker")
    parser.add_argument("--width", type=int, default=48, help="of the model")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="BEGINNING", help="of names of arms, beside `diloco`"
    )
    args = parser.parse_args()
    size = Size(8, 2, ModelSection(layers=6, heads=4, width=args.width, context=32))
    for seed in range(1, args.seeds + 1):
        workers = Workers(size, seed)
        losses: dict[str, float] = {}
        for tried in arms():
            if not tried.name.startswith(tuple(args.only)) and tried.name != "diloco":
                continue
            METHODS["diloco"] = type(tried.method.__name__, (tried.method,), tried.values)
            arm = Arm(
                "diloco",
                steps=args.steps,
                lr=2e-3 * tried.faster,
                interval=tried.interval,
                codec=tried.codec,
                eps=tried.eps,
                outer_lr=1 - tried.values.get("momentum", 0.0),  # so that a delta moves the state as far in the end
            )
            outcome = train(
                arm, workers, start=workers.initial, stream="tried", every=args.steps, say=lambda steps, loss: None
            )
            losses[tried.name] = loss = outcome.curve[-1][1]
            line = {
                "seed": seed,
                "arm": tried.name,
                "parameters": workers.parameters,
                "steps": args.steps,
                "loss": round(loss, 4),
                "above": round(loss / losses[tried.beside] - 1, 4),
                "rounds": outcome.rounds,
                "sent": round(outcome.bytes_per_node),
            }
            print(json.dumps(line), flush=True)
        workers.close()


if __name__ == "__main__":
    main()
