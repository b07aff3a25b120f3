"""A model in the hub's cache is read, trained and sampled from by a trainer in its sandbox, with no network."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
from sometext import some_text
from trainers import running_trainer

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.training.hub import weights_hash
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.sandbox import landlock

pytest.importorskip("transformers", reason="the extra hf is not installed")

# In a process of its own, so that this one does not import torch.
MAKE = """
import sys, torch, tokenizers, transformers
words = {word: n for n, word in enumerate([*"0123456789abcdefghij=:#! ", "40", "<end>"])}
cutter = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[("4", "0")]))
cutter.decoder = tokenizers.decoders.Fuse()
transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, eos_token="<end>").save_pretrained(sys.argv[1])
end = words["<end>"]
torch.manual_seed(1)
config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=256, n_positions=64,
                                 bos_token_id=end, eos_token_id=end)
transformers.GPT2LMHeadModel(config).save_pretrained(sys.argv[1])
"""


SANDBOXED = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")


def made(tmp_path: Path, into: Path) -> None:
    (tmp_path / "make.py").write_text(MAKE)
    trio.run(trio.run_process, [sys.executable, str(tmp_path / "make.py"), str(into)])


@pytest.mark.slow
@SANDBOXED
def test_a_cached_model_is_trained_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "ab" * 20
    kept = tmp_path / "hub" / "models--nobody--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(revision)
    made(tmp_path, kept / "snapshots" / revision)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    spec = parse_runspec(
        {
            "run": {"name": "r"},
            "task": {"name": "digits-rl"},
            "rollouts": {"warm_up": 1, "batch": 2, "external": 1, "answers": 2},
        },
        source="test",
    )
    settings = TrainerSettings(
        threads=1, nice=0, device="cpu", policy="hf:nobody/tiny", scratch=str(tmp_path / "own"), sandbox="require"
    )

    async def main() -> None:
        async with running_trainer(spec, settings) as trainer:
            assert trainer.sandbox is not None and json.dumps(trainer.sandbox["missing"]) == "[]"
            groups, _ = await trainer.rollouts(version=0)
            assert groups
            await trainer.learn([])
            assert isinstance(await trainer.sample(b"a304=", length=4, temperature=1.0, seed=1), bytes)

    trio.run(main)


def adapting(tmp_path: Path) -> tuple[RunSpec, TrainerSettings]:
    """A run that trains adapters of a base on this machine, and what a trainer of it needs."""
    base = tmp_path / "base"
    made(tmp_path, base)
    lines = "".join(f"the {number} of many lines\n" for number in range(9000)).encode()
    tables = {
        "run": {"name": "r"},
        "task": {"name": "hf-lm", "heldout_sha256": hashlib.sha256(lines[-20_000:]).hexdigest()},
        "model": {"base": str(base), "base_sha256": weights_hash(base), "lora_rank": 2, "context": 16},
        "inner": {"lr": 0.02, "warmup": 1},
    }
    text = some_text(tmp_path, lines[:-20_000], lines[-20_000:])
    settings = TrainerSettings(threads=1, nice=0, device="cpu", scratch=str(tmp_path / "own"), **text)
    return parse_runspec(tables, source="test"), settings


@pytest.mark.thorough
@pytest.mark.slow
@SANDBOXED
def test_adapters_of_a_base_are_trained_in_the_sandbox(tmp_path: Path) -> None:
    spec, settings = adapting(tmp_path)
    settings = replace(settings, sandbox="require")

    async def main() -> None:
        async with running_trainer(spec, settings) as trainer:
            assert spec.model.base in trainer.rules.readable and str(tmp_path) not in trainer.rules.readable
            assert all(".lora_" in slot.name for slot in trainer.layout.slots)
            before = await trainer.evaluate(thorough=False)
            await trainer.train(round=0, steps=20, seconds=60)
            assert await trainer.evaluate(thorough=False) < before

    trio.run(main)


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_train_the_adapters_that_one_process_trains(tmp_path: Path) -> None:
    spec, settings = adapting(tmp_path)
    ends: list[np.ndarray] = []

    async def train(settings: TrainerSettings) -> None:
        async with running_trainer(spec, settings) as trainer:
            start = trainer.parameters()
            await trainer.train(round=0, steps=5, seconds=60)
            ends.append(trainer.parameters() - start)

    for how in ({}, {"ranks": 2}, {"ranks": 2, "sharded": True}):
        trio.run(train, replace(settings, **how))
    alone, *several = ends
    for moved in several:
        assert np.linalg.norm(moved - alone) < 1e-3 * np.linalg.norm(alone)
