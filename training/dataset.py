"""A data set as shards: how documents become shards, the index that names these, and which of them a node trains on.

    shuffled = Shuffled(scratch, recipe.seed, expected=source.size)   # by hash, on disk
    cut(shuffled, recipe, meter)                                   # the creator's side: the held-out part, shards
    ranking(index, run_id, peer_id)                                   # a member's side: the shards, its own first

How documents are ordered and cut: docs/data.md. A cut is a number, the first 8 bytes of a hash, and stands in the index
with the seed and the length to which documents were cut: whoever has another version of the text gets the same shard
wherever the same documents fall between two cuts, and knows which documents of its own are held out.

Shards hold tokens (`tokens.py`): bytes of text, or what a tokenizer makes of it, with its end after each document.

The index of a run in which each node brings its own text names the held-out part only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgpack

from swarmnode.training.documents import Documents, Meter
from swarmnode.training.tokens import CorpusError, Encoder

HELDOUT_SHARE = 0.1  # of the text: much more than a node trains on in a round, so that it cannot be learned by heart
MAX_HELDOUT = 16 << 20  # bytes; peers without it have to fetch it before they train
MIN_DOCUMENTS = 8  # below this there is nothing worth dividing
SLICE_SHARE = 0.25  # of the shards
LEAST_PIECE, MOST_PIECE = 8 << 10, 256 << 10  # bytes that longer documents are cut to
PIECES = 1 << 10  # of a corpus in one file, before they get longer
USUAL_SHARD = 1 << 20  # bytes; a small data set has smaller shards, one above 8 GiB larger ones
MAX_SHARD = 64 << 20
MIN_SHARDS = 64  # of a data set with that many documents: a node's quarter then mixes sixteen
MAX_SHARDS = 1 << 14  # in an index
MAX_INDEX = 1 << 20  # bytes; MAX_SHARDS take 52 each
ID = 32  # bytes of a shard's id
LAST = (1 << 64) - 1  # the last cut

BUCKET = 4 << 20  # bytes of documents, as they are packed, that are sorted at a time, while there are at most
MAX_BUCKETS = 1 << 10
BUFFERS = 64 << 20  # bytes of documents that wait to be written to their buckets
BATCH = 32  # documents that are tokenised at a time: as they are, tokens take a hundred times their memory

VERSION = 3  # 2: the held-out part lies in the order of hashes; 3: documents of any length, seed, tokens, larger shards


class BadIndex(ValueError):
    """What should be the index of a data set is none."""


@dataclass(frozen=True)
class DataEntry:
    """One shard of a data set: the documents between the cut before it and its own."""

    shard: bytes  # its id
    size: int  # bytes
    upto: int  # the cut: the first 8 bytes of a document's hash, big-endian, are at most this


@dataclass(frozen=True)
class Index:
    """What a run's data are. Raises BadIndex where the values break a limit."""

    heldout: DataEntry
    shards: tuple[DataEntry, ...]  # cuts ascend; empty where each node brings its own text
    seed: int = 0  # of the documents' hashes
    piece: int = LEAST_PIECE  # bytes to which longer documents were cut

    def __post_init__(self) -> None:
        if not 0 < self.heldout.size <= MAX_HELDOUT:
            raise BadIndex(f"a held-out part of {self.heldout.size} bytes; 1 to {MAX_HELDOUT} are allowed")
        if len(self.shards) > MAX_SHARDS:
            raise BadIndex(f"{len(self.shards)} shards; at most {MAX_SHARDS} are allowed")
        if not 0 <= self.seed <= LAST or not LEAST_PIECE <= self.piece <= MOST_PIECE:
            raise BadIndex(f"a seed or a length of documents that is none: {self.seed}, {self.piece}")
        before = self.heldout.upto
        for entry in self.shards:
            if not 0 < entry.size <= MAX_SHARD:
                raise BadIndex(f"a shard of {entry.size} bytes; 1 to {MAX_SHARD} are allowed")
            if not before < entry.upto:
                raise BadIndex("cuts that do not ascend")
            before = entry.upto
        entries = (self.heldout, *self.shards)
        if not all(len(entry.shard) == ID and 0 <= entry.upto <= LAST for entry in entries):
            raise BadIndex("an id or a cut that is none")
        if len({entry.shard for entry in entries}) != len(entries):
            raise BadIndex("a shard that stands in it twice")


def encode(index: Index) -> bytes:
    """Canonical: a msgpack array of version, seed, piece and [id, size, cut] of each shard, the held-out part first."""
    rows = [[entry.shard, entry.size, entry.upto] for entry in (index.heldout, *index.shards)]
    return msgpack.packb([VERSION, index.seed, index.piece, rows])


