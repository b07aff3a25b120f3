"""The database of the replicated state: its schema, the one writer, what is asked beside it, and what errors mean.

SQLite in WAL mode, so readers never wait for the writer; synchronous=FULL, so what was committed outlasts a power cut
as far as the disk keeps its word. `user_version` is the schema's, `about` says whose run it is. A database that is
damaged is moved aside as `<name>.damaged` (one is kept, for a person to look at) and begun anew: peers have the rest.

Whole batches are written, each one transaction, judged by the law of `crdt.law`. The law looks at all that stands of an
author and kind. As long as the slots have room, only what stands under the new one's key matters: of a batch, that is
read first, of all keys at once, and only where slots may become full all that is in them. What changes is written last,
in order of ranks: that takes a third of the time of going to SQLite with each element, and far fewer pages.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from swarmnode.crdt import law
from swarmnode.crdt.hlc import expiring_after, hlc_of
from swarmnode.crdt.kinds import EVIDENCE, KINDS
from swarmnode.crdt.law import Judgement, Merged, Order
from swarmnode.crdt.ranges import START, RankSet
from swarmnode.crdt.record import Element, InvalidRecord, Record, evidence_of, needed, parse
from swarmnode.node.exitcodes import NO_SPACE
from swarmnode.node.storage.datadir import DataDirError, DataDirVersion, explaining
from swarmnode.protocols.state.backend import Rank, StateError, Unwritable

APPLICATION = int.from_bytes(b"swst", "big")  # tells the file's owner to `file` and to us
CACHE = 2048  # KiB of pages that a reader keeps in memory; the system keeps more of the file
WRITER_CACHE = 4096  # KiB; most of the indexes of 100 000 elements
CHECKPOINT = 4000  # pages of 4 KiB in the write-ahead log, after which they go into the database, each once

VERSION = 1  # of the schema
# `rank` is as in `crdt.record`.
# Indexes are few and narrow: elements arrive scattered over them, and each touched page is written to the log.
SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE author (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE element (
    rank   BLOB NOT NULL CHECK (length(rank) = 40),
    author INTEGER NOT NULL REFERENCES author,
    kind   TEXT NOT NULL,
    key    TEXT NOT NULL,
    sealed BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX element_by_rank ON element (rank);
CREATE INDEX element_by_author ON element (author, key);
"""

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_IO = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY)
SOUGHT = 128  # keys that one statement asks about
_STANDING = (  # a cross join fixes the order of loops: the index is looked up for each key
    f"WITH sought (author, key) AS (VALUES {', '.join(['(?, ?)'] * SOUGHT)}) "
    "SELECT element.author, element.key, rank FROM sought CROSS JOIN element "
    "ON element.author = sought.author AND element.key = sought.key"
)


class Damaged(StateError):
    """The database contains what SQLite, or this program, never wrote."""


class StateFull(Unwritable):
    """The disk is full, or a quota is used up."""

    exit_code = NO_SPACE


Slot: TypeAlias = tuple[str, str]  # an author, and the name of a kind
Standing: TypeAlias = dict[Slot, list[Order | Element]]  # in no order


@dataclass
class Applied:
    verdicts: list[Merged] = field(default_factory=list)  # of the elements, in order
    added: dict[Rank, Element] = field(default_factory=dict)  # evidence among them
    removed: list[Rank] = field(default_factory=list)


