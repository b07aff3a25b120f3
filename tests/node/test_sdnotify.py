"""What systemd is told, over a real datagram socket: when the node is ready, that it lives, that it ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from swarmnode.node.control.api import STALLED_FOR
from swarmnode.node.daemon import Daemon
from swarmnode.node.process import READY, notify, watched_every


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket that systemd names."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(manager: socket.socket) -> list[bytes]:
    """All messages so far, without the line for people."""
    messages: list[bytes] = []
    while True:
        try:
            messages.append(manager.recv(1000).split(b"\n")[0])
        except BlockingIOError:
            return messages


def test_readiness_is_sent_to_the_socket_that_systemd_names(manager: socket.socket) -> None:
    notify(READY, status="round 1\nof 2")
    assert manager.recv(1000) == b"READY=1\nSTATUS=round 1 of 2"


def test_outside_systemd_and_with_a_dead_socket_nothing_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    assert not caplog.text
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY)
    assert "was not told" in caplog.text


@pytest.mark.parametrize(
    ("microseconds", "pid", "every"),
    [
        ("60000000", None, 60.0),
        ("60000000", str(os.getpid()), 60.0),
        ("60000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
    ],
    ids=["no pid", "own pid", "other pid", "never", "no number"],
)
def test_only_the_process_that_systemd_watches_tells_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, microseconds: str, pid: str | None, every: float | None
) -> None:
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    assert watched_every() == every


def test_the_watchdog_hears_of_a_start_and_of_work_and_nothing_of_a_standstill(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    session = SimpleNamespace(idle_for=None, usual_seconds=None, paused=False, finished=trio.Event())
    node = SimpleNamespace(ready=False, session=session, network=SimpleNamespace(me="12D3KooW"), rounds_done=lambda: 7)

    async def watched_for(seconds: float) -> set[bytes]:
        heard(manager)
        await trio.sleep(seconds)
        return set(heard(manager))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Daemon(cast(Any, node))._tell_watchdog)
            assert await watched_for(60) == {b"EXTEND_TIMEOUT_USEC=60000000"}
            node.ready = True
            assert await watched_for(60) == {b"WATCHDOG=1"}
            session.idle_for, session.usual_seconds = STALLED_FOR + 1, 4.0
            await trio.sleep(20)
            assert await watched_for(60) == set()
            session.paused = True
            assert await watched_for(60) == {b"WATCHDOG=1"}
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_daemon_that_nobody_watches_has_nothing_to_tell(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    trio.run(Daemon(cast(Any, SimpleNamespace()))._tell_watchdog)
    assert heard(manager) == []
