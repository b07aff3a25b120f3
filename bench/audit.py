"""What an audit costs and how far honest and dishonest replays end from what was claimed. JSON lines.

    python bench/audit.py --rounds 3

A trainer of the default model (or `--width`, `--layers`) does rounds on the standard library's text and records its
states. Then stretches are repeated from these states: as an auditor does, in one thread and in two, and in processes
that may use less of the CPU's instructions (`ATEN_CPU_CAPABILITY`), as other machines have, and on a GPU where there is
one. And they are compared with what cheats would claim. Last line: the share of compute that recording takes, and what
auditing each round would take without a budget.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swarmnode.testing.runtext import RunText
from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment
from swarmnode.training.verify.recorder import Recorder, room, stretch_steps
from swarmnode.training.verify.replay import Distance, distance
from swarmnode.training.verify.trace import State, Stretch
from swarmnode.training.verify.vectors import Vectors

CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # of a CPU, as torch calls them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 80 steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--each", type=int, default=3, help="stretches of a round that are repeated")
    parser.add_argument("--repeat", metavar="FILE", help=argparse.SUPPRESS)  # in a process of other capabilities
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)  # of that process
    options = parser.parse_args()
    spec = parse_runspec(
        {
            "run": {"name": "audit", "trust": "open"},
            "model": {"layers": options.layers, "heads": 4, "width": options.width},
        },
        source="bench",
    )
    if options.repeat:
        _repeat(spec, Path(options.repeat), options.device)
        return
    folder = tempfile.TemporaryDirectory(prefix="swarmnode-audit-")
    loop = make_loop(spec, Path(folder.name, "text"))
    parameters = layout_of(loop._task.model).parameters
    every = stretch_steps(spec.inner.steps, parameters)
    states = Vectors(Path(folder.name, "states"), budget=room(spec.inner.steps, parameters))
    recorder = Recorder(loop.view, states, every=every)
    recording, kept = [0.0], list[tuple[Stretch, State, State]]()

    def before() -> bool:
        began = time.perf_counter()
        recorder.before(*loop.place, 0)
        recording[0] += time.perf_counter() - began
        return False

    trained = 0.0
    for round in range(options.rounds):
        trained += loop.train(round=round, steps=spec.inner.steps, seconds=1e9, between=before).seconds
        done = recorder.mark(*loop.place)
        for stretch in done[:: max(1, len(done) // options.each)]:
            start, end = recorder.state(stretch.start), recorder.state(stretch.end)
            assert start is not None and end is not None  # of this round: disk is for two
            kept.append((stretch, copied(start), copied(end)))
    took = 0.0
    for stretch, start, end in kept:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            began = time.perf_counter()
            _tell("honest", f"{threads} threads", stretch, distance(start, end, replay(loop, stretch, start)))
            took += (time.perf_counter() - began) * (threads == 1)
        torch.set_num_threads(1)
        for cheat, claimed in cheats(loop, stretch, start):
            _tell("cheat", cheat, stretch, distance(start, claimed, end))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kept")
        path.write_bytes(pickle.dumps(kept))  # our own, read back by our own child
        here = torch.backends.cpu.get_cpu_capability()  # more than it has would end a process
        known = CAPABILITIES[: CAPABILITIES.index(here) + 1] if here in CAPABILITIES else CAPABILITIES[:1]
        places = [(capability, "cpu") for capability in known]
        for capability, device in [*places, ("DEFAULT", "cuda")] if torch.cuda.is_available() else places:
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower(), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--repeat", str(path), "--device", device]
            command += ["--layers", str(options.layers), "--width", str(options.width)]
            subprocess.run(command, env=environment, check=True)
    per_step = trained / (options.rounds * spec.inner.steps)
    audit = took / len(kept)
    print(
        json.dumps(
            {
                "what": "cost",
                "parameters": parameters,
                "step_ms": round_to(1e3 * per_step),
                "stretch_steps": every,
                "audit_s": round_to(audit),
                "audit_over_round": round_to(audit / (per_step * spec.inner.steps)),
                "recording_over_training": round_to(recording[0] / trained),
                "bytes_per_audit": 44 * parameters,
            }
        )
    )


def make_loop(spec: RunSpec, folder: Path, device: str = "cpu") -> InnerLoop:
    """As in a trainer process of one thread."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    text = RunText(spec, folder)
    task = ByteLM(text.spec, Assignment(text.spec.run_id, "author", **text.files("author")), device)
    vector = torch.zeros(layout_of(task.model).parameters, device=device)
    return InnerLoop(spec, task, peer_id="author", vector=vector, keep=False)


def replay(loop: InnerLoop, stretch: Stretch, start: State, **changes: Any) -> State:
    """Where the stretch leads, or one with other steps or of another node."""
    whose = {"peer_id": "author", "round": stretch.round, "step": stretch.step, "steps": stretch.steps}
    with loop.replayed(start, **{**whose, **changes}) as end:
        return copied(end)


def copied(state: State) -> State:
    return State(state.parameters.copy(), state.moments.copy(), state.updates)


def cheats(loop: InnerLoop, stretch: Stretch, start: State) -> Iterator[tuple[str, State]]:
    """What who did not do the work would claim of it."""
    honest = replay(loop, stretch, start)
    yield "other data", replay(loop, stretch, start, peer_id="somebody")
    for steps in (stretch.steps - 1, stretch.steps // 2):
        yield (
            f"{steps} steps of {stretch.steps}",
            replace(replay(loop, stretch, start, steps=steps), updates=honest.updates),
        )
    for factor in (1.05, 1.1, 2.0):
        with other_lr(loop, factor):
            yield f"learning rate x {factor}", replay(loop, stretch, start)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield "bfloat16", replay(loop, stretch, start)
    noise = torch.randn(start.parameters.size, generator=torch.Generator().manual_seed(0)).numpy()
    step = honest.parameters - start.parameters
    yield "noise", replace(honest, parameters=start.parameters + noise * float((step**2).mean() ** 0.5))
    yield "scaled x 1.1", replace(honest, parameters=start.parameters + step * 1.1)


@contextmanager
def other_lr(loop: InnerLoop, factor: float) -> Iterator[None]:
    spec = loop._spec
    loop._spec = replace(spec, inner=replace(spec.inner, lr=factor * spec.inner.lr))
    try:
        yield
    finally:
        loop._spec = spec


def _repeat(spec: RunSpec, path: Path, device: str) -> None:
    loop = make_loop(spec, path.with_name("again"), device)
    where = "a GPU" if device == "cuda" else f"capability {torch.backends.cpu.get_cpu_capability()}"
    for stretch, start, end in pickle.loads(path.read_bytes()):
        found = distance(start, end, replay(loop, stretch, start))
        _tell("honest", where, stretch, found)


def _tell(what: str, how: str, stretch: Stretch, found: Distance) -> None:
    at = {"round": stretch.round, "step": stretch.step, "steps": stretch.steps}
    apart = {"parameters": found.parameters, "first": found.first, "second": found.second}
    print(json.dumps({"what": what, "how": how, **at, **{key: round_to(value) for key, value in apart.items()}}))


def round_to(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
