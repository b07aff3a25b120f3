"""`swarmnode local` against node programs that only pretend: they print the daemon's JSON events and obey signals.

What a node does wrong is told to it in the environment (`FAKE_NODES`), so that every fault happens at a known round.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from swarmnode.cli.init import init
from swarmnode.cli.local import run as local_run
from swarmnode.cli.local import swarm as local_swarm
from swarmnode.cli.local.command import local
from swarmnode.cli.local.report import figures, summarize
from swarmnode.cli.local.run import ask_for_heldout_loss
from swarmnode.cli.local.swarm import Attack, LocalOptions, LocalSwarm, RoundReport, SwarmFailed, round_report
from swarmnode.cli.local.view import LiveTable, table
from swarmnode.cli.main import main
from swarmnode.cli.terminal import UsageMistake
from swarmnode.node import exitcodes
from swarmnode.node.choice import wanted_by
from swarmnode.node.config import NodeConfig, load_config
from swarmnode.node.control.client import ControlError
from swarmnode.training.runspec import BUILT_IN_RUNS, RunSpec, load_runspec, parse_runspec

EXAMPLES = Path(__file__).parents[2] / "examples"
PARAMETERS = 1000  # of the fake node's model
FAKE_NODE = """
import argparse, hashlib, json, os, pathlib, signal, sys, time
p = argparse.ArgumentParser()
for name in ("command", "run_file"):
    p.add_argument(name, nargs="?")
for name in ("--data-dir", "--port", "--listen", "--threads", "--rounds", "--wait-peers", "--join", "--run", "--task"):
    p.add_argument(name)
for name in ("--no-mdns", "--no-dashboard", "--stay", "--json"):
    p.add_argument(name, action="store_true", required=True)
o = p.parse_args()
home = pathlib.Path(o.data_dir)
faults = json.loads(os.environ.get("FAKE_NODES", "{}")).get(home.name, {})
(home / "command.json").write_text(json.dumps(vars(o)))
(home / "pid").write_text(str(os.getpid()))

def on_sigint(*_):
    with (home / "goodbye").open("a") as f:
        f.write("goodbye\\n")
    if not faults.get("stubborn"):
        os._exit(0)

signal.signal(signal.SIGINT, on_sigint)
print("the log of", home.name, file=sys.stderr, flush=True)
if faults.get("fails_to_start"):
    sys.exit("corpus is empty")

def say(**event):
    print(json.dumps(event), flush=True)

say(event="ready", pid=os.getpid(), trainer_pid=os.getpid() + 1, peer_id="peer-of-" + home.name, data_dir=str(home),
    multiaddr="/ip4/127.0.0.1/tcp/1", run_id="ab" * 32, parameters=1000, join="")
while len(list(home.parent.glob("node-*/pid"))) <= int(o.wait_peers or 0):
    time.sleep(0.01)
for r in range(int(o.rounds)):
    if r == faults.get("dies_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    if r == faults.get("freezes_at"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if r == faults.get("pauses_at"):
        signal.pause()
    time.sleep(0.01)
    state = str(r) + (home.name if r == faults.get("diverges_at") else "")
    say(event="round", round=r, loss=float("nan") if r == faults.get("nan_at") else 8 / (r + 1),
        state_hash=hashlib.sha256(state.encode()).hexdigest(), outcome="Completed", seconds=0.01, bytes_in=400,
        bytes_out=500, compute_seconds=0.005, tokens=100, members=3, missing=[], extra="kept")
say(event="finished", rounds=int(o.rounds))
if faults.get("thaws"):
    time.sleep(0.3)
    pid = int((home.parent / faults["thaws"] / "pid").read_text())
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)
while True:
    signal.pause()
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    program = tmp_path / "fake_node.py"
    program.write_text(FAKE_NODE)
    return [sys.executable, "-S", str(program)]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(local_swarm, "TICK", 0.05)


