"""Tasks in swarms of real nodes: that of docs/tasks.md as it stands there, image, and gpt on a tokenizer's tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from realnodes import RUN_TOML, Node, agree

from swarmnode.node.exitcodes import CONFIG

ROOT = Path(__file__).parents[2]
IMAGE = """
[run]
name = "image"
{trust}
[task]
name = "image"
[model]
layers = 1
width = 32
[inner]
lr = 5e-3
warmup = 0
batch = 16
steps = 40
"""


def _example(folder: Path) -> tuple[Path, str]:
    """The run file and the task of the page."""
    page = (ROOT / "docs" / "tasks.md").read_text()
    for name, kind in (("sine.py", "python"), ("sine.toml", "toml")):
        (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / name).write_text(block)
    return folder / "sine.toml", f"{folder / 'sine.py'}:Sine"


def _two(tmp_path: Path, run_file: Path, *flags: str) -> tuple[Node, Node]:
    """Two nodes that have trained together for some rounds, and ended."""
    rounds = ("--rounds", "6")
    with Node(tmp_path / "one", run_file, *flags, *rounds, "--wait-peers", "1", corpus=None) as one:
        join = ("--join", one.ready["multiaddr"], "--run", one.ready["run_id"])
        with Node(tmp_path / "two", *join, *flags, *rounds, corpus=None) as two:
            assert one.wait() == 0, one.log()
            assert two.wait() == 0, two.log()
    return one, two


@pytest.mark.slow
def test_the_example_of_the_page_trains_in_a_swarm_of_two(tmp_path: Path) -> None:
    run_file, task = _example(tmp_path)
    one, two = _two(tmp_path, run_file, "--task", task)
    assert agree(one, two) > 0
    rounds = [event for event in one.events if event["event"] == "round"]
    assert rounds[-1]["loss"] < 0.5 * rounds[0]["loss"]


def test_who_has_another_file_is_refused_before_it_trains(tmp_path: Path) -> None:
    run_file, task = _example(tmp_path)
    (tmp_path / "else").mkdir()
    _, other = _example(tmp_path / "else")
    changed = tmp_path / "else" / "sine.py"
    changed.write_text(changed.read_text().replace("REACH, NOISE = 4.0", "REACH, NOISE = 5.0"))
    with Node(tmp_path / "one", run_file, "--task", task, corpus=None) as one:
        join = ("--join", one.ready["multiaddr"], "--run", one.ready["run_id"])
        with Node(tmp_path / "two", *join, "--task", other, corpus=None) as two:
            assert two.wait() == CONFIG
            assert "members have another file" in two.log() and "get theirs" in two.log()


def test_digits_are_learned_from_pictures_that_nobody_publishes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "image.toml").write_text(IMAGE.format(trust=""))
    one, two = _two(tmp_path, tmp_path / "image.toml")
    assert agree(one, two) > 0 and one.ready["loss_unit"] == "bits per picture"
    assert "bits per picture" in one.log() and "bits per byte" not in one.log()
    assert [event["loss"] for event in one.events if event["event"] == "round"][-1] < 1.5  # bits; 3.32 of who guesses


@pytest.mark.slow
def test_judges_need_no_text_where_a_task_brings_its_data(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "image.toml").write_text(IMAGE.format(trust='trust = "open"'))
    one, two = _two(tmp_path, tmp_path / "image.toml")
    assert agree(one, two) > 0


@pytest.mark.slow
def test_gpt_learns_tokens_of_a_tokenizer_that_its_creator_trains(tmp_path: Path, corpus: Path) -> None:
    modern = 'context = 32\nactivation = "swiglu"\ntied = true\nvalue_embeddings = true'
    tables = '[task]\nname = "gpt"\n[data]\nvocabulary = 400\n'
    (tmp_path / "gpt.toml").write_text(RUN_TOML.replace("context = 32", modern) + tables)
    with Node(tmp_path / "one", tmp_path / "gpt.toml", "--wait-peers", "1", corpus=corpus) as one:
        join = ("--join", one.ready["multiaddr"], "--run", one.ready["run_id"])
        with Node(tmp_path / "two", *join, corpus=corpus) as two:
            two.next_round(after=3)
            assert two.command_line("sample", "the swarm", "--length", "20")["text"]
            assert agree(one, two) > 0
    losses = [event["loss"] for event in one.events if event["event"] == "round"]
    assert losses[-1] < losses[0] < 8  # bits per byte, of which a token stands for more than one
