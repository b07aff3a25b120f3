"""What each cap of a node does, measured over a minute on real nodes on loopback; prints JSON.

    .venv/bin/python bench/caps.py --seconds 60

Each ratio is what was taken, divided by the cap: 1 is exactly the cap. `cpu`, `up`, `down` and `disk` are of nodes that
would take far more: one whose steps are longer than the minute, one that serves a shard, one that fetches it, one that
is given shards. `cpu_rounds` and `up_rounds` are of two nodes that train in rounds, and wait for each other in between.
`memory` is of a task that asks for more with each step, `checkpoints` of a node that keeps them all. `pause` and `long`
give the seconds from the request until the node's processes took no CPU, in short steps and in the middle of one that
takes longer, and `pause` what the rounds of the other node took before it and during it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from pair import cpu_seconds

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from realnodes import Node

from swarmnode.node.control.client import ControlClient
from swarmnode.node.guest import weigh

RUN = """
[run]
name = "caps"
[model]
layers = {layers}
heads = 4
width = {width}
context = 64
[inner]
batch = {batch}
steps = {steps}
warmup = 0
[exchange]
codec = "fp32"
"""
HUNGRY = """
import torch
from torch import nn

class Hungry:
    tokens_per_sample = 1
    loss_unit = "squared error"

    def __init__(self, spec, assignment, device="cpu"):
        self.model, self.kept = nn.Linear(64, 64), []

    def feed(self, texts):
        pass

    def draw(self, batch, generator):
        self.kept.append(torch.ones(2 << 20))  # 8 MiB a step
        return torch.rand(batch, 64, generator=generator)

    def loss(self, batch):
        return self.model(batch).square().mean()

    def evaluate(self, *, thorough):
        return 1.0

    def sample(self, prompt, *, length, temperature, seed):
        return b""
"""
PARTS = ("cpu", "up", "down", "disk", "memory", "cpu_rounds", "up_rounds", "checkpoints", "pause", "long")
CORES = len(os.sched_getaffinity(0))
FLAGS = ("--listen", "127.0.0.1", "--no-mdns", "--no-upnp", "--threads", "2", "--nice", "0")
PATIENCE = 120.0  # s


class Daemon(Node):
    """A node, its trainer, and what it says to who asks."""

    def __init__(self, home: Path, corpus: Path, *arguments: str) -> None:
        super().__init__(home, *arguments, corpus=corpus, flags=FLAGS)
        self.start()

    def rounds(self, since: float, until: float = float("inf")) -> list[float]:
        """Seconds of the rounds that ended then."""
        return [event["seconds"] for at, event in self.timed("round") if since <= at < until]

    def call(self, method: str, **params: Any) -> Any:
        return ControlClient(self.home).call(method, timeout=600.0, **params)

    @property
    def trainer(self) -> int | None:
        pid: int | None = self.call("status")["trainer"]["pid"]
        return pid

    def cpu_seconds(self, trainer: int) -> float:
        return sum(cpu_seconds(pid) for pid in (self.process.pid, trainer))

    def stop(self) -> float:
        """Seconds that it took to end."""
        began = time.monotonic()
        self.send(signal.SIGINT)
        self.wait(PATIENCE)
        return round(time.monotonic() - began, 2)


def until_quiet(daemon: Daemon, trainer: int) -> float:
    """Seconds until trainer and daemon together take less than 5 % of a core."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        before, at = daemon.cpu_seconds(trainer), time.monotonic()
        time.sleep(0.25)
        if (daemon.cpu_seconds(trainer) - before) / (time.monotonic() - at) < 0.05:
            return round(at - began, 2)
    return float("inf")


def of_cpu(node: Daemon, seconds: float, percent: float) -> dict[str, float]:
    node.call("caps", cpu=percent)
    time.sleep(2)
    trainer = node.trainer
    assert trainer is not None
    before, began = node.cpu_seconds(trainer), time.monotonic()
    time.sleep(seconds)
    share = (node.cpu_seconds(trainer) - before) / (time.monotonic() - began) / CORES
    node.call("caps", cpu=None)
    return {"cap_percent": percent, "took_percent": round(100 * share, 2), "ratio": round(100 * share / percent, 3)}


