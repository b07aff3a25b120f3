"""A node whose trainer is several processes, in a swarm of real daemons: it loses one, and the swarm goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from realnodes import Node, agree, children, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("--ranks", "2"), id="ddp", marks=pytest.mark.thorough),
        pytest.param(("--ranks", "2", "--sharded"), id="fsdp2"),
    ],
)
def test_a_rank_is_killed_and_its_node_trains_on_in_the_swarm(
    how: tuple[str, ...], tmp_path: Path, corpus: Path, run_file: Path
) -> None:
    with Node(tmp_path / "creator", run_file, "--wait-peers", "2", corpus=corpus) as creator:
        join = ("--join", creator.ready["multiaddr"], "--run", creator.ready["run_id"])
        with (
            Node(tmp_path / "one", *join, corpus=corpus) as one,
            Node(tmp_path / "several", *join, *how, corpus=corpus) as several,
        ):
            swarm = [creator, one, several]
            for node in swarm:
                node.wait_for("round", lambda event: event["steps"] > 0)
            agree(*swarm)
            before = several.command_line("status")["trainer"]
            assert before["ranks"] == 2
            (other,) = children(before["pid"])
            os.kill(other, signal.SIGKILL)
            until(lambda: several.command_line("status")["trainer"]["restarts"] > before["restarts"])
            here = max(one.states())
            several.wait_for("round", lambda event: event["round"] > here and event["steps"] > 0)
            one.wait_for("round", lambda event: event["round"] > here + 1)
            assert several.command_line("status")["trainer"]["pid"] != before["pid"]
            assert agree(*swarm) > 0
