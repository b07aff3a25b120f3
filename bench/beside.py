"""Seconds of a trainer's step while another program keeps one core busy, beside those with nothing else. JSON lines.

    .venv/bin/python bench/beside.py [--widths 32,128] [--repeats 3]

Two policies of OpenMP: `passive`, which a trainer has, and `spinning`, libgomp's own, as the baseline. The trainer has
a thread for each core and its usual priority. `case` for each width, policy and number of busy programs, with the
slowest of the repeats in `worst_ms`; `width` with what a busy core costs (`beside`: times as long as alone) and what
being passive costs where nothing is beside it (`alone`: passive over spinning, medians). For a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from sometext import HELDOUT_SHA256, some_text

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.training.runspec import RunSpec, parse_runspec

POLICIES = {"passive": "PASSIVE", "spinning": "none"}  # libgomp says that it knows no such policy, and has its own
SECONDS = 6.0  # of steps that are measured


def run_of(width: int) -> RunSpec:
    model = {"layers": 4, "heads": 4, "width": width, "context": 128}
    task, inner = {"heldout_sha256": HELDOUT_SHA256}, {"batch": 8, "warmup": 0}
    return parse_runspec({"run": {"name": "b"}, "task": task, "model": model, "inner": inner}, source="bench")


async def step_ms(run: RunSpec) -> float:
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainerSettings(threads=os.cpu_count() or 1, device="cpu", **some_text(Path(folder)))
        trainer = TrainerProcess(run, run_id=run.run_id, peer_id="bench", settings=settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(trainer.run)
            await trainer.train(round=0, steps=3, seconds=SECONDS)
            done = await trainer.train(round=0, steps=10**6, seconds=SECONDS)
            nursery.cancel_scope.cancel()
    return 1e3 * done.seconds / done.steps


def measured(width: int, policy: str, busy: int, repeats: int) -> list[float]:
    os.environ["OMP_WAIT_POLICY"] = POLICIES[policy]
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        found = [trio.run(step_ms, run_of(width)) for _ in range(repeats)]
    finally:
        for program in programs:
            program.kill()
    case = {"width": width, "policy": policy, "busy": busy, "cores": os.cpu_count()}
    print(json.dumps({"bench": "beside", "what": "case", **case, "worst_ms": round(max(found), 1)}), flush=True)
    return found


def widths(text: str) -> list[int]:
    """Those of which there is such a model. Raises ArgumentTypeError."""
    try:
        return [run_of(int(width)).model.width for width in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=widths, default="32,128", help="of the model, multiples of 8")
    parser.add_argument("--repeats", type=int, choices=range(1, 10), default=3)
    given = parser.parse_args()
    for width in given.widths:
        found = {(p, busy): measured(width, p, busy, given.repeats) for p in POLICIES for busy in (0, 1)}
        beside = {p: round(max(found[p, 1]) / statistics.median(found[p, 0]), 1) for p in POLICIES}
        alone = statistics.median(found["passive", 0]) / statistics.median(found["spinning", 0])
        row = {"width": width, "beside": beside, "alone": round(alone, 2)}
        print(json.dumps({"bench": "beside", "what": "width", **row}), flush=True)


if __name__ == "__main__":
    main()
