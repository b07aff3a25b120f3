"""Evidence: two records of one author under one write-once key, which prove by themselves that it equivocates.

    id     = sha-256 of a domain tag, the id of the greater and that of the lesser record, in order of (hlc, id)
    hlc    = that of the greater record
    author = the offender, key = `evidence/<kind of the records>`

Nobody signs evidence: whoever holds both records can make it, everybody makes the same, and it is valid if both records
are. What makes two records a contradiction is that their ids differ, even where their values are equal: rosters quote
ids, so two ids for one moment can split those who judge it.

A register of the offender's, one for each kind: of two proofs the greater (hlc, id) stays. Its ttl is longer than that
of any record in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import time_of
from swarmnode.crdt.kinds import EVIDENCE, KINDS, Kind
from swarmnode.crdt.record import InvalidRecord, Record, Statement

_TAG = b"swarmnode/evidence/1\0"


@dataclass(frozen=True)
class Evidence:
    """Proof of one equivocation. Made by `evidence_of` or, from bytes of a peer, by `elements.open_element`."""

    greater: Record
    lesser: Record

    @property
    def run(self) -> str:
        return self.greater.run

    @property
    def author(self) -> str:
        """The offender: it signed both records."""
        return self.greater.author

    @property
    def kind(self) -> str:
        return EVIDENCE.name

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
    def tombstone(self) -> bool:
        """Never: an offender cannot take it back."""
        return False

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
        return hashlib.sha256(_TAG + self.greater.id + self.lesser.id).digest()

    @property
    def order(self) -> tuple[int, bytes]:
        return (self.hlc, self.id)

    @property
    def sealed(self) -> bytes:
        """Both records with their signatures, as bytes; opening them gives these bytes again."""
        pair = tuple((record.payload, record.signature) for record in (self.greater, self.lesser))
        return encoding.encode(pair, max_size=EVIDENCE.max_size)

    @property
    def statements(self) -> tuple[Statement, ...]:
        """What must verify for the evidence to prove anything."""
        return self.greater.statements + self.lesser.statements


def evidence_of(one: Record, other: Record, *, kinds: Mapping[str, Kind] = KINDS) -> Evidence:
    """The evidence that two valid records make, in whichever order. Raises InvalidRecord where they prove nothing."""
    kind = kinds.get(one.kind)
    if kind is None or not kind.write_once:
        raise InvalidRecord(f"{one.key!r} is not write-once: its author may say something else")
    if (one.run, one.author, one.key) != (other.run, other.author, other.key):
        raise InvalidRecord("evidence is two records of one run, author and key")
    if one.id == other.id:
        raise InvalidRecord(f"{one.key!r} was said once: the two records are the same")
    lesser, greater = sorted((one, other), key=lambda record: record.order)
    return Evidence(greater, lesser)


def needed(standing_hlc: int | None, found: Evidence) -> bool:
    """Whether `found` is worth telling, where the stamp of the evidence that stands under its key is `standing_hlc`.

    One proof is enough until half of its life is over; otherwise an offender that goes on equivocating could make
    everybody pass on proof after proof.
    """
    return standing_hlc is None or time_of(found.hlc) - time_of(standing_hlc) > EVIDENCE.ttl // 2
