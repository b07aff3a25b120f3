"""Starts N daemons as processes on loopback, reads their JSON events and watches over them until the last round.

Each node is an ordinary `swarmnode run` with a data directory of its own. Node 0 creates the run and waits for the
others; they join it by its address. One thread a node reads its standard output into one queue, and the caller iterates
over `LocalSwarm.watch()`. Nobody is restarted:

- a node that dies is dead, the others go on; `SwarmFailed` is raised only when none is left and none reached the end;
- a node that is stopped (SIGSTOP) is waited for `FROZEN_PATIENCE`, a thawed one that catches up for
  `CATCH_UP_PATIENCE`, counted from the moment at which all others are done;
- every process started here is gone when `stop()` returns, and dies with this process if that is killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from swarmnode.cli.init import is_brought
from swarmnode.node.config import OFF
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.training.runspec import BYTES_UNIT

NODE = (sys.executable, "-P", "-m", "swarmnode")  # independent of PATH and of the folder that one is in
LIAR = (sys.executable, "-P", "-m", "swarmnode.testing.adversary")  # which only a swarm like this one starts
TICK = 0.25  # s; how often the state of the processes is looked at when no event comes
START_LIMIT = 180.0  # s until a node must be ready: importing torch in many processes on few cores is slow
FROZEN_PATIENCE = 4.0  # s; a stopped process may stay stopped for ever
CATCH_UP_PATIENCE = 20.0  # s; a thawed node fetches the parameters once and reports within a round or two
SILENCE_PATIENCE = 120.0  # s without an event after the others are done; the longest deadline of an exchange by default
STOP_PATIENCE = 5.0  # s between SIGINT and SIGKILL
CONFIG = """# Written by `swarmnode local`: `swarmnode run --data-dir DIRECTORY` starts this node again as it was.
port = 0
listen = "127.0.0.1"
mdns = false
threads = {threads}
join = [{join}]
"""
ASK_WITHIN = 2.0  # s for a node to answer; a frozen one is not asked
EVIDENCE = ("found", "audits", "words")  # for a score, which is too long for the report
ANSWERS = 8  # groups of answers, of those that policies share, that the report shows of a node
RECENT = 5  # rounds that the time left is estimated from
LOG_TAIL = 12  # lines of a node's log that are quoted when it failed

# Settings in the environment that would tie a local swarm to other nodes, or keep its nodes from training.
_FOREIGN = {"JOIN", "BOOTSTRAP", "ANNOUNCE", "ROLE", "WAIT_PEERS", "HOURS", "ONLY_WHEN_IDLE", "NOT_ON_BATTERY"}
_FOREIGN |= {"TEMPERATURE", "DISK"}

# Runs first in a child: asks the kernel to kill it when its parent dies (prctl 1 is PR_SET_PDEATHSIG; the setting
# survives exec), ends if the parent is gone already, and becomes the node. This is not done by preexec_fn, which runs
# Python between fork and exec and can deadlock in a process with threads.
_TIE = """
import ctypes, os, sys
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """`command` for a child that the kernel kills when this process dies; as it is where only Linux could.

    Start it from a thread that lives as long: its end counts as the parent's death.
    """
    if sys.platform != "linux":
        return [*command]
    # -I -S: no user site, no environment, for a start in a few milliseconds.
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


class SwarmFailed(ExpectedError):
    """A node was not ready in time, or no node is left and none reached the last round. The text quotes the logs."""


@dataclass(frozen=True)
class RoundReport:
    """One round as one node ended it.

    `loss` is held-out bits per byte of the shared parameters, None if not finite; `reward`, of a node's own policy on
    its own answers, takes its place in a run by rollouts.
    """

    round: int
    loss: float | None
    state_hash: str | None
    seconds: float
    bytes_in: int
    bytes_out: int
    compute_seconds: float  # wall time of the trainer inside inner steps
    tokens: int
    ended_at: float  # this process's monotonic clock when the report was read; comparable between nodes
    reward: float | None = None  # 0 to 1
    learned_from: int = 0  # peers
    apart: float | None = None  # of a node's own parameters from another's; None where all have the same

    @property
    def measured(self) -> float | None:
        return self.loss if self.reward is None else self.reward


