"""A data set: every chunk in exactly one shard, the same shards for the same text, and no index that breaks a limit."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training import dataset
from swarmnode.training.corpus import CHUNK, MAX_HELDOUT, Chunk, Corpus, divide
from swarmnode.training.dataset import (
    ID,
    LAST,
    MAX_INDEX,
    MAX_SHARD,
    VERSION,
    BadIndex,
    CutCorpus,
    DataEntry,
    Index,
    cut,
    decode,
    encode,
    ranking,
    share,
    texts_of,
)


def chunks_of(count: int, seed: int = 1, size: int = CHUNK) -> list[Chunk]:
    chance = random.Random(seed)
    texts = [chance.randbytes(size) for _ in range(count)]
    return [Chunk(text, hashlib.sha256(text).digest()) for text in texts]


def index_of(parts: CutCorpus) -> Index:
    def entry(upto: int, text: bytes) -> DataEntry:
        return DataEntry(hashlib.sha256(text).digest(), len(text), upto)

    return Index(entry(*parts.heldout), tuple(entry(*part) for part in parts.shards))


def pieces(text: bytes) -> list[bytes]:
    return [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]


@pytest.mark.parametrize("count", [8, 37, 64, 100, 1000])
def test_every_chunk_that_is_not_held_out_is_in_one_shard(count: int) -> None:
    corpus = divide(chunks_of(count))
    parts = cut(corpus)
    assert parts.heldout[1] == corpus.heldout
    in_shards = [piece for _, text in parts.shards for piece in pieces(text)]
    assert sorted(in_shards) == sorted(chunk.text for chunk in corpus.training)
    assert all(0 < len(text) <= MAX_SHARD for _, text in parts.shards)
    assert len(parts.shards) >= min(len(corpus.training), 64)


def test_large_data_set_has_shards_of_the_largest_size() -> None:
    parts = cut(divide(chunks_of(20_000, size=16)))
    assert {len(text) for _, text in parts.shards[:-1]} == {MAX_SHARD // CHUNK * 16}


def test_shards_do_not_depend_on_the_order_of_the_files() -> None:
    chunks = chunks_of(300)
    corpus = divide(chunks)
    turned = Corpus(tuple(reversed(corpus.training)), corpus.heldout)
    assert cut(turned) == cut(corpus)


def test_own_text_makes_the_shards_of_an_index_wherever_it_is_the_same() -> None:
    chunks = chunks_of(1000)
    parts = cut(divide(chunks))
    index = index_of(parts)
    assert texts_of(chunks, index) == [text for _, text in parts.shards]
    other = [*chunks[:990], *chunks_of(15, seed=2)]  # ten chunks lost, fifteen new ones
    same = [mine == text for mine, (_, text) in zip(texts_of(other, index), parts.shards, strict=True)]
    assert len(same) - 25 <= sum(same) < len(same)


def test_what_an_index_says_comes_back_equal() -> None:
    index = index_of(cut(divide(chunks_of(200))))
    assert decode(encode(index)) == index
    assert decode(encode(Index(index.heldout, ()))) == Index(index.heldout, ())
    assert index.size == sum(entry.size for entry in index.shards)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_index_or_a_bad_one(raw: bytes) -> None:
    try:
        decode(raw)
    except BadIndex as error:
        assert str(error)


ROW = DataEntry(bytes(ID), 5, 1)


def rows(*entries: DataEntry) -> list[list[Any]]:
    return [[entry.shard, entry.size, entry.upto] for entry in entries]


def second(**changes: Any) -> DataEntry:
    return dataclasses.replace(DataEntry(b"\1" * ID, 5, LAST), **changes)


@pytest.mark.parametrize(
    "content",
    [
        [VERSION, rows(ROW, second(size=0))],
        [VERSION, rows(ROW, second(size=-1))],
        [VERSION, rows(ROW, second(size=MAX_SHARD + 1))],
        [VERSION, rows(ROW, second(upto=1))],
        [VERSION, rows(ROW, second(shard=bytes(ID)))],
        [VERSION, rows(ROW, second(shard=b"short"))],
        [VERSION, rows(ROW, second(), second(shard=b"\2" * ID))],
        [VERSION, rows(dataclasses.replace(ROW, size=MAX_HELDOUT + 1))],
        [VERSION, []],
        [VERSION - 1, rows(ROW)],
        [VERSION + 1, rows(ROW)],
        [VERSION, [[bytes(ID), True, 1]]],
        [VERSION, [[bytes(ID), 5]]],
        {"v": 1},
    ],
)
def test_index_that_breaks_a_limit_is_refused(content: Any) -> None:
    with pytest.raises(BadIndex):
        decode(msgpack.packb(content))


def test_index_in_another_encoding_is_refused_because_its_id_would_differ() -> None:
    good = encode(Index(ROW, (second(),)))
    assert decode(good) == Index(ROW, (second(),))
    longer = good.replace(b"\xc4\x20" + bytes(ID), b"\xc5\x00\x20" + bytes(ID))
    assert msgpack.unpackb(longer) == msgpack.unpackb(good)
    with pytest.raises(BadIndex, match="canonical"):
        decode(longer)


def test_index_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset.msgpack, "unpackb", None)
    with pytest.raises(BadIndex, match="at most"):
        decode(bytes(MAX_INDEX + 1))


def test_more_text_than_a_corpus_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_CORPUS", 9)
    assert Index(ROW, (second(),)).size == 5
    with pytest.raises(BadIndex, match="of text"):
        Index(ROW, (second(upto=LAST - 1), second(shard=b"\2" * ID)))


def test_each_node_ranks_the_shards_in_an_order_of_its_own() -> None:
    index = index_of(cut(divide(chunks_of(400))))
    alice, bob = ranking(index, "run", "alice"), ranking(index, "run", "bob")
    assert alice == ranking(index, "run", "alice")
    assert set(alice) == set(bob) == set(index.shards) and alice != bob
    assert ranking(index, "another run", "alice") != alice
    first = min(index.shards, key=lambda entry: hashlib.sha256(b"runalice" + entry.shard).digest())
    assert alice[0] == first


def test_a_node_wants_a_quarter_and_at_least_one() -> None:
    index = index_of(cut(divide(chunks_of(400))))
    assert share(index) == round(len(index.shards) / 4)
    assert share(Index(ROW, (second(),))) == 1
    assert share(Index(ROW, ())) == 0
