"""What writes the answers of an `hf` policy: which engine is taken, when it is given up, and which weights it has.

Without vLLM: in its place stands an engine of torch with a model of its own, which knows nothing but what it is given.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentweights import as_sent
from tinymodels import folder_of

from swarmnode.training.rl import engine
from swarmnode.training.rl.engine import Drawing, Engine, Unusable, VLLMSampler
from swarmnode.training.rl.groups import score
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.proofs import RolloutAudit
from swarmnode.training.rl.sampling import Completion, Sampling, read_tokens, sample
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.tasks import Assignment, TaskError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from swarmnode.training.rl.hf import HFPolicy, load  # noqa: E402

HOW = Sampling(max_tokens=6)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("llama", tmp_path_factory.mktemp("one"))


class TorchEngine:
    """What of `vllm.LLM` is used, over a model of `transformers` whose weights come by `reload_weights` alone."""

    def __init__(self, policy: HFPolicy, drawings: Mapping[int, Drawing]) -> None:
        self.drawings = drawings
        self.model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(policy.model.config)).eval()
        self.given = 0

    def collective_rpc(self, method: str, kwargs: dict[str, Iterable[tuple[str, torch.Tensor]]]) -> None:
        assert method == "reload_weights"
        given = {name: tensor.clone() for name, tensor in kwargs["weights_iterator"]}
        unknown = self.model.load_state_dict(given, strict=False)
        assert not unknown.unexpected_keys and set(unknown.missing_keys) <= set(self.model.all_tied_weights_keys)
        self.given += 1

    def apply_model(self, change: Callable[[torch.nn.Module], None]) -> None:
        """It packs nothing."""

    def reset_prefix_cache(self) -> bool:
        return True

    @torch.no_grad()
    def generate(self, prompts: Sequence[dict[str, list[int]]], asked: Sequence[Any], use_tqdm: bool) -> list[Any]:
        return [self._one(prompt["prompt_token_ids"], of) for prompt, of in zip(prompts, asked, strict=True)]

    def _one(self, prompt: list[int], asked: Any) -> Any:
        assert asked.temperature == 0
        drawing = self.drawings[asked.extra_args[engine.DRAWN_BY]]
        tokens: list[int] = []
        while len(tokens) < asked.max_tokens and not set(tokens) & set(asked.stop_token_ids):
            logits = drawing(tokens, self.model(torch.tensor([prompt + tokens])).logits[0, -1])
            tokens.append(int(logits.argmax()))
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TorchEngine]:
    """The engines that were started in the place of vLLM's."""
    engines: list[TorchEngine] = []

    def start(policy: HFPolicy, drawings: Mapping[int, Drawing]) -> TorchEngine:
        engines.append(TorchEngine(policy, drawings))
        return engines[-1]

    monkeypatch.setattr(engine, "_started", start)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return engines


Stands = Callable[..., None]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Stands:
    """Have this stand where the sampler by vLLM does, on a machine where vLLM is `installed`."""

    def stands(start: Any, *, installed: bool = True) -> None:
        monkeypatch.setattr(engine, "VLLMSampler", start)
        monkeypatch.setattr(engine, "find_spec", lambda name: name if installed else None)

    return stands


def moved(policy: torch.nn.Module, seed: int) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def written(by: Any, policy: HFPolicy, *, how: Sampling = HOW, seed: int = 1) -> list[Completion]:
    prompts = [policy.vocabulary.prompt(question) for question in ("a304=", "b1=", "c22=")]
    answers: list[Completion] = by(policy, prompts, replace(how, copies=4), [seed, seed + 10, seed + 20])
    return answers