def _options(tmp_path: Path, **changes: object) -> LocalOptions:
    settings: dict[str, object] = {"nodes": 3, "rounds": 6, "json": True, "report": tmp_path / "report"}
    return LocalOptions(**{**settings, "data_dir": tmp_path / "nodes", **changes})  # type: ignore[arg-type]


def run_local(
    options: LocalOptions, *, command: list[str], measure: Callable[[Path], float] = ask_for_heldout_loss
) -> int:
    """`swarmnode local` with another program for the daemon, and another answer to the question for the loss."""
    with (
        mock.patch.object(local_swarm, "NODE", tuple(command)),
        mock.patch.object(local_run, "ask_for_heldout_loss", measure),
    ):
        return local_run.run_local(options)


def _break(monkeypatch: pytest.MonkeyPatch, **faults: dict[str, object]) -> None:
    monkeypatch.setenv("FAKE_NODES", json.dumps({name.replace("_", "-"): fault for name, fault in faults.items()}))


def _events(out: str) -> list[dict]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in out.splitlines()]


def _rounds(events: list[dict], node: int) -> list[int]:
    return [event["round"] for event in events if event["event"] == "round" and event["node"] == node]


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def _wait(condition, limit: float = 20.0) -> bool:
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_json_is_nodes_in_order_then_rounds_then_one_summary(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, node_1={"nan_at": 2})
    code = run_local(_options(tmp_path), command=fake, measure=lambda data_dir: 2.5)
    events = _events(capsys.readouterr().out)

    assert code == exitcodes.OK
    assert [event["event"] for event in events] == ["node"] * 3 + ["round"] * 18 + ["summary"]
    assert [event["node"] for event in events[:3]] == [0, 1, 2]
    first = events[0]
    assert set(first) == {"event", "node", "pid", "trainer_pid", "peer_id", "data_dir", "multiaddr"}
    assert first["trainer_pid"] == first["pid"] + 1, "the pid is the node's own, not that of a parent"
    assert all(_rounds(events, node) == list(range(6)) for node in range(3))
    assert all(event["extra"] == "kept" for event in events if event["event"] == "round")
    assert [e["loss"] for e in events if e["event"] == "round" and e["node"] == 1][2] is None
    summary = events[-1]
    assert list(summary) == [
        "event",
        "nodes",
        "rounds",
        "parameters",
        "heldout_bits_per_byte",
        "solo_bits_per_byte",
        "hashes_agree",
        "bytes_per_parameter_round",
        "compute_share",
        "seconds",
        "loss_unit",
    ]
    assert (summary["nodes"], summary["rounds"], summary["parameters"]) == (3, 6, PARAMETERS)
    assert (summary["heldout_bits_per_byte"], summary["solo_bits_per_byte"]) == (2.5, None)
    assert summary["hashes_agree"] is True
    assert summary["bytes_per_parameter_round"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("source", "table", "named"),
    [
        ("class Asks:\n    def generate(self): ...\n    def verify(self): ...\n", "rollouts", "task.py:Asks"),
        ("class Asks: ...\n", "task", "asks"),
    ],
)
def test_a_task_of_ones_own_needs_no_run_file(tmp_path, fake, capsys, source, table, named):
    task = tmp_path / "task.py"
    task.write_text(source)
    assert run_local(_options(tmp_path, task=f"{task}:Asks", nodes=2), command=fake, measure=lambda _: 2.5) == 0
    run = tomllib.loads((tmp_path / "nodes/run.toml").read_text())
    assert named in (run[table].get("task"), run[table].get("name"))
    told = [json.loads((tmp_path / f"nodes/node-{i}/command.json").read_text()) for i in range(2)]
    assert [each["task"] for each in told] == [f"{task}:Asks"] * 2, "each node is told where the file is"


def test_what_is_asked_of_nobodys_file_is_in_the_run_alone(tmp_path, fake, capsys):
    gym = "gym:leg_counting"
    assert run_local(_options(tmp_path, task=gym, nodes=2), command=fake, measure=lambda _: 2.5) == 0
    assert tomllib.loads((tmp_path / "nodes/run.toml").read_text())["rollouts"]["task"] == gym
    assert json.loads((tmp_path / "nodes/node-0/command.json").read_text())["task"] is None
    with pytest.raises(UsageMistake, match="leave out the run file"):
        run_local(_options(tmp_path, task=gym, run_file=tmp_path / "nodes/run.toml"), command=fake)


