"""The trainer on a GPU, in its sandbox: it trains what a CPU trains. Without a CUDA device these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from sometext import HELDOUT_SHA256, some_text

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.training import worker
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.runspec import parse_runspec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

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
        trainer = TrainerProcess(SPEC, run_id=SPEC.run_id, peer_id="alice", settings=settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(trainer.run)
            with trio.fail_after(120):
                await trainer.train(round=0, steps=4, seconds=100)
                trainer.load(trainer.parameters() * np.float32(0.9))
                told["loss"] = (await trainer.train(round=1, steps=4, seconds=100)).loss
                told["parameters"] = trainer.parameters()
                told["heldout"] = await trainer.heldout(seed=1, sequences=SEQUENCES)
                told["gradient"] = await trainer.gradient(seed=1, first=0, last=3)
                told["device"] = trainer.device
                told["sandbox"] = trainer.sandbox
                assert trainer.restarts == 0
            nursery.cancel_scope.cancel()

    trio.run(main)
    return told


def test_a_gpu_trains_in_the_sandbox_what_a_cpu_trains(tmp_path: Path) -> None:
    cpu, gpu = _trained("cpu", tmp_path), _trained("cuda", tmp_path, "require")
    assert gpu["device"] == "cuda"
    assert gpu["sandbox"]["missing"] == []
    assert np.abs(cpu["parameters"] - gpu["parameters"]).max() < 1e-3
    assert np.linalg.norm(cpu["parameters"] - gpu["parameters"]) < 1e-3 * np.linalg.norm(cpu["parameters"])
    assert [gpu["loss"], gpu["heldout"]] == pytest.approx([cpu["loss"], cpu["heldout"]], abs=1e-3)
    assert np.allclose(cpu["gradient"][1], gpu["gradient"][1], atol=1e-3)


def test_the_memory_that_a_gpu_copies_to_is_pinned() -> None:
    import mmap

    memory = torch.frombuffer(mmap.mmap(-1, 4 << 20), dtype=torch.float32)
    worker._pin(memory)
    assert memory.is_pinned()
    assert torch.equal(memory.to("cuda").cpu(), memory)
