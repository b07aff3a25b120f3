"""What a run by hf-lm leaves behind is loaded by plain `transformers` and `peft`, and is the swarm's model."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tinymodels import folder_of

from swarmnode.node.identity import Identity
from swarmnode.node.provenance import NoModel, export, verify
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import DataDir, RunStore
from swarmnode.node.succession import begun_from, tokenizer_beside
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.transfer.shard_manifest import ShardManifest
from swarmnode.training.gpt import GPT
from swarmnode.training.hub import STEEP, as_qwen3, vocabulary, weights_hash, write_gguf
from swarmnode.training.inner import flatten_into, layout_of
from swarmnode.training.outer import OuterState
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tokens import Encoder, train

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
peft = pytest.importorskip("peft", reason="the extra hf is not installed")
gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from swarmnode.training.hf_lm import CausalLM, attach_lora, open_model  # noqa: E402

SEALED = (b"abcdefg: 123=" * 40)[: 12 * 33]


def identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


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
    checkpoints = Checkpoints(folder, run_id=spec.run_id, layout=layout, keep=1)
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
    if not rank:  # the one file, without the folder that says of what shape the model is
        alone = tmp_path / "alone"
        alone.mkdir()
        for file in ("model.safetensors", "tokenizer.json", beside.name):
            shutil.copy(beside.with_name(file), alone)
        beside = alone / beside.name
        assert said(base=str(tmp_path / "moved")) == measured
        base.rename(tmp_path / "of another kind")
        assert "--base" in said()


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


def of_gpt(home: DataDir, **model: Any) -> tuple[RunSpec, GPT]:
    """The newest checkpoint of a run by gpt, of parameters by chance, and the model with them."""
    words = train([b"the cat and the dog sat"] * 9, vocabulary=300)
    shard = ShardManifest.of(words).id.hex()
    shape = {"layers": 2, "heads": 2, "width": 16, "context": 32, **model}
    tables = {"run": {"name": "t"}, "task": {"name": "gpt"}, "data": {"vocabulary": 300}, "model": shape}
    spec = parse_runspec(tables, source="t.toml").resolved(heldout_sha256="", index="", tokenizer=shard)
    (home.path / "shards").mkdir(parents=True)
    (home.path / "shards" / f"{shard}.shard").write_bytes(words)
    gpt = GPT(spec.model, 300)
    layout = layout_of(gpt)
    vector = torch.randn(layout.parameters, generator=torch.Generator().manual_seed(1)) * 0.3
    flatten_into(gpt, vector, keep=True)
    store = RunStore(home)
    store.keep(spec)
    folder = store.folder(spec.run_id) / "checkpoints"
    checkpoints = Checkpoints(folder, run_id=spec.run_id, layout=layout, keep=1)
    checkpoints.save(Saved(3, OuterState.start(vector.numpy()), torch.zeros(layout.parameters).numpy(), ()))
    return spec, gpt


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_the_folder_of_a_gpt_gives_its_logits_in_transformers(tmp_path: Path, activation: str, tied: bool) -> None:
    home, target = DataDir(tmp_path / "home"), tmp_path / "out"
    spec, gpt = of_gpt(home, activation=activation, tied=tied)
    beside, record = export(home, spec.run_id, identity(), target, with_momentum=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.arange(60).view(2, 30) * 5
    with torch.no_grad():
        expected = gpt(tokens)
        assert expected.std() > 0.1
        torch.testing.assert_close(plain(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    words = transformers.AutoTokenizer.from_pretrained(target)
    text = b"the dog and the cat"
    encoded = Encoder((target / "tokenizer.json").read_bytes(), 300).encode([text])[0]
    assert words(text.decode())["input_ids"] == encoded[: len(words(text.decode())["input_ids"])].tolist()
    told = {check.what: check.holds for check in verify(beside)[1]}
    assert told["tensors"] and told["state"] and False not in told.values()
    own = target / record["model"]["file"]
    assert begun_from(spec, str(own)).run.weights == record["model"]["sha256"]
    assert tokenizer_beside(str(own)) == str(target / "tokenizer.json")


def test_a_gpt_that_transformers_has_not_is_refused_with_what_to_do(tmp_path: Path) -> None:
    home = DataDir(tmp_path / "home")
    spec, _ = of_gpt(home, value_embeddings=True)
    with pytest.raises(NoModel, match=r"value embeddings.*name a file in \.safetensors"):
        export(home, spec.run_id, identity(), tmp_path / "out", with_momentum=False)
    assert not (tmp_path / "out").exists()
    export(home, spec.run_id, identity(), tmp_path / "out.safetensors", with_momentum=False)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_a_gguf_has_the_tensors_of_a_gpt_bit_for_bit_and_gives_its_logits(tmp_path: Path, activation: str) -> None:
    home = DataDir(tmp_path / "home")
    spec, gpt = of_gpt(home, activation=activation)
    beside, record = export(home, spec.run_id, identity(), tmp_path / "out.gguf", with_momentum=False)
    assert beside == tmp_path / "out.provenance.json" and record["model"]["file"] == "out.safetensors"
    assert False not in [check.holds for check in verify(beside)[1]]

    expected, _ = as_qwen3(spec, {name: value.detach().numpy() for name, value in gpt.named_parameters()})
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, spec.model.layers)
    assert len(read) == len(expected)
    for name, tensor in expected.items():
        steeper = {"gate_proj": STEEP, "up_proj": 2.0**-6, "down_proj": 2.0**-6}.get(name.split(".")[-2], 1.0)
        found = read[names.get_name(name.removesuffix(".weight")) + ".weight"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found / np.float32(steeper if activation == "relu2" else 1), tensor)

    # An independent reader, which does not read the width of a head, has the same function of tokens, and the words.
    where: dict[str, Any] = {"pretrained_model_name_or_path": tmp_path, "gguf_file": "out.gguf"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(**where, head_dim=8)
    tokens = torch.arange(60).view(2, 30) * 5
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, gpt(tokens), rtol=1e-4, atol=1e-4)
    words = transformers.AutoTokenizer.from_pretrained(**where)
    ids = Encoder((tmp_path / "out.tokenizer.json").read_bytes(), 300).encode([b"the dog and the cat"])[0]
    assert [*words("the dog and the cat")["input_ids"], words.eos_token_id] == ids.tolist()


def test_the_words_of_a_gguf_of_bytes_are_the_letters_of_bytes(tmp_path: Path) -> None:
    """Checked by hand with llama.cpp as well (docs/provenance.md): it makes one token of each byte of a text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spec = parse_runspec({"run": {"name": "t"}, "model": {"layers": 1, "heads": 2, "width": 16}}, source="t.toml")
    tensors = {name: value.detach().numpy() for name, value in GPT(spec.model).named_parameters()}
    write_gguf(tmp_path / "out.gguf", spec, tensors, b"")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    letters = fields["tokenizer.ggml.tokens"].contents()
    by_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
    assert [by_letter[letter] for letter in letters] == list(range(256))
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    left, right = fields["tokenizer.ggml.merges"].contents()[0].split()
    assert not {left, right} & set(letters), "no text has what this merges"


