"""`swarmnode provenance`: a model leaves a data directory with its record, without a daemon, and is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import DataDir, RunStore
from swarmnode.node.storage.history import HISTORY, History, PastRound
from swarmnode.protocols.methods.method import Saved
from swarmnode.training.outer import Layout, OuterState, state_hash
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import RunSection

LAYOUT = Layout.of([("w", (2, 4))])


@pytest.fixture
def run(home: Path) -> RunSpec:
    """A run in the data directory, one round long."""
    store, spec = RunStore(DataDir(home)), RunSpec(RunSection(name="test"))
    store.keep(spec)
    state = OuterState(np.ones(8, np.float32), np.zeros(8, np.float32))
    folder = store.folder(spec.run_id)
    History(folder / HISTORY).append(PastRound(0, state_hash(1, LAYOUT, state), ("someone\x1b[2J",)))
    kept = Checkpoints(folder / "checkpoints", run_id=spec.run_id, layout=LAYOUT, keep=1)
    kept.save(Saved(1, state, np.zeros(8, np.float32), ("someone",)))
    return spec


def test_a_model_is_exported_and_verified_without_a_daemon(swarmnode: Any, run: RunSpec, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    done = swarmnode("provenance", "export", str(model), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["run"] == run.run_id and told["record"] == str(tmp_path / "model.provenance.json")
    done = swarmnode("provenance", "verify", str(model), "--json", "--maker", told["maker"])
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["valid"] and all(check["holds"] for check in answer["checks"])
    shown = swarmnode("provenance", "verify", told["record"])
    assert shown.returncode == 0 and "own history" in shown.stdout and "someone" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_an_export_into_a_missing_folder_says_so(swarmnode: Any, run: RunSpec, tmp_path: Path) -> None:
    done = swarmnode("provenance", "export", str(tmp_path / "nowhere" / "model.safetensors"))
    assert done.returncode != 0 and f"there is no directory {tmp_path / 'nowhere'}" in done.stderr
    assert "--data-dir" not in done.stderr


def test_what_does_not_hold_is_named_and_is_a_failure(swarmnode: Any, run: RunSpec, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    assert swarmnode("provenance", "export", str(model)).returncode == 0
    done = swarmnode("provenance", "verify", str(model), "--maker", "12D3KooWsomebodyElse")
    assert done.returncode == 1 and done.stderr.strip().endswith("does not hold: maker")
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    done = swarmnode("provenance", "verify", str(model), "--json")
    assert done.returncode == 1 and not json.loads(done.stdout)["valid"]
    assert "model, state" in json.loads(done.stderr)["error"]["message"]


def test_what_cannot_be_exported_is_told_in_words(swarmnode: Any, home: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    done = swarmnode("provenance", "export", str(model))
    assert done.returncode == 3 and "no run is known here" in done.stderr
    store = RunStore(DataDir(home))
    for name in ("one", "two"):
        store.keep(RunSpec(RunSection(name=name)))
    done = swarmnode("provenance", "export", str(model))
    assert done.returncode == 2 and "--run" in done.stderr
    done = swarmnode("provenance", "export", str(model), "--run", store.known()[0][:8])
    assert done.returncode == 1 and "no whole checkpoint" in done.stderr
    assert swarmnode("provenance", "export", str(tmp_path / "model.bin")).returncode == 2
    done = swarmnode("provenance", "verify", str(model))
    assert done.returncode == 1 and "cannot be read" in done.stderr
