"""Programs that draw curves get every number of every round: what TensorBoard and Weights & Biases read back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.history import _write, run_on_disk
from swarmnode.node.exitcodes import CONFIG, USAGE
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.history import HISTORY, History, PastRound

RUN_ID = "3f9c21ab04de" + "0" * 52
PLACE = f"-{RUN_ID[:12]}"  # the test's run has lost its specification, and so its name


def rounds(home: Path, *which: int, late: bool = False) -> None:
    history = History(home / "runs" / RUN_ID / HISTORY)
    for round in which:
        told = {"loss": 8.0 - round / 8, "members": 3, "own": "accepted", "missing": ["peer"]}
        history.append(PastRound(round, f"{round:064d}", ("a",), at=1_700_000_000 + round + late, figures=told))


def read_back(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, value and time of each curve."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    if not list(folder.glob("events.*")):
        return {}
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_every_number_once_however_often_it_is_written(
    swarmnode: Any, home: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    rounds(home, *range(20))
    for _ in range(2):
        done = swarmnode("history", "--tensorboard", str(tmp_path / "logs"), "--json")
        assert json.loads(done.stdout) == {"run_id": RUN_ID, "written": 20}
    found = read_back(tmp_path / "logs" / PLACE)
    assert found["loss"] == [(round, 8.0 - round / 8, 1_700_000_000 + round) for round in range(20)]
    assert found.keys() == {"loss", "members"}


def test_a_run_that_trains_is_followed_until_ctrl_c(swarmnode: Any, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    rounds(home, 0, 1)
    program = Path(sys.executable).with_name("swarmnode")
    command = [program, "history", "--tensorboard", tmp_path / "logs", "--follow", "--data-dir", home]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as following:
        try:
            for have in (2, 3):
                give_up = time.monotonic() + 30
                while len(read_back(tmp_path / "logs" / PLACE).get("loss", ())) < have:
                    assert time.monotonic() < give_up and following.poll() is None
                    time.sleep(0.2)
                rounds(home, have)
        finally:
            following.send_signal(signal.SIGINT)
        said, _ = following.communicate(timeout=20)
    assert following.returncode == 0 and "rounds written" in said


def test_weights_and_biases_has_them_without_a_server(swarmnode: Any, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    rounds(home, 0, 1, 2)
    told = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = swarmnode("history", "--wandb", "mine", **told)
    assert done.returncode == 0 and "3 rounds written" in done.stdout, done.stderr
    [kept] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert kept.read_bytes().count(b"loss") >= 3


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_without_the_library_it_says_which_to_install(swarmnode: Any, home: Path, tmp_path: Path, extra: str) -> None:
    rounds(home, 0)
    (tmp_path / f"{extra}.py").write_text('raise ImportError("it is not here")')
    done = swarmnode("history", f"--{extra}", str(tmp_path / "logs"), "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == CONFIG
    told = json.loads(done.stderr)["error"]["message"]
    assert " install " in told and f"[{extra}]" in told


def test_who_follows_from_a_later_round_on_gets_none_before_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, written = iter([(), (3, 4, 5, 6)]), list[dict[str, Any]]()

    def sleep(_: float) -> None:
        try:
            rounds(home, *next(ends))
        except StopIteration:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("swarmnode.cli.history.time.sleep", sleep)
    rounds(home, 0, 1, 2)
    begun = {"run_id": RUN_ID, "rounds": []}
    assert _write([nullcontext(written.append)], DataDir(home), begun, since=5, follow=True) == 2
    assert [each["round"] for each in written] == [5, 6]


def test_who_follows_is_told_the_history_that_the_node_went_over_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, written = iter([(2,), (), (1,), (2, 3)]), list[dict[str, Any]]()

    def sleep(_: float) -> None:
        try:
            rounds(home, *next(ends), late=len(written) > 2)
        except StopIteration:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("swarmnode.cli.history.time.sleep", sleep)
    rounds(home, 0, 1)
    answer = run_on_disk(DataDir(home), RUN_ID, 0)
    told = [_write([nullcontext(written.append)], DataDir(home), answer, since=0, follow=True) for _ in range(2)]
    assert told == [None, 4]
    assert [each["round"] for each in written] == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("arguments", [["--follow"], ["--wandb", "mine", "--csv"], ["--tensorboard", "logs", "--plot"]])
def test_what_has_no_meaning_together_is_refused(swarmnode: Any, arguments: list[str]) -> None:
    assert swarmnode("history", *arguments).returncode == USAGE
