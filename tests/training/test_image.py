"""The task image: digits are learned, by data that everybody has."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import BUILT_IN, RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment, TaskError, load_task, needs_text


@pytest.fixture
def spec() -> RunSpec:
    tables = {"run": {"name": "t"}, "task": {"name": "image"}, "model": {"layers": 1, "width": 32}}
    return parse_runspec({**tables, "inner": {"batch": 16, "lr": 5e-3, "warmup": 0}}, source="test")


def test_digits_are_learned_in_seconds(spec: RunSpec) -> None:
    pytest.importorskip("sklearn")
    task = load_task("image", "")(spec, Assignment("run", "alice"))
    assert task.evaluate(thorough=True) == pytest.approx(3.32, abs=0.2)  # log2 10 bits: it knows nothing yet
    vector = torch.zeros(layout_of(task.model).parameters)
    loop = InnerLoop(spec, task, peer_id="alice", vector=vector, keep=False)
    loop.train(round=0, steps=300, seconds=60, between=lambda: False)
    assert task.evaluate(thorough=True) < 0.8 and task.accuracy > 0.7
    told = [task.sample(b"", length=1, temperature=0, seed=seed) for seed in range(300)]
    found = [re.search(rb"found (\d), and it is (\d)\n", each) for each in told]
    assert sum(match is not None and match[1] == match[2] for match in found) > 270


def test_judges_draw_the_same_pictures_everywhere_and_others_than_people_read(spec: RunSpec) -> None:
    pytest.importorskip("sklearn")
    alice, bob = (load_task("image", "")(spec, Assignment("run", name)) for name in ("alice", "bob"))
    assert torch.equal(alice.heldout(5), bob.heldout(5)) and not torch.equal(alice.heldout(5), alice.heldout(6))
    assert alice.evaluate(thorough=False, seed=5) == pytest.approx(float(alice.loss(alice.heldout(5)).detach()))
    judged = {tuple(picture) for seed in range(200) for picture in alice.heldout(seed).tolist()}
    trained = {tuple(picture) for picture in alice.draw(5000, torch.Generator().manual_seed(1)).tolist()}
    assert 290 < len(judged) <= 300 and not judged & trained


def test_without_scikit_learn_it_says_what_to_install(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TaskError, match=r" install .*\[image\]"):
        load_task("image", "")(spec, Assignment("run", "alice"))


def test_each_task_says_itself_whether_it_needs_the_runs_text(tmp_path: pytest.TempPathFactory) -> None:
    said = {name: load_task(name, "").needs_text for name in BUILT_IN}
    assert {name: needs_text(name, "") for name in BUILT_IN} == said


@pytest.mark.parametrize(
    ("body", "needs"),
    [("needs_text = True", True), ("needs_text: bool = True", True), ("needs_text = False", False), ("x = 1", False)],
)
def test_a_local_task_says_so_in_its_file_which_is_not_run(tmp_path: object, body: str, needs: bool) -> None:
    file = f"{tmp_path}/mine.py"
    with open(file, "w") as written:
        written.write(f"raise SystemExit\nclass Other:\n    needs_text = True\nclass Mine:\n    {body}\n")
    assert needs_text("mine", f"{file}:Mine") is needs
    with pytest.raises(SettingError, match="cannot be read"):
        needs_text("mine", f"{tmp_path}/none.py:Mine")
