"""The daemon as a process among others: its garbage collector, its metrics, what it tells systemd, why it ended.

`rest_what_stays`: a node's modules make some 100 000 objects. A full collection visits them all, 30 ms during which
nothing else goes on, and comes whenever many small objects were made, for instance by connections that come and go. So
what was imported and started is not looked through again.

`share_arenas`: glibc gives threads arenas of memory of their own, up to eight for each core, and an arena keeps what
its threads freed. A node's worker threads hold a vector or two for a moment, now in this arena, now in that one, and in
time each kept some: 350 MB more in an open run of 2 M parameters, whose vectors have 8 MB.

`unhurried`: a full pipe that nobody reads, or a terminal that Ctrl-S stopped, holds up who writes there: the loop.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import faulthandler
import gc
import io
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol, TextIO

import trio

from swarmnode import __version__
from swarmnode.node.exitcodes import CONFIG, ERROR, KEY_IN_USE, ExpectedError
from swarmnode.node.host.limits import Limits
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.state.membership import KeyInUse
from swarmnode.training.golden import GoldenMismatch
from swarmnode.training.sandbox import system
from swarmnode.training.tokens import CorpusError

VERSION = Metric("swarmnode_info", GAUGE, "always 1; the version of the node", "version")
UPTIME = Metric("swarmnode_uptime_seconds", GAUGE, "seconds since the node started")
RESIDENT = Metric("swarmnode_resident_bytes", GAUGE, "bytes of memory that the daemon holds; its trainer not included")
TASKS = Metric("swarmnode_tasks", GAUGE, "tasks that the daemon runs at the same time")
DEFECTS = Metric("swarmnode_defects_total", COUNTER, "rounds and other work that a defect of swarmnode ended")
LIMIT = Metric("swarmnode_limit", GAUGE, "what peers may take, in the unit that node/host/limits.py names", "limit")

M_ARENA_MAX, ARENAS = -8, 2  # mallopt(3): the main thread's and one for all others
WAITING = 2000  # pieces of output, a line each as a rule, that wait for a reader
READ_WITHIN = 1.0  # s in which a reader takes the last of them, when the node ends

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"
STARTING = "EXTEND_TIMEOUT_USEC={:.0f}"  # microseconds from now in which the start goes on
AS_ROOT = (
    "this node runs as root, and needs no right of root: a mistake in it, or in a library, would give a stranger the "
    "whole machine. Stop it and start it as an ordinary user (docs/volunteers.md); the data directory then has to "
    "belong to that user"
)

AFTER_DEFECT = 5.0  # seconds until what a defect ended goes on
TOLD_FOR = 600.0  # seconds that a defect is told in `status`
TO_MEND = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # of the disk, by a person

log = logging.getLogger(__name__)


def rest_what_stays() -> None:
    """Call when everything is started: what exists now is never collected."""
    gc.collect()
    gc.freeze()


def share_arenas() -> None:
    """Call before any thread starts. Elsewhere than with glibc there is nothing to set."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


class Output(io.TextIOBase):
    """Standard output or error that waits for no reader: what finds WAITING pieces before it is lost."""

    def __init__(self, stream: TextIO, waiting: Queue[tuple[int, bytes] | None]) -> None:
        self._number, self._waiting, self._piece = stream.fileno(), waiting, ""
        self.isatty = stream.isatty  # type: ignore[method-assign]

    def write(self, text: str) -> int:
        self._piece += text
        if text.endswith("\n"):
            self.flush()
        return len(text)

    def flush(self) -> None:
        piece, self._piece = self._piece, ""
        if piece:
            with suppress(Full):
                self._waiting.put_nowait((self._number, piece.encode(errors="replace")))


@contextmanager
def unhurried() -> Iterator[None]:
    """Within this, nothing that is printed or logged on the console waits for its reader."""
    waiting: Queue[tuple[int, bytes] | None] = Queue(WAITING)

    def hand_on() -> None:
        for number, piece in iter(waiting.get, None):
            with suppress(OSError):  # who read it is gone, or the disk that keeps it is full
                while piece:
                    piece = piece[os.write(number, piece) :]

    def end() -> None:
        with suppress(Full):
            waiting.put(None, timeout=READ_WITHIN)
        thread.join(READ_WITHIN)

    thread = Thread(target=hand_on, daemon=True, name="output")
    thread.start()
    with ExitStack() as stack:
        stack.callback(end)
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            with suppress(AttributeError, OSError):  # it was closed, or is no file
                stack.callback(stack.enter_context(redirect(Output(stream, waiting))).flush)
        yield


