"""A data set: every document in exactly one shard, the same shards for the same text, no index that breaks a limit."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training import dataset
from swarmnode.training.dataset import (
    ID,
    LAST,
    LEAST_PIECE,
    MAX_HELDOUT,
    MAX_INDEX,
    MAX_SHARD,
    MAX_SHARDS,
    MOST_PIECE,
    USUAL_SHARD,
    VERSION,
    BadIndex,
    DataEntry,
    Index,
    Recipe,
    Shuffled,
    check_enough,
    cut,
    decode,
    encode,
    hash_of,
    piece_for,
    ranking,
    remade,
    sample_of,
    shard_size,
    share,
)
from swarmnode.training.documents import Meter
from swarmnode.training.tokens import CorpusError, spellings, train
from swarmnode.training.tokens import decode as text_of

SIZE = 1000  # bytes of a document
BYTEWISE = Recipe(seed=0, piece=LEAST_PIECE, vocabulary=256)


def documents_of(count: int, seed: int = 1) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(SIZE) for _ in range(count)]


def shuffled_of(documents: Iterable[bytes], folder: Path, seed: int = 0, expected: int = 1) -> Shuffled:
    folder.mkdir(exist_ok=True)
    shuffled = Shuffled(folder, seed, expected=expected)
    for document in documents:
        shuffled.put(document)
    return shuffled


def cut_of(documents: Iterable[bytes], folder: Path, recipe: Recipe = BYTEWISE, **how: int) -> list[tuple[int, bytes]]:
    return list(cut(shuffled_of(documents, folder, recipe.seed, **how), recipe, Meter()))


def index_of(parts: list[tuple[int, bytes]]) -> Index:
    heldout, *shards = (DataEntry(hashlib.sha256(text).digest(), len(text), upto) for upto, text in parts)
    return Index(heldout, tuple(shards))


def pieces(text: bytes) -> list[bytes]:
    return [text[at : at + SIZE] for at in range(0, len(text), SIZE)]


@pytest.mark.parametrize("count", [8, 37, 64, 100, 1000])
def test_every_document_is_held_out_or_in_one_shard_in_the_order_of_hashes(tmp_path: Path, count: int) -> None:
    documents = documents_of(count)
    (_, heldout), *shards = cut_of(documents, tmp_path)
    ordered = sorted(documents, key=lambda document: hash_of(document, 0))
    assert pieces(heldout) == ordered[: max(1, count // 10)]
    assert [piece for _, text in shards for piece in pieces(text)] == ordered[max(1, count // 10) :]
    assert len(shards) >= min(count - len(pieces(heldout)), 50) and shards[-1][0] == LAST
    assert not list(tmp_path.iterdir())  # what was sorted is gone


def test_shards_depend_neither_on_the_order_of_the_files_nor_on_how_many_buckets_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = documents_of(300)
    one = cut_of(documents, tmp_path)
    monkeypatch.setattr(dataset, "BUFFERS", 5 * SIZE)  # so that they are written in between
    assert cut_of(reversed(documents), tmp_path, expected=1 << 30) == one
    assert cut_of(documents, tmp_path, expected=0) == one


def test_another_seed_holds_out_other_documents_and_shuffles_otherwise(tmp_path: Path) -> None:
    documents = documents_of(100)
    one = cut_of(documents, tmp_path)
    other = cut_of(documents, tmp_path, dataclasses.replace(BYTEWISE, seed=7))
    assert len(one[0][1]) == len(other[0][1]) and not set(pieces(one[0][1])) >= set(pieces(other[0][1]))


def test_a_document_that_occurs_twice_counts_once_and_nothing_but_one_is_refused(tmp_path: Path) -> None:
    parts = cut_of([*documents_of(50), *documents_of(50)], tmp_path)
    assert sum(len(text) for _, text in parts) == 50 * SIZE
    with pytest.raises(CorpusError, match="too few different"):
        cut_of([b"a", b"b", *[b"x" * SIZE] * 50], tmp_path)
    with pytest.raises(CorpusError, match="no text"):
        check_enough(shuffled_of([], tmp_path), "corpus")
    with pytest.raises(CorpusError, match="at least 8"):
        check_enough(shuffled_of([b"a"] * 7, tmp_path), "corpus")


def test_own_text_makes_the_shards_of_an_index_wherever_it_is_the_same(tmp_path: Path) -> None:
    documents = documents_of(1000)
    parts = cut_of(documents, tmp_path)
    index = index_of(parts)
    assert list(remade(shuffled_of(documents, tmp_path), index, BYTEWISE)) == [text for _, text in parts]
    other = [*documents[:990], *documents_of(15, seed=2)]  # ten lost, fifteen new ones
    made = set(remade(shuffled_of(other, tmp_path), index, BYTEWISE))
    assert len(parts) - 26 <= sum(text in made for _, text in parts) < len(parts)


def test_shards_hold_the_tokens_of_the_same_documents_and_stand_for_all_of_their_text(tmp_path: Path) -> None:
    documents = [f"document {n} of many, {'word ' * (n % 7)}\n".encode() for n in range(500)]
    raw = train(sample_of(shuffled_of(documents, tmp_path), 4000), 400)
    recipe = dataclasses.replace(BYTEWISE, vocabulary=400, tokenizer=raw)
    parts = cut_of(documents, tmp_path, recipe)
    spelled = spellings(raw, 400)
    texts = [text_of(np.frombuffer(content, "<u2"), spelled) for _, content in parts]
    assert texts == [*remade(shuffled_of(documents, tmp_path), index_of(parts), BYTEWISE)]
    assert sum(map(len, texts)) == sum(map(len, documents)) > sum(len(content) for _, content in parts)
    assert list(remade(shuffled_of(documents, tmp_path), index_of(parts), recipe)) == [text for _, text in parts]


def test_fifty_gigabytes_fit_an_index_and_a_small_corpus_has_many_shards() -> None:
    for total in (50 << 30, 50 * 10**9, 200 << 30, 512 << 30):
        size = shard_size(total)
        assert total / size <= MAX_SHARDS / 2 and size <= MAX_SHARD  # shards that are half full would fit as well
    assert shard_size(50 << 30) <= 8 << 20
    assert shard_size(3 << 30) == USUAL_SHARD and shard_size(640_000) == 10_000
    with pytest.raises(CorpusError, match="allowed"):
        shard_size(600 << 30)
    row = len(encode(Index(ROW, (second(size=MAX_SHARD, upto=LAST),)))) - len(encode(Index(ROW, ())))
    assert len(encode(Index(ROW, ()))) + row * MAX_SHARDS + 8 <= MAX_INDEX


def test_documents_of_a_small_corpus_are_cut_short_so_that_there_are_many() -> None:
    assert piece_for(1) == piece_for(8 << 20) == LEAST_PIECE
    assert piece_for(0) == piece_for(1 << 30) == MOST_PIECE  # 0: nobody knows, as of the rows of a data set
    for size in range(1 << 20, 1 << 28, 3_333_333):
        assert piece_for(size) == LEAST_PIECE or size // piece_for(size) >= 1000


def test_what_an_index_says_comes_back_equal(tmp_path: Path) -> None:
    index = dataclasses.replace(index_of(cut_of(documents_of(200), tmp_path)), seed=2**53, piece=MOST_PIECE)
    assert decode(encode(index)) == index
    assert decode(encode(Index(index.heldout, ()))) == Index(index.heldout, ())


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


def packed(*entries: DataEntry, version: int = VERSION, seed: Any = 0, piece: Any = LEAST_PIECE) -> list[Any]:
    return [version, seed, piece, rows(*entries)]


@pytest.mark.parametrize(
    "content",
    [
        packed(ROW, second(size=0)),
        packed(ROW, second(size=-1)),
        packed(ROW, second(size=MAX_SHARD + 1)),
        packed(ROW, second(upto=1)),
        packed(ROW, second(shard=bytes(ID))),
        packed(ROW, second(shard=b"short")),
        packed(ROW, second(), second(shard=b"\2" * ID)),
        packed(dataclasses.replace(ROW, size=MAX_HELDOUT + 1)),
        packed(),
        packed(ROW, seed=-1),
        packed(ROW, seed=True),
        packed(ROW, piece=1),
        packed(ROW, piece=MOST_PIECE + 1),
        packed(ROW, piece="long"),
        packed(ROW, version=VERSION - 1),
        packed(ROW, version=VERSION + 1),
        [VERSION, rows(ROW)],
        [VERSION, 0, LEAST_PIECE, [[bytes(ID), True, 1]]],
        [VERSION, 0, LEAST_PIECE, [[bytes(ID), 5]]],
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


def test_each_node_ranks_the_shards_in_an_order_of_its_own(tmp_path: Path) -> None:
    index = index_of(cut_of(documents_of(400), tmp_path))
    alice, bob = ranking(index, "run", "alice"), ranking(index, "run", "bob")
    assert alice == ranking(index, "run", "alice")
    assert set(alice) == set(bob) == set(index.shards) and alice != bob
    assert ranking(index, "another run", "alice") != alice
    first = min(index.shards, key=lambda entry: hashlib.sha256(b"runalice" + entry.shard).digest())
    assert alice[0] == first


def test_a_node_wants_a_quarter_and_at_least_one(tmp_path: Path) -> None:
    index = index_of(cut_of(documents_of(400), tmp_path))
    assert share(index) == round(len(index.shards) / 4)
    assert share(Index(ROW, (second(),))) == 1
    assert share(Index(ROW, ())) == 0
