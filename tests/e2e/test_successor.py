"""A run goes on as another one: real nodes, from the owner's word to the first round of the new run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from realnodes import RUN_TOML, Node, swarmnode, until
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow


def parameters(manifest: Path) -> bytes:
    return np.asarray(load_file(manifest.with_suffix(".safetensors"))["parameters"]).tobytes()


def test_a_run_with_other_settings_begins_from_the_state_of_the_one_it_continues(tmp_path: Path, corpus: Path) -> None:
    home, joiner_home = tmp_path / "owner", tmp_path / "joiner"
    owner = json.loads(swarmnode("id", "--json", "--data-dir", home).stdout)["peer_id"]
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(RUN_TOML.replace("[run]", f'[run]\nowner = "{owner}"'))
    new.write_text(f"{old.read_text()}\n[outer]\nmomentum = 0.5\n")
    with Node(home, old, "--checkpoint-every", "1", corpus=corpus) as node:
        node.wait_for("round")
        join = ("--join", node.ready["multiaddr"], "--run", node.ready["run_id"])
        with Node(joiner_home, *join, corpus=corpus) as joiner:
            assert joiner.ready["run_id"] == node.ready["run_id"]
            refused = swarmnode("successor", "end", "--yes", "--data-dir", joiner_home)
            assert refused.returncode == 1 and "only a run's owner" in refused.stderr
            node.command_line("pause")
            told = node.command_line("successor", "publish", str(new), "--reason", "momentum")
            until(lambda: any(told["successor"] in w for w in joiner.command_line("status")["warnings"]))
        parent = node.ready["run_id"]
    # an exchange that was under way when the node was paused may have ended one round more
    last = home / "runs" / parent / "checkpoints" / f"round-{told['round']:08d}.json"
    begun_from = home / "runs" / told["successor"] / "parent" / "round-00000000.json"
    assert parameters(last) == parameters(begun_from)
    with Node(home, "--run", told["successor"], "--checkpoint-every", "1", corpus=corpus) as node:
        first = node.wait_for("round")
        assert first["round"] == 0
        join = ("--join", node.ready["multiaddr"], "--run", told["successor"])
        with Node(joiner_home, *join, corpus=corpus) as joiner:
            assert joiner.wait_for("round")["state_hash"]
