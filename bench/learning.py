"""What a swarm learns against what one synchronous run learns, in held-out bits per byte; tables and plots in docs/.

    python bench/learning.py --seeds 3 --docs docs        # an hour of CPU time; --quick for a look

Eight workers of one process take equal numbers of steps (learned/workers.py):

continued   600 synchronous steps from scratch; from that checkpoint 480 more at a lower rate, synchronously, by diloco
            and by open, for each seed with other slices and windows. The DiLoCo paper begins so too (2311.08105).
scratch     diloco and open from the first step on, at several H: what it costs to never train synchronously.
trials      other settings for what `continued` does, on a seed that it does not use.

`continued` is done with the model of examples/byte-lm.toml, and all three with a small one that learns in a tenth of
the time. Each finished run is a JSON line in OUT/results.jsonl; what is there already is not run again, so a command
that was interrupted goes on. All chance comes from seeds: equal commands give equal losses on one machine. With --docs,
the tables in DOCS/results.md and the plots beside it are written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learned.methods import Arm, train
from learned.report import described, write_report
from learned.workers import Size, Vector, Workers

from swarmnode.training.runspec import ModelSection

TRIAL_SEED = 0  # reported seeds begin at 1
FIRST_SEED = 1  # of the common checkpoint, and of what begins from scratch
SYNCHRONOUS = Arm("synchronous", steps=480, lr=1e-3)
DILOCO = Arm("diloco", steps=480, lr=1e-3, interval=15, codec="int4", outer_lr=0.4, momentum=0.9)
INT8 = replace(DILOCO, interval=30, codec="int8", outer_lr=0.7, momentum=0.6)
OPEN = Arm("open", steps=480, lr=1e-3, interval=5, codec="sign3", outer_lr=0.7, momentum=0.8, decay=0.95)
SPARSE = replace(OPEN, codec="topk", outer_lr=2.0, momentum=0.0)


@dataclass(frozen=True)
class Plan:
    """What is run. A plan with other steps or models is another experiment, with results of its own."""

    large: Size = field(default_factory=Size)
    small: Size = field(default_factory=lambda: Size(model=ModelSection(layers=2, heads=2, width=64, context=64)))
    seeds: int = 3
    checkpoint: Arm = field(default_factory=lambda: Arm("synchronous", steps=600, lr=3e-3))
    continued: tuple[Arm, ...] = (SYNCHRONOUS, DILOCO, OPEN)
    every: int = 60  # steps between two evaluations after a checkpoint
    scratch: tuple[Arm, ...] = tuple(
        replace(arm, interval=interval, steps=600, lr=3e-3) for arm in (INT8, SPARSE, OPEN) for interval in (5, 20, 50)
    )
    scratch_every: int = 100  # steps between two evaluations from scratch
    trials: tuple[Arm, ...] = (
        SYNCHRONOUS,
        replace(SYNCHRONOUS, lr=2e-3),
        INT8,
        replace(INT8, outer_lr=1.0, momentum=0.8),
        replace(INT8, lr=2e-3),
        replace(DILOCO, outer_lr=0.5, momentum=0.8),
        replace(DILOCO, outer_lr=0.7, momentum=0.8),
        DILOCO,
        replace(SPARSE, interval=4, outer_lr=1.0),
        replace(SPARSE, outer_lr=1.0),
        SPARSE,
        replace(SPARSE, decay=1.0),
        replace(SPARSE, outer_lr=3.0),
        replace(SPARSE, outer_lr=0.7, momentum=0.8),
        replace(OPEN, codec="sign", interval=15, outer_lr=0.4, momentum=0.9),
        replace(OPEN, outer_lr=0.5),
        OPEN,
        replace(OPEN, decay=1.0),
        replace(OPEN, decay=0.8),
        replace(OPEN, outer_lr=1.0, momentum=0.7),
        replace(OPEN, outer_lr=0.4, momentum=0.9),
        replace(DILOCO, interval=5, codec="fp32", outer_lr=1.0, momentum=0.0),
        replace(DILOCO, interval=5, codec="fp32", outer_lr=2.0, momentum=0.0),
    )

    def quick(self) -> Plan:
        """The same with one seed and a twentieth of all steps."""

        def shrunk(arm: Arm) -> Arm:
            return replace(arm, steps=arm.steps // 20, interval=max(1, arm.interval // 20))

        return replace(
            self,
            seeds=1,
            checkpoint=shrunk(self.checkpoint),
            continued=tuple(map(shrunk, self.continued)),
            every=self.every // 20,
            scratch=tuple(map(shrunk, self.scratch)),
            scratch_every=self.scratch_every // 20,
            trials=tuple(map(shrunk, self.trials)),
        )

    def cells(self) -> Iterator[Cell]:
        """All runs, a checkpoint before those that start from it."""
        for size in (self.large, self.small):
            checkpoint = Cell("checkpoint", FIRST_SEED, self.checkpoint, self.scratch_every, size)
            yield checkpoint
            for seed in range(FIRST_SEED, FIRST_SEED + self.seeds):
                for arm in self.continued:
                    yield Cell("continued", seed, arm, self.every, size, checkpoint)
        for arm in self.scratch:
            yield Cell("scratch", FIRST_SEED, arm, self.scratch_every, self.small)
        checkpoint = Cell("checkpoint", TRIAL_SEED, self.checkpoint, self.scratch_every, self.small)
        yield checkpoint
        for arm in self.trials:
            yield Cell("trials", TRIAL_SEED, arm, self.every, self.small, checkpoint)


@dataclass(frozen=True)
class Cell:
    """One run of the experiment: a line of the results."""

    table: str  # checkpoint, continued, scratch, trials
    seed: int
    arm: Arm
    every: int  # steps between two evaluations
    size: Size
    checkpoint: Cell | None = None  # the run from whose parameters this one starts

    @property
    def key(self) -> dict[str, Any]:
        """What makes this run another one than all others of its plan."""
        return {"table": self.table, "seed": self.seed, "arm": asdict(self.arm), "size": asdict(self.size)}


class Results:
    """Finished runs in a folder, one JSON line each, and the parameters of checkpoints."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / "results.jsonl"
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The line of a finished run, if there is one."""
        return next((line for line in self.lines if all(line[name] == value for name, value in cell.key.items())), None)

    def add(self, cell: Cell, found: dict[str, Any], parameters: Vector) -> None:
        if cell.table == "checkpoint":
            np.save(self._checkpoint(cell), parameters)
        line = {**cell.key, **found}
        self.lines.append(line)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def parameters(self, cell: Cell) -> Vector:
        """What a finished checkpoint left, (P,)."""
        return np.asarray(np.load(self._checkpoint(cell)), np.float32)

    def _checkpoint(self, cell: Cell) -> Path:
        digest = hashlib.sha256(json.dumps(cell.key, sort_keys=True).encode()).hexdigest()
        return self._folder / f"checkpoint-{digest[:16]}.npy"


def run(cell: Cell, workers: Workers, results: Results) -> None:
    """Do what a cell says, from its finished checkpoint or from scratch, and keep the result."""
    start = workers.initial if cell.checkpoint is None else results.parameters(cell.checkpoint)
    began, cpu = time.monotonic(), time.process_time()
    name = f"{cell.table}, seed {cell.seed}, {workers.parameters} parameters: {described(asdict(cell.arm))}"

    def say(step: int, loss: float) -> None:
        print(f"{name}: step {step}, {loss:.4f} bits per byte, {time.monotonic() - began:.0f} s", file=sys.stderr)

    stream = "scratch" if cell.checkpoint is None else "continued"
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


def main(arguments: list[str] | None = None, plan: Plan | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of `continued`")
    parser.add_argument("--out", type=Path, default=Path("build/learning"), help="folder of finished runs")
    parser.add_argument("--docs", type=Path, help="folder with results.md, whose tables and plots are written anew")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write up what is finished")
    parser.add_argument("--small", action="store_true", help="run only what is done with the small model")
    parser.add_argument("--quick", action="store_true", help="one seed and a twentieth of all steps, for a look")
    options = parser.parse_args(arguments)
    plan = replace(plan or Plan(), seeds=options.seeds)
    if options.quick:
        plan = plan.quick()
    results = Results(options.out / "quick" if options.quick else options.out)
    workers: Workers | None = None
    for cell in plan.cells():
        if options.report_only or results.find(cell) is not None or (options.small and cell.size != plan.small):
            continue
        if workers is None or (workers.seed, workers.size) != (cell.seed, cell.size):
            workers = Workers(cell.size, cell.seed)
        run(cell, workers, results)
    if options.docs is not None:
        done = [(cell.size == plan.small, line) for cell in plan.cells() if (line := results.find(cell)) is not None]
        large, small = ([line for is_small, line in done if is_small == wanted] for wanted in (False, True))
        write_report(options.docs, large, small)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in a node's trainer; it holds for the whole process
    main()
