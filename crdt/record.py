"""Elements: what the replicated state holds. A `Record` its author signed; `Evidence` nobody did, it proves itself.

A record is a small signed fact, written by one author, that every node of a run holds:

    id        = sha-256 of the canonical payload {v, run, author, key, hlc, ttl, value}
    signature = as in every envelope, see `envelope`; signing again makes no new id
    expiry    = time of hlc + ttl, where ttl is fixed by the kind: a record never outlives what replaced it
    rank      = hlc + ttl as a stamp, u64 big-endian ‖ id: 40 bytes, by which an element is known to stores and peers

A record is valid or not by itself: neither the clock nor the state of the node that checks it matters. A value of
None is a tombstone: the author deleted the key, and says so for as long as the value itself would have lived. What is
write-once cannot be deleted.

Evidence is two records of one author under one write-once key, which prove by themselves that it equivocates:

    id     = sha-256 of a domain tag, the id of the greater and that of the lesser record, in order of rank
    hlc    = that of the greater record
    author = the offender, key = `evidence/<kind of the records>`

Everybody who holds both records makes the same evidence, and it is valid if both records are. What makes them a
contradiction is that their ids differ, even where their values are equal: rosters quote ids, so two ids for one moment
can split those who judge it. Of two proofs of one kind the greater rank stays.

Bytes are checked in two parts: `parse` refuses what is malformed and costs little; `is_genuine` verifies signatures, is
pure, and is what a caller runs for whole batches in threads.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, TypeAlias

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.crdt.envelope import SIGNATURE_SIZE, Domain, Envelope, Sign, Verify
from swarmnode.crdt.hlc import MAX_STAMP, expiry_of, time_of
from swarmnode.crdt.kinds import EVIDENCE, KINDS, MAX_RECORD, ElementKind, kind_of, wrong_key

VERSION = 1
SPARSE = 8  # bytes of payload for each list or map in the value: an empty map of one byte takes 72 of memory
MAX_AUTHOR = 128  # characters; a libp2p peer id of an Ed25519 key has 52
_EVIDENCE_TAG = b"swarmnode/evidence/1\0"
RECORDS = Domain("record", VERSION, MAX_RECORD)
_FIELDS = ("author", "hlc", "key", "run", "ttl", "v", "value")  # in the order of the payload
_RUN = re.compile(r"[0-9a-f]{64}")
_AUTHOR = re.compile(r"[1-9A-HJ-NP-Za-km-z]+")  # base58


class InvalidRecord(ValueError):
    """A record, or evidence, that no correct node makes. The message says why."""


@dataclass(frozen=True)
class Record:
    """One signed fact.

    Made by `write` or, from bytes of a peer, by `open_element`; fields as in the module's first lines.
    """

    v: int
    run: str  # run id, 64 hex digits
    author: str  # peer id
    key: str
    hlc: int  # stamp, see `hlc`
    ttl: int  # ms
    value: Value
    signature: bytes = field(compare=False)

    @cached_property
    def kind(self) -> str:
        return kind_of(self.key)

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
        return encoding.encode({name: getattr(self, name) for name in _FIELDS}, max_size=MAX_RECORD)

    @cached_property
    def id(self) -> bytes:
        """sha-256 of the payload, 32 bytes."""
        return hashlib.sha256(self.payload).digest()

    @cached_property
    def rank(self) -> bytes:
        """Of two records under one key, the one of greater rank replaces the other."""
        return expiry_of(self.hlc, self.ttl) + self.id

    @cached_property
    def sealed(self) -> bytes:
        """Payload and signature as bytes, for a peer or a disk; opening them gives these bytes again."""
        return Envelope(self.payload, self.signature).sealed

    def is_genuine(self, verify: Verify) -> bool:
        """Whether a well-formed record is signed by its author."""
        return RECORDS.is_signed(Envelope(self.payload, self.signature), self.author, verify)


def write(run: str, author: str, key: str, value: Value, *, hlc: int, sign: Sign) -> Record:
    """Make and sign a record of a known kind; `value` None deletes the key. Raises InvalidRecord."""
    unsigned = Record(VERSION, run, author, key, hlc, _kind(key).ttl, value, bytes(SIGNATURE_SIZE))
    _check_form(unsigned)
    record = replace(unsigned, signature=sign(RECORDS.message(unsigned.payload)))
    record.__dict__["payload"] = unsigned.payload
    return record


def parse_record(payload: bytes, signature: bytes) -> Record:
    """The record of a payload, well-formed, of a known kind and its ttl; not yet known to be genuine.

    Raises InvalidRecord.
    """
    try:
        fields = encoding.decode(payload, max_size=MAX_RECORD)
    except EncodingError as error:
        raise InvalidRecord(f"record is malformed: {error}") from error
    if not isinstance(fields, dict) or tuple(fields) != _FIELDS:
        raise InvalidRecord(f"a payload has the fields {', '.join(_FIELDS)}")
    match tuple(fields.values()):
        case (str() as author, int() as hlc, str() as key, str() as run, int() as ttl, int() as v, value):
            record = Record(v, run, author, key, hlc, ttl, value, signature)
        case _:
            raise InvalidRecord("a field of the payload is of another type than in a record")
    # As decoding accepts canonical bytes only, these are they.
    record.__dict__.update(payload=payload, id=hashlib.sha256(payload).digest())
    _check_form(record)
    return record


@lru_cache(maxsize=64)
def _is_run(run: str) -> bool:
    return bool(_RUN.fullmatch(run))


@lru_cache(maxsize=4096)
def _is_author(author: str) -> bool:
    return len(author) <= MAX_AUTHOR and bool(_AUTHOR.fullmatch(author))


def _kind(key: str) -> ElementKind:
    """The kind of a record's key. Raises InvalidRecord; evidence is no record, as nobody signs it."""
    kind = KINDS.get(kind_of(key))
    if kind is None or kind.name == EVIDENCE.name:
        known = ", ".join(name for name in KINDS if name != EVIDENCE.name)
        raise InvalidRecord(f"{key!r} is of no known kind of record; known kinds: {known}")
    return kind