class StateDatabase:
    """The open database. Everything blocks; of each of two connections one thread at a time may make use.

    Where a method raises Damaged or Unwritable, the database is as it was before.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        """Raises Damaged, Unwritable, or DataDirError where the directory cannot be used."""
        self._path = path
        self._authors: dict[str, int] = {}  # numbers in the database by name
        self._counts: Counter[Slot] = Counter()  # elements
        self.closed = False
        with explaining(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would leave it open to all
        with ExitStack() as files:
            with self._explaining():
                self._connection = files.enter_context(closing(_connect(path)))
                _prepare(self._connection, path, run_id)
                self._reader = files.enter_context(closing(_connect(path)))  # beside the writer
                self._reader.execute(f"PRAGMA cache_size = -{CACHE}")
                self._reader.execute("PRAGMA query_only = 1")
            self._recall()
            if unknown := {kind for _, kind in self._counts} - KINDS.keys():
                raise Damaged(f"{path}: the state's database holds elements of no known kind, {', '.join(unknown)}")
            with self._explaining():
                rows = self._connection.execute("SELECT rank FROM element ORDER BY rank")
                self.ranks = RankSet(rank for (rank,) in rows)  # of all elements: what is committed, never more
            self._files = files.pop_all()

    def close(self) -> None:
        """Idempotent; nothing but `ranks`, which are no more, may be asked afterwards."""
        self.closed, self.ranks = True, RankSet()
        self._files.close()

    # --- the one writer ---------------------------------------------------------------------------------------------

    def horizon(self) -> int:
        """Until when this replica may have forgotten what expired, in ms; 0 at first."""
        with self._explaining():
            found = self._connection.execute("SELECT value FROM about WHERE name = 'horizon'").fetchone()
        return int(found[0]) if found is not None else 0

    def apply(self, elements: Sequence[Element], *, now: int, horizon: int) -> Applied:
        """Merge verified elements of admitted authors, and evidence where they contradict others; durable afterwards.

        Times are in ms. Raises Damaged or Unwritable.
        """
        applied = Applied()
        suspects: dict[Slot, tuple[Record, Order | Element]] = {}
        with self._transaction():
            standing = self._standing(elements)
            for element in elements:
                verdict = law.untimely(element.hlc, element.expiry, now=now, horizon=horizon)
                if verdict is None:
                    ruling = self._merge(element, standing, applied)
                    verdict = ruling.verdict
                    if isinstance(element, Record) and ruling.rival is not None:
                        suspects[element.author, element.kind] = (element, ruling.rival)
                applied.verdicts.append(verdict)
            for record, rival in suspects.values():
                self._convict(record, rival, standing, applied)
            # In order of ranks, so that each page is touched once.
            self._connection.executemany("DELETE FROM element WHERE rank = ?", [(rank,) for rank in applied.removed])
            self._connection.executemany(
                "INSERT INTO element (rank, author, kind, key, sealed) VALUES (?, ?, ?, ?, ?)",
                [(rank, self._number(e.author), e.kind, e.key, e.sealed) for rank, e in sorted(applied.added.items())],
            )
        self.ranks = self.ranks.changed(applied.added, applied.removed)
        return applied

    def forget(self, horizon: int, limit: int) -> int:
        """Delete what expired by `horizon`, ms, `limit` elements at most; how many. Raises Damaged or Unwritable."""
        if not (expired := self.ranks.keys(START, expiring_after(horizon), limit)):
            return 0
        with self._transaction():
            self._connection.execute("DELETE FROM element WHERE rank <= ?", (expired[-1],))
            self._connection.execute("DELETE FROM author WHERE NOT EXISTS (SELECT 1 FROM element WHERE author=number)")
            self._connection.execute("INSERT OR REPLACE INTO about VALUES ('horizon', ?)", (str(horizon),))
        self._recall()
        self.ranks = self.ranks.changed(removed=expired)
        return len(expired)

    def give_back(self, pages: int) -> None:
        """Give unused pages of the file back to the disk, so many at the most. Raises Damaged or Unwritable."""
        with self._explaining():
            self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")  # `execute` would stop after one

    def _standing(self, elements: Sequence[Element]) -> Standing:
        """What of the state `elements` can contradict or displace."""
        arriving = Counter((element.author, element.kind) for element in elements)
        standing: Standing = {slot: [] for slot in arriving}
        keys: dict[tuple[int, str], Slot] = {}
        for (author, kind), count in arriving.items():
            if self._counts[author, kind] + count > KINDS[kind].slots or kind == EVIDENCE.name:
                standing[author, kind] = self._all_of(author, kind)
        for element in elements:
            slot = element.author, element.kind
            if self._counts[slot] and not standing[slot]:
                keys[self._number(element.author), element.key] = slot
        pairs = list(keys)
        for at in range(0, len(pairs), SOUGHT):
            sought = pairs[at : at + SOUGHT]
            sought += [(0, "")] * (SOUGHT - len(sought))  # always the same statement, which SQLite then knows
            for number, key, rank in self._connection.execute(_STANDING, list(chain.from_iterable(sought))):
                standing[keys[number, key]].append(Order(key, rank))
        return standing

    def _all_of(self, author: str, kind: str) -> list[Order | Element]:
        rows = self._connection.execute(
            "SELECT key, rank FROM element WHERE author = ? AND key >= ? AND key < ?",
            (self._number(author), kind, f"{kind}0"),  # from `kind` or `kind/` to before what would follow `/`
        )
        return [Order(key, rank) for key, rank in rows]

    def _merge(self, element: Element, standing: Standing, applied: Applied) -> Judgement[Order | Element]:
        """Judge an element, and note what that changes."""
        slot = element.author, element.kind
        ruling = law.judge(KINDS[element.kind], standing[slot], element)
        if ruling.verdict is Merged.STORED:
            if ruling.gone is None:
                self._counts[slot] += 1
            else:
                standing[slot].remove(ruling.gone)
                if applied.added.pop(ruling.gone.rank, None) is None:
                    applied.removed.append(ruling.gone.rank)
            standing[slot].append(element)
            applied.added[element.rank] = element
        return ruling

    def _convict(self, record: Record, rival: Order | Element, standing: Standing, applied: Applied) -> None:
        """Merge the evidence that two records make, where it is worth telling."""
        if isinstance(rival, Order):  # its row is there until this batch is written
            (sealed,) = self._connection.execute("SELECT sealed FROM element WHERE rank = ?", (rival.rank,)).fetchone()
            rival = self._element(sealed, rival.rank)
        assert isinstance(rival, Record)  # evidence contradicts nothing
        evidence = evidence_of(record, rival)
        slot = evidence.author, evidence.kind
        if slot not in standing:
            standing[slot] = self._all_of(*slot)
        before = [hlc_of(one.rank, EVIDENCE.ttl) for one in standing[slot] if one.key == evidence.key]
        if needed(max(before, default=None), evidence):
            self._merge(evidence, standing, applied)

    def _number(self, name: str) -> int:
        """The number of an author, who gets one where there is none yet."""
        number = self._authors.get(name)
        if number is None:
            number = self._connection.execute("INSERT INTO author (name) VALUES (?)", (name,)).lastrowid
            assert number is not None
            self._authors[name] = number
        return number

    # --- beside the writer: a query sees what was committed when it began --------------------------------------------

    def get(self, author: str, key: str) -> Element | None:
        """The greatest element under a key, expired or not."""
        with self._explaining():
            row = self._reader.execute(
                "SELECT sealed, rank FROM author JOIN element ON author = number WHERE name = ? AND key = ? "
                "ORDER BY rank DESC LIMIT 1",
                (author, key),
            ).fetchone()
        return None if row is None else self._element(row[0], row[1])

    def select(self, prefix: str, author: str | None, limit: int, now: int) -> list[Element]:
        """The first `limit` elements that have not expired by `now` ms, in order of (key, author, rank)."""
        # A cross join fixes the order of loops: each author's part of the index is looked up, not all of it read.
        sql = "SELECT sealed, rank FROM author CROSS JOIN element ON author = number WHERE key >= ? AND key < ?"
        values: list[str | bytes | int] = [prefix, f"{prefix}\x7f"]  # keys are ASCII below that
        if author is not None:
            sql, values = f"{sql} AND name = ?", [*values, author]
        sql, values = f"{sql} AND rank >= ? ORDER BY key, name, rank LIMIT ?", [*values, expiring_after(now), limit]
        with self._explaining():
            rows = self._reader.execute(sql, values)
            return [self._element(sealed, rank) for sealed, rank in rows]

    def authors(self, prefix: str, now: int) -> frozenset[str]:
        """Whose elements under keys that begin with `prefix` have not expired by `now` ms."""
        found = "SELECT 1 FROM element WHERE author = number AND key >= ? AND key < ? AND rank >= ?"
        values = (prefix, f"{prefix}\x7f", expiring_after(now))
        with self._explaining():
            rows = self._reader.execute(f"SELECT name FROM author WHERE EXISTS ({found})", values)
            return frozenset(name for (name,) in rows)

    def newest(self, author: str) -> list[tuple[int, Rank]]:
        """Stamp and rank of all that `author` signed, the greatest first."""
        with self._explaining():
            rows = self._reader.execute(
                "SELECT kind, rank FROM author JOIN element ON author = number WHERE name = ? AND kind != ?",
                (author, EVIDENCE.name),
            ).fetchall()
        return sorted(((hlc_of(rank, KINDS[kind].ttl), rank) for kind, rank in rows), reverse=True)

    def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        """The bytes of those elements that are here, in the order asked for."""
        query = "SELECT sealed FROM element WHERE rank = ?"
        with self._explaining():
            rows = (self._reader.execute(query, (rank,)).fetchone() for rank in ranks)
            return [row[0] for row in rows if row is not None]

    def totals(self) -> tuple[dict[str, int], int, int]:
        """Elements by kind, authors, and the bytes of all sealed elements."""
        with self._explaining():
            kinds = self._reader.execute(
                "SELECT kind, count(*), sum(length(sealed)) FROM element GROUP BY kind ORDER BY kind"
            ).fetchall()
            (authors,) = self._reader.execute("SELECT count(DISTINCT author) FROM element").fetchone()
        return {kind: count for kind, count, _ in kinds}, authors, sum(size for _, _, size in kinds)

    def _element(self, sealed: bytes, rank: Rank) -> Element:
        """The element in a row. Raises Damaged where the disk gives other bytes than were stored."""
        try:
            element = parse(sealed)
        except InvalidRecord as error:
            raise Damaged(f"{self._path}: an element in the state's database is damaged ({error})") from error
        if element.rank != rank:
            raise Damaged(f"{self._path}: the disk changed an element in the state's database")
        return element

    # --- transactions ----------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Take authors and counts from the database."""
        with self._explaining():
            self._authors = dict(self._connection.execute("SELECT name, number FROM author"))
            names = {number: name for name, number in self._authors.items()}
            rows = self._connection.execute("SELECT author, kind, count(*) FROM element GROUP BY author, kind")
            self._counts = Counter({(names[author], kind): count for author, kind, count in rows})

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _explained(error, self._path) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and on disk afterwards."""
        with self._explaining():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                self._recall()
                raise


def _explained(error: sqlite3.Error, path: Path) -> StateError:
    """`error`, met while working on `path`, in words that say what it means. Anything that is a bug is raised again."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _DAMAGE:
        return Damaged(f"{path}: the state's database is damaged ({error})")
    if code == sqlite3.SQLITE_FULL:
        return StateFull(
            f"{path}: no space left on the disk, so nothing more of the replicated state is stored. What was stored is "
            "intact; free some space, and the node goes on by itself."
        )
    if code in _IO:
        return Unwritable(
            f"{path}: the disk does not take the replicated state ({error}). What was stored is intact; look at the "
            "disk and at who may write there. The node tries again by itself."
        )
    raise error


