"""A record holds for the model, the run and the rounds that it was made of, and for nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file, save_file

from swarmnode.crdt import encoding
from swarmnode.node import provenance
from swarmnode.node.identity import Identity
from swarmnode.node.provenance import NoModel, export, verify
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import DataDir, RunStore
from swarmnode.node.storage.history import HISTORY, History, PastRound
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.transfer.shard_manifest import ShardManifest
from swarmnode.training.byte_lm import loss_on
from swarmnode.training.gpt import GPT
from swarmnode.training.inner import layout_of
from swarmnode.training.outer import Layout, OuterState, state_hash
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.sections import RunSection
from swarmnode.training.tokens import train

LAYOUT = Layout.of([("block.weight", (3, 4)), ("block.bias", (4,))])
SPEC = RunSpec(RunSection(name="test")).resolved(heldout_sha256="ab" * 32, index="cd" * 32)


def identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


ME = identity()


def trained(folder: Path, *, rounds: int = 6, momentum: float = 0.0, missed: tuple[int, ...] = ()) -> Path:
    """A run's folder after so many rounds."""
    kept = Checkpoints(folder / "checkpoints", run_id=SPEC.run_id, layout=LAYOUT, keep=3)
    history = History(folder / HISTORY)
    for round in range(rounds):
        parameters = np.arange(16, dtype=np.float32) + np.float32(round)
        state = OuterState(parameters, np.full(16, momentum, np.float32))
        if round not in missed:
            counted = ("a", "b") if round % 2 else ("a",)
            history.append(PastRound(round, state_hash(round + 1, LAYOUT, state), counted, at=1_700_000_000 + round))
        kept.save(Saved(round + 1, state, np.ones(16, np.float32), ("a", "b")))
    return folder


def made(tmp_path: Path, *, with_momentum: bool = False, **run: Any) -> Path:
    target = tmp_path / "model.safetensors"
    store = RunStore(DataDir(tmp_path / "home"))
    store.keep(SPEC)
    trained(store.folder(SPEC.run_id), **run)
    export(DataDir(tmp_path / "home"), SPEC.run_id, ME, target, with_momentum=with_momentum)
    return target


def told(file: Path) -> dict[str, bool | None]:
    return {check.what: check.holds for check in verify(file)[1]}


def test_a_record_holds_and_tells_the_run_and_whose_work_counted(tmp_path: Path) -> None:
    model = made(tmp_path)
    assert set(told(model).values()) == {True}
    record, _ = verify(model.with_name("model.provenance.json"))
    assert record["contributors"] == {"a": 6, "b": 3} and record["maker"] == ME.peer_id
    assert (record["run"], record["model"]["round"]) == (SPEC.run_id, 6)
    tensors = load_file(model)
    assert tensors["block.weight"].shape == (3, 4)
    assert tensors["block.bias"].tobytes() == (np.arange(12, 16, dtype=np.float32) + 5).tobytes()


def test_the_file_that_is_named_is_looked_at_and_no_other(tmp_path: Path) -> None:
    model = made(tmp_path)
    other, record = tmp_path / "other.safetensors", tmp_path / "other.provenance.json"
    record.write_bytes(model.with_name("model.provenance.json").read_bytes())
    other.write_bytes(model.read_bytes())
    assert set(told(other).values()) == {True}
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    assert told(other)["model"] is False and told(model)["model"]


def test_what_cannot_be_told_is_said_and_is_no_failure(tmp_path: Path) -> None:
    assert told(made(tmp_path / "a", missed=(5,)))["chain"] is None
    left_out = told(made(tmp_path / "b", momentum=0.5))
    assert left_out["state"] is None and False not in left_out.values()
    included = told(made(tmp_path / "c", momentum=0.5, with_momentum=True))
    assert set(included.values()) == {True}


