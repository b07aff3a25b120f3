"""Records: small signed facts, each written by one author, that every node of a run holds.

    id        = sha-256 of the canonical payload {v, run, author, key, hlc, ttl, value}
    signature = Ed25519 over a domain tag and the payload; beside it, so that signing again makes no new id
    expiry    = time of hlc + ttl, where ttl is fixed by the kind: a record never outlives what replaced it

A record is valid or not by itself: neither the clock nor the state of the node that checks it matters. A value of
None is a tombstone: the author deleted the key, and says so for as long as the value itself would have lived.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.crdt.hlc import MAX_STAMP, time_of

VERSION = 1
MAX_KEY = 128  # characters
MAX_AUTHOR = 128  # characters; a libp2p peer id of an Ed25519 key has 52
SIGNATURE_SIZE = 64  # bytes, Ed25519
_TAG = b"swarmnode/record/1\0"  # no other kind of message that a node signs begins so
_FIELDS = ("v", "run", "author", "key", "hlc", "ttl", "value")
_RUN = re.compile(r"[0-9a-f]{64}")
_AUTHOR = re.compile(r"[1-9A-HJ-NP-Za-km-z]+")  # base58

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]  # (author, message, signature)


class InvalidRecord(ValueError):
    """A record that no correct node makes. The message says why."""


@dataclass(frozen=True)
class Kind:
    """What all records of a kind have in common. Its keys are its name, "/" and more; with one slot, just its name."""

    name: str
    ttl: int  # ms that a record lives, and a tombstone as well
    slots: int  # keys that one author may hold at a time
    max_size: int  # bytes of payload


# A member renews its lease three times before it runs out: the loss of one renewal, or of two, removes nobody.
KINDS: dict[str, Kind] = {k.name: k for k in (Kind("member", ttl=60_000, slots=1, max_size=1024),)}


@dataclass(frozen=True)
class Record:
    """One signed fact.

    Made by `write` or, from bytes of a peer, by `open_record`; fields as in the module's first lines.
    """

    v: int
    run: str  # run id, 64 hex digits
    author: str  # peer id
    key: str
    hlc: int  # stamp, see `hlc`
    ttl: int  # ms
    value: Value
    signature: bytes = field(compare=False)

    @property
    def kind(self) -> str:
        return self.key.partition("/")[0]

    @property
    def tombstone(self) -> bool:
        return self.value is None

    @property
    def expiry(self) -> int:
        """The first ms at which the record is gone."""
        return time_of(self.hlc) + self.ttl

    @cached_property
    def payload(self) -> bytes:
        """Canonical bytes of everything but the signature. Raises EncodingError where there are none."""
        return encoding.encode({name: getattr(self, name) for name in _FIELDS})

    @cached_property
    def id(self) -> bytes:
        """sha-256 of the payload, 32 bytes."""
        return hashlib.sha256(self.payload).digest()

    @property
    def order(self) -> tuple[int, bytes]:
        """Of two records under one key, the one that is greater here replaces the other."""
        return (self.hlc, self.id)


def write(run: str, author: str, key: str, value: Value, *, hlc: int, sign: Sign) -> Record:
    """Make and sign a record of a known kind; `value` None deletes the key. Raises InvalidRecord."""
    kind = KINDS.get(key.partition("/")[0])
    if kind is None:
        raise InvalidRecord(f"{key!r} is of no known kind; known kinds: {', '.join(KINDS)}")
    unsigned = Record(VERSION, run, author, key, hlc, kind.ttl, value, b"")
    _check_payload(unsigned)
    return Record(VERSION, run, author, key, hlc, kind.ttl, value, sign(_TAG + unsigned.payload))


def check(record: Record, verify: Verify) -> None:
    """Raises InvalidRecord unless `record` is well-formed, of a known kind and its ttl, and signed by its author."""
    _check_payload(record)
    if len(record.signature) != SIGNATURE_SIZE or not verify(record.author, _TAG + record.payload, record.signature):
        raise InvalidRecord(f"{record.key!r} is not signed by its author {record.author}")


def seal(record: Record) -> bytes:
    """The bytes of a record and its signature, for `open_record`."""
    return encoding.encode((record.payload, record.signature), max_size=encoding.MAX_SIZE + SIGNATURE_SIZE + 16)


def open_record(raw: bytes, verify: Verify) -> Record:
    """The record in bytes from a peer or from disk, checked. Raises InvalidRecord."""
    try:
        sealed = encoding.decode(raw, max_size=encoding.MAX_SIZE + SIGNATURE_SIZE + 16)
        match sealed:
            case (bytes() as payload, bytes() as signature):
                fields = encoding.decode(payload)
            case _:
                raise InvalidRecord("a record is a pair of payload and signature")
    except EncodingError as error:
        raise InvalidRecord(f"record is malformed: {error}") from error
    if not isinstance(fields, Mapping) or len(fields) != len(_FIELDS):
        raise InvalidRecord(f"a payload has the fields {', '.join(_FIELDS)}")
    match fields:
        case {
            "v": int() as v,
            "run": str() as run,
            "author": str() as author,
            "key": str() as key,
            "hlc": int() as hlc,
            "ttl": int() as ttl,
            "value": value,
        }:
            record = Record(v, run, author, key, hlc, ttl, value, signature)
        case _:
            raise InvalidRecord("payload lacks a field of a record, or one is of another type")
    check(record, verify)
    return record


def _check_payload(record: Record) -> None:
    """Raises InvalidRecord for what can be told without the signature."""
    if isinstance(record.v, bool) or record.v != VERSION:
        raise InvalidRecord(f"record of version {record.v}; this node knows {VERSION}")
    if not _RUN.fullmatch(record.run):
        raise InvalidRecord("run is not a run id of 64 hex digits")
    if len(record.author) > MAX_AUTHOR or not _AUTHOR.fullmatch(record.author):
        raise InvalidRecord("author is not a peer id")
    if len(record.key) > MAX_KEY:
        raise InvalidRecord(f"key of {len(record.key)} characters; at most {MAX_KEY}")
    kind = KINDS.get(record.kind)
    if kind is None:
        raise InvalidRecord(f"{record.key!r} is of no known kind; known kinds: {', '.join(KINDS)}")
    if kind.slots == 1 and record.key != kind.name:
        raise InvalidRecord(f"key {record.key!r} is not {kind.name!r}, the only one of its kind")
    if isinstance(record.ttl, bool) or record.ttl != kind.ttl:
        raise InvalidRecord(f"{record.key!r} has ttl {record.ttl} ms; its kind has {kind.ttl}")
    if isinstance(record.hlc, bool) or not 0 <= record.hlc <= MAX_STAMP:
        raise InvalidRecord(f"{record.hlc} is no stamp")
    try:
        size = len(record.payload)
    except EncodingError as error:
        raise InvalidRecord(f"{record.key!r}: {error}") from error
    if size > kind.max_size:
        raise InvalidRecord(f"{record.key!r} takes {size} bytes; at most {kind.max_size} for its kind")