def set_aside(path: Path) -> Path:
    """Move a damaged database out of the way; returns where it is now. Raises DataDirError."""
    aside = path.with_name(f"{path.name}.damaged")
    with explaining(path):
        # The log before the database: a new database must never meet the old one's log.
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


def size_on_disk(path: Path) -> int:
    total = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(OSError):
            total += os.stat(f"{path}{suffix}").st_size
    return total


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)


def _prepare(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Give the writer's connection its settings and the present schema. Raises Damaged or DataDirError."""
    connection.execute(f"PRAGMA cache_size = -{WRITER_CACHE}")
    connection.execute("PRAGMA cache_spill = 0")  # a page that a transaction changes often is logged once
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has its effect before the first table is made
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise DataDirError(f"{path}: this file system does not support SQLite's write-ahead log; choose another place")
    (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()  # reads every page: 0.1 s for 100 000 notes
    if state != "ok":
        raise Damaged(f"{path}: the state's database is damaged ({state})")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT}")
    connection.execute(f"PRAGMA journal_size_limit = {CHECKPOINT * 4096}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise DataDirVersion(
            f"{path}: the replicated state has schema {version}, this swarmnode knows {VERSION}; nothing was "
            "changed. Upgrade swarmnode, or delete the file: peers have what is in it."
        )
    if version == 0:
        connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    connection.execute("INSERT OR IGNORE INTO about VALUES ('run', ?)", (run_id,))
    (found,) = connection.execute("SELECT value FROM about WHERE name = 'run'").fetchone()
    if found != run_id:
        raise DataDirVersion(f"{path}: holds the state of run {found[:12]}…, not of {run_id[:12]}…; move it elsewhere")
