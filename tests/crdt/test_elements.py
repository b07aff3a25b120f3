"""Elements: exact bytes of records and evidence, checked in two parts; evidence proves itself and nothing else does."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt import encoding
from swarmnode.crdt.envelope import SEAL
from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import EVIDENCE, KINDS, MAX_PER_AUTHOR, MAX_RECORD, ElementKind, key_of
from swarmnode.crdt.record import (
    MAX_SEALED,
    SPARSE,
    Element,
    Evidence,
    InvalidRecord,
    Record,
    evidence_of,
    needed,
    open_element,
    parse,
    write,
)

RUN = "ab" * 32
AUTHOR = "12D3KooWAuthor"
NOW = 1_700_000_000_000
MOMENT = key_of("commit", 42, 0)


def sign(author: str, message: bytes) -> bytes:
    """Stands for Ed25519: 64 bytes that depend on author and message."""
    return hashlib.sha512(author.encode() + message).digest()


def verify(author: str, message: bytes, signature: bytes) -> bool:
    return sign(author, message) == signature


def written(key: str = MOMENT, value: object = 1, *, time: int = NOW, author: str = AUTHOR, run: str = RUN) -> Record:
    return write(run, author, key, value, hlc=stamp_at(time), sign=lambda m: sign(author, m))  # type: ignore[arg-type]


def example_key(kind: ElementKind) -> str:
    if kind.write_once:
        return key_of(kind.name, 7, "subject")
    return kind.name if kind.slots == 1 else f"{kind.name}/name"


RECORD_KINDS = [kind for kind in KINDS.values() if kind != EVIDENCE]
values = (
    st.integers(0, 2**63)
    | st.text("abc", max_size=9)
    | st.dictionaries(st.text("ab", max_size=2), st.binary(max_size=4), max_size=3)
)


@st.composite
def any_element(draw: st.DrawFn) -> Element:
    kind = draw(st.sampled_from(RECORD_KINDS))
    first = written(example_key(kind), draw(values), time=NOW + draw(st.integers(0, 9)))
    if not kind.write_once or draw(st.booleans()):
        return first
    return evidence_of(first, written(first.key, draw(values.filter(lambda v: v != first.value)), time=NOW + 5))


@given(any_element())
def test_bytes_of_elements_come_back_exactly(element: Element) -> None:
    opened = open_element(element.sealed, verify)
    assert opened == element and opened.id == element.id and opened.rank == element.rank
    assert opened.sealed == element.sealed


@given(any_element(), st.data())
def test_damaged_bytes_never_open_to_another_element(element: Element, data: st.DataObject) -> None:
    raw = bytearray(element.sealed)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidRecord):
        open_element(bytes(raw), verify)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRecord):
        parse(raw)


@pytest.mark.parametrize("kind", RECORD_KINDS, ids=lambda kind: kind.name)
def test_values_may_fill_a_payload_to_the_limit_of_their_kind_and_no_further(kind: ElementKind) -> None:
    probe = 20 if kind.max_size < 300 else 260  # as long as the length of the value takes as many bytes
    size = probe + kind.max_size - len(written(example_key(kind), bytes(probe)).payload)
    full = written(example_key(kind), bytes(size))
    assert len(full.payload) == kind.max_size
    assert open_element(full.sealed, verify).sealed == full.sealed
    assert len(full.sealed) <= len(full.payload) + SEAL
    with pytest.raises(InvalidRecord, match="at most"):
        written(example_key(kind), bytes(size + 1))


NESTED: dict[str, object] = {"": {"": {"": {}}}}


@pytest.mark.parametrize("value", [({},) * 7800, ((),) * 7800, (NESTED,) * 1000], ids=["maps", "lists", "nested"])
def test_a_value_of_many_lists_or_maps_is_neither_written_nor_read(value: object) -> None:
    with pytest.raises(InvalidRecord, match="lists and maps; at most"):
        written(key_of("roster", 1, 0), value)
    packed = replace(written(key_of("roster", 1, 0)), value=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidRecord, match="lists and maps; at most"):
        parse(packed.sealed)


def test_what_a_record_takes_of_memory_is_at_most_48_times_its_bytes() -> None:
    def filled(nested: int) -> Record:
        texts = tuple(chr(0x100 + i % 500) for i in range((7900 - 7 * nested) // 3))
        return written(key_of("roster", 1, 0), (*[NESTED] * nested, *texts))

    for nested in (0, MAX_RECORD // SPARSE // 4 - 5):
        raw = filled(nested).sealed
        tracemalloc.start()
        element = parse(raw)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 20 * len(raw) < taken < 48 * len(raw), element.key


def test_the_greatest_evidence_fits() -> None:
    one, other = (written(key_of("roster", 1, 0), bytes([i]) * (MAX_RECORD - 250)) for i in range(2))
    evidence = evidence_of(one, other)
    assert len(evidence.sealed) <= MAX_SEALED
    assert open_element(evidence.sealed, verify) == evidence


def test_what_one_author_can_make_all_keep_is_bounded() -> None:
    most = sum(kind.slots * (kind.max_size + SEAL) for kind in RECORD_KINDS)
    assert most <= MAX_PER_AUTHOR
    assert all(kind.max_size <= MAX_RECORD for kind in RECORD_KINDS)


def test_parsing_leaves_signatures_to_be_verified_in_batches() -> None:
    forged = replace(written(), signature=bytes(64))
    parsed = parse(forged.sealed)
    assert parsed == forged
    assert not parsed.is_genuine(verify)
    asked: list[tuple[str, bytes, bytes]] = []
    assert parsed.is_genuine(lambda *of: asked.append(of) is None)
    ((author, message, signature),) = asked
    assert author == AUTHOR and message.endswith(forged.payload) and signature == bytes(64)
    with pytest.raises(InvalidRecord, match="not signed by its author"):
        open_element(forged.sealed, verify)


# --- evidence -----------------------------------------------------------------------------------------------------


def test_everybody_makes_the_same_evidence_of_two_records() -> None:
    early, late = written(value=1), written(value=2, time=NOW + 1)
    resigned = replace(late, signature=b"\1" * 64)
    one = evidence_of(early, late)
    assert one == evidence_of(late, early) == evidence_of(resigned, early)
    assert {e.id for e in (one, evidence_of(late, early), evidence_of(resigned, early))} == {one.id}
    assert (one.author, one.key, one.hlc) == (AUTHOR, "evidence/commit", late.hlc)
    assert one.id.hex() == "800b525244a474dfcb73d9baeafdbaa646788453559cccbddf2fc9754986319f"


@pytest.mark.parametrize(
    "one, other",
    [
        (written(), written()),
        (written(), replace(written(), signature=b"\1" * 64)),
        (written(), written(key_of("commit", 43, 0), 2)),
        (written(), written(value=2, author="12D3KooWAnother")),
        (written(), written(value=2, run="cd" * 32)),
        (written("note/a", 1), written("note/a", 2)),
    ],
    ids=["same", "signed again", "other key", "other author", "other run", "replaceable"],
)
def test_records_that_do_not_contradict_prove_nothing(one: Record, other: Record) -> None:
    with pytest.raises(InvalidRecord):
        evidence_of(one, other)
    lesser, greater = sorted((one, other), key=lambda record: record.rank)
    with pytest.raises(InvalidRecord):
        parse(Evidence(greater, lesser).sealed)


def test_one_value_under_two_ids_is_evidence() -> None:
    """Rosters quote ids, so two of them for one moment can split those who judge it."""
    assert evidence_of(written(), written(time=NOW + 1)).key == "evidence/commit"


def test_evidence_with_a_forged_half_accuses_nobody() -> None:
    forged = replace(written(value=2), signature=bytes(64))
    for pair in ((written(), forged), (forged, written())):
        raw = evidence_of(*pair).sealed
        assert not parse(raw).is_genuine(verify)
        with pytest.raises(InvalidRecord, match="not signed"):
            open_element(raw, verify)


def test_evidence_in_the_other_order_is_not_a_second_form_of_it() -> None:
    evidence = evidence_of(written(value=1), written(value=2))
    with pytest.raises(InvalidRecord, match="begins with the greater"):
        parse(Evidence(evidence.lesser, evidence.greater).sealed)


def test_evidence_outlives_what_it_accuses() -> None:
    evidence = evidence_of(written(), written(value=2, time=NOW + 1))
    assert evidence.expiry > max(evidence.greater.expiry, evidence.lesser.expiry)
    assert evidence.expiry == NOW + 1 + EVIDENCE.ttl
    assert all(EVIDENCE.ttl > kind.ttl for kind in RECORD_KINDS if kind.write_once)


def test_an_author_has_a_slot_for_evidence_of_each_write_once_kind() -> None:
    keys = {
        evidence_of(written(example_key(kind), 1), written(example_key(kind), 2)).key
        for kind in RECORD_KINDS
        if kind.write_once
    }
    assert len(keys) == EVIDENCE.slots


def test_further_evidence_is_needed_once_half_of_its_life_is_over() -> None:
    def found(time: int) -> Evidence:
        return evidence_of(written(time=time), written(value=2, time=time))

    assert needed(None, found(NOW))
    assert not needed(stamp_at(NOW), found(NOW + EVIDENCE.ttl // 2))
    assert needed(stamp_at(NOW), found(NOW + EVIDENCE.ttl // 2 + 1))


def test_bytes_that_are_neither_a_pair_nor_two_are_refused() -> None:
    half = (written().payload, written().signature)
    for shape in (half[0], (half,), (half, half, half), (half[0], "text"), (half, (half[0],)), half[:1]):
        with pytest.raises(InvalidRecord):
            parse(encoding.encode(shape))
