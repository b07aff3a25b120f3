"""The documents of a corpus: each kind of file, cut where lines end, never held whole, with clear errors."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from swarmnode.training import documents as documents_module
from swarmnode.training.documents import Documents, Meter, Stopped, cut_text
from swarmnode.training.tokens import CorpusError

PIECE = 8 << 10
TEXTS = ["one", "two\nlines", "größer 数据"]


def read(path: Path | str, *, vocabulary: int = 256, piece: int = PIECE) -> list[bytes]:
    return list(Documents(str(path), vocabulary=vocabulary).read(piece, Meter()))


def encoded() -> list[bytes]:
    return [text.encode() for text in TEXTS]


def test_each_file_of_a_folder_is_a_document_but_for_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for number, text in enumerate(encoded()):
        (tmp_path / ("sub" if number else ".") / f"{number}.txt").write_bytes(text)
    for hidden in (".hidden", ".git/object"):
        (tmp_path / hidden).write_bytes(b"x")
    (tmp_path / "empty").write_bytes(b"")
    assert sorted(read(tmp_path)) == sorted(encoded())


def test_json_lines_packed_or_not_and_tables_hold_a_document_each(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": text, "id": 1}) for text in TEXTS) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2, 3]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"packed text"))
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert read(tmp_path / name) == encoded()
    assert sorted(read(tmp_path)) == sorted([*encoded() * 3, b"packed text"])


def test_tokens_are_taken_as_nanogpt_and_numpy_write_them(tmp_path: Path) -> None:
    tokens = np.arange(0, 50_000, 3, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", tokens.astype(np.int64))
    for name in ("a.bin", "b.npy"):
        parts = read(tmp_path / name, vocabulary=50_257)
        assert b"".join(parts) == tokens.astype("<u2").tobytes() and max(map(len, parts)) == PIECE
    tokens.astype(np.uint32).tofile(tmp_path / "a.bin")
    assert b"".join(read(tmp_path / "a.bin", vocabulary=100_000)) == tokens.astype("<u4").tobytes()
    (tokens % 200).tofile(tmp_path / "a.bin")
    assert b"".join(read(tmp_path / "a.bin")) == (tokens % 200).astype(np.uint8).tobytes()


def test_long_texts_are_cut_where_lines_end_and_never_within_a_character() -> None:
    lines = b"".join(b"%d " % n * (n % 40) + b"\n" for n in range(3000))
    parts = list(cut_text(lines, PIECE))
    assert b"".join(parts) == lines and all(part.endswith(b"\n") for part in parts)
    assert all(PIECE / 2 < len(part) <= PIECE for part in parts[:-1])
    letters = "数".encode() * PIECE
    parts = list(cut_text(letters, PIECE))
    assert b"".join(parts) == letters and all(len(part) <= PIECE for part in parts)
    assert "".join(part.decode() for part in parts) == "数" * PIECE


def test_a_text_is_cut_alike_however_much_of_it_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random.Random(1).randbytes(100 * PIECE)  # lines of 256 bytes, and no UTF-8
    (tmp_path / "text").write_bytes(text)
    assert read(tmp_path / "text") == list(cut_text(text, PIECE))


def test_one_long_line_is_no_trouble(tmp_path: Path) -> None:
    with open(tmp_path / "text", "wb") as file:
        file.truncate(300 << 20)
    seen = 0
    for document in Documents(str(tmp_path), vocabulary=256).read(256 << 10, Meter()):
        seen += len(document)
    assert seen == 300 << 20


def test_progress_reaches_the_end_and_work_that_nobody_waits_for_stops(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 3 * PIECE)
    source, meter = Documents(str(tmp_path), vocabulary=256), Meter()
    meter.begin("reading", source.size)
    assert len(list(source.read(PIECE, meter))) == 9 and meter.done == meter.total == 9 * PIECE
    assert meter.rate > 0 and meter.left == 0
    meter.stopped = True
    with pytest.raises(Stopped):
        list(source.read(PIECE, meter))


@pytest.mark.parametrize(
    ("name", "content", "vocabulary", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', 256, "line 2 is no JSON object with a text"),
        ("a.jsonl", b"not json", 256, "line 1"),
        ("a.jsonl", b"[" * 100_000, 256, "line 1"),
        ("a.jsonl", b'{"text": 3}', 256, "line 1"),
        ("a.jsonl.gz", gzip.compress(b"x" * 10_000, mtime=0)[:-9], 256, "cannot be read"),
        ("a.txt.gz", b"no gzip", 256, "cannot be read"),
        ("a.parquet", b"no parquet", 256, "no parquet file"),
        ("a.npy", b"no array", 50_257, "does not hold tokens"),
        ("a.npy", b"PK\5\6" + bytes(18), 50_257, "does not hold tokens"),  # an archive of no arrays
        ("a.bin", b"odd", 50_257, "does not hold tokens"),
        ("a.bin", np.array([60_000], np.uint16).tobytes(), 50_257, "set .data. vocabulary"),
        ("a.bin", np.array([60_000], np.uint16).tobytes(), 256, "set .data. vocabulary"),
        ("a.jsonl.zst", b"", 256, "unpack it first"),
        ("a.txt", b"text", 100, "vocabulary of 256 bytes or more"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, vocabulary: int, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=says) as error:
        read(tmp_path, vocabulary=vocabulary)
    assert name in str(error.value) or vocabulary == 100


def test_text_and_tokens_do_not_mix_and_arrays_of_other_shapes_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.uint16))
    with pytest.raises(CorpusError, match="2 dimensions"):
        read(tmp_path, vocabulary=300)
    (tmp_path / "a.txt").write_bytes(b"text")
    with pytest.raises(CorpusError, match="in one corpus"):
        read(tmp_path, vocabulary=300)


def test_table_without_text_and_line_that_is_too_long_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="no column text, only body"):
        read(tmp_path / "a.parquet")
    monkeypatch.setattr(documents_module, "MAX_LINE", 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100}))
    with pytest.raises(CorpusError, match="line 1 has more than"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("rows", "kind"), [([1, None], "int"), ([["a"], ["b"]], "list"), ([{"a": "b"}], "dict")])
def test_a_column_that_is_no_text_is_refused_wherever_it_stands(
    rows: list[Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number or a list is not trained on as Python would print it."""

    class Rows(list[dict[str, Any]]):
        column_names = ("text",)

        def select_columns(self, names: list[str]) -> Rows:
            return self

    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    library = SimpleNamespace(load_dataset=lambda name, split: Rows({"text": row} for row in rows))
    monkeypatch.setitem(sys.modules, "datasets", library)  # type: ignore[arg-type]
    for path in (tmp_path / "a.parquet", "datasets:somebody/numbers"):
        with pytest.raises(CorpusError, match=f"{path}: .* no text but of type {kind}.* name a corpus"):
            read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_bytes(b"x")
    (tmp_path / "0.txt").chmod(0)
    with pytest.raises(CorpusError, match=r"0\.txt"):
        read(tmp_path)


def test_a_data_set_of_a_library_that_is_not_here_says_what_to_install() -> None:
    with pytest.raises(CorpusError, match="datasets"):
        read("datasets:nobody/nothing-at-all:train")


def test_surrogates_of_json_become_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    assert read(tmp_path / "a.jsonl") == [b"a?b"]


def test_default_is_the_standard_library_without_tests_and_site_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module.sysconfig, "get_path", lambda name: str(tmp_path / name))
    for other in (
        "a.py",
        "site-packages/numpy.py",
        "test/test_os.py",
        "config-3.11/x.py",
        "_sysconfigdata_x.py",
        "b.pyc",
    ):
        file = tmp_path / "stdlib" / other
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(other.encode())
    assert read("") == [b"a.py"]


def test_a_file_that_is_no_text_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "text.txt").write_text("text")
    read(tmp_path)
    assert not caplog.records
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"x\0y"))
    assert len(read(tmp_path)) == 3
    (told,) = caplog.messages
    assert "no text has" in told
