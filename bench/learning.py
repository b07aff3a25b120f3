"""What a swarm learns against what one synchronous run learns; tables and plots in docs/.

    python bench/learning.py --seeds 3 --docs docs        # hours of CPU time; --quick for a look
    python bench/learning.py --only daemons               # one part; what is finished is not run again
    python bench/learning.py --only menu --most 1         # one run that is not finished yet

Four workers (eight in `menu`) of one process take equal numbers of steps on as much text (learned/workers.py), and are
measured on held-out text by the loss and by next-word accuracy.

rates     synchronous training at several rates, on a seed that nothing else uses: what the other parts use.
methods   synchronous AdamW and Muon, diloco and open with what the product does where optimizer = "muon".
curves    diloco over steps, for several H and for the one that grows, at two sizes of a worker's batch.
daemons   the runs of `methods` by four real nodes on loopback (learned/daemons.py).
menu      eight workers by each method of low communication, beside synchronous training and one worker alone.
checkpoint  the arms of `menu` for half as many steps at half the rate, all from where its synchronous run of the same
          seed ended. That run is made once more where OUT/starts has not its parameters.

Each finished run is a JSON line in OUT/results.jsonl; what is there already is not run again, so a command that was
interrupted goes on, and two may share the work. All chance comes from seeds, and from the id of the run by which the
text is cut, which changes where run files get other keys: it stands in the line, and a line with another one is not
taken for finished. So for as long as the id stays, equal commands give equal losses on one machine, but for daemons.
With --docs, the tables in DOCS/results.md and the plot beside it are written anew; older ids are marked there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learned.daemons import by_daemons
from learned.methods import Arm, spec_of, train
from learned.report import described, write_report
from learned.workers import Size, Vector, Workers

from swarmnode.testing.runtext import RunText
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.sections import ModelSection
from swarmnode.training.verify.replay import DECAY

PARTS = ("rates", "methods", "curves", "daemons", "menu", "checkpoint")
RATES_SEED = 0  # reported seeds begin at 1
ADAMW = Arm("synchronous", steps=300, lr=2e-3)
MUON = Arm("synchronous", steps=300, lr=1e-3, optimizer="muon", muon_lr=4e-3)
# What the arms of `menu` have in common: AdamW inside, and so many steps in all, of which a round of diloco has 24.
MENU = Arm("synchronous", steps=480, lr=2e-3)
# One of six fragments in turn each 4 steps, so that each has its own each 24 as well.
STREAMING = replace(MENU, method="streaming", interval=4, codec="e3m0", fragments=6, tau=2)
DEMO = replace(MENU, method="demo", optimizer="sgd", codec="topk", lr=4e-3)


def by_default(method: str) -> Arm:
    """What the product does in a run whose file says nothing but optimizer = "muon", and trust = "open" for `open`."""
    trust = "open" if method == "open" else "known"
    given = {"run": {"name": "learning", "trust": trust}, "inner": {"optimizer": "muon"}}
    spec = parse_runspec(given, source="the bench")
    return replace(
        MUON,
        method=method,
        lr=spec.inner.lr,
        muon_lr=spec.inner.muon_lr,
        interval=spec.inner.steps,
        grows=spec.inner.interval == "growing",
        codec=spec.exchange.codec,
        outer_lr=spec.outer.lr,
        momentum=spec.outer.momentum,
        decay=DECAY if method == "open" else 1.0,
    )


def continued(arm: Arm) -> Arm:
    """An arm of `menu` from a checkpoint."""
    steps = arm.steps // 2
    return replace(arm, after=arm.steps, steps=steps, interval=min(arm.interval, steps), lr=arm.lr / 2)


@dataclass(frozen=True)
class Plan:
    """What is run. A plan with other steps or models is another experiment, with results of its own."""

    size: Size = field(
        default_factory=lambda: Size(4, 8, ModelSection(layers=2, heads=4, width=288, context=64), precision="bf16")
    )
    seeds: int = 3
    every: int = 100  # steps between two measurements
    rates: tuple[Arm, ...] = (
        *(replace(ADAMW, lr=lr) for lr in (1e-3, 2e-3, 4e-3)),
        *(replace(MUON, lr=lr, muon_lr=muon_lr) for lr, muon_lr in ((1e-3, 4e-3), (1e-3, 8e-3), (2e-3, 4e-3))),
    )
    methods: tuple[Arm, ...] = (MUON, by_default("diloco"), by_default("open"), ADAMW)
    curves: tuple[Arm, ...] = (
        MUON,
        by_default("diloco"),
        *(replace(by_default("diloco"), interval=interval, grows=False) for interval in (10, 50)),
    )
    batches: tuple[int, ...] = (8, 2)
    menu_size: Size = field(default_factory=lambda: Size(8, 2, ModelSection(layers=6, heads=4, width=168, context=64)))
    menu: tuple[Arm, ...] = (
        MENU,
        replace(MENU, method="alone"),
        replace(MENU, method="diloco", interval=24, codec="int8"),
        STREAMING,
        replace(STREAMING, eager=True),
        replace(MENU, method="async", interval=24, codec="int8", tau=2, speeds="1:2:4"),
        replace(MENU, method="gossip", interval=24, codec="int8"),
        replace(MENU, method="gossip", interval=24, codec="int8", outer_lr=0.7, momentum=0.5),  # NoLoCo's
        replace(MENU, method="merge", interval=MENU.steps, codec="int8"),
        DEMO,
        replace(MENU, method="lowrank", interval=24, codec="int4", rank=50, tau=2),
        replace(MENU, method="seed", interval=60, lr=2e-4, clip=2.0),
    )
    from_scratch: tuple[Arm, ...] = (  # beside those of `menu`, but not from a checkpoint
        replace(MENU, eps=2e-4),
        replace(MENU, method="diloco", interval=24, codec="int8", eps=2e-4),
        replace(MENU, method="diloco", interval=24, codec="int4"),
        replace(MENU, method="async", interval=24, codec="int4", tau=23, speeds="1:2:4"),  # exchanges all the while
    )
    from_checkpoint: tuple[Arm, ...] = (replace(DEMO, lr=2e-3),)  # beside those of `menu`

    def quick(self) -> Plan:
        """The same with one seed and a twentieth of all steps."""

        def shrunk(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
            return tuple(replace(arm, steps=arm.steps // 20, interval=min(arm.interval, 10)) for arm in arms)

        arms = {
            name: shrunk(getattr(self, name))
            for name in ("rates", "methods", "curves", "menu", "from_scratch", "from_checkpoint")
        }
        return replace(self, seeds=1, every=self.every // 20, **arms)

    def cells(self) -> Iterator[Cell]:
        """All runs."""
        for arm in self.rates:
            yield Cell("rates", RATES_SEED, arm, self.size)
        for seed in range(1, self.seeds + 1):
            for arm in self.methods:
                yield Cell("methods", seed, arm, self.size)
        for batch in self.batches:
            for arm in self.curves:
                yield Cell("curves", 1, arm, replace(self.size, batch=batch))
        for seed in range(1, self.seeds + 1):
            for arm in self.methods:
                if arm.method != "synchronous":
                    yield Cell("daemons", seed, arm, self.size)
        for seed in range(1, self.seeds + 1):
            for arm in (*self.menu, *self.from_scratch):
                yield Cell("menu", seed, arm, self.menu_size)
        for seed in range(1, self.seeds + 1):
            for arm in (*self.menu, *self.from_checkpoint):
                yield Cell("checkpoint", seed, continued(arm), self.menu_size)


@dataclass(frozen=True)
class Cell:
    """One run of the experiment: a line of the results."""

    part: str
    seed: int
    arm: Arm
    size: Size

    @property
    def told(self) -> dict[str, Any]:
        """What makes this run another one than all others on the same slices of the text."""
        return {"seed": self.seed, "arm": asdict(self.arm), "size": asdict(self.size), "by": self.by}

    @property
    def run(self) -> str:
        """From which the slices follow."""
        return run_of(self.size, self.seed)

    @property
    def by(self) -> str:
        return "daemons" if self.part == "daemons" else "workers"


class Results:
    """Finished runs, one JSON line each."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        self._file = file

    def find(self, cell: Cell, run: str = "") -> dict[str, Any] | None:
        """The newest line of a finished run, whoever finished it, if there is one: of text cut by `run`, or by any.

        It is `older` where what was run last with its seed and size had other text.
        """
        newest, told = None, cell.told
        for line in map(json.loads, reversed(self._file.read_text(encoding="utf-8").splitlines())):
            line["arm"] = asdict(Arm(**line["arm"]))  # what arms can be told since then is as it is by default
            text = line.get("run", "unknown")
            if newest is None and (line["seed"], line["size"]) == (told["seed"], told["size"]):
                newest = text
            if all(line[name] == value for name, value in told.items()) and run in ("", text):
                return {**line, "older": text != newest}
        return None

    def add(self, cell: Cell, found: dict[str, Any]) -> dict[str, Any]:
        line = {**cell.told, "run": cell.run, **found}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line


