"""What the daemon needs of SAPO comes without torch, and the example in the package's docstring is true."""

from __future__ import annotations

import subprocess
import sys

import msgpack

from swarmnode.training.rl.defence import TokenGate
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.grpo import AdaptiveSplit
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.tasks import well_formed

WITHOUT_TORCH = ("tasks", "vocabulary", "groups", "defence")


def test_the_daemon_checks_rollouts_without_torch() -> None:
    names = [f"swarmnode.training.rl.{name}" for name in WITHOUT_TORCH]
    program = (
        f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_two_learners_teach_each_other_as_the_package_shows() -> None:
    names = ("a", "b")
    settings = Settings(split=AdaptiveSplit(4, candidates=(0, 2), external=2), gate=TokenGate(), trial_questions=8)
    learners = {
        name: Learner(name, build(PolicySpec(layers=1), seed=1), settings, seed=n) for n, name in enumerate(names)
    }
    for learner in learners.values():
        learner.warm_up(well_formed, steps=60, batch=32)
    sent: list[tuple[str, bytes]] = []
    taken = 0
    for _ in range(4):
        own = {name: learner.sample() for name, learner in learners.items()}
        sent = [(name, msgpack.packb(scored.group.to_map())) for name in names for scored in own[name]]
        pool = [(author, RolloutGroup.from_map(msgpack.unpackb(raw))) for author, raw in sent]
        reports = [learners[name].learn(own[name], pool) for name in names]
        taken += sum(report.taken for report in reports)
    assert taken
    assert [learner.version for learner in learners.values()] == [4, 4]