def test_a_node_that_took_part_compares_what_it_saw_itself(tmp_path: Path) -> None:
    model = made(tmp_path)
    own = tmp_path / "runs" / SPEC.run_id / HISTORY
    assert "own history" not in {check.what for check in verify(model, home=tmp_path)[1]}
    own.parent.mkdir(parents=True)
    own.write_bytes((tmp_path / "home" / "runs" / SPEC.run_id / HISTORY).read_bytes())
    assert {check.holds for check in verify(model, home=tmp_path)[1]} == {True}
    History(own).append(PastRound(5, "00" * 32, ()))
    failed = [check for check in verify(model, home=tmp_path)[1] if check.holds is False]
    assert [check.what for check in failed] == ["own history"] and "1 of 6 rounds" in failed[0].detail
    resigned(lambda record: record.update(run="0" * 300))(model)  # longer than the name of a folder may be
    assert "own history" not in {check.what for check in verify(model, home=tmp_path)[1]}


def resigned(change: Callable[[dict[str, Any]], None], by: Identity = ME) -> Callable[[Path], None]:
    """A change that the maker itself signs."""

    def tamper(model: Path) -> None:
        path = model.with_name("model.provenance.json")
        record = json.loads(path.read_bytes())["record"]
        change(record)
        signature = provenance.DOMAIN.seal(record, by.private_key.sign).signature.hex()
        path.write_text(json.dumps({"record": record, "signature": signature}))

    return tamper


def unsigned(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def tamper(model: Path) -> None:
        path = model.with_name("model.provenance.json")
        sealed = json.loads(path.read_bytes())
        change(sealed["record"])
        path.write_text(json.dumps(sealed))

    return tamper


def another_model(model: Path) -> None:
    tensors = load_file(model)
    tensors["block.bias"] = tensors["block.bias"] + np.float32(1)
    save_file(tensors, model)


def without_tag(model: Path) -> None:
    path = model.with_name("model.provenance.json")
    record = json.loads(path.read_bytes())["record"]
    path.write_text(
        json.dumps(
            {"record": record, "signature": ME.private_key.sign(encoding.encode(record, max_size=1 << 20)).hex()}
        )
    )


@pytest.mark.parametrize(
    ("tamper", "fails"),
    [
        (unsigned(lambda r: r.update(made=0)), {"signature"}),
        (unsigned(lambda r: r.update(maker=identity().peer_id)), {"signature"}),
        (unsigned(lambda r: r["contributors"].update(c=9)), {"signature", "contributors"}),
        (without_tag, {"signature"}),
        (resigned(lambda r: None, by=identity()), {"signature"}),
        (resigned(lambda r: r.update(run="00" * 32)), {"specification"}),
        (resigned(lambda r: r["data"].update(index="00" * 32)), {"data"}),
        (resigned(lambda r: r["contributors"].update(a=7)), {"contributors"}),
        (resigned(lambda r: r["rounds"].reverse()), {"rounds"}),
        (resigned(lambda r: r["rounds"][-1].__setitem__(1, "00" * 32)), {"chain"}),
        (resigned(lambda r: r["model"].update(state_hash="00" * 32)), {"chain", "state"}),
        (resigned(lambda r: r["model"].update(sha256="00" * 32)), {"model"}),
        (resigned(lambda r: r["model"]["layout"].pop()), {"tensors"}),
        (another_model, {"model", "state"}),
        (lambda model: model.unlink(), {"model"}),
        (lambda model: model.write_bytes(b"x"), {"model"}),
    ],
)
def test_what_was_changed_is_found(tmp_path: Path, tamper: Callable[[Path], None], fails: set[str]) -> None:
    model = made(tmp_path)
    tamper(model)
    found = told(model.with_name("model.provenance.json"))
    missing = {what for what, holds in found.items() if holds is False}
    assert fails <= missing and (len(missing) <= 3), found


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"record": {"format": 2}, "signature": ""}', b"\xff", b"[" * 9999]
)
def test_what_is_no_record_is_told_as_such(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.provenance.json").write_bytes(content)
    with pytest.raises(NoModel):
        verify(tmp_path / "model.safetensors")
    with pytest.raises(NoModel):
        verify(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["model"].update(round=float("inf")),
        lambda record: record.update(contributors=["a"]),
        lambda record: record.update(contributors={"a": "many"}),
        lambda record: record.update(made=10**30),
        lambda record: record.pop("made"),
        lambda record: record.pop("name"),
    ],
)
def test_a_record_that_a_stranger_made_up_is_told_as_such(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    model = made(tmp_path)
    unsigned(change)(model)
    with pytest.raises(NoModel, match="is no provenance record"):
        verify(model)


def test_without_a_checkpoint_there_is_nothing_to_export(tmp_path: Path) -> None:
    home = DataDir(tmp_path)
    with pytest.raises(NoModel, match="no specification"):
        export(home, SPEC.run_id, ME, tmp_path / "model.safetensors", with_momentum=False)
    RunStore(home).keep(SPEC)
    with pytest.raises(NoModel, match="no whole checkpoint"):
        export(home, SPEC.run_id, ME, tmp_path / "model.safetensors", with_momentum=False)


def test_a_text_that_the_run_did_not_seal_is_held_against_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"any text")
    found = {check.what: check for check in verify(made(tmp_path), sealed=text)[1]}
    assert found["sealed text"].holds is False and "names none ([data] sealed)" in found["sealed text"].detail


