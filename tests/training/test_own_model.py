"""The model of one's own on text in examples/, which docs/tasks.md names, is one that a swarm can train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnode.testing.runtext import RunText
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.tasks import Assignment, load_task, needs_text
from swarmnode.training.trial import look

LOCAL = f"{Path(__file__).parents[2] / 'examples' / 'convolution.py'}:Convolution"


@pytest.fixture
def text(tmp_path: Path) -> RunText:
    corpus = tmp_path / "words.txt"
    corpus.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 2000)
    model = {"layers": 2, "width": 32, "context": 16}
    inner = {"batch": 8, "warmup": 0, "lr": 1e-2}
    tables = {"run": {"name": "t"}, "task": {"name": "convolution"}, "model": model, "inner": inner}
    return RunText(parse_runspec(tables, source="test"), tmp_path, str(corpus))


def test_the_example_of_a_model_on_text_learns_it_and_harms_no_swarm(text: RunText) -> None:
    given = Assignment(text.spec.run_id, "alice", **text.files("alice"))
    assert needs_text(text.spec.task.name, LOCAL)
    look(text.spec, given, LOCAL, "cpu")
    made = load_task(text.spec.task.name, LOCAL)
    task = made(text.spec, given)
    with torch.device("meta"):
        assert layout_of(made.skeleton(text.spec, given)) == layout_of(task.model), "what memory is told by"
    before = task.evaluate(thorough=False)
    vector = torch.zeros(layout_of(task.model).parameters)
    InnerLoop(text.spec, task, peer_id="alice", vector=vector, keep=False).train(
        round=0, steps=60, seconds=60, between=lambda: False
    )
    assert task.evaluate(thorough=False) < before / 2
    assert len(task.sample(b"the ", length=5, temperature=0.0, seed=0)) == 5


def test_no_token_of_the_example_sees_a_later_one(text: RunText) -> None:
    given = Assignment(text.spec.run_id, "alice", **text.files("alice"))
    model = load_task(text.spec.task.name, LOCAL).build(text.spec, given)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:8].all() and not same[8]
