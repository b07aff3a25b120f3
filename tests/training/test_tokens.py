"""Tokens: their width, a tokenizer that comes out the same everywhere, and the bytes that each token stands for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from swarmnode.training.tokens import (
    MAX_GROWTH,
    MAX_VOCABULARY,
    Encoder,
    TokenizerError,
    decode,
    dtype_of,
    end_of,
    growth_of,
    size_of,
    spellings,
    train,
)

TEXTS = [f"def f{n}(x):\n    return x + {n}  # größer, 数据\n".encode() * 3 for n in range(40)]
VOCABULARY = 400


def _file(vocab: Any, *added: dict[str, Any], decoder: str = "ByteLevel") -> bytes:
    value = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added, "decoder": {"type": decoder}}
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("vocabulary", "item"), [(2, "|u1"), (256, "|u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4")]
)
def test_items_are_as_wide_as_the_vocabulary_needs_and_little_endian(vocabulary: int, item: str) -> None:
    assert dtype_of(vocabulary).str == item


def test_what_is_encoded_decodes_to_the_same_bytes_without_the_library() -> None:
    raw = train(TEXTS, VOCABULARY)
    documents = [*TEXTS, b"", b"<|endoftext|> is text here", bytes(range(128))]
    encoded = Encoder(raw, VOCABULARY).encode(documents)
    spelled = spellings(raw, VOCABULARY)
    length = np.array([len(spelling) for spelling in spelled])
    for document, tokens in zip(documents, encoded, strict=True):
        assert tokens.dtype == np.dtype("<u2") and int(tokens[-1]) == end_of(raw)
        assert decode(tokens, spelled) == document
        assert length[tokens].sum() == len(document)
    assert sum(map(len, encoded)) < sum(map(len, documents)) / 2


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    raw = train(TEXTS, VOCABULARY)
    (tokens,) = Encoder(raw, VOCABULARY).encode([b"a\xff\xfeb"])
    assert decode(tokens, spellings(raw, VOCABULARY)).decode() == "a\ufffd\ufffdb"


def test_two_processes_train_the_same_tokenizer() -> None:
    program = (
        "import hashlib; from swarmnode.training.tokens import train;"
        "print(hashlib.sha256(train([b'%d words of %d texts ' % (n, n * n) for n in range(300)], 500)).hexdigest())"
    )

    def trained(seed: str, threads: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        return done.stdout.decode()

    assert trained("1", "1") == trained("2", "2")


def test_a_vocabulary_of_bytes_needs_no_tokenizer_and_a_smaller_one_than_the_tokenizers_is_refused() -> None:
    raw = train(TEXTS, VOCABULARY)
    with pytest.raises(TokenizerError, match="257 or more"):
        train(TEXTS, 256)
    with pytest.raises(TokenizerError, match=f"vocabulary = {size_of(raw)} or more"):
        Encoder(raw, size_of(raw) - 1)
    with pytest.raises(TokenizerError, match="vocabulary = 300"):
        spellings(raw, 300)
    assert len(spellings(raw, 70_000)) == 70_000  # models pad their vocabulary
    assert Encoder(raw, 70_000).encode([b"a"])[0].dtype == np.dtype("<u4")


def test_tokens_of_other_families_are_spelled_as_their_decoders_do() -> None:
    end = {"id": 4, "content": "</s>", "special": True}
    own = {"id": 5, "content": "<tab>", "special": False}
    llama = _file({"▁the": 0, "<0x0A>": 1, "s": 2, "é": 3}, end, own, decoder="Sequence")
    assert spellings(llama, 7) == (b" the", b"\n", b"s", "é".encode(), b"", b"<tab>", b"")
    assert end_of(llama) == 4
    unigram = _file([["▁a", -1.0], ["b", -2.0]], decoder="Metaspace")
    assert spellings(unigram, 2) == (b" a", b"b") and end_of(unigram) is None
    assert spellings(_file({"Ġa": 0, "Ċ": 1, "##": 2}), 3) == (b" a", b"\n", b"##")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"model": 1}',
        b'{"model": {"vocab": 3}}',
        b"[" * 100_000,
        _file({"a": -1}),
        _file({"a": True}),
        _file({"a": MAX_VOCABULARY}),
        _file([[]]),
        _file([[3, 0.5]]),
        _file({"a": 0}, {"id": 1}),
    ],
)
def test_what_is_no_tokenizer_is_refused(raw: bytes) -> None:
    for use in (size_of, end_of, lambda raw: spellings(raw, 300), lambda raw: Encoder(raw, 300)):
        with pytest.raises(TokenizerError):
            use(raw)


def _replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


LLAMA = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _replace("▁", String=" ")]}


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        LLAMA,
        _replace("abc", Regex="x*"),
        _replace("", String="a"),
        *({"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": False,
            "lowercase": True,
        },
    ],
    ids=json.dumps,
)
def test_no_letter_grows_by_more_than_is_said(normalizer: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = json.loads(train(TEXTS, VOCABULARY)) | {"normalizer": normalizer}
    made = tokenizers.Tokenizer.from_str(json.dumps(file)).normalizer
    most = growth_of(normalizer)
    assert most <= MAX_GROWTH and Encoder(json.dumps(file).encode(), VOCABULARY).growth == most
    for text in map(chr, (*range(32, 0xD800), *range(0xF900, 0x11000), 0x1D160, 0x1D1BC, 0x2F9F4)):
        assert made is None or len(made.normalize_str(text).encode()) <= most * len(text.encode()), hex(ord(text))


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": 8 * [_replace(10 * "e", String="e")]},
        {"type": "Sequence", "normalizers": 9000 * [_replace(10 * "e", String="e")]},  # a number that nothing prints
        {"type": "Prepend", "prepend": 100 * "\ud800"},  # half of a letter, which UTF-8 does not have
        _replace(100 * "e", Regex="x*"),
        {"type": "Prepend", "prepend": 100 * "e"},
        {"type": "Precompiled", "precompiled_charsmap": b64encode(bytes(4) + 100 * b"e").decode()},
        {"type": "Precompiled", "precompiled_charsmap": "#"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "e"},
        {"type": "Of a later version"},
        "NFC",
    ],
    ids=lambda given: ascii(given)[:60],
)
def test_a_tokenizer_that_would_fill_a_members_memory_is_refused(normalizer: Any) -> None:
    file = json.loads(train(TEXTS, VOCABULARY)) | {"normalizer": normalizer}
    with pytest.raises(TokenizerError, match=r"the tokenizer (can make a text|changes texts)"):
        Encoder(json.dumps(file).encode(), VOCABULARY)


@pytest.mark.parametrize("table", [b"", b"\x05", b"\x08\0\0\0abc", b"\xff\xff\xff\xff"])
def test_a_table_that_makes_the_library_panic_is_refused(table: bytes) -> None:
    """What it then raises is no Exception."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()}
    file = json.loads(train(TEXTS, VOCABULARY)) | {"normalizer": normalizer}
    with pytest.raises(TokenizerError, match="cannot be used by tokenizers"):
        Encoder(json.dumps(file).encode(), VOCABULARY).encode([b"a"])


def test_sentencepieces_own_table_is_read() -> None:
    trie = b"\x04\0\0\0" + b"trie"
    assert growth_of({"type": "Precompiled", "precompiled_charsmap": b64encode(trie + b"a\0bcd\0ef").decode()}) == 3
