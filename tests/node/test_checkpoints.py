"""Whatever moment the machine stops at, a node restarts from a whole checkpoint of the history that it was on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from swarmnode.node import checkpoints as module
from swarmnode.node.checkpoints import Checkpoint, Checkpoints
from swarmnode.node.datadir import DataDirError
from swarmnode.training.layout import Layout
from swarmnode.training.outer import OuterState, state_hash

RUN, P = "ab" * 32, 20
LAYOUT = Layout.of([("w", (P,))])


def a_checkpoint(round: int, *, history: int = 0) -> Checkpoint:
    parameters = np.full(P, round + 1000 * history, np.float32)
    state = OuterState(parameters, np.ones(P, np.float32))
    residual = np.arange(P, dtype=np.float32)
    return Checkpoint(round, state_hash(round, LAYOUT, state), state, residual, ("p", "q"))


def store(folder: Path, *, keep: int = 3, run_id: str = RUN, layout: Layout = LAYOUT) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", run_id=run_id, layout=layout, keep=keep)


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = a_checkpoint(40)
    store(tmp_path).save(saved)
    found = store(tmp_path).newest()
    assert found is not None
    assert (found.round, found.state_hash, found.voters) == (40, saved.state_hash, ("p", "q"))
    for name in ("parameters", "momentum"):
        assert getattr(found.state, name).tobytes() == getattr(saved.state, name).tobytes()
    assert found.residual.tobytes() == saved.residual.tobytes()


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert store(tmp_path).newest() is None


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=2)
    for round in (5, 10, 15, 20):
        checkpoints.save(a_checkpoint(round))
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"round-000000{r}.{end}" for r in (15, 20) for end in ("json", "safetensors")]


def test_a_history_that_was_given_up_is_not_what_a_node_restarts_from(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for round in (90, 95, 100):
        checkpoints.save(a_checkpoint(round))
    better = a_checkpoint(40, history=1)
    checkpoints.save(better)
    found = store(tmp_path).newest()
    assert found is not None and found.state_hash == better.state_hash
    assert {p.stem for p in (tmp_path / "checkpoints").iterdir()} == {"round-00000040"}


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "empty", "round", "list", "nan", "shape"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = store(tmp_path)
    checkpoints.save(a_checkpoint(5))
    newest = a_checkpoint(10)
    if damage == "nan":
        newest.residual[0] = np.nan
    if damage == "shape":
        newest = Checkpoint(10, newest.state_hash, newest.state, np.zeros(3, np.float32), ())
    path = checkpoints.save(newest)
    manifest = path.with_suffix(".json")
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[-1] ^= 1
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-10])
        case "remove":
            path.unlink()
        case "manifest":
            manifest.write_bytes(b"{")
        case "empty":
            manifest.write_bytes(b"")
        case "list":
            manifest.write_bytes(b"[]")
        case "round":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "round": "ten"}))
    with caplog.at_level(logging.WARNING):
        found = store(tmp_path).newest()
    assert found is not None and found.round == 5
    assert "round-00000010 is skipped" in caplog.text


def test_a_checkpoint_of_another_run_or_model_is_not_loaded(tmp_path: Path) -> None:
    store(tmp_path).save(a_checkpoint(5))
    assert store(tmp_path, run_id="cd" * 32).newest() is None
    assert store(tmp_path, layout=Layout.of([("v", (P,))])).newest() is None


@pytest.mark.parametrize("stops_at", [1, 2])
def test_a_machine_that_stops_while_saving_loses_only_that_checkpoint(
    tmp_path: Path, stops_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = store(tmp_path, keep=1)
    checkpoints.save(a_checkpoint(5))
    writes = 0
    write = module.write_atomic

    def stop(path: Path, content: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes == stops_at:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(module, "write_atomic", stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(a_checkpoint(10))
    found = store(tmp_path).newest()
    assert found is not None and found.round == 5
    monkeypatch.undo()
    checkpoints.save(a_checkpoint(15))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2  # nothing half-written stays


def test_a_folder_that_cannot_be_made_is_an_error_that_the_session_reports(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    with pytest.raises(DataDirError):
        store(tmp_path).save(a_checkpoint(5))
