"""How surely a contribution tells whether its author worked on its own data: the test of `open_unique`, in one process.

    python bench/unique.py [--model large] [--steps 80] [--rounds 48] [--seed 1]

Eight workers train a byte-lm from scratch in rounds of `steps` steps on their own quarters of the standard library's
sources, offer what `topk` leaves of it with error feedback, and go on from the mean. After each round every
contribution is held against its author's data, and against another worker's in place of them, which is what an auditor
sees of who copied, or shares one piece of work among names. A JSON line for each number of samples and part of the run:

    passed       share of tests that contributions pass on their authors' data
    by_chance    the same on another's data
    gain, excess mean gain on the control, and what own data gain beyond it, bits per byte
    passes       forward passes of one sample that a test takes
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import numpy as np
import torch
from learned.workers import Size, Vector, Workers

from swarmnode.protocols.methods.open.checks.unique import NEVER, PARTS, drawn_steps
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.open_step import CLIP_UNIT, Factor, apply_contributions, clip_units, norm_of, opened
from swarmnode.training.outer import OuterState
from swarmnode.training.sections import ModelSection

SMALL = ModelSection(layers=2, heads=2, width=64, context=64)
SAMPLES = (8, 16, 32)
PART = 12  # rounds told together
CODEC, DECAY = "topk", 0.95


class Rounds:
    """Honest workers in rounds of the open exchange, all of whose contributions are accepted."""

    def __init__(self, size: Size, *, steps: int, seed: int) -> None:
        self.workers, self.steps = Workers(size, seed), steps
        self.workers.begin(size.spec(seed=seed, lr=1e-3, steps=steps), stream="unique")
        self.state = OuterState.start(self.workers.initial)
        self._left = [ErrorFeedback(codec(CODEC), self.workers.parameters, decay=DECAY) for _ in self.workers.peers]

    def contributions(self, round: int) -> list[bytes]:
        """What each worker offers."""
        deltas = self.workers.train([self.state.parameters] * len(self.workers.peers), round=round, steps=self.steps)
        raws = [bytes(left.encode(delta)) for left, delta in zip(self._left, deltas, strict=True)]
        for left in self._left:
            left.commit()
        return raws

    def apply(self, raws: list[bytes]) -> None:
        clips = clip_units([norm_of(opened(raw, self.workers.parameters, codec_name=CODEC)) for raw in raws])
        factors = [Factor(1, clip, len(raws)) for clip in clips]
        self.state = apply_contributions(self.state, raws, factors, lr=1.0, momentum=0.0, codec_name=CODEC)

    def gain(self, raw: bytes, author: int, round: int, steps: tuple[int, ...]) -> float:
        """Of a contribution on what these steps of an author draw, bits per byte."""
        after = apply_contributions(self.state, [raw], [Factor(1, CLIP_UNIT, PARTS)], lr=1.0, codec_name=CODEC)
        return self._loss(self.state.parameters, author, round, steps) - self._loss(
            after.parameters, author, round, steps
        )

    def _loss(self, parameters: Vector, author: int, round: int, steps: tuple[int, ...]) -> float:
        return self.workers.drawn_by(author, parameters, stream="unique", round=round, steps=steps)


@dataclass
class Tests:
    """What came of tests with so many samples in a part of the run."""

    controls: list[float] = field(default_factory=list)  # gains on them
    own: list[float] = field(default_factory=list)  # what own data gain beyond
    others: list[float] = field(default_factory=list)  # what another's data do

    def add(self, rounds: Rounds, count: int, raws: list[bytes], round: int) -> None:
        """Hold every contribution against its author's data and against the next worker's, by `count` steps."""
        for author, raw in enumerate(raws):
            for whose, found in ((author, self.own), ((author + 1) % len(raws), self.others)):
                drawn = drawn_steps(round.to_bytes(4, "big"), "auditor", str(whose), rounds.steps, count)
                control = rounds.gain(raw, whose, round, tuple(NEVER + step for step in drawn))
                found.append(rounds.gain(raw, whose, round, drawn) - control)
                if whose == author:
                    self.controls.append(control)

    def summary(self) -> dict[str, float]:
        return {
            "tests": len(self.own),
            "passed": round(float(np.mean(np.array(self.own) > 0)), 3),
            "by_chance": round(float(np.mean(np.array(self.others) > 0)), 3),
            "gain": round(float(np.mean(self.controls)), 5),
            "excess": round(float(np.mean(self.own)), 5),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("small", "large"), default="small", help="0.14 or 0.85 M parameters")
    parser.add_argument("--steps", type=int, default=80, help="inner steps in a round")
    parser.add_argument("--rounds", type=int, default=48, help="in all; told in parts of twelve")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    size = Size(model=SMALL) if options.model == "small" else Size()
    rounds = Rounds(size, steps=options.steps, seed=options.seed)
    for first in range(0, options.rounds, PART):
        last = min(first + PART, options.rounds)
        found = {samples: Tests() for samples in SAMPLES}
        for number in range(first, last):
            raws = rounds.contributions(number)
            for samples, tests in found.items():
                tests.add(rounds, -(-samples // size.batch), raws, number)
            rounds.apply(raws)
        for samples, tests in found.items():
            part = {"first": first, "last": last - 1, "samples": samples, "passes": 4 * samples}
            line = {"bench": "unique", **vars(options), "parameters": rounds.workers.parameters, **part}
            print(json.dumps({**line, **tests.summary()}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in a node's trainer
    main()
