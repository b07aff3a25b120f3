"""A member that shows a newcomer made-up records of its history is found out, and costs the newcomer nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from chains import RULES, after_rounds, fair, hashed, lead, offer, record_of, start

from swarmnode.crdt.record import Record
from swarmnode.protocols.chain.forks import TrustedRoster
from swarmnode.protocols.chain.rules import advance, derive
from swarmnode.protocols.chain.statements import Commit
from swarmnode.protocols.methods.open.join import CannotTell, Tip, prove_lineage
from swarmnode.protocols.methods.open.sync import Path

CHAIN = after_rounds(start("ABCDE"), RULES, 4, "ABCDE")
OFFERS = [offer(CHAIN, author) for author in "ABCDE"]
QUOTED = fair(CHAIN, RULES, OFFERS)
ROSTER = lead(CHAIN, RULES, QUOTED)
AFTER = advance(CHAIN, RULES, ROSTER, QUOTED, derive(CHAIN, RULES, QUOTED))
SAID = [ROSTER, *QUOTED.cuts, *QUOTED.scores, *QUOTED.commits.values()]
RECORDS = [record_of(said.author, said.what) for said in SAID]
RECORDS += [record_of(one.commit.author, one.reveal) for one in OFFERS]
COMMIT = record_of("L", Commit(AFTER.round, AFTER.tip, hashed("binding"), hashed("anchor")))


class Shows:
    """What one member answers: a way from the trusted roster on, and these records."""

    def __init__(self, ids: tuple[bytes, ...], records: list[Record]) -> None:
        self._path, self._records = Path(ids, (False,) * len(ids), CHAIN.encode()), records

    async def path_of(self, peer: str, id: bytes, *, since: bytes) -> Path:
        return self._path

    async def ask_records(self, peer: str, ids: Any) -> list[Record]:
        return self._records


async def shown(ids: tuple[bytes, ...], records: list[Record], base: Any) -> int:
    sync: Any = Shows(ids, records)
    sync.store = SimpleNamespace(rules=RULES)
    tip = Tip(ids[-1], AFTER.round + len(ids) - 1, 0.0, b"", bytes(32))
    trusted = TrustedRoster(CHAIN.round, ROSTER.id)
    return (await prove_lineage(sync, trusted, peer="L", tip=tip, base=base)).rosters


def test_records_of_an_honest_history_are_enough() -> None:
    assert trio.run(shown, (ROSTER.id,), RECORDS, AFTER) == 1


def test_another_statement_in_the_place_of_a_roster_shows_nothing() -> None:
    with pytest.raises(CannotTell, match="does not have roster"):
        trio.run(shown, (ROSTER.id, COMMIT.id), [*RECORDS, COMMIT], start("L"))
