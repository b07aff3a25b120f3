"""Commands where no daemon runs: what works works, the rest says what to do, and nobody sees a traceback."""

from __future__ import annotations

import json
import os
import socket
import time
from json import loads as only_json  # one value and nothing after it
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli import inspect, steer
from swarmnode.cli.main import main
from swarmnode.cli.terminal import heed
from swarmnode.node.control.client import ControlClient, ControlError
from swarmnode.node.exitcodes import CONFIG, DATADIR_BUSY, ERROR, NOT_RUNNING, OK, USAGE
from swarmnode.node.invite import Invitation
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.history import HISTORY, History, PastRound

PEER_ID = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"
RUN_ID = "3f9c21ab04de" + "0" * 52
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["health"],
        ["top"],
        ["peers"],
        ["peers", "show", "x"],
        ["bw"],
        ["dht", "stats"],
        ["ping", "x"],
        ["sample", "x"],
        ["pause"],
        ["resume"],
        ["stop"],
        ["logs"],
        ["id", "--join"],
    ],
)
def test_asking_a_daemon_that_is_not_there_says_how_to_start_one(swarmnode: Any, arguments: list[str]) -> None:
    asked = swarmnode(*arguments)
    assert asked.returncode == NOT_RUNNING
    assert "no swarmnode daemon is running" in asked.stderr and "swarmnode run" in asked.stderr
    assert "Traceback" not in asked.stderr and asked.stdout == ""


def test_a_daemon_that_stands_still_is_waited_for_as_long_as_was_said(swarmnode: Any, home: Path) -> None:
    with DataDir(home) as held, socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(held.prepare_socket()))
        frozen.listen()
        began = time.monotonic()
        stopped = swarmnode("stop", "--timeout", "1")
        assert time.monotonic() - began < 15, "a call to a daemon takes up to 30 s otherwise"
        assert stopped.returncode == ERROR and "did not answer stop within 1 s" in stopped.stderr
        assert f"kill -CONT {os.getpid()}" in stopped.stderr and f"kill -9 {os.getpid()}" in stopped.stderr


def test_stop_waits_for_the_daemon_that_it_asked_and_not_for_one_that_is_started_in_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holders = iter([7, 7, 8])
    monkeypatch.setattr(DataDir, "holder", lambda _: next(holders))
    monkeypatch.setattr(steer, "ask", lambda *_, **__: None)
    steer.stop(wait=True, timeout=10)
    assert "stopped" in capsys.readouterr().out


def test_caps_of_a_node_that_does_not_run_are_those_of_its_next_start(swarmnode: Any, home: Path) -> None:
    def cpu(*changes: str) -> float:
        told = swarmnode("caps", *changes, "--json")
        assert told.returncode == OK and told.stderr == ""
        shown = only_json(swarmnode("config", "show", "--json").stdout)["settings"]["cpu"]["value"]
        assert only_json(told.stdout)["caps"]["cpu"] == {"value": shown, "unit": "%"}
        return float(shown)

    assert swarmnode("caps", "cpu=40").returncode == NOT_RUNNING and not home.exists()
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text("cpu = 60\n")
    assert "next start" in swarmnode("caps").stdout
    assert [cpu(), cpu("cpu=40"), cpu(), cpu("cpu=")] == [60, 40, 40, 60]
    assert swarmnode("caps", "cpu=900").returncode == CONFIG and cpu() == 60
    none = swarmnode("caps", "method=5")
    assert none.returncode == CONFIG and "method is no cap" in none.stderr


def test_with_json_an_error_is_json_too(swarmnode: Any) -> None:
    asked = swarmnode("status", "--json", SWARMNODE_DWON="1")
    error = only_json(asked.stderr)["error"]
    assert error["exit_code"] == asked.returncode == NOT_RUNNING
    assert "swarmnode run" in error["message"]


def test_id_makes_a_key_and_keeps_it(swarmnode: Any, home: Path) -> None:
    first, second = swarmnode("id"), swarmnode("id", "--json")
    assert first.returncode == OK and first.stdout.startswith("12D3KooW")
    assert only_json(second.stdout)["peer_id"] == first.stdout.strip()
    assert (home.stat().st_mode & 0o077) == 0


def test_a_wrong_passphrase_is_said(swarmnode: Any) -> None:
    assert swarmnode("id", SWARMNODE_PASSPHRASE="right").returncode == OK
    wrong = swarmnode("id", SWARMNODE_PASSPHRASE="wrong")
    assert wrong.returncode == CONFIG and "passphrase does not open" in wrong.stderr


