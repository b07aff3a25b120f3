"""What nodes learn from one another's rollouts (SAPO, 2509.08721) at CPU scale; tables and plots in docs/.

    python bench/sapo.py --seeds 3 --jobs 2 --docs docs     # 20 minutes of CPU time; --quick for a look

Eight tiny policies on nine digit tasks in one process, without a network (sapo_swarm/swarm.py):

split     own/external groups of a batch of 8: 8/0, 6/2, 4/4, 2/6, an adaptive one; 4/4 without the filter; those
          that share with wrong answers of others tapered (TOPR), or all of them decoupled (AReaL); 8/0 that asks on
          until 8 own groups are informative
unequal   four kinds of policies, two nodes each, apart and together
gym       with --task gym: three tasks of reasoning-gym instead, by policies that read bytes; published SAPO (4/4), the
          adaptive default, alone, and alone oversampled
specialists   with --task specialists: three nodes that ask themselves a task each, and what one of them learns of the
          tasks of the others (sapo_swarm/specialists.py)

The first table over the product's own protocol (sapo_swarm/networked.py), in tables of their own:

    python bench/sapo.py --over simnet --seeds 3 --docs docs        # sessions on simnet; 45 minutes of CPU time
    python bench/sapo.py --over processes --seeds 3 --docs docs     # eight daemons on loopback; 50 minutes on two cores
    python bench/sapo.py --over processes --task gym --seeds 3 --docs docs          # reasoning-gym

Each finished run is a JSON line in OUT/results.jsonl; what is there already is not run again, so a command that was
interrupted goes on. All chance comes from seeds: equal commands give equal rewards on one machine, but for
--over processes, where it matters when what arrives. With --docs, the
section of SAPO in DOCS/results.md and the plots beside it are written anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sapo_swarm.networked import over_processes, over_simnet
from sapo_swarm.report import NETWORKS, write_report
from sapo_swarm.specialists import train_specialists
from sapo_swarm.swarm import Arm, train

SPLIT = (
    Arm("8/0"),
    Arm("4/4", own=4, external=4),
    Arm("6/2", own=6, external=2),
    Arm("2/6", own=2, external=6),
    Arm("adaptive", adaptive=True),
    Arm("4/4 unfiltered", own=4, external=4, filtered=False),
    Arm("8/0 oversampled", oversample=8),
    Arm("4/4 tapered", own=4, external=4, correction="taper"),
    Arm("6/2 tapered", own=6, external=2, correction="taper"),
    Arm("2/6 tapered", own=2, external=6, correction="taper"),
    Arm("adaptive tapered", adaptive=True, correction="taper"),
    Arm("adaptive choosing", adaptive=True, correction="taper", curriculum=0.5),
    Arm("4/4 decoupled", own=4, external=4, correction="decoupled"),
    Arm("adaptive decoupled", adaptive=True, correction="decoupled"),
)
GYM = (
    "gym:count_bits(min_n=1,max_n=15),lcm(min_value=1,max_value=5),"
    "chain_sum(min_terms=2,max_terms=2,min_digits=1,max_digits=1)"
)
ON_GYM = tuple(
    replace(arm, task=GYM, rounds=100, learning_rate=2e-3)
    for arm in SPLIT
    if arm.name in ("8/0", "4/4", "adaptive tapered", "8/0 oversampled")
)
GYM_OVER_PROCESSES = ("8/0", "4/4", "adaptive tapered")  # no node of the product oversamples
SPECIALISTS = (
    Arm("alone", rounds=100, warm_up=60, max_tokens=8),
    Arm("with the specialists' groups", adaptive=True, correction="taper", rounds=100, warm_up=60, max_tokens=8),
)
SIMNET = tuple(arm for arm in SPLIT if arm.filtered and arm.correction != "decoupled")
PROCESSES = (
    Arm("8/0", correction="taper"),
    Arm("6/2 tapered", own=6, external=2, correction="taper"),
    Arm("4/4 tapered", own=4, external=4, correction="taper"),
    Arm("2/6 tapered", own=2, external=6, correction="taper"),
    Arm("adaptive tapered", adaptive=True, correction="taper"),
)
UNEQUAL = (
    Arm("8/0", policies="unequal"),
    Arm("4/4", own=4, external=4, policies="unequal"),
    Arm("4/4 tapered", own=4, external=4, policies="unequal", correction="taper"),
)


@dataclass(frozen=True)
class Cell:
    """One run of the experiment: a line of the results."""

    table: str  # split, unequal, gym, specialists; simnet, processes, gym-processes
    seed: int
    arm: Arm

    @property
    def over(self) -> str:
        """The network, where there is one."""
        network = self.table.removeprefix("gym-")
        return network if network in NETWORKS else ""

    @property
    def key(self) -> dict[str, Any]:
        """What makes this run another one than all others."""
        return {"table": self.table, "seed": self.seed, "arm": asdict(self.arm)}


def cells(seeds: int, *, quick: bool) -> list[Cell]:
    """All runs, a seed of each table before the next seed; those over a network last."""
    found = []
    for seed in range(1, seeds + 1):
        found += [Cell("split", seed, arm) for arm in SPLIT]
        found += [Cell("unequal", seed, arm) for arm in UNEQUAL]
        found += [Cell("gym", seed, arm) for arm in ON_GYM]
        found += [Cell("specialists", seed, arm) for arm in SPECIALISTS]
    for seed in range(1, seeds + 1):
        found += [Cell("simnet", seed, arm) for arm in SIMNET]
        found += [Cell("processes", seed, arm) for arm in PROCESSES]
        found += [Cell("gym-processes", seed, arm) for arm in ON_GYM if arm.name in GYM_OVER_PROCESSES]
    if quick:
        found = [replace(cell, arm=replace(cell.arm, rounds=cell.arm.rounds // 20, warm_up=20)) for cell in found]
    return found


def run(cell: Cell) -> dict[str, Any]:
    """The line of one run. Sets torch's threads and denormals for the whole process."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    began, cpu = time.monotonic(), time.process_time()
    what = f"{cell.table}, seed {cell.seed}, {cell.arm.name}"

    def say(round: int, reward: float) -> None:
        if round % 50 == 0:
            print(f"{what}: round {round}, {reward:.1f}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    learn: dict[str, Callable[..., Any]] = {"simnet": over_simnet, "specialists": train_specialists}
    costs: dict[str, float] = {}
    if cell.over == "processes":
        outcome, costs = over_processes(cell.arm, cell.seed, say)
    else:
        outcome = learn.get(cell.table, train)(cell.arm, cell.seed, say)
    timed = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return json.loads(json.dumps({**cell.key, **asdict(outcome), **costs, **timed}))


def finished(left: Sequence[Cell], jobs: int) -> Iterator[dict[str, Any]]:
    """The lines of these runs as they come; more than one at a time in processes of their own."""
    if jobs == 1:
        yield from map(run, left)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, cell) for cell in left]):
            yield done.result()


