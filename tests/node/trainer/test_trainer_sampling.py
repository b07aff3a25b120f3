"""What samples is told to the owner, and a trainer that dies as it starts with vLLM comes back without it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio
from trainers import running_trainer

from swarmnode.node.trainer import supervisor as trainer_module
from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.training import worker
from swarmnode.training.runspec import parse_runspec

# Builds a task that any program can hold, and dies, as a program does that was made for another processor.
TASK = """
import os, signal
from types import SimpleNamespace
import torch
from swarmnode.training.rl.engine import Engine, EngineStatus
class Task:
    tokens_per_sample = 1
    def __init__(self, spec, assignment, device="cpu"):
        if assignment.sampling == "auto":
            os.kill(os.getpid(), signal.SIGILL)
        self.model = torch.nn.Linear(2, 2)
        self.engine = Engine(self.model, assignment.sampling)
    def rollouts(self, *, version, count, policy):
        self.engine.status = EngineStatus("torch", "vLLM failed while it sampled")
        return {"groups": [], "seconds": 0.0}
"""


def test_a_trainer_that_dies_with_vllm_as_it_starts_goes_on_in_torch_and_tells_what_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)
    monkeypatch.setattr(trainer_module, "find_spec", lambda name: name == "vllm")
    task, model = tmp_path / "task.py", tmp_path / "model"
    task.write_text(TASK)
    model.mkdir()
    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": "task"}}, source="test")
    settings = TrainerSettings(threads=1, nice=0, device="cpu", task=f"{task}:Task", policy=f"hf:{model}")

    async def main() -> None:
        async with running_trainer(spec, settings) as trainer:
            assert trainer.restarts == 1 and trainer.sampling == {"by": "torch", "why": ""}
            for _ in range(2):
                await trainer.rollouts(version=0)
            assert trainer.sampling == {"by": "torch", "why": "vLLM failed while it sampled"}

    with caplog.at_level(logging.WARNING):
        trio.run(main)
    said = [record.getMessage() for record in caplog.records]
    assert sum("perhaps by vLLM" in words for words in said) == 1
    assert said.count("vLLM failed while it sampled") == 1


@pytest.mark.parametrize(
    ("method", "policy", "sampling", "wanted"),
    [
        ("sapo", "", "auto", "cpu"),
        ("sapo", "hf:m", "auto", "auto"),
        ("sapo", "hf:m", "vllm", "cpu"),
        ("diloco", "", "vllm", "auto"),
    ],
)
def test_small_policies_and_vllm_stay_on_the_cpu_and_nothing_else_does(
    method: str, policy: str, sampling: str, wanted: str
) -> None:
    task = "digits-rl" if method == "sapo" else "byte-lm"
    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": task}, "exchange": {"method": method}}, source="test")
    asked = {"policy": policy, "sampling": sampling}
    assert worker._wanted_device(spec, {**asked, "device": "auto"}) == wanted
    for device in ("cpu", "cuda"):
        assert worker._wanted_device(spec, {**asked, "device": device}) == device


@pytest.mark.parametrize(
    ("installed", "sampling", "free"),
    [(False, "auto", None), (True, "vllm", None), (True, "auto", 1e9)],
    ids=["not installed", "asked for", "on a GPU"],
)
def test_a_trainer_that_dies_otherwise_is_not_said_to_have_died_of_vllm(
    installed: bool,
    sampling: str,
    free: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trainer_module, "MAX_FAILED_STARTS", 1)
    monkeypatch.setattr(trainer_module, "find_spec", lambda name: installed or None)
    task = tmp_path / "task.py"
    task.write_text("import os\nos._exit(7)\n")
    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": "task"}}, source="test")
    settings = TrainerSettings(
        threads=1, nice=0, device="cpu", task=f"{task}:Task", policy=f"hf:{tmp_path}", sampling=sampling
    )

    async def main() -> None:
        trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="alice", settings=settings)
        trainer.free = free
        async with trio.open_nursery() as nursery:
            await nursery.start(trainer.run)

    with pytest.raises(ExceptionGroup), caplog.at_level(logging.WARNING):
        trio.run(main)
    assert not any("vLLM" in record.getMessage() for record in caplog.records)
