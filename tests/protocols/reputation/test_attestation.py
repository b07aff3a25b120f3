"""Attestations as records: they fit, they say one thing, and what they quote can disprove them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmnode.crdt.kinds import KINDS
from swarmnode.crdt.record import InvalidRecord, Record, write
from swarmnode.protocols.reputation.account import Judged, RoundWork
from swarmnode.protocols.reputation.attestation import (
    MAX_COUNT,
    MAX_FINDINGS,
    Attestation,
    Attested,
    Checked,
    Finding,
    Saw,
    check,
    named,
    read,
)

RUN = "ab" * 32
ANN, EVE = "12D3KooW" + "A" * 44, "12D3KooW" + "E" * 44
ROSTER = bytes(range(32))


def record(what: Attestation, author: str = ANN, hlc: int = 7 << 16, **changes: Any) -> Record:
    value = {**what.value, **changes}  # type: ignore[dict-item]
    return write(RUN, author, what.key, value, hlc=hlc, sign=lambda message: bytes(64))


def attestation(*found: Finding, **changes: Any) -> Attestation:
    return replace(Attestation(12, EVE, 950, 900, 31, found), **changes)


def test_an_attestation_says_what_was_written() -> None:
    what = attestation(Finding(Saw.GAIN, 30, 1, ROSTER[:16]), Finding(Saw.KEPT, 512, 0))
    said = read(record(what))
    assert (said.attester, said.what) == (ANN, what)


def test_the_largest_attestation_fits_into_its_kind() -> None:
    found = tuple(Finding(saw, MAX_COUNT, MAX_COUNT, bytes(16)) for saw in list(Saw)[:MAX_FINDINGS])
    what = Attestation(99_999_999, EVE, 1000, 1000, MAX_COUNT, found)
    assert len(record(what).payload) <= KINDS["attestation"].max_size


@pytest.mark.parametrize(
    "changes",
    [
        {"score": 1001},
        {"score": -1},
        {"score": 0.5},
        {"work": True},
        {"rounds": MAX_COUNT + 1},
        {"found": ((0, 1, 2, b"short"),)},
        {"found": ((99, 1, 2, b""),)},
        {"found": ((8, 512, 0, b""),)},  # bytes served, of which earlier checkouts told
        {"found": ((0, 1, 2, b""), (0, 1, 2, b""))},
        {"found": ((0, 1),)},
        {"more": 1},
    ],
)
def test_what_no_honest_node_writes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord):
        read(record(attestation(), **changes))


def test_nobody_attests_its_own_work() -> None:
    with pytest.raises(InvalidRecord, match="own work"):
        read(record(attestation(), author=EVE))


def test_a_word_that_its_own_evidence_disproves_is_found_out() -> None:
    helped = RoundWork(12, ROSTER, (Judged(EVE, 0, True, {ANN: 700, "bob": 800}),))
    rounds = named([helped])

    def checked(finding: Finding, subject: str = EVE) -> Checked:
        return check(Attested(ANN, b"", 0, attestation(finding, subject=subject)), finding, rounds)

    assert checked(Finding(Saw.GAIN, 5, 0, ROSTER[:16])) is Checked.CONFIRMED
    assert checked(Finding(Saw.GAIN, 0, 5, ROSTER[:16])) is Checked.CONTRADICTED
    assert checked(Finding(Saw.FORM, 0, 1, ROSTER[:16])) is Checked.CONTRADICTED
    assert checked(Finding(Saw.TIMELY, 1, 0, ROSTER[:16])) is Checked.CONFIRMED
    assert checked(Finding(Saw.GAIN, 5, 0, ROSTER[:16]), subject="nobody") is Checked.CONTRADICTED
    assert checked(Finding(Saw.GAIN, 5, 0, bytes(16))) is Checked.UNKNOWN
    assert checked(Finding(Saw.PROOF, 0, 5, ROSTER[:16])) is Checked.UNKNOWN
    assert checked(Finding(Saw.SYNC, 5, 0, ROSTER[:16]), subject="nobody") is Checked.UNKNOWN
