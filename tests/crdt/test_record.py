"""Records: valid by themselves, signed under their own tag, and named by their payload alone."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.crdt import encoding
from swarmnode.crdt.envelope import unsealed
from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import EVIDENCE, KINDS, MAX_RECORD
from swarmnode.crdt.record import InvalidRecord, Record, open_element, write

RUN = "ab" * 32
AUTHOR = "12D3KooWAuthor"
NOW = 1_700_000_000_000


def sign(author: str, message: bytes) -> bytes:
    """Stands for Ed25519: 64 bytes that depend on author and message."""
    return hashlib.sha512(author.encode() + message).digest()


def verify(author: str, message: bytes, signature: bytes) -> bool:
    return sign(author, message) == signature


@pytest.fixture
def member() -> Record:
    return write(RUN, AUTHOR, "member", {"role": "train"}, hlc=stamp_at(NOW), sign=lambda m: sign(AUTHOR, m))


def test_a_sealed_record_opens_to_an_equal_one(member: Record) -> None:
    opened = open_element(member.sealed, verify)
    assert opened == member and opened.id == member.id and opened.signature == member.signature


def test_the_id_names_the_payload_and_not_the_signature(member: Record) -> None:
    assert dataclasses.replace(member, signature=b"other").id == member.id
    assert dataclasses.replace(member, hlc=member.hlc + 1).id != member.id
    assert member.id.hex() == "59123ca29eec9225336039364ed37125d8abb1901146601421ec262dabb160a5"


def test_real_ed25519_signatures_check_under_the_record_tag() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))

    def verify_ed25519(author: str, message: bytes, signature: bytes) -> bool:
        assert message.startswith(b"swarmnode/record/1\0")
        try:
            key.public_key().verify(signature, message)
        except InvalidSignature:
            return False
        return author == AUTHOR

    record = write(RUN, AUTHOR, "member", 1, hlc=stamp_at(NOW), sign=key.sign)
    open_element(record.sealed, verify_ed25519)
    with pytest.raises(InvalidRecord, match="not signed by its author"):
        open_element(dataclasses.replace(record, signature=key.sign(record.payload)).sealed, verify_ed25519)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": True},
        {"run": "ab"},
        {"run": "AB" * 32},
        {"author": ""},
        {"author": "not base58 0OIl"},
        {"author": "1" * 129},
        {"key": "unknown"},
        {"key": "evidence/commit", "ttl": EVIDENCE.ttl},
        {"key": "note", "ttl": KINDS["note"].ttl},
        {"key": "note/", "ttl": KINDS["note"].ttl},
        {"key": "note/two words", "ttl": KINDS["note"].ttl},
        {"key": "note/\x1b[2J", "ttl": KINDS["note"].ttl},
        {"key": "commit/1/0", "ttl": KINDS["commit"].ttl},
        {"key": "commit/00000001", "ttl": KINDS["commit"].ttl},
        {"key": "commit/00000001/0/1", "ttl": KINDS["commit"].ttl},
        {"key": "commit/00000001/0", "ttl": KINDS["commit"].ttl, "value": None},
        {"key": "member/2"},
        {"key": "member" + "r" * 200},
        {"ttl": 60_001},
        {"ttl": 1},
        {"hlc": -1},
        {"hlc": 2**64},
        {"value": float("nan")},
        {"value": b"x" * 1024},
    ],
)
def test_what_no_correct_node_writes_is_invalid_even_when_signed(change: dict[str, object], member: Record) -> None:
    changed = dataclasses.replace(member, **change)  # type: ignore[arg-type]
    with contextlib.suppress(encoding.EncodingError):
        signature = sign(changed.author, b"swarmnode/record/1\0" + changed.payload)
        changed = dataclasses.replace(changed, signature=signature)
    with pytest.raises((InvalidRecord, encoding.EncodingError)):
        open_element(changed.sealed, verify)


def test_a_changed_field_breaks_the_signature(member: Record) -> None:
    with pytest.raises(InvalidRecord, match="not signed"):
        open_element(dataclasses.replace(member, value={"role": "watch"}).sealed, verify)


def test_malformed_bytes_never_open(member: Record) -> None:
    payload = encoding.decode(member.payload)
    assert isinstance(payload, dict)
    sealed = member.sealed
    for raw in (
        b"",
        sealed[:-1],
        sealed + b"\0",
        encoding.encode(member.payload),
        encoding.encode((member.payload, "text")),
        encoding.encode((b"\xff", bytes(64))),
        encoding.encode((encoding.encode({**payload, "more": 1}), bytes(64))),
        encoding.encode((encoding.encode({**payload, "hlc": "now"}), bytes(64))),
        encoding.encode((encoding.encode({k: payload[k] for k in payload if k != "ttl"}), bytes(64))),
    ):
        with pytest.raises(InvalidRecord):
            open_element(raw, verify)


@pytest.mark.parametrize("size", [0, 1, 70, 255, 256, 257, MAX_RECORD])
def test_sealed_bytes_are_taken_apart_exactly_where_decoding_does(size: int) -> None:
    draw = random.Random(size)
    pair = (draw.randbytes(size), draw.randbytes(64))
    raw = encoding.encode(pair, max_size=2 * MAX_RECORD)
    assert unsealed(raw, max_size=MAX_RECORD) == pair
    wider = b"\x92\xc5" + size.to_bytes(2, "big") + raw[2 + (1 if size < 256 else 2) :]  # a length that is not shortest
    changed = [raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :] for at in (0, 1, 2, 3, 4) for bit in (1, 2, 64, 128)]
    changed += [raw[:-65] + bytes([byte]) + raw[-64:] for byte in range(256)]
    for other in (wider, raw[:-1], raw + b"\0", raw[1:], raw[:66], b"", *changed):
        try:
            decoded = encoding.decode(other, max_size=2 * MAX_RECORD)
        except encoding.EncodingError:
            decoded = None
        assert unsealed(other, max_size=MAX_RECORD) in (None, decoded)


def test_writing_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(InvalidRecord, match="known kinds: member"):
        write(RUN, AUTHOR, "memebr", 1, hlc=0, sign=lambda m: bytes(64))
