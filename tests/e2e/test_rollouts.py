"""Two real nodes with policies of their own learn from one another's answers, by one command each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from realnodes import Node, swarmnode, until

from swarmnode.node.exitcodes import CONFIG

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


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
            # Eight were written; what the author's own gate refuses it does not share.
            assert len(shown["answers"]) == listed[0]["answers"]
            assert all(2 <= group["answers"] <= 8 for group in listed)
            assert len({answer["reward"] for answer in shown["answers"]}) > 1, "only what teaches is shared"
            told = other.command_line("rollouts", "stats")
            assert told["alone"] is False
            assert all(name.startswith("digits/") for name in told["reward_by_task"]), "a course for each rule"
            author = other.command_line("rollouts", "pool")["authors"][0]
            assert author["author"] == one.ready["peer_id"] and 0 < author["learned"] <= author["used"]
            assert "LEARNED FROM" in swarmnode("rollouts", "pool", "--data-dir", second).stdout
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


def test_a_node_that_only_samples_is_learned_from_by_the_one_that_trains(tmp_path: Path) -> None:
    first, second = tmp_path / "trainer", tmp_path / "sampler"
    with Node(first, "--task", "digits-rl", corpus=None) as trainer:
        join = ("--join", trainer.ready["multiaddr"], "--run", trainer.ready["run_id"])
        with Node(second, *join, "--role", "rollout", corpus=None) as sampler:
            told = sampler.wait_for("round", lambda event: event["sampled"]["accepted"] > 0)["sampled"]
            assert told["trainer"] == trainer.ready["peer_id"] and not told["refused"]
            learned = trainer.wait_for("round", lambda event: event["learned"]["sampled"] > 0)["learned"]
            assert learned["staleness"] <= 4 and not learned["caught"]
            assert learned["checked"][sampler.ready["peer_id"]] > 0, "some of what it wrote was looked at"
            (seen,) = trainer.command_line("rollouts", "stats")["samplers"]
            assert seen["sampler"] == sampler.ready["peer_id"] and seen["accepted"] > 0
            people = swarmnode("status", "--data-dir", second).stdout
            assert "rollout" in people and "accepted" in people and "bits per byte" not in people
            assert "accepted" in swarmnode("rollouts", "stats", "--data-dir", second).stdout
        assert trainer.next_round(after=2)["steps"] == 1, "who was sampled for goes on alone"


def test_nodes_learn_a_task_of_ones_own_which_their_trainers_check(tmp_path: Path) -> None:
    own = ("--task", f"{EXAMPLES / 'letters.py'}:Letters")
    run_file = tmp_path / "letters.toml"
    run_file.write_text((EXAMPLES / "letters.toml").read_text() + "warm_up = 20\n")
    with Node(tmp_path / "one", run_file, *own, corpus=None) as one:
        join = ("--join", one.ready["multiaddr"], "--run", one.ready["run_id"])
        with Node(tmp_path / "two", *join, *own, corpus=None) as two:
            learned = two.wait_for("round", lambda event: event["learned"]["taken"] > 0)["learned"]
            assert learned["authors"] == 1
            for _ in range(10):  # what is listed may be too old when it is to be shown
                listed = two.command_line("rollouts", "ls", "--author", one.ready["peer_id"])["groups"]
                done = swarmnode("rollouts", "show", listed[0]["id"], "--data-dir", two.home, "--json")
                if done.returncode == 0:
                    break
            assert done.returncode == 0, done.stderr
            shown = json.loads(done.stdout)
            rewards = {answer["text"] == shown["key"]: answer["reward"] for answer in shown["answers"]}
            assert listed[0]["task"] == "own/Letters" and rewards == {True: 1.0, False: 0.0}


def test_who_brings_no_file_to_a_run_that_asks_one_is_told(tmp_path: Path) -> None:
    done = swarmnode("run", EXAMPLES / "letters.toml", "--data-dir", tmp_path / "a", "--port", "0")
    assert done.returncode == CONFIG and "a file that each node brings" in " ".join(done.stderr.split())


def test_questions_are_tried_in_the_sandbox_before_a_run(tmp_path: Path) -> None:
    letters = f"{EXAMPLES / 'letters.py'}:Letters"
    checked = json.loads(swarmnode("task", "check", letters, "--json", "--data-dir", tmp_path / "check").stdout)
    assert [each["earns"] for each in checked["asked"]] == [1.0] * 5


def test_only_sampling_has_no_meaning_where_nobody_shares_rollouts(
    tmp_path: Path, run_file: Path, corpus: Path
) -> None:
    done = swarmnode(
        "run", run_file, "--role", "rollout", "--data-dir", tmp_path / "a", "--port", "0", "--corpus", corpus
    )
    assert done.returncode == 3 and "leave out --role rollout" in " ".join(done.stderr.split())
