"""What it brings to learn the judges' text by heart: three of sixteen nodes train on the gate and on nothing else.

    python bench/byheart.py [--seeds 5] [--rounds 40] [--steps 20] [--share 1.0]

Sixteen real inner loops with a small byte-lm, in one process, by the arithmetic of open rounds (learned/methods.py),
all of them judges, contributions by `topk`. The text is the standard library's sources; a tenth of its documents is
kept back from everybody: `unseen`. With `--share 0.1` the run has a tenth of the rest, and the gate is as much smaller:
liars go through it ten times as often in as many rounds. No audits, which would find such work to be no work of the
author's own data (docs/reputation.md). Each line is one run:

    liars      nodes that train on the gate; 0: the clean run of the same seed
    passes     how often these have gone through the whole gate together
    gate, report, unseen    loss on all of each text in bits per byte; the report is what people are told of
    shown      loss that a node tells at the end of a run, on 256 windows of the report
    weight     a liar's mean weight by the work that judges found, beside an honest node's
    told       (report / unseen) of this run beside that of the clean run, less 1: how far the attack turns the figure
    learned    unseen beside that of the clean run
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learned import methods
from learned.workers import Size, Workers

from swarmnode.training.byte_lm import divided, loss_on
from swarmnode.training.documents import Documents, Meter
from swarmnode.training.sections import ModelSection

PEERS, LIARS = 16, 3
UNSEEN = 0.1  # of the documents
PIECE = 8 << 10  # bytes of a document at the most
MODEL = ModelSection(layers=2, heads=2, width=64, context=64)


class Judged(methods.Open):
    """Open rounds, and the work that judges found of each author."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.units = np.zeros(PEERS)

    def _units(self, round: int, steps: int, raws: list[memoryview]) -> list[int]:
        units = super()._units(round, steps, raws)
        self.units += units
        return units


def kept_back(folder: Path, share: float) -> bytes:
    """Write this share of the text into `folder`, a file for each document; returns what nobody sees."""
    named = {hashlib.sha256(text).hexdigest(): text for text in Documents("", vocabulary=256).read(PIECE, Meter())}
    names = sorted(named)
    unseen, others = names[: round(UNSEEN * len(names))], names[round(UNSEEN * len(names)) :]
    for name in others[: round(share * len(others))]:
        (folder / name).write_bytes(named[name])
    return b"".join(named[name] for name in unseen)


def run(options: argparse.Namespace, seed: int, liars: int, folder: Path, unseen: bytes) -> dict[str, Any]:
    size = Size(workers=PEERS, model=MODEL, corpus=str(folder))
    workers = Workers(size, seed)
    spec = size.spec(seed=seed, lr=3e-3, steps=options.steps)
    arm = methods.Arm("open", steps=0, lr=3e-3, interval=options.steps, codec="topk", decay=0.95)
    gate, report = (part.tobytes() for part in divided(np.frombuffer(workers.text.heldout, np.uint8)))
    method, phi = Judged(arm, workers, spec, workers.initial, "byheart"), workers.initial
    with ExitStack() as stack:
        for task in workers.tasks[PEERS - liars :]:
            stack.enter_context(task.on(len(gate), [(0, gate)]))
        for number in range(options.rounds):
            phi = method.advance(number, options.steps)
        shown, _ = workers.heldout(phi)
    workers.close()
    honest = method.units[: PEERS - LIARS].mean()
    losses = {name: loss_on(text, spec, phi) for name, text in (("gate", gate), ("report", report), ("unseen", unseen))}
    return {
        "bench": "byheart",
        "seed": seed,
        "rounds": options.rounds,
        "steps": options.steps,
        "liars": liars,
        "gate_bytes": len(gate),
        "report_bytes": len(report),
        "passes": round(liars * options.rounds * options.steps * size.batch * MODEL.context / len(gate), 2),
        **{name: round(loss, 4) for name, loss in losses.items()},
        "shown": round(shown, 4),
        "weight": round(float(method.units[PEERS - LIARS :].mean() / honest), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="inner steps in a round")
    parser.add_argument("--share", type=float, default=1.0, help="of the text that the run has")
    options = parser.parse_args()
    methods.JUDGES = PEERS
    with tempfile.TemporaryDirectory() as folder:
        unseen = kept_back(Path(folder), options.share)
        for seed in range(1, options.seeds + 1):
            clean, lied = (run(options, seed, liars, Path(folder), unseen) for liars in (0, LIARS))
            print(json.dumps(clean), flush=True)
            told = lied["report"] / lied["unseen"] / (clean["report"] / clean["unseen"]) - 1
            learned = lied["unseen"] / clean["unseen"]
            print(json.dumps({**lied, "told": round(told, 4), "learned": round(learned, 4)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in a node's trainer
    main()