@functools.cache
def run_of(size: Size, seed: int) -> str:
    """Id of the run of which workers have the text (`Workers.text`)."""
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        return RunText(size.spec(seed=seed), Path(folder), size.corpus).spec.run_id


def start_of(cell: Cell, workers: Workers, every: int, starts: Path) -> Vector:
    """Where a run begins, (P,): as it was initialised, or where a synchronous run on its workers' text ended."""
    if not cell.arm.after:
        return workers.initial
    before = replace(cell, arm=replace(MENU, steps=cell.arm.after))
    file = end_of(before, starts)
    if not file.exists():
        ended = train(before.arm, workers, start=workers.initial, stream="scratch", every=every, say=lambda *_: None)
        keep(ended.parameters, file)
    start: Vector = np.load(file)
    return start


def end_of(cell: Cell, starts: Path) -> Path:
    """The file of the parameters that a synchronous run ended at."""
    usual = asdict(Arm("", 0, 0.0))  # what arms are told later changes no name
    told = {
        "arm": [pair for pair in asdict(cell.arm).items() if pair not in usual.items()],
        "size": asdict(cell.size),
        "run": cell.run,
    }
    return starts / f"{cell.seed}-{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]}.npy"


def keep(parameters: Vector, file: Path) -> None:
    """Write them whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.npy")
    np.save(unfinished, parameters)
    unfinished.rename(file)


def run(cell: Cell, every: int, starts: Path) -> dict[str, Any]:
    """Do what a cell says; `starts` is the folder of parameters that runs go on from."""
    began, cpu = time.monotonic(), time.process_time()
    if cell.by == "daemons":
        return by_daemons(spec_of(cell.arm, cell.size, cell.seed), nodes=cell.size.workers, steps=cell.arm.steps)
    workers = Workers(cell.size, cell.seed)
    name = f"{cell.part}, seed {cell.seed}, batch {cell.size.batch}: {described(asdict(cell.arm))}"

    def say(step: int, loss: float) -> None:
        print(f"{name}: step {step}, {loss:.4f} bits per byte, {time.monotonic() - began:.0f} s", file=sys.stderr)

    start = start_of(cell, workers, every, starts)
    stream = "continued" if cell.arm.after else "scratch"
    outcome = train(cell.arm, workers, start=start, stream=stream, every=every, say=say)
    workers.close()
    if cell.part == "menu" and (cell.arm.method, cell.arm.eps) == ("synchronous", Arm.eps):
        keep(outcome.parameters, end_of(cell, starts))
    return {
        "parameters": workers.parameters,
        "heldout": workers.text.spec.task.heldout_sha256,
        "curve": [[step, round(loss, 5), round(words, 5)] for step, loss, words in outcome.curve],
        "loss": round(outcome.curve[-1][1], 5),
        "words": round(outcome.curve[-1][2], 5),
        "rounds": outcome.rounds,
        "bytes_per_node": round(outcome.bytes_per_node),
        "clock": outcome.clock,
        "accepted": round(outcome.accepted, 4),
        "wire": [list(exchanges) for exchanges in outcome.wire],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def main(arguments: list[str] | None = None, plan: Plan | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of all parts with several")
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part, and perhaps others")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="end after so many runs that were not finished")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of finished runs")
    parser.add_argument("--docs", type=Path, help="folder with results.md, whose tables and plot are written anew")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write up what is finished")
    parser.add_argument("--quick", action="store_true", help="one seed and a twentieth of all steps, for a look")
    options = parser.parse_args(arguments)
    plan = replace(plan or Plan(), seeds=options.seeds)
    if options.quick:
        plan = plan.quick()
    out = options.out / "quick" if options.quick else options.out
    results = Results(out / "results.jsonl")
    left = options.most
    for cell in plan.cells():
        wanted = not options.report_only and cell.part in (options.only or PARTS)
        if wanted and left and results.find(cell, cell.run) is None:
            left -= 1
            line = results.add(cell, run(cell, plan.every, out / "starts"))
            print(json.dumps({"part": cell.part, **line}), flush=True)
    if options.docs is not None:
        done = [(cell.part, line) for cell in plan.cells() if (line := results.find(cell)) is not None]
        write_report(options.docs, {part: [line for of, line in done if of == part] for part in PARTS})


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in a node's trainer; it holds for the whole process
    main()
