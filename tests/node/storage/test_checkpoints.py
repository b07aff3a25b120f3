"""Whatever moment the machine stops at, a node restarts from a whole checkpoint of the history that it was on."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from swarmnode.node.storage import checkpoints as module
from swarmnode.node.storage.checkpoints import HOUR, Checkpoints, CheckpointWriter, newest_round, read_manifest
from swarmnode.node.storage.datadir import DataDirError, DataDirVersion, NoSpace
from swarmnode.protocols.methods.context import Observer
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.runner import in_thread
from swarmnode.training.outer import Layout, OuterState, state_hash

RUN, P = "ab" * 32, 20
LAYOUT = Layout.of([("w", (P,))])


def a_checkpoint(round: int, *, history: int = 0) -> Saved:
    parameters = np.full(P, round + 1000 * history, np.float32)
    state = OuterState(parameters, np.ones(P, np.float32))
    residual = np.arange(P, dtype=np.float32)
    return Saved(round, state, residual, ("p", "q"), "diloco", b"\0what the method keeps")


def store(folder: Path, *, keep: int = 3, run_id: str = RUN, layout: Layout = LAYOUT, hours: float = 0) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", run_id=run_id, layout=layout, keep=keep, hours=hours)


def rounds(folder: Path) -> list[int]:
    """Rounds of which there are checkpoints; nothing else is there."""
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    found = sorted({int(name[6:14]) for name in names})
    assert names == [f"round-{r:08d}.{end}" for r in found for end in ("json", "safetensors")]
    return found


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = a_checkpoint(40)
    store(tmp_path).save(saved)
    found = store(tmp_path).newest()
    assert found is not None
    assert (found.round, found.members, found.method, found.extra) == (40, ("p", "q"), "diloco", saved.extra)
    for name in ("parameters", "momentum"):
        vector = getattr(found.state, name)
        assert vector.tobytes() == getattr(saved.state, name).tobytes() and not vector.flags.writeable
    assert found.residual.tobytes() == saved.residual.tobytes()


def test_older_ones_make_room_under_a_cap_on_the_disk_and_the_newest_stays(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=10)
    for round in range(1, 5):
        kept.save(a_checkpoint(round))
    one = sum(file.stat().st_size for file in (tmp_path / "checkpoints").glob("round-00000004.*"))
    kept.room = 3.5 * one
    kept.save(a_checkpoint(5))
    assert rounds(tmp_path) == [3, 4, 5]
    kept.room = 0
    kept.save(a_checkpoint(6))
    assert rounds(tmp_path) == [5, 6]


def test_zeros_take_no_room_and_negative_zeros_stay_what_they_are(tmp_path: Path) -> None:
    zeros, negative = np.zeros(P, np.float32), np.full(P, -0.0, np.float32)
    ones = np.ones(P, np.float32)
    full = store(tmp_path / "full").save(Saved(1, OuterState(ones, ones), ones, ()))
    state = OuterState(negative, zeros)
    path = store(tmp_path).save(Saved(1, state, zeros, ()))
    assert full.stat().st_size - path.stat().st_size >= 2 * 4 * P
    found = store(tmp_path).newest()
    assert found is not None and found.extra == b""
    assert found.state.parameters.tobytes() == negative.tobytes()
    assert found.state.momentum.tobytes() == found.residual.tobytes() == zeros.tobytes()


def test_a_manifest_says_of_which_run_model_and_round_it_is(tmp_path: Path) -> None:
    saved = a_checkpoint(7)
    manifest = read_manifest(store(tmp_path).save(saved).with_suffix(".json"))
    assert (manifest.run_id, manifest.round, manifest.state_hash) == (RUN, 7, state_hash(7, LAYOUT, saved.state))
    assert manifest.table == LAYOUT


def test_a_manifest_that_says_more_than_this_version_reads_is_read(tmp_path: Path) -> None:
    path = store(tmp_path).save(a_checkpoint(501)).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "spec": "", "written": 1.0}))
    found = store(tmp_path).newest()
    assert found is not None and found.round == 501


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert store(tmp_path).newest() is None


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=2)
    for round in (5, 10, 15, 20):
        checkpoints.save(a_checkpoint(round))
    assert rounds(tmp_path) == [15, 20]


def test_older_ones_stay_at_growing_distances_as_far_back_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1_700_000_000.0
    monkeypatch.setattr(time, "time", lambda: clock)
    kept = Checkpoints(tmp_path / "checkpoints", run_id=RUN, layout=LAYOUT, keep=2, hours=8)
    for round in range(240):  # one every 6 minutes, for a day
        clock += HOUR / 10
        manifest = kept.save(a_checkpoint(round)).with_suffix(".json")
        os.utime(manifest, (clock, clock))
    back = [(239 - round) / 10 for round in rounds(tmp_path)]  # hours
    assert len(back) <= 2 + 2 * 4 and back[-2:] == [0.1, 0.0] and back[0] < 16.1
    for low in (1.0, 2.0, 4.0, 8.0):
        assert any(low <= age <= 2 * low + 0.1 for age in back), (low, back)


def test_a_history_that_was_given_up_is_not_what_a_node_restarts_from(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for round in (90, 95, 100):
        checkpoints.save(a_checkpoint(round))
    better = a_checkpoint(40, history=1)
    checkpoints.save(better)
    found = store(tmp_path).newest()
    assert found is not None and found.state.parameters.tobytes() == better.state.parameters.tobytes()
    assert rounds(tmp_path) == [40]


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "remove", "manifest", "empty", "round", "list", "nan", "shape", "header", "format"]
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = store(tmp_path)
    checkpoints.save(a_checkpoint(5))
    newest = a_checkpoint(10)
    if damage == "nan":
        newest.residual[0] = np.nan
    if damage == "shape":
        newest = dataclasses.replace(newest, residual=np.ones(3, np.float32))
    path = checkpoints.save(newest)
    manifest = path.with_suffix(".json")
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[-1] ^= 1
            path.write_bytes(content)
        case "header":
            path.write_bytes(b"\xff" * 8 + content[8:])
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
        case "round" | "format":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), damage: "ten"}))
    with caplog.at_level(logging.WARNING):
        found = store(tmp_path).newest()
    assert found is not None and found.round == 5
    assert "round-00000010 is skipped" in caplog.text


def test_a_checkpoint_of_another_run_is_not_loaded(tmp_path: Path) -> None:
    store(tmp_path).save(a_checkpoint(5))
    assert store(tmp_path, run_id="cd" * 32).newest() is None


def test_a_node_with_another_model_does_not_begin_over_the_checkpoints_of_the_former(tmp_path: Path) -> None:
    for round in (995, 1000):
        store(tmp_path).save(a_checkpoint(round))
    with pytest.raises(DataDirVersion, match="holds checkpoints of another model"):
        store(tmp_path, layout=Layout.of([("v", (P,))])).newest()
    found = store(tmp_path).newest()
    assert found is not None and found.round == 1000 and rounds(tmp_path) == [995, 1000]


@contextmanager
def stopping_at(function: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine stops where the block comes to this function of `checkpoints`."""

    def stop(*anything: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, function, stop)
        yield


