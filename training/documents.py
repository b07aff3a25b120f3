"""The documents of a corpus, one after the other, and how far reading is: nothing is ever held whole.

    source = Documents("/data/books", vocabulary=256)     # a folder, a file, or datasets:NAME[:SPLIT]
    for document in source.read(piece=8192, meter=Meter()):
        ...                                             # bytes: text, or the items of tokens

What is read, by the end of a file's name; any other file is one document:

    .jsonl            one JSON object a line, with its text under `text`
    .parquet          the column `text` (needs pyarrow, the extra `data`)
    .npy, .bin        tokens already: an array of numpy, or bare uint16 (uint32 above 65536), as nanoGPT writes them
    .gz               behind .jsonl or another name: unpacked while it is read

A text longer than a piece is cut where a line ends; where none does, between two characters.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.options import installing
from swarmnode.training.tokens import BYTES, CorpusError, dtype_of

FROM_DATASETS = "datasets:"  # before the name of a data set in the cache of Hugging Face's library
MAX_LINE = 64 << 20  # bytes of a line of JSON, which is read whole
PACKED = (".zst", ".xz", ".bz2", ".zip", ".7z", ".tar")  # what would be read as if it were text
TOKENS = (".npy", ".bin")
PEEKED = 8 << 10  # bytes in which text has no zero
ROWS = 256  # of a table at a time

# Distributions differ in whether they install these, and _sysconfigdata differs from machine to machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_NOT_STDLIB_PREFIX = ("_sysconfigdata", "sitecustomize", "usercustomize")

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """Whoever waited for the work wants it no longer."""


@dataclass
class Meter:
    """How far long work is; written by the thread that does it, read by any other."""

    step: str = ""  # what is being done
    done: int = 0  # bytes
    total: int = 0  # bytes
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False  # set by who waits, to end it

    def begin(self, step: str, total: int) -> None:
        self.step, self.done, self.total, self.began = step, 0, total, time.monotonic()

    def reach(self, done: int) -> None:
        """Raises Stopped."""
        self.done = min(done, self.total) if self.total else done
        if self.stopped:
            raise Stopped

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.done / max(1e-9, time.monotonic() - self.began)

    @property
    def left(self) -> float:
        """Seconds, by the rate so far; infinite where nothing is done yet."""
        return max(0, self.total - self.done) / self.rate if self.done else float("inf")


class Documents:
    """What `path` names; an empty path means the sources of Python's standard library. Raises CorpusError."""

    def __init__(self, path: str, *, vocabulary: int) -> None:
        self.path = path
        self._vocabulary = vocabulary
        self._dataset = path.removeprefix(FROM_DATASETS) if path.startswith(FROM_DATASETS) else ""
        self.root = Path(path).expanduser() if path else Path(sysconfig.get_path("stdlib"))
        self._odd = False  # whether a file was told to be no text
        self.size = 0  # bytes of the files, packed as they are; 0 where nobody knows
        # What changes where the files do: their number, bytes and newest change.
        self.signature: list[Any] = [path, 0, 0, 0]
        found = set()
        if self._dataset:
            self.tokens = False
            return
        if not self.root.exists():
            raise CorpusError(f"corpus {self.root}: no such file or folder; name one that exists with --corpus")
        for file in self._files():
            told = file.stat()
            self.size += told.st_size
            self.signature[1:] = [self.signature[1] + 1, self.size, max(self.signature[3], told.st_mtime_ns)]
            found.add(file.suffix in TOKENS)
            if file.suffix in PACKED:
                raise CorpusError(f"corpus {file}: unpack it first; only .gz is unpacked while it is read")
        self.tokens = found == {True}
        if len(found) == 2:
            raise CorpusError(
                f"corpus {self.root}: files with text and files with tokens ({', '.join(TOKENS)}) in one corpus; "
                "name a folder that has one kind with --corpus"
            )
        if found == {False} and vocabulary < BYTES:
            raise CorpusError(
                f"corpus {self.root}: text has a vocabulary of {BYTES} bytes or more; set [data] vocabulary"
            )

    def read(self, piece: int, meter: Meter) -> Iterator[bytes]:
        """Each document, in pieces of at most `piece` bytes. Raises CorpusError, or Stopped."""
        if self._dataset:
            done = 0
            for text in self._of_datasets():
                done += len(text)
                meter.reach(done)
                yield from filter(None, cut_text(text, piece))
            return
        read = 0
        for file in self._files():
            try:
                size = file.stat().st_size
                for at, document in self._of_file(file, piece):
                    meter.reach(read + min(at, size))
                    if document:
                        yield document
                read += size
            except (OSError, EOFError, zlib.error) as error:
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                raise CorpusError(
                    f"corpus {file}: cannot be read: {why}; mend the file or its permissions, or move it away"
                ) from error
        meter.reach(read)

    def _of_file(self, file: Path, piece: int) -> Iterator[tuple[int, bytes]]:
        """(how far the file was read, a document) each. Raises CorpusError, OSError, EOFError or zlib.error."""
        if file.suffix in TOKENS:
            yield from self._of_tokens(file, piece)
        elif file.suffix == ".parquet":
            yield from _of_parquet(file, piece)
        else:
            with open(file, "rb") as raw:
                packed = file.suffix == ".gz"
                opened: Any = gzip.GzipFile(fileobj=raw) if packed else raw
                if not self._odd and b"\0" in opened.peek(PEEKED):
                    self._odd = True
                    logger.warning("corpus %s: has bytes that no text has; it is trained on as it is", file)
                if Path(file.stem if packed else file.name).suffix == ".jsonl":
                    texts = ((raw.tell(), text) for text in _of_lines(opened, file))
                    yield from ((at, part) for at, text in texts for part in cut_text(text, piece))
                else:
                    yield from ((raw.tell(), part) for part in _of_text(opened, piece))

    def _of_tokens(self, file: Path, piece: int) -> Iterator[tuple[int, bytes]]:
        wanted = dtype_of(self._vocabulary)
        try:
            if file.suffix == ".npy":
                tokens: NDArray[Any] = np.lib.format.open_memmap(file, mode="r")
            else:
                bare = np.dtype("<u4" if self._vocabulary > 1 << 16 else "<u2")
                tokens = np.memmap(file, dtype=bare, mode="r") if file.stat().st_size else np.empty(0, bare)
        except ValueError as error:
            raise CorpusError(f"corpus {file}: it does not hold tokens: {error}") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise CorpusError(f"corpus {file}: it does not hold tokens, but {tokens.dtype} in {tokens.ndim} dimensions")
        width = piece // wanted.itemsize
        for start in range(0, len(tokens), width):
            part = np.asarray(tokens[start : start + width])
            least, most = int(part.min()), int(part.max())
            if least < 0 or most >= self._vocabulary:
                raise CorpusError(
                    f"corpus {file}: the token {most if least >= 0 else least} is none of 0 to {self._vocabulary - 1}; "
                    "set [data] vocabulary in the run file to that of the tokenizer that made the file"
                )
            yield (start + len(part)) * tokens.itemsize, part.astype(wanted).tobytes()

    def _of_datasets(self) -> Iterator[bytes]:
        """The texts of a data set in the cache of the library `datasets`."""
        name, _, split = self._dataset.partition(":")
        try:
            from datasets import load_dataset
        except ImportError:
            raise CorpusError(
                f"--corpus {self.path}: the library datasets is not installed ({installing('datasets')}); or name a "
                "file"
            ) from None
        try:
            rows = load_dataset(name, split=split or "train")
        except Exception as error:  # the library has no base class of its own errors
            raise CorpusError(f"--corpus {self.path}: datasets cannot load it: {error}") from error
        if "text" not in (rows.column_names or ()):
            raise CorpusError(f"--corpus {self.path}: it has no column text, only {', '.join(rows.column_names)}")
        return (_text_of(row["text"], f"--corpus {self.path}") for row in rows.select_columns(["text"]))

    def _files(self) -> Iterator[Path]:
        """Regular files below the root, or the root itself, without hidden ones, in the same order everywhere."""
        if self.root.is_file():
            yield self.root
            return
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(names):
                file = Path(folder, name)
                if not name.startswith(".") and file.is_file() and (self.path or _is_standard(file, self.root)):
                    yield file


