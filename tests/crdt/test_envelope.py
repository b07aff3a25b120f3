"""The signed envelope: one form for everything that nodes sign, and no signature that passes for another purpose's."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError
from swarmnode.crdt.envelope import SEAL, Domain, Envelope, InvalidEnvelope, unsealed

TRIED = Domain("tried", 3, 1 << 17)


def sign(message: bytes) -> bytes:
    """Stands for Ann's Ed25519."""
    return hashlib.sha512(b"Ann" + message).digest()


def verify(author: str, message: bytes, signature: bytes) -> bool:
    return hashlib.sha512(author.encode() + message).digest() == signature


def test_what_is_sealed_opens_to_the_same_value() -> None:
    value = {"b": (1, 2.5), "a": b"\0"}
    envelope = TRIED.seal(value, sign, "run")
    assert TRIED.open(envelope, "Ann", verify, "run") == value
    assert TRIED.message(envelope.payload, "run") == b"swarmnode/tried/3\0run\0" + encoding.encode(value)


@pytest.mark.parametrize(
    ("domain", "author", "about"),
    [
        (Domain("other", 3, 1 << 17), "Ann", "run"),
        (Domain("tried", 4, 1 << 17), "Ann", "run"),
        (TRIED, "Bea", "run"),
        (TRIED, "Ann", "another run"),
        (TRIED, "Ann", ""),
    ],
)
def test_a_signature_is_for_one_purpose_version_author_and_thing(domain: Domain, author: str, about: str) -> None:
    envelope = TRIED.seal(1, sign, "run")
    with pytest.raises(InvalidEnvelope, match=f"not signed by {author}") as refused:
        domain.open(envelope, author, verify, about)
    assert refused.value.forged


def test_a_payload_that_is_not_canonical_or_too_large_is_refused_before_its_signature_is_verified() -> None:
    def never(author: str, message: bytes, signature: bytes) -> bool:
        raise AssertionError("verified")

    for payload in (b"", b"\xcd\x00\x01", b"\x82\xa1b\x01\xa1a\x01", encoding.encode(bytes(1 << 17), max_size=1 << 18)):
        with pytest.raises(InvalidEnvelope, match="malformed") as refused:
            TRIED.open(Envelope(payload, bytes(64)), "Ann", never)
        assert not refused.value.forged
    with pytest.raises(EncodingError, match="at most"):
        TRIED.seal(bytes(1 << 17), sign)
    with pytest.raises(InvalidEnvelope, match="not signed"):
        TRIED.open(Envelope(b"\x01", b"short"), "Ann", never)


@given(st.integers(0, 70_000), st.integers(0, 300))
def test_sealed_bytes_are_the_canonical_pair_and_open_to_it(size: int, more: int) -> None:
    envelope = Envelope(bytes(size), bytes(range(64)))
    assert envelope.sealed == encoding.encode(envelope, max_size=1 << 17)
    assert len(envelope.sealed) <= size + SEAL
    assert unsealed(envelope.sealed, max_size=size) == envelope
    assert unsealed(envelope.sealed, max_size=size - 1) is None
    assert unsealed(envelope.sealed + bytes(more + 1), max_size=1 << 17) is None