def test_others_join_the_first_node_and_every_node_is_told_to_stop(tmp_path, fake, capsys):
    measured = []

    def measure(data_dir: Path) -> float:
        measured.append(data_dir)
        assert not (data_dir / "goodbye").exists(), "nodes are asked before they are stopped"
        return 2.5

    assert run_local(_options(tmp_path, threads=2), command=fake, measure=measure) == 0
    told = [json.loads((tmp_path / f"nodes/node-{i}/command.json").read_text()) for i in range(3)]
    assert told[0]["run_file"] == str(tmp_path / "nodes/run.toml") and told[0]["wait_peers"] == "2"
    assert told[1]["run_file"] is None
    assert {(t["join"], t["run"]) for t in told[1:]} == {("/ip4/127.0.0.1/tcp/1", "ab" * 32)}
    assert {(t["threads"], t["rounds"], t["port"], t["listen"]) for t in told} == {("2", "6", "0", "127.0.0.1")}
    assert measured == [tmp_path / "nodes/node-0"]
    for i in range(3):
        assert (tmp_path / f"nodes/node-{i}/goodbye").read_text() == "goodbye\n", "exactly one SIGINT"


def test_a_temporary_folder_is_removed_unless_it_is_kept(tmp_path, fake, capsys):
    run_local(_options(tmp_path, data_dir=None), command=fake, measure=lambda _: 2.5)
    assert list((tmp_path / "state").iterdir()) == []
    run_local(_options(tmp_path, data_dir=None, keep=True), command=fake, measure=lambda _: 2.5)
    (kept,) = (tmp_path / "state").iterdir()
    assert (kept / "node-1").is_dir() and str(kept) in capsys.readouterr().err


def test_survivors_finish_and_measure_after_a_node_dies(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, node_0={"dies_at": 2})
    measured = []
    code = run_local(_options(tmp_path), command=fake, measure=lambda data_dir: measured.append(data_dir) or 2.5)
    out = capsys.readouterr()
    events = _events(out.out)
    assert code == 0
    assert [_rounds(events, node) for node in range(3)] == [[0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert measured == [tmp_path / "nodes/node-1"], "the first survivor is asked"
    assert "node 0 is dead" in out.err
    assert '"state": "dead"' in (tmp_path / "report/index.html").read_text()


def test_a_node_that_dies_as_it_is_asked_for_the_report_keeps_none_of_the_others_from_leaving_in_order(
    tmp_path, fake, capsys, monkeypatch
):
    def portray(node: local_swarm.NodeProcess) -> None:
        if node.label == "1" and node.process is not None:
            node.process.kill()
            node.process.wait()

    monkeypatch.setattr(local_swarm.NodeProcess, "portray", portray)
    assert run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5) == exitcodes.OK
    assert [(tmp_path / f"nodes/node-{i}/goodbye").exists() for i in range(3)] == [True, False, True]


def test_a_frozen_node_is_not_waited_for_and_does_not_outlive_the_command(tmp_path, fake, capsys, monkeypatch):
    monkeypatch.setattr(local_swarm, "FROZEN_PATIENCE", 0.2)
    _break(monkeypatch, node_2={"freezes_at": 3})
    assert run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5) == 0
    out = capsys.readouterr()
    events = _events(out.out)
    assert _rounds(events, 2) == [0, 1, 2] and _rounds(events, 1) == list(range(6))
    assert "node 2 is frozen" in out.err
    assert _gone(events[2]["pid"])
    assert (tmp_path / "nodes/node-2/goodbye").exists(), "it is thawed to stop in order"


