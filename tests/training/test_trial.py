"""What would harm a swarm in a task of somebody's own is found before others join, and told in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swarmnode.training.rl.tasks import regenerate
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment, TaskError, class_in
from swarmnode.training.trial import look

ROOT = Path(__file__).parents[2]
SEEDED = "torch.manual_seed(spec.run.seed)"
DRAWN = "return examples(samples, generator).to(self.device)"
LOSS = "return (self.model(batch[:, :1]) - batch[:, 1:]).square().mean()"
MEASURED = "return float(self.loss(self.measured if seed is None else self.heldout(seed)))"
MODEL = "nn.Linear(width, 1)\n        ).to(device)"


def _look(file: Path, text: str, spec: RunSpec, name: str) -> list[str]:
    """The lines about a task of this text."""
    file.write_text(text)
    try:
        look(spec, Assignment("run", "me", task=f"{file}:{name}"), f"{file}:{name}", "cpu")
    except TaskError as error:
        return str(error).split("\n- ")[1:]
    return []


def _data(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """About the task of docs/tasks.md with these changes."""
    page = (ROOT / "docs" / "tasks.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    spec = parse_runspec({"run": {"name": "t"}, "task": {"name": "sine"}, "model": {"width": 8}}, source="test")
    return _look(tmp_path / "sine.py", text, spec, "Sine")


def test_nothing_is_found_in_the_examples(tmp_path: Path) -> None:
    assert _data(tmp_path) == []
    for file, name in (("letters.py", "Letters"), ("postfix.py", "Postfix")):
        assert _questions(tmp_path, (ROOT / "examples" / file).read_text(), name) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (SEEDED, "pass", "parameter 0.weight begins with other values each time"),
        (SEEDED, SEEDED[:-1] + " + len(assignment.peer_id))", "parameter 0.weight begins with other values"),
        (MODEL, MODEL + ".double()", "parameter 0.weight is torch.float64"),
        (MODEL, MODEL + "\n        self.model[0].weight.data[0] = float('inf')", "parameter 0.weight begins with nan"),
        (MODEL, MODEL + "\n        self.model.requires_grad_(False)", "no parameter needs a gradient"),
        ("def evaluate", "def measure", "it has no evaluate"),
        ("tokens_per_sample = 1", "tokens_per_sample, needs_text = 1, True", "it has needs_text and no feed"),
        ("tokens_per_sample = 1", "tokens_per_sample = 0.5", "tokens_per_sample is 0.5"),
        (DRAWN, "return examples(samples, None)", "draw differs for the same generator"),
        (DRAWN, "return self.measured[:samples]", "draw ignores its generator"),
        (
            DRAWN,
            "return examples(samples, generator) + len(self.me)",
            "draw differs at another member",
        ),
        (DRAWN, "return list(examples(samples, generator))", "draw(8, …) gives a list"),
        (DRAWN, "return examples(2 * samples, generator)", "gives a tensor of shape (16, 2)"),
        (LOSS, LOSS[: -len(".mean()")], "loss gives a tensor of shape (8, 1)"),
        (LOSS, LOSS + ".item()", "loss gives "),
        (LOSS, LOSS + ".detach()", "loss gives a tensor of shape ()"),
        (LOSS, LOSS.replace("batch[:, 1:]", "batch[:, 1:].log()"), "the loss is nan in a first batch"),
        (LOSS, LOSS.replace(".square().mean()", ".mul(0).square().sum().sqrt()"), "has nan or inf in a first batch"),
        (LOSS, LOSS + " + torch.rand(())", "loss differs for the same batch"),
        (MEASURED, "return float('nan')", "evaluate gives nan, nan, nan of one model"),
        (MEASURED, MEASURED.replace("float(", "(", 1), "evaluate gives a tensor of shape ()"),
        (MEASURED, MEASURED + " + torch.rand(()).item()", "evaluate gives "),
        (MEASURED, "self.accuracy = 50.0\n        " + MEASURED, "accuracy is 50.0"),
        ("return examples(SEQUENCES", "return examples(SEQUENCES - 1", "heldout gives a tensor of shape (7, 2)"),
        ("(SEQUENCES, torch.Generator().manual_seed(seed))", "(SEQUENCES, None)", "heldout differs for the same seed"),
    ],
)
def test_what_would_harm_a_swarm_is_told(tmp_path: Path, old: str, new: str, says: str) -> None:
    remembers = ("self.device = device", "self.device, self.me = device, assignment.peer_id")
    found = _data(tmp_path, (old, new), remembers)
    assert any(says in line and line.count(":") for line in found), found


def test_a_file_may_define_dataclasses_with_annotations_as_text(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    file.write_text(imports + "@dataclass\nclass Batch:\n    size: int\nclass Mine:\n    pass\n")
    assert class_in(f"{file}:Mine").__name__ == "Mine"


def test_an_error_that_nothing_explains_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _data(tmp_path, (LOSS, "1 / 0"))


QUESTIONS = """
import itertools, random
count = itertools.count()

class Mine:
    def generate(self, seed, difficulty):
        return {generate}

    def prompt(self, problem):
        return f"{{problem}}?"

    def key(self, problem):
        return str(problem)

    def verify(self, problem, answer):
        return {verify}
"""


def _questions(tmp_path: Path, text: str, name: str = "Mine") -> list[str]:
    tables = {"run": {"name": "t"}, "task": {"name": "rollouts"}, "rollouts": {"task": f"own.py:{name}"}}
    regenerate.cache_clear()
    return _look(tmp_path / "own.py", text, parse_runspec(tables, source="test"), name)


@pytest.mark.parametrize(
    ("generate", "verify", "says"),
    [
        ("random.random()", "float(answer == str(problem))", "of the same seed, so that nodes check"),
        ("7", "float(answer == str(problem))", "generate makes '7?' of each seed"),
        ("seed", "1.0", "verify gives an empty answer as much"),
        ("seed", "0.0", "gives 0.0, then 0.0, where all nodes"),
        ("seed", "float(answer == str(problem)) / 0", "raises ZeroDivisionError"),
        ("seed", "2.0 * (answer == str(problem))", "gives 2.0, then 2.0, where"),
        ("seed", "float('nan')", "gives nan, then nan"),
        ("seed", "answer", "gives a str, then a str"),
        ("seed", "(next(count) % 2) / 2", "gives 0.0, then 0.5, where all nodes"),
    ],
)
def test_what_would_harm_a_run_by_rollouts_is_told(tmp_path: Path, generate: str, verify: str, says: str) -> None:
    found = _questions(tmp_path, QUESTIONS.format(generate=generate, verify=verify))
    assert any(says in line for line in found), found
    assert _questions(tmp_path, QUESTIONS.format(generate="seed", verify="float(answer == str(problem))")) == []