def of_rate(node: Daemon, seconds: float, direction: str, cap: float) -> dict[str, float]:
    node.call("caps", **{direction: cap})
    time.sleep(5)
    counted = "bytes_out" if direction == "up" else "bytes_in"
    before, began = node.call("status")["traffic"][counted], time.monotonic()
    time.sleep(seconds)
    taken = node.call("status")["traffic"][counted] - before
    rate = 8e-6 * taken / (time.monotonic() - began)
    node.call("caps", **{direction: None})
    return {"cap_mbit_s": cap, "took_mbit_s": round(rate, 3), "ratio": round(rate / cap, 3)}


def of_transfer(giver: Daemon, taker: Daemon, seconds: float, direction: str, cap: float) -> dict[str, float]:
    """While a shard travels that takes longer than that."""
    source = giver.home.with_suffix(".shard")
    source.write_bytes(random.randbytes(int(1.3 * (seconds + 5) * cap * 125_000)))
    shard = giver.call("shards_put", path=str(source))["id"]
    with ThreadPoolExecutor() as pool:
        node = giver if direction == "up" else taker
        node.call("caps", **{direction: cap})
        got = pool.submit(taker.call, "shards_get", shard=shard)
        found = of_rate(node, seconds, direction, cap)
        got.result()
    return found


def of_shards(node: Daemon, cap: float) -> dict[str, float]:
    """The most that a node takes of the disk while it is given shards, half as much again as there is room for."""
    node.call("caps", disk=cap)
    source, piece = node.home.with_suffix(".shard"), 8 << 20
    most = 0
    for _ in range(int(1.5 * (cap * 1e9 - weigh(node.home)) / piece)):
        source.write_bytes(random.randbytes(piece))
        node.call("shards_put", path=str(source))
        most = max(most, weigh(node.home))
    node.call("caps", disk=None)
    return {"cap_gb": cap, "most_gb": round(most / 1e9, 4), "ratio": round(most / 1e9 / cap, 3)}


def of_checkpoints(node: Daemon, seconds: float, cap: float) -> dict[str, Any]:
    node.call("caps", disk=cap)
    most, began = 0, time.monotonic()
    rounds = len(node.rounds(0))
    while time.monotonic() - began < seconds:
        most = max(most, weigh(node.home))
        time.sleep(0.2)
    status = node.call("status")
    node.call("caps", disk=None)
    told = {
        "checkpoints_written": len(node.rounds(0)) - rounds,
        "held_at_the_end": [h["cause"] for h in status["holds"]],
    }
    return {"cap_gb": cap, "most_gb": round(most / 1e9, 4), "ratio": round(most / 1e9 / cap, 3), **told}


def of_memory(folder: Path, corpus: Path, seconds: float, cap: float) -> dict[str, Any]:
    """Of a task that asks for more with each step: the trainer ends at the cap, and is started again."""
    (folder / "hungry.py").write_text(HUNGRY)
    run = folder / "hungry.toml"
    run.write_text('[run]\nname = "hungry"\n[task]\nname = "hungry"\n[inner]\nsteps = 1000\nbatch = 1\nwarmup = 0\n')
    node = Daemon(folder / "hungry", corpus, str(run), "--task", f"{folder}/hungry.py:Hungry", "--memory", str(cap))
    node.wait_for("ready", within=PATIENCE)
    most, asked, began = 0, 0, time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            text = Path(f"/proc/{node.trainer}/status").read_text()
            told = {name: 1024 * int(rest.split()[0]) for name, rest in re.findall(r"(Vm\w+|Rss\w+):(.*)", text)}
            most, asked = max(most, told["RssAnon"]), max(asked, told["VmData"])
        except (OSError, KeyError):
            pass
        time.sleep(0.02)
    restarts = node.call("status")["trainer"]["restarts"]
    node.stop()
    return {
        "cap_gb": cap,
        "most_gb": round(most / 1e9, 4),
        "ratio": round(most / 1e9 / cap, 3),
        "ratio_with_what_was_not_touched": round(asked / 1e9 / cap, 3),
        "restarts": restarts,
    }


