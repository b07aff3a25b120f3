"""A run begins from a file of tensors where its creator names one: the file fits, or is refused with what does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file, save_file

from swarmnode.node.identity import Identity
from swarmnode.node.provenance import export
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import ChosenRun, DataDir, RunStore
from swarmnode.node.succession import Unfit, begun_from, first_state, follow, tokenizer_beside
from swarmnode.protocols.methods.method import Saved
from swarmnode.training.gpt import GPT
from swarmnode.training.image import Perceptron
from swarmnode.training.inner import layout_of
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout, OuterState
from swarmnode.training.runspec import RunSpec, decode, encode, parse_runspec
from swarmnode.training.sections import ModelSection, RunSection, TaskSection

MODEL = ModelSection(layers=2, heads=2, width=16, context=8)
SPEC = RunSpec(RunSection(name="new"), TaskSection(name="gpt"), model=MODEL)
LAYOUTS = {"gpt": layout_of(GPT(MODEL)), "byte-lm": layout_of(GPT(MODEL)), "image": layout_of(Perceptron(MODEL))}


def file_of(path: Path, layout: Layout = LAYOUTS["gpt"]) -> Path:
    chance = np.random.default_rng(0)
    save_file({slot.name: chance.standard_normal(slot.shape, np.float32) for slot in layout.slots}, path)
    return path


def begin(tmp_path: Path, file: Path, layout: Layout = LAYOUTS["gpt"], *, creator: bool = True) -> Saved | None:
    """What a node with that file begins from."""
    spec, store = begun_from(SPEC, str(file)), RunStore(DataDir(tmp_path / "home"))
    store.keep(spec)
    return first_state(store, ChosenRun(spec, spec.run_id, creator), layout, str(file))


@pytest.mark.parametrize("task", ["gpt", "byte-lm", "image"])
def test_what_was_exported_is_what_a_new_run_begins_from(tmp_path: Path, task: str) -> None:
    layout, old = LAYOUTS[task], SPEC.updated(task={"name": task}, run={"name": "old"})
    store = RunStore(DataDir(tmp_path))
    store.keep(old)
    vector = np.random.default_rng(1).standard_normal(layout.parameters, np.float32)
    kept = Checkpoints(store.folder(old.run_id) / "checkpoints", run_id=old.run_id, layout=layout, keep=1)
    kept.save(Saved(9, OuterState(vector, np.ones_like(vector)), np.ones_like(vector), ()))
    target, me = tmp_path / "model.safetensors", Identity(Ed25519PrivateKey.generate())
    _, record = export(DataDir(tmp_path), old.run_id, me, target, with_momentum=True)
    new = begun_from(old.updated(run={"name": "new"}), str(target))
    assert new.run.weights == record["model"]["sha256"] and new.run_id != old.run_id
    assert decode(encode(new), expected_run_id=new.run_id) == new
    found = first_state(store, ChosenRun(new, new.run_id, True), layout, str(target))
    assert found is not None and (found.round, found.extra) == (0, b"")
    assert found.state.parameters.tobytes() == vector.tobytes()
    assert not found.state.momentum.any() and not found.residual.any()


def test_a_node_that_comes_back_needs_the_file_no_more(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.safetensors")
    spec, store = begun_from(SPEC, str(file)), RunStore(DataDir(tmp_path / "home"))
    first = begin(tmp_path, file)
    file.unlink()
    layout = LAYOUTS["gpt"]
    again = first_state(store, ChosenRun(spec, spec.run_id, False), layout, "")
    own = Checkpoints(store.folder(spec.run_id) / "checkpoints", run_id=spec.run_id, layout=layout, keep=1)
    newest = own.newest()
    assert first is not None and again is not None and newest is not None
    for saved in (again, newest):
        assert saved.state.parameters.tobytes() == first.state.parameters.tobytes()
    own.save(Saved(3, first.state, first.residual, ()))
    assert first_state(store, ChosenRun(spec, spec.run_id, True), layout, "") is not None
    newest = own.newest()
    assert newest is not None and newest.round == 3


def test_who_has_not_the_file_takes_the_state_from_members_and_begins_nothing(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.safetensors")
    assert begin(tmp_path, file, creator=False) is None
    spec, store = begun_from(SPEC, str(file)), RunStore(DataDir(tmp_path / "home"))
    with pytest.raises(Unfit, match="add --weights FILE"):
        first_state(store, ChosenRun(spec, spec.run_id, True), LAYOUTS["gpt"], "")


def test_the_error_says_which_tensors_do_not_fit(tmp_path: Path) -> None:
    tensors = load_file(file_of(tmp_path / "model.safetensors"))
    tensors["blocks.0.attention.k.weight"] = np.zeros((16, 32), np.float32)
    tensors["blocks.0.attention.q.weight"] = np.zeros((16, 16), np.uint8)
    tensors["of.mine"] = tensors.pop("head.weight")
    for name in [name for name in tensors if name.startswith("blocks.1.")]:
        del tensors[name]
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(Unfit) as refused:
        begin(tmp_path, tmp_path / "other.safetensors")
    told = str(refused.value)
    assert "it lacks blocks.1.attention.k.weight, " in told and " and 3 more; the model has no of.mine; its" in told
    assert "blocks.0.attention.k.weight is float32 [16, 32] in place of float32 [16, 16]" in told
    assert "blocks.0.attention.q.weight is uint8" in told and refused.value.exit_code == 3


def test_half_precision_no_numbers_and_no_tensors_are_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.safetensors")
    tensors = load_file(file)
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, tmp_path / "half.safetensors")
    with pytest.raises(Unfit, match=r"F16.*in float32"):
        begin(tmp_path, tmp_path / "half.safetensors")
    tensors["head.weight"] = np.full_like(tensors["head.weight"], np.nan)
    save_file(tensors, tmp_path / "nan.safetensors")
    with pytest.raises(Unfit, match="NaN"):
        begin(tmp_path, tmp_path / "nan.safetensors")
    (tmp_path / "text.safetensors").write_text("a text, and no tensors at all")
    with pytest.raises(Unfit, match="cannot begin from it"):
        begin(tmp_path, tmp_path / "text.safetensors")
    with pytest.raises(SettingError, match="cannot be read"):
        begun_from(SPEC, str(tmp_path / "nowhere.safetensors"))


def test_a_file_that_is_not_the_one_of_the_run_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.safetensors")
    spec, store = begun_from(SPEC, str(file)), RunStore(DataDir(tmp_path / "home"))
    tensors = load_file(file)
    tensors["head.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(Unfit, match="it changed"):
        first_state(store, ChosenRun(spec, spec.run_id, True), LAYOUTS["gpt"], str(file))
    with pytest.raises(SettingError, match=r"the run file says \[run\] weights"):
        begun_from(spec, str(file))


def test_a_run_begins_from_one_thing(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.safetensors")
    rollouts = parse_runspec({"run": {"name": "r"}, "task": {"name": "digits-rl"}}, source="run.toml")
    for spec in (SPEC.updated(run={"parent": "ab" * 32, "parent_state": "cd" * 32}), rollouts):
        with pytest.raises(SettingError, match="begins from no file"):
            begun_from(spec, str(file))
        tables = {"run": {"name": "r", "parent": spec.run.parent, "parent_state": spec.run.parent_state}}
        with pytest.raises(SettingError, match="weights has no meaning"):
            parse_runspec(
                {"run": {**tables["run"], "weights": "ab" * 32}, "task": {"name": spec.task.name}}, source="f"
            )
    begun = begun_from(SPEC, str(file))
    child = follow(begun.updated(run={"name": "child"}), begun, state_hash="ab" * 32, me="me")
    assert child.run.parent == begun.run_id and not child.run.weights


def test_the_tokenizer_beside_the_file_is_found(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.safetensors")
    assert tokenizer_beside(str(file)) == tokenizer_beside("") == ""
    (tmp_path / "model.tokenizer.json").write_text("{}")
    assert tokenizer_beside(str(file)) == str(tmp_path / "model.tokenizer.json")


def test_a_run_without_a_file_stays_what_it_was() -> None:
    assert begun_from(SPEC, "") is SPEC