@pytest.mark.parametrize("stops_at", ["write_tensors", "write_atomic"])
def test_a_machine_that_stops_while_saving_loses_only_that_checkpoint(
    tmp_path: Path, stops_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = store(tmp_path, keep=1)
    checkpoints.save(a_checkpoint(5))
    with stopping_at(stops_at, monkeypatch):
        checkpoints.save(a_checkpoint(10))
    found = store(tmp_path).newest()
    assert found is not None and found.round == 5
    checkpoints.save(a_checkpoint(15))
    assert rounds(tmp_path) == [15]  # nothing half-written stays


def test_what_stopped_saves_left_is_gone_before_the_next_takes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = store(tmp_path)
    moments = {"moments": np.ones(7, np.float32), "updates": 2}
    checkpoints.save(dataclasses.replace(a_checkpoint(5), **moments))
    for round in (10, 15, 10):
        with stopping_at("write_atomic", monkeypatch):
            checkpoints.save(dataclasses.replace(a_checkpoint(round), **moments))
    with stopping_at("write_tensors", monkeypatch):
        checkpoints.save(a_checkpoint(20))
    ends = ("json", "moments", "safetensors")
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [f"round-00000005.{end}" for end in ends]


@pytest.mark.parametrize("stops_at", ["write_tensors", "write_atomic", "state_hash"])
def test_a_machine_that_stops_while_saving_a_round_once_more_has_what_was_saved_of_it(
    tmp_path: Path, stops_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = store(tmp_path, keep=1)
    checkpoints.save(a_checkpoint(5))
    for _ in range(2):
        with stopping_at(stops_at, monkeypatch):
            checkpoints.save(a_checkpoint(5, history=1))
        found = store(tmp_path).newest()
        assert found is not None and found.round == 5 and found.state.parameters[0] == 5
        assert newest_round(tmp_path / "checkpoints") == 5
    checkpoints.save(a_checkpoint(5, history=1))
    found = store(tmp_path).newest()
    assert found is not None and found.state.parameters[0] == 1005
    assert rounds(tmp_path) == [5]


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_a_machine_that_stops_while_it_moves_a_round_aside_has_all_of_that_round(
    tmp_path: Path, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, replace = store(tmp_path, keep=1), os.replace
    checkpoints.save(dataclasses.replace(a_checkpoint(5), moments=np.ones(7, np.float32), updates=2))
    moves: list[object] = []

    def move(old: Path, new: Path) -> None:
        if len(moves) == moved:
            raise KeyboardInterrupt
        replace(old, new)
        moves.append(new)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", move)
        checkpoints.save(a_checkpoint(5, history=1))
    found = store(tmp_path).newest()
    assert found is not None and found.round == 5 and found.state.parameters[0] == 5
    assert found.moments is not None and found.updates == 2
    checkpoints.save(a_checkpoint(5, history=1))
    assert rounds(tmp_path) == [5]


SAVES_UNTIL_KILLED = """
import sys
from pathlib import Path
import numpy as np
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.protocols.methods.method import Saved
from swarmnode.training.outer import Layout
from swarmnode.training.outer import OuterState
size = 1 << 20
layout = Layout.of([("w", (size,))])
kept = Checkpoints(Path(sys.argv[1]), run_id="ab" * 32, layout=layout, keep=2)
vectors = np.random.default_rng(0).normal(size=(3, size)).astype("f4")
state = OuterState(vectors[0], vectors[1])
for round in range(100_000):
    kept.save(Saved(round, state, vectors[2], ()))
    print(round, flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_whole_checkpoints_and_no_rubbish(tmp_path: Path) -> None:
    layout, folder = Layout.of([("w", (1 << 20,))]), tmp_path / "checkpoints"
    for delay in (0.0, 0.004, 0.009, 0.015):
        command = [sys.executable, "-c", SAVES_UNTIL_KILLED, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            done = int(writer.stdout.readline())
            threading.Event().wait(delay)  # somewhere within the second one
            writer.send_signal(signal.SIGKILL)
            done = max([done, *map(int, writer.stdout.read().split())])
        found = store(tmp_path, layout=layout).newest()
        assert found is not None and found.round in (done, done + 1)  # the last may not have been told
    store(tmp_path, layout=layout).save(found)
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


class Told(Observer):
    def __init__(self) -> None:
        self.warnings: list[str | None] = []

    def warn(self, cause: str, text: str | None) -> None:
        self.warnings.append(text)


def test_a_full_disk_loses_nothing_and_is_told(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(a_checkpoint(5))
    small = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = Told()

    async def main() -> None:
        writer = CheckpointWriter(kept, runner=in_thread, observer=told)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, small[1]))
            try:
                writer.put(a_checkpoint(10))
                await writer.settled()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, small)
            assert told.warnings[-1] is not None and rounds(tmp_path) == [5]
            assert writer.failure is not None and newest_round(tmp_path / "checkpoints") == 5
            writer.put(a_checkpoint(15))
            await writer.settled()
            assert writer.failure is None
            nursery.cancel_scope.cancel()

    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        trio.run(main)
    finally:
        signal.signal(signal.SIGXFSZ, handled)
    assert told.warnings[-1] is None and rounds(tmp_path) == [5, 15]


def test_the_newest_round_on_the_disk_is_of_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    assert newest_round(tmp_path / "checkpoints") is None
    kept = store(tmp_path)
    for round in (5, 10, 15):
        last = kept.save(a_checkpoint(round))
    assert newest_round(last.parent) == 15
    last.unlink()
    assert newest_round(last.parent) == 10
    (last.parent / "round-00000010.json").write_text("damaged")
    assert newest_round(last.parent) == 5


def test_no_space_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    kept.save(a_checkpoint(5))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace):
        kept.save(a_checkpoint(10))
    assert rounds(tmp_path) == [5]


def test_a_folder_that_cannot_be_made_is_an_error_that_the_session_reports(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    with pytest.raises(DataDirError):
        store(tmp_path).save(a_checkpoint(5))


def test_training_goes_on_while_a_checkpoint_is_written_and_the_last_one_put_is_written(tmp_path: Path) -> None:
    free, begun, saved = threading.Event(), threading.Event(), []

    class Slow(Checkpoints):
        def save(self, checkpoint: Saved) -> Path:
            begun.set()
            assert free.wait(10)
            saved.append(checkpoint.round)
            return super().save(checkpoint)

    async def main() -> None:
        kept = Slow(tmp_path / "checkpoints", run_id=RUN, layout=LAYOUT, keep=3)
        writer = CheckpointWriter(kept, runner=in_thread, observer=Told())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            writer.put(a_checkpoint(1))
            await trio.to_thread.run_sync(begun.wait)
            for round in (2, 3, 4):
                writer.put(a_checkpoint(round))  # nobody waits
            free.set()
            await writer.settled()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert saved == [1, 4] and rounds(tmp_path) == [1, 4]


def test_moments_come_back_with_the_newest_checkpoint_and_lie_beside_it_alone(tmp_path: Path) -> None:
    kept, moments = store(tmp_path), np.arange(30, dtype=np.float32)
    for round in (1, 2):
        kept.save(dataclasses.replace(a_checkpoint(round), moments=moments + round, updates=5 * round))
    found = kept.newest()
    assert found is not None and found.moments is not None
    assert (found.moments.tolist(), found.updates) == ((moments + 2).tolist(), 10)
    assert [path.name for path in kept.folder.glob("*.moments")] == ["round-00000002.moments"]
    kept.save(a_checkpoint(3))
    assert not list(kept.folder.glob("*.moments")) and kept.newest().moments is None  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", ["cut off", "foreign", "gone", "infinite"])
def test_moments_that_are_not_whole_are_left_out_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, moments = store(tmp_path), np.arange(30, dtype=np.float32)
    if damage == "infinite":
        moments[3] = np.inf
    saved = dataclasses.replace(a_checkpoint(1), moments=moments, updates=5)
    path = kept.save(saved).with_suffix(".moments")
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "foreign":
        module.write_tensors(path, {"moments": moments + 1}, {})
    elif damage == "gone":
        path.unlink()
    found = kept.newest()
    assert found is not None and found.round == 1 and found.moments is None
    assert "fresh moments" in caplog.text