def round_report(event: Mapping[str, Any], *, ended_at: float) -> RoundReport:
    learned = event.get("learned") or {}
    told = ("round", "loss", "seconds", "bytes_in", "bytes_out", "compute_seconds", "tokens")
    return RoundReport(
        **{name: event[name] for name in told},
        state_hash=event["state_hash"] or None,
        ended_at=ended_at,
        reward=learned.get("reward"),
        apart=event.get("apart"),
        learned_from=learned.get("authors", 0),
    )


@dataclass(frozen=True)
class Attack:
    """So many of the nodes, the last ones, tell this lie."""

    lie: str
    liars: int


@dataclass
class WorkTally:
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    last: str = ""  # what the last round said of it
    score: float | None = None  # median of what honest nodes say
    weight: float | None = None


@dataclass(frozen=True)
class LocalOptions:
    nodes: int
    rounds: int
    run_file: Path | None = None  # None is the built-in byte-lm run
    solo: bool = False
    json: bool = False
    threads: int = 1  # of each trainer
    report: Path = Path("report")
    keep: bool = False
    data_dir: Path | None = None  # None is a temporary folder, removed at the end
    attack: Attack | None = None  # by the last nodes
    dashboard: str = OFF  # HOST:PORT of the page that shows all nodes
    task: str = ""  # what is learned, or the file with it that each node brings
    policy: str = ""  # of all nodes, where it is a folder of this machine
    loss_unit: str = BYTES_UNIT


