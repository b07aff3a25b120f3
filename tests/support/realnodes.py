"""Real nodes for end-to-end tests: the installed program as processes on loopback, and what they say.

    with Node(tmp_path / "a", run_file, "--rounds", "3", corpus=corpus) as node:
        assert node.wait_for("round")["state_hash"]

Events come from standard output; what is for people is in `log()`. Every process started here is gone at the end of its
block, its trainer with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from swarmnode.node.process import AS_ROOT

PROGRAM = Path(sys.executable).with_name("swarmnode")
LOCAL = ("--listen", "127.0.0.1", "--no-mdns", "--threads", "1", "--nice", "0")
PATIENCE = 60.0  # s for anything; other tests and programs use the machine as well

# Rounds of about half a second, so that there is a middle of a round to strike in.
RUN_TOML = """
[run]
name = "tiny"
seed = 3
[model]
layers = 1
heads = 2
width = 32
context = 32
[inner]
batch = 2
steps = 100
warmup = 2
[exchange]
deadline_floor = 1.0
deadline_ceiling = 10.0
"""

Event = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    """The test's environment without settings of a node, but that its trainer has the same right to a core as tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
    return {**kept, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "SWARMNODE_NICE": "0", **more}


def swarmnode(*arguments: str | Path, timeout: float = PATIENCE, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its code, output and errors."""
    return subprocess.run(
        [str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env=environment(**environ),
    )


class Node:
    """One `swarmnode run … --json`. `start` may be called again after its end: the same command once more."""

    def __init__(
        self,
        home: Path,
        *arguments: str | Path,
        corpus: Path | None,
        port: int = 0,
        program: Sequence[str] = (str(PROGRAM),),
        flags: tuple[str, ...] = LOCAL,
    ) -> None:
        """Without a `corpus` it takes the usual one; `flags` say where it listens and what it may take."""
        self.home = home
        self.command = [*program, "run", *map(str, arguments), "--data-dir", str(home), "--port", str(port), *flags]
        self.command += [*(("--corpus", str(corpus)) if corpus is not None else ()), "--json"]
        self.events: list[Event] = []
        self._times: list[float] = []  # time.monotonic() at which each came
        self._heard = threading.Condition()
        self._log = home.with_suffix(".log")

    def start(self) -> Node:
        self.events, self._times = [], []
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment()
            )
        threading.Thread(target=self._read, args=(self.process, self.events, self._times), daemon=True).start()
        return self

    def __enter__(self) -> Node:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _read(self, process: subprocess.Popen[bytes], events: list[Event], times: list[float]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in chain(lines, [b'{"event": "eof"}']):
                with self._heard:
                    events.append(json.loads(line))
                    times.append(time.monotonic())
                    self._heard.notify_all()

    def timed(self, kind: str) -> list[tuple[float, Event]]:
        """The events of a kind so far, each with the time.monotonic() at which it came."""
        with self._heard:
            return [(at, event) for at, event in zip(self._times, self.events, strict=True) if event["event"] == kind]

    def wait_for(
        self, kind: str, fits: Callable[[Event], bool] = lambda event: True, *, since: int = 0, within: float = PATIENCE
    ) -> Event:
        """The first event of a kind that fits, among those after the first `since`."""

        def found() -> Event | None:
            return next((e for e in self.events[since:] if e["event"] == kind and fits(e)), None)

        with self._heard:
            self._heard.wait_for(lambda: found() or self._is_over(), timeout=within)
            event = found()
        assert event is not None, f"no {kind} from {self.home.name}; it said {self.events[-3:]}\n{self.log()}"
        return event

    def _is_over(self) -> bool:
        return bool(self.events) and self.events[-1]["event"] == "eof"

    @property
    def ready(self) -> Event:
        return self.wait_for("ready")

    def states(self) -> dict[int, str]:
        """State hash by the number of rounds that are in the state, as this node told them since its start."""
        told = {e["round"] + 1: e["state_hash"] for e in list(self.events) if e["event"] == "round"}
        return told | {e["round"]: e["state_hash"] for e in list(self.events) if e["event"] == "caught_up"}

    def next_round(self, *, after: int = 0, within: float = PATIENCE) -> Event:
        """The first round that ends from now on, or the `after`-th one from now."""
        seen = len(self.events)
        for _ in range(after):
            seen = self.events.index(self.wait_for("round", since=seen, within=within)) + 1
        return self.wait_for("round", since=seen, within=within)

    def command_line(self, *arguments: str) -> Any:
        """What a command with --json says of this node."""
        done = swarmnode(*arguments, "--data-dir", self.home, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, within: float = PATIENCE) -> int:
        """The exit code, after the last event was read."""
        code = self.process.wait(within)
        self.wait_for("eof")
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGINT)
            self.send(signal.SIGCONT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def log(self) -> str:
        """What it said to people."""
        return self._log.read_text(encoding="utf-8", errors="replace")


def agree(*nodes: Node) -> int:
    """The number of states that two nodes or more told; each must be the same everywhere."""
    told = [node.states() for node in nodes]
    shared = [r for r in {r for states in told for r in states} if sum(r in states for states in told) > 1]
    for r in shared:
        assert len({states[r] for states in told if r in states}) == 1, f"after {r} rounds nodes hold different states"
    return len(shared)


def warnings_of(node: Node) -> list[str]:
    """What the node warns of, but for that it runs as root, as tests may."""
    told: list[str] = node.command_line("status")["warnings"]
    return [text for text in told if text != AS_ROOT]


def children(pid: int) -> list[int]:
    """The processes that one has started: of a daemon, its trainer."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for task in tasks for child in map(int, task.read_text().split())]


def peak_mib(pid: int) -> int:
    """The most memory that a process had so far, parameters included that it shares with another."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM"))


def until(condition: Callable[[], bool], *, within: float = PATIENCE) -> None:
    """Wait for what has no event: another process's state."""
    give_up = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up, "it did not come to be"
        time.sleep(0.05)