def cut_text(text: bytes, piece: int) -> Iterator[bytes]:
    """A text in pieces of at most `piece` bytes, cut where lines end; else between two characters of UTF-8."""
    start = 0
    while len(text) - start > piece:
        most = start + piece
        at = text.rfind(b"\n", start + piece // 2, most) + 1 or most
        if at == most and text[at] & 0xC0 == 0x80:  # in the middle of a character, or it is no UTF-8
            at = next((at - back for back in (1, 2, 3) if text[at - back] & 0xC0 == 0xC0), at)
        yield text[start:at]
        start = at
    yield text[start:]


def _of_text(file: BinaryIO, piece: int) -> Iterator[bytes]:
    text = b""
    while more := file.read(max(piece, 1 << 20)):
        *whole, text = cut_text(text + more, piece)
        yield from whole
    yield text


def _of_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
        if len(line) > MAX_LINE:
            raise CorpusError(f"corpus {path}: line {number} has more than {MAX_LINE >> 20} MiB; cut it into several")
        if not line.strip():
            continue
        try:
            yield json.loads(line)["text"].encode(errors="replace")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CorpusError(
                f'corpus {path}: line {number} is no JSON object with a text, as in {{"text": "..."}}'
            ) from None


def _of_parquet(path: Path, piece: int) -> Iterator[tuple[int, bytes]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CorpusError(f"corpus {path}: reading it needs pyarrow: {installing('swarmnode[data]')}") from None
    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if "text" not in table.schema_arrow.names:
                raise CorpusError(f"corpus {path}: no column text, only {', '.join(table.schema_arrow.names)}")
            rows, seen = max(1, table.metadata.num_rows), 0
            for batch in table.iter_batches(batch_size=ROWS, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    seen += 1
                    parts = cut_text(_text_of(text, f"corpus {path}"), piece)
                    yield from ((size * seen // rows, part) for part in parts)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"corpus {path}: it is no parquet file that can be read: {error}") from error


def _text_of(value: object, corpus: str) -> bytes:
    """What stands in a row's column `text`; nothing where it is empty. Raises CorpusError."""
    if isinstance(value, bytes | str | None):
        return value if isinstance(value, bytes) else (value or "").encode(errors="replace")
    raise CorpusError(
        f"{corpus}: its column text has what is no text but of type {type(value).__name__}, so nobody can train on it; "
        "name a corpus whose column text is text"
    )


def _is_standard(file: Path, root: Path) -> bool:
    """Whether it is a source of the standard library that every installation of this Python version has."""
    inside = file.relative_to(root)
    if inside.suffix != ".py" or _NOT_STDLIB.intersection(inside.parts) or inside.parts[0].startswith("config-"):
        return False
    return not file.is_symlink() and not inside.name.startswith(_NOT_STDLIB_PREFIX)