def test_a_thawed_node_is_waited_for_until_it_has_caught_up(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, node_2={"freezes_at": 3}, node_0={"thaws": "node-2"})
    assert run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5) == 0
    assert _rounds(_events(capsys.readouterr().out), 2) == list(range(6))


def test_a_thawed_node_that_never_catches_up_ends_the_wait_in_time(tmp_path, fake, capsys, monkeypatch):
    monkeypatch.setattr(local_swarm, "CATCH_UP_PATIENCE", 1.0)
    _break(monkeypatch, node_2={"freezes_at": 3, "pauses_at": 4}, node_0={"thaws": "node-2"})
    began = time.monotonic()
    assert run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5) == 0
    assert time.monotonic() - began < 60
    assert _rounds(_events(capsys.readouterr().out), 2) == [0, 1, 2, 3]


def test_when_all_nodes_die_the_command_fails_with_their_logs_and_keeps_them(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, **{f"node_{i}": {"dies_at": 2 + i} for i in range(3)})
    with pytest.raises(SwarmFailed, match="all nodes died") as failed:
        run_local(_options(tmp_path, data_dir=None), command=fake, measure=lambda _: 2.5)
    told, out = str(failed.value), capsys.readouterr()
    assert not any(event["event"] == "summary" for event in _events(out.out))
    assert "ended by SIGKILL" in told and "the log of node-2" in told
    assert len(list((tmp_path / "state").iterdir())) == 1


def test_a_node_that_cannot_start_ends_the_command_with_its_log(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, node_1={"fails_to_start": True})
    with pytest.raises(SwarmFailed, match="node 1 ended with exit code 1 before it was ready") as failed:
        run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5)
    assert "corpus is empty" in str(failed.value) and capsys.readouterr().out == ""
    started = list((tmp_path / "nodes").glob("node-*/pid"))  # node 2 may have been stopped before it wrote its own
    assert len(started) >= 2 and all(_gone(int(path.read_text())) for path in started)


def test_a_different_state_hash_in_one_round_is_seen(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, node_2={"diverges_at": 4})
    run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5)
    assert _events(capsys.readouterr().out)[-1]["hashes_agree"] is False


def test_solo_trains_one_node_afterwards_and_only_its_loss_is_told(tmp_path, fake, capsys):
    losses = {"node-0": 2.5, "solo-0": 2.75}
    assert run_local(_options(tmp_path, solo=True), command=fake, measure=lambda path: losses[path.name]) == 0
    events = _events(capsys.readouterr().out)
    assert [event["event"] for event in events] == ["node"] * 3 + ["round"] * 18 + ["summary"]
    assert (events[-1]["heldout_bits_per_byte"], events[-1]["solo_bits_per_byte"]) == (2.5, 2.75)
    alone = json.loads((tmp_path / "nodes/solo-0/command.json").read_text())
    assert (alone["join"], alone["wait_peers"], alone["rounds"], alone["threads"]) == (None, "0", "6", "1")
    page = (tmp_path / "report/index.html").read_text()
    assert "0.250 below the 2.750 of one node alone" in page


def test_a_failed_solo_run_keeps_the_summary_and_is_no_success(tmp_path, fake, capsys, monkeypatch):
    _break(monkeypatch, solo_0={"fails_to_start": True})
    assert run_local(_options(tmp_path, solo=True), command=fake, measure=lambda _: 2.5) == exitcodes.ERROR
    summary = _events(capsys.readouterr().out)[-1]
    assert summary["event"] == "summary" and summary["solo_bits_per_byte"] is None


def test_the_last_rounds_loss_stands_in_when_no_node_can_measure(tmp_path, fake, capsys):
    def fail(data_dir: Path) -> float:
        raise ControlError("no answer")

    assert run_local(_options(tmp_path), command=fake, measure=fail) == 0
    out = capsys.readouterr()
    assert _events(out.out)[-1]["heldout_bits_per_byte"] == pytest.approx(8 / 6)
    assert "node 0 could not measure the held-out loss: no answer" in out.err


