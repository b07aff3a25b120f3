"""The host group: what strangers, by way of the trainer or of a run file, and other local users do to the machine.

Measured in real processes: how many of the attempts succeeded, under the sandbox as the node puts it together, and
without it. Where this kernel lacks a part of it, the row says so.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import trio
from harness import Adversary, Outcome
from realnodes import RUN_TOML, Node

from swarmnode.node.control import server
from swarmnode.node.trainer import child

SUPPORT = Path(__file__).parents[1] / "support"
BOMB = """
import json, os, sys
from swarmnode.training import sandbox
import escapes
if not os.geteuid():  # limits of processes do not hold root
    os.setgid(65534); os.setuid(65534)
sandbox.system.MORE_THREADS = int(sys.argv[3])
sandbox.enter(sandbox.Rules(mode=sys.argv[1]))
print(escapes.fork_bomb(int(sys.argv[2])))
"""


@dataclass
class Machine:
    """A volunteer's machine, in one directory of this one."""

    folder: Path
    undefended: bool = False
    tried: int = 0
    done: int = 0
    allowed: int = 0
    lacking: str = ""

    threads: ClassVar[int] = 40  # that a trainer may add in the fork bomb; 4096 otherwise

    def __post_init__(self) -> None:
        for name in ("home", "trainer"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "home" / "victim").write_text("x")
        (self.folder / "home" / "identity.key").write_bytes(b"secret")

    def __str__(self) -> str:
        return f"{self.done} of {self.tried} attempts succeeded{self.lacking}"

    def failures(self) -> tuple[str, ...]:
        more = self.done > self.allowed
        return (f"{self.done} of {self.tried} attempts succeeded, at most {self.allowed} may",) if more else ()

    @property
    def _mode(self) -> str:
        return "off" if self.undefended else "auto"

    async def escape(self, wanted: Sequence[str]) -> dict[str, str]:
        """What came of these attempts in a process under the trainer's rules, by their name."""
        home, scratch = self.folder / "home", self.folder / "trainer"
        (scratch / "mine").write_text("x")
        rules = child.rules_of(child.TrainerSettings(sandbox=self._mode, scratch=str(scratch)))
        with socket.create_server(("127.0.0.1", 0)) as server:
            given = {
                "rules": asdict(rules),
                "secret": str(home / "identity.key"),
                "outside": str(home),
                "inside": str(scratch),
                "port": server.getsockname()[1],
                "only": list(wanted),
            }
            told = json.loads(await _python(str(SUPPORT / "escapes.py"), json.dumps(given)))
        if told["report"]["missing"] and not self.undefended:
            self.lacking = ", this kernel lacks " + ", ".join(part["part"] for part in told["report"]["missing"])
        results: dict[str, str] = told["results"]
        return results

    async def bomb(self, most: int) -> int:
        """Processes and threads that a fork bomb in the trainer got to live at once, of `most` each."""
        return int(await _python("-c", BOMB, self._mode, str(most), str(self.threads), path=SUPPORT))

    @asynccontextmanager
    async def control_socket(self) -> AsyncIterator[Path]:
        """A control socket that by mistake everybody can open."""

        async def ask(params: Mapping[str, Any]) -> str:
            return "secret"

        may_connect = (lambda theirs, ours: True) if self.undefended else server.may_connect
        folder = tempfile.TemporaryDirectory()  # paths of sockets have a limit
        with mock.patch.object(server, "may_connect", may_connect), folder as short:
            path = Path(short) / "control.sock"
            async with trio.open_nursery() as nursery:
                await nursery.start(server.ControlServer(path, {"ask": ask}).run)
                os.chmod(short, 0o755)
                os.chmod(path, 0o777)
                yield path
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[list[int]]:
        """TCP ports on which a real daemon of this machine listens; the undefended one has a port for control as well.

        That answers each line that is a request, whatever comes before it, as line protocols on loopback often do.
        """

        async def answer(stream: trio.SocketStream) -> None:
            async for chunk in stream:
                for line in chunk.splitlines():
                    with suppress(ValueError):
                        await stream.send_all(json.dumps({"id": json.loads(line)["id"], "result": "done"}).encode())

        run = self.folder / "run.toml"
        run.write_text(RUN_TOML)
        node = Node(self.folder / "node", run, "--role", "watch", corpus=None)
        async with trio.open_nursery() as nursery:
            try:
                await trio.to_thread.run_sync(lambda: node.start().ready)
                ports = _ports_of(node.process.pid)
                if self.undefended:
                    (control,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
                    ports.append(control.socket.getsockname()[1])
                yield ports
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(node.end)
            nursery.cancel_scope.cancel()


def _ports_of(pid: int) -> list[int]:
    """TCP ports that a process listens on (proc_pid_net(5))."""
    own = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    told = [Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:] for family in ("tcp", "tcp6")]
    rows = [line.split() for lines in told for line in lines]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


async def _python(*arguments: str, path: Path | None = None) -> str:
    more = {"env": {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"}} if path is not None else {}
    done = await trio.run_process([sys.executable, *arguments], capture_stdout=True, **more)
    return done.stdout.decode()


async def damage(adversary: Adversary, *, undefended: bool = False) -> Machine:
    folder = Path(tempfile.mkdtemp(prefix="swarmnode-host-"))
    try:
        machine = Machine(folder, undefended)
        with trio.fail_after(100):
            await adversary.attack(machine)
        return machine
    finally:
        shutil.rmtree(folder)


async def outcomes() -> AsyncIterator[Outcome]:
    """Every attack in full, beside a machine without the defence."""
    from adversaries import host as adversaries

    for adversary in adversaries.everyone():
        defended, undefended = await damage(adversary), await damage(adversary, undefended=True)
        shows = "" if undefended.failures() else adversary.shows
        yield Outcome("host", adversary.name, str(defended), str(undefended), defended.failures(), shows)
