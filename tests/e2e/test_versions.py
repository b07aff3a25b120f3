"""Nodes of two versions meet, as real daemons: what they agree on goes on, and where they cannot, each owner is told
which side to upgrade.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from realnodes import Node, until

from swarmnode.node.exitcodes import RUN_UNAVAILABLE

NEWER = str(Path(__file__).resolve().parents[1] / "support" / "newer.py")


@pytest.mark.slow
def test_a_newer_node_whose_messages_say_more_trains_with_older_ones(
    tmp_path: Path, run_file: Path, corpus: Path
) -> None:
    newer = (sys.executable, NEWER, "fields")
    with Node(tmp_path / "old", run_file, "--wait-peers", "2", corpus=corpus) as old:
        join = ("--join", old.ready["multiaddr"], "--run", old.ready["run_id"])
        with (
            Node(tmp_path / "new", *join, corpus=corpus, program=newer) as new,
            Node(tmp_path / "third", "--join", new.ready["multiaddr"], corpus=corpus) as third,
        ):
            nodes = (old, new, third)
            until(lambda: len(set.intersection(*(set(node.states()) for node in nodes))) >= 3)
            for round in set.intersection(*(set(node.states()) for node in nodes)):
                assert len({node.states()[round] for node in nodes}) == 1, f"state of round {round}"
            assert all(node.wait_for("round", lambda event: event["members"] == 3) for node in nodes)
            assert third.command_line("health")["problems"] == []
            sent = [event for event in new.events if event["event"] == "round"]
            assert sent[-1]["counted"] and sent[-1]["missing"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "named", [pytest.param(True, id="run-named", marks=pytest.mark.thorough), pytest.param(False, id="run-asked-for")]
)
def test_where_major_versions_differ_each_owner_is_told_which_side_to_upgrade(
    tmp_path: Path, run_file: Path, corpus: Path, named: bool
) -> None:
    newer = (sys.executable, NEWER, "major")
    with Node(tmp_path / "old", run_file, corpus=corpus) as old:
        run = ("--run", old.ready["run_id"]) if named else ()
        with Node(tmp_path / "new", "--join", old.ready["multiaddr"], *run, corpus=corpus, program=newer) as new:
            assert new.wait() == RUN_UNAVAILABLE
        assert "speaks protocol 2" in new.log() and "this node speaks 3: upgrade that peer" in new.log()
        until(lambda: "this node speaks 2: upgrade this node" in old.log())
        assert old.next_round()["members"] == 1, "and goes on with its own work"
