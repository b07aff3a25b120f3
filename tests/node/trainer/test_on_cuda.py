"""The trainer on a GPU, in its sandbox: it trains what a CPU trains. Most of this is skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from sometext import HELDOUT_SHA256, some_text
from tinymodels import folder_of
from trainers import running_trainer

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.training import worker
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.rl.groups import score
from swarmnode.training.rl.policies import parameter_hash
from swarmnode.training.rl.proofs import Audited
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.sandbox import landlock
from swarmnode.training.tasks import Assignment

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CAP, DRIVER = 1_500_000_000, 800_000_000  # bytes that a trainer may take of a GPU, and that its driver takes beside it

SPEC = parse_runspec(
    {
        "run": {"name": "t"},
        "task": {"heldout_sha256": HELDOUT_SHA256},
        "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
        "inner": {"batch": 4, "warmup": 0},
    },
    source="test",
)


def _trained(device: str, folder: Path, sandbox: str = "auto") -> dict[str, object]:
    """What a trainer comes to after two rounds, with an exchange between them."""
    told: dict[str, object] = {}

    async def main() -> None:
        settings = TrainerSettings(threads=1, nice=0, device=device, sandbox=sandbox, **some_text(folder))
        async with running_trainer(SPEC, settings, within=120) as trainer:
            await trainer.train(round=0, steps=4, seconds=100)
            trainer.load(trainer.parameters() * np.float32(0.9))
            told["loss"] = (await trainer.train(round=1, steps=4, seconds=100)).loss
            told["parameters"] = trainer.parameters()
            told["heldout"] = await trainer.heldout(seed=1, sequences=SEQUENCES)
            told["gradient"] = await trainer.gradient(seed=1, first=0, last=3)
            told["device"] = trainer.device
            told["sandbox"] = trainer.sandbox
            assert trainer.restarts == 0

    trio.run(main)
    return told


@ON_CUDA
def test_a_gpu_trains_in_the_sandbox_what_a_cpu_trains(tmp_path: Path) -> None:
    cpu, gpu = _trained("cpu", tmp_path), _trained("cuda", tmp_path, "require")
    assert gpu["device"] == "cuda"
    assert gpu["sandbox"]["missing"] == ()
    assert np.abs(cpu["parameters"] - gpu["parameters"]).max() < 1e-3
    assert np.linalg.norm(cpu["parameters"] - gpu["parameters"]) < 1e-3 * np.linalg.norm(cpu["parameters"])
    assert [gpu["loss"], gpu["heldout"]] == pytest.approx([cpu["loss"], cpu["heldout"]], abs=1e-3)
    assert np.allclose(cpu["gradient"][1], gpu["gradient"][1], atol=1e-3)


@ON_CUDA
def test_the_memory_that_a_gpu_copies_to_is_pinned() -> None:
    import mmap

    memory = torch.frombuffer(mmap.mmap(-1, 4 << 20), dtype=torch.float32)
    worker._pin(memory)
    assert memory.is_pinned()
    assert torch.equal(memory.to("cuda").cpu(), memory)


@ON_CUDA
def test_a_gpu_takes_no_more_of_its_memory_than_it_may(tmp_path: Path) -> None:
    tables = {"layers": 4, "heads": 4, "width": 256, "context": 512}
    spec = SPEC.updated(model=tables, inner={"batch": 64, "warmup": 0, "precision": "bf16"})
    free, least = torch.cuda.mem_get_info()[0], [1 << 60]

    async def main() -> None:
        settings = TrainerSettings(threads=1, nice=0, device="cuda", device_memory=CAP, **some_text(tmp_path))
        async with running_trainer(spec, settings, within=120) as trainer, trio.open_nursery() as nursery:
            nursery.start_soon(_watch, least)
            done = await trainer.train(round=0, steps=10, seconds=100)
            nursery.cancel_scope.cancel()
        assert done.steps == 10 and trainer.restarts == 0

    trio.run(main)
    took = free - least[0]
    print(f"{took / 1e9:.2f} GB taken of {CAP / 1e9:.1f} GB and the driver's own")
    assert took < CAP + DRIVER


async def _watch(least: list[int]) -> None:
    while True:
        least[0] = min(least[0], torch.cuda.mem_get_info()[0])
        await trio.sleep(0.05)


@pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")
def test_a_device_learns_by_rollouts_and_samples_what_a_cpu_finds_honest(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    tables = {"warm_up": 20, "batch": 4, "external": 1, "answers": 4, "tokens": 6}
    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": "digits-rl"}, "rollouts": tables}, source="test")
    policy = f"hf-full:{folder_of('llama', tmp_path / 'model')}"
    judge = Trainee(spec, Assignment(spec.run_id, "judge", policy=policy))
    checked: list[Audited] = []

    async def main() -> None:
        settings = TrainerSettings(threads=1, nice=0, policy=policy, scratch=str(tmp_path / "own"), sandbox="require")
        async with running_trainer(spec, settings, within=120) as trainer:
            assert trainer.device == ("cuda" if torch.cuda.is_available() else "cpu")  # without being told to
            informative = 0
            for version in range(5):
                before = trainer.parameters()
                await trainer.rollouts(version=version)
                learned = await trainer.learn([])
                informative += learned.informative
                assert learned.informative == 0 or not np.array_equal(before, trainer.parameters())
                trainer.load(torch.from_numpy(trainer.parameters()).bfloat16().float().numpy())  # as samplers do
                torch.nn.utils.vector_to_parameters(torch.from_numpy(trainer.parameters()), judge.model.parameters())
                judge.audit.remember(called := parameter_hash(judge.model))
                asked = [TaskRef("digits/swap", 5, 100 * version + n) for n in range(32)]
                answered = await trainer.answer(asked, version=version, policy=called)
                checked.append(judge.audit.check([score("alice", group) for group in answered.groups]))
            assert informative and trainer.restarts == 0

    trio.run(main)
    assert [len(audited.passed) for audited in checked] == [32] * 5
    assert not any(audited.caught for audited in checked)


@pytest.mark.parametrize("starts", [True, False])
def test_whose_gpu_cuda_does_not_start_on_hears_that_the_cpu_trains(
    starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: starts)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(landlock, "CUDA", ("/dev/null",))
    device, why = worker._device("auto")
    assert device == ("cuda" if starts else "cpu")
    assert ("swarmnode doctor" in why) != starts
    assert worker._device("cpu") == ("cpu", ""), "as it was asked for"
    monkeypatch.setattr(landlock, "CUDA", ())
    assert not worker._device("auto")[1], "there is no GPU, and so nothing to tell"
