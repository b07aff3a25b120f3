"""What code that has taken over a trainer would try, for tests of the sandbox; a program in a process of its own.

    python tests/support/escapes.py '{"rules": {...}, "secret": PATH, "outside": PATH, "inside": PATH, "port": N}'

Prints one JSON object: the sandbox's report, and for each attempt "done", or the error that stopped it. Every attempt
works in a process without the sandbox (mode "off"), or it would show nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmnode.training import sandbox
from swarmnode.training.sandbox import system

PTRACE_SEIZE = 0x4206
PTRACE = {"x86_64": 101, "aarch64": 117}
SHMGET = {"x86_64": 29, "aarch64": 194}
IPC_CREAT, IPC_RMID = 0o1000, 0
PR_GET_NO_NEW_PRIVS = 39


def attempts(secret: Path, outside: Path, inside: Path, port: int) -> dict[str, Callable[[], Any]]:
    """`secret`: a file that it may not read; `outside`: a directory that is not the trainer's, `inside`: its own."""
    other = os.getppid()
    return {
        "write a file of its own": lambda: (inside / "mine").write_text("x"),
        "make a directory of its own": lambda: os.makedirs(inside / "folder" / "below"),
        "start a thread": _thread,
        "signal itself": lambda: os.kill(os.getpid(), 0),
        "read a secret": secret.read_bytes,
        "make a file outside": lambda: (outside / "new").write_text("x"),
        "change a file outside": lambda: secret.open("r+b").close(),
        "delete a file outside": lambda: (outside / "victim").unlink(),
        "cut a file outside": lambda: os.truncate(secret, 6),
        "open a file outside to all": lambda: secret.chmod(0o600),
        "date a file outside back": lambda: os.utime(secret),
        "make a directory outside": lambda: (outside / "folder").mkdir(),
        "link to its own from outside": lambda: (outside / "link").symlink_to(inside),
        "link from its own to outside": lambda: (inside / "link").symlink_to(outside),
        "hide a directory of its own": lambda: (inside / "hidden").mkdir(0o300),
        "hide all that it makes": lambda: os.umask(os.umask(0o077)),
        "have others wait for a file": lambda: _lease(inside / "mine"),
        "see what others open": _watch,
        "make a FIFO of its own": lambda: os.mkfifo(inside / "fifo"),
        "move its own file outside": lambda: (inside / "mine").rename(outside / "moved"),
        "run a shell": lambda: subprocess.run(["/bin/sh", "-c", "exit 0"], check=True),
        "become a shell": _become_another,
        "fork": _fork,
        "connect to a host": lambda: socket.create_connection(("127.0.0.1", port), timeout=5).close(),
        "open a datagram socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "open a local socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "signal its parent": lambda: os.kill(other, 0),
        "have its parent signalled": lambda: _have_signalled(other),
        "change its parent's priority": lambda: os.setpriority(
            os.PRIO_PROCESS, other, os.getpriority(os.PRIO_PROCESS, other)
        ),
        "change its parent's limits": lambda: resource.prlimit(other, resource.RLIMIT_NOFILE),
        "look into its parent": lambda: Path(f"/proc/{other}/environ").read_bytes(),
        "trace its parent": lambda: system.call(PTRACE[os.uname().machine], PTRACE_SEIZE, other, 0, 0),
        "share memory with all programs": _share_memory,
        "outlive its parent": lambda: system.prctl(system.PR_SET_PDEATHSIG, 0),
        "leave a core dump": _may_dump_core,
        "win rights back": _may_win_rights,
    }


PERMITTED = ("write a file of its own", "make a directory of its own", "start a thread", "signal itself")


def _thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def _lease(path: Path) -> None:
    with path.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _watch() -> None:
    if (descriptor := ctypes.CDLL(None, use_errno=True).inotify_init1(0)) < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    os.close(descriptor)


def _fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _become_another() -> None:
    """Whether a program may be executed; of one that does not exist, so that this one goes on where it may."""
    try:
        os.execv("/nonexistent", ["x"])
    except FileNotFoundError:
        return


def _have_signalled(other: int) -> None:
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(reading, fcntl.F_SETOWN, other)
    finally:
        os.close(reading)
        os.close(writing)


def _share_memory() -> None:
    name = system.call(SHMGET[os.uname().machine], 0, 4096, IPC_CREAT | 0o600)
    ctypes.CDLL(None).shmctl(name, IPC_RMID, None)


def _may_dump_core() -> None:
    if ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0 and resource.getrlimit(resource.RLIMIT_CORE) == (0, 0):
        raise PermissionError(errno.EPERM, "no core")


def _may_win_rights() -> None:
    if system.prctl(PR_GET_NO_NEW_PRIVS) == 1:
        raise PermissionError(errno.EPERM, "no new privileges")


def tried(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def fork_bomb(most: int) -> int:
    """Processes and threads that it got to live at the same time, of twice `most`."""
    alive: list[int] = []
    done = threading.Event()
    threads = []
    try:
        for _ in range(most):
            pid = os.fork()
            if not pid:
                signal.pause()
            alive.append(pid)
    except OSError:
        pass
    try:
        for _ in range(most):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except (OSError, RuntimeError):
        pass
    done.set()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(alive) + len(threads)


def main() -> None:
    given = json.loads(sys.argv[1])
    rules = sandbox.Rules(**given["rules"])
    sandbox.leave_network(rules)
    report = sandbox.enter(rules)
    paths = {name: Path(given[name]) for name in ("secret", "outside", "inside")}
    wanted = given.get("only") or attempts(**paths, port=given["port"])
    results = {name: tried(attempts(**paths, port=given["port"])[name]) for name in wanted}
    print(json.dumps({"report": dataclasses.asdict(report), "results": results}))


if __name__ == "__main__":
    main()
