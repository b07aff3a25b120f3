"""What is done to a volunteer's machine: by a trainer that was taken over, a run file, another local user."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import ClassVar

import trio
from harness import Adversary
from host import Machine

from swarmnode.training.options import SettingError
from swarmnode.training.runspec import decode, encode, parse_runspec
from swarmnode.training.tasks import TaskError, load_task

NOBODY = 65534  # a user that exists everywhere and owns nothing


class TakenOver(Adversary):
    """A hole in torch, numpy or a driver gave a peer the trainer: its code now runs there."""

    wanted: ClassVar[tuple[str, ...]]  # of `escapes.attempts`

    async def attack(self, target: Machine) -> None:
        results = await target.escape(self.wanted)
        target.tried = len(results)
        target.done = sum(result == "done" for result in results.values())


class OutsideFiles(TakenOver):
    name = "a trainer that was taken over changes files outside its directory"
    wanted = (
        "make a file outside",
        "change a file outside",
        "delete a file outside",
        "cut a file outside",
        "open a file outside to all",
        "date a file outside back",
        "make a directory outside",
        "link to its own from outside",
        "move its own file outside",
    )


class Secrets(TakenOver):
    name = "it reads the node's key and looks into the daemon"
    wanted = ("read a secret", "look into its parent", "trace its parent")


class Programs(TakenOver):
    name = "it runs a shell, forks, signals and restrains the daemon"
    wanted = ("run a shell", "become a shell", "fork", "signal its parent", "change its parent's limits")


class Sockets(TakenOver):
    name = "it connects to a host, sends datagrams, talks to local services"
    wanted = ("connect to a host", "open a datagram socket", "open a local socket")


class Crash(TakenOver):
    name = "it leaves a core dump, and wins rights back"
    wanted = ("leave a core dump", "win rights back")


class ForkBomb(Adversary):
    name = "a fork bomb in the trainer"

    async def attack(self, target: Machine) -> None:
        target.tried = 2 * self.times(200, 50)
        target.done = await target.bomb(target.tried // 2)
        target.allowed = Machine.threads  # threads are its own affair, as many as its limit says


class NamedCode(Adversary):
    """A peer's run file names code: a file that the peer had fetched as a shard, or a module of Python's own."""

    name = "a run file names a file or a module as its task"

    async def attack(self, target: Machine) -> None:
        mark = target.folder / "executed"
        evil = target.folder / "evil.py"
        evil.write_text(f"open({str(mark)!r}, 'w').close()\nclass Task: pass\n")
        for named in (f"{evil}:Task", str(evil), "os:system", "swarmnode.training.byte_lm:ByteLM", "../evil.py"):
            spec = parse_runspec({"run": {"name": "r"}, "task": {"name": named}}, source="a peer")
            told = decode(encode(spec), expected_run_id=spec.run_id).task.name
            with suppress(TaskError, SettingError):
                load_task(told, told if target.undefended else "")
            target.tried += 1
            target.done += mark.exists()
            mark.unlink(missing_ok=True)


class OtherUser(Adversary):
    """A program of another local user asks the daemon for its status; the socket's mode was opened by mistake."""

    name = "another local user at the control socket"

    async def attack(self, target: Machine) -> None:
        async with target.control_socket() as path:
            done = await trio.run_process(
                [sys.executable, "-c", _ASK, str(path)], capture_stdout=True, check=False, env=dict(os.environ)
            )
        target.tried, target.done = 1, int(b"secret" in done.stdout)


class OtherOrigin(Adversary):
    """A page of another origin in the volunteer's browser: it may send a form's text anywhere, unasked."""

    name = "a web page of another origin asks every port of the daemon to end it, that of its page as well"

    async def attack(self, target: Machine) -> None:
        command = json.dumps({"id": 1, "method": "stop", "params": {}})
        async with target.listening() as ports:
            for port in ports:
                told = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: https://attacker.example\r\n"
                told += f"Content-Type: text/plain\r\nContent-Length: {len(command) + 1}\r\n\r\n{command}\n"
                target.tried += 1
                target.done += b"result" in await _post(port, told.encode())


async def _post(port: int, request: bytes) -> bytes:
    """What a port answers within some seconds."""
    answer = b""
    with trio.move_on_after(5.0), suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            while b"result" not in answer and (more := await stream.receive_some(4096)):
                answer += more
    return answer


_ASK = f"""
import json, os, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
with socket.socket(socket.AF_UNIX) as asking:
    asking.settimeout(10)
    asking.connect(sys.argv[1])
    asking.sendall(json.dumps({{"id": 1, "method": "ask", "params": {{}}}}).encode() + b"\\n")
    print(asking.recv(4096))
"""


def everyone() -> list[Adversary]:
    """A new adversary of every kind that this machine can be put through."""
    needs_root = [OtherUser()] if os.geteuid() == 0 else []
    return [
        OutsideFiles(),
        Secrets(),
        Programs(),
        Sockets(),
        Crash(),
        ForkBomb(),
        NamedCode(),
        OtherOrigin(),
        *needs_root,
    ]
