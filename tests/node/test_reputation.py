"""What a daemon keeps of its ledger on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from swarmnode.node.reputation import NAME, PeerTrust, Reputation, restore
from swarmnode.protocols.methods.method import Method, Place
from swarmnode.protocols.peers.scoring import Kind, PeerScoring, ScoringLimits, Violations
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import MAX_PEERS, Ledger
from swarmnode.protocols.reputation.observations import Promises
from swarmnode.protocols.state.membership import Membership
from swarmnode.protocols.state.sync import StateSync
from swarmnode.testing.memorystate import MemoryState, clocks_of

ME, BOB = ("12D3KooW" + letter * 44 for letter in "AB")


async def start(folder: Path) -> Reputation:
    state = MemoryState("cd" * 32, me=ME, sign=lambda message: bytes(64), clocks=clocks_of(lambda: 0))
    ledger = Ledger(ME, now=lambda: 0)
    restore(ledger, folder / NAME)
    sync, membership = SimpleNamespace(remembered=False), SimpleNamespace(members=lambda: (BOB, "carol"))
    reputation = Reputation(
        ledger,
        state=state,
        sync=cast(StateSync, sync),
        membership=cast(Membership, membership),
        promises=Promises(),
        file=folder / NAME,
    )
    reputation.method = cast(Method, SimpleNamespace(place=Place(5, "", ()), tell_ledger=lambda ledger: None))
    return reputation


def test_what_was_seen_until_the_last_epoch_is_there_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        reputation = await start(tmp_path)
        reputation.ledger.observe(BOB, Saw.PROOF, good=8)
        await reputation.end_epoch()
        again = await start(tmp_path)
        assert again.ledger.accounts() == reputation.ledger.accounts()
        assert again.ledger.round == 5

    trio.run(main)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 7}', b"[1]", b'{"version": 2, "round": 0}'])
def test_a_damaged_file_is_put_aside_and_the_node_starts(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(content)
    reputation = trio.run(start, tmp_path)
    assert reputation.ledger.view() == {}
    assert (tmp_path / "reputation.damaged").read_bytes() == content
    assert not (tmp_path / NAME).exists()
    assert "put aside" in caplog.text


def test_a_full_disk_costs_the_file_and_not_the_watching(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        reputation = await start(tmp_path / "gone")
        reputation.ledger.observe(BOB, Saw.PROOF, good=8)
        await reputation.end_epoch()
        assert reputation.ledger.view()[BOB].work > 0

    trio.run(main)
    assert "not kept" in caplog.text


def test_strangers_who_break_rules_have_no_account(tmp_path: Path) -> None:
    async def main() -> None:
        trust = PeerTrust(relays_for_all=False)
        trust.reputation = await start(tmp_path)
        trust._membership = cast(Membership, SimpleNamespace(members=lambda: (BOB,)))
        for number in range(MAX_PEERS + 1):
            trust._remember(f"stranger {number}", Kind.BREACH)
        trust._remember(BOB, Kind.BREACH)
        trust._members = frozenset()
        trust._remember(BOB, Kind.BREACH)  # who gave its lease back first hides nothing by that
        await trust.reputation.end_epoch()
        assert trust.reputation.ledger.accounts().keys() == {BOB}
        assert trust.reputation.ledger.accounts()[BOB].violations == 2.0

    trio.run(main)


def test_violations_of_any_protocol_count_but_not_overload_nor_what_the_ledger_found(tmp_path: Path) -> None:
    async def main() -> None:
        reputation, violations = await start(tmp_path), Violations("test")
        scoring = PeerScoring(ScoringLimits())
        scoring.remember = reputation.ledger.offended
        scoring.watch(violations, reputation.violations)
        violations.note(BOB, "forged", Kind.LIE)
        violations.note(BOB, "too many calls", Kind.LOAD)
        reputation.violations.note(BOB, "what it makes does not hold up", Kind.BREACH)  # found by the ledger itself
        await reputation.end_epoch()
        assert reputation.ledger.accounts()[BOB].violations == 2.0
        kept = json.loads((tmp_path / NAME).read_text())
        assert kept["seen"][BOB]["violations"] == 2.0

    trio.run(main)
