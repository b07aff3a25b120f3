"""The runs on a machine, from the disk: listed, shown, compared, chosen by name, and deleted only when told."""

from __future__ import annotations

import os
from json import loads as only_json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.main import main
from swarmnode.node.control.client import ControlError
from swarmnode.node.exitcodes import ERROR, OK, USAGE
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.history import HISTORY, History, PastRound
from swarmnode.training.runspec import RunSpec, encode, parse_runspec

OWNER = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"


@pytest.fixture
def two(home: Path) -> list[RunSpec]:
    """Two runs with rounds, of which the second learned faster."""
    specs = []
    for lr in (0.001, 0.002):
        tables = {"run": {"name": f"rate-{lr * 1000:.0f}", "owner": OWNER}, "inner": {"lr": lr}}
        specs.append(spec := parse_runspec(tables, source="test"))
        folder = DataDir(home).run(spec.run_id)
        folder.mkdir(parents=True)
        (folder / "run.spec").write_bytes(encode(spec))
        history = History(folder / HISTORY)
        for round in range(3):
            measured = {"loss": 5 - 1000 * lr * round, "tokens": 100}
            history.append(PastRound(round, "ab" * 32, (OWNER,), at=1e9 + 3600 * round, figures=measured))
    return specs


def test_runs_are_listed_with_what_tells_them_apart(swarmnode: Any, two: list[RunSpec]) -> None:
    listed = swarmnode("runs", "ls").stdout.splitlines()
    assert len(listed) == 3 and sorted(line.split()[0] for line in listed[1:]) == ["rate-1", "rate-2"]
    answer = {one["name"]: one for one in only_json(swarmnode("runs", "ls", "--json").stdout)["runs"]}
    second = answer["rate-2"]
    assert (second["rounds"], second["last"], second["owner"], second["checkpoint"]) == (3, 1.0, OWNER, None)
    assert second["time"] == 1e9 + 7200 and second["bytes"] > 500


def test_what_a_run_by_rollouts_earned_is_called_a_reward(swarmnode: Any, home: Path, two: list[RunSpec]) -> None:
    spec = parse_runspec({"run": {"name": "digits"}, "task": {"name": "digits-rl"}}, source="test")
    folder = DataDir(home).run(spec.run_id)
    folder.mkdir(parents=True)
    (folder / "run.spec").write_bytes(encode(spec))
    History(folder / HISTORY).append(PastRound(0, "ab" * 32, (OWNER,), at=2e9, figures={"reward": 0.75}))
    listed = swarmnode("runs", "ls").stdout.splitlines()
    assert "LOSS" not in listed[0] and "0.7500 reward" in listed[1] and "bits per byte" in listed[2]
    assert "last result 0.7500 reward" in swarmnode("runs", "show", "digits").stdout
    ends = swarmnode("runs", "compare", "rate-1", "digits").stdout.splitlines()[-6:]
    assert ends[0].split() == ["unit", "bits", "per", "byte", "reward"]


def test_a_run_that_has_done_nothing_yet_is_listed_and_shown(swarmnode: Any, home: Path, two: list[RunSpec]) -> None:
    (DataDir(home).run(two[0].run_id) / HISTORY).unlink()
    answer = {one["name"]: one for one in only_json(swarmnode("runs", "ls", "--json").stdout)["runs"]}
    assert (answer["rate-1"]["rounds"], answer["rate-2"]["rounds"]) == (0, 3)
    assert "rate-1" in swarmnode("runs", "show", "rate-1").stdout


def test_a_link_in_the_place_of_a_run_is_told_what_to_do_with(swarmnode: Any, two: list[RunSpec]) -> None:
    said = swarmnode("runs", "show", "swarm1zysyqqqq")
    assert said.returncode == 2 and "swarmnode join swarm1zysyqqqq" in said.stderr


@pytest.mark.parametrize("seen", [False, True])
def test_runs_are_listed_though_a_running_node_deletes_a_checkpoint_meanwhile(
    seen: bool, home: Path, two: list[RunSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, look = DataDir(home).run(two[0].run_id) / "checkpoints" / "round-00000001.safetensors", os.stat
    old.parent.mkdir()
    old.write_bytes(bytes(100))

    def stat(path: Any, **how: Any) -> os.stat_result:
        found = look(path, **how) if seen else None
        if str(path) == str(old):
            old.unlink(missing_ok=True)
        return found or look(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    assert main(["runs", "ls", "--data-dir", str(home)]) == OK
    assert "rate-1" in capsys.readouterr().out


def test_a_run_is_shown_by_name_or_beginning_of_its_id(
    swarmnode: Any, two: list[RunSpec], home: Path, tmp_path: Path
) -> None:
    for wanted in ("rate-2", two[1].run_id[:10]):
        shown = swarmnode("runs", "show", wanted)
        assert shown.returncode == OK and "inner.lr" in shown.stdout and "0.002" in shown.stdout
    (tmp_path / "again.toml").write_text(swarmnode("runs", "show", "rate-2", "--toml").stdout)
    checked = only_json(swarmnode("config", "check", str(tmp_path / "again.toml"), "--json").stdout)
    assert checked["run_id"] == two[1].run_id
    unknown = swarmnode("runs", "show", "rate-3")
    assert unknown.returncode == USAGE and "rate-1" in unknown.stderr and two[0].run_id in unknown.stderr
    (DataDir(home).run(two[1].run_id) / "run.spec").write_bytes(b"damaged")
    assert swarmnode("runs", "show", two[1].run_id).returncode == ERROR
    assert "(damaged)" in swarmnode("runs", "ls").stdout


def test_two_runs_are_compared_by_settings_and_ends(swarmnode: Any, two: list[RunSpec]) -> None:
    answer = only_json(swarmnode("runs", "compare", "rate-1", "rate-2", "--json").stdout)
    assert answer["settings"] == {"run.name": ["rate-1", "rate-2"], "inner.lr": [0.001, 0.002]}
    assert [(end["last"], end["best"], end["hours"], end["tokens_here"]) for end in answer["ends"]] == [
        (3.0, 3.0, 2.0, 300),
        (1.0, 1.0, 2.0, 300),
    ]
    assert "inner.lr" in swarmnode("runs", "compare", "rate-1", "rate-2").stdout


def test_a_run_is_deleted_only_when_told(swarmnode: Any, two: list[RunSpec], home: Path) -> None:
    assert swarmnode("runs", "rm", "rate-1").returncode == USAGE and len(DataDir(home).known_runs()) == 2
    assert swarmnode("runs", "rm", "rate-1", "--yes").returncode == OK
    assert DataDir(home).known_runs() == (two[1].run_id,)


def test_run_takes_the_name_of_a_run_that_is_known_here(swarmnode: Any, two: list[RunSpec]) -> None:
    unknown = swarmnode("run", "rate-3")
    assert unknown.returncode == USAGE and f"swarmnode run {two[0].run_id}  rate-1" in unknown.stderr
    chosen = swarmnode("run", "rate-1", "--device", "none")  # stops before anything starts, and after the name
    assert "rate-1" not in chosen.stderr and "device" in chosen.stderr
    dotted = swarmnode("run", "rate-1.5")
    assert dotted.returncode == USAGE and "called 'rate-1.5'" in dotted.stderr, "a name may have a dot"


def test_runs_are_listed_beside_a_daemon_that_does_not_answer(
    two: list[RunSpec], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise ControlError("the daemon did not answer status")

    monkeypatch.setattr("swarmnode.cli.terminal.ControlClient.call", silent)
    assert main(["runs", "ls", "--data-dir", str(home)]) == OK
    assert "rate-1" in capsys.readouterr().out