def _check_form(record: Record) -> None:
    """Raises InvalidRecord for what can be told without verifying the signature."""
    if isinstance(record.v, bool) or record.v != VERSION:
        raise InvalidRecord(f"record of version {record.v}; this node knows {VERSION}")
    if not _is_run(record.run):
        raise InvalidRecord("run is not a run id of 64 hex digits")
    if not _is_author(record.author):
        raise InvalidRecord("author is not a peer id")
    kind = _kind(record.key)
    if (wrong := wrong_key(kind, record.key)) is not None:
        raise InvalidRecord(wrong)
    if isinstance(record.ttl, bool) or record.ttl != kind.ttl:
        raise InvalidRecord(f"{record.key!r} has ttl {record.ttl} ms; its kind has {kind.ttl}")
    if isinstance(record.hlc, bool) or not 0 <= record.hlc <= MAX_STAMP:
        raise InvalidRecord(f"{record.hlc} is no stamp")
    if kind.write_once and record.tombstone:
        raise InvalidRecord(f"{record.key!r} is write-once and cannot be deleted")
    if len(record.signature) != SIGNATURE_SIZE:
        raise InvalidRecord(f"signature of {len(record.signature)} bytes; Ed25519 has {SIGNATURE_SIZE}")
    try:
        size = len(record.payload)
    except EncodingError as error:
        raise InvalidRecord(f"{record.key!r}: {error}") from error
    if size > kind.max_size:
        raise InvalidRecord(f"{record.key!r} takes {size} bytes; at most {kind.max_size} for its kind")
    if (count := _containers(record.value)) > size // SPARSE:
        raise InvalidRecord(f"{record.key!r} has {count} lists and maps; at most {size // SPARSE} in {size} bytes")


def _containers(value: Value) -> int:
    """How many lists and maps a value has, itself among them."""
    found, left = 0, [value]
    while left:
        held = left.pop()
        if isinstance(held, dict | list | tuple):
            found += 1
            left += held.values() if isinstance(held, dict) else held
    return found


