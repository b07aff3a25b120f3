"""Nodes with a model of 135 M parameters on this machine: memory, exchange, equal hashes, a late joiner. JSON lines.

    python bench/large.py [--method diloco|open] [--codec int8] [--nodes 2] [--rounds 2] [--steps 1] [--tiny]

Real daemons on loopback train `_large/shape.py` with random weights. While they do, the memory of each daemon and its
trainer is read from the kernel twice a second: `own` is what is theirs alone and cannot be given back (anonymous
and shared memory), `mapped` what the kernel keeps in memory of their mapped files. After the rounds a further node
joins, unless `--no-joiner`, and catches up.

Lines: `node` for each, with the greatest own memory of daemon, trainer and both, beside what the node said before it
trained that it would be (`needs`); `round` for each round and node; `allreduce`, the all-reduce alone of as many
processes at that size, `summary`. `failed` names what was missed, and the exit code is then 1: memory within 10 % of
what was told, an exchange, in the median of the rounds after the second, within 1.3 times the all-reduce alone, equal
hashes, and that the joiner stands where the others do. Each node takes some 5 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "netlab")]

from realnodes import LOCAL, Node, children
from realswarm import peer_id_at, run_file

HERE = Path(__file__).resolve().parent
PATIENCE = 900.0  # s
EVERY = 0.5  # s between two looks, each of which takes some 30 ms of a core
WITHIN = 0.10  # of the memory that a node told
SLOWER = 1.3  # times the all-reduce alone
WARM = 2  # rounds that take new memory


def say(what: str, **more: Any) -> None:
    print(json.dumps({"bench": "large", "what": what, **more}), flush=True)


def tables(options: argparse.Namespace, validators: list[str]) -> dict[str, dict[str, Any]]:
    """The run."""
    is_open = options.method == "open"
    return {
        "run": {"name": "tiny" if options.tiny else "large", "seed": 1, "trust": "open" if is_open else "known"},
        "task": {"name": "shape"},
        "model": {"context": 64},
        "inner": {"batch": 1, "steps": options.steps, "warmup": 0},
        "exchange": {"method": options.method, "codec": options.codec, "deadline_ceiling": 300.0},
        **({"trust": {"validators": validators, "audit_share": options.audits}} if is_open else {}),
    }


def memory_of(pid: int) -> tuple[float, float]:
    """Bytes of a process that are its own, and bytes of mapped files that are in memory for it; shared ones in part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines[1:])}
    return 1024.0 * (kib["Pss_Anon"] + kib["Pss_Shmem"]), 1024.0 * kib["Pss_File"]


class Watch(threading.Thread):
    """The greatest memory of a node's daemon and trainer while it lives."""

    def __init__(self, node: Node) -> None:
        super().__init__(daemon=True)
        self.daemon_most = self.trainer_most = self.both_most = self.mapped_most = 0.0
        self.phase: dict[str, float] = {}
        self._pid = node.process.pid
        self.start()

    def run(self) -> None:
        while True:
            own = memory_of(self._pid)
            if not own[0]:
                return
            trainers = [memory_of(child) for child in children(self._pid)]
            trainer = sum(each[0] for each in trainers)
            self.daemon_most = max(self.daemon_most, own[0])
            self.trainer_most = max(self.trainer_most, trainer)
            self.both_most = max(self.both_most, own[0] + trainer)
            self.mapped_most = max(self.mapped_most, own[1] + sum(each[1] for each in trainers))
            time.sleep(EVERY)

    def told(self) -> dict[str, float]:
        most = {
            "daemon": self.daemon_most,
            "trainer": self.trainer_most,
            "both": self.both_most,
            "mapped": self.mapped_most,
        }
        return {f"{name}_mb": round(value / 1e6) for name, value in most.items()}