@pytest.mark.parametrize("told", [{"heldout_bits_per_byte": None}, {"reward": None}])
def test_a_loss_that_is_no_number_is_told_as_training_that_diverged(tmp_path, told):
    answering = mock.patch.object(local_run.ControlClient, "call", lambda *_, **__: told)
    with answering, pytest.raises(ControlError, match="diverged"):
        ask_for_heldout_loss(tmp_path)


def test_a_node_that_ignores_sigint_is_killed_after_the_patience(tmp_path, fake, capsys, monkeypatch):
    monkeypatch.setattr(local_swarm, "STOP_PATIENCE", 0.3)
    _break(monkeypatch, node_1={"stubborn": True})
    assert run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5) == 0
    assert _gone(_events(capsys.readouterr().out)[1]["pid"])


@pytest.mark.parametrize("setting", ["JOIN", "BOOTSTRAP", "ROLE", "HOURS", "ONLY_WHEN_IDLE", "DISK"])
def test_settings_that_would_tie_the_nodes_to_another_swarm_or_hold_them_are_not_passed_on(
    tmp_path, monkeypatch, setting
):
    monkeypatch.setenv(f"SWARMNODE_{setting}", "1")
    seen = tmp_path / "environment"
    program = tmp_path / "show.py"
    program.write_text(f"import os; open({str(seen)!r}, 'w').write(os.environ.get('SWARMNODE_{setting}', 'none'))")
    with pytest.raises(SwarmFailed):  # the program is no node
        run_local(_options(tmp_path, nodes=1), command=[sys.executable, str(program)], measure=lambda _: 2.5)
    assert seen.read_text() == "none"


def test_a_wrong_run_file_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[run]\nname = "x"\n[inner]\nbach = 3\n')
    command = ["local", str(wrong), "--data-dir", str(tmp_path / "nodes")]
    assert main(command) == main([*command, "--json"]) == exitcodes.CONFIG
    words, told = [line for line in capsys.readouterr().err.splitlines() if "bach" in line]
    assert words.startswith("swarmnode: ") and "did you mean 'batch'" in words
    assert json.loads(told)["error"] == {"exit_code": exitcodes.CONFIG, "message": words.removeprefix("swarmnode: ")}
    assert not (tmp_path / "nodes").exists()


def test_without_json_people_get_a_line_a_round_and_a_summary(tmp_path, fake, capsys):
    assert run_local(_options(tmp_path, json=False), command=fake, measure=lambda _: 2.5) == 0
    out = capsys.readouterr().out
    assert "round 6 of 6, loss 1.333 bits per byte" in out and "3 of 3 agree" in out
    assert "2.5000 bits per byte" in out and "equal in every round" in out
    assert "event" not in out


def test_one_page_shows_all_nodes_while_they_train_and_is_gone_afterwards(tmp_path, fake, capsys):
    asked: list[list[dict]] = []

    def ask(_: Path) -> float:
        """At the end of the training, when all nodes are there."""
        address = capsys.readouterr().out.partition("in a browser: ")[2].split()[0]
        asked.append([address, *_nodes_at(address)])
        return 2.5

    assert run_local(_options(tmp_path, json=False, dashboard="127.0.0.1:0"), command=fake, measure=ask) == 0
    ((address, *nodes),) = asked
    assert [(node["node"], node["name"]) for node in nodes] == [(0, "0"), (1, "1"), (2, "2")]
    with pytest.raises(OSError):
        _nodes_at(address)
    taken = _options(tmp_path, json=False, dashboard="192.0.2.1:80")
    assert run_local(taken, command=fake, measure=lambda _: 2.5) == 0
    assert "there is no page to watch it" in capsys.readouterr().out


def _nodes_at(page: str) -> list[dict]:
    base, _, token = page.partition("#")
    asked = urllib.request.Request(f"{base}api/nodes", headers={"Authorization": f"Bearer {token}"})
    return json.load(urllib.request.urlopen(asked, timeout=10))


