"""The one writer of the state's database: whole batches, each one transaction, judged by the law of `crdt.law`.

Everything here blocks and runs in one thread at a time. Where a method raises, the database is as it was before.

The law looks at all that stands of an author and kind. Of these only those under the new one's key can contradict it,
and only the least can leave; the others just take up slots. So no more than these few are read, and the kind is judged
with as many slots fewer as there are others.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmnode.crdt import law
from swarmnode.crdt.elements import Element, parse
from swarmnode.crdt.evidence import Evidence, evidence_of, needed
from swarmnode.crdt.kinds import Kind
from swarmnode.crdt.law import Merged, Order
from swarmnode.crdt.record import InvalidRecord, Record
from swarmnode.node.statedb import Damaged, told
from swarmnode.protocols.statebackend import Rank, rank_of


@dataclass
class Applied:
    """What a batch did to the state."""

    verdicts: list[Merged] = field(default_factory=list)  # of the elements, in order
    stored: list[Element] = field(default_factory=list)  # and new evidence; some may be gone again
    steps: list[tuple[bool, str, Rank]] = field(default_factory=list)  # added or removed, kind, rank; in order


class Writer:
    """Writes through one connection of `statedb.open_database`."""

    def __init__(self, connection: sqlite3.Connection, path: Path, kinds: Mapping[str, Kind]) -> None:
        self._connection = connection
        self._path = path
        self._kinds = kinds
        self._authors: dict[str, int] = {}  # numbers in the database by name
        self._counts: Counter[tuple[str, str]] = Counter()  # elements by (author, kind)
        self._recall()

    def load(self) -> dict[str, list[Rank]]:
        """The ranks of all elements, by kind, in order. Raises Damaged or Unwritable."""
        loaded: dict[str, list[Rank]] = {name: [] for name in self._kinds}
        try:
            for rank, kind in self._connection.execute("SELECT rank, kind FROM element ORDER BY rank"):
                loaded[kind].append(rank)
        except sqlite3.Error as error:
            raise told(error, self._path) from error
        except KeyError as error:
            raise Damaged(f"{self._path}: the state's database holds elements of no known kind, {error}") from error
        return loaded

    def horizon(self) -> int:
        """Until when this replica may have forgotten what expired, in ms; 0 at first."""
        with self._told():
            found = self._connection.execute("SELECT value FROM about WHERE name = 'horizon'").fetchone()
        return int(found[0]) if found is not None else 0

    def apply(self, elements: Sequence[Element], *, now: int, horizon: int) -> Applied:
        """Merge verified elements of admitted authors, and evidence where they contradict others; durable afterwards.

        Times are in ms. Raises Damaged or Unwritable.
        """
        applied = Applied()
        suspects: dict[tuple[str, str], tuple[Record, Record]] = {}
        with self._transaction():
            for element in elements:
                verdict = law.untimely(element.hlc, element.expiry, now=now, horizon=horizon)
                if verdict is None:
                    verdict, rival = self._merge(element, applied)
                    if isinstance(element, Record) and isinstance(rival, Record):
                        suspects[element.author, element.kind] = (element, rival)
                applied.verdicts.append(verdict)
            for pair in suspects.values():
                self._convict(evidence_of(*pair, kinds=self._kinds), applied)
        return applied

    def forget(self, ranks: Sequence[Rank], *, horizon: int) -> None:
        """Delete what expired by `horizon`, ms. Raises Damaged or Unwritable."""
        with self._transaction():
            for rank in ranks:
                self._connection.execute("DELETE FROM element WHERE rank = ?", (rank,))
            self._connection.execute(
                "DELETE FROM author WHERE NOT EXISTS (SELECT 1 FROM element WHERE author = number)"
            )
            self._connection.execute("INSERT OR REPLACE INTO about VALUES ('horizon', ?)", (str(horizon),))
        self._recall()

    def give_back(self, pages: int) -> None:
        """Give unused pages of the file back to the disk, so many at the most. Raises Damaged or Unwritable."""
        with self._told():
            self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")  # `execute` would stop after one

    def pin(self, ranks: Sequence[Rank], until_round: int) -> None:
        """Keep copies of these elements; a later round replaces an earlier one. Raises Damaged or Unwritable."""
        with self._transaction():
            self._connection.executemany(
                "INSERT INTO pinned SELECT rank, ?1, sealed FROM element WHERE rank = ?2 "
                "ON CONFLICT (rank) DO UPDATE SET until_round = max(until_round, excluded.until_round)",
                [(until_round, rank) for rank in ranks],
            )
            self._connection.executemany(
                "UPDATE pinned SET until_round = max(until_round, ?1) WHERE rank = ?2",
                [(until_round, rank) for rank in ranks],
            )

    def unpin(self, round: int) -> None:
        """Drop the copies that were pinned until before `round`. Raises Damaged or Unwritable."""
        with self._transaction():
            self._connection.execute("DELETE FROM pinned WHERE until_round < ?", (round,))

    # -- one element

    def _merge(self, element: Element, applied: Applied) -> tuple[Merged, Element | None]:
        """The verdict on an element, and another one that it contradicts."""
        kind, key = self._kinds[element.kind], element.key
        author = self._number(element.author)
        slot = (element.author, kind.name)
        found = self._connection.execute("SELECT rank FROM element WHERE author = ? AND key = ?", (author, key))
        standing = [_order(key, rank) for (rank,) in found]
        held = self._counts[slot]
        if held >= kind.slots and (kind.write_once or not standing):
            least_key, least = self._connection.execute(
                "SELECT key, min(rank) FROM element WHERE author = ? AND key >= ? AND key < ?",
                (author, kind.name, f"{kind.name}0"),  # from `kind` or `kind/` to before what would follow `/`
            ).fetchone()
            if least_key != key:
                standing.append(_order(least_key, least))
            kind = replace(kind, slots=kind.slots - held + len(standing))
        ruling = law.judge(kind, standing, element)
        rival = self._read(rank_of(ruling.rival.hlc, ruling.rival.id)) if ruling.rival is not None else None
        if ruling.verdict is Merged.STORED:
            if ruling.gone is not None:
                gone = rank_of(ruling.gone.hlc, ruling.gone.id)
                self._connection.execute("DELETE FROM element WHERE rank = ?", (gone,))
                applied.steps.append((False, kind.name, gone))
            else:
                self._counts[slot] += 1
            rank = rank_of(element.hlc, element.id)
            self._connection.execute(
                "INSERT INTO element (rank, author, kind, key, sealed) VALUES (?, ?, ?, ?, ?)",
                (rank, author, kind.name, key, element.sealed),
            )
            applied.steps.append((True, kind.name, rank))
            applied.stored.append(element)
        return ruling.verdict, rival

    def _number(self, name: str) -> int:
        """The number of an author, who gets one where there is none yet."""
        number = self._authors.get(name)
        if number is None:
            number = self._connection.execute("INSERT INTO author (name) VALUES (?)", (name,)).lastrowid
            assert number is not None
            self._authors[name] = number
        return number

    def _convict(self, evidence: Evidence, applied: Applied) -> None:
        """Merge evidence where it is worth telling."""
        (standing,) = self._connection.execute(
            "SELECT max(rank) FROM element WHERE author = ? AND key = ?",
            (self._number(evidence.author), evidence.key),
        ).fetchone()
        if needed(None if standing is None else int.from_bytes(standing[:8], "big"), evidence):
            self._merge(evidence, applied)

    def _read(self, rank: Rank) -> Element | None:
        found = self._connection.execute("SELECT sealed FROM element WHERE rank = ?", (rank,)).fetchone()
        return None if found is None else opened(found[0], rank, self._kinds, self._path)

    # -- transactions

    def _recall(self) -> None:
        """Take authors and counts from the database."""
        with self._told():
            self._authors = dict(self._connection.execute("SELECT name, number FROM author"))
            names = {number: name for name, number in self._authors.items()}
            rows = self._connection.execute("SELECT author, kind, count(*) FROM element GROUP BY author, kind")
            self._counts = Counter({(names[author], kind): count for author, kind, count in rows})

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise told(error, self._path) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and on disk afterwards."""
        with self._told():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                self._recall()
                raise


def opened(sealed: bytes, rank: Rank, kinds: Mapping[str, Kind], path: Path) -> Element:
    """The element in a row. Raises Damaged where the disk gives other bytes than were stored."""
    try:
        element = parse(sealed, kinds=kinds)
    except InvalidRecord as error:
        raise Damaged(f"{path}: an element in the state's database is damaged ({error})") from error
    if rank_of(element.hlc, element.id) != rank:
        raise Damaged(f"{path}: the disk changed an element in the state's database")
    return element


def _order(key: str, rank: Rank) -> Order:
    return Order(key, int.from_bytes(rank[:8], "big"), rank[8:])
