"""The task hf-lm: what of a base model is trained, from where it begins, and which base is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sometext import some_text
from tinymodels import folder_of

from swarmnode.training.hub import weights_hash
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment, TaskError, load_task
from swarmnode.training.weigh import weigh

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("peft", reason="the extra hf is not installed")

from swarmnode.training.hf_lm import CausalLM, HfLM, attach_lora, open_model  # noqa: E402


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that reads any byte as a token; gpt2 has one matrix for its embedding and its head."""
    return folder_of(request.param, tmp_path_factory.mktemp(request.param), rows=256)


LINES = "".join(f"the {number} of many lines\n" for number in range(9000)).encode()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return some_text(tmp_path_factory.mktemp("text"), LINES[:-20_000], LINES[-20_000:])


def spec_of(folder: Path, **model: Any) -> RunSpec:
    tables = {
        "run": {"name": "t", "seed": 3},
        "task": {"name": "hf-lm", "heldout_sha256": hashlib.sha256(LINES[-20_000:]).hexdigest()},
        "model": {"base": str(folder), "context": 32, **model},
        "inner": {"lr": 0.01, "warmup": 1},
    }
    return parse_runspec(tables, source="t.toml")


def task_of(folder: Path, texts: dict[str, Any], **model: Any) -> tuple[RunSpec, HfLM]:
    spec = spec_of(folder, **model)
    return spec, HfLM(spec, Assignment("run", "alice", base=str(folder), **texts))


def trained(spec: RunSpec, task: HfLM, steps: int = 12) -> tuple[torch.Tensor, float]:
    vector = torch.zeros(layout_of(task.model).parameters)
    loop = InnerLoop(spec, task, peer_id="alice", vector=vector, keep=False)
    before = task.evaluate(thorough=False)
    loop.train(round=0, steps=steps, seconds=60, between=lambda: False)
    return vector, before - task.evaluate(thorough=False)


def test_lora_trains_its_adapters_alone(folder: Path, texts: dict[str, Any]) -> None:
    spec, task = task_of(folder, texts, lora_rank=4)
    layout = layout_of(task.model)
    assert layout.slots and all(".lora_A." in slot.name or ".lora_B." in slot.name for slot in layout.slots)
    assert not any("head" in slot.name for slot in layout.slots)
    before = {name: value.clone() for name, value in task.model.state_dict().items() if "lora_" not in name}
    _, gained = trained(spec, task)
    assert gained > 0.05
    after = task.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_all_parameters_are_trained_without_it_and_shared_ones_once(folder: Path, texts: dict[str, Any]) -> None:
    spec, task = task_of(folder, texts)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    layout = layout_of(task.model)
    assert layout.parameters == sum(parameter.numel() for parameter in whole.parameters())
    names = [slot.name for slot in layout.slots]
    assert any("lm_head" in name for name in names) is not whole.config.tie_word_embeddings
    vector, gained = trained(spec, task)
    assert gained > 0.5
    model = task.model.model
    same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert same is whole.config.tie_word_embeddings
    begin, end = vector.data_ptr(), vector.data_ptr() + 4 * vector.numel()
    assert all(begin <= parameter.data_ptr() < end for parameter in task.model.parameters())


@pytest.mark.parametrize("rank", [0, 4])
def test_it_begins_as_its_base_whoever_begins_and_trains_the_same(
    folder: Path, texts: dict[str, Any], rank: int
) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(64).view(2, 32)
    ends = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        spec, task = task_of(folder, texts, lora_rank=rank)
        with torch.no_grad():
            torch.testing.assert_close(task.model(tokens), whole(tokens).logits)
        ends.append(trained(spec, task, steps=3)[0])
    assert torch.equal(*ends), "chance from elsewhere: dropout, or adapters that no seed drew"
    torch.testing.assert_close(task.model(tokens[:, :9]), task.model(tokens)[:, :9])


