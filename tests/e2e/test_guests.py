"""A real daemon as a guest of its machine: it pauses while the owner needs that, and goes on by itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from realnodes import Node, swarmnode, until

# The program, which takes files of the system from another root than `/`, and looks at them twice a second.
ELSEWHERE = """
import sys
from functools import partial
from pathlib import Path
from swarmnode.cli.main import main
from swarmnode.node import assembly
from swarmnode.node.guest import Guest
assembly.Guest, assembly.LOOK_EVERY = partial(Guest, root=Path(sys.argv.pop(1))), 0.5
sys.exit(main())
"""


@pytest.mark.slow
def test_a_node_trains_neither_on_battery_nor_while_its_machine_is_in_use_and_goes_on_after_both(
    tmp_path: Path, run_file: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, idle = tmp_path / "machine", tmp_path / "bin" / "loginctl"
    battery, terminal = machine / "sys/class/power_supply/BAT0", machine / "dev/pts/3"
    for folder in (battery, terminal.parent, idle.parent):
        folder.mkdir(parents=True)
    (battery / "type").write_text("Battery\n")
    (battery / "status").write_text("Charging\n")
    terminal.touch()
    os.utime(terminal, (0, 0))
    idle.write_text("#!/bin/sh\necho IdleHint=yes IdleSinceHint=1\n")
    idle.chmod(0o755)
    monkeypatch.setenv("PATH", f"{idle.parent}:{os.environ['PATH']}")

    def holds() -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = node.command_line("status")["holds"]
        return told

    def stands_still() -> None:
        until(lambda: node.command_line("status")["run"]["phase"] == "paused")
        rounds = len(node.states())
        time.sleep(2)
        assert len(node.states()) == rounds, "rounds take half a second"

    def goes_on() -> None:
        until(lambda: not holds())
        node.wait_for("round", since=len(node.events))

    asked = ("--not-on-battery", "--only-when-idle", "5")
    program = (sys.executable, "-c", ELSEWHERE, str(machine))
    with Node(tmp_path / "alone", run_file, *asked, corpus=corpus, program=program) as node:
        node.wait_for("round")
        (battery / "status").write_text("Discharging\n")
        until(lambda: [hold["cause"] for hold in holds()] == ["battery"])
        stands_still()
        assert "the machine runs on its battery" in swarmnode("health", "--data-dir", node.home).stdout
        (battery / "status").write_text("Charging\n")
        goes_on()

        typed = time.time()
        os.utime(terminal, (typed, typed))
        until(lambda: [hold["cause"] for hold in holds()] == ["in use"])
        stands_still()
        (hold,) = holds()
        assert "typed at a terminal" in hold["why"] and hold["until"] == pytest.approx(typed + 300, abs=1)
        os.utime(terminal, (typed - 300, typed))
        goes_on()

        idle.write_text("#!/bin/sh\necho IdleHint=no IdleSinceHint=1\n")
        until(lambda: bool(holds()))
        assert "the desktop was in use" in holds()[0]["why"]
        stands_still()
        idle.write_text("#!/bin/sh\necho IdleHint=yes IdleSinceHint=1\n")
        goes_on()
    assert "Traceback" not in node.log()
