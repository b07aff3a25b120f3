"""The text that a node learns from: read, cut, and divided into a common held-out part and each node's own slice.

    corpus = read_corpus("")                        # the Python standard library's own sources
    corpus.heldout_sha256                           # the same on all nodes with the same text
    gate, report = divide_heldout(corpus.heldout)   # what judges measure on, and what people are told of
    corpus.slice_for(run_id, peer_id)               # what this node trains on

Files are cut into chunks of 8 KiB, each known by its sha-256. The chunks with the lowest hashes are held out, so every
node that has the text finds the same ones without asking. Of the others a node takes the quarter that ranks first by
sha-256(run ‖ peer ‖ chunk): nobody hands out work, and the slices of different nodes overlap only by chance.

Held-out chunks lie in the order of their hashes. Judges of an open run draw from the first three quarters, the gate,
and from there alone; the loss that people read is that on the last quarter, the report. So whoever trains on what is
judged by moves no figure that people read, as long as nobody trains on that quarter too. What nobody can have trained
on is text that the run's creator keeps back (`[data] sealed`).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

CHUNK = 8 << 10  # bytes
HELDOUT_SHARE = 0.1  # of the chunks: much more than a node trains on in a round, so that it cannot be learned by heart
MAX_HELDOUT = 16 << 20  # bytes; peers without it have to fetch it before they train
REPORT_PART = 4  # the last quarter of the held-out part
SLICE_SHARE = 0.25  # of the chunks that are not held out
MIN_CHUNKS = 8  # below this there is nothing worth dividing
MAX_CORPUS = 2 << 30  # bytes; the text is kept in memory

# Distributions differ in whether they install these, and _sysconfigdata differs from machine to machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_NOT_STDLIB_PREFIX = ("_sysconfigdata", "sitecustomize", "usercustomize")


T = TypeVar("T", bytes, NDArray[Any])  # a text, or its tokens


class CorpusError(Exception):
    """The corpus cannot be used. The message names the path and what to do."""


class HeldoutDiffers(CorpusError):
    """This node's held-out part is not the run's; it has to come from a peer."""


@dataclass(frozen=True)
class Chunk:
    text: bytes  # 1 to CHUNK bytes
    sha256: bytes


@dataclass(frozen=True)
class Corpus:
    """Text divided into `training` chunks, in the order of the files, and the `heldout` bytes."""

    training: tuple[Chunk, ...]
    heldout: bytes

    @cached_property
    def heldout_sha256(self) -> str:
        """sha-256 of the held-out part, 64 hex digits."""
        return hashlib.sha256(self.heldout).hexdigest()

    def slice_for(self, run_id: str, peer_id: str) -> bytes:
        """The training text of one node: its first quarter of the chunks by sha-256(run ‖ peer ‖ chunk)."""
        mine = (run_id + peer_id).encode()
        ranked = sorted(self.training, key=lambda chunk: hashlib.sha256(mine + chunk.sha256).digest())
        return b"".join(chunk.text for chunk in ranked[: max(1, round(len(ranked) * SLICE_SHARE))])

    def with_heldout(self, heldout: bytes) -> Corpus:
        """The same corpus measured on a peer's held-out part; local chunks that occur in it are not trained on."""
        return Corpus(tuple(chunk for chunk in self.training if chunk.text not in heldout), heldout)


def read_corpus(path: str) -> Corpus:
    """Read the file or folder `path`; an empty path means the standard library's sources.

    Folders are read whole, without hidden files, in the order of their sorted relative paths. Raises CorpusError.
    """
    root, chunks = _root(path), read_chunks(path)
    if not chunks:
        raise CorpusError(f"corpus {root}: no text in it; name a file or folder with some with --corpus")
    if len(chunks) < MIN_CHUNKS:
        size = sum(len(chunk.text) for chunk in chunks)
        raise CorpusError(
            f"corpus {root}: {size} bytes make {len(chunks)} different chunks of at most {CHUNK} bytes; at least "
            f"{MIN_CHUNKS} are needed to hold some out and train on the others: name more text with --corpus"
        )
    return divide(chunks)


