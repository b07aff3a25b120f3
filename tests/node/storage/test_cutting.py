"""A corpus that becomes shards: its tokenizer, what is remembered of it, what is undone, and text of one's own."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.node.storage import cutting, datadir
from swarmnode.node.storage.cutting import (
    drop_unfinished,
    finishing,
    own_text,
    publish,
    read_index,
    release_forgotten,
)
from swarmnode.node.storage.datadir import DataDir, DataDirError, NoSpace, RunStore
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.training import dataset
from swarmnode.training.dataset import Index
from swarmnode.training.documents import Meter, Stopped
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tokens import CorpusError, decode, size_of, spellings, train

DOCUMENTS = 60
VOCABULARY = 300


def spec_of(name: str = "t", **data: Any) -> RunSpec:
    return parse_runspec({"run": {"name": name}, "data": data}, source="test")


def document(number: int) -> str:
    return f"document {number}\n" + " ".join(random.Random(number).choices(["some", "words", "of", "it"], k=200))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(DOCUMENTS):
        (folder / f"{number}.txt").write_text(document(number))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "home" / "shards", cap=1 << 30)


def pinned(store: ShardStore) -> set[bytes]:
    return {kept.shard for kept in store.kept() if kept.pinned}


def content(store: ShardStore, shard: str | bytes) -> bytes:
    return store.path(bytes.fromhex(shard) if isinstance(shard, str) else shard).read_bytes()


def index_of(spec: RunSpec, store: ShardStore) -> Index:
    return read_index(bytes.fromhex(spec.data.index), store)


def everything(spec: RunSpec, store: ShardStore) -> bytes:
    index = index_of(spec, store)
    return b"".join(content(store, entry.shard) for entry in (index.heldout, *index.shards))


def texts_in(raw: bytes, tokenizer: bytes, vocabulary: int) -> bytes:
    return decode(np.frombuffer(raw, "<u2"), spellings(tokenizer, vocabulary))


def test_a_larger_vocabulary_has_a_tokenizer_trained_that_everybody_would_train(
    tmp_path: Path, corpus: Path, store: ShardStore
) -> None:
    spec = publish(spec_of(vocabulary=VOCABULARY), str(corpus), store)
    tokenizer = content(store, spec.data.tokenizer)
    assert bytes.fromhex(spec.data.tokenizer) in pinned(store) and size_of(tokenizer) <= VOCABULARY
    assert sorted(texts_in(everything(spec, store), tokenizer, VOCABULARY)) == sorted(
        "".join(map(document, range(DOCUMENTS))).encode()
    )
    other = ShardStore(tmp_path / "other" / "shards", cap=1 << 30)
    assert publish(spec_of(vocabulary=VOCABULARY), str(corpus), other) == spec


def test_a_tokenizer_that_is_brought_says_the_vocabulary(tmp_path: Path, corpus: Path, store: ShardStore) -> None:
    raw = train([document(number).encode() for number in range(500, 600)], 290)
    (tmp_path / "tokenizer.json").write_bytes(raw)
    for where in (tmp_path / "tokenizer.json", tmp_path):
        spec = publish(spec_of(), str(corpus), store, tokenizer=str(where))
        assert spec.data.vocabulary == size_of(raw) and content(store, spec.data.tokenizer) == raw
    assert publish(spec_of(vocabulary=1000), str(corpus), store, tokenizer=str(tmp_path)).data.vocabulary == 1000
    with pytest.raises(CorpusError, match="vocabulary"):
        publish(spec_of(vocabulary=260), str(corpus), store, tokenizer=str(tmp_path))
    for wrong, says in (("corpus", "cannot be read"), ("none.json", "cannot be read"), ("corpus/1.txt", "tokenizer")):
        with pytest.raises(CorpusError, match=says):
            publish(spec_of(), str(corpus), store, tokenizer=str(tmp_path / wrong))


def test_tokens_that_came_ready_are_taken_as_they_are(tmp_path: Path, store: ShardStore) -> None:
    tokens = np.random.default_rng(1).integers(0, 50_257, 100_000).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    spec = publish(spec_of(vocabulary=50_257), str(tmp_path / "train.bin"), store)
    assert spec.data.tokenizer == ""
    assert sorted(np.frombuffer(everything(spec, store), "<u2")) == sorted(tokens)


def test_a_corpus_is_cut_once_while_it_does_not_change(
    corpus: Path, store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = publish(spec_of(vocabulary=VOCABULARY), str(corpus), store)
    with monkeypatch.context() as patched:
        patched.delattr(dataset, "cut")
        assert publish(spec_of(vocabulary=VOCABULARY), str(corpus), store) == spec
        assert publish(spec, str(corpus), store) == spec
    (corpus / "more.txt").write_text("more text")
    again = publish(spec_of(vocabulary=VOCABULARY), str(corpus), store)
    assert again.data.index != spec.data.index
    (lost,) = {entry.shard for entry in index_of(again, store).shards[:1]}
    store.pin(lost, False)
    store.drop(lost)
    assert publish(spec_of(vocabulary=VOCABULARY), str(corpus), store) == again and lost in pinned(store)


def test_work_that_is_stopped_leaves_nothing(corpus: Path, store: ShardStore) -> None:
    class Impatient(Meter):
        def begin(self, step: str, total: int) -> None:
            super().begin(step, total)
            self.stopped = step == "cutting"

    (store.folder.parent / "cutting-left-by-a-kill").mkdir()
    with pytest.raises(Stopped):
        publish(spec_of(), str(corpus), store, meter=Impatient())
    assert not store.kept() and not list(store.folder.parent.glob("cutting-*"))


def test_a_full_disk_is_said_with_what_to_do(corpus: Path, store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cutting.Shuffled, "_write", full)
    with pytest.raises(NoSpace, match="the disk is full"):
        publish(spec_of(), str(corpus), store)
    assert not store.kept()


@pytest.mark.parametrize("vocabulary", [256, VOCABULARY])
def test_own_text_is_what_the_run_does_not_hold_out_in_the_runs_tokens(
    corpus: Path, store: ShardStore, vocabulary: int
) -> None:
    spec = publish(spec_of(source="local", vocabulary=vocabulary), str(corpus), store)
    index = index_of(spec, store)
    files = own_text(spec, "me", index, str(corpus), store, Meter())
    made = [file.stat().st_mtime_ns for file in files]
    trained, heldout = b"".join(file.read_bytes() for file in files), content(store, index.heldout.shard)
    if spec.data.tokenizer:
        tokenizer = content(store, spec.data.tokenizer)
        trained, heldout = (texts_in(raw, tokenizer, vocabulary) for raw in (trained, heldout))
    for number in range(DOCUMENTS):
        text = document(number).encode()
        assert (text in trained) != (text in heldout)
    again = own_text(spec, "me", index, str(corpus), store, Meter())
    assert again == files and [file.stat().st_mtime_ns for file in files] == made
    (corpus / "more.txt").write_text("more text, which makes it another corpus")
    own_text(spec, "me", index, str(corpus), store, Meter())
    assert b"more text" in (b"".join(file.read_bytes() for file in files) if vocabulary == 256 else b"more text")


def test_own_text_cannot_be_put_into_tokens_without_their_tokenizer(
    tmp_path: Path, corpus: Path, store: ShardStore
) -> None:
    np.arange(50_000).astype(np.uint16).tofile(tmp_path / "train.bin")
    spec = publish(spec_of(source="local", vocabulary=50_257), str(tmp_path / "train.bin"), store)
    index = index_of(spec, store)
    with pytest.raises(CorpusError, match="names no tokenizer"):
        own_text(spec, "me", index, str(corpus), store, Meter())


def test_who_leaves_a_run_keeps_neither_its_tokenizer_pinned_nor_its_own_text(
    tmp_path: Path, corpus: Path, store: ShardStore
) -> None:
    runs = RunStore(DataDir(tmp_path / "home"))
    spec = publish(spec_of(source="local", vocabulary=VOCABULARY), str(corpus), store)
    index = index_of(spec, store)
    files = own_text(spec, "me", index, str(corpus), store, Meter())
    runs.keep(spec)
    release_forgotten(runs, store)
    assert len(pinned(store)) == 3 and all(file.exists() for file in files)
    (runs.folder(spec.run_id) / "run.spec").unlink()
    release_forgotten(runs, store)
    assert not pinned(store) and not any(file.exists() for file in files)


def test_lists_that_the_disk_damaged_hold_up_no_start(tmp_path: Path, store: ShardStore) -> None:
    home, runs = tmp_path / "home", RunStore(DataDir(tmp_path / "home"))
    (home / "data-sets").mkdir(parents=True)
    (home / "data-sets" / ("ab" * 32)).write_bytes(b"\xff\xfe")
    release_forgotten(runs, store)
    assert runs.forgotten() == ()
    unfinished = store.folder.parent / "cut-unfinished"
    unfinished.write_bytes(b"\xff\xfe\n")
    drop_unfinished(store)
    assert not unfinished.exists()


def test_what_was_cut_when_the_machine_stopped_is_gone_at_the_next_start(
    corpus: Path, store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stops(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stops

    with finishing(store):
        before = publish(spec_of("kept"), str(corpus), store)
    kept = pinned(store)
    (corpus / "more.txt").write_text("private " * 10_000)
    with monkeypatch.context() as stopping:
        stopping.setattr(dataset, "encode", stop)
        stopping.setattr(cutting._Kept, "undo", lambda self: None)  # nothing is, where the process is killed
        with pytest.raises(Stops):
            publish(spec_of("never"), str(corpus), store)
    again = ShardStore(store.folder, cap=1 << 30)
    assert pinned(again) > kept
    drop_unfinished(again)
    assert pinned(again) == kept == {one.shard for one in again.kept()}
    assert everything(before, again)
    drop_unfinished(again)


def test_what_was_cut_is_kept_where_the_machine_stopped_once_its_run_was_kept(
    corpus: Path, store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", lambda self, **_: None)  # the process ends before that
    with finishing(store):
        spec = publish(spec_of("begun"), str(corpus), store)
    monkeypatch.undo()
    drop_unfinished(store, {"", spec.data.index})
    assert everything(spec, store)
    drop_unfinished(store)
    assert everything(spec, store)


def test_what_was_cut_is_kept_where_its_run_is_known_though_keeping_it_failed(
    corpus: Path, store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = RunStore(DataDir(tmp_path / "home"))

    def fails(path: Path) -> None:
        if path.parent.name == "runs":
            raise OSError(errno.EIO, "the disk is ill")

    monkeypatch.setattr(datadir, "sync_directory", fails)
    with pytest.raises(DataDirError, match="ill"), finishing(store, runs):
        spec = publish(spec_of("begun"), str(corpus), store)
        runs.keep(spec)
    assert runs.known() == (spec.run_id,) and everything(spec, store)
    with pytest.raises(Stopped), finishing(store, runs):  # of a run that is not known nothing stays
        (corpus / "more.txt").write_text("private " * 10_000)
        publish(spec_of("never"), str(corpus), store)
        raise Stopped
    assert everything(spec, store) and b"private" not in b"".join(file.read_bytes() for file in store.folder.iterdir())