def test_a_short_run_by_rollouts_says_what_guessing_earns_and_when_learning_shows(tmp_path, fake, capsys):
    options = _options(tmp_path, json=False, run_file=Path(__file__).parents[2] / "examples" / "sapo.toml")
    assert run_local(options, command=fake, measure=lambda _: 0.041) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "who guesses earns 0.04; that policies learn shows by round 40 or so" in out


DRIVER = """
    import signal, sys
    from pathlib import Path
    from swarmnode.cli.local import run, swarm
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who began the tests in the background ignores it
    folder = Path(sys.argv[1])
    options = swarm.LocalOptions(nodes=3, rounds=6, json=True, report=folder / "report", data_dir=folder / "nodes")
    swarm.NODE, run.ask_for_heldout_loss = (sys.executable, "-S", sys.argv[2]), lambda _: 2.5
    sys.exit(run.run_local(options))
"""


def _start_driver(tmp_path: Path, fake: list[str]) -> subprocess.Popen[str]:
    driver = tmp_path / "driver.py"
    driver.write_text(textwrap.dedent(DRIVER))
    return subprocess.Popen(
        [sys.executable, str(driver), str(tmp_path), fake[-1]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _read_until(run: subprocess.Popen[str], wanted) -> list[dict]:
    events: list[dict] = []
    assert run.stdout is not None
    for line in run.stdout:
        events.append(json.loads(line))
        if wanted(events):
            break
    return events


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_nodes_even_a_frozen_one_die_when_the_command_is_killed(tmp_path, fake, monkeypatch):
    _break(monkeypatch, node_0={"pauses_at": 2}, node_1={"freezes_at": 2}, node_2={"pauses_at": 2})
    with _start_driver(tmp_path, fake) as run:
        events = _read_until(run, lambda events: len(events) == 9)
        pids = [event["pid"] for event in events[:3]]
        assert not any(_gone(pid) for pid in pids)
        run.kill()
    assert _wait(lambda: all(_gone(pid) for pid in pids))


@pytest.mark.parametrize("to_group", [True, False], ids=["ctrl-c", "sigterm"])
def test_an_interruption_stops_all_nodes_in_order_and_shows_what_was_reached(tmp_path, fake, monkeypatch, to_group):
    _break(monkeypatch, node_0={"pauses_at": 2}, node_1={"pauses_at": 2}, node_2={"pauses_at": 2})
    with _start_driver(tmp_path, fake) as run:
        events = _read_until(run, lambda events: len(events) == 9)
        if to_group:
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        else:
            run.terminate()
        out, err = run.communicate(timeout=30)
    assert run.returncode == exitcodes.FORCED
    (summary,) = _events(out)
    assert summary["event"] == "summary" and summary["rounds"] == 2
    assert summary["heldout_bits_per_byte"] == pytest.approx(4.0)
    assert "stopped before the end" in err and "Traceback" not in err
    assert all(_gone(event["pid"]) for event in events[:3])
    for i in range(3):
        assert (tmp_path / f"nodes/node-{i}/goodbye").read_text() == "goodbye\n", "a second SIGINT would force the node"


def test_the_command_line_reaches_the_options(tmp_path, monkeypatch):
    given: list[LocalOptions] = []
    monkeypatch.setattr(local_run, "run_local", lambda options: given.append(options) or 7)
    app = typer.Typer()
    app.command()(local)
    line = [
        "my.toml",
        "--nodes",
        "5",
        "--rounds",
        "12",
        "--solo",
        "--json",
        "--threads",
        "2",
        "--report",
        "r",
        "--keep",
        "--task",
        "my.py:Task",
    ]
    assert CliRunner().invoke(app, [*line, "--data-dir", "d"]).exit_code == 7
    page = NodeConfig().dashboard
    expected = LocalOptions(5, 12, Path("my.toml"), True, True, 2, Path("r"), True, Path("d"), dashboard=page)
    expected = replace(expected, task="my.py:Task")
    assert given == [expected]
    assert CliRunner().invoke(app, ["--nodes", "0"]).exit_code == exitcodes.USAGE


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("swarmnode.cli.local.command", ("torch", "trio", "libp2p", "numpy", "rich.live", "msgpack", "matplotlib")),
        ("swarmnode.cli.local.run", ("torch", "trio", "libp2p", "numpy", "matplotlib")),
    ],
)
def test_importing_the_command_loads_nothing_heavy(module, absent):
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def _report(number: int, *, ended_at: float, compute: float = 0.5, bytes_out: int = 2000) -> RoundReport:
    return RoundReport(number, 3.0, "h", 1.0, 0, bytes_out, compute, 100, ended_at)


