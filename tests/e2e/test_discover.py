"""A stranger with one address finds a run and joins it by its name, and needs the seed no more."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from realnodes import Node, swarmnode, until

from swarmnode.node.exitcodes import USAGE

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_a_stranger_joins_a_run_by_its_name_and_the_seed_may_go(tmp_path: Path, run_file: Path, corpus: Path) -> None:
    with Node(tmp_path / "seed", "--role", "relay", "--dashboard", "off", corpus=None) as seed:
        place = ("--bootstrap", seed.ready["multiaddr"])
        with (
            Node(tmp_path / "member", run_file, *place, corpus=corpus) as member,
            Node(tmp_path / "other", run_file, *place, corpus=corpus) as other,
        ):
            ids = {node.ready["run_id"]: node.ready["peer_id"] for node in (member, other)}

            def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
                return swarmnode(*arguments, *place, "--data-dir", tmp_path / "stranger", SWARMNODE_MDNS="off")

            def found() -> set[str]:
                told = ask("discover", "--json")
                assert told.returncode == 0, told.stderr
                runs = json.loads(told.stdout)["runs"]
                assert all(each["name"] == "tiny" and each["signed_by"] == [ids[each["run_id"]]] for each in runs)
                return {each["run_id"] for each in runs if each["by_owner"]}

            until(lambda: found() == set(ids))
            twice = ask("join", "tiny")
            assert twice.returncode == USAGE and "2 runs are called 'tiny'; say which:" in twice.stderr

            wanted = member.ready["run_id"]
            newcomer = Node(tmp_path / "stranger", wanted[:12], "--unlisted", *place, corpus=corpus)
            newcomer.command[1] = "join"
            with newcomer:
                joining = newcomer.wait_for("joining")
                assert (joining["signed_by"], joining["by_owner"]) == ([ids[wanted]], True)
                newcomer.wait_for("caught_up")
                seed.end()
                newcomer.next_round()
                assert wanted in {run["run_id"] for run in newcomer.command_line("discover")["runs"]}
                assert wanted not in {run["run_id"] for run in member.command_line("discover")["runs"]}
