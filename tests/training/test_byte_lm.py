"""The task byte-lm: equal starts everywhere, comparable losses, and custom tasks from local files only."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from learned.words import next_word_accuracy

from swarmnode.testing.runtext import RunText
from swarmnode.training import tokens
from swarmnode.training.byte_lm import ByteLM, Spelling, divided, loss_on
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment, TaskError, load_task
from swarmnode.training.tokens import CorpusError


def _spec(seed: int = 0, context: int = 16) -> RunSpec:
    model = {"layers": 1, "heads": 2, "width": 32, "context": context}
    return parse_runspec(
        {"run": {"name": "t", "seed": seed}, "model": model, "inner": {"batch": 8, "warmup": 0, "lr": 1e-2}},
        source="test",
    )


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Words in random order: something to learn, and nothing twice."""
    chance = random.Random(5)
    words = [b"alpha", b"beta", b"gamma", b"delta"]
    path = tmp_path / "words.txt"
    path.write_bytes(b" ".join(chance.choices(words, k=80_000)))
    return str(path)


def _task(corpus: str, peer_id: str = "alice", seed: int = 0) -> ByteLM:
    text = RunText(_spec(seed), Path(corpus).parent, corpus)
    return ByteLM(text.spec, Assignment("run", peer_id, **text.files(peer_id)))


def test_all_nodes_start_from_the_same_bits(corpus: str) -> None:
    alice, bob = _task(corpus, "alice").model.state_dict(), _task(corpus, "bob").model.state_dict()
    assert all(torch.equal(alice[name], bob[name]) for name in alice)
    other = _task(corpus, seed=1).model.state_dict()
    assert not torch.equal(alice["tokens.weight"], other["tokens.weight"])


def test_all_nodes_measure_the_same_but_train_on_their_own(corpus: str) -> None:
    alice, bob = _task(corpus, "alice"), _task(corpus, "bob")
    for thorough in (False, True):
        assert alice.evaluate(thorough=thorough) == bob.evaluate(thorough=thorough)
    assert alice.evaluate(thorough=True) == pytest.approx(8.0, abs=0.2)  # log2 256 bits: it knows nothing yet
    draws = [task.draw(4, torch.Generator().manual_seed(1)) for task in (alice, bob)]
    assert draws[0].shape == draws[1].shape == (4, 17)
    assert not torch.equal(draws[0], draws[1])


def test_windows_are_pieces_of_the_text(corpus: str) -> None:
    text = Path(corpus).read_bytes()
    windows = [bytes(window.tolist()) for window in _task(corpus).draw(50, torch.Generator().manual_seed(2))]
    assert sum(window in text for window in windows) >= 45  # a few lie across two chunks of the slice


def test_training_lowers_the_heldout_loss_and_repeats_bit_for_bit(corpus: str) -> None:
    def trained() -> tuple[ByteLM, torch.Tensor]:
        task = _task(corpus)
        vector = torch.zeros(layout_of(task.model).parameters)
        loop = InnerLoop(_spec(), task, peer_id="alice", vector=vector, keep=False)
        loop.train(round=0, steps=60, seconds=60, between=lambda: False)
        return task, vector

    (task, vector), (_, again) = trained(), trained()
    assert torch.equal(vector, again)
    assert task.evaluate(thorough=True) < 2.5 and task.accuracy > 0.5
    assert task.sample(b"alp", length=3, temperature=0, seed=0) == b"ha "
    once = task.sample(b"", length=20, temperature=1.0, seed=3)
    assert len(once) == 20
    assert once == task.sample(b"", length=20, temperature=1.0, seed=3)
    assert once != task.sample(b"", length=20, temperature=1.0, seed=4)


def test_loss_is_in_bits_per_byte(corpus: str) -> None:
    task = _task(corpus)
    batch = task.draw(4, torch.Generator().manual_seed(1))
    assert task.loss(batch).item() == pytest.approx(task.model.loss(batch).item() / math.log(2))


