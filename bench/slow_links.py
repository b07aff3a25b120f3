"""Four nodes on slow links: how much of the time they compute, and what a round sends, as JSON lines.

    sudo .venv/bin/python bench/slow_links.py [--method diloco|streaming|open] [--rounds 6] [--seconds 30]

Each node has a network namespace; between any two lie 100 Mbit/s, a round trip of 50 ms and a loss of 0.1 % each way
(`--rate`, `--rtt`, `--loss`), imposed as tests/netlab does. They train a byte-lm of 10 M parameters; the steps of a
round are chosen so that it takes about `--seconds` where all nodes share this machine's cores. Bytes are counted at
the nodes' interfaces, with all headers and retransmissions. The first `--warmup` rounds are not counted: in them nodes
start, and fetch text.

Lines: `begun`; `round` for each node and round; last `summary` with, of the rounds that count, `train_share` (each
node's trainer's time in inner steps over the time that passed), beside it `evaluate_share` (that in which it measured:
the loss after a round, and what a judge scores), the bytes that a node sends and receives per parameter and round, and
the received ones for each contribution of others that counted (`contributions`, by round). The target is a
`train_share` of 0.95 for open and streaming and 0.90 for diloco, 2.1 bytes sent for int8 and 0.06 a contribution for
open; `failed` names what was missed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "netlab")]

from lab import Host, Lab, Link, why_not
from realnodes import Event, Node, environment
from realswarm import Site, node_at, peer_id_at, run_file, write_text

from swarmnode.node.control.client import ControlClient

MODEL = {"layers": 8, "heads": 5, "width": 320, "context": 32}  # 10.0 M parameters
BATCH = 8
TEXT = 2_000_000  # bytes to train on
PATIENCE = 600.0  # s for a round
CODECS = {"diloco": "int8", "streaming": "e3m0", "open": "topk"}
SHARES = {"diloco": 0.90, "streaming": 0.95, "open": 0.95}  # of the time, inside inner steps

MEASURED_FOR = 6.0  # s of steps


def tables(method: str, codec: str, steps: int, validators: list[str]) -> dict[str, dict[str, Any]]:
    """The run."""
    trust = {"trust": {"validators": validators}} if method == "open" else {}
    return {
        "run": {"name": "slow-links", "seed": 1, "trust": "open" if method == "open" else "known"},
        "model": MODEL,
        "inner": {"batch": BATCH, "steps": steps},
        "exchange": {"method": method, "codec": codec},
        **trust,
    }


def trainer(run: Path, text: Path) -> None:
    """Train as a node does, and print the seconds of an inner step."""
    import torch

    from swarmnode.testing.runtext import RunText
    from swarmnode.training.byte_lm import ByteLM
    from swarmnode.training.inner import InnerLoop, layout_of
    from swarmnode.training.runspec import load_runspec
    from swarmnode.training.tasks import Assignment

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory() as folder:
        cut = RunText(load_runspec(run), Path(folder), str(text))
        task = ByteLM(cut.spec, Assignment("", "", **cut.files("")))
        vector = torch.zeros(layout_of(task.model).parameters)
        loop = InnerLoop(cut.spec, task, peer_id="", vector=vector, keep=False)
        loop.train(round=0, steps=2, seconds=PATIENCE, between=lambda: False)
        progress = loop.train(round=0, steps=10**6, seconds=MEASURED_FOR, between=lambda: False)
    print(progress.seconds / progress.steps)


def step_seconds(run: Path, text: Path, nodes: int, nice: int) -> float:
    """What an inner step takes where so many trainers run."""
    command = ["nice", "-n", str(nice), sys.executable, __file__, "--trainer", str(run), "--text", str(text)]
    trainers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) for _ in range(nodes)]
    try:
        return mean(float(process.communicate(timeout=PATIENCE)[0]) for process in trainers)
    finally:
        for process in trainers:
            process.kill()
            process.wait()


class Swarm:
    """The nodes, each on its machine, and what they said."""

    def __init__(self, hosts: Sequence[Host], nodes: Sequence[Node], began: float) -> None:
        self.hosts = hosts
        self.nodes = nodes
        self._began = began
        self._shown = [0] * len(nodes)

    def through(self) -> list[tuple[int, int]]:
        """Bytes received and sent by each node until now."""
        return [host.bytes_through() for host in self.hosts]

    def until(self, rounds: int) -> None:
        """Wait until all nodes have done so many rounds, and show them."""
        for number, node in enumerate(self.nodes):
            node.wait_for("round", lambda event: event["round"] >= rounds - 1, within=PATIENCE * rounds)
            events = [event for event in list(node.events) if event["event"] in ("round", "abandoned")]
            for event in events[self._shown[number] :]:
                say("round", node=number, **{key: event[key] for key in event if key not in ("event", "state_hash")})
            self._shown[number] = len(events)
        passed = (time.monotonic() - self._began) / 60
        print(f"{passed:5.1f} min  {rounds} rounds done", file=sys.stderr, flush=True)

    def spent(self) -> list[tuple[float, float, float]]:
        """Seconds of each node's clock, and of its trainer in inner steps and measuring, until now."""
        found = []
        for node in self.nodes:
            metrics = ControlClient(node.home).call("metrics", timeout=PATIENCE)["metrics"]
            samples = next(
                metric["samples"] for metric in metrics if metric["name"] == "swarmnode_trainer_seconds_total"
            )
            by = {sample["labels"]["what"]: sample["value"] for sample in samples}
            found.append((time.monotonic(), by["train"], by["evaluate"]))
        return found

    def rounds(self, of: range) -> list[list[Event]]:
        """What each node said of these rounds."""
        return [
            [event for event in list(node.events) if event["event"] == "round" and event["round"] in of]
            for node in self.nodes
        ]


