"""What systemd is told, over a real datagram socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from swarmnode.node.process import READY, notify


def test_readiness_is_sent_to_the_socket_that_systemd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        assert notify(READY, status="round 1\nof 2")
        assert manager.recv(1000) == b"READY=1\nSTATUS=round 1 of 2"


def test_outside_systemd_and_with_a_dead_socket_nothing_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify(READY)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify(READY)