def test_version_tells_the_program_and_no_daemon(swarmnode: Any) -> None:
    from swarmnode import __version__

    answer = only_json(swarmnode("version", "--json").stdout)
    assert answer["version"] == __version__ and answer["daemon"] is None
    assert swarmnode("--version").stdout == f"swarmnode {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"), [("st", {"status", "steer", "stop", "state"}), ("config ", {"check", "show"})]
)
def test_a_shell_completes_commands(swarmnode: Any, typed: str, offered: set[str]) -> None:
    """As the script of `swarmnode --show-completion` asks for them in bash."""
    words = f"swarmnode {typed}"
    position = str(words.count(" "))
    done = swarmnode(COMP_WORDS=words, COMP_CWORD=position, _SWARMNODE_COMPLETE="complete_bash")
    assert done.returncode == OK and set(done.stdout.split()) == offered, done.stderr
    script = swarmnode(_SWARMNODE_COMPLETE="source_bash")
    assert script.returncode == OK and "complete -o default -F" in script.stdout


def test_config_check_tells_a_run_file_from_a_node_configuration(swarmnode: Any, tmp_path: Path) -> None:
    run = only_json(swarmnode("config", "check", str(REPOSITORY / "examples" / "byte-lm.toml"), "--json").stdout)
    assert run["kind"] == "run" and len(run["run_id"]) == 64 and not run["own_task"]
    own = tmp_path / "own.toml"
    own.write_text('[run]\nname = "x"\n[task]\nname = "byte-ml"\n')
    assert "'byte-ml' is none of the built-in ones, byte-lm, " in swarmnode("config", "check", str(own)).stdout
    node = tmp_path / "node.toml"
    node.write_text("port = 4078\n")
    answer = only_json(swarmnode("config", "check", str(node), "--json").stdout)
    assert answer["kind"] == "node" and answer["values"] == {"port": 4078}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[run]\nname = 'x'\n[inner]\nlrr = 1", ["[inner]", "'lrr'", "'lr'"]),
        ("[run]\nname = 'x'\n[inner]\nsteps = 0", ["steps = 0", "1 to 1e+06 steps"]),
        ("port = 123456", ["port = 123456", "0 to 65535"]),
        ("port = -1\nnicer = 2", ["port = -1", "'nicer'", "'nice'"]),
        ("join = ['x']\nlisten = 'y'", ["join = 'x'", "listen = 'y'"]),
        ("port = ", ["not valid TOML"]),
    ],
)
def test_a_wrong_file_ends_with_the_place_and_the_range(
    swarmnode: Any, tmp_path: Path, text: str, parts: list[str]
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    checked = swarmnode("config", "check", str(file))
    assert checked.returncode == CONFIG
    assert all(part in checked.stderr for part in ["wrong.toml", *parts]), checked.stderr
    assert "Traceback" not in checked.stderr


def test_config_show_tells_where_each_value_came_from(swarmnode: Any, home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("port = 4078\n")
    shown = swarmnode("config", "show", "--json", SWARMNODE_UP="2.5", SWARMNODE_DWON="1")
    settings = only_json(shown.stdout)["settings"]
    assert settings["port"] == {"value": 4078, "origin": str(home / "config.toml")}
    assert settings["up"] == {"value": 2.5, "origin": "env SWARMNODE_UP"}
    assert settings["nice"]["origin"] == "default"
    assert shown.stderr == "", "a program reads errors there and no remarks"
    warned = swarmnode("config", "show", SWARMNODE_DWON="1").stderr
    assert "SWARMNODE_DWON" in warned and "SWARMNODE_DOWN" in warned


def test_leave_deletes_a_run_only_when_told(swarmnode: Any, home: Path) -> None:
    run = DataDir(home).run(RUN_ID)
    run.mkdir(parents=True)
    (run / "model.safetensors").write_bytes(b"x")
    refused = swarmnode("leave")
    assert refused.returncode == USAGE and "--yes" in refused.stderr and run.exists()
    left = swarmnode("leave", RUN_ID[:6], "--yes", "--json")
    assert left.returncode == OK and only_json(left.stdout) == {"run_id": RUN_ID, "deleted": [str(run)]}
    assert not run.exists()
    nothing = swarmnode("leave", "--yes")
    assert nothing.returncode == ERROR and "no run is known here" in nothing.stderr


def test_leave_asks_which_of_several_runs(swarmnode: Any, home: Path) -> None:
    for letter in "ab":
        DataDir(home).run(letter * 64).mkdir(parents=True)
    asked = swarmnode("leave", "--yes")
    assert asked.returncode == USAGE and "a" * 64 in asked.stderr and "b" * 64 in asked.stderr
    assert len(DataDir(home).known_runs()) == 2


def test_leave_does_not_delete_under_a_daemon_that_does_not_answer(swarmnode: Any, home: Path) -> None:
    with DataDir(home) as held:
        held.run(RUN_ID).mkdir(parents=True)
        refused = swarmnode("leave", "--yes")
        assert refused.returncode == DATADIR_BUSY and held.run(RUN_ID).exists()


def test_logs_of_a_daemon_that_is_frozen_come_from_its_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datadir, asked = DataDir(home), list[float | None]()
    datadir.logs.mkdir(parents=True)
    line = {"time": "2026-11-25T00:00:00Z", "level": "INFO", "logger": "swarmnode.node", "message": "the last word"}
    (datadir.logs / "swarmnode.jsonl").write_text(json.dumps(line) + "\n")

    def frozen(self: ControlClient, method: str, *, timeout: float | None = None, **params: Any) -> Any:
        asked.append(timeout)
        raise ControlError("the daemon did not answer logs within 10 s")

    monkeypatch.setattr(ControlClient, "stream", frozen)
    heed(home, False)
    try:
        inspect.logs()
    finally:
        heed(None, False)
    told = capsys.readouterr()
    assert asked[0] is not None and "the last word" in told.out and "does not answer" in told.err


def test_logs_of_a_daemon_that_has_ended_are_shown(swarmnode: Any, home: Path) -> None:
    folder = DataDir(home).logs
    folder.mkdir(parents=True)
    line = '{"time": "2025-01-31T12:00:00.123Z", "level": "ERROR", "logger": "x", "message": "the last words"}'
    (folder / "swarmnode.jsonl").write_text(line + "\n")
    shown = swarmnode("logs")
    assert shown.returncode == OK and "the last words" in shown.stdout and "no daemon is running" in shown.stderr


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["status", "--frob"], ["ping"], ["run", "--run", "abc"], ["run", "--port", "x"]]
)
def test_a_command_line_that_is_not_understood_has_its_own_exit_code(swarmnode: Any, arguments: list[str]) -> None:
    asked = swarmnode(*arguments)
    assert asked.returncode == USAGE and asked.stderr.startswith("swarmnode: ") and "Traceback" not in asked.stderr