class NodeProcess:
    """One daemon: its process, what it said of itself, and its rounds so far."""

    def __init__(self, label: str, data_dir: Path, lie: str = "") -> None:
        self.label = label
        self.lie = lie  # empty for an honest node
        self.data_dir = data_dir
        self.log_file = data_dir.with_name(f"{data_dir.name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: Mapping[str, Any] | None = None
        self.reports: list[RoundReport] = []
        self.rounds: list[dict[str, Any]] = []  # the events of the same, with `time`, for the report
        self.told: dict[str, Any] = {}  # what it said of itself and the others before it was stopped
        self.finished = False  # has ended the last round
        self.frozen = False
        self.thawed_at: float | None = None
        self.last_event_at = 0.0
        self.tally = WorkTally()  # what honest nodes make of its work, where some lie
        self.state_at_end: str | None = None  # set when the swarm is stopped; what ends a node then is no death

    @property
    def peer_id(self) -> str:
        """Empty until it is ready."""
        return str((self.ready or {}).get("peer_id", ""))

    @property
    def last(self) -> RoundReport | None:
        return self.reports[-1] if self.reports else None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def state(self) -> str:
        """starting, training, frozen, finished or dead."""
        if self.state_at_end is not None:
            return self.state_at_end
        if self.process is not None and not self.alive:
            return "dead"
        if self.frozen:
            return "frozen"
        if self.finished:
            return "finished"
        return "training" if self.ready is not None else "starting"

    def start(self, command: Sequence[str], events: queue.Queue[tuple[NodeProcess, float, bytes]]) -> None:
        """Start the process and the thread that reads its events. From the main thread only: `tied_to_parent`."""
        environment = {key: os.environ[key] for key in os.environ.keys() - {f"SWARMNODE_{name}" for name in _FOREIGN}}
        with self.log_file.open("ab") as log:
            # A process group of its own keeps the terminal's Ctrl-C away from the node: it would arrive beside the
            # SIGINT of `stop()`, and a second SIGINT forces a node to end without goodbye.
            self.process = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                process_group=0,
            )
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout, events), daemon=True).start()

    def _read(self, lines: IO[bytes], events: queue.Queue[tuple[NodeProcess, float, bytes]]) -> None:
        with lines:
            for line in lines:
                events.put((self, time.monotonic(), line))

    def look(self, now: float) -> None:
        """Note whether the process is stopped (SIGSTOP) or has been thawed. Without /proc nobody can tell."""
        frozen = False
        with suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]  # a name may hold blanks and brackets
            frozen = self.alive and stat.split()[0] in "Tt"
        if self.frozen and not frozen:
            self.thawed_at = now
        self.frozen = frozen

    def ask(self, method: str, **params: Any) -> dict[str, Any] | None:
        if not self.alive or self.frozen:
            return None
        try:
            return ControlClient(self.data_dir).call(method, timeout=ASK_WITHIN, **params)
        except (ControlError, NotRunning, OSError):
            return None

    def portray(self) -> None:
        """Ask it for all that the report shows of it."""
        if (status := self.ask("status")) is None:
            return
        counted = (self.ask("metrics") or {}).get("metrics", ())
        listed = (self.ask("rollouts_ls", limit=ANSWERS) or {}).get("groups", ())
        scored = (self.ask("scores", why=True) or {}).get("peers", ())
        self.told = {
            "status": status,
            "peers": self.ask("peers"),
            "scores": {"peers": [{key: one[key] for key in one.keys() - EVIDENCE} for one in scored]},
            "shards": self.ask("shards_ls"),
            "history": self.ask("history") or {},
            "metrics": [metric for metric in counted if metric["name"].endswith("_total")],
            "pool": self.ask("rollouts_pool") if listed else None,
            "answered": self.ask("rollouts_stats") if listed else None,
            "groups": [group for each in listed if (group := self.ask("rollouts_show", id=each["id"]))],
        }

    def log_tail(self) -> str:
        """The last lines of the node's log, indented, for an error message."""
        try:
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"    (log cannot be read: {error})"
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL:]) or "    (its log is empty)"

    def how_it_ended(self) -> str:
        code = None if self.process is None else self.process.poll()
        if code is None:
            return "is still running"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class LocalSwarm(AbstractContextManager["LocalSwarm"]):
    """N daemons on loopback. Use as `with LocalSwarm(…) as swarm: swarm.start(); for event in swarm.watch(): …`."""

    def __init__(self, options: LocalOptions, folder: Path, *, name: str = "node") -> None:
        """Node i lives in `folder/NAME-i`, its log is `folder/NAME-i.log`; all train the run of `folder/run.toml`."""
        self.options = options
        self._run_file = folder / "run.toml"
        honest = options.nodes - (options.attack.liars if options.attack is not None else 0)
        lie = options.attack.lie if options.attack is not None else ""
        self.nodes = [
            NodeProcess(str(index) if name == "node" else name, folder / f"{name}-{index}", lie * (index >= honest))
            for index in range(options.nodes)
        ]
        self._events: queue.Queue[tuple[NodeProcess, float, bytes]] = queue.Queue()
        self._held_back: list[tuple[NodeProcess, dict[str, Any]]] = []
        self._others_done_at: float | None = None

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def parameters(self) -> int:
        """Parameters of the model as the nodes reported them; 0 until one has."""
        return max((int(node.ready.get("parameters") or 0) for node in self.nodes if node.ready), default=0)

    @property
    def reports(self) -> list[list[RoundReport]]:
        return [node.reports for node in self.nodes]

    @property
    def done(self) -> int:
        """Rounds that the furthest node has done, since the first that any of them reported."""
        return max(map(self.done_by, self.nodes))

    def done_by(self, node: NodeProcess) -> int:
        first = min((node.reports[0].round for node in self.nodes if node.reports), default=0)
        return 0 if node.last is None else node.last.round - first + 1

    @property
    def seconds_left(self) -> float | None:
        """Until the last round, by the usual length of a round lately; None before there is one."""
        lengths = [report.seconds for node in self.nodes for report in node.reports[-RECENT:]]
        return median(lengths) * max(0, self.options.rounds - self.done) if lengths else None

    def start(self) -> Iterator[NodeProcess]:
        """Start all nodes; yields each as soon as it is ready. Raises SwarmFailed."""
        creator, *others = self.nodes
        self._start(creator, [str(self._run_file), "--wait-peers", str(len(others))])
        yield from self._until_ready([creator])
        if others:
            assert creator.ready is not None
            run = ["--run", str(creator.ready["run_id"])] if creator.ready.get("run_id") else []
            for node in others:
                self._start(node, run, join=str(creator.ready.get("multiaddr")))
            yield from self._until_ready(others)

    def _start(self, node: NodeProcess, what: Sequence[str], *, join: str = "") -> None:
        node.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        named = f'"{join}"' if join else ""
        (node.data_dir / "config.toml").write_text(CONFIG.format(threads=self.options.threads, join=named))
        # as flags too: the environment of whoever runs `local` must not move a node elsewhere
        options = ["--data-dir", str(node.data_dir), "--port", "0", "--listen", "127.0.0.1", "--no-mdns"]
        options += ["--threads", str(self.options.threads), "--rounds", str(self.options.rounds)]
        options += ["--stay", "--json", "--no-dashboard", *(["--join", join] if join else [])]
        options += ["--task", self.options.task] if is_brought(self.options.task) else []
        options += ["--policy", self.options.policy] if self.options.policy else []
        program = [*LIAR, node.lie] if node.lie else NODE
        node.start([*program, "run", *what, *options], self._events)

    def _until_ready(self, nodes: Sequence[NodeProcess]) -> Iterator[NodeProcess]:
        give_up = time.monotonic() + START_LIMIT
        waiting = list(nodes)
        while waiting:
            for node, event in self._next_events():
                if event["event"] != "ready":
                    self._held_back.append((node, event))  # a round may end before the slowest node is ready
            for node in [node for node in waiting if node.ready is not None]:
                waiting.remove(node)
                yield node
            for node in waiting:
                if not node.alive:
                    raise SwarmFailed(
                        f"node {node.label} {node.how_it_ended()} before it was ready; its log ends:\n{node.log_tail()}"
                    )
                if time.monotonic() > give_up:
                    raise SwarmFailed(
                        f"node {node.label} was not ready within {START_LIMIT:.0f} s; try fewer nodes. "
                        f"Its log ends:\n{node.log_tail()}"
                    )

    def watch(self) -> Iterator[tuple[NodeProcess, dict[str, Any]] | None]:
        """The nodes' events in the order of their arrival, with None after each batch and each tick without any, until
        every node that can reach the last round has. Raises SwarmFailed."""
        yield from self._held_back
        self._held_back.clear()
        while True:
            events = self._next_events()
            yield from events
            yield None
            now = time.monotonic()
            for node in self.nodes:
                node.look(now)
            if events:
                continue  # an exited node's last events may still be in the queue
            if not any(node.alive or node.finished for node in self.nodes if not node.lie):
                raise SwarmFailed(
                    "all nodes died before the last round; their logs end:\n"
                    + "\n".join(f"  node {n.label} {n.how_it_ended()}:\n{n.log_tail()}" for n in self.nodes)
                )
            if not self._someone_to_wait_for(now):
                return

    def _someone_to_wait_for(self, now: float) -> bool:
        late = [node for node in self.nodes if node.alive and not node.finished and not node.lie]
        if not late:
            return False
        if not any(node.finished for node in self.nodes):
            return True  # all that are left are frozen, or training: only they can end the run
        never_frozen = [node for node in late if not node.frozen and node.thawed_at is None]
        if any(now - node.last_event_at < SILENCE_PATIENCE for node in never_frozen):
            self._others_done_at = None  # who is heard of is waited for as long as it takes
            return True
        if self._others_done_at is None:
            self._others_done_at = now
        return any(now < self._others_done_at + _patience(node) for node in late)

    def _next_events(self) -> list[tuple[NodeProcess, dict[str, Any]]]:
        """What is in the queue; waits one tick for the first. Notes what the events say about their nodes."""
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._events.get(timeout=TICK))
            while True:
                arrived.append(self._events.get_nowait())
        return [(node, self._understand(node, at, line)) for node, at, line in arrived]

    def _understand(self, node: NodeProcess, at: float, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "round":
                node.reports.append(round_report(event, ended_at=at))
                node.rounds.append({**event, "time": time.time()})
        except (ValueError, TypeError, KeyError) as error:
            return {"event": "warning", "message": f"unreadable line on standard output: {error}: {line[:200]!r}"}
        node.last_event_at = at
        if kind == "ready":
            node.ready = event
        node.finished = node.finished or kind == "finished"
        return dict(event)

    def survivors(self) -> list[NodeProcess]:
        """Nodes that ended the last round and can be asked."""
        return [node for node in self.nodes if node.finished and node.alive and not node.frozen]

    def stop(self) -> None:
        """Have them tell what the report shows, then end all nodes: SIGINT, and SIGKILL for what is left after
        `STOP_PATIENCE`, their trainers included.
        """
        for node in self.nodes:
            node.state_at_end = node.state
        running = [node.process for node in self.nodes if node.process is not None and node.process.poll() is None]
        try:
            for node in self.nodes:
                node.portray()
            for process in running:
                process.send_signal(signal.SIGINT)  # to nobody, where it has ended meanwhile
                process.send_signal(signal.SIGCONT)  # a stopped one ends too
            give_up = time.monotonic() + STOP_PATIENCE
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, give_up - time.monotonic()))
        finally:  # a second Ctrl-C arrives here as KeyboardInterrupt
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _patience(node: NodeProcess) -> float:
    if node.frozen:
        return FROZEN_PATIENCE
    return CATCH_UP_PATIENCE if node.thawed_at is not None else 0.0
