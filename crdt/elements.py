"""Elements: what the replicated state holds. A `Record` its author signed; `Evidence` nobody did, it proves itself.

Both have `run, author, kind, key, hlc, expiry, id, order, tombstone, value, sealed, statements`, and that is all that
stores and protocols look at. Bytes are checked in two parts: `parse` refuses what is malformed and costs little;
`is_genuine` verifies signatures, is pure, and is what a caller runs for whole batches in threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError
from swarmnode.crdt.evidence import Evidence, evidence_of
from swarmnode.crdt.kinds import EVIDENCE, KINDS, Kind
from swarmnode.crdt.record import InvalidRecord, Record, Verify, parse_record, unsealed

Element: TypeAlias = Record | Evidence

MAX_SEALED = EVIDENCE.max_size  # bytes of any sealed element


def parse(raw: bytes, *, kinds: Mapping[str, Kind] = KINDS) -> Element:
    """The element in sealed bytes, well-formed but not yet known to be genuine. Raises InvalidRecord.

    What it returns has exactly these bytes as `sealed`.
    """
    if (parts := unsealed(raw)) is not None:
        return parse_record(*parts, kinds=kinds)
    try:
        sealed = encoding.decode(raw, max_size=MAX_SEALED)
    except EncodingError as error:
        raise InvalidRecord(f"element is malformed: {error}") from error
    match sealed:
        case (bytes() as payload, bytes() as signature):
            return parse_record(payload, signature, kinds=kinds)
        case ((bytes() as payload, bytes() as signature), (bytes() as payload_2, bytes() as signature_2)):
            greater = parse_record(payload, signature, kinds=kinds)
            lesser = parse_record(payload_2, signature_2, kinds=kinds)
            evidence = evidence_of(greater, lesser, kinds=kinds)
            if evidence.greater is not greater:
                raise InvalidRecord("evidence begins with the greater of its records")
            return evidence
    raise InvalidRecord("an element is a payload and its signature, or two such pairs")


def is_genuine(element: Element, verify: Verify) -> bool:
    """Whether all signatures in a well-formed element are its author's."""
    return all(verify(*statement) for statement in element.statements)


def open_element(raw: bytes, verify: Verify, *, kinds: Mapping[str, Kind] = KINDS) -> Element:
    """The element in sealed bytes, checked whole. Raises InvalidRecord."""
    element = parse(raw, kinds=kinds)
    if not is_genuine(element, verify):
        raise InvalidRecord(f"{element.key!r} is not signed by its author {element.author}")
    return element
