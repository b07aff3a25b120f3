"""Programs in the laboratory: relays that are real daemons, and small nodes that do as they are told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from lab import Host, Lab, Link
from realnodes import PROGRAM, Node, environment, until

NETNODE = Path(__file__).with_name("netnode.py")
FLAGS = ("--quic", "--listen", "::", "--threads", "1", "--nice", "0")
PORT = 4077  # of daemons
FIRST_PORT = 4001  # of agents; each life takes the next
PATIENCE = 120.0  # s for an answer

FAST = Link()

Answer = dict[str, Any]


class Agent:
    """A `netnode.py` on a host, or a `program` that is told the same. `start` gives it a fresh identity and port."""

    def __init__(self, host: Host, log: Path, *, first_port: int = FIRST_PORT, program: Path = NETNODE) -> None:
        self.host = host
        self._program = program
        self.peer = ""
        self._port = first_port
        self._number = 0
        self._answers: dict[int, Answer] = {}
        self._heard = threading.Condition()
        self._log = log

    def __enter__(self) -> Agent:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.host.enter, sys.executable, str(self._program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
            )
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                answer = json.loads(line)
                with self._heard:
                    self._answers[answer.pop("number")] = answer
                    self._heard.notify_all()
        with self._heard:
            self._answers[-1] = {}  # over
            self._heard.notify_all()

    def ask(self, do: str, **more: Any) -> int:
        """Give a command; `answer` takes what comes of it."""
        assert self._process.stdin is not None
        self._number += 1
        self._process.stdin.write(json.dumps({"number": self._number, "do": do, **more}).encode() + b"\n")
        self._process.stdin.flush()
        return self._number

    def answer(self, number: int, within: float = PATIENCE) -> Answer:
        with self._heard:
            self._heard.wait_for(lambda: number in self._answers or -1 in self._answers, timeout=within)
            answer = self._answers.pop(number, None)
        assert answer is not None, f"no answer from {self.host.name}: {self._log.read_text()[-3000:]}"
        assert "error" not in answer, f"{self.host.name}: {answer['error']}"
        return answer

    def do(self, do: str, *, patience: float = PATIENCE, **more: Any) -> Answer:
        return self.answer(self.ask(do, **more), patience)

    def start(self, join: list[str], *, mdns: bool = False) -> None:
        """A fresh node, connected to those at `join`."""
        self.peer = self.do("start", port=self._port, mdns=mdns)["peer"]
        self._port += 1
        self.do("join", to=join)


class Relay:
    """`swarmnode run --role relay` with an address on the internet."""

    def __init__(self, host: Host, home: Path, *more: str) -> None:
        self.host = host
        arguments = ("--role", "relay", *more)
        program = (*host.enter, str(PROGRAM))
        self.node = Node(home, *arguments, corpus=None, port=PORT, program=program, flags=(*FLAGS, "--no-mdns"))

    @property
    def address(self) -> str:
        return f"/ip4/{self.host.address}/tcp/{PORT}/p2p/{self.node.ready['peer_id']}"

    @property
    def address6(self) -> str:
        return f"/ip6/{self.host.address6}/tcp/{PORT}/p2p/{self.node.ready['peer_id']}"

    def status(self) -> Answer:
        told: Answer = self.node.command_line("status")
        return told


@contextmanager
def relays(lab: Lab, folder: Path, count: int = 2, link: Link = FAST) -> Iterator[list[Relay]]:
    """So many relays that know one another and that they are public."""
    with ExitStack() as stack:
        found: list[Relay] = []
        for number in range(count):
            join = ("--join", found[0].address) if found else ()
            relay = Relay(lab.public(f"relay{number}", link, ipv6=True), folder / f"relay{number}", *join)
            stack.enter_context(relay.node)
            found.append(relay)
        for relay in found:
            until(lambda relay=relay: relay.status()["reachability"] == "public")  # type: ignore[misc]
        yield found
