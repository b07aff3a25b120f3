"""Language models of `transformers` take part as any policy does: tiny ones with random weights, made here."""

from __future__ import annotations

import copy
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sentweights import as_sent
from tinymodels import WORDS, folder_of

from swarmnode.training.rl.groups import RolloutGroup, as_text, score
from swarmnode.training.rl.grpo import Split
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build, parameter_hash
from swarmnode.training.rl.proofs import RolloutAudit
from swarmnode.training.rl.sampling import Sampling, read, sample
from swarmnode.training.rl.section import hf_model
from swarmnode.training.rl.tasks import TaskRef, well_formed
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.rl.vocabulary import BYTES, DIGITS, known, translate
from swarmnode.training.runspec import load_runspec, parse_runspec
from swarmnode.training.tasks import Assignment, TaskError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("tokenizers", reason="the extra hf is not installed")

from swarmnode.training.rl.hf import HFPolicy, load  # noqa: E402

TEMPLATE = "{% for m in messages %}#{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
HOW = Sampling(max_tokens=6)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp(request.param))


def learner(policy: torch.nn.Module, name: str = "hf") -> Learner:
    settings = Settings(split=Split(2, 2), sampling=HOW, correction="taper")
    return Learner(name, policy, settings, seed=1)


@pytest.mark.parametrize("lora", [True, False])
def test_a_cache_changes_no_logit(folder: Path, lora: bool) -> None:
    policy = load(str(folder), seed=1, lora=lora)
    tokens = torch.randint(policy.vocabulary.size, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in policy.parameters():  # adapters that do something
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        whole = policy(tokens)  # (3, 9, V)
        logits, state = policy.begin(tokens[:, :4])
        torch.testing.assert_close(logits, whole[:, 3], atol=1e-5, rtol=1e-4)
        state = state.repeat(2).kept(torch.tensor([0, 2, 4]))
        for place in range(4, 9):
            logits, state = policy.step(tokens[:, place], state)
            torch.testing.assert_close(logits, whole[:, place], atol=1e-5, rtol=1e-4)


def test_lora_begins_as_the_model_is_and_trains_nothing_of_it(folder: Path) -> None:
    policy, whole = load(str(folder), seed=1), load(str(folder), seed=1, lora=False)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad():
        torch.testing.assert_close(policy(tokens), whole(tokens))
    frozen = {name: value.clone() for name, value in policy.state_dict().items() if "lora_" not in name}
    learner(policy).warm_up(well_formed, steps=2, batch=8)
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in frozen.items())
    assert not torch.allclose(policy(tokens), whole(tokens))
    numbers = [sum(parameter.numel() for parameter in each.parameters()) for each in (policy, whole)]
    assert all(".lora_" in name for name, _ in policy.named_parameters())
    assert numbers[0] != numbers[1]


def test_a_copy_has_adapters_of_its_own_on_the_same_model(folder: Path) -> None:
    policy = load(str(folder), seed=1)
    other = copy.deepcopy(policy)
    assert isinstance(other, HFPolicy)
    frozen = {id(each) for each in policy.model.parameters() if not each.requires_grad}
    assert frozen and frozen == {id(each) for each in other.model.parameters() if not each.requires_grad}
    before = parameter_hash(policy)
    assert parameter_hash(other) == before
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1
    assert parameter_hash(policy) == before != parameter_hash(other)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert not torch.allclose(policy(tokens), other(tokens))


def test_log_probabilities_are_those_of_a_prefill(folder: Path) -> None:
    node = learner(load(str(folder), seed=1))
    own = node.sample()
    for scored, reading in zip(own, read(node.policy, own, HOW), strict=True):
        assert scored.group.logprobs is not None
        for claimed, seen in zip(scored.group.logprobs, reading, strict=True):
            assert seen is not None
            np.testing.assert_allclose(claimed, seen.logprobs, atol=1e-4)


@pytest.mark.parametrize("lora", [True, False])
def test_a_policy_that_seldom_ended_learns_to_end_its_answers(folder: Path, lora: bool) -> None:
    node = learner(load(str(folder), seed=1, lora=lora))

    def ended() -> float:
        prompts = [node.policy.vocabulary.prompt("a304=")]
        answers = sample(node.policy, prompts, replace(HOW, copies=200), [1])
        return float(np.mean([answer.tokens[-1] == node.policy.vocabulary.end for answer in answers]))

    before = ended()
    node.warm_up(well_formed, steps=160, batch=32)
    after = ended()
    assert before < 0.4 and after > 0.7


def test_policies_of_other_tokenizers_learn_from_its_text_and_it_from_theirs(folder: Path) -> None:
    reader = Learner("gpt", build(PolicySpec(), seed=1), Settings(split=Split(2, 2)), seed=2)
    writer = learner(load(str(folder), seed=1))
    for node in (reader, writer):
        node.warm_up(well_formed, steps=60, batch=32)
    own = [scored for _ in range(20) for scored in writer.sample()]
    sent = [as_text(scored.group, scored.vocabulary) for scored in own]
    for scored, group in zip(own, sent, strict=True):
        assert group.vocabulary == f"bytes/{writer.policy.vocabulary.id}" and group.logprobs is None
        there = score("hf", group)  # as a node without transformers does
        assert there.vocabulary is BYTES and there.texts == scored.texts
        np.testing.assert_array_equal(there.rewards, scored.rewards)
    assert reader.learn(reader.sample(), [("hf", group) for group in sent]).taken == 1
    theirs = [scored.group for _ in range(20) for scored in reader.sample()]
    assert writer.learn(writer.sample(), [("gpt", group) for group in theirs]).taken == 1


