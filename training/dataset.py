"""A data set as shards: how a corpus is cut, the index that names the shards, and which of them a node trains on.

    shards = cut(corpus)                                # the creator's side: texts, each to become a shard
    index = Index.of(...); encode(index)                # what the RunSpec names by its id
    ranking(index, run_id, peer_id)                     # a member's side: the shards, its own first

The chunks that are not held out are sorted by their sha-256 and cut where equally many have gone by; so every shard is
a random sample of the whole text, and a quarter of the shards is as good as a quarter of the chunks. A cut is a number,
the first 8 bytes of a hash, and stands in the index: whoever has another version of the text cuts it at the same
places, and gets the same shard wherever the same chunks fall between two cuts.

The index of a run in which each node brings its own text names the held-out part only.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from swarmnode.training.corpus import CHUNK, MAX_CORPUS, MAX_HELDOUT, SLICE_SHARE, Chunk, Corpus

MAX_SHARD = 1 << 20  # bytes; a smaller data set has smaller shards
MIN_SHARDS = 64  # of a data set with that many chunks: a node's quarter then mixes sixteen
MAX_SHARDS = 1 << 14  # in an index
MAX_INDEX = 1 << 20  # bytes; MAX_SHARDS take 52 each
ID = 32  # bytes of a shard's id
LAST = (1 << 64) - 1  # the last cut

VERSION = 2  # 2: the held-out part lies in the order of hashes, and its last quarter is not judged on


class BadIndex(ValueError):
    """What should be the index of a data set is none."""


@dataclass(frozen=True)
class DataEntry:
    """One shard of a data set: the text of the chunks between the cut before it and its own."""

    shard: bytes  # its id
    size: int  # bytes
    upto: int  # the cut: the first 8 bytes of a chunk's sha-256, big-endian, are at most this


@dataclass(frozen=True)
class Index:
    """What a run's data are. Raises BadIndex where the values break a limit."""

    heldout: DataEntry
    shards: tuple[DataEntry, ...]  # cuts ascend; empty where each node brings its own text

    def __post_init__(self) -> None:
        if not 0 < self.heldout.size <= MAX_HELDOUT:
            raise BadIndex(f"a held-out part of {self.heldout.size} bytes; 1 to {MAX_HELDOUT} are allowed")
        if len(self.shards) > MAX_SHARDS:
            raise BadIndex(f"{len(self.shards)} shards; at most {MAX_SHARDS} are allowed")
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
        if self.size > MAX_CORPUS:
            raise BadIndex(f"{self.size} bytes of text; at most {MAX_CORPUS} are allowed")

    @property
    def size(self) -> int:
        """Bytes of text to train on."""
        return sum(entry.size for entry in self.shards)


@dataclass(frozen=True)
class CutCorpus:
    """A corpus in the parts that become shards, each with its cut."""

    heldout: tuple[int, bytes]
    shards: tuple[tuple[int, bytes], ...]


def encode(index: Index) -> bytes:
    """Canonical: a msgpack array of the version and, the held-out part first, [id, size, cut] of each shard."""
    rows = [[entry.shard, entry.size, entry.upto] for entry in (index.heldout, *index.shards)]
    packed: bytes = msgpack.packb([VERSION, rows])
    return packed


def decode(raw: bytes) -> Index:
    """An index that came from a peer or the disk. Raises BadIndex."""
    if len(raw) > MAX_INDEX:
        raise BadIndex(f"{len(raw)} bytes; at most {MAX_INDEX} are allowed")
    try:
        value = msgpack.unpackb(raw, max_array_len=MAX_SHARDS + 1, max_map_len=0, max_str_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadIndex(f"it is malformed: {error}") from error
    if not isinstance(value, list) or len(value) != 2 or value[0] != VERSION:
        raise BadIndex("it has another form than this version knows; update swarmnode")
    if not isinstance(value[1], list) or not value[1] or not all(map(_is_row, value[1])):
        raise BadIndex("rows that are not an id, a size and a cut each")
    heldout, *shards = (DataEntry(*row) for row in value[1])
    index = Index(heldout, tuple(shards))
    if encode(index) != raw:
        raise BadIndex("it is not in canonical form; its id would differ between nodes")
    return index


def cut(corpus: Corpus) -> CutCorpus:
    """The corpus in shards of at most MAX_SHARD bytes, as many chunks in each."""
    chunks = sorted(corpus.training, key=lambda chunk: chunk.sha256)
    each = min(max(1, len(chunks) // MIN_SHARDS), MAX_SHARD // CHUNK)
    cuts = [_place(group[-1]) for group in (chunks[at : at + each] for at in range(0, len(chunks), each))]
    cuts[-1] = LAST
    after = min(map(_place, chunks)) - 1  # all held-out chunks come before
    texts = texts_between(chunks, after=after, cuts=cuts)
    return CutCorpus(
        (after, corpus.heldout), tuple((upto, text) for upto, text in zip(cuts, texts, strict=True) if text)
    )


def texts_between(chunks: Iterable[Chunk], *, after: int, cuts: list[int]) -> list[bytes]:
    """The text of each shard: the chunks that come after the cut before it, in the order of their hashes."""
    groups: list[list[Chunk]] = [[] for _ in cuts]
    for chunk in chunks:
        place = _place(chunk)
        number = bisect_left(cuts, place)
        if after < place and number < len(cuts):
            groups[number].append(chunk)
    return [b"".join(c.text for c in sorted(group, key=lambda chunk: chunk.sha256)) for group in groups]


def texts_of(chunks: Iterable[Chunk], index: Index) -> list[bytes]:
    """What would be the shards of `index` if it were an index of these chunks, in its order."""
    return texts_between(chunks, after=index.heldout.upto, cuts=[entry.upto for entry in index.shards])


def ranking(index: Index, run_id: str, peer_id: str) -> tuple[DataEntry, ...]:
    """The shards by sha-256(run ‖ peer ‖ shard): a node trains on the first `share` of them. Nobody hands out work."""
    mine = (run_id + peer_id).encode()
    return tuple(sorted(index.shards, key=lambda entry: hashlib.sha256(mine + entry.shard).digest()))


def share(index: Index) -> int:
    """How many shards a node trains on."""
    return max(1, round(len(index.shards) * SLICE_SHARE)) if index.shards else 0


def _place(chunk: Chunk) -> int:
    return int.from_bytes(chunk.sha256[:8], "big")


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    shard, size, upto = row
    return isinstance(shard, bytes) and type(size) is int and type(upto) is int
