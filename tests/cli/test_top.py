"""`swarmnode top` fits every terminal, follows the daemon, and q leaves."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from json import loads
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.top import screen
from swarmnode.cli.views import warning_lines
from swarmnode.node.control.client import ControlClient


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (120, 50)])
def test_the_screen_fits_and_tells_rounds_peers_and_warnings(
    home: Path, daemon: Any, width: int, height: int, colour: bool
) -> None:
    asked = ControlClient(home).call
    told = {"status": asked("status"), "rounds": asked("history")["rounds"], "peers": asked("peers")["peers"]}
    text = screen(told, width, height, colour=colour)
    lines = text.splitlines()
    assert len(lines) <= height and "\x1b[2J" not in text and lines[0].count("swarmnode") == 1
    if not colour:
        assert max(map(len, lines)) <= width
    if height >= 24:
        assert "late" in text and "Anna" in text and "upgrade this node" in text and "⠉" in text
        assert any("█" in line and "▓" in line and "4 members" in line for line in lines)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_warnings_for_which_there_is_no_room_are_a_line_that_says_where_they_are(room: int) -> None:
    assert warning_lines(["the disk is full " * 40], room, colour=False) == ["", "  and more: swarmnode health"]


def test_before_there_is_a_run_it_shows_what_there_is(answer: Any) -> None:
    text = screen({"status": answer | {"run": None, "warnings": []}, "rounds": [], "peers": []}, 80, 24)
    assert "none joined yet" in text


def test_json_gives_a_snapshot_a_line_and_asks_for_rounds_once(home: Path, daemon: Any) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        program = str(Path(sys.executable).with_name("swarmnode"))
        os.execv(program, [program, "top", "--json", "--interval", "0.2", "--data-dir", str(home)])
    os.close(write)
    with os.fdopen(read) as lines:
        first, second = loads(lines.readline()), loads(lines.readline())
        os.kill(pid, 2)
    os.waitpid(pid, 0)
    assert first["status"] == second["status"] == daemon.status and second["time"] > first["time"]
    assert len(second["rounds"]) == 10 and len(second["peers"]) == 2
    assert [params for name, params in daemon.asked if name == "history"] == [{"since": 0}]


def test_on_a_terminal_it_is_live_and_q_leaves(home: Path, daemon: Any) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        program = str(Path(sys.executable).with_name("swarmnode"))
        os.execve(program, [program, "top", "--data-dir", str(home)], {**os.environ, "TERM": "xterm", "COLUMNS": "90"})
    seen, until, asked = b"", time.monotonic() + 20, False
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # it has left
            break
        if b"4 members" in seen and not asked:
            os.write(terminal, b"q")
            asked = True
    assert asked and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