def test_a_text_goes_through_a_tokenizer_and_back(folder: Path) -> None:
    vocabulary = load(str(folder), seed=1).vocabulary
    assert known(vocabulary.id) is vocabulary
    ids = translate([*DIGITS.encode("3:40"), DIGITS.end], DIGITS, vocabulary)
    assert len(ids) == 4 and ids[-1] == vocabulary.end  # 40 is one token
    assert vocabulary.decode(ids) == "3:40"
    assert all(isinstance(vocabulary.decode([each]), str) for each in range(vocabulary.size))


def test_a_chat_template_is_used_where_there_is_one_and_makes_another_tokenizer(tmp_path: Path) -> None:
    plain = load(str(folder_of("gpt2", tmp_path / "plain")), seed=1).vocabulary
    chat = load(str(folder_of("gpt2", tmp_path / "chat", template=TEMPLATE)), seed=1).vocabulary
    other = load(str(folder_of("gpt2", tmp_path / "other", words=WORDS[::-1])), seed=1).vocabulary
    assert plain.decode(plain.prompt("a304=")) == "a304="
    assert chat.decode(chat.prompt("a304=")) == "#a304=!"
    assert len({plain.id, chat.id, other.id}) == 3


@pytest.mark.parametrize(("how", "told"), [("%d %b %Y", "26 Jul 2024"), ("%Y-%m-%d", "2024-07-26"), ("%B", "July")])
def test_a_template_that_tells_the_date_tells_everybody_the_same(tmp_path: Path, how: str, told: str) -> None:
    folder = folder_of(
        "gpt2", tmp_path / "chat", template="  {% if 1 %}\n" + f"{{{{ strftime_now('{how}') }}}}" + "\n{% endif %}\n;"
    )
    vocabulary = load(str(folder), seed=1).vocabulary
    seen: list[str] = []
    vocabulary.encode = lambda text: seen.append(text) or []  # type: ignore[method-assign, func-returns-value]
    vocabulary.prompt("a304=")
    assert seen == [f"{told}\n;"]


def test_a_node_trains_one_that_its_owner_names(folder: Path) -> None:
    spec = parse_runspec(
        {"run": {"name": "r"}, "task": {"name": "digits-rl"}, "rollouts": {"warm_up": 2, "batch": 4, "external": 2}},
        source="test",
    )
    task = Trainee(spec, Assignment("r" * 64, "me", policy=f"hf:{folder}"))
    groups = task.rollouts(version=0)["groups"]
    assert groups and all(sent["vocabulary"].startswith("bytes/hf-") for sent in groups)
    assert task.learn([("other", sent) for sent in groups])["own"] == len(groups)
    assert isinstance(task.sample(b"a304=", length=8, temperature=1.0, seed=1), bytes)


def test_the_model_of_the_example_is_made_trained_and_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Path(__file__).parents[3] / "examples"
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(examples / "tiny_llama.py"))["make"](tmp_path / "build" / "tiny-llama")
    spec = load_runspec(examples / "hf.toml").updated(rollouts={"warm_up": 20})
    one, other = (Trainee(spec, Assignment("", name)) for name in "ab")
    assert isinstance(one.model, HFPolicy) and sum(each.numel() for each in one.model.parameters()) < 5_000_000
    shared = [("b", group) for group in other.rollouts(version=0)["groups"]]
    assert shared[0][1]["vocabulary"].startswith("bytes/hf-"), "as text, which others read in their own tokens"
    asked = one.rollouts(version=0)
    before = parameter_hash(one.model)
    right = RolloutGroup(
        TaskRef("digits/swap", 5, 7), tuple((*BYTES.encode(t), BYTES.end) for t in ("40", "04")), 0, "", BYTES.id
    )
    learned = one.learn([*shared, ("b", right.to_map())])
    assert asked["groups"] and learned["own"] == 8 and learned["tokens"] <= 8 * 8 * 6
    assert learned["taken"] and parameter_hash(one.model) != before


def test_what_cannot_be_had_is_said_without_a_download() -> None:
    with pytest.raises(TaskError, match="--policy"):
        load("nobody/no-such-model", seed=1)


@pytest.mark.parametrize("policy", ["hf:a/b", "hf-full:/models/a", "gpt:2x48", "hf:", "hf:a b"])
def test_names_of_models(policy: str) -> None:
    assert hf_model(policy) == {"hf:a/b": ("hf", "a/b"), "hf-full:/models/a": ("hf-full", "/models/a")}.get(policy)


def test_who_samples_with_a_language_models_adapters_passes_its_audit_and_with_others_does_not(folder: Path) -> None:
    policy, settings = load(str(folder), seed=1), Settings(sampling=HOW)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    as_sent(policy)
    audit = RolloutAudit(policy, share=1.0, seed=1, how=HOW)
    audit.remember("these")
    tasks = [TaskRef("digits/swap", 5, seed) for seed in range(6)]
    honest, liar = (
        [score(who, group) for group in Learner(who, copy.deepcopy(by), settings, seed=2).answer(tasks, policy="these")]
        for who, by in (("h", policy), ("l", other))
    )
    verdict = audit.check([*honest, *liar])
    assert {scored.author for scored in verdict.passed} == {"h"} and set(verdict.caught) == {"l"}
