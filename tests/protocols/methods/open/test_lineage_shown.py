"""A member that shows a newcomer made-up records of its history is found out, and costs the newcomer nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from chains import RULES, after_rounds, fair, hashed, lead, offer, record_of, start
from trio.testing import MockClock

from swarmnode.crdt.record import Record
from swarmnode.protocols.chain.forks import TrustedRoster
from swarmnode.protocols.chain.rules import advance, derive
from swarmnode.protocols.chain.statements import Commit
from swarmnode.protocols.methods.open import join
from swarmnode.protocols.methods.open.join import SHOW_AT_ONCE, SHOWS_WITHIN, CannotTell, Joining, Tip, prove_lineage
from swarmnode.protocols.methods.open.sync import MAX_PATH, TIMEOUT, Path

CHAIN = after_rounds(start("ABCDE"), RULES, 4, "ABCDE")
OFFERS = [offer(CHAIN, author) for author in "ABCDE"]
QUOTED = fair(CHAIN, OFFERS)
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


async def shown(member: type[Shows], ids: tuple[bytes, ...], records: list[Record], base: Any) -> int:
    sync: Any = member(ids, records)
    sync.store = SimpleNamespace(rules=RULES)
    tip = Tip(ids[-1], AFTER.round + len(ids) - 1, 0.0, b"", bytes(32))
    trusted = TrustedRoster(CHAIN.round, ROSTER.id)
    return (await prove_lineage(sync, trusted, peer="L", tip=tip, base=base))[0]


def test_records_of_an_honest_history_are_enough() -> None:
    assert trio.run(shown, Shows, (ROSTER.id,), RECORDS, AFTER) == 1


def test_another_statement_in_the_place_of_a_roster_shows_nothing() -> None:
    with pytest.raises(CannotTell, match="does not show roster"):
        trio.run(shown, Shows, (ROSTER.id, COMMIT.id), [*RECORDS, COMMIT], start("L"))


class Dawdles(Shows):
    """Gives one roster in each answer, as late as it may."""

    async def ask_records(self, peer: str, ids: Any) -> list[Record]:
        await trio.sleep(TIMEOUT - 0.01)
        return [*RECORDS, *(COMMITS[id] for id in ids[:1] if id in COMMITS)]


COMMITS = {one.id: one for one in (record_of("L", Commit(0, hashed(n), bytes(32), bytes(32))) for n in range(MAX_PATH))}


def test_a_member_that_gives_one_roster_in_each_answer_holds_a_newcomer_no_longer_than_a_slow_honest_one() -> None:
    async def main() -> None:
        with pytest.raises(CannotTell):
            await shown(Dawdles, (ROSTER.id, *COMMITS)[:MAX_PATH], RECORDS, start("L"))
        assert trio.current_time() <= SHOWS_WITHIN

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_slow_liars_hold_nobody_up_who_is_shown_the_history_by_another() -> None:
    proofs, at_once = list[str](), 0

    async def is_trusted(found: str) -> bool:
        nonlocal at_once
        proofs.append(found)
        at_once += 1
        try:
            await trio.sleep(1.0 if found == "honest" else SHOWS_WITHIN)
        finally:
            at_once -= 1
        return found == "honest"

    async def main() -> None:
        joining: Any = SimpleNamespace(_is_trusted=is_trusted)
        liars = [f"liar {number}" for number in range(SHOW_AT_ONCE - 1)]
        left: Any = [*liars, "honest", "another"]
        assert await Joining._next(joining, left) == "honest"  # type: ignore[comparison-overlap]
        assert trio.current_time() < 30.0
        assert left == [*liars, "another"] and at_once == 0, "whoever was asked in vain can be asked again"
        many: Any = [f"liar {number}" for number in range(2 * SHOW_AT_ONCE)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Joining._next, joining, many)
            await trio.sleep(SHOWS_WITHIN - 1)
            assert at_once == SHOW_AT_ONCE
            nursery.cancel_scope.cancel()
        assert await Joining._next(joining, []) is None

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_member_shows_no_more_than_the_largest_rounds_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    class Floods(Shows):
        """Gives one roster in each answer, and much besides."""

        async def ask_records(self, peer: str, ids: Any) -> list[Record]:
            nonlocal asked
            asked += 1
            return [*RECORDS, *(COMMITS[id] for id in ids[:1] if id in COMMITS)]

    monkeypatch.setattr(join, "MOST_SHOWN", 3 * sum(len(record.sealed) for record in RECORDS))
    with pytest.raises(CannotTell):
        trio.run(shown, Floods, (ROSTER.id, *COMMITS)[:MAX_PATH], RECORDS, start("L"))
    assert 1 < asked <= 3