@pytest.mark.parametrize("lora", [True, False])
def test_it_writes_with_the_weights_that_the_policy_has_now(
    folder: Path, lora: bool, started: list[TorchEngine]
) -> None:
    policy = load(str(folder), seed=1, lora=lora)
    sampler = VLLMSampler(policy)
    for seed in range(3):
        moved(policy, seed)
        answers = written(sampler, policy)  # raises Unusable where the log-probabilities are others
        questions = [policy.vocabulary.prompt(question) for question in ("a304=", "b1=", "c22=") for _ in range(4)]
        readings = read_tokens(policy, questions, [answer.tokens for answer in answers])
        for answer, reading in zip(answers, readings, strict=True):
            np.testing.assert_allclose(answer.logprobs, reading.logprobs, atol=1e-4)
        same = [answer.tokens for answer in written(sample, policy)]
        assert [answer.tokens for answer in answers] == same, "the same seeds draw the same tokens in torch"


def test_weights_are_given_when_they_have_changed_and_only_then(folder: Path, started: list[TorchEngine]) -> None:
    policy = load(str(folder), seed=1)
    sampler = VLLMSampler(policy)
    first = started[0].given
    written(sampler, policy)
    written(sampler, policy, seed=2)
    assert started[0].given == first
    moved(policy, 1)
    written(sampler, policy)
    assert started[0].given == first + 1
    with torch.no_grad():  # as the daemon writes into the shared memory, of which torch hears nothing
        next(policy.parameters()).numpy()[:] = 0.25
    written(sampler, policy)
    assert started[0].given == first + 2


def test_an_engine_that_keeps_old_weights_is_found_out(folder: Path, started: list[TorchEngine]) -> None:
    policy = load(str(folder), seed=1)
    sampler = VLLMSampler(policy)
    started[0].collective_rpc = lambda *_, **__: None  # type: ignore[method-assign]
    moved(policy, 1)
    with pytest.raises(Unusable, match="other log-probabilities"):
        written(sampler, policy)


