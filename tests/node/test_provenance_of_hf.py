"""What a run by hf-lm leaves behind is loaded by plain `transformers` and `peft`, and is the swarm's model."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tinymodels import folder_of

from swarmnode.node.identity import Identity, peer_id_of
from swarmnode.node.provenance import NoModel, export, verify
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.runs import RunStore
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.transfer.shard_manifest import ShardManifest
from swarmnode.training.hub import vocabulary, weights_hash
from swarmnode.training.inner import flatten_into, layout_of
from swarmnode.training.outer import OuterState
from swarmnode.training.runspec import RunSpec, encode, parse_runspec
from swarmnode.training.tokens import Encoder

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
peft = pytest.importorskip("peft", reason="the extra hf is not installed")

from swarmnode.training.hf_lm import CausalLM, attach_lora, open_model  # noqa: E402

SEALED = (b"abcdefg: 123=" * 40)[: 12 * 33]


def identity() -> Identity:
    key = Ed25519PrivateKey.generate()
    return Identity(key, peer_id_of(key.public_key().public_bytes_raw()))


def kept(home: DataDir, base: Path, rank: int) -> tuple[RunSpec, CausalLM]:
    """A run's newest checkpoint, of parameters that are nobody's beginning, and the model with them."""
    lora = {"lora_rank": rank, "lora_alpha": 12.0} if rank else {}
    tables: dict[str, Any] = {
        "run": {"name": "t"},
        "task": {"name": "hf-lm"},
        "data": {"sealed": hashlib.sha256(SEALED).hexdigest(), "vocabulary": vocabulary(base)},
        "model": {"base": str(base), "base_sha256": weights_hash(base), "context": 32, **lora},
    }
    words = (base / "tokenizer.json").read_bytes()
    shard = ShardManifest.of(words).id.hex()
    spec = parse_runspec(tables, source="t.toml").resolved(heldout_sha256="", index="", tokenizer=shard)
    (home.path / "shards").mkdir(parents=True)
    (home.path / "shards" / f"{shard}.shard").write_bytes(words)
    inner = open_model(str(base))
    if rank:
        attach_lora(inner, rank=rank, alpha=12.0, seed=1)
    model = CausalLM(inner, context=32)
    layout = layout_of(model)
    vector = torch.randn(layout.parameters, generator=torch.Generator().manual_seed(1)) * 0.1
    flatten_into(model, vector, keep=True)
    store, state = RunStore(home), OuterState.start(vector.numpy())
    store.keep(spec)
    folder = store.folder(spec.run_id) / "checkpoints"
    checkpoints = Checkpoints(folder, run_id=spec.run_id, layout=layout, keep=1, spec=encode(spec))
    checkpoints.save(Saved(3, state, torch.zeros(layout.parameters).numpy(), ()))
    return spec, model


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_an_exported_folder_gives_the_swarms_logits(tmp_path: Path, kind: str, rank: int) -> None:
    base, home, target = folder_of(kind, tmp_path / "base"), DataDir(tmp_path / "home"), tmp_path / "out"
    spec, model = kept(home, base, rank)
    beside, record = export(home, spec.run_id, identity(), target, with_momentum=False)
    assert beside.parent == target and len(record["model"]["layout"]) > 3
    told = {check.what: check.holds for check in verify(beside)[1]}
    assert told["tensors"] and told["state"] and False not in told.values()
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = peft.PeftModel.from_pretrained(load(base), target) if rank else load(target)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected = model(tokens)
        assert (expected - load(base)(tokens).logits).abs().max() > 0.1
        torch.testing.assert_close(plain(tokens).logits, expected)
    if not rank:
        words = transformers.AutoTokenizer.from_pretrained(target)
        assert words.get_vocab() == transformers.AutoTokenizer.from_pretrained(base).get_vocab()
        assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}


@pytest.mark.parametrize("rank", [0, 3])
def test_loss_on_a_sealed_text_is_that_of_the_swarms_model(tmp_path: Path, rank: int) -> None:
    base, home, sealed = folder_of("llama", tmp_path / "base"), DataDir(tmp_path / "home"), tmp_path / "sealed"
    spec, model = kept(home, base, rank)
    beside, _ = export(home, spec.run_id, identity(), tmp_path / "out", with_momentum=False)
    sealed.write_bytes(SEALED)

    def said(**where: str) -> str:
        return next(check.detail for check in verify(beside, sealed=sealed, **where)[1] if check.what == "sealed text")

    tokens = Encoder((base / "tokenizer.json").read_bytes(), spec.data.vocabulary).encode([SEALED])[0]  # one a byte
    with torch.no_grad():
        expected = float(model.loss(torch.from_numpy(tokens.astype("int64")).view(-1, 33))) / math.log(2)
    measured = said()
    assert float(measured.removesuffix(" bits per byte").split()[-1]) == pytest.approx(expected, abs=2e-4)
    base.rename(tmp_path / "moved")
    assert said(base=str(tmp_path / "moved")) == measured
    assert said() == measured or (rank and "--base" in said())
    folder_of("gpt2", base)
    assert said() == measured or (rank and "other weights" in said())


def test_a_folder_is_written_only_where_there_is_a_base(tmp_path: Path) -> None:
    home, base = DataDir(tmp_path / "home"), folder_of("llama", tmp_path / "base")
    spec, _ = kept(home, base, 0)
    base.rename(tmp_path / "moved")
    with pytest.raises(NoModel, match="--base"):
        export(home, spec.run_id, identity(), tmp_path / "out", with_momentum=False)
    beside, _ = export(
        home, spec.run_id, identity(), tmp_path / "out", with_momentum=False, base=str(tmp_path / "moved")
    )
    assert (beside.parent / "tokenizer.json").exists()