def _from_shards(
    folder: Path, texts: list[bytes], *, heldout: bytes = b"held out " * 9, given: slice = slice(None)
) -> ByteLM:
    names = []
    for number, text in enumerate([heldout, *texts]):
        names.append(str(folder / f"{number}.shard"))
        (folder / f"{number}.shard").write_bytes(text)
    spec = _spec().resolved(heldout_sha256=hashlib.sha256(heldout).hexdigest(), index="")
    return ByteLM(spec, Assignment("run", "alice", names[0], tuple(names[1:][given])))


def test_shards_are_trained_on_as_far_as_they_are_here(tmp_path: Path) -> None:
    task = _from_shards(tmp_path, [b"a" * 50, b"b" * 50])
    assert set(task.draw(200, torch.Generator().manual_seed(1)).unique().tolist()) == {ord("a"), ord("b")}
    (tmp_path / "more").write_bytes(b"c" * 50)
    task.feed([str(tmp_path / "more")])
    assert set(task.draw(200, torch.Generator().manual_seed(1)).unique().tolist()) == {*b"abc"}
    (tmp_path / "more").write_bytes(b"c")
    with pytest.raises(CorpusError, match="shorter than it was"):
        task.draw(200, torch.Generator().manual_seed(1))
    with pytest.raises(CorpusError, match="cannot be read"):
        task.feed([str(tmp_path / "none")])


def test_text_is_the_same_in_whichever_order_shards_came(tmp_path: Path) -> None:
    shards = [b"a" * 50, b"b" * 60, b"c" * 70]
    at_once = _from_shards(tmp_path, shards)
    names = [str(tmp_path / f"{number}.shard") for number in (1, 2, 3)]
    one_by_one = _from_shards(tmp_path, shards, given=slice(1, 2))
    one_by_one.feed([names[0]])
    one_by_one.feed([names[2]])
    drawn = [task.draw(50, torch.Generator().manual_seed(1)) for task in (at_once, one_by_one)]
    assert torch.equal(*drawn)


def test_pieces_of_a_text_are_read_as_the_text_itself(tmp_path: Path) -> None:
    text = random.Random(3).randbytes(1000)
    task = _from_shards(tmp_path, [text[:400], text[400:417], text[417:]])
    drawn, draw = task.draw(20, torch.Generator().manual_seed(1)), torch.Generator()
    places = task.places(20, draw.manual_seed(1), 1000)
    assert [bytes(window.tolist()) for window in drawn] == [text[start:stop] for start, stop in places]
    with task.on(1000, [(start, text[start:stop]) for start, stop in places]):
        assert torch.equal(task.draw(20, draw.manual_seed(1)), drawn)
    with task.on(1 << 50, [(5, text[:300])]):  # however long: what is not known takes no memory
        assert task.draw(20, draw.manual_seed(1)).sum() == 0
    assert torch.equal(task.draw(20, draw.manual_seed(1)), drawn)


def test_judges_draw_from_the_gate_and_people_read_the_loss_on_the_report(tmp_path: Path) -> None:
    for size in range(1, 9):
        assert np.concatenate(divided(np.arange(size))).tolist() == [*range(size)]
    gate, report = b"g" * 120, b"r" * 40
    task = _from_shards(tmp_path, [b"a" * 50], heldout=gate + report)
    assert {value for seed in range(50) for value in task.heldout(seed).unique().tolist()} == {ord("g")}
    for seed, thorough in ((None, False), (None, True), (1, False)):
        part = gate if seed is not None else report
        expected = loss_on(part, _spec(), parameters_to_vector(task.model.parameters()).detach().numpy())
        assert task.evaluate(thorough=thorough, seed=seed) == pytest.approx(expected, rel=1e-5)