def test_adapters_are_drawn_by_the_runs_seed_and_change_what_peft_says(folder: Path) -> None:
    def begun(seed: int) -> Any:
        model = open_model(str(folder))
        attach_lora(model, rank=2, alpha=8.0, seed=seed)
        return model

    first, same, other = (dict(begun(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        if parameter.requires_grad:
            assert torch.equal(parameter, same[name]) and parameter.dtype == torch.float32
            assert torch.equal(parameter, other[name]) is ("lora_B" in name)


def test_a_frozen_base_may_be_in_bfloat16_and_its_adapters_are_not(folder: Path, texts: dict[str, Any]) -> None:
    spec = spec_of(folder, lora_rank=4).updated(inner={"precision": "bf16"})
    task = HfLM(spec, Assignment("run", "alice", base=str(folder), **texts))
    kinds = {parameter.requires_grad: parameter.dtype for parameter in task.model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert trained(spec, task)[1] > 0.05
    weight = weigh(HfLM, spec, Assignment("run", "alice", base=str(folder)))
    assert weight is not None
    assert weight.frozen == sum(each.nbytes for each in task.model.parameters() if not each.requires_grad)
    whole = spec_of(folder).updated(inner={"precision": "bf16"})
    task = HfLM(whole, Assignment("run", "alice", base=str(folder), **texts))
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.float32}


def test_a_context_that_the_base_cannot_read_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"context = 65 is longer .* 64 tokens"):
        CausalLM(open_model(str(folder)), context=65)


def test_state_that_nobody_exchanges_is_refused_but_beside_adapters(folder: Path) -> None:
    model = open_model(str(folder))
    model.register_buffer("seen", torch.zeros(3))
    with pytest.raises(TaskError, match=r"seen .* lora_rank"):
        CausalLM(model, context=32)
    attach_lora(model, rank=2, alpha=8.0, seed=1)
    CausalLM(model, context=32)


def test_a_base_is_known_by_its_weights_and_shape(folder: Path, tmp_path: Path) -> None:
    def copied(name: str, change: bytes = b"") -> Path:
        into = tmp_path / name
        into.mkdir()
        for file in folder.iterdir():
            (into / file.name).write_bytes(file.read_bytes() + (change if file.suffix == ".safetensors" else b""))
        (into / "README.md").write_text(name)
        return into

    assert weights_hash(copied("a")) == weights_hash(copied("b")) == weights_hash(folder)
    assert weights_hash(copied("c", b" ")) != weights_hash(folder)
    (tmp_path / "a" / "consolidated.safetensors").write_bytes(b"another form, which another program fetched")
    assert weights_hash(tmp_path / "a") == weights_hash(folder)
    with pytest.raises(ValueError, match="safetensors"):
        weights_hash(tmp_path)


def test_the_task_is_built_in() -> None:
    assert load_task("hf-lm", "") is HfLM


@pytest.mark.parametrize(
    ("task", "model", "parts"),
    [
        ("hf-lm", {}, ["base = ''", "hf-lm begins from a base"]),
        ("byte-lm", {"base": "a"}, ["base = 'a'", "byte-lm"]),
        ("hf-lm", {"base": "a", "layers": 3}, ["layers = 3", "beside base = 'a'", "leave it out"]),
        ("hf-lm", {"base": "a", "lora_alpha": 8}, ["lora_alpha = 8", "lora_rank = 0"]),
        ("byte-lm", {"lora_rank": 8}, ["lora_rank = 8", "base = ''"]),
        ("hf-lm", {"base": "a", "base_sha256": "b"}, ["base_sha256 = 'b'", "filled in"]),
    ],
)
def test_keys_of_the_model_that_mean_nothing_are_refused(task: str, model: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        parse_runspec({"run": {"name": "t"}, "task": {"name": task}, "model": model}, source="t.toml")
    assert all(part in str(caught.value) for part in ["t.toml [model]", *parts])


def test_tokens_that_the_base_does_not_have_are_refused(folder: Path, texts: dict[str, Any]) -> None:
    spec = spec_of(folder).updated(data={"vocabulary": 257})
    with pytest.raises(TaskError, match="vocabulary = 257 is more than the 256 tokens"):
        HfLM.skeleton(spec, Assignment("run", "alice", base=str(folder)))


def test_it_writes_on(folder: Path, texts: dict[str, Any]) -> None:
    _, task = task_of(folder, texts, lora_rank=2)
    assert len(task.sample(b"the", length=5, temperature=0.0, seed=1)) == 5
    assert np.isfinite(task.evaluate(thorough=False, seed=1))


def test_each_token_is_read_once_as_far_as_the_base_reads(folder: Path, texts: dict[str, Any]) -> None:
    _, task = task_of(folder, texts, lora_rank=2)
    model, read = task.model, list[int]()
    model.model.register_forward_pre_hook(
        lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    prompt, limit = torch.arange(40, 50), model.limit
    written = model.continue_text(prompt, length=limit, temperature=0.0, generator=torch.Generator())
    assert read == [10, *[1] * (limit - 10), *[model.context] * 9]
    text = torch.cat([prompt, written])
    with torch.no_grad():
        by_itself = model(text[None, :limit])[0, 9:].argmax(-1)
    assert torch.equal(text[10 : limit + 1], by_itself)
    read.clear()
    model.continue_text(torch.arange(40, 90), length=3, temperature=0.0, generator=torch.Generator())
    assert read == [model.context, 1, 1], "a long prompt takes no more memory than a window of training"


@pytest.mark.parametrize("rank", [0, 4])
def test_a_base_is_weighed_without_its_weights(folder: Path, texts: dict[str, Any], rank: int) -> None:
    spec, task = task_of(folder, texts, lora_rank=rank)
    weight = weigh(HfLM, spec, Assignment("run", "alice", base=str(folder)))
    assert weight is not None
    trained = [parameter.requires_grad * parameter.numel() for parameter in task.model.parameters()]
    assert weight.parameters == sum(trained)
    assert weight.frozen == sum(4 * p.numel() for p in task.model.parameters() if not p.requires_grad)
    assert weight.step > 0


@pytest.mark.parametrize("rank", [0, 2])
def test_layers_that_are_computed_anew_give_the_same_gradients_and_keep_less(
    folder: Path, texts: dict[str, Any], rank: int
) -> None:
    found, kept = [], []
    for anew in (False, True):
        _, task = task_of(folder, texts, lora_rank=rank)
        if anew:
            task.model.checkpointing = True
        assert task.model.checkpointing is anew
        sizes = [0]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t):
            loss = task.loss(task.draw(8, torch.Generator().manual_seed(1)))
        loss.backward()
        found.append([parameter.grad for parameter in task.model.parameters() if parameter.requires_grad])
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2
    assert all(torch.allclose(*pair, atol=1e-7) for pair in zip(*found, strict=True))