def notify(state: str, *, status: str = "") -> None:
    """Send `state` and a line of `status` to systemd, where that started the node (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace, written so because a variable cannot hold a zero byte
        address = "\0" + address[1:]
    message = f"{state}\nSTATUS={status.replace(chr(10), ' ')}" if status else state
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as channel:
            channel.sendto(message.encode(), address)
    except OSError as error:
        log.warning("systemd was not told %s: %s", state, error)


def watched_every() -> float | None:
    """Seconds without a word after which systemd takes this process for dead (sd_watchdog_enabled(3)), if it does."""
    microseconds, whom = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdigit() or int(microseconds) == 0 or whom != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


def harden() -> None:
    """Give up what no part of a node needs, for this process and those that it starts; for good."""
    os.umask(0o077)
    faulthandler.enable(sys.__stderr__ or 2)  # the watchdog ends a process by SIGABRT: what it was about is then there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the node's key
    if sys.platform == "linux":
        system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)
    if runs_as_root():
        log.warning("%s", AS_ROOT)


def runs_as_root() -> bool:
    return os.geteuid() == 0


class Run(Protocol):
    """What a part of a node does from now on."""

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None: ...


class Measured(Protocol):
    """A part that has numbers to show."""

    def measure(self, metrics: Metrics) -> None: ...


def metrics_of(limits: Limits, *parts: Measured) -> Metrics:
    """The metrics of a node that starts now and consists of `parts`."""
    metrics = Metrics()
    started = time.monotonic()
    metrics.show(VERSION, lambda: {__version__: 1})
    metrics.show(UPTIME, lambda: time.monotonic() - started)
    metrics.show(RESIDENT, resident_bytes)
    metrics.show(TASKS, lambda: float(trio.lowlevel.current_statistics().tasks_living))
    flat = dict(_numbers(limits, ""))
    metrics.show(LIMIT, lambda: flat)
    for part in parts:
        part.measure(metrics)
    return metrics


def _numbers(limits: Any, prefix: str) -> Iterator[tuple[str, float]]:
    """All limits that are numbers, as `part.name`, or `part.part.name` where a part has parts."""
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{field.name}", float(value)


def resident_bytes() -> float:
    """Of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


# Errors of parts that know no exit codes.
EXIT_CODES: dict[type[Exception], int] = {KeyInUse: KEY_IN_USE, GoldenMismatch: ERROR, CorpusError: CONFIG}


def reason_of(error: BaseException) -> BaseException:
    """What tells a person what happened: `error`, or of nested nurseries' groups the one exception that does."""
    leaves = list(_leaves(error))
    kinds: tuple[type[Exception], ...] = (ExpectedError, *EXIT_CODES, ValueError, OSError)
    for kind in kinds:
        for leaf in leaves:
            if isinstance(leaf, kind):
                return ExpectedError(str(leaf), exit_code=EXIT_CODES[kind]) if kind in EXIT_CODES else leaf
    return leaves[0]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


class Defects:
    """Defects of this program, which a peer may have found: each ends what met it for a while, never the daemon."""

    def __init__(self) -> None:
        self._count, self._last, self._told = 0, 0.0, ""
        self._kept: dict[Run, trio.CancelScope] = {}

    @property
    def warning(self) -> str:
        """The last one, while it is not long ago; "" for none."""
        return self._told if self._told and trio.current_time() - self._last < TOLD_FOR else ""

    def measure(self, metrics: Metrics) -> None:
        metrics.show(DEFECTS, lambda: self._count)

    async def bear(self, error: Exception) -> str:
        """Log, count and wait; what a person is told. What a person can mend is raised again, and ends the daemon."""
        reason = reason_of(error)
        if isinstance(reason, ExpectedError) or (isinstance(reason, OSError) and reason.errno in TO_MEND):
            raise error
        log.error("a defect of swarmnode ended what went on here; it goes on in %g s", AFTER_DEFECT, exc_info=error)
        self._told = f"a defect of swarmnode: {reason!r}; please report it with the file of swarmnode diag"
        self._count, self._last = self._count + 1, trio.current_time()
        await trio.sleep(AFTER_DEFECT)
        return self._told

    async def keep(self, run: Run, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """`run`, which begins anew after each defect in it, while what depends on it goes on."""
        while True:
            try:
                with trio.CancelScope() as self._kept[run]:
                    async with trio.open_nursery() as nursery:
                        await nursery.start(run)
                        task_status.started()
                        task_status = trio.TASK_STATUS_IGNORED
                    return
            except Exception as error:
                await self.bear(error)

    def begin_anew(self, run: Run) -> None:
        self._kept[run].cancel()