def test_a_mistyped_command_is_told_the_next_one_and_none_shows_all(swarmnode: Any) -> None:
    assert "no command 'statsu'; did you mean status?" in swarmnode("statsu").stderr
    assert swarmnode().stderr.startswith("Usage: ")


def test_help_may_be_asked_for_as_a_command(swarmnode: Any) -> None:
    assert swarmnode("help").stdout == swarmnode("--help").stdout != ""
    assert swarmnode("help", "runs", "ls").stdout == swarmnode("runs", "ls", "--help").stdout != ""


def test_every_command_warns_of_a_mistyped_variable(swarmnode: Any) -> None:
    said = swarmnode("runs", "ls", SWARMNODE_DATADIR="/somewhere")
    assert said.returncode == 0 and "SWARMNODE_DATADIR" in said.stderr and "mean SWARMNODE_DATA_DIR?" in said.stderr


def test_who_names_a_folder_is_told_of_a_file_in_it(swarmnode: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    for command in (("run",), ("config", "check")):
        refused = swarmnode(*command, str(tmp_path))
        assert refused.returncode == CONFIG and f"such as {tmp_path / 'mine.toml'}" in refused.stderr, refused


@pytest.mark.parametrize("arguments", [["none.toml"], ["--port", "70000"], ["--role", "king"], ["--join", "1.2.3.4"]])
def test_run_refuses_wrong_settings_before_anything_starts(swarmnode: Any, home: Path, arguments: list[str]) -> None:
    started = swarmnode("run", *arguments)
    assert started.returncode == CONFIG and arguments[-1] in started.stderr and "Traceback" not in started.stderr
    assert not home.exists()


def test_who_starts_a_node_reads_so_at_once_and_of_a_missing_task_before_anything_starts(
    swarmnode: Any, home: Path
) -> None:
    started = swarmnode("run", "--task", "nowhere.py:Sum")
    assert started.returncode == CONFIG and "nowhere.py cannot be read" in started.stderr
    assert started.stderr.startswith(f"swarmnode starts, with its data in {home}; some seconds\n")
    assert not home.exists()


def test_history_comes_from_the_disk_as_table_curve_and_data(
    swarmnode: Any, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = swarmnode("history")
    assert empty.returncode == ERROR and "no run is known here" in empty.stderr
    history = History(home / "runs" / RUN_ID / HISTORY)
    for round in range(30):
        told = {"loss": 8.0 - round / 10, "accuracy": 0.125, "seconds": 2.0, "trained_s": 1.5, "waited_s": 0.5}
        told |= {
            "own": "\x1b[2Jaccepted" if round == 29 else "accepted",
            "tokens": 1000,
            "bytes_in": 1e6,
            "bytes_out": 2e6,
        }
        told |= {"missing": ["peer\x1b"], "why": {"peer\x1b": "late"}} if round == 29 else {}
        history.append(PastRound(round, f"{round:064d}", ("a",), at=1_700_000_000 + round, figures=told))
    rounds = only_json(swarmnode("history", RUN_ID[:6], "--json").stdout)["rounds"]
    assert len(rounds) == 30 and rounds[29]["why"] == {"peer\x1b": "late"}
    table = swarmnode("history")
    assert len(table.stdout.splitlines()) == 23 and "(late)" in table.stdout and "\x1b" not in table.stdout
    assert {"RIGHT", "TRAINED", "WAITED"} <= set(table.stdout.splitlines()[1].split()) and " 12.5% " in table.stdout
    gave = "counted in 29 of 30 rounds: 30.0 k tokens, 45 s of training, 30.0 MB in, 60.0 MB out"
    assert gave in table.stdout
    monkeypatch.setattr("swarmnode.cli.history.MOST", 10)
    assert main(["history", "--data-dir", str(home)]) == OK
    assert capsys.readouterr().out == table.stdout, "the table has the newest rounds, however many there are"
    lines = swarmnode("history", "--csv", "--since", "28").stdout.splitlines()
    assert lines[0].startswith("round,time,loss,") and [line.split(",")[0] for line in lines[1:]] == ["28", "29"]
    drawn = swarmnode("history", "--plot").stdout.splitlines()
    assert drawn[1].strip().startswith("8 ") and drawn[-2].strip().startswith("5.1 ")
    assert drawn[-1].split() == ["round", "0", "round", "29"]
    assert swarmnode("history", "--plot", "--csv").returncode == USAGE


def test_an_invitation_that_was_mistyped_says_so_before_anything_starts(swarmnode: Any) -> None:
    word = Invitation((f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}",), RUN_ID).encode()
    wrong = swarmnode("join", word[:-1])
    assert wrong.returncode == USAGE and "is cut off, or a character of it is wrong" in wrong.stderr
    as_a_file = swarmnode("run", word)
    assert as_a_file.returncode == USAGE and f"join it with: swarmnode join {word}" in as_a_file.stderr
    other = swarmnode("run", "--join", word, "--run", "0" * 64)
    assert other.returncode == USAGE and "are two runs, by --run or the links" in other.stderr


def test_a_node_has_a_name_that_a_person_gave_it(swarmnode: Any) -> None:
    assert swarmnode("id", "--name", "Anna's desktop").stdout.endswith("  Anna's desktop\n")
    assert only_json(swarmnode("id", "--json").stdout)["name"] == "Anna's desktop"
    for wrong in ("", "x" * 33, "a\x1b[2J", "two\nlines"):
        refused = swarmnode("id", "--name", wrong)
        assert refused.returncode == USAGE and "1 to 32 printable characters" in refused.stderr


def test_who_joins_where_a_node_runs_already_is_told_at_once(swarmnode: Any, tmp_path: Path) -> None:
    with DataDir(tmp_path / "node"):
        for words in (["join", "byte-lm"], ["join", "/ip4/127.0.0.1/tcp/1/p2p/" + "12D3KooW" + "x" * 44], ["run"]):
            done = swarmnode(*words, "--data-dir", str(tmp_path / "node"))
            assert done.returncode == DATADIR_BUSY, done.stderr
            assert "runs on it already" in done.stderr and "swarmnode stop" in done.stderr
            assert "looking for runs" not in done.stderr and "starts" not in done.stderr
