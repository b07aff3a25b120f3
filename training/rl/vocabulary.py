"""Text to token ids and back, torch-free: two vocabularies that every node has, known by an id.

    ids = DIGITS.encode("40")                             # [4, 0]
    DIGITS.decode([*ids, DIGITS.end])                     # '40': the end token is no text

Whoever trains on a rollout must know where the answer ended, so the end token is part of a completion and is trained
(the public SAPO code strips it). Policies with another tokenizer send their answers as BYTES, that is as text, and
whoever receives text encodes it anew: `translate`. Which tokenizer wrote it stands beside it: `bytes/hf-1f0c…`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from swarmnode.training.rl.tasks import ALPHABET


class Vocabulary(Protocol):
    """Token ids 0 to size - 1, of which `end` ends an answer."""

    id: str
    size: int
    end: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end token. Raises ValueError for what cannot be written."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text before the first end token. Never raises for ids in range."""

    def prompt(self, text: str) -> list[int]:
        """Ids of a question, as a policy is asked it. Raises ValueError for what cannot be written."""
        return self.encode(text)


class Characters(Vocabulary):
    """One token a character of an alphabet, and the end token."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.id = "characters-" + hashlib.sha256(alphabet.encode()).hexdigest()[:16]
        self.size, self.end = len(alphabet) + 1, len(alphabet)

    def encode(self, text: str) -> list[int]:
        ids = [self.alphabet.find(character) for character in text]
        if -1 in ids:
            raise ValueError(f"{text[ids.index(-1)]!r} is not in the alphabet {self.alphabet!r}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[i] for i in before(ids, self.end))


class Bytes(Vocabulary):
    """UTF-8, a token a byte, and the end token 256. What is no UTF-8 decodes to replacement characters."""

    id, size, end = "bytes", 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(before(ids, self.end)).decode("utf-8", errors="replace")


DIGITS = Characters(ALPHABET)
BYTES = Bytes()
KNOWN: dict[str, Vocabulary] = {vocabulary.id: vocabulary for vocabulary in (DIGITS, BYTES)}
COMMON = frozenset(KNOWN)  # every node knows these


def register(vocabulary: Vocabulary) -> None:
    """Make a vocabulary known to this process; another one knows it only if it does the same."""
    KNOWN[vocabulary.id] = vocabulary


def known(id: str) -> Vocabulary | None:
    """The vocabulary of that id, for text by an unknown one BYTES; None where nobody here knows it."""
    return KNOWN.get(id) or KNOWN.get(id.partition("/")[0])


def before(ids: Sequence[int], end: int) -> Sequence[int]:
    """The ids before the first that is `end`."""
    return ids[: ids.index(end)] if end in ids else ids


def translate(ids: Sequence[int], source: Vocabulary, target: Vocabulary) -> list[int]:
    """Ids of the same text in another vocabulary, ended where they were. Raises ValueError for what it cannot write."""
    if source.id == target.id:
        return list(ids)
    return target.encode(source.decode(ids)) + [target.end] * (source.end in ids)