@dataclass(frozen=True)
class Evidence:
    """Proof of one equivocation. Made by `evidence_of` or, from bytes of a peer, by `open_element`."""

    greater: Record
    lesser: Record

    kind: ClassVar[str] = EVIDENCE.name
    tombstone: ClassVar[bool] = False  # an offender cannot take it back

    @property
    def run(self) -> str:
        return self.greater.run

    @property
    def author(self) -> str:
        """The offender: it signed both records."""
        return self.greater.author

    @property
    def key(self) -> str:
        return f"{EVIDENCE.name}/{self.greater.kind}"

    @property
    def hlc(self) -> int:
        return self.greater.hlc

    @property
    def expiry(self) -> int:
        """The first ms at which the evidence is gone."""
        return time_of(self.hlc) + EVIDENCE.ttl

    @property
    def value(self) -> Value:
        """What to show of it: the key, and the ids and values under it."""
        said = tuple(
            {"id": record.id, "hlc": record.hlc, "value": record.value} for record in (self.greater, self.lesser)
        )
        return {"key": self.greater.key, "said": said}

    @cached_property
    def id(self) -> bytes:
        """Names the pair, 32 bytes; signatures have no part in it."""
        return hashlib.sha256(_EVIDENCE_TAG + self.greater.id + self.lesser.id).digest()

    @cached_property
    def rank(self) -> bytes:
        return expiry_of(self.hlc, EVIDENCE.ttl) + self.id

    @property
    def sealed(self) -> bytes:
        """Both records with their signatures, as bytes; opening them gives these bytes again."""
        pair = tuple((record.payload, record.signature) for record in (self.greater, self.lesser))
        return encoding.encode(pair, max_size=EVIDENCE.max_size)

    def is_genuine(self, verify: Verify) -> bool:
        """Whether the offender signed both records: else they prove nothing."""
        return self.greater.is_genuine(verify) and self.lesser.is_genuine(verify)


def evidence_of(one: Record, other: Record) -> Evidence:
    """The evidence that two valid records make, in whichever order. Raises InvalidRecord where they prove nothing."""
    kind = KINDS.get(one.kind)
    if kind is None or not kind.write_once:
        raise InvalidRecord(f"{one.key!r} is not write-once: its author may say something else")
    if (one.run, one.author, one.key) != (other.run, other.author, other.key):
        raise InvalidRecord("evidence is two records of one run, author and key")
    if one.id == other.id:
        raise InvalidRecord(f"{one.key!r} was said once: the two records are the same")
    lesser, greater = sorted((one, other), key=lambda record: record.rank)
    return Evidence(greater, lesser)


def needed(standing_hlc: int | None, found: Evidence) -> bool:
    """Whether `found` is worth telling, where the stamp of the evidence that stands under its key is `standing_hlc`.

    One proof is enough until half of its life is over; otherwise an offender that goes on equivocating could make
    everybody pass on proof after proof.
    """
    return standing_hlc is None or time_of(found.hlc) - time_of(standing_hlc) > EVIDENCE.ttl // 2


Element: TypeAlias = Record | Evidence

MAX_SEALED = EVIDENCE.max_size  # bytes of any sealed element


def parse(raw: bytes) -> Element:
    """The element in sealed bytes, well-formed but not yet known to be genuine. Raises InvalidRecord.

    What it returns has exactly these bytes as `sealed`.
    """
    try:
        sealed = encoding.decode(raw, max_size=MAX_SEALED)
    except EncodingError as error:
        raise InvalidRecord(f"element is malformed: {error}") from error
    match sealed:
        case (bytes() as payload, bytes() as signature):
            return parse_record(payload, signature)
        case ((bytes() as payload, bytes() as signature), (bytes() as payload_2, bytes() as signature_2)):
            greater = parse_record(payload, signature)
            lesser = parse_record(payload_2, signature_2)
            evidence = evidence_of(greater, lesser)
            if evidence.greater is not greater:
                raise InvalidRecord("evidence begins with the greater of its records")
            return evidence
    raise InvalidRecord("an element is a payload and its signature, or two such pairs")


def open_element(raw: bytes, verify: Verify) -> Element:
    """The element in sealed bytes, checked whole. Raises InvalidRecord."""
    element = parse(raw)
    if not element.is_genuine(verify):
        raise InvalidRecord(f"{element.key!r} is not signed by its author {element.author}")
    return element
