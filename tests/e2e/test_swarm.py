"""A swarm of real processes: what its owners ask of it, and what bad luck does to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from realnodes import LOCAL, PROGRAM, Node, agree, environment, swarmnode, until, warnings_of

from swarmnode.node.invite import decode
from swarmnode.training.sandbox import landlock

pytestmark = pytest.mark.slow

MIDDLE_OF_A_ROUND = 0.2  # s after the end of the one before; rounds take about half a second


@pytest.fixture
def fourth(swarm: list[Node], victim: Node) -> Node:
    """The fourth node, training in step with the others."""
    if victim.process.poll() is not None:
        victim.start()
    until(lambda: len(victim.states()) > 1)
    victim.next_round()
    return victim


def shares_a_new_state(node: Node, others: list[Node]) -> None:
    """Wait until `node` ends a round that starts from now on, as the others end it."""
    now = max(others[0].states())
    node.wait_for("round", lambda event: event["round"] > now)
    others[0].wait_for("round", lambda event: event["round"] > now + 1)
    assert agree(node, *others) > 0


def test_late_joiner_takes_part_within_three_rounds_of_the_state_that_it_is_given(
    swarm: list[Node], victim: Node
) -> None:
    assert victim.ready["run_id"] == swarm[0].ready["run_id"]
    caught_up = victim.wait_for("caught_up")
    first = victim.wait_for("round")
    # Rounds take half a second here, so that one is a moment of a busy machine.
    assert first["round"] <= caught_up["round"] + 3, "it holds the state but takes no part"
    until(lambda: swarm[0].states().get(first["round"] + 1) == first["state_hash"])
    agree(victim, *swarm)


def test_status_and_peers_tell_the_truth(swarm: list[Node]) -> None:
    node = swarm[1]
    node.next_round()
    status = node.command_line("status")
    assert status["peer_id"] == node.ready["peer_id"]
    assert status["run"]["run_id"] == node.ready["run_id"]
    assert status["run"]["members"] >= 3 and status["peers"]["connected"] >= 2
    until(lambda: swarm[0].states().get(status["run"]["round"]) == status["run"]["state_hash"])
    assert status["traffic"]["bytes_out"] > 0 and status["run"]["tokens_per_second"] > 0
    told = node.command_line("health")
    assert told["healthy"] and told["round"] >= status["run"]["round"] and told["round_age_s"] < 60
    families = list(text_string_to_metric_families(swarmnode("metrics", "--data-dir", node.home).stdout))
    assert len({family.name for family in families}) == len(families)
    values = {family.name: family.samples[0].value for family in families}
    assert values["swarmnode_round"] >= told["round"] and values["swarmnode_members"] >= 3
    assert values["swarmnode_loss"] > 0 and values["swarmnode_tokens_per_second"] > 0
    assert warnings_of(node) == [] and not status["paused"]
    assert "files" in status["trainer"]["sandbox"]["enforced"] or landlock.version() == 0
    peers = node.command_line("peers")["peers"]
    assert {other.ready["peer_id"] for other in (swarm[0], swarm[2])} <= {peer["peer_id"] for peer in peers}
    assert all(peer["agent"].startswith("swarmnode/") and peer["member"] for peer in peers)
    shown = swarmnode("status", "--data-dir", node.home)
    assert shown.returncode == 0 and "bits per byte" in shown.stdout and "tiny" in shown.stdout


def test_a_peer_can_be_pinged_by_the_end_of_its_name(swarm: list[Node]) -> None:
    other = swarm[2].ready["peer_id"]
    answer = swarm[0].command_line("ping", other[-6:], "--count", "3")
    assert (
        answer["peer_id"] == other and len(answer["rtts_ms"]) == 3 and all(0 < rtt < 5000 for rtt in answer["rtts_ms"])
    )
    refused = swarmnode("ping", "nobody", "--data-dir", swarm[0].home)
    assert refused.returncode == 1 and "knows no peer that is called nobody" in refused.stderr


def test_the_model_writes_while_it_trains(swarm: list[Node]) -> None:
    asked = ("sample", "the swarm", "--length", "20", "--seed", "1")
    assert swarm[0].command_line(*asked)["text"]


def test_id_prints_a_line_that_joins(swarm: list[Node]) -> None:
    assert swarm[0].command_line("id")["peer_id"] == swarm[0].ready["peer_id"]
    line = swarm[0].command_line("id", "--join")["join"]
    assert re.fullmatch(r"swarmnode join swarm1[0-9a-z]{58,69}", line)
    assert decode(line.split()[-1]).run_id == swarm[0].ready["run_id"][:32]
    assert line == swarm[0].ready["join"]


def test_logs_are_lines_that_people_and_programs_can_read(swarm: list[Node]) -> None:
    swarm[0].wait_for("round", lambda event: event["round"] >= 2)
    shown = swarmnode("logs", "-n", "2", "--data-dir", swarm[0].home)
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) == 2
    assert re.search(r"INFO +node\.session: round \d+: ", shown.stdout), shown.stdout
    lines = swarmnode("logs", "-n", "2", "--json", "--data-dir", swarm[0].home).stdout
    assert lines.count('"logger"') == 2


def test_a_collector_of_logs_gets_nothing_but_objects(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = [PROGRAM, "run", "--role", "watch", "--data-dir", tmp_path / "watch", "--port", "0", *LOCAL]
    with said.open("wb") as out:
        process = subprocess.Popen([*command, "--log-format", "json"], stdout=out, stderr=out, env=environment())
    try:
        until(lambda: "is ready" in said.read_text())
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert "stopped in order" in lines[-1]["message"]


def test_a_node_trains_on_while_nobody_reads_what_it_says(tmp_path: Path, run_file: Path, corpus: Path) -> None:
    node = Node(tmp_path / "unread", run_file, "--log-level", "debug", corpus=corpus)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(node.command, **pipes, pipesize=4096, env=environment()) as unread:
        try:
            until(lambda: swarmnode("status", "--data-dir", node.home).returncode == 0)
            until(lambda: ((node.command_line("status")["run"] or {}).get("round") or 0) > 5)
        finally:
            unread.send_signal(signal.SIGINT)
            code = unread.wait(30)
    assert code == 0


def test_paused_node_is_not_waited_for_and_resumes(swarm: list[Node], victim: Node) -> None:
    victim.wait_for("round")
    victim.command_line("pause")
    until(lambda: victim.command_line("status")["run"]["phase"] == "paused")
    here = victim.command_line("status")["run"]["round"]
    swarm[0].next_round(after=2)
    assert victim.command_line("status")["run"]["round"] <= here + 1
    victim.command_line("resume")
    began = len(victim.events)
    back = victim.wait_for("round", since=began)
    until(lambda: back["round"] + 1 in swarm[0].states())
    assert swarm[0].states()[back["round"] + 1] == back["state_hash"]


def test_data_directory_in_use_is_left_to_who_has_it(swarm: list[Node], run_file: Path) -> None:
    refused = swarmnode("run", run_file, "--data-dir", swarm[0].home, "--port", "0", *LOCAL)
    assert refused.returncode == 4 and "Traceback" not in refused.stderr
    assert str(swarm[0].process.pid) in refused.stderr and "--data-dir" in refused.stderr
    assert swarm[0].command_line("status")["peer_id"] == swarm[0].ready["peer_id"]


def test_rounds_agree_and_report_the_held_out_loss(swarm: list[Node]) -> None:
    for node in swarm:
        node.next_round(after=1)
    assert agree(*swarm) >= 2
    rounds = [event for event in swarm[0].events if event["event"] == "round"]
    assert rounds[-1]["loss"] < rounds[0]["loss"] < 8
    assert all(event["bytes_out"] > 0 and event["tokens"] > 0 for event in rounds if event["outcome"] == "Completed")


def test_killed_trainer_is_replaced_and_its_node_stays_in_the_swarm(swarm: list[Node], fourth: Node) -> None:
    before = fourth.command_line("status")["trainer"]
    os.kill(before["pid"], signal.SIGKILL)
    shares_a_new_state(fourth, swarm)
    until(lambda: fourth.command_line("status")["trainer"]["restarts"] > before["restarts"])
    assert fourth.command_line("status")["trainer"]["pid"] != before["pid"]
    fourth.wait_for("round", lambda event: event["steps"] > 0, since=len(fourth.events))
    agree(fourth, *swarm)


def test_frozen_node_costs_the_others_little_and_comes_back(swarm: list[Node], fourth: Node) -> None:
    began = time.monotonic()
    fourth.send(signal.SIGSTOP)
    try:
        missed = swarm[0].next_round(after=2)
        taken = time.monotonic() - began
    finally:
        fourth.send(signal.SIGCONT)
    assert taken < 20, "three rounds without the frozen node"
    fourth.wait_for("round", lambda event: event["round"] > missed["round"])
    shares_a_new_state(fourth, swarm)


def test_killed_node_is_missed_and_catches_up_under_its_old_name(swarm: list[Node], fourth: Node) -> None:
    peer_id, trainer = fourth.ready["peer_id"], fourth.command_line("status")["trainer"]["pid"]
    swarm[0].next_round()
    time.sleep(MIDDLE_OF_A_ROUND)
    fourth.send(signal.SIGKILL)
    fourth.process.wait()
    for node in swarm:
        node.next_round(after=2)
    assert agree(*swarm) > 0
    until(lambda: not Path(f"/proc/{trainer}").exists(), within=10)
    gone_at = max(swarm[0].states())
    fourth.start()
    assert fourth.ready["peer_id"] == peer_id
    assert fourth.wait_for("caught_up")["round"] >= gone_at
    shares_a_new_state(fourth, swarm)


def test_first_interrupt_leaves_in_order_and_the_same_command_comes_back(swarm: list[Node], fourth: Node) -> None:
    fourth.send(signal.SIGINT)
    assert fourth.wait() == 0, fourth.log()
    assert fourth.events[-2] == {"event": "stopped", "code": 0}
    last = max(fourth.states())
    manifests = sorted(fourth.home.glob("runs/*/checkpoints/*.json"))
    assert json.loads(manifests[-1].read_text())["state_hash"] == fourth.states()[last]
    assert "Traceback" not in fourth.log()
    peer_id = fourth.ready["peer_id"]
    swarm[0].wait_for("round", lambda event: peer_id not in event["missing"], since=len(swarm[0].events))
    fourth.start()
    assert fourth.wait_for("round")["round"] >= last
    shares_a_new_state(fourth, swarm)


def test_second_interrupt_ends_at_once(swarm: list[Node], fourth: Node) -> None:
    trainer = fourth.command_line("status")["trainer"]["pid"]
    os.kill(trainer, signal.SIGSTOP)  # an orderly end would wait for its step
    fourth.send(signal.SIGINT)
    until(lambda: "leaving the swarm" in fourth.log())
    began = time.monotonic()
    fourth.send(signal.SIGINT)
    assert fourth.wait() == 130
    assert time.monotonic() - began < 5, "an orderly end would wait for the trainer"
    until(lambda: not Path(f"/proc/{trainer}").exists())
    assert "Traceback" not in fourth.log()


def test_leave_ends_the_node_in_order_and_deletes_the_run(fourth: Node) -> None:
    run = fourth.home / "runs" / fourth.ready["run_id"]
    assert run.is_dir()
    assert fourth.command_line("leave", "--yes")["deleted"] == [str(run)]
    assert fourth.wait() == 0
    assert fourth.events[-2] == {"event": "stopped", "code": 0} and not run.exists()
    assert swarmnode("status", "--data-dir", fourth.home).returncode == 9


def test_a_pause_lasts_over_a_restart(tmp_path: Path, run_file: Path, corpus: Path) -> None:
    with Node(tmp_path / "alone", run_file, corpus=corpus) as node:
        node.wait_for("round")
        node.command_line("pause")
        node.send(signal.SIGINT)
        assert node.wait() == 0
        node.start()
        until(lambda: node.ready and node.command_line("status")["run"]["phase"] == "paused")
        time.sleep(MIDDLE_OF_A_ROUND)
        assert not node.states() and "swarmnode resume" in node.log()
        node.command_line("resume")
        node.wait_for("round")
        node.send(signal.SIGINT)
        assert node.wait() == 0
        node.start()
        node.wait_for("round")


def test_caps_change_while_a_node_runs_and_last_and_an_owners_pause_outlasts_them(
    tmp_path: Path, run_file: Path, corpus: Path
) -> None:
    later = [time.strftime("%H:%M", time.localtime(time.time() + 3600 * hours)) for hours in (2, 3)]

    def causes(node: Node) -> list[str]:
        return [hold["cause"] for hold in node.command_line("status")["holds"]]

    with Node(tmp_path / "alone", run_file, corpus=corpus) as node:
        node.wait_for("round")
        told = node.command_line("caps", f"hours={later[0]}-{later[1]}", "cpu=50", "up=8", "not_on_battery=true")
        assert told["caps"]["cpu"] == {"value": 50.0, "unit": "%"} and told["caps"]["not_on_battery"]["value"] is True
        until(lambda: node.command_line("status")["run"]["phase"] == "paused")
        assert f"outside of its hours, {later[0]}" in swarmnode("health", "--data-dir", node.home).stdout
        (hold,) = node.command_line("status")["holds"]
        assert 3600 < hold["until"] - time.time() <= 7200
        node.command_line("pause")
        assert causes(node) == ["owner", "hours"]
        said = swarmnode("caps", "--data-dir", node.home).stdout
        assert re.search(r"^cpu +50 +%$", said, re.M) and re.search(r"^memory +no cap *$", said, re.M), said
        assert re.search(r"^not_on_battery +yes *$", said, re.M) and not re.search(r'0\.0|""', said), said
        node.command_line("caps", "hours=")
        until(lambda: causes(node) == ["owner"])
        refused = swarmnode("caps", "cpu=900", "--data-dir", node.home)
        assert refused.returncode == 3 and "cpu = 900" in refused.stderr and "1 to 100 %" in refused.stderr
        assert "KEY=VALUE" in swarmnode("caps", "cpu", "--data-dir", node.home).stderr
        node.command_line("resume")
        node.wait_for("round", since=len(node.events))
        node.send(signal.SIGINT)
        assert node.wait() == 0
        shown = node.command_line("config", "show")["settings"]
        assert shown["cpu"] == {"value": 50.0, "origin": str(node.home / "caps.toml")} and shown["hours"]["value"] == ""


def test_a_node_that_stays_after_its_last_round_ends_in_order(tmp_path: Path, run_file: Path, corpus: Path) -> None:
    with Node(tmp_path / "alone", run_file, "--rounds", "1", "--stay", corpus=corpus) as node:
        node.wait_for("finished")
        node.send(signal.SIGINT)
        assert node.wait() == 0, node.log()
        warnings = [line for line in node.log().splitlines() if "WARNING" in line]
        assert not [line for line in warnings if "runs as root" not in line]  # as tests in a container do
