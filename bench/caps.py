"""What each cap of a node does, measured over a minute on real nodes on loopback; prints JSON.

    .venv/bin/python bench/caps.py --seconds 60

Each figure is what was taken divided by the cap: 1 is exactly the cap. `pause` gives the seconds from the request until
the node's processes took no CPU, in short steps and in the middle of one that takes longer, and what the rounds of the
other node took before it and during it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

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
TICK = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))
FLAGS = ("--listen", "127.0.0.1", "--port", "0", "--no-mdns", "--no-upnp", "--threads", "2", "--nice", "0", "--json")


class Daemon:
    """One `swarmnode run`, with the events that it told and when they came."""

    def __init__(self, home: Path, corpus: Path, *arguments: str) -> None:
        self.home = home
        command = [sys.executable, "-m", "swarmnode", "run", *arguments, *FLAGS]
        command += ["--data-dir", str(home), "--corpus", str(corpus)]
        with home.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.events: list[tuple[float, dict[str, Any]]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append((time.monotonic(), json.loads(line)))

    def wait_for(self, kind: str, since: float = 0.0) -> dict[str, Any]:
        for _ in range(2400):
            for at, event in list(self.events):
                if event["event"] == kind and at >= since:
                    return event
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"no {kind}: {self.home.with_suffix('.log').read_text()[-2000:]}")

    def rounds(self, since: float, until: float = float("inf")) -> list[float]:
        """Seconds of the rounds that ended then."""
        return [e["seconds"] for at, e in list(self.events) if e["event"] == "round" and since <= at < until]

    def call(self, method: str, **params: Any) -> Any:
        return ControlClient(self.home).call(method, timeout=60.0, **params)

    @property
    def trainer(self) -> int | None:
        pid: int | None = self.call("status")["trainer"]["pid"]
        return pid

    def cpu_seconds(self, trainer: int) -> float:
        return sum(cpu_seconds(pid) for pid in (self.process.pid, trainer))

    def stop(self) -> float:
        """Seconds that it took to end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)
        return round(time.monotonic() - began, 2)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


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


def of_disk(node: Daemon, seconds: float, cap: float) -> dict[str, Any]:
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
    node.wait_for("ready")
    most, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            lines = Path(f"/proc/{node.trainer}/status").read_text().splitlines()
            most = max([most, *(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        except OSError:
            pass
        time.sleep(0.02)
    restarts = node.call("status")["trainer"]["restarts"]
    node.stop()
    return {"cap_gb": cap, "most_gb": round(most / 1e9, 4), "ratio": round(most / 1e9 / cap, 3), "restarts": restarts}


def of_pause(node: Daemon, other: Daemon, times: int) -> dict[str, Any]:
    taken: list[float] = []
    usual: list[float] = []
    first: list[float] = []
    meanwhile: list[float] = []
    for _ in range(times):
        other.wait_for("round", time.monotonic())
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
        node.wait_for("round", time.monotonic())
    return {
        "quiet_after_s": taken,
        "others_round_before_s": round(median(usual), 2),
        "others_round_in_hand_s": first,
        "others_round_meanwhile_s": round(median(meanwhile), 2),
    }


def of_long_steps(folder: Path, corpus: Path) -> dict[str, Any]:
    run = folder / "long.toml"
    run.write_text(RUN.format(layers=6, width=512, batch=256, steps=100))
    node = Daemon(folder / "long", corpus, str(run))
    node.wait_for("ready")
    trainer = node.trainer
    assert trainer is not None
    time.sleep(5)
    asked = time.monotonic()
    node.call("pause")
    quiet = round(time.monotonic() - asked + until_quiet(node, trainer), 2)
    node.call("resume")
    time.sleep(2)
    back = cpu_seconds(trainer)
    time.sleep(1)
    return {"quiet_after_s": quiet, "works_again": cpu_seconds(trainer) > back, "stopped_after_s": node.stop()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--only", nargs="*", help="cpu, up, down, disk, pause, long, memory")
    asked = parser.parse_args()
    wanted = set(asked.only or ("cpu", "up", "down", "disk", "pause", "long", "memory"))
    found: dict[str, Any] = {"cores": CORES, "seconds": asked.seconds, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="caps-") as made:
        folder = Path(made)
        corpus = folder / "text"
        corpus.write_bytes(random.Random(1).randbytes(150_000).hex().encode())
        if wanted - {"long", "memory"}:
            (folder / "run.toml").write_text(RUN.format(layers=2, width=256, batch=4, steps=20))
            one = Daemon(folder / "one", corpus, str(folder / "run.toml"), "--wait-peers", "1")
            ready = one.wait_for("ready")
            join = ("--join", ready["multiaddr"], "--run", ready["run_id"])
            two = Daemon(folder / "two", corpus, *join, "--checkpoint-every", "1", "--checkpoint-keep", "1000")
            try:
                two.wait_for("round")
                found["pause"] = of_pause(two, one, 3) if "pause" in wanted else None
                found["cpu"] = [of_cpu(two, asked.seconds, cap) for cap in (10, 25)] if "cpu" in wanted else None
                found["up"] = of_rate(two, asked.seconds, "up", 8.0) if "up" in wanted else None
                found["down"] = of_rate(two, asked.seconds, "down", 8.0) if "down" in wanted else None
                room = round(weigh(two.home) / 1e9 + 0.1, 2)
                found["disk"] = of_disk(two, asked.seconds, room) if "disk" in wanted else None
            finally:
                found["stopped_after_s"] = [two.stop(), one.stop()]
        if "long" in wanted:
            found["long_steps"] = of_long_steps(folder, corpus)
        if "memory" in wanted:
            found["memory"] = of_memory(folder, corpus, min(30.0, asked.seconds), 1.0)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