def of_pause(node: Daemon, other: Daemon, times: int) -> dict[str, Any]:
    taken: list[float] = []
    usual: list[float] = []
    first: list[float] = []
    meanwhile: list[float] = []
    for _ in range(times):
        other.next_round(within=PATIENCE)
        began = time.monotonic()
        time.sleep(random.uniform(8, 12))
        trainer, asked = node.trainer, time.monotonic()
        assert trainer is not None
        usual += other.rounds(began, asked)
        node.call("pause")
        taken.append(round(time.monotonic() - asked + until_quiet(node, trainer), 2))
        time.sleep(12)
        alone = other.rounds(asked)
        first.append(alone[0])
        meanwhile += alone[1:]
        node.call("resume")
        node.next_round(within=PATIENCE)
    return {
        "quiet_after_s": taken,
        "others_round_before_s": round(median(usual), 2),
        "others_round_in_hand_s": first,
        "others_round_meanwhile_s": round(median(meanwhile), 2),
    }


def of_long_steps(node: Daemon) -> dict[str, Any]:
    trainer, asked = node.trainer, time.monotonic()
    assert trainer is not None
    node.call("pause")
    quiet = round(time.monotonic() - asked + until_quiet(node, trainer), 2)
    node.call("resume")
    time.sleep(2)
    back = cpu_seconds(trainer)
    time.sleep(1)
    return {"quiet_after_s": quiet, "works_again": cpu_seconds(trainer) > back}


def with_a_pair(folder: Path, corpus: Path, wanted: set[str], seconds: float) -> dict[str, Any]:
    run = folder / "run.toml"
    run.write_text(RUN.format(layers=2, width=256, batch=4, steps=20))
    one = Daemon(folder / "one", corpus, str(run), "--wait-peers", "1")
    ready = one.wait_for("ready", within=PATIENCE)
    join = ("--join", ready["multiaddr"], "--run", ready["run_id"])
    two = Daemon(folder / "two", corpus, *join, "--checkpoint-every", "1", "--checkpoint-keep", "1000")
    two.wait_for("round", within=PATIENCE)
    in_rounds: dict[str, Callable[[], Any]] = {
        "pause": lambda: of_pause(two, one, 3),
        "cpu_rounds": lambda: of_cpu(two, seconds, 25),
        "up_rounds": lambda: of_rate(two, seconds, "up", 8.0),
        "checkpoints": lambda: of_checkpoints(two, seconds, round(weigh(two.home) / 1e9 + 0.1, 2)),
    }
    paused: dict[str, Callable[[], Any]] = {
        "up": lambda: of_transfer(two, one, seconds, "up", 8.0),
        "down": lambda: of_transfer(two, one, seconds, "down", 8.0),
        "disk": lambda: of_shards(two, round(weigh(two.home) / 1e9 + 0.3, 2)),
    }
    try:
        found = {name: measure() for name, measure in in_rounds.items() if name in wanted}
        if wanted & paused.keys():
            one.call("pause")
            two.call("pause")
        return found | {name: measure() for name, measure in paused.items() if name in wanted}
    finally:
        print("stopped after", two.stop(), "and", one.stop(), "s", file=sys.stderr)


def with_long_steps(folder: Path, corpus: Path, wanted: set[str], seconds: float) -> dict[str, Any]:
    run = folder / "long.toml"
    run.write_text(RUN.format(layers=6, width=512, batch=256, steps=100))
    node = Daemon(folder / "long", corpus, str(run))
    node.wait_for("ready", within=PATIENCE)
    time.sleep(5)
    parts: dict[str, Callable[[], Any]] = {
        "cpu": lambda: [of_cpu(node, seconds, cap) for cap in (10, 25)],
        "long": lambda: of_long_steps(node),
    }
    try:
        return {name: measure() for name, measure in parts.items() if name in wanted}
    finally:
        print("stopped after", node.stop(), "s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    asked = parser.parse_args()
    wanted, seconds = set(asked.only), asked.seconds
    found: dict[str, Any] = {"cores": CORES, "seconds": seconds, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="caps-") as made:
        folder = Path(made)
        corpus = folder / "text"
        corpus.write_bytes(random.Random(1).randbytes(150_000).hex().encode())
        if wanted - {"cpu", "long", "memory"}:
            found |= with_a_pair(folder, corpus, wanted, seconds)
        if wanted & {"cpu", "long"}:
            found |= with_long_steps(folder, corpus, wanted, seconds)
        if "memory" in wanted:
            found["memory"] = of_memory(folder, corpus, min(30.0, seconds), 1.0)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