def spec(method: str = "diloco") -> RunSpec:
    inner = {"lr": 1e-4, "clip": 2.0} if method == "seed" else {}
    tables = {"run": {"name": "byte-lm"}, "exchange": {"method": method}, "inner": inner}
    return parse_runspec(tables, source="a test")


def test_compute_share_spans_first_start_to_last_end_of_nodes_that_finished():
    full = [_report(0, ended_at=11.0), _report(1, ended_at=14.0)]  # 1 s computing in the 4 s from 10 to 14
    early = [_report(0, ended_at=11.0, compute=1.0)]
    summary = summarize([full, early, []], spec(), parameters=1000, heldout=None, solo=None, seconds=5)
    assert summary.compute_share == pytest.approx(0.25)
    assert summary.bytes_per_parameter_round == pytest.approx(2.0)
    assert (summary.nodes, summary.rounds, summary.gain) == (3, 2, None)


@pytest.mark.parametrize(("solo", "said"), [(3.5, "better"), (2.5, "worse")])
def test_whether_the_swarm_is_better_is_a_word_and_not_a_sign(solo, said):
    summary = summarize([[_report(0, ended_at=1.0)]], spec(), parameters=1, heldout=3.0, solo=solo, seconds=1)
    assert dict(figures(summary))[f"the swarm is {said} by"].startswith("0.5000")


def test_nothing_reported_is_no_agreement():
    assert summarize([[], []], spec(), parameters=0, heldout=None, solo=None, seconds=1).hashes_agree is False


def test_nodes_that_each_have_a_state_of_their_own_are_told_apart_by_distance_and_not_as_a_fault():
    spent = dict.fromkeys(("seconds", "bytes_in", "bytes_out", "compute_seconds", "tokens"), 1)
    told = [
        {"round": 0, "loss": 3.0, "state_hash": name * 64, "outcome": "Completed", **spent, "apart": apart}
        for name, apart in (("a", 0.1), ("b", 0.3))
    ]
    reports = [[round_report(event, ended_at=1.0)] for event in told]
    summary = summarize(reports, spec(), parameters=1000, heldout=3.0, solo=None, seconds=1)
    assert summary.hashes_agree is None and summary.apart == pytest.approx(0.2)
    assert summary.event()["apart"] == pytest.approx(0.2) and "reward" not in summary.event()
    shown = dict(figures(summary))
    assert "NOT" not in shown["state hashes"] and "20.00% apart" in shown["state hashes"]
    assert "held-out loss of the swarm" in shown
    same = summarize([[_report(0, ended_at=1.0)]], spec(), parameters=1, heldout=3.0, solo=None, seconds=1).event()
    assert "apart" not in same and same["hashes_agree"] is True


def test_a_run_by_seeds_is_judged_by_its_end_when_all_records_have_arrived():
    def report(number, state_hash):
        return RoundReport(number, 3.0, state_hash * 64, 1.0, 0, 0, 1.0, 100, number)

    reports = [[report(number, letter) for number, letter in enumerate(hashes)] for hashes in ("ab", "cb")]
    some = {"parameters": 1, "heldout": 3.0, "solo": None, "seconds": 1}
    by_seeds, others = summarize(reports, spec("seed"), **some), summarize(reports, spec(), **some)
    assert by_seeds.hashes_agree is True and dict(figures(by_seeds))["state hashes"] == "equal in the end"
    assert others.hashes_agree is False and "in_the_end" not in others.event()
    apart = summarize([*reports, [report(1, "d")]], spec("seed"), **some)
    assert dict(figures(apart))["state hashes"] == "NOT equal in the end"