def test_loss_on_a_sealed_text_is_measured_with_the_runs_own_tokenizer_and_with_no_other(tmp_path: Path) -> None:
    raw, text = train([b"the cat and the dog sat"] * 9, vocabulary=300), b"the dog and the cat sat, " * 9
    tables = {
        "run": {"name": "sealed"},
        "task": {"name": "gpt"},
        "data": {"vocabulary": 300, "sealed": hashlib.sha256(text).hexdigest()},
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 8},
    }
    shard = ShardManifest.of(raw).id.hex()
    spec = parse_runspec(tables, source="test").resolved(heldout_sha256="", index="", tokenizer=shard)
    home, layout = DataDir(tmp_path / "home"), layout_of(GPT(spec.model, 300))
    store, parameters = RunStore(home), np.random.default_rng(0).normal(0, 0.1, layout.parameters).astype(np.float32)
    store.keep(spec)
    checkpoints = store.folder(spec.run_id) / "checkpoints"
    kept = Checkpoints(checkpoints, run_id=spec.run_id, layout=layout, keep=1)
    kept.save(Saved(1, OuterState.start(parameters), np.zeros_like(parameters), ()))
    sealed, model, beside = tmp_path / "text", tmp_path / "out.safetensors", tmp_path / "out.tokenizer.json"
    sealed.write_bytes(text)

    def said(home: Path | None = None) -> str:
        return next(check.detail for check in verify(model, home=home, sealed=sealed)[1] if check.what == "sealed text")

    export(home, spec.run_id, ME, model, with_momentum=False)
    assert "tokenizer is not here" in said() and "out.tokenizer.json" in said()
    for whole in (tmp_path / "folder", tmp_path / "out.gguf"):  # which would name a tokenizer, and have none
        with pytest.raises(NoModel, match="tokenizer is not among"):
            export(home, spec.run_id, ME, whole, with_momentum=False)
        assert not whole.exists()
    measured = f"loss on it is {loss_on(text, spec, parameters, tokenizer=raw):.4f} bits per byte"
    (home.path / "shards").mkdir()
    (home.path / "shards" / f"{shard}.shard").write_bytes(raw)
    assert measured in said(home.path) and not beside.exists()
    export(home, spec.run_id, ME, model, with_momentum=False)
    assert beside.read_bytes() == raw and measured in said()
    beside.write_bytes(train([b"another text"] * 9, vocabulary=300))
    assert "tokenizer is not here" in said() and measured in said(home.path)
    huge = spec.updated(model={"layers": 128, "width": 16384, "heads": 128})  # a terabyte, if it were made
    with pytest.raises(ValueError, match="not those of the run's model"):
        loss_on(text, huge, parameters, tokenizer=raw)
