"""The corpus: the same held-out part for all who have the text, a slice of its own for each, clear errors."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from swarmnode.training import corpus as corpus_module
from swarmnode.training.corpus import (
    CHUNK,
    Corpus,
    CorpusError,
    HeldoutDiffers,
    corpus_for_run,
    divide_heldout,
    read_corpus,
    read_heldout,
)


def _write_texts(folder: Path, *, files: int = 20, size: int = 5 * CHUNK) -> None:
    chance = random.Random(1)
    for number in range(files):
        (folder / f"sub{number % 3}").mkdir(parents=True, exist_ok=True)
        (folder / f"sub{number % 3}" / f"{number}.txt").write_bytes(chance.randbytes(size))


def _texts(corpus: Corpus) -> set[bytes]:
    return {chunk.text for chunk in corpus.training}


def test_two_nodes_with_the_same_text_hold_out_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _write_texts(tmp_path / name)
    a, b = read_corpus(str(tmp_path / "a")), read_corpus(str(tmp_path / "b"))
    assert a.heldout_sha256 == b.heldout_sha256 == hashlib.sha256(a.heldout).hexdigest()
    assert a.training == b.training


def test_what_is_held_out_is_not_trained_on_and_nothing_else_is_lost(tmp_path: Path) -> None:
    _write_texts(tmp_path)
    (tmp_path / "copy.txt").write_bytes((tmp_path / "sub0" / "0.txt").read_bytes())
    corpus = read_corpus(str(tmp_path))
    assert len(corpus.heldout) == 10 * CHUNK  # a tenth of 100 different chunks
    assert not any(text in corpus.heldout for text in _texts(corpus))
    assert len(corpus.training) == 90


def test_what_judges_draw_from_and_what_is_reported_on_are_disjoint_and_random_parts(tmp_path: Path) -> None:
    _write_texts(tmp_path)
    heldout = read_corpus(str(tmp_path)).heldout
    gate, report = divide_heldout(heldout)
    assert gate + report == heldout and len(gate) == 3 * len(report)
    hashes = [hashlib.sha256(heldout[at : at + CHUNK]).digest() for at in range(0, len(heldout), CHUNK)]
    assert hashes == sorted(hashes)  # so neither part is the end of the files
    for size in range(1, 9):
        assert b"".join(divide_heldout(heldout[:size])) == heldout[:size]


def test_hidden_files_and_the_order_of_creation_do_not_matter(tmp_path: Path) -> None:
    _write_texts(tmp_path)
    before = read_corpus(str(tmp_path))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(b"x" * CHUNK)
    moved = tmp_path / "sub1" / "1.txt"
    text = moved.read_bytes()
    moved.unlink()
    moved.write_bytes(text)
    assert read_corpus(str(tmp_path)) == before


def test_each_node_takes_a_quarter_of_its_own(tmp_path: Path) -> None:
    _write_texts(tmp_path, files=80)
    corpus = read_corpus(str(tmp_path))
    slices = [corpus.slice_for("run", peer) for peer in ("alice", "bob", "carol")]
    assert [len(text) for text in slices] == [90 * CHUNK] * 3  # a quarter of 360
    assert len(set(slices)) == 3
    assert corpus.slice_for("run", "alice") == slices[0]
    assert corpus.slice_for("another run", "alice") != slices[0]


def test_slice_is_the_first_quarter_by_hash_of_run_peer_and_chunk(tmp_path: Path) -> None:
    _write_texts(tmp_path, files=4)
    corpus = read_corpus(str(tmp_path))
    ranked = sorted(
        _texts(corpus), key=lambda text: hashlib.sha256(b"run" + b"peer" + hashlib.sha256(text).digest()).digest()
    )
    assert corpus.slice_for("run", "peer") == b"".join(ranked[: round(len(ranked) / 4)])


def test_default_is_the_standard_library_without_tests_and_site_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_texts(tmp_path / "lib")
    for file in (tmp_path / "lib").rglob("*.txt"):
        file.rename(file.with_suffix(".py"))
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(tmp_path / name.replace("stdlib", "lib")))
    before = read_corpus("")
    assert len(before.training) == 90
    for other in (
        "site-packages/numpy.py",
        "test/test_os.py",
        "config-3.11-x86_64/x.py",
        "_sysconfigdata_x.py",
        "a.pyc",
    ):
        file = tmp_path / "lib" / other
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(other.encode() * 99)
    assert read_corpus("") == before


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no such file"), (b"", "no text"), (b"x" * 3 * CHUNK, "at least 8"), (b"short", "at least 8")],
)
def test_unusable_corpus_is_refused_with_its_path_and_what_to_do(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=says) as error:
        read_corpus(str(path))
    assert str(path) in str(error.value)
    assert "--corpus" in str(error.value)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no text in it"):
        read_corpus(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_is_named(tmp_path: Path) -> None:
    _write_texts(tmp_path)
    (tmp_path / "sub0" / "0.txt").chmod(0)
    with pytest.raises(CorpusError, match=r"0\.txt"):
        read_corpus(str(tmp_path))


def test_too_large_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_texts(tmp_path)
    monkeypatch.setattr(corpus_module, "MAX_CORPUS", 10 * CHUNK)
    with pytest.raises(CorpusError, match="larger than"):
        read_corpus(str(tmp_path))


def test_another_heldout_part_is_taken_from_a_checked_file_and_not_trained_on(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts")
    own = read_corpus(str(tmp_path / "texts"))
    theirs = own.training[5].text + b"of another version" + own.training[40].text
    wanted = hashlib.sha256(theirs).hexdigest()
    fetched = tmp_path / "heldout"

    with pytest.raises(HeldoutDiffers, match="fetch"):
        corpus_for_run(str(tmp_path / "texts"), heldout_sha256=wanted, heldout=fetched)
    fetched.write_bytes(theirs)
    corpus = corpus_for_run(str(tmp_path / "texts"), heldout_sha256=wanted, heldout=fetched)
    assert (corpus.heldout, corpus.heldout_sha256) == (theirs, wanted)
    assert _texts(own) - _texts(corpus) == {own.training[5].text, own.training[40].text}

    fetched.write_bytes(theirs[:-1])
    with pytest.raises(CorpusError, match="remove it to fetch it again"):
        read_heldout(fetched, sha256=wanted)


def test_own_heldout_part_needs_no_file(tmp_path: Path) -> None:
    _write_texts(tmp_path)
    own = read_corpus(str(tmp_path))
    assert corpus_for_run(str(tmp_path), heldout_sha256=own.heldout_sha256, heldout=None) == own
    assert corpus_for_run(str(tmp_path), heldout_sha256="", heldout=None) == own
