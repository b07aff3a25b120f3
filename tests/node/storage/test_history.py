"""The history of a run survives restarts, cut-off lines and full disks, and tells one history only."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.node.storage.datadir import DataDirError
from swarmnode.node.storage.history import ALL, HISTORY, MOST, History, PastRound, figures, read_history


def entry(round: int, *counted: str, history: int = 0) -> PastRound:
    return PastRound(
        round, f"{history}{round:063d}", counted, roster="r" * 64 if round % 2 else "", at=1_700_000_000 + round
    )


def test_what_is_appended_is_read_again_also_across_restarts(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "history.jsonl"
    entries = [entry(0, "a", "b"), entry(1, "a", "b"), entry(2, "a"), entry(5, "a"), entry(6)]
    history = History(path)
    for one in entries[:3]:
        history.append(one)
    history = History(path)
    for one in entries[3:]:
        history.append(one)
    assert read_history(path) == tuple(entries)
    assert read_history(tmp_path / "none") == ()


def test_peers_are_written_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    for round in range(100):
        history.append(entry(2 * round, *(["p" * 52] * 64)))
    assert path.stat().st_size < 100 * 130 + 64 * 60


def test_another_history_takes_the_place_of_rounds_that_were_given_up(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    for round in range(10):
        history.append(entry(round, "a"))
    for round in (4, 5):
        history.append(entry(round, "b", history=1))
    assert [(e.round, e.state_hash[0]) for e in read_history(path)] == [
        *((r, "0") for r in range(4)),
        (4, "1"),
        (5, "1"),
    ]


@pytest.mark.parametrize("kept", [1, 30, 100])
def test_a_line_that_was_cut_off_costs_that_line_only(
    tmp_path: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.jsonl"
    History(path).append(entry(0, "a"))
    before = path.read_bytes()
    History(path).append(entry(1, "a"))
    path.write_bytes(path.read_bytes()[: len(before) + kept])
    History(path).append(entry(2, "a"))
    with caplog.at_level(logging.WARNING):
        assert read_history(path) == (entry(0, "a"), entry(2, "a"))
    assert "line 2 is left out" in caplog.text


@pytest.mark.parametrize("garbage", ["{", "5", '"a"', "[]", "null", "{}", '{"round": 1e999, "hash": "a", "at": 0}'])
def test_a_line_of_garbage_is_left_out(tmp_path: Path, garbage: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f"{garbage}\n")
    History(path).append(entry(0, "a"))
    assert read_history(path) == (entry(0, "a"),)


def test_a_history_that_cannot_be_written_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataDirError, match="file"):
        History(tmp_path / "file" / "history.jsonl").append(entry(0))


def lines(path: Path, *rounds: int, loss: float = 2.5) -> None:
    history = History(path)
    for round in rounds:
        history.append(replace(entry(round, "a", "b"), figures={"loss": loss, "members": 2, "counted": 9}))


def test_people_get_figures_and_provenance_is_the_same_with_and_without_them(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines(path, 0, 1)
    assert figures(path) == [{"round": r, "time": 1_700_000_000 + r, "loss": 2.5, "members": 2} for r in (0, 1)]
    assert read_history(path) == (entry(0, "a", "b"), entry(1, "a", "b"))
    assert figures(tmp_path / "none") == []


@pytest.mark.parametrize("block", [7, 1000])
def test_only_what_is_new_is_read_and_of_one_history(tmp_path: Path, monkeypatch: Any, block: int) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr("swarmnode.node.storage.history.BLOCK", block)
    lines(path, *range(10))
    lines(path, 4, 5, 6, loss=1.0)
    assert [(each["round"], each["loss"]) for each in figures(path, 3)] == [(3, 2.5), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert [each["round"] for each in figures(path)] == list(range(7))
    assert figures(path, 7) == []


def test_a_long_history_is_told_in_a_thousand_rounds_the_last_among_them(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines(path, *range(2500))
    with path.open("ab") as file:
        file.write(b'{"round": 2500, "ha')  # the machine stopped
    told = [each["round"] for each in figures(path)]
    assert 800 < len(told) <= MOST and told == sorted(set(told))
    assert told[-50:] == [*range(2450, 2500)], "of the newest none is left out"


def test_a_file_that_grew_too_large_loses_its_older_half_and_nobody_who_counted(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("swarmnode.node.storage.history.LIMIT", 20_000)
    path = tmp_path / "history.jsonl"
    history = History(path)
    for round in range(1000):
        history.append(entry(round, "a", "b"))
        assert path.stat().st_size < 20_500
    found = read_history(path)
    assert found == tuple(entry(round, "a", "b") for round in range(found[0].round, 1000)) and len(found) > 50


def test_sums_are_over_all_rounds(tmp_path: Path) -> None:
    history = History(tmp_path / HISTORY)
    for round in range(2500):
        history.append(PastRound(round, "h", (), figures={"tokens": 2}))
    path = tmp_path / HISTORY
    assert len(figures(path)) <= MOST and sum(each["tokens"] for each in figures(path, most=ALL)) == 5000