def decode(raw: bytes) -> Index:
    """An index that came from a peer or the disk. Raises BadIndex."""
    if len(raw) > MAX_INDEX:
        raise BadIndex(f"{len(raw)} bytes; at most {MAX_INDEX} are allowed")
    try:
        value = msgpack.unpackb(raw, max_array_len=MAX_SHARDS + 1, max_map_len=0, max_str_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadIndex(f"it is malformed: {error}") from error
    if not isinstance(value, list) or len(value) != 4 or value[0] != VERSION:
        raise BadIndex("it has another form than this version knows; update swarmnode")
    _, seed, piece, rows = value
    if type(seed) is not int or type(piece) is not int:
        raise BadIndex("a seed or a length of documents that is none")
    if not isinstance(rows, list) or not rows or not all(map(_is_row, rows)):
        raise BadIndex("rows that are not an id, a size and a cut each")
    heldout, *shards = (DataEntry(*row) for row in rows)
    index = Index(heldout, tuple(shards), seed, piece)
    if encode(index) != raw:
        raise BadIndex("it is not in canonical form; its id would differ between nodes")
    return index


# -- cutting


@dataclass(frozen=True)
class Recipe:
    """How documents become shards; the same on whichever node has them."""

    seed: int
    piece: int  # bytes to which longer documents are cut
    vocabulary: int
    tokenizer: bytes = b""  # tokenizer.json; empty where documents are tokens already, of one byte or more each

    @cached_property
    def encoder(self) -> Encoder | None:
        """Raises TokenizerError."""
        return Encoder(self.tokenizer, self.vocabulary) if self.tokenizer else None

    def on(self, source: Documents) -> Recipe:
        """The same for documents of `source`: those that are tokens already stay as they are."""
        return dataclasses.replace(self, tokenizer=b"") if source.tokens else self

    def encoded(self, documents: Sequence[bytes]) -> list[bytes]:
        """Each document as it stands in a shard."""
        if self.encoder is None:
            return list(documents)
        found: list[bytes] = []
        while batch := documents[len(found) : len(found) + max(1, int(BATCH // self.encoder.growth))]:
            found += (tokens.tobytes() for tokens in self.encoder.encode(batch))
        return found


def piece_for(size: int) -> int:
    """Bytes to which documents of a corpus of `size` bytes are cut: a small one in one file has many all the same."""
    return min(MOST_PIECE, max(LEAST_PIECE, 1 << (size // PIECES).bit_length() >> 1)) if size else MOST_PIECE


def shard_size(total: int) -> int:
    """Bytes of a shard at the most, for a data set of about `total` bytes. Raises CorpusError where it is too large."""
    if total <= USUAL_SHARD * MAX_SHARDS // 2:
        return max(1, min(total // MIN_SHARDS, USUAL_SHARD))
    size = 1 << (total * 2 // MAX_SHARDS - 1).bit_length()  # half of the shards may come out longer or shorter
    if size > MAX_SHARD:
        raise CorpusError(
            f"the corpus makes {total >> 30} GiB of shards, and {MAX_SHARD * MAX_SHARDS // 2 >> 30} GiB are allowed; "
            "name a smaller one with --corpus"
        )
    return size


def hash_of(document: bytes, seed: int) -> bytes:
    """What a document is known by, 32 bytes."""
    return hashlib.sha256(seed.to_bytes(8, "big") + document).digest()


def place_of(digest: bytes) -> int:
    """Where a document stands among the cuts."""
    return int.from_bytes(digest[:8], "big")


class Shuffled:
    """Documents in the order of their hashes, each once, in files below `folder`. Raises OSError where these fail.

    `expected` bytes of them will come, packed perhaps; 0 where nobody knows.
    """

    def __init__(self, folder: Path, seed: int, *, expected: int) -> None:
        self._folder = folder
        self._seed = seed
        most = MAX_BUCKETS.bit_length() - 1
        self._bits = min(most, (expected // BUCKET).bit_length()) if expected else most
        self._waiting: list[list[bytes]] = [[] for _ in range(1 << self._bits)]
        self._sizes = [0] * (1 << self._bits)  # of what waits
        self.size = 0  # bytes of the documents that were put
        self.count = 0

    def put(self, document: bytes, digest: bytes | None = None) -> None:
        digest = digest or hash_of(document, self._seed)
        number = place_of(digest) >> 64 - self._bits
        self._waiting[number] += (digest, len(document).to_bytes(4, "big"), document)
        self._sizes[number] += len(document)
        self.size += len(document)
        self.count += 1
        if self._sizes[number] * len(self._sizes) > BUFFERS:
            self._write(number)

    def _write(self, number: int) -> None:
        if self._waiting[number]:
            with open(self._file(number), "ab") as file:
                file.writelines(self._waiting[number])
            self._waiting[number], self._sizes[number] = [], 0

    def _file(self, number: int) -> Path:
        return self._folder / f"bucket-{number:04d}"

    def documents(self, *, keep: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """(hash, document) each. What was read is deleted, unless it is to be read again."""
        for number in range(len(self._sizes)):
            self._write(number)
            if not self._file(number).exists():
                continue
            raw = self._file(number).read_bytes()
            if not keep:
                self._file(number).unlink()
            found: dict[bytes, tuple[int, int]] = {}
            at = 0
            while at < len(raw):
                start = at + ID + 4
                end = start + int.from_bytes(raw[at + ID : start], "big")
                found[raw[at : at + ID]] = (start, end)
                at = end
            for digest in sorted(found):
                start, end = found[digest]
                yield digest, raw[start:end]


def cut(shuffled: Shuffled, recipe: Recipe, meter: Meter) -> Iterator[tuple[int, bytes]]:
    """(cut, content) of the held-out part, then of each shard. Raises CorpusError, OSError or Stopped."""
    limit = min(int(shuffled.size * HELDOUT_SHARE), MAX_HELDOUT)
    documents = _in_tokens(shuffled, recipe, meter)
    content, text, upto = bytearray(), 0, 0
    for first in documents:
        place, length, encoded = first
        if content and (text + length > limit or len(content) + len(encoded) > MAX_HELDOUT):
            yield upto, bytes(content)
            most = shard_size((shuffled.size - text) * len(content) // text)
            yield from _packed(itertools.chain([first], documents), most)
            return
        content += encoded
        text, upto = text + length, place
    raise CorpusError(
        f"the corpus has too few different documents: {text} bytes are all that is left of {shuffled.size} without "
        "repetitions; name more text with --corpus"
    )


def packed(shuffled: Shuffled, recipe: Recipe, meter: Meter, most: int) -> Iterator[tuple[int, bytes]]:
    """(cut, content) of shards of `most` bytes, without a held-out part. Raises OSError or Stopped."""
    return _packed(_in_tokens(shuffled, recipe, meter), most)


def _packed(documents: Iterable[tuple[int, int, bytes]], most: int) -> Iterator[tuple[int, bytes]]:
    content, upto = bytearray(), 0
    for place, _, encoded in documents:
        if content and len(content) + len(encoded) > most and upto < place:
            yield upto, bytes(content)
            content = bytearray()
        content += encoded
        upto = place
    yield LAST, bytes(content)


def _in_tokens(shuffled: Shuffled, recipe: Recipe, meter: Meter) -> Iterator[tuple[int, int, bytes]]:
    """(place, bytes of text, content of a shard) of each document."""
    meter.begin("tokenising" if recipe.tokenizer else "cutting", shuffled.size)
    documents, done = shuffled.documents(), 0
    while batch := list(itertools.islice(documents, BATCH)):
        for (digest, text), tokens in zip(batch, recipe.encoded([text for _, text in batch]), strict=True):
            done += len(text)
            yield place_of(digest), len(text), tokens
        meter.reach(done)
    meter.reach(shuffled.size)


def check_enough(shuffled: Shuffled, root: object, least: int = MIN_DOCUMENTS) -> None:
    """Raises CorpusError where there are fewer than `least` documents."""
    if not shuffled.count:
        raise CorpusError(f"corpus {root}: no text in it; name a file or folder with some with --corpus")
    if shuffled.count < least:
        raise CorpusError(
            f"corpus {root}: {shuffled.size} bytes make {shuffled.count} documents; at least {least} are needed "
            "to hold some out and train on the others: name more text with --corpus"
        )


def sample_of(shuffled: Shuffled, size: int) -> Iterator[bytes]:
    """Documents to train a tokenizer on: the first by their hashes, which are a sample of the whole, `size` bytes."""
    for _, document in shuffled.documents(keep=True):
        yield document
        size -= len(document)
        if size <= 0:
            return


def remade(shuffled: Shuffled, index: Index, recipe: Recipe) -> Iterator[bytes]:
    """What these documents make between the cuts of an index, wherever there are any. Raises OSError."""
    cuts = [index.heldout.upto, *(entry.upto for entry in index.shards)]
    between = itertools.groupby(shuffled.documents(), lambda found: bisect_left(cuts, place_of(found[0])))
    for _, documents in between:
        yield b"".join(recipe.encoded([document for _, document in documents]))


# -- what a node trains on


def ranking(index: Index, run_id: str, peer_id: str) -> tuple[DataEntry, ...]:
    """The shards by sha-256(run ‖ peer ‖ shard): a node trains on the first `share` of them. Nobody hands out work."""
    mine = (run_id + peer_id).encode()
    return tuple(sorted(index.shards, key=lambda entry: hashlib.sha256(mine + entry.shard).digest()))


def share(index: Index) -> int:
    """How many shards a node trains on, where its disk has room for them."""
    return max(1, round(len(index.shards) * SLICE_SHARE)) if index.shards else 0


def _is_row(row: object) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == [bytes, int, int]