def test_a_model_that_llama_cpp_cannot_read_is_refused(tmp_path: Path) -> None:
    home = DataDir(tmp_path / "home")
    spec, _ = of_gpt(home, value_embeddings=True)
    with pytest.raises(NoModel, match=r"value embeddings.*so no GGUF is written"):
        export(home, spec.run_id, identity(), tmp_path / "out.gguf", with_momentum=False)
    spec, _ = of_gpt(DataDir(tmp_path / "other"))
    (shard,) = (tmp_path / "other" / "shards").glob("*.shard")
    shard.unlink()
    with pytest.raises(NoModel, match="tokenizer is not among"):
        export(DataDir(tmp_path / "other"), spec.run_id, identity(), tmp_path / "out.gguf", with_momentum=False)
    assert not list(tmp_path.glob("*out*"))
    good = train([b"the cat"], vocabulary=270)
    told = json.loads(good)
    unmerged = {name: value for name, value in told["model"].items() if name != "merges"}
    listed = told["model"] | {"vocab": [[word, 0.0] for word in told["model"]["vocab"]]}
    crafted = [json.dumps(told | {"model": model}).encode() for model in (unmerged, listed)]
    crafted += [json.dumps(told | {"pre_tokenizer": "ByteLevel"}).encode(), b"{}"]
    plain = parse_runspec({"run": {"name": "t"}}, source="t.toml")
    tensors = {name: value.detach().numpy() for name, value in GPT(plain.model, 270).named_parameters()}
    for words in (good.replace(b'"add_prefix_space":false', b'"add_prefix_space":true'), *crafted):
        with pytest.raises(ValueError, match="as GPT-2 does"):
            write_gguf(tmp_path / "out.gguf", plain, tensors, words)
    with pytest.raises(ValueError, match="came without a tokenizer"):
        write_gguf(tmp_path / "out.gguf", plain, tensors, b"")
