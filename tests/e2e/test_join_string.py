"""The line that `swarmnode id --join` prints in an open run: it names a recent roster, which a newcomer insists on."""

from __future__ import annotations

from pathlib import Path

import pytest
from realnodes import RUN_TOML, Node, agree, until

from swarmnode.node.invite import decode, invite

pytestmark = pytest.mark.slow

OPEN_TOML = (
    RUN_TOML.replace('name = "tiny"', 'name = "tiny-open"\ntrust = "open"')
    .replace("steps = 100", "steps = 40")  # a line names a roster after five rounds
    .replace("[exchange]", '[exchange]\nmethod = "open"')
)


@pytest.mark.timeout(400)
def test_a_newcomer_joins_by_the_printed_line_and_by_no_other_history(tmp_path: Path, corpus: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(OPEN_TOML)
    with Node(tmp_path / "first", run_file, corpus=corpus) as first:
        until(lambda: len(first.states()) > 5, within=200)
        told = first.command_line("id", "--join")
        printed = told["join"].split()
        assert printed[:2] == ["swarmnode", "join"] and decode(printed[2]).roster == told["roster"]

        with Node(tmp_path / "second", "--join", printed[2], corpus=corpus) as second:
            second.wait_for("caught_up", within=120)
            second.next_round()
            assert agree(first, second) > 0
            assert "this node could not tell" not in second.log()

        told = first.command_line("id", "--join")  # a new one: members keep 64 rounds
        round, id = told["roster"].split(":")
        other = invite(told["addresses"], told["run_id"], f"{round}:{'0' * len(id)}")
        with Node(tmp_path / "third", "--join", other, corpus=corpus) as third:
            until(lambda: "Ask somebody whom you trust" in third.log(), within=120)
            (told,) = [each for each in third.command_line("status")["problems"] if "of your join line" in each]
            assert "ended with another roster there" in told and third.states() == {}