class Results:
    """Finished runs in a folder, one JSON line each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.jsonl"
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The line of a finished run, if there is one."""
        return next((line for line in self.lines if all(line[name] == value for name, value in cell.key.items())), None)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every arm")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--tables", default="split,unequal", help="which of the tables to run")
    parser.add_argument("--task", choices=("digits", "gym", "specialists"), default="digits", help="another table")
    parser.add_argument("--over", choices=("simnet", "processes"), help="run the split over this network instead")
    parser.add_argument("--arms", help="which arms to run, by name, with commas between; all by default")
    parser.add_argument("--rounds", type=int, help="of each run, instead of as many as the tables say")
    parser.add_argument("--out", type=Path, default=Path("build/sapo"), help="folder of finished runs")
    parser.add_argument("--docs", type=Path, help="folder with results.md, whose tables and plots are written anew")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write up what is finished")
    parser.add_argument("--quick", action="store_true", help="one seed and a twentieth of all rounds, for a look")
    options = parser.parse_args(arguments)
    plan = cells(1 if options.quick else options.seeds, quick=options.quick)
    results = Results(options.out / "quick" if options.quick else options.out)
    tables = options.tables.split(",") if options.task == "digits" else [options.task]
    if options.over:
        tables = [options.over if options.task == "digits" else f"{options.task}-{options.over}"]
    arms = options.arms.split(",") if options.arms else [cell.arm.name for cell in plan]
    if not options.report_only:
        wanted = [cell for cell in plan if cell.table in tables and cell.arm.name in arms]
        if options.rounds:
            wanted = [replace(cell, arm=replace(cell.arm, rounds=options.rounds)) for cell in wanted]
        left = [cell for cell in wanted if results.find(cell) is None]
        for line in finished(left, options.jobs):
            results.add(line)
            print(json.dumps({name: value for name, value in line.items() if "curve" not in name}), flush=True)
    if options.docs is not None:
        of_tables = [line for cell in plan if (line := results.find(cell)) is not None and cell.table not in NETWORKS]
        write_report(options.docs, of_tables + [line for line in results.lines if line["table"] in NETWORKS])


if __name__ == "__main__":
    main()
