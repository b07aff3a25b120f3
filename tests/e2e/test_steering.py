"""The owner of a run changes values of it while real nodes train."""

from __future__ import annotations

from pathlib import Path

import pytest
from realnodes import RUN_TOML, Node, swarmnode, until

pytestmark = pytest.mark.slow


def test_two_daemons_train_by_what_the_owner_changed_and_say_so(tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN_TOML)
    with Node(tmp_path / "owner", run, corpus=corpus) as node:
        node.wait_for("round")
        join = ("--join", node.ready["multiaddr"], "--run", node.ready["run_id"])
        with Node(tmp_path / "joiner", *join, corpus=corpus) as joiner:
            joiner.wait_for("round")
            refused = swarmnode("steer", "inner.lr=3e-4", "--data-dir", tmp_path / "joiner")
            assert refused.returncode == 1 and "only a run's owner" in refused.stderr
            told = node.command_line("steer", "inner.lr=1e-8", "inner.steps=2", "exchange.codec=fp16")
            wanted = {"inner.lr": 1e-8, "inner.steps": 2, "exchange.codec": "fp16"}
            (planned,) = told["coming"]
            assert planned["values"] == wanted
            first = planned["from_round"]
            for one in (node, joiner):
                until(lambda one=one: (one.command_line("status")["run"]["round"] or 0) > first + 1)
                run = one.command_line("status")["run"]
                assert (run["codec"], run["steering"]["now"]) == ("fp16", {"from_round": first, "values": wanted})
            rounds = [one.command_line("history")["rounds"] for one in (node, joiner)]
            for each in (each for seen in rounds for each in seen):
                assert each.get("steered", {}) == (wanted if each["round"] >= first else {})
                assert each["round"] < first or each["steps"] == 2
            losses = [each["loss"] for each in rounds[0] if each["round"] >= first]
            assert max(losses) - min(losses) < 2e-3  # by a rate of 1e-8 nothing is learned any more
