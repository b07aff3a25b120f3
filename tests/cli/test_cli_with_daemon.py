"""Commands that ask a daemon: what a person sees, what a program reads, and that peers' words stay words."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from json import loads as only_json  # one value and nothing after it
from pathlib import Path
from select import select
from typing import Any

import pytest

from swarmnode.cli import terminal
from swarmnode.cli.main import main
from swarmnode.cli.peers import _with_rates
from swarmnode.cli.rollouts import _by_task
from swarmnode.cli.terminal import bar, duration, plain, size, sparkline
from swarmnode.cli.views import HEIGHT, WIDTH, render_status
from swarmnode.node.control.client import ControlClient, ControlError
from swarmnode.node.exitcodes import DEGRADED, ERROR, OK, USAGE, ExpectedError
from swarmnode.node.storage.datadir import DataDir


def test_status_shows_what_matters(swarmnode: Any, daemon: Any, answer: Any) -> None:
    shown = swarmnode("status")
    assert shown.returncode == OK, shown.stderr
    for part in (
        "byte-lm",
        "18 of 40",
        "2.412 bits per byte",
        "in 12 s",
        "3 connected",
        "private",
        "18.4 MB",
        "-0.140",
        "12 of 16 shards here, of 64 in the run; 2.3 MB, 1.5 MB fetched",
    ):
        assert part in shown.stdout, part
    assert "█" in shown.stdout and "▁" in shown.stdout and "\x1b" not in shown.stdout
    assert only_json(swarmnode("status", "--json").stdout) == answer


def test_who_is_missing_is_another_than_the_node_itself(answer: Any) -> None:
    def members(*missing: str) -> str:
        shown = render_status({**answer, "run": {**answer["run"], "members": 1, "missing": missing}})
        return next(line for line in shown.split("\n") if line.startswith("members"))

    assert members().endswith("1 in this round") and members("other").endswith("missing: other")
    assert members(answer["peer_id"]).endswith("1 in this round, own work not counted")


def test_status_while_the_node_catches_up_with_a_run_of_so_many_rounds(answer: Any) -> None:
    shown = render_status({**answer, "run": {**answer["run"], "round": None}})
    assert re.search(r"^round +not known yet ", shown, re.MULTILINE)


def test_status_fits_one_screen_whatever_the_daemon_says(answer: Any) -> None:
    wild = {**answer, "warnings": ["w" * 300 + "\n\x1b[2J"] * 30, "uptime_s": 1e9}
    run = answer["run"]
    wild["run"] = {
        **run,
        "name": "n" * 64,
        "missing": [answer["peer_id"]] * 20,
        "round": 10**6,
        "rounds": 10**6,
        "loss": 1e30,
    }
    others = (
        {**answer, "run": None, "trainer": None},
        {**answer, "run": {**run, "loss": None, "data": {**run["data"], "source": "local"}}},
        {**answer, "run": {**run, "phase": "catching-up", "arriving": [43_000_000, 400_000_000]}},
    )
    for status in (answer, wild, *others):
        lines = render_status(status).split("\n")
        coloured = render_status(status, colour=True)
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split("\n") == lines
        assert len(lines) <= HEIGHT
        assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
        assert "\x1b" not in "".join(lines)


def test_status_tells_warnings_whole_and_where_the_rest_of_them_stands(answer: Any) -> None:
    why = "no checkpoint could be written: /var/lib/swarmnode/runs/3f9c21ab04de: no space left on the disk; free some"
    shown = render_status({**answer, "warnings": [why]})
    assert " ".join(shown.partition("\n! ")[2].split()) == why
    many = render_status({**answer, "warnings": [why] * 9})
    assert many.count("free some") >= 2 and many.endswith("\n  and more: swarmnode health")


def test_status_says_when_a_round_ends_however_short_it_is(answer: Any) -> None:
    for due, said in ((12.0, "in 12 s"), (0.3, "in under 1 s"), (0.0, "later than usual")):
        answer["run"]["next_round_s"] = due
        assert f"next      {said}" in render_status(answer)


def test_status_tells_how_much_of_a_state_has_arrived(answer: Any) -> None:
    fetching = {**answer["run"], "phase": "catching-up", "arriving": [43_000_000, 400_000_000]}
    assert "43.0 MB of 400 MB fetched" in render_status({**answer, "run": fetching})
    assert "the trainer is starting" in render_status({**answer, "run": {**answer["run"], "parameters": None}})


def test_status_tells_what_a_reward_is_by_chance_until_learning_shows(answer: Any) -> None:
    def shown(rounds: int) -> str:
        learned = {"learned": {"authors": 1, "taken": 2, "refused": {}}, "reward_by_chance": 0.04}
        history = [[number, 0.044] for number in range(rounds)]
        return render_status(
            {**answer, "run": {**answer["run"], **learned, "reward_history": history, "round": rounds}}
        )

    assert "0.044 of 1 lately, 0.04 by chance; learning shows by round 40 or so\n" in shown(15)
    assert "chance" not in shown(60) and "0.044 of 1 in the last 10 rounds" in shown(60)


def test_each_task_that_is_asked_has_a_course_of_its_reward() -> None:
    courses = {"gym/lcm": [[n, 0.1 * n] for n in range(10)], "gym/gcd": [[9, 1.0]]}
    first, second = _by_task(courses)
    assert first.split()[:2] == ["gym/gcd", "1.000"] and second.split()[:2] == ["gym/lcm", "0.450"]
    assert not _by_task({"gym/lcm": [[0, 0.5]]}), "of one task the reward is that of all"


def test_status_tells_in_how_far_the_trainer_is_sandboxed(answer: Any) -> None:
    def shown(**sandbox: Any) -> str:
        return render_status(
            {**answer, "trainer": {**answer["trainer"], "sandbox": {**answer["trainer"]["sandbox"], **sandbox}}}
        )

    assert ", sandboxed, pid" in shown()
    assert ", sandboxed in part, pid" in shown(missing=[{"part": "files", "why": "no Landlock"}])
    assert ", no sandbox, pid" in shown(enforced=[])
    answer["trainer"]["pid"] = None
    assert ", sandboxed, being started" in shown()


def test_health_says_in_words_and_by_its_exit_code_whether_the_node_works(
    swarmnode: Any, daemon: Any, answer: Any
) -> None:
    well = swarmnode("health")
    assert well.returncode == OK, well.stderr
    assert well.stdout == (
        f"healthy: byte-lm, round 18, training, last result 19 s ago, 3 peers\n- {answer['warnings'][0]}\n"
    )
    full = "no checkpoint could be written: no space left" + 60 * " on the disk" + "; free some\x1b[2J"
    daemon.status |= {"problems": [full], "warnings": [full, *answer["warnings"]], "run": None, "role": "relay"}
    ill = swarmnode("health")
    assert ill.returncode == DEGRADED and ill.stdout.startswith(
        "degraded: no run, role relay, 3 peers\n! no checkpoint"
    )
    assert "; free some" in ill.stdout and "\x1b" not in ill.stdout and answer["warnings"][0] in ill.stdout
    assert swarmnode("health", "--live").returncode == OK, "a full disk is not mended by starting it anew"
    told = swarmnode("health", "--json")
    assert told.returncode == DEGRADED and only_json(told.stdout) == {
        "healthy": False,
        "ready": True,
        "problems": [full],
        "notices": answer["warnings"],
        "phase": None,
        "holds": [],
        "round": None,
        "round_age_s": None,
        "members": None,
        "peers": 3,
    }


def test_a_node_that_starts_is_alive_and_not_ready(swarmnode: Any, daemon: Any, answer: Any) -> None:
    daemon.status |= {"ready": False, "problems": [], "run": None}
    asked = swarmnode("health")
    assert asked.returncode == DEGRADED and asked.stdout.startswith("starting: no run, role train")
    assert swarmnode("health", "--live").returncode == OK


def test_plan_takes_the_round_trip_that_the_daemon_measures(
    home: Any, daemon: Any, answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    links: list[tuple[float, float, float]] = []

    def planned(*_: Any, link: tuple[float, float, float], members: int) -> None:
        links.append(link)
        raise ExpectedError("that is enough")

    monkeypatch.setattr("swarmnode.node.plan.planned", planned)
    assert main(["plan", "run.toml", "--peer", answer["peer_id"], "--data-dir", str(home)]) == ERROR
    assert links[0][2] == 0.0015
    assert "measuring run.toml: 6 s of steps" in capsys.readouterr().err, "nobody is left to wonder for 15 s"


def test_peers_and_ping_are_readable_by_people_and_programs(swarmnode: Any, daemon: Any, answer: Any) -> None:
    table = swarmnode("peers").stdout
    assert "12 ms" in table and "1 min 15 s" in table and "/ip4/203.0.113.7/tcp/4077" in table
    assert sum("/ip4/203.0.113.7/tcp/4077" in line for line in table.splitlines()) == 1, (
        "a relay's address is no peer's"
    )
    assert "good" in table and "slowed" in table and "direct out" in table and "via 12D3KooW…" in table
    assert "is kept out for 42 s more: lied" in swarmnode("peers").stderr
    assert len(only_json(swarmnode("peers", "--json").stdout)["peers"]) == 2
    pinged = swarmnode("ping", answer["peer_id"], "-c", "2")
    assert pinged.returncode == OK and pinged.stdout.count("1.5 ms") == 3
    through, direct, _ = pinged.stdout.splitlines()
    assert "through the relay 12D3KooW…" in through and direct.endswith("1.5 ms direct over tcp")
    assert [params["punch"] for name, params in daemon.asked if name == "ping"] == [False, True]
    daemon.pings = 0
    until_direct = swarmnode("ping", answer["peer_id"]).stdout
    assert until_direct == pinged.stdout, "it ends by itself with the first direct reply"
    unknown = swarmnode("ping", "nobody")
    assert unknown.returncode == ERROR and "see swarmnode peers" in unknown.stderr


def test_unblocking_says_whether_there_was_a_block(swarmnode: Any, daemon: Any, answer: Any) -> None:
    peer_id = answer["peer_id"]
    assert swarmnode("peers", "unblock", peer_id).stdout == f"{peer_id}: let in again, not connected\n"
    assert swarmnode("peers", "unblock", "other").stdout == "other: it was not blocked, connected: direct over tcp\n"
    assert swarmnode("peers", "disconnect", peer_id).stdout == f"{peer_id}: not connected\n"
    assert "dialled the other again at once" in swarmnode("peers", "disconnect", "other").stdout


def test_rates_of_traffic_are_shown_again_and_again() -> None:
    answers = [{"time": at, "in": 100 * at, "out": 0, "protocols": {}, "peers": {}} for at in range(3)]
    shown = [_with_rates(now, before, None) for before, now in pairwise(answers)]
    assert [each["total"]["rate_in"] for each in shown] == [100.0, 100.0]


def test_what_comes_from_peers_or_the_model_cannot_steer_the_terminal(swarmnode: Any, daemon: Any) -> None:
    assert "\x1b" not in swarmnode("sample", "def main(").stdout
    assert "\x1b" not in swarmnode("peers").stderr
    assert "\x1b" not in swarmnode("logs", "--follow").stdout
    assert only_json(swarmnode("sample", "x", "--json").stdout)["text"].endswith("\x1b[2J")


def test_discover_tells_what_fits_no_filter_from_nobody_who_answered(swarmnode: Any, daemon: Any) -> None:
    daemon.discovered["unreached"] = {"/ip4/192.0.2.1/tcp/1": "it does not answer\x1b[2J"}
    alone = swarmnode("discover", "--task", "byte-lm")
    assert "no other node answered" in alone.stdout and "/ip4/192.0.2.1/tcp/1: it does not answer [2J" in alone.stdout
    daemon.discovered["peers"] = 2
    assert "2 nodes answered, but told of no run" in swarmnode("discover", "--task", "byte-lm").stdout
    daemon.discovered["runs"] = [{"name": "tiny", "run_id": "ab" * 32, "task": "image"}]
    assert "of 1 run found, none fits" in swarmnode("discover", "--task", "byte-lm").stdout
    told = only_json(swarmnode("discover", "--task", "byte-lm", "--json").stdout)
    assert (told["runs"], told["seen"], told["peers"]) == ([], 1, 2)


def test_rates_go_on_from_one_answer_to_the_next() -> None:
    told = [{"time": at, "in": 10 * at, "out": 0, "protocols": {}, "peers": {}} for at in (1.0, 2.0, 4.0)]
    rates = [_with_rates(now, before, None)["total"]["rate_in"] for before, now in pairwise(told)]
    assert rates == [10.0, 10.0]


def test_netcheck_tells_how_the_node_is_reached_and_what_to_do(swarmnode: Any, daemon: Any) -> None:
    shown = swarmnode("netcheck")
    assert shown.returncode == OK, shown.stderr
    for part in (
        "relayed: peers reach this node through relays",
        "5 hosts tried to dial in lately, 1 got through",
        "/ip4/192.168.1.2/tcp/4077\n",
        "/ip4/203.0.113.7/tcp/4077 through 12D3KooW…",
        "/ip4/198.51.100.9/tcp/61044",
        "symmetric NAT: another outer port for each",
        "direct at once             no NAT",
        "through a relay            symmetric",
        "none: no router answers",
        "41 ms",
        "3 connected: 2 direct, 1 relayed; 1 of 3 holes punched",
        "at the most in 1.2 MB/s, out 400 kB/s",
        "! the router opens no port",
        "  switch on UPnP",
    ):
        assert part in shown.stdout, part
    assert "\x1b" not in shown.stdout
    assert only_json(swarmnode("netcheck", "--json").stdout) == daemon.netcheck


def test_netcheck_of_a_peer_tells_each_step_and_what_to_do(swarmnode: Any, daemon: Any, answer: Any) -> None:
    shown = swarmnode("netcheck", answer["peer_id"])
    assert shown.stdout == "no  dialled /ip4/192.0.2.1/tcp/1: no answer [2J\n-> run netcheck there\n"
    assert only_json(swarmnode("netcheck", answer["peer_id"], "--json").stdout)["path"] == "none"


def test_netcheck_says_so_when_there_is_nothing_to_mend(swarmnode: Any, daemon: Any) -> None:
    daemon.netcheck |= {"reachability": "public", "observed": [], "relays": [], "problems": []}
    assert "nothing to mend" in swarmnode("netcheck").stdout and "!" not in swarmnode("netcheck").stdout


def test_metrics_are_for_prometheus_or_for_a_program(swarmnode: Any, daemon: Any) -> None:
    assert swarmnode("metrics").stdout == "swarmnode_peers 2\n"
    assert only_json(swarmnode("metrics", "--json").stdout) == [{"name": "swarmnode_peers"}]


def test_id_prints_the_line_that_joins_this_node(swarmnode: Any, daemon: Any, answer: Any) -> None:
    shown = swarmnode("id", "--join")
    assert shown.stdout.strip() == answer["join"] and not shown.stderr
    daemon.status["addresses"] = ["/ip4/127.0.0.1/tcp/4077"]
    assert "others cannot dial it" in swarmnode("id", "--join").stderr
    daemon.status["join"] = ""
    nothing = swarmnode("id", "--join")
    assert nothing.returncode == ERROR and "--announce" in nothing.stderr


def test_stop_returns_when_the_daemon_has_ended(swarmnode: Any, daemon: Any) -> None:
    stopped = swarmnode("stop")
    assert stopped.returncode == OK, stopped.stderr
    assert daemon.home.holder() is None


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_pause_and_resume_reach_the_daemon(swarmnode: Any, daemon: Any, command: str) -> None:
    assert only_json(swarmnode(command, "--json").stdout) == {"paused": command == "pause"}
    assert daemon.asked == [(command, {})]


def test_resume_says_where_nothing_was_paused(swarmnode: Any, daemon: Any) -> None:
    assert swarmnode("resume").stdout == "it was not paused, and goes on\n"


def test_a_value_far_from_the_last_one_is_asked_about(swarmnode: Any, daemon: Any) -> None:
    told = swarmnode("steer", "inner.lr=5", "exchange.codec=fp16").stdout.splitlines()
    assert told[-1].startswith("inner.lr becomes 10000 times") and told[-1].endswith("swarmnode steer inner.lr=0.0005")
    assert "becomes" not in swarmnode("steer", "inner.lr=1e-3").stdout


def test_who_waits_for_the_node_sees_a_sign_that_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(self: ControlClient, method: str, **params: float) -> dict[str, str]:
        time.sleep(params["timeout"])
        return {"asked": method}

    monkeypatch.setattr(ControlClient, "call", answers)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert terminal.ask("status", timeout=0.1) == {"asked": "status"}
        assert not select([screen], [], [], 0.2)[0], "it was there at once"
        assert terminal.ask("sample", timeout=1.5) == {"asked": "sample"}
        assert b"the node is at it" in screen.read(1000)


def test_leave_lets_the_daemon_delete_its_own_run(swarmnode: Any, daemon: Any, answer: Any, home: Path) -> None:
    DataDir(home).run(answer["run"]["run_id"]).mkdir(parents=True)
    left = swarmnode("leave", "--yes", "--json")
    assert only_json(left.stdout)["run_id"] == answer["run"]["run_id"]
    assert daemon.asked[-1] == ("leave", {"run_id": answer["run"]["run_id"]})


def test_a_run_is_ended_only_when_told(swarmnode: Any, daemon: Any) -> None:
    unsure = swarmnode("successor", "end")
    assert unsure.returncode == USAGE and "3f9c21ab04de" in unsure.stderr and "--yes" in unsure.stderr
    assert "successor_end" not in dict(daemon.asked)
    assert "ended after round 18" in swarmnode("successor", "end", "--yes").stdout


def test_figures_are_short_and_right() -> None:
    assert [size(n) for n in (0, 999, 18_400_000, 999_950)] == ["0 B", "999 B", "18.4 MB", "1.0 MB"]
    assert [duration(s) for s in (-1, 0, 0.034, 9.4, 9.97, 59.6, 185, 7801, 90_000)] == [
        "0 s",
        "0 s",
        "0.034 s",  # what takes no second took some time all the same
        "9.4 s",
        "10 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 10 min",
        "1 d 1 h",
    ]
    assert sparkline([3, 2, 1], 10) == "█▅▁" or sparkline([3, 2, 1], 10) == "█▄▁"
    assert sparkline([float("nan"), 1, 1], 10) == "▁▁" and len(sparkline(range(1000), 32)) == 32
    assert bar(0.5, 4) == "━━──" and bar(7, 2) == "━━"
    assert plain("a\x1b[2J\nb", 5) == "a [2…"


@pytest.mark.slow
def test_doctor_asks_the_daemon_and_its_exit_code_says_what_is_bad(swarmnode: Any, daemon: Any, answer: Any) -> None:
    daemon.status |= {"version": "0.0.1", "problems": ["the disk is full\x1b[2J"], "clock_off_s": 0.1}
    told = swarmnode("doctor")
    assert told.returncode == DEGRADED and "bad   node" in told.stdout and "\x1b" not in told.stdout
    assert "ok    device" in told.stdout and "the running node is 0.0.1" in told.stdout
    daemon.status["problems"] = []
    told = swarmnode("doctor", "--json")
    found = only_json(told.stdout)
    assert told.returncode == OK and found["healthy"] and {each["verdict"] for each in found["found"]} <= {"ok", "warn"}


def test_a_log_that_broke_off_is_not_told_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = {"time": "2026-01-01T00:00:00.000Z", "level": "INFO", "logger": "swarmnode.x", "message": "only once"}

    def stream(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield line
        raise ControlError("the daemon ended while it was sending")

    monkeypatch.setattr("swarmnode.cli.inspect.ControlClient.stream", stream)
    assert main(["logs", "--follow", "--data-dir", str(tmp_path)]) == ERROR
    assert capsys.readouterr().out.count("only once") == 1


def test_who_reads_one_line_and_leaves_makes_no_failure_of_it(swarmnode: Any, daemon: Any, home: Path) -> None:
    command = (
        f"set -o pipefail; {sys.executable} -m swarmnode logs --data-dir {home} | head -c 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("0\n"), (done.stdout, done.stderr)


def test_what_a_locale_cannot_write_is_written_all_the_same(swarmnode: Any, daemon: Any) -> None:
    told = swarmnode("status", PYTHONIOENCODING="ascii")
    assert told.returncode == OK, told.stderr
