"""What a swarm learns against what one synchronous run learns, in held-out bits per byte; tables and plots in docs/.

    python bench/learning.py --seeds 3 --docs docs        # an hour and a half of CPU time; --quick for a look

Eight workers of one process take equal numbers of steps (learned/workers.py), in three tables:

continued   600 synchronous steps from scratch; from that checkpoint 480 more at a lower rate, synchronously, by diloco
            and by open, for each seed with other slices and windows. The DiLoCo paper begins so too (2311.08105).
scratch     diloco and open from the first step on, at several H: what it costs to never train synchronously.
trials      the settings that were tried for the first table, on a seed and at a length that it does not use.

Each finished run is a JSON line in OUT/results.jsonl; what is there already is not run again, so a command that was
interrupted goes on. All chance comes from seeds: equal commands give equal losses on one machine. With --docs, the
tables in DOCS/results.md and the plots beside it are written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learned.methods import Arm, train
from learned.report import write_report
from learned.workers import Size, Vector, Workers

TRIAL_SEED = 0  # reported seeds begin at 1
CHECKPOINT_SEED = 1  # of the common checkpoint, and of what begins from scratch
CHECKPOINT = Arm("synchronous", steps=600, lr=3e-3)
SYNCHRONOUS = Arm("synchronous", steps=480, lr=1e-3)
DILOCO = Arm("diloco", steps=480, lr=1e-3, interval=30, codec="int8", outer_lr=0.7, momentum=0.6)
OPEN = Arm("open", steps=480, lr=1e-3, interval=5, codec="topk", outer_lr=1.0, decay=0.95)
SCRATCH_INTERVALS = (5, 20, 50)
TRIAL_STEPS = 240
EVERY = 60  # steps between two evaluations after a checkpoint
SCRATCH_EVERY = 100  # and from scratch
TRIALS = (
    SYNCHRONOUS,
    OPEN,
    DILOCO,
    replace(OPEN, interval=20),
    replace(OPEN, decay=1.0),
    replace(OPEN, interval=10),
)


@dataclass(frozen=True)
class Cell:
    """One run of the experiment: a line of the results."""

    table: str  # checkpoint, continued, scratch, trials
    seed: int
    arm: Arm
    every: int  # steps between two evaluations

    def key(self, size: Size) -> dict[str, Any]:
        """What makes this run another one than all others."""
        return {"table": self.table, "seed": self.seed, "arm": asdict(self.arm), "size": asdict(size)}


def cells(seeds: int, shrink: int) -> Iterator[Cell]:
    """All runs, those of the table before those of the curves; `shrink` divides their lengths."""

    def cell(table: str, seed: int, arm: Arm, every: int) -> Cell:
        interval = max(1, arm.interval // shrink)
        every = max(interval, min(every, arm.steps) // shrink // interval * interval)
        return Cell(table, seed, replace(arm, steps=arm.steps // shrink, interval=interval), every)

    yield cell("checkpoint", CHECKPOINT_SEED, CHECKPOINT, SCRATCH_EVERY)
    for seed in range(1, seeds + 1):
        for arm in (SYNCHRONOUS, DILOCO, OPEN):
            yield cell("continued", seed, arm, EVERY)
    for interval in SCRATCH_INTERVALS:
        for arm in (DILOCO, OPEN):
            scratch = replace(arm, interval=interval, steps=CHECKPOINT.steps, lr=CHECKPOINT.lr)
            yield cell("scratch", CHECKPOINT_SEED, scratch, SCRATCH_EVERY)
    yield cell("checkpoint", TRIAL_SEED, CHECKPOINT, SCRATCH_EVERY)
    for arm in TRIALS:
        yield cell("trials", TRIAL_SEED, replace(arm, steps=TRIAL_STEPS), EVERY)


class Results:
    """Finished runs in a folder, one JSON line each, and the parameters of checkpoints."""

    def __init__(self, folder: Path, size: Size) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._size = folder, size
        self._file = folder / "results.jsonl"
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The line of a finished run, if there is one."""
        key = cell.key(self._size)
        return next((line for line in self.lines if all(line[name] == value for name, value in key.items())), None)

    def add(self, cell: Cell, found: dict[str, Any], parameters: Vector) -> None:
        if cell.table == "checkpoint":
            np.save(self._checkpoint(cell), parameters)
        line = {**cell.key(self._size), **found}
        self.lines.append(line)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def parameters(self, cell: Cell) -> Vector:
        """What a finished checkpoint left, (P,)."""
        return np.asarray(np.load(self._checkpoint(cell)), np.float32)

    def _checkpoint(self, cell: Cell) -> Path:
        digest = hashlib.sha256(json.dumps(cell.key(self._size), sort_keys=True).encode()).hexdigest()
        return self._folder / f"checkpoint-{digest[:16]}.npy"


def run(cell: Cell, checkpoint: Cell | None, workers: Workers, results: Results) -> None:
    """Do what a cell says, from a finished checkpoint or from scratch, and keep the result."""
    start = workers.initial if checkpoint is None else results.parameters(checkpoint)
    began, cpu = time.monotonic(), time.process_time()
    name = f"{cell.table} seed {cell.seed}: {cell.arm.method} H = {cell.arm.interval}"

    def say(step: int, loss: float) -> None:
        print(f"{name}: step {step}, {loss:.4f} bits per byte, {time.monotonic() - began:.0f} s", file=sys.stderr)

    stream = "scratch" if checkpoint is None else "continued"
    outcome = train(cell.arm, workers, start=start, stream=stream, every=cell.every, say=say)
    found = {
        "parameters": workers.parameters,
        "curve": [[step, round(loss, 5)] for step, loss in outcome.curve],
        "loss": round(outcome.curve[-1][1], 5),
        "bytes_per_node": round(outcome.bytes_per_node),
        "accepted": round(outcome.accepted, 4),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    results.add(cell, found, outcome.parameters)
    print(json.dumps({"table": cell.table, "seed": cell.seed, **asdict(cell.arm), **found}), flush=True)


def main(arguments: list[str] | None = None, size: Size | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the table `continued`")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the steps and one seed, for a look")
    parser.add_argument("--out", type=Path, default=Path("build/learning"), help="folder of finished runs")
    parser.add_argument("--docs", type=Path, help="folder with results.md, whose tables and plots are written anew")
    parser.add_argument("--only", help="run only the tables named, with commas between; their checkpoints as well")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a worker in a step")
    options = parser.parse_args(arguments)
    size = size or Size(batch=options.batch)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    results = Results(options.out / "quick" if options.quick else options.out, size)
    wanted = list(cells(1 if options.quick else options.seeds, 20 if options.quick else 1))
    checkpoints = {cell.seed: cell for cell in wanted if cell.table == "checkpoint"}
    only = set(options.only.split(",")) if options.only else {"checkpoint", "continued", "scratch", "trials"}
    todo = [cell for cell in wanted if cell.table in only and results.find(cell) is None]
    workers: Workers | None = None
    for number, cell in enumerate(todo):
        print(f"run {number + 1} of {len(todo)}", file=sys.stderr)
        if workers is None or workers.seed != cell.seed:
            workers = Workers(size, cell.seed)
        from_seed = {"continued": CHECKPOINT_SEED, "trials": TRIAL_SEED}.get(cell.table)
        run(cell, None if from_seed is None else checkpoints[from_seed], workers, results)
    if options.docs is not None:
        write_report(options.docs, [line for cell in wanted if (line := results.find(cell)) is not None])


if __name__ == "__main__":
    main()
