"""A daemon in name only: a control server in a thread, and the real `swarmnode` program asking it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import typer
import typer.main

from swarmnode.node.control import Declined
from swarmnode.node.control.server import ControlServer
from swarmnode.node.storage.datadir import DataDir

RUN_ID = "3f9c21ab04de" + "0" * 52
PEER_ID = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "peer_id": PEER_ID,
    "uptime_s": 7801.0,
    "role": "train",
    "ready": True,
    "holds": [],
    "addresses": [f"/ip4/203.0.113.7/tcp/4077/p2p/{PEER_ID}"],
    "join": f"swarmnode join /ip4/203.0.113.7/tcp/4077/p2p/{PEER_ID} --run {RUN_ID}",
    "data_dir": "/home/someone/.local/share/swarmnode",
    "paused": False,
    "reachability": "private",
    "run": {
        "run_id": RUN_ID,
        "name": "byte-lm",
        "round": 18,
        "rounds": 40,
        "phase": "training",
        "arriving": None,
        "members": 4,
        "parameters": 840_000,
        "codec": "int8",
        "loss": 2.412,
        "loss_unit": "bits per byte",
        "loss_history": [[r, 5.0 - 0.14 * r] for r in range(19)],
        "tokens_per_second": 12345.0,
        "compute_share": 0.83,
        "data": {
            "source": "shards",
            "shards": 12,
            "wanted": 16,
            "in_run": 64,
            "bytes": 2_300_000,
            "fetched": 1_500_000,
        },
        "state_hash": "ab" * 32,
        "outcome": "Partial",
        "missing": [PEER_ID],
        "round_age_s": 19.0,
        "round_seconds": 31.0,
        "next_round_s": 12.0,
    },
    "peers": {"connected": 3, "direct": 2, "relayed": 1},
    "traffic": {"bytes_in": 18_400_000, "bytes_out": 21_000_000, "rate_in": 52_000.0, "rate_out": 61_000.0},
    "trainer": {
        "pid": 4242,
        "device": "cpu",
        "ranks": 1,
        "threads": 2,
        "restarts": 1,
        "sandbox": {"mode": "auto", "enforced": ["files"], "missing": []},
    },
    "problems": [],
    "warnings": ["peer 12D3KooW… speaks protocol 2: upgrade this node"],
}

NETCHECK: dict[str, Any] = {
    "reachability": "relayed",
    "reached_by": 1,
    "failed_for": 4,
    "listens": [f"/ip4/192.168.1.2/tcp/4077/p2p/{PEER_ID}"],
    "announces": [f"/ip4/203.0.113.7/tcp/4077/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}"],
    "observed": ["/ip4/198.51.100.9/tcp/61044"],
    "nat": "address-dependent",
    "filtering": "port-dependent",
    "class": "symmetric",
    "works_with": [{"class": "no NAT", "path": "direct"}, {"class": "symmetric", "path": "relayed"}],
    "uninvited": 0,
    "ipv6": {"addresses": [], "reached_at": []},
    "port_mapping": {"asked": True, "way": None, "address": None, "state": "no router answers"},
    "relays": [{"peer_id": PEER_ID, "rtt_ms": 41.3}],
    "peers": {"connected": 3, "direct": 2, "relayed": 1},
    "punched": 1,
    "not_punched": 2,
    "rates": {"in": 52_000.0, "out": 61_000.0, "most_in": 1_250_000.0, "most_out": 400_000.0},
    "serves": {"reservations": 0, "circuits": 0, "bytes": 0},
    "problems": [{"problem": "the router opens no port\x1b[2J", "advice": "switch on UPnP"}],
}


@contextmanager
def _in_a_thread(start: Callable[[trio.Nursery], Awaitable[None]]) -> Iterator[None]:
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await start(nursery)
            ready.set()
            await trio.to_thread.run_sync(stop.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=lambda: trio.run(main), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture
def in_a_thread() -> Callable[[Callable[[trio.Nursery], Awaitable[None]]], AbstractContextManager[None]]:
    """`with in_a_thread(start)`: what `start` has started, in a thread of its own, until the block ends."""
    return _in_a_thread


class FakeDaemon:
    """Serves what a daemon serves on a data directory, holds its lock, and notes what it was asked."""

    def __init__(self, home: Path) -> None:
        self.home = DataDir(home)
        self.status = copy.deepcopy(STATUS)
        self.netcheck = copy.deepcopy(NETCHECK)
        self.discovered: dict[str, Any] = {"runs": [], "peers": 0, "unreached": {}}
        self.pings = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=lambda: trio.run(self._main), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10), "the control server did not start"

    def end(self) -> None:
        self._stop()
        self._thread.join(10)

    async def _main(self) -> None:
        token = trio.lowlevel.current_trio_token()
        with self.home:
            async with trio.open_nursery() as nursery:

                def stop() -> None:
                    if self._thread.is_alive():
                        token.run_sync_soon(nursery.cancel_scope.cancel)

                self._stop = stop
                names = (
                    "status",
                    "peers",
                    "netcheck",
                    "metrics",
                    "ping",
                    "sample",
                    "history",
                    "pause",
                    "resume",
                    "steer",
                    "stop",
                    "leave",
                    "discover",
                    "link",
                    "successor_show",
                    "successor_end",
                )
                methods: dict[str, Any] = {"logs": self._logs, **{name: self._method(name) for name in names}}
                await nursery.start(ControlServer(self.home.prepare_socket(), methods).run)
                self._ready.set()

    def _method(self, name: str) -> Callable[[dict[str, Any]], Any]:
        async def answer(params: dict[str, Any]) -> Any:
            self.asked.append((name, params))
            if name == "status":
                return self.status
            if name == "peers":
                stranger = peer(rtt_ms=None, round=None, member=False, standing="slowed", path="relayed", relay=PEER_ID)
                kept_out = [{"peer_id": PEER_ID, "for_s": 42.0, "why": "lied\x1b[2J"}]
                return {"peers": [peer(rtt_ms=12.3, name="Anna\x1b[2J"), stranger], "kept_out": kept_out, "blocked": []}
            if name == "metrics":
                return {"text": "swarmnode_peers 2\n", "metrics": [{"name": "swarmnode_peers"}]}
            if name == "ping" and params["peer"] != PEER_ID:
                raise Declined(f"no peer {params['peer']} is known; see swarmnode peers", exit_code=1)
            if name == "ping":
                self.pings += 1
                relay, path = (PEER_ID, "relayed") if self.pings == 1 else (None, "direct")
                way = {"path": path, "relay": relay, "transport": "tcp", "address": ""}
                return {"peer_id": PEER_ID, "rtt_ms": 1.5, "way": way}
            if name == "netcheck" and "peer" in params:
                steps = [{"step": "dialled /ip4/192.0.2.1/tcp/1", "ok": False, "result": "no answer\x1b[2J"}]
                return {"peer_id": PEER_ID, "path": "none", "steps": steps, "advice": "run netcheck there"}
            if name == "netcheck":
                return self.netcheck
            if name == "history":
                return {"run_id": RUN_ID, "name": "byte-lm", "unit": "bits per byte", "rounds": rounds()}
            if name == "link":
                barred = params["peer"] == PEER_ID
                way = {"path": "none" if barred else "direct", "relay": None, "transport": "tcp"}
                return {"peer_id": params["peer"], "blocked": False, "barred_before": barred, **way}
            if name == "discover":
                return self.discovered
            if name == "sample":
                return {"text": params["prompt"] + "):\n\tpass\x1b[2J"}
            if name == "resume":
                return {"was_paused": False, "holds": []}
            if name == "steer":
                now = {"from_round": 3, "values": {"inner.lr": 5.0}}
                return {"file": {"inner.lr": 5e-4, "exchange.codec": "int8"}, "now": None, "coming": [now]}
            if name.startswith("successor"):
                said = {"successor": "", "reason": "", "round": 18, "ended": name == "successor_end"}
                return {"run_id": RUN_ID, "owner": PEER_ID, **said}
            if name == "leave":
                return {"run_id": params["run_id"], "deleted": [f"runs/{params['run_id']}"]}
            if name == "stop":
                self._stop()
            return {}

        return answer

    async def _logs(self, params: dict[str, Any]) -> AsyncIterator[Any]:
        self.asked.append(("logs", params))
        yield {"time": "2025-01-31T12:00:00.123Z", "level": "WARNING", "logger": "swarmnode.x", "message": "hm\x1b[2J"}


def rounds() -> list[dict[str, Any]]:
    known = {"seconds": 2.0, "trained_s": 1.5, "exchange_s": 0.3, "waited_s": 0.2, "members": 4, "own": "accepted"}
    told = [{"round": r, "time": 1.7e9 + r, "loss": 8.0 - r / 10, **known} for r in range(18)]
    told[-1] |= {"missing": [PEER_ID], "why": {PEER_ID: "late\x1b[2J"}}
    return told


def peer(**other: Any) -> dict[str, Any]:
    return {
        "peer_id": PEER_ID,
        "address": f"/ip4/203.0.113.7/tcp/4077/p2p/{PEER_ID}",
        "path": "direct",
        "relay": None,
        "inbound": False,
        "age_s": 75.0,
        "rtt_ms": 1.0,
        "agent": "swarmnode/0.1.0",
        "member": True,
        "round": 18,
        "standing": "good",
        **other,
    }


Swarmnode = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
def swarmnode(home: Path) -> Swarmnode:
    """Runs the installed program with the test's data directory; returns code, output and errors."""

    def call(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
        return subprocess.run(
            [str(Path(sys.executable).with_name("swarmnode")), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**kept, "COLUMNS": "80", "SWARMNODE_DATA_DIR": str(home), **environ},
        )

    return call


@pytest.fixture
def daemon(home: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(home)
    fake.start()
    yield fake
    fake.end()


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], app: typer.Typer) -> Callable[..., Any]:
    """`ask(home, *arguments)` is what the module's `app` printed as JSON, or its words where `words` is set."""

    def ask(home: Path, *arguments: str, words: bool = False) -> Any:
        capsys.readouterr()
        command = [*arguments, "--data-dir", str(home), *([] if words else ["--json"])]
        typer.main.get_command(app).main(command, prog_name="swarmnode", standalone_mode=False)
        printed = capsys.readouterr().out
        return printed if words else json.loads(printed)

    return ask


@pytest.fixture
def answer() -> dict[str, Any]:
    """What the fake daemon answers to `status`."""
    return copy.deepcopy(STATUS)
