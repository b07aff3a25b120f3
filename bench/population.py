"""A population that tries learning rates, beside the same workers that all train by one.

    python bench/population.py                      # a table: three seeds, an hour on two busy cores
    python bench/population.py --seeds 1 --rounds 20

Eight workers in one process exchange by `diloco`; what is tried and taken over is what a daemon decides
(`protocols/methods/known/population.py`), its words heard at once. Prints held-out bits per byte at the end, and the
worst seed of each line.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence

from learned.methods import Arm, Diloco, spec_of
from learned.workers import Size, Vector, Workers

from swarmnode.protocols.methods.known.population import Trial, next_factor
from swarmnode.training.sections import ModelSection

SIZE = Size(workers=8, batch=4, model=ModelSection(layers=2, heads=2, width=64, context=64))
STEPS = 10  # H
PERIOD = 3  # rounds
RATES = (2.5e-4, 1e-3, 4e-3)  # a sixteenth and a fourth of the best fixed one, and that


class Trying(Workers):
    """Workers that measure the held-out loss after their own steps, as members of a population do."""

    losses: Sequence[float] = ()

    def train(self, starts: Sequence[Vector], *, round: int, steps: int) -> list[Vector]:
        deltas = super().train(starts, round=round, steps=steps)
        self.losses = self.map(lambda task: task.evaluate(thorough=False), self.tasks)
        return deltas


def learn(workers: Workers, *, lr: float, rounds: int) -> tuple[float, float]:
    """Held-out bits per byte after so many rounds, and the geometric mean of the rates at the end."""
    arm = Arm("diloco", steps=rounds * STEPS, lr=lr, interval=STEPS, codec="int8")
    method = Diloco(arm, workers, spec_of(arm, SIZE, workers.seed), workers.initial, "population")
    factors, losses = [1.0] * SIZE.workers, [0.0] * SIZE.workers
    parameters = workers.initial
    for round in range(rounds):
        if isinstance(workers, Trying) and round % PERIOD == 1:
            period = round // PERIOD - 1
            pairs = zip(workers.peers, factors, losses, strict=True)
            trials = {peer: Trial(period, factor, loss) for peer, factor, loss in pairs} if period >= 0 else {}
            dice = [random.Random(f"{workers.seed} {peer} {period}") for peer in workers.peers]
            own = zip(workers.peers, factors, dice, strict=True)
            factors = [next_factor(peer, factor, trials, rng) for peer, factor, rng in own]
            losses = [0.0] * SIZE.workers
            for loop, factor in zip(workers._loops, factors, strict=True):
                loop.steer({"lr": lr * factor})
        parameters = method.advance(round, STEPS)
        if isinstance(workers, Trying) and round % PERIOD:
            losses = [total + new for total, new in zip(losses, workers.losses, strict=True)]
    return workers.heldout(parameters)[0], lr * math.exp(sum(map(math.log, factors)) / len(factors))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    given = parser.parse_args()
    print(f"| inner.lr at the start | population | {'seeds, bits per byte':20} | worst | rates at the end |")
    print("|---|---|---|---|---|")
    for lr in given.rates:
        for kind, said in ((Workers, "no"), (Trying, f"{PERIOD} rounds")):
            ends = []
            for seed in range(1, given.seeds + 1):
                workers = kind(SIZE, seed)
                ends.append(learn(workers, lr=lr, rounds=given.rounds))
                workers.close()
            each = ", ".join(f"{loss:.3f}" for loss, _ in ends)
            rates = "" if kind is Workers else f"{min(r for _, r in ends):.2g} to {max(r for _, r in ends):.2g}"
            print(f"| {lr:g} | {said} | {each} | {max(loss for loss, _ in ends):.3f} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