def read_chunks(path: str) -> list[Chunk]:
    """All chunks of what `read_corpus` reads, however few. Raises CorpusError."""
    root = _root(path)
    if not root.exists():
        raise CorpusError(f"corpus {root}: no such file or folder; name one that exists with --corpus")
    chunks: dict[bytes, Chunk] = {}  # by hash: a text that occurs twice counts once
    size = 0
    for file in _standard_library(root) if not path else _files(root):
        try:
            text = file.read_bytes()
        except OSError as error:
            raise CorpusError(
                f"corpus {file}: cannot be read: {error.strerror}; mend its permissions or move it away"
            ) from error
        size += len(text)
        if size > MAX_CORPUS:
            raise CorpusError(f"corpus {root}: larger than {MAX_CORPUS >> 30} GiB; name a smaller folder with --corpus")
        for start in range(0, len(text), CHUNK):
            piece = text[start : start + CHUNK]
            digest = hashlib.sha256(piece).digest()
            chunks.setdefault(digest, Chunk(piece, digest))
    return list(chunks.values())


def divide_heldout(heldout: T) -> tuple[T, T]:
    """The part that judges draw from, and the part on which the loss is measured that people read."""
    middle = len(heldout) - len(heldout) // REPORT_PART
    return heldout[:middle], heldout[middle:]


def read_heldout(path: Path, *, sha256: str) -> bytes:
    """The held-out part that was fetched from a peer. Raises CorpusError where it does not hash to `sha256`."""
    try:
        heldout = path.read_bytes()
    except OSError as error:
        raise CorpusError(
            f"held-out text {path}: cannot be read: {error.strerror}; remove it to fetch it again"
        ) from error
    found = hashlib.sha256(heldout).hexdigest()
    if found != sha256:
        raise CorpusError(
            f"held-out text {path} hashes to {found[:12]}…, the run's to {sha256[:12]}…; remove it to fetch it again"
        )
    return heldout


def corpus_for_run(path: str, *, heldout_sha256: str, heldout: Path | None) -> Corpus:
    """The corpus at `path` with the run's held-out part: its own where that is the same, else the file `heldout`.

    An empty `heldout_sha256` accepts the corpus's own. Raises HeldoutDiffers where neither has the run's hash.
    """
    corpus = read_corpus(path)
    if heldout_sha256 in ("", corpus.heldout_sha256):
        return corpus
    if heldout is None or not heldout.exists():
        raise HeldoutDiffers(
            f"this node's held-out text ({corpus.heldout_sha256[:12]}…) is not the run's ({heldout_sha256[:12]}…); "
            "its corpus is another, for instance of another Python version; fetch the run's held-out text from a peer "
            "or use the same corpus"
        )
    return corpus.with_heldout(read_heldout(heldout, sha256=heldout_sha256))


def divide(chunks: list[Chunk]) -> Corpus:
    """Hold out the chunks with the lowest hashes."""
    count = min(max(1, round(len(chunks) * HELDOUT_SHARE)), MAX_HELDOUT // CHUNK)
    held = sorted(chunks, key=lambda chunk: chunk.sha256)[:count]
    return Corpus(
        training=tuple(chunk for chunk in chunks if chunk.sha256 > held[-1].sha256),
        heldout=b"".join(chunk.text for chunk in held),
    )


def _root(path: str) -> Path:
    return Path(path).expanduser() if path else Path(sysconfig.get_path("stdlib"))


def _files(root: Path) -> Iterator[Path]:
    """Regular files under `root`, or `root` itself, without hidden ones, in an order that is the same everywhere."""
    if root.is_file():
        yield root
        return
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # Sorted as a list of parts in bytes: neither the locale nor the file system's order counts.
    for file in sorted(found, key=lambda file: [os.fsencode(part) for part in file.relative_to(root).parts]):
        if file.is_file():
            yield file


def _standard_library(root: Path) -> Iterator[Path]:
    """Sources of the standard library that every installation of this Python version has."""
    for file in _files(root):
        inside = file.relative_to(root)
        if inside.suffix != ".py" or _NOT_STDLIB.intersection(inside.parts) or inside.parts[0].startswith("config-"):
            continue
        if not file.is_symlink() and not inside.name.startswith(_NOT_STDLIB_PREFIX):
            yield file