def test_an_engine_that_took_half_of_the_weights_is_given_all_of_them_again(
    llama: Path, started: list[TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(str(llama), seed=1)
    sampler, before = VLLMSampler(policy), copy.deepcopy(policy)

    def broken(method: str, kwargs: dict[str, Any]) -> None:
        next(iter(kwargs["weights_iterator"]))
        with torch.no_grad():
            next(started[0].model.parameters()).zero_()
        raise RuntimeError("no memory")

    monkeypatch.setattr(started[0], "collective_rpc", broken)
    moved(policy, 1)
    with pytest.raises(Unusable, match="no memory"):
        written(sampler, policy)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    written(sampler, before)  # weights that it held before it was broken


@pytest.mark.parametrize("how", [HOW, Sampling(6, top_k=3), Sampling(6, temperature=0.5), Sampling(6, temperature=0)])
def test_answers_end_with_the_end_token_or_at_the_bound_and_repeat_from_their_seed(
    llama: Path, how: Sampling, started: list[TorchEngine]
) -> None:
    policy = load(str(llama), seed=1)
    sampler = VLLMSampler(policy)
    answers = written(sampler, policy, how=how)
    assert len(answers) == 12
    for answer in answers:
        assert policy.vocabulary.end not in answer.tokens[:-1] and len(answer.logprobs) == len(answer.tokens)
        assert answer.tokens[-1] == policy.vocabulary.end or len(answer.tokens) == how.max_tokens
    assert written(sampler, policy, how=how) == answers
    if how.temperature:
        assert written(sampler, policy, how=how, seed=2) != answers


def test_a_prompt_that_does_not_fit_is_refused_as_the_sampler_in_torch_does(
    llama: Path, started: list[TorchEngine], vllm: Stands
) -> None:
    policy = load(str(llama), seed=1)
    vllm(VLLMSampler)
    sampler = Engine(policy, "vllm")
    for by in (sampler, sample):
        with pytest.raises(ValueError, match="context of 64"):
            by(policy, [[0] * 60], HOW, [1])
    assert sampler.status.by == "vllm"


def test_what_it_samples_passes_an_audit(folder: Path, started: list[TorchEngine]) -> None:
    policy = load(str(folder), seed=1)
    moved(policy, 1)
    as_sent(policy)
    audit = RolloutAudit(policy, share=1.0, seed=1, how=HOW)
    audit.remember("these")
    node = Learner("h", policy, Settings(sampling=HOW), seed=2, sampler=VLLMSampler(policy))
    groups = node.answer([TaskRef("digits/swap", 5, seed) for seed in range(6)], policy="these")
    verdict = audit.check([score("h", group) for group in groups])
    assert len(verdict.passed) == 6 and not verdict.caught


# --- which one is taken -----------------------------------------------------------------------------------------------


def fails(policy: HFPolicy) -> Any:
    raise Unusable("vLLM does not start: no such instruction")


def never(policy: HFPolicy) -> Any:
    raise AssertionError("vLLM was started")


def test_auto_takes_vllm_where_it_is_installed(llama: Path, started: list[TorchEngine], vllm: Stands) -> None:
    policy = load(str(llama), seed=1)
    vllm(VLLMSampler)
    taken = Engine(policy, "auto")
    assert taken.status == engine.EngineStatus("vllm") and len(written(taken, policy)) == 12 and len(started) == 1


def test_auto_says_nothing_where_vllm_is_not_installed_or_torch_is_asked_for(llama: Path, vllm: Stands) -> None:
    policy = load(str(llama), seed=1)
    for wanted, installed in (("auto", False), ("torch", True)):
        vllm(never, installed=installed)
        taken = Engine(policy, wanted)
        assert taken.status == engine.EngineStatus("torch")
        assert written(taken, policy) == written(sample, policy)


def test_small_policies_never_need_vllm(vllm: Stands) -> None:
    vllm(never)
    assert Engine(build(PolicySpec(), seed=1), "auto").status.by == "torch"


def test_auto_goes_on_in_torch_where_vllm_does_not_start_and_says_so_once(llama: Path, vllm: Stands) -> None:
    policy = load(str(llama), seed=1)
    vllm(fails)
    taken = Engine(policy, "auto")
    assert taken.status.by == "torch"
    assert "no such instruction" in taken.status.why and 'sampling = "torch"' in taken.status.why
    told = taken.status
    assert written(taken, policy) == written(sample, policy) and taken.status is told


def test_auto_goes_on_in_torch_where_vllm_fails_later(llama: Path, started: list[TorchEngine], vllm: Stands) -> None:
    policy = load(str(llama), seed=1)
    vllm(VLLMSampler)
    taken = Engine(policy, "auto")
    started[0].collective_rpc = lambda *_, **__: None  # type: ignore[method-assign]
    moved(policy, 1)
    assert len(written(taken, policy)) == 12
    assert taken.status.by == "torch" and "other log-probabilities" in taken.status.why


@pytest.mark.parametrize(("start", "installed"), [(fails, True), (never, False)])
def test_who_asks_for_vllm_gets_it_or_an_error(llama: Path, start: Any, installed: bool, vllm: Stands) -> None:
    vllm(start, installed=installed)
    with pytest.raises(TaskError, match="vLLM"):
        Engine(load(str(llama), seed=1), "vllm")
    vllm(never)
    with pytest.raises(TaskError, match="hf:"):
        Engine(build(PolicySpec(), seed=1), "vllm")


def test_who_asks_for_vllm_gets_an_error_where_it_fails_later(
    llama: Path, started: list[TorchEngine], vllm: Stands
) -> None:
    policy = load(str(llama), seed=1)
    vllm(VLLMSampler)
    taken = Engine(policy, "vllm")
    started[0].collective_rpc = lambda *_, **__: None  # type: ignore[method-assign]
    moved(policy, 1)
    with pytest.raises(TaskError, match="other log-probabilities"):
        written(taken, policy)


def test_a_task_writes_its_rollouts_with_the_engine_that_its_owner_names(
    llama: Path, started: list[TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: name)
    tables = {"run": {"name": "r"}, "task": {"name": "digits-rl"}}
    spec = parse_runspec({**tables, "rollouts": {"warm_up": 1, "batch": 4, "external": 2}}, source="test")
    for wanted, count in (("torch", 0), ("vllm", 1)):
        task = Trainee(spec, Assignment("r" * 64, "me", policy=f"hf:{llama}", sampling=wanted))
        assert task.rollouts(version=0)["groups"] and task.engine.status.by == wanted and len(started) == count
