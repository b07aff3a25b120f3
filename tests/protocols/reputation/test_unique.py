"""What tests of unique work come to, and what they take from whose word."""

from __future__ import annotations

import pytest

from swarmnode.protocols.reputation.attestation import Attestation, Attested, Finding, Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.view import LEAST, of_own_data, reasons

COMMIT = b"c" * 32


def test_little_is_concluded_from_few_tests_or_from_few_voices() -> None:
    assert of_own_data([]) == 1.0
    assert of_own_data([(0, 4, 1.0), (0, 4, 1.0)]) == 1.0
    assert of_own_data([(0, 500, 1.0)]) == 1.0  # one voice, however often it tested
    assert of_own_data([(0, 500, 0.0)] * 9) == 1.0  # names without verified work


def test_who_passes_every_other_test_has_the_least_and_who_passes_four_of_five_has_all() -> None:
    assert of_own_data([(4, 4, 1.0)] * 4) == LEAST
    assert of_own_data([(4, 1, 1.0)] * 4) == 1.0
    assert of_own_data([(23, 17, 1.0)] * 4) == pytest.approx((1 + LEAST) / 2)


def test_liars_with_two_fifths_of_the_voices_turn_nothing() -> None:
    honest, liars = [(6, 0, 1.0)] * 6, [(0, 999, 1.0)] * 4
    assert of_own_data(honest + liars) == 1.0


def test_ledger_weighs_its_own_tests_with_others_words_and_no_single_test_is_an_offence() -> None:
    ledger = Ledger("me", now=lambda: 0)
    workers = ("ann", "ben", "cat")
    for _ in range(8):
        for peer in (*workers, "eve"):
            ledger.observe(peer, Saw.PROOF, good=8)
        ledger.close(1)
    assert ledger.roster_standing("eve") == 1000
    for number in range(8):
        ledger.drew("eve", number % 2 == 0, COMMIT)
    ledger.close(2)
    assert ledger.found("eve")[0] == Finding(Saw.ASSIGNED, 4, 4, COMMIT[:16])
    assert not ledger.accounts()["eve"].violations
    assert ledger.unique("eve") == 1.0  # one node's tests
    for peer in workers:
        ledger.insert(
            Attested(peer, peer.encode(), 0, Attestation(2, "eve", 900, 900, 9, (Finding(Saw.ASSIGNED, 4, 4),)))
        )
    ledger.view()
    assert ledger.unique("eve") == LEAST
    assert ledger.roster_standing("eve") == round(1000 * LEAST)
    assert ledger.unique("ann") == 1.0
    told = {peer: reasons(ledger.view()[peer], unique=ledger.unique(peer)) for peer in ("ann", "eve")}
    assert [peer for peer, lines in told.items() if any("50 % of its standing" in line for line in lines)] == ["eve"]


def test_old_tests_fade() -> None:
    ledger = Ledger("me", now=lambda: 0)
    for _ in range(1000):
        ledger.drew("eve", True, COMMIT)
    for _ in range(100):
        ledger.drew("eve", False, COMMIT)
    finding = ledger.found("eve")[0]
    assert finding.good < finding.bad
    assert finding.good + finding.bad <= 65