def say(what: str, **more: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in more.items()}
    print(json.dumps({"bench": "slow_links", "what": what, **rounded}), flush=True)


def start(stack: ExitStack, lab: Lab, folder: Path, options: argparse.Namespace) -> tuple[Swarm, int]:
    """All nodes, and the steps of a round."""
    # a way between two nodes passes two links
    link = Link(delay=options.rtt / 4, loss=options.loss / 2, rate=options.rate)
    hosts = [lab.public(f"n{number}", link) for number in range(options.nodes)]
    homes = [folder / f"node-{number}" for number in range(options.nodes)]
    peers = [peer_id_at(home) for home in homes]
    text = write_text(folder / "text", TEXT)
    path = folder / "run.toml"
    steps = options.steps
    if not steps:
        spec = run_file(path, tables(options.method, options.codec, 1, peers))
        steps = max(1, round(options.seconds / step_seconds(spec, text, options.nodes, options.nice)))
    run = run_file(path, tables(options.method, options.codec, steps, peers))
    join = Site.on(hosts[0]).multiaddr(peers[0])
    nodes = []
    for number, (host, home) in enumerate(zip(hosts, homes, strict=True)):
        what = ("--join", join) if number else (run, "--wait-peers", str(options.nodes - 1), "--wait-seconds", "120")
        rounds = ("--rounds", str(options.rounds + options.warmup), "--stay", "--nice", str(options.nice))
        node = node_at(Site.on(host), home, *what, *rounds, corpus=None if number else text)
        nodes.append(stack.enter_context(node))
        nodes[0].wait_for("ready", within=PATIENCE)
    return Swarm(hosts, nodes, time.monotonic()), steps


def summary(
    swarm: Swarm,
    before: list[tuple[int, int]],
    spent_before: list[tuple[float, float, float]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The figures of the rounds that count."""
    parameters = swarm.nodes[0].ready["parameters"]
    told = swarm.rounds(range(options.warmup, options.warmup + options.rounds))
    done = min(len(events) for events in told)
    passed = [
        [late - early for early, late in zip(then, now, strict=True)]
        for then, now in zip(spent_before, swarm.spent(), strict=True)
    ]
    training = [train / clock for clock, train, _ in passed]
    evaluating = [evaluate / clock for clock, _, evaluate in passed]
    moved = [(now[0] - then[0], now[1] - then[1]) for now, then in zip(swarm.through(), before, strict=True)]
    received, sent = (mean(column) / parameters / options.rounds for column in zip(*moved, strict=True))
    each = [event for events in told for event in events]
    hashes: dict[int, set[str]] = {}
    for event in each:
        hashes.setdefault(event["round"], set()).add(event["state_hash"])
    made = [max(event["members"] for event in each if event["round"] == number) for number in hashes]
    copies = sum(made) * (options.nodes - 1) / options.nodes / options.rounds  # received by a node in a round
    contribution = received / copies if copies else float("inf")
    checks = {
        "train_share": min(training) >= SHARES[options.method],
        "bytes": contribution <= 0.06 if options.method == "open" else sent <= 2.1 or options.codec != "int8",
        "parity": all(len(told) == 1 for told in hashes.values()),
        "rounds": done == options.rounds,
        "everybody counts": all(count == options.nodes for count in made),
    }
    return {
        "method": options.method,
        "codec": options.codec,
        "nodes": options.nodes,
        "parameters": parameters,
        "rounds": done,
        "round_s": round(median(event["seconds"] for event in each), 2),
        "compute_s": round(median(event["compute_seconds"] for event in each), 2),
        "train_share": [round(share, 4) for share in training],
        "evaluate_share": [round(share, 4) for share in evaluating],
        "train_share_mean": round(mean(training), 4),
        "sent_per_parameter_round": round(sent, 4),
        "received_per_parameter_round": round(received, 4),
        "received_per_parameter_contribution": round(contribution, 4) if copies else None,
        "contributions": made,
        "missing": sum(len(event["missing"]) for event in each),
        "load": [round(load, 1) for load in os.getloadavg()],
        "failed": [name for name, held in checks.items() if not held],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The time that nodes on slow links compute, and the bytes of a round.")
    parser.add_argument("--method", choices=tuple(CODECS), default="diloco")
    parser.add_argument("--codec", default="", help="[default: int8 for diloco, e3m0 for streaming, topk for open]")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="that count")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before, that do not")
    parser.add_argument("--seconds", type=float, default=30.0, help="a round, about")
    parser.add_argument("--steps", type=int, default=0, help="inner steps of a round [default: measured for --seconds]")
    parser.add_argument("--nice", type=int, default=10, help="of the trainers, as a node has it by default")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each node's link; 0 is no limit")
    parser.add_argument("--rtt", type=float, default=0.05, help="seconds from node to node and back")
    parser.add_argument("--loss", type=float, default=0.001, help="of frames, each way")
    parser.add_argument("--keep", type=Path, help="folder below which logs and data directories stay")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer is not None:
        trainer(options.trainer, options.text)
        return 0
    options.codec = options.codec or CODECS[options.method]
    if (reason := why_not()) is not None:
        say("skipped", why=reason)
        return 0
    with ExitStack() as stack:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="slow-links-", dir=options.keep))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmnode-slow-links-")))
        lab = stack.enter_context(Lab())
        swarm, steps = start(stack, lab, folder, options)
        say("begun", steps=steps, folder=str(folder), parameters=swarm.nodes[0].ready["parameters"])
        swarm.until(options.warmup)
        before, spent = swarm.through(), swarm.spent()
        for rounds in range(options.warmup + 1, options.warmup + options.rounds + 1):
            swarm.until(rounds)
        told = summary(swarm, before, spent, options)
        say("summary", **told)
    return 1 if told["failed"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything that was started, as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