def test_loss_on_a_whole_text_is_that_of_its_windows_side_by_side(corpus: str) -> None:
    task, spec = _task(corpus), _spec()
    vector = parameters_to_vector(task.model.parameters()).detach()
    text = Path(corpus).read_bytes()[: 70 * 17 + 5]
    windows = torch.tensor(list(text[: 70 * 17])).view(70, 17)
    with torch.no_grad():
        assert loss_on(text, spec, vector.numpy()) == pytest.approx(float(task.loss(windows)), rel=1e-5)
    with pytest.raises(CorpusError, match="less than a window of 17"):
        loss_on(text[:16], spec, vector.numpy())
    with pytest.raises(ValueError, match="not those of the run's model"):
        loss_on(text, spec, vector.numpy()[1:])


def test_held_out_text_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    task = _from_shards(tmp_path, [b"a" * 50])
    assert task.evaluate(thorough=False) > 0
    (tmp_path / "0.shard").write_bytes(b"another " * 9)
    spec = _spec().resolved(heldout_sha256=hashlib.sha256(b"held out " * 9).hexdigest(), index="")
    with pytest.raises(CorpusError, match="remove it"):
        ByteLM(spec, Assignment("run", "alice", str(tmp_path / "0.shard"), (str(tmp_path / "1.shard"),)))


def test_context_longer_than_the_text_is_explained(corpus: str) -> None:
    with pytest.raises(CorpusError, match="context"):
        text = RunText(_spec(context=16384), Path(corpus).parent, corpus)
        ByteLM(text.spec, Assignment("run", "alice", **text.files("alice")))


def test_custom_task_comes_from_a_local_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    tokens_per_sample = 7\n")
    assert load_task("anything", f"{file}:Mine").tokens_per_sample == 7
    assert load_task("byte-lm", "") is ByteLM