def start(stack: ExitStack, home: Path, *arguments: str | Path) -> tuple[Node, Watch]:
    node = Node(home, *arguments, "--task", f"{HERE / '_large' / 'shape.py'}:Shape", "--stay", corpus=None, flags=LOCAL)
    stack.enter_context(node)
    watch = Watch(node)
    node.wait_for("ready", within=PATIENCE)
    return node, watch


def allreduce(parameters: int, codec: str, members: int) -> float:
    """Seconds of the all-reduce of so many processes of this machine, alone."""
    command = [sys.executable, str(HERE / "allreduce.py"), "--parameters", str(parameters), "--codecs", codec]
    done = subprocess.run([*command, "--members", str(members), "--rounds", "3"], capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    say("allreduce", **line)
    return float(line["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and exchange of nodes with a large model.")
    parser.add_argument("--method", choices=("diloco", "open", "btard"), default="diloco")
    parser.add_argument("--codec", default="", help="[default: int8, topk for open]")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1, help="of a round")
    parser.add_argument("--audits", type=float, default=0.0, help="[trust] audit_share of an open run")
    parser.add_argument("--tiny", action="store_true", help="a hundred times smaller, to try the program")
    parser.add_argument("--no-joiner", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder below which logs and data directories stay")
    options = parser.parse_args()
    options.codec = options.codec or ("topk" if options.method == "open" else "int8")
    failed: list[str] = []
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmnode-large-")))
        homes = [folder / f"node-{number}" for number in range(options.nodes + (not options.no_joiner))]
        peers = [peer_id_at(home) for home in homes]
        run = run_file(folder / "run.toml", tables(options, peers[: options.nodes]))
        wait = ("--wait-peers", str(options.nodes - 1), "--wait-seconds", "300")
        nodes = [start(stack, homes[0], run, *wait)]
        join = nodes[0][0].ready["multiaddr"]
        nodes += [start(stack, home, "--join", join) for home in homes[1 : options.nodes]]
        for node, _ in nodes:
            node.wait_for("round", lambda event: event["round"] >= options.rounds - 1, within=PATIENCE)
        if not options.no_joiner:
            began = time.monotonic()
            late, watch = start(stack, homes[-1], "--join", join)
            late.wait_for("caught_up", within=PATIENCE)
            say("joined", seconds=round(time.monotonic() - began, 1))
            late.wait_for("round", within=PATIENCE)
            nodes.append((late, watch))
        told: dict[int, set[str]] = {}
        for number, (node, watch) in enumerate(nodes):
            for event in [event for event in list(node.events) if event["event"] == "round"]:
                told.setdefault(event["round"], set()).add(event["state_hash"])
                say(
                    "round",
                    node=number,
                    **{key: event[key] for key in event if key not in ("event", "counted", "missing")},
                )
            needs = next((event for event in node.events if event["event"] == "memory"), {})
            say("node", node=number, needs={k: needs[k] for k in ("memory", "disk") if k in needs}, **watch.told())
        if any(len(hashes) > 1 for hashes in told.values()):
            failed.append("parity")
        parameters = nodes[0][0].ready["parameters"]
        for number, (node, watch) in enumerate(nodes):
            told_of = next((event["memory"] for event in node.events if event["event"] == "memory"), math.nan)
            if number < options.nodes and not abs(watch.both_most / told_of - 1) <= WITHIN and not options.tiny:
                failed.append(f"memory of node {number}: {watch.both_most / told_of:.2f} of what was told")
        took = [event["exchange_seconds"] for event in nodes[0][0].events if "exchange_seconds" in event]
        took = took[WARM : options.rounds]
    if options.method == "diloco" and took:
        alone = allreduce(parameters, options.codec, options.nodes)
        usual = statistics.median(took)
        say("exchange", seconds=took, alone=alone, ratio=round(usual / alone, 3), worst=round(max(took) / alone, 3))
        if usual > SLOWER * alone:
            failed.append(f"exchange: {usual / alone:.2f} times the all-reduce alone")
    say("summary", parameters=parameters, load=os.getloadavg()[0], failed=failed)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
