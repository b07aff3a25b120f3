"""What `swarmnode plan` predicts beside what rounds then take: three methods on three shapes of links. JSON lines.

    sudo .venv/bin/python bench/plan_check.py [--methods diloco,btard,open] [--links fibre,home,mobile] [--nodes 3]

Each node has a network namespace; the link between any two is imposed as tests/netlab does. All nodes share this
machine's cores, so as many plans are made at the same time, each of which measures what a node would. The model has
3.1 M parameters and waits in each step as for an accelerator (tests/support/wide_task.py): with steps that compute, the
cores that nodes share would be measured, and what else the machine does. The first `--warmup` rounds do not count: in
those of an open run work is offered that was done before.

Lines: `case` for each method and link, with the predicted and the measured seconds of a round (`ratio`: predicted over
measured, the median of rounds and nodes), and the share of computing likewise; and `load`, what else this machine does:
where that changes between plan and rounds, both are right and the ratio is not. `steps_ratio` is the planned seconds
of inner steps over those measured in the rounds, and `corrected` the ratio with the measured ones in the prediction.
`failed` names the cases that are off by more than 20 %, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "netlab")]

from lab import Lab, Link, why_not
from realnodes import PROGRAM, environment
from realswarm import Site, node_at, peer_id_at, run_file

MODEL = {"layers": 12, "heads": 1, "width": 512, "context": 300}  # 3.1 M parameters; a step waits for 300 ms
TASK = ("--task", f"{Path(__file__).parents[1] / 'tests' / 'support' / 'wide_task.py'}:Wide")
LINKS = {"fibre": (100.0, 0.01), "home": (20.0, 0.04), "mobile": (8.0, 0.1)}  # Mbit/s, and seconds there and back
CODECS = {"diloco": "int8", "btard": "int8", "open": "topk"}
PATIENCE = 600.0  # s
OFF = 0.2


def say(what: str, **more: Any) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in more.items()}
    print(json.dumps({"bench": "plan_check", "what": what, **rounded}), flush=True)


def tables(method: str, steps: int, validators: list[str]) -> dict[str, dict[str, Any]]:
    """The run."""
    is_open = method == "open"
    return {
        "run": {"name": "plan-check", "seed": 1, "trust": "open" if is_open else "known"},
        "task": {"name": "wide"},
        "model": MODEL,
        "inner": {"batch": 4, "steps": steps},
        "exchange": {"method": method, "codec": CODECS[method]},
        **({"trust": {"validators": validators}} if is_open else {}),
    }


def planned(run: Path, homes: list[Path], link: tuple[float, float]) -> dict[str, float]:
    """What plans that are made at the same time say of the run's own method: means over them."""
    rate, trip = link
    options = ["--up", str(rate), "--down", str(rate), "--round-trip", str(1000 * trip), "--nodes", str(len(homes))]
    command = [str(PROGRAM), "plan", str(run), *TASK, "--threads", "1", "--json", *options]
    plans = [
        subprocess.Popen(
            [*command, "--data-dir", str(home)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for home in homes
    ]
    told = []
    for plan in plans:
        out, errors = plan.communicate(timeout=PATIENCE)
        if plan.returncode:
            raise SystemExit(errors)
        found = json.loads(out)
        told.append((found["step_seconds"], found["ways"][0]))
    return {
        "step": statistics.mean(step for step, _ in told),
        "seconds": statistics.mean(way["round_seconds"] for _, way in told),
        "computing": statistics.mean(way["computing"] for _, way in told),
    }


def trained(
    lab: Lab, method: str, name: str, run: Path, homes: list[Path], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rounds that count, of all nodes."""
    rate, trip = LINKS[name]
    link = Link(delay=trip / 4, rate=rate)
    hosts = [lab.public(f"{method[0]}{name[0]}{number}", link) for number in range(options.nodes)]
    join = Site.on(hosts[0]).multiaddr(peer_id_at(homes[0]))
    rounds = options.warmup + options.rounds
    with ExitStack() as stack:
        nodes = []
        for number, (host, home) in enumerate(zip(hosts, homes, strict=True)):
            begun = (run, "--wait-peers", str(options.nodes - 1), "--wait-seconds", "120")
            what = ("--join", join) if number else begun
            more = (*TASK, "--nice", "0", "--rounds", str(rounds), "--stay")
            nodes.append(stack.enter_context(node_at(Site.on(host), home, *what, *more, corpus=None)))
            nodes[0].wait_for("ready", within=PATIENCE)
        for node in nodes:
            node.wait_for("round", lambda event: event["round"] >= rounds - 1, within=PATIENCE)
        return [e for node in nodes for e in node.events if e["event"] == "round" and e["round"] >= options.warmup]


def case(lab: Lab, folder: Path, method: str, name: str, options: argparse.Namespace) -> bool:
    """Plan and train; whether they agree."""
    homes = [folder / f"{method}-{name}-{number}" for number in range(options.nodes)]
    peers = [peer_id_at(home) for home in homes]
    run = run_file(folder / f"{method}-{name}.toml", tables(method, options.steps, peers))
    before = os.getloadavg()[0]
    told = planned(run, homes, LINKS[name])
    counted = [e for e in trained(lab, method, name, run, homes, options) if e["steps"]]
    seconds = statistics.median(event["seconds"] for event in counted)
    steps = statistics.median(event["compute_seconds"] / event["steps"] for event in counted)
    done = statistics.median(event["steps"] for event in counted)
    corrected = told["seconds"] + options.steps * (steps - told["step"])
    fits = abs(told["seconds"] / seconds - 1) <= OFF
    say(
        "case",
        method=method,
        link=name,
        predicted=told["seconds"],
        measured=seconds,
        ratio=told["seconds"] / seconds,
        steps_ratio=told["step"] / steps,
        corrected=corrected / seconds,
        computing_predicted=told["computing"],
        computing_measured=statistics.median(e["compute_seconds"] / e["seconds"] for e in counted),
        exchange=statistics.median(e.get("exchange_seconds", 0.0) for e in counted),
        steps=done,
        rounds=len(counted),
        members=min(event["members"] for event in counted),
        load=[round(before, 1), round(os.getloadavg()[0], 1)],
    )
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted beside measured rounds.")
    parser.add_argument("--methods", default=",".join(CODECS))
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=6, help="that count")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before, that do not")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        say("skipped", why=reason)
        return 0
    failed = []
    for method in options.methods.split(","):
        for name in options.links.split(","):
            with tempfile.TemporaryDirectory(prefix="swarmnode-plan-") as folder, Lab() as lab:
                if not case(lab, Path(folder), method, name, options):
                    failed.append(f"{method} {name}")
    say("summary", failed=failed)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