@pytest.mark.parametrize(
    ("local", "says"),
    [
        ("mine.py", "file.py:Class"),
        ("nowhere.py:Mine", "not a Python file"),
        ("MINE:Other", "no class Other"),
        ("", "--task"),
    ],
)
def test_missing_custom_task_is_explained(tmp_path: Path, local: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    pass\n")
    with pytest.raises(TaskError, match=says):
        load_task("my-task", local.replace("MINE", str(file)))


# -- tokens that a tokenizer made


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return tokens.train([b"the cat and the dog and the bird sat, sat, sat"] * 9, vocabulary=300)


def _on_tokens(folder: Path, tokenizer: bytes, **data: int) -> ByteLM:
    """One on two shards of text in tokens, cut in the middle of it."""
    spec = parse_runspec(
        {
            "run": {"name": "t"},
            "task": {"name": "gpt"},
            "data": {"vocabulary": 300, **data},
            "model": {"layers": 1, "heads": 2, "width": 32, "context": 8},
            "inner": {"batch": 8, "warmup": 0, "lr": 2e-2},
        },
        source="test",
    )
    encoder, text = tokens.Encoder(tokenizer, 300), b"the cat and the dog sat and the bird sat, and " * 40
    items = encoder.encode([text])[0].astype(tokens.dtype_of(spec.data.vocabulary))
    files = [items[:301].tobytes(), items[301:].tobytes(), items[:200].tobytes(), tokenizer]
    names = [str(folder / f"{number}.shard") for number in range(len(files))]
    for name, content in zip(names, files, strict=True):
        Path(name).write_bytes(content)
    spec = spec.resolved(heldout_sha256=hashlib.sha256(files[2]).hexdigest(), index="")
    return ByteLM(spec, Assignment("run", "alice", names[2], tuple(names[:2]), names[3]))


def _train(task: ByteLM, steps: int) -> None:
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(task.draw(8, torch.Generator().manual_seed(step))).backward()
        optimizer.step()


@pytest.mark.parametrize(("vocabulary", "item"), [(300, 2), (70_000, 4)])
def test_places_in_tokens_are_bytes_of_shards(tmp_path: Path, tokenizer: bytes, vocabulary: int, item: int) -> None:
    task, draw = _on_tokens(tmp_path, tokenizer, vocabulary=vocabulary), torch.Generator()
    text = b"".join((tmp_path / f"{number}.shard").read_bytes() for number in (0, 1))
    drawn = task.draw(400, draw.manual_seed(1))
    places = task.places(400, draw.manual_seed(1), len(text))
    assert all(start % item == 0 and stop - start == 9 * item for start, stop in places)
    assert [window.astype(f"<u{item}").tobytes() for window in drawn.numpy()] == [text[a:b] for a, b in places]
    assert any(start < 301 * item < stop for start, stop in places)  # a window of two shards
    with task.on(len(text), [(start, text[start:stop]) for start, stop in places]):
        assert torch.equal(task.draw(400, draw.manual_seed(1)), drawn)


def test_loss_in_tokens_is_in_bits_per_byte_that_they_stand_for(tmp_path: Path, tokenizer: bytes) -> None:
    task = _on_tokens(tmp_path, tokenizer)
    heldout = np.fromfile(tmp_path / "2.shard", "<u2")
    sizes = np.array([len(spelling) for spelling in tokens.spellings(tokenizer, 300)])
    assert task.bytes_per_token == pytest.approx(float(sizes[heldout].mean())) and task.bytes_per_token > 2
    batch = task.heldout(1)
    assert task.loss(batch).item() == pytest.approx(task.model.loss(batch).item() / math.log(2) / task.bytes_per_token)
    report = heldout[150:]  # of which a thorough evaluation has windows at even distances
    windows = torch.tensor(report[np.linspace(0, 50 - 9, 256).astype(int)[:, None] + np.arange(9)].astype(np.int64))
    bits = task.model.loss(windows).item() / math.log(2) * windows[:, 1:].numel()
    assert task.evaluate(thorough=True) == pytest.approx(bits / sizes[windows[:, 1:].numpy()].sum(), rel=1e-5)


def test_tokens_are_learned_and_written_as_text(tmp_path: Path, tokenizer: bytes) -> None:
    task = _on_tokens(tmp_path, tokenizer)
    before = next_word_accuracy(task, 32)
    _train(task, 60)
    assert task.sample(b"the bird sat, and the cat and the", length=8, temperature=0, seed=0).startswith(b" dog sat")
    assert len(task.sample(b"", length=8, temperature=1, seed=0)) > 0
    assert before < 0.1 < 0.8 < next_word_accuracy(task, 32)


def test_tokens_above_the_vocabulary_are_explained(tmp_path: Path, tokenizer: bytes) -> None:
    task = _on_tokens(tmp_path, tokenizer)
    with task.on(40, [(0, b"\xff" * 40)]), pytest.raises(CorpusError, match="token 65535"):
        task.draw(1, torch.Generator())
    (tmp_path / "2.shard").write_bytes(b"\xff" * 400)
    with pytest.raises(CorpusError, match="token 65535"):
        task.spelling.items((tmp_path / "2.shard").read_bytes())


def test_text_without_a_tokenizer_cannot_be_prompted() -> None:
    spelling = Spelling(parse_runspec({"run": {"name": "t"}, "data": {"vocabulary": 300}}, source="test").data, b"")
    with pytest.raises(TaskError, match="without a tokenizer"):
        spelling.prompt(b"the")


class _Knows(torch.nn.Module):
    """Expects the byte that follows in a text, wherever it has been read once, but never the letter x."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        following = torch.cat([batch[:, 1:], torch.full((len(batch), 1), 32)], dim=1)
        following[following == ord("x")] = ord("y")
        return torch.nn.functional.one_hot(following, 256).float()


def test_a_word_is_right_where_each_of_its_bytes_is_expected(tmp_path: Path) -> None:
    task = _from_shards(tmp_path, [b"a" * 50], heldout=b"aa bb cx " * 100)
    task.model = _Knows()
    assert next_word_accuracy(task) == pytest.approx(2 / 3, abs=0.05)
