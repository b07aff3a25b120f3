"""Two real nodes with policies of their own learn from one another's answers, by one command each."""

from __future__ import annotations

from pathlib import Path

from realnodes import Node, swarmnode, until


def test_two_policies_learn_from_one_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with Node(first, "--task", "digits-rl", corpus=None) as one:
        join = ("--join", one.ready["multiaddr"], "--run", one.ready["run_id"])
        with Node(second, *join, "--policy", "gru:1x32", corpus=None) as other:
            assert other.ready["run_id"] == one.ready["run_id"]
            assert other.ready["parameters"] != one.ready["parameters"]
            for node in (one, other):
                learned = node.wait_for("round", lambda event: event["learned"]["taken"] > 0)
                assert learned["learned"]["authors"] == 1
            listed = other.command_line("rollouts", "ls", "--author", one.ready["peer_id"])["groups"]
            shown = other.command_line("rollouts", "show", listed[0]["id"])
            assert len(shown["answers"]) == 8
            assert len({answer["reward"] for answer in shown["answers"]}) > 1, "only what teaches is shared"
            assert other.command_line("rollouts", "stats")["alone"] is False
            assert other.command_line("rollouts", "pool")["authors"][0]["author"] == one.ready["peer_id"]
            people = swarmnode("status", "--data-dir", second).stdout
            assert "reward" in people and "bits per byte" not in people
        until(lambda: one.command_line("rollouts", "stats")["alone"] is True)
        alone = one.next_round(after=2)
        assert alone["steps"] == 1, "a node alone goes on alone"


def test_a_task_or_policy_that_there_is_not_is_refused_with_what_there_is(tmp_path: Path) -> None:
    unknown = swarmnode("run", "--task", "digits", "--data-dir", tmp_path / "a")
    assert unknown.returncode == 2 and "digits-rl" in unknown.stderr
    odd = swarmnode("run", "--task", "digits-rl", "--policy", "gpt:2x47", "--data-dir", tmp_path / "b", "--port", "0")
    assert odd.returncode != 0 and "multiple of 2" in odd.stderr
