"""`swarmnode task check` on the task of docs/tasks.md, and on files that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from realnodes import swarmnode

from swarmnode.node.exitcodes import CONFIG, ERROR

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


@pytest.fixture
def sine(tmp_path: Path) -> Path:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "sine.py").write_text(block)
    return tmp_path / "sine.py"


@pytest.mark.slow
def test_a_task_that_trains_is_told_with_what_its_run_will_have(sine: Path, tmp_path: Path) -> None:
    sine.write_text(f"{sine.read_text()}\n\nclass Mine(Sine):\n    pass\n")  # what it inherits, it has
    done = swarmnode("task", "check", f"{sine}:Mine", "--json", "--data-dir", tmp_path / "node", timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["parameters"] > 100 and answer["step_seconds"] > 0 and len(answer["code_sha256"]) == 64
    assert answer["has"] == {
        **dict.fromkeys(("sample", "heldout", "places"), True),
        **dict.fromkeys(("needs_text", "skeleton", "feed", "on"), False),
    }


@pytest.mark.slow
def test_all_that_would_harm_a_swarm_is_told_at_once(sine: Path, tmp_path: Path) -> None:
    good = sine.read_text()
    sine.write_text(
        good.replace("torch.manual_seed(spec.run.seed)", "").replace("(samples, generator)", "(samples, None)")
    )
    done = swarmnode("task", "check", f"{sine}:Sine", "--data-dir", tmp_path / "node", timeout=120)
    assert done.returncode == ERROR and "- parameter 0.weight begins" in done.stderr and "- draw differs" in done.stderr
    later = "def loss(self, batch):\n        self.losses = getattr(self, 'losses', 0) + 1"
    grown = ".square().mean() * (float('inf') if self.losses > 20 else 1)"
    sine.write_text(good.replace("def loss(self, batch):", later).replace(".square().mean()", grown))
    done = swarmnode("task", "check", f"{sine}:Sine", "--data-dir", tmp_path / "node", timeout=120)
    assert done.returncode == ERROR and "steps the loss is" in done.stderr, done


def test_a_task_that_fails_is_told_as_it_fails(sine: Path, tmp_path: Path) -> None:
    sine.write_text(
        sine.read_text().replace("def loss(self, batch):", "def loss(self, batch):\n        raise OSError('x')")
    )
    done = swarmnode("task", "check", f"{sine}:Sine", "--data-dir", tmp_path / "node", timeout=120)
    assert done.stderr.startswith(f"trying {sine}:Sine: 6 s of steps"), "nobody is left to wonder for 15 s"
    assert done.returncode != 0 and "OSError" in done.stderr and "Traceback" not in done.stderr
    told = swarmnode("task", "check", f"{tmp_path / 'none.py'}:Sine", "--json", "--data-dir", tmp_path / "node")
    assert json.loads(told.stderr)["error"]["exit_code"] == CONFIG, "a program reads an error and nothing else"
    missing = swarmnode("task", "check", f"{tmp_path / 'none.py'}:Sine", "--data-dir", tmp_path / "node")
    assert missing.returncode == CONFIG and "none.py" in missing.stderr
