"""A run file by flags or by questions: whatever is chosen, it is in order, and nobody's file is replaced unasked."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from json import loads as only_json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.node.exitcodes import CONFIG, OK, USAGE
from swarmnode.training.runspec import BUILT_IN, load_runspec
from swarmnode.training.sections import InnerSection


@pytest.mark.parametrize("trust", ["known", "open"])
@pytest.mark.parametrize("task", [*BUILT_IN, "mine.py:Mine", "mine.py:GPT"])
def test_every_task_gives_a_file_that_is_in_order(swarmnode: Any, tmp_path: Path, task: str, trust: str) -> None:
    file = tmp_path / "a.toml"
    base = ("--base", "someone/model") if task == "hf-lm" else ()
    made = swarmnode("init", str(file), "--task", task, "--trust", trust, "--size", "small", *base, "--yes", "--json")
    assert made.returncode == OK, made.stderr
    spec = load_runspec(file)
    name = {"mine.py:Mine": "mine", "mine.py:GPT": "my-gpt"}.get(task, task)  # what is built in is nobody's own
    assert (spec.run.name, spec.run.trust, spec.task.name) == ("a", trust, name)
    assert (only_json(made.stdout)["next"].endswith(f"--task {task}")) == (":" in task)


@pytest.mark.parametrize("method", ["async", "btard", "demo", "diloco", "gossip", "lowrank", "seed", "streaming"])
def test_every_method_of_known_members_gives_a_file_that_is_in_order(
    swarmnode: Any, tmp_path: Path, method: str
) -> None:
    file = tmp_path / "a.toml"
    made = swarmnode("init", str(file), "--method", method, "--yes")
    assert made.returncode == OK, made.stderr
    spec = load_runspec(file)
    assert spec.exchange.method == method
    assert (spec.inner.eps == InnerSection().eps) == (method in ("demo", "seed")), "measured for AdamW alone"


def test_questions_make_a_run_by_rollouts(swarmnode: Any, tmp_path: Path) -> None:
    letters = str(Path(__file__).parents[2] / "examples" / "letters.py") + ":Letters"
    for task, asked, brings in (
        ("gym:leg_counting, chain_sum(min_terms=2)", "gym:leg_counting, chain_sum(min_terms=2)", False),
        ("text:/somewhere/some.jsonl", "text:some.jsonl", True),
        (letters, "letters.py:Letters", True),
    ):
        made = swarmnode("init", str(tmp_path / "a.toml"), "--task", task, "--yes", "--force", "--json")
        assert made.returncode == OK, made.stderr
        spec = load_runspec(tmp_path / "a.toml")
        assert (spec.task.name, spec.rollouts.task, spec.exchange.method) == ("rollouts", asked, "sapo")
        assert ("--task" in only_json(made.stdout)["next"]) == brings


def test_a_file_that_is_there_stays_unless_it_is_to_be_replaced(swarmnode: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("mine")
    refused = swarmnode("init", str(file), "--yes")
    assert refused.returncode == USAGE and "--force" in refused.stderr and file.read_text() == "mine"
    assert swarmnode("init", str(file), "--yes", "--force").returncode == OK and load_runspec(file)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--size", "huge"], USAGE, "tiny, small, medium"),
        (["--task", "byte-ml"], USAGE, "byte-lm, gpt"),
        (["--task", "hf-lm"], USAGE, "--base MODEL"),
        (["--data", "/none"], USAGE, "no such file"),
        (["--method", "sapo"], CONFIG, "does not fit"),
        (["--name", "No Name"], CONFIG, "name = 'No Name'"),
    ],
)
def test_what_makes_no_run_is_said_and_nothing_written(
    swarmnode: Any, tmp_path: Path, flags: list[str], code: int, says: str
) -> None:
    refused = swarmnode("init", str(tmp_path / "a.toml"), *flags, "--yes")
    assert refused.returncode == code and says in refused.stderr and not (tmp_path / "a.toml").exists()


def test_on_a_terminal_it_asks(tmp_path: Path) -> None:
    file, (ours, theirs) = tmp_path / "a.toml", pty.openpty()
    # The text as it is offered; each answer that makes no run is asked for again.
    os.write(ours, b"gtp\ngpt\n/none\n\nhuge\nsmall\nanybody\nopen\n")
    program = str(Path(sys.executable).with_name("swarmnode"))
    done = subprocess.run([program, "init", str(file)], stdin=theirs, capture_output=True, text=True, timeout=60)
    assert done.returncode == OK and "How large?" in done.stderr, done.stderr
    for said in ("gtp: is none of", "/none: there is no such", "huge: is none of tiny", "is neither known nor open"):
        assert said in done.stderr
    spec = load_runspec(file)
    assert (spec.task.name, spec.task.corpus, spec.model.width) == ("gpt", "python-stdlib", 384)
    assert (spec.run.trust, spec.exchange.method, spec.exchange.codec) == ("open", "open", "sign")
