"""What a run's shards hold: tokens, and the tokenizer that makes them from text.

    dtype_of(50_304)                                  # little-endian items of 2 bytes
    raw = train(sample, vocabulary=8192)              # a tokenizer.json, the same on every machine
    Encoder(raw, vocabulary=8192).encode([b"one document", b"another one"])
    decode(tokens, spellings(raw, vocabulary=8192))   # b"one document"

In a run without a tokenizer a token is a byte of text. Else it has a byte-level BPE (Sennrich et al., 1508.07909, on
bytes as in GPT-2), or the tokenizer.json of another model. Only who makes shards needs the library `tokenizers`; what
trains reads the file by itself. A document ends with the tokenizer's token for that, where it has one.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES = 256  # the vocabulary of text without a tokenizer
MAX_VOCABULARY = 1 << 20
MAX_TOKENIZER = 64 << 20  # bytes of a tokenizer.json; those of models with 256 k tokens have 35 MB
# Of Unicode's forms as in its FAQ on normalization; BertNormalizer: NFD, lower case, and spaces around Chinese.
GROWTHS = {"Nmt": 1, "Strip": 1, "StripAccents": 1, "Lowercase": 2, "ByteLevel": 2, "NFC": 3, "NFD": 3}
GROWTHS |= {"BertNormalizer": 10, "NFKC": 11, "NFKD": 11}
MAX_GROWTH = 64  # times as long as a text is, what becomes of it before it is cut into tokens
END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")  # GPT-2, Llama 3 and 2, Gemma, …
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(BYTES) if byte not in _SHOWN]
# The byte behind each letter of a byte-level token (`bytes_to_unicode` of GPT-2's encoder.py).
LETTERS = {chr(byte): byte for byte in _SHOWN} | {chr(BYTES + n): byte for n, byte in enumerate(_HIDDEN)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of models by SentencePiece, for what has no token


class CorpusError(Exception):
    """The corpus cannot be used. The message names the path and what to do."""


class TokenizerError(CorpusError):
    """The tokenizer cannot be used. The message says why and what to do."""


def dtype_of(vocabulary: int) -> np.dtype[Any]:
    """The item of a shard: unsigned, little-endian, of 1, 2 or 4 bytes."""
    return np.dtype("<u1" if vocabulary <= BYTES else "<u2" if vocabulary <= 1 << 16 else "<u4")


def train(sample: Iterable[bytes], vocabulary: int) -> bytes:
    """A tokenizer.json with at most `vocabulary` tokens, a function of the sample alone. Raises TokenizerError."""
    import tokenizers

    if vocabulary <= BYTES:
        raise TokenizerError(
            f"[data] vocabulary = {vocabulary} is too small to train a tokenizer; it needs 257 or more"
        )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((text.decode(errors="replace") for text in sample), trainer)
    return made.to_str().encode()


class Encoder:
    """A tokenizer.json that makes tokens below `vocabulary`. Raises TokenizerError."""

    def __init__(self, raw: bytes, vocabulary: int) -> None:
        size, self.growth = size_of(raw), growth_of(_parsed(raw).get("normalizer"))
        if self.growth > MAX_GROWTH:
            raise TokenizerError(
                f"the tokenizer can make a text {self.growth:.3g} times as long before it cuts it, and {MAX_GROWTH} "
                "times are allowed: it would fill the memory of everybody who takes part"
            )
        if size > vocabulary:
            raise TokenizerError(f"the tokenizer has {size} tokens; set [data] vocabulary = {size} or more")
        with _failing():
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # the name of a special token in a text is text
        self._dtype = dtype_of(vocabulary)
        end = end_of(raw)
        self._end = [] if end is None else [end]

    def encode(self, documents: Sequence[bytes]) -> list[NDArray[Any]]:
        """The tokens of each document, and the end of it; bytes that are no UTF-8 become U+FFFD.

        Raises TokenizerError.
        """
        texts = [document.decode(errors="replace") for document in documents]
        with _failing():
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids + self._end, dtype=self._dtype) for each in encoded]


def size_of(raw: bytes) -> int:
    """One more than the greatest id of a tokenizer.json. Raises TokenizerError."""
    return max(_tokens(_parsed(raw)), default=-1) + 1


def growth_of(normalizer: Any) -> float:
    """How many times as many bytes it can make of a text at the most. Raises TokenizerError where nobody knows.

    A regular expression may match before each byte and behind it.
    """
    match normalizer:
        case None:
            return 1
        case {"type": str() as kind} if kind in GROWTHS:
            return GROWTHS[kind]
        case {"type": "Prepend", "prepend": str() as text}:
            return 1.0 + len(text.encode(errors="replace"))
        case {"type": "Replace", "pattern": {"Regex": _}, "content": str() as text}:
            return 1.0 + 2 * len(text.encode(errors="replace"))
        case {"type": "Replace", "pattern": {"String": str() as found}, "content": str() as text} if found:
            return max(1.0, len(text.encode(errors="replace")) / len(found.encode(errors="replace")))
        case {"type": "Precompiled", "precompiled_charsmap": str() as table}:  # SentencePiece's: a trie, then strings
            with suppress(ValueError):
                strings = b64decode(table, validate=True)
                return max(1, *map(len, strings[4 + int.from_bytes(strings[:4], "little") :].split(b"\0")))
        case {"type": "Sequence", "normalizers": list() as steps}:
            with suppress(RecursionError):
                return math.prod(map(growth_of, steps), start=1.0)
    raise TokenizerError("the tokenizer changes texts before it cuts them in a way that this version does not know")


def end_of(raw: bytes) -> int | None:
    """The token that ends a document; None where the tokenizer has none of those that are known."""
    special = {content: id for id, (content, added) in _tokens(_parsed(raw)).items() if added}
    return next((special[name] for name in ENDS if name in special), None)


def spellings(raw: bytes, vocabulary: int) -> tuple[bytes, ...]:
    """The bytes of text that each token stands for: none for special tokens and ids without a token.

    Raises TokenizerError.
    """
    value = _parsed(raw)
    tokens = _tokens(value)
    if max(tokens, default=-1) >= vocabulary:
        raise TokenizerError(f"the tokenizer has the token {max(tokens)}: raise [data] vocabulary = {vocabulary}")
    special = {token["id"] for token in value.get("added_tokens") or () if token.get("special")}
    kinds = json.dumps([value.get("decoder"), value.get("pre_tokenizer")])
    by_byte = LETTERS if '"ByteLevel"' in kinds else {}
    found = [b""] * vocabulary
    for id, (content, added) in tokens.items():
        if id in special:
            continue
        letters = [by_byte.get(letter) for letter in content]
        if by_byte and not added and None not in letters:
            found[id] = bytes(letter for letter in letters if letter is not None)
        elif one := _BYTE_TOKEN.fullmatch(content):
            found[id] = bytes.fromhex(one[1])
        else:
            found[id] = content.replace("▁", " ").removeprefix("##").encode(errors="replace")
    return tuple(found)


def decode(tokens: Iterable[int], spelled: Sequence[bytes]) -> bytes:
    return b"".join(spelled[token] for token in tokens)


@contextmanager
def _failing() -> Iterator[None]:
    """Whatever the library raises, as a TokenizerError."""
    try:
        yield
    except BaseException as error:  # a panic in its Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"the tokenizer cannot be used by tokenizers: {error}") from error


def _parsed(raw: bytes) -> dict[str, Any]:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        value = json.loads(raw)
        if len(raw) <= MAX_TOKENIZER and isinstance(value["model"]["vocab"], dict | list):
            return dict(value)
    raise TokenizerError("it is no tokenizer.json as the library tokenizers writes them")


def _tokens(value: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """By id: how the file writes a token, and whether it was added to the model's. Raises TokenizerError."""
    listed = value["model"]["vocab"]
    try:
        if isinstance(listed, dict):
            found = {id: (content, False) for content, id in listed.items()}
        else:  # [token, score]
            found = {id: (row[0], False) for id, row in enumerate(listed)}
        found |= {token["id"]: (token["content"], True) for token in value.get("added_tokens") or ()}
    except (TypeError, KeyError, IndexError, AttributeError):
        found = {-1: ("", False)}
    if all(type(id) is int and 0 <= id < MAX_VOCABULARY and isinstance(text, str) for id, (text, _) in found.items()):
        return found
    raise TokenizerError(f"the tokenizer has tokens that are none; ids are 0 to {MAX_VOCABULARY - 1}")