def test_the_table_fits_80_columns():
    last = RoundReport(99998, 8.123, "f" * 64, 1.0, 999 * 10**6, 999 * 10**6, 1.0, 1234567, 1.0)
    swarm = LocalSwarm(LocalOptions(nodes=64, rounds=99999), Path("nowhere"))
    for node in swarm.nodes:
        node.ready, node.reports = {}, [replace(last, round=0, bytes_in=0, bytes_out=0), last]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(swarm))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "99999/99999" in text and "999 MB" in text and "1,234,567" in text and "ffffffff" in text


def test_the_live_table_shows_phase_nodes_and_time_left_and_leaves_the_last_table():
    file = io.StringIO()
    last = RoundReport(3, 2.5, "abcdef0123", 2.0, 10, 20, 1.0, 1000, 1.0)
    swarm = LocalSwarm(LocalOptions(nodes=2, rounds=10), Path("nowhere"))
    swarm.nodes[0].ready, swarm.nodes[0].reports = {}, [replace(last, round=number) for number in range(4)]
    swarm.nodes[1].state_at_end = "dead"
    view = LiveTable(Console(file=file, force_terminal=True, width=80, legacy_windows=False, color_system=None))
    with view:
        view.show(swarm)
        view.phase("training with 2 nodes")
        view.note("node 1: disk is full")
        view.settle()
        view.phase("writing the report")
    shown = file.getvalue()
    for text in ("training with 2 nodes", "node 1: disk is full", "round 4 of 10 about 12 s left", "abcdef01", "500"):
        assert text in shown, text


def test_a_pipe_that_is_closed_stops_the_nodes(tmp_path, fake):
    with _start_driver(tmp_path, fake) as run:
        events = _read_until(run, lambda events: len(events) == 3)
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        reader = threading.Thread(target=run.stderr.read)
        reader.start()
        assert run.wait(timeout=30) != 0
        reader.join()
    assert all(_gone(event["pid"]) for event in events)


def test_a_node_can_be_started_again_by_its_data_directory_alone(tmp_path, fake, capsys):
    run_local(_options(tmp_path), command=fake, measure=lambda _: 2.5)
    first, second = (
        load_config(None, {}, {"data_dir": str(tmp_path / "nodes" / name)}).config for name in ("node-0", "node-1")
    )
    assert (second.threads, second.listen, second.port, second.mdns) == (1, "127.0.0.1", 0, False)
    assert first.join == ()
    assert len(second.join) == 1


def test_the_built_in_run_is_that_of_the_example_and_an_attacked_one_is_open() -> None:
    built_in = local_run._runspec(LocalOptions(nodes=4, rounds=8))
    assert built_in == load_runspec(EXAMPLES / "byte-lm.toml") == load_runspec(BUILT_IN_RUNS["byte-lm"])
    attacked = local_run._runspec(LocalOptions(nodes=5, rounds=8, attack=Attack("sign-flip", 1)))
    assert (attacked.run.trust, attacked.exchange.method) == ("open", "open")
    assert (attacked.model, attacked.inner) == (built_in.model, built_in.inner)


@pytest.mark.parametrize(("trust", "example"), [("known", "byte-lm"), ("open", "open")])
def test_the_built_in_run_trains_alike_wherever_it_is_begun(tmp_path: Path, trust: str, example: str) -> None:
    init(tmp_path / "run.toml", trust=trust, yes=True)
    given = load_runspec(EXAMPLES / f"{example}.toml")
    attack = Attack("sign-flip", 1) if trust == "open" else None
    begun = {
        "the page": wanted_by({"task": "byte-lm", "open": trust == "open"}).spec,
        "init": load_runspec(tmp_path / "run.toml"),
        "local": local_run._runspec(LocalOptions(nodes=4, rounds=8, attack=attack)),
    }
    for where, spec in begun.items():
        assert spec is not None and replace(spec, run=given.run) == given, where
