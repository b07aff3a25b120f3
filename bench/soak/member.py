"""A node of the soak: started, struck, repaired, ended, and everything that it said in all its lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from faults import CLOCK_STEP, FATAL, Strike
from lab import Lab
from realnodes import Event, Node
from realswarm import Site

TRACEBACK = "Traceback (most recent call last)"
LIED = "does not hold up"  # `Verdict.LIED`, in the log of an audit
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")  # of Debian's package libfaketime
BLOCK = 1 << 20  # bytes; what a file system is filled with at a time


class Member:
    """One node over all its lives. `started` and `repaired` are times of the monotonic clock."""

    def __init__(self, number: int, site: Site, home: Path, new_node: Callable[[], Node], *, mounted: bool) -> None:
        self.number = number
        self.site = site
        self.home = home
        self.mounted = mounted  # the home is a small file system of its own
        self.strike: Strike | None = None
        self.repair_at = 0.0
        self.started = self.repaired = 0.0
        self.events: list[Event] = []  # of the present life
        self.earlier: list[Path] = []  # logs of lives that are over
        self._new_node = new_node
        self._node: Node | None = None
        self._frozen: list[int] = []

    @property
    def lives(self) -> int:
        return len(self.earlier) + (self._node is not None)

    @property
    def pid(self) -> int:
        assert self._node is not None
        return self._node.process.pid

    @property
    def alive(self) -> bool:
        return self._node is not None and self._node.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        assert self._node is not None
        return self._node.process.poll()

    @property
    def stands(self) -> bool:
        """Running, ready, and nothing was done to it that is not repaired."""
        return self.alive and self.strike is None and any(event["event"] == "ready" for event in list(self.events))

    @property
    def clock(self) -> Path:
        """How far its clock is from the machine's."""
        return self.home.with_suffix(".clock")

    @property
    def log(self) -> Path:
        return self.home.with_suffix(".log")

    def start(self) -> None:
        if self._node is not None:
            kept = self.home.with_suffix(f".{self.lives}.log")
            self.log.rename(kept)
            self.earlier.append(kept)
        self._node = self._new_node().start()
        self.events = self._node.events
        self.started = self.repaired = time.monotonic()

    def may_be(self, struck: str, *, spared: bool) -> bool:
        return self.stands and not (spared and struck in FATAL) and (struck != "full" or self.mounted)

    def hit(self, strike: Strike, lab: Lab | None) -> None:
        """Let it happen. A killed trainer needs no repair and leaves the node standing."""
        if strike.kind == "kill-trainer":
            for pid in children(self.pid):
                _send(pid, signal.SIGKILL)
            return
        self.strike, self.repair_at = strike, time.monotonic() + strike.seconds
        if strike.kind == "kill":
            self._send(signal.SIGKILL)
        elif strike.kind == "restart":
            self._send(signal.SIGINT)
        elif strike.kind.startswith("freeze"):
            self._frozen = [] if strike.kind == "freeze-trainer" else [self.pid]
            self._frozen += [] if strike.kind == "freeze-daemon" else children(self.pid)
            for pid in self._frozen:
                _send(pid, signal.SIGSTOP)
        elif strike.kind == "cut":
            assert lab is not None and self.site.host is not None
            lab.cut(self.site.host)
        elif strike.kind == "full":
            fill(self.home / "filler")
        elif strike.kind == "clock":
            self.clock.write_text(f"+{CLOCK_STEP}s")

    def repair(self, lab: Lab | None) -> None:
        """Undo it: the node runs, moves, is connected, and has room."""
        assert self.strike is not None
        kind, self.strike = self.strike.kind, None
        self.repaired = time.monotonic()
        if kind.startswith("freeze"):
            for pid in self._frozen:
                _send(pid, signal.SIGCONT)
        elif kind == "cut":
            assert lab is not None and self.site.host is not None
            lab.cut(self.site.host, off=False)
        elif kind == "full":
            (self.home / "filler").unlink(missing_ok=True)
        elif kind == "clock":
            self.clock.write_text("+0s")
        if not self.alive:
            self.start()

    def end(self, within: float) -> int | None:
        """Leave in order; the exit code, None where it had to be killed."""
        if not self.alive:
            return self.exit_code
        self._send(signal.SIGINT)
        return self.wait(within)

    def wait(self, within: float) -> int | None:
        """The exit code of a process that was asked to end; None where it is killed for being too slow."""
        assert self._node is not None
        try:
            return self._node.process.wait(within)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self._node.process.wait()
            return None

    def tracebacks(self) -> list[str]:
        """Where logs hold one, as `file:line: what was raised`."""
        found = []
        for log, number, lines in self._lines_with(TRACEBACK):
            raised = next((later for later in lines[number + 1 :] if later[:1].isalpha()), "")
            found.append(f"{log.name}:{number + 1}: {raised.strip()[:200]}")
        return found

    def accusations(self) -> list[str]:
        """Where it calls an author, all of whom are honest, a liar."""
        return [f"{log.name}:{number + 1}: {lines[number]}" for log, number, lines in self._lines_with(LIED)]

    def _lines_with(self, words: str) -> Iterator[tuple[Path, int, list[str]]]:
        """Each line of a log that has these words: the log, the line's number from 0, and all lines."""
        for log in (*self.earlier, self.log):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            yield from ((log, number, lines) for number, line in enumerate(lines) if words in line)

    def tail(self, lines: int = 6) -> list[str]:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]

    def _send(self, number: signal.Signals) -> None:
        _send(self.pid, number)


def with_clock(file: Path) -> tuple[str, ...]:
    """What starts a program whose clock is as far from the machine's as `file` says; monotonic clocks stay right."""
    file.write_text("+0s")
    told = {"FAKETIME_TIMESTAMP_FILE": file, "FAKETIME_DONT_FAKE_MONOTONIC": 1, "FAKETIME_CACHE_DURATION": 1}
    told["FAKETIME_FORCE_MONOTONIC_FIX"] = 0  # with it threads that wait for the interpreter's lock spin
    return ("env", f"LD_PRELOAD={FAKETIME}", *(f"{name}={value}" for name, value in told.items()))


def children(pid: int) -> list[int]:
    """The processes that one has started: of a daemon, its trainer."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def fill(file: Path) -> None:
    """Take the last byte of the file system; without writing each, which would keep the machine busy for seconds."""
    with file.open("wb", buffering=0) as filler:
        at = 0
        for size in (BLOCK, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(filler.fileno(), at, size)
                    at += size


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
