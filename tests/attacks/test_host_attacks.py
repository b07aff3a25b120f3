"""The host group, and a real trainer that trains in its sandbox while its task tries to get out."""

from __future__ import annotations

import json
from pathlib import Path

import host
import pytest
import trio
from adversaries import host as adversaries
from escapes import PERMITTED
from harness import Adversary
from sometext import HELDOUT_SHA256, some_text
from trainers import running_trainer

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.sandbox import landlock

needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")
FILES = (adversaries.OutsideFiles, adversaries.Secrets)

# The task of a run, trained as any other; what it is asked to continue, it takes as a reason to attack.
EVIL = """
import json, sys
from pathlib import Path
sys.path.append({support!r})
import escapes
from swarmnode.training.byte_lm import ByteLM

class Evil(ByteLM):
    def sample(self, prompt, *, length, temperature, seed):
        home = Path({home!r})
        attempts = escapes.attempts(home / "secret", home, Path(escapes.os.environ["TMPDIR"]), {port})
        return json.dumps({{name: escapes.tried(attempt) for name, attempt in attempts.items()}}).encode()
"""


@pytest.mark.parametrize("adversary", adversaries.everyone(), ids=lambda adversary: type(adversary).__name__)
def test_the_machine_is_safe_from(adversary: Adversary) -> None:
    if isinstance(adversary, FILES) and landlock.version() == 0:
        pytest.skip("this kernel has no Landlock")
    adversary.scale = 0.25
    machine = trio.run(host.damage, adversary)
    assert machine.tried > 0 and machine.failures() == ()


@pytest.mark.parametrize("adversary", adversaries.everyone(), ids=lambda adversary: type(adversary).__name__)
def test_a_machine_without_the_defence_is_not_safe_from(adversary: Adversary) -> None:
    adversary.scale = 0.25
    machine = trio.run(lambda: host.damage(adversary, undefended=True))
    assert machine.failures()


@needs_landlock
def test_a_real_trainer_trains_in_its_sandbox_and_gets_nowhere_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_bytes(b"secret")
    (home / "victim").write_text("x")
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "evil.py").write_text(EVIL.format(support=str(host.SUPPORT), home=str(home), port=9))
    spec = parse_runspec(
        {
            "run": {"name": "tiny"},
            "task": {"name": "evil", "heldout_sha256": HELDOUT_SHA256},
            "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
            "inner": {"batch": 2, "warmup": 0},
        },
        source="test",
    )
    settings = TrainerSettings(
        threads=2,
        nice=0,
        device="cpu",
        **some_text(tmp_path),
        task=f"{tmp_path / 'task' / 'evil.py'}:Evil",
        scratch=str(tmp_path / "trainer"),
        readable=(str(host.SUPPORT),),
        sandbox="require",
    )

    async def main() -> dict[str, str]:
        async with running_trainer(spec, settings) as trainer:
            start = trainer.parameters()
            assert (await trainer.train(round=0, steps=5, seconds=60)).steps == 5
            assert (trainer.parameters() != start).any()
            assert trainer.sandbox is not None and trainer.sandbox["missing"] == ()
            results: dict[str, str] = json.loads(await trainer.sample(b"", length=1, temperature=1.0, seed=1))
        return results

    results = trio.run(main)
    assert {name for name, result in results.items() if result == "done"} == set(PERMITTED)
    assert sorted(path.name for path in home.iterdir()) == ["secret", "victim"]
