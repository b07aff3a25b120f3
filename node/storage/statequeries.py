"""What is asked of the state's database beside the writer. Everything here blocks, one thread at a time.

A query sees what was committed when it began. All raise Damaged or Unwritable where the disk fails.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmnode.crdt.kinds import Kind
from swarmnode.crdt.record import Element
from swarmnode.node.storage.statedb import told
from swarmnode.node.storage.statewriter import opened
from swarmnode.protocols.state.backend import Rank


@dataclass(frozen=True)
class Totals:
    """Counts over the whole database."""

    kinds: dict[str, int]  # elements by kind
    authors: int
    size: int  # bytes of sealed elements


class Queries:
    """Reads through one connection of `statedb.open_reader`."""

    def __init__(self, connection: sqlite3.Connection, path: Path, kinds: Mapping[str, Kind]) -> None:
        self._connection = connection
        self._path = path
        self._kinds = kinds

    def get(self, author: str, key: str) -> Element | None:
        """The greatest element under a key, expired or not."""
        with self._told():
            row = self._connection.execute(
                "SELECT sealed, rank FROM author JOIN element ON author = number WHERE name = ? AND key = ? "
                "ORDER BY rank DESC LIMIT 1",
                (author, key),
            ).fetchone()
        return None if row is None else opened(row[0], row[1], self._kinds, self._path)

    def select(self, prefix: str, author: str | None, limit: int, now: int) -> list[Element]:
        """The first `limit` elements that have not expired by `now` ms, in order of (key, author, rank)."""
        # A cross join fixes the order of loops: each author's part of the index is looked up, not all of it read.
        sql = "SELECT sealed, rank FROM author CROSS JOIN element ON author = number WHERE key >= ? AND key < ?"
        values = [prefix, f"{prefix}\x7f"]  # keys are ASCII below that
        if author is not None:
            sql, values = f"{sql} AND name = ?", [*values, author]
        found: list[Element] = []
        with self._told():
            for row in self._connection.execute(f"{sql} ORDER BY key, name, rank", values):
                element = opened(row[0], row[1], self._kinds, self._path)
                if element.expiry > now:
                    found.append(element)
                if len(found) >= limit:
                    break
        return found

    def newest(self, author: str) -> int:
        """The greatest stamp of what `author` signed; 0 for none."""
        with self._told():
            (rank,) = self._connection.execute(
                "SELECT max(rank) FROM author JOIN element ON author = number WHERE name = ? AND kind != 'evidence'",
                (author,),
            ).fetchone()
        return 0 if rank is None else int.from_bytes(rank[:8], "big")

    def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        """The bytes of those elements that are here, in the order asked for."""
        found: list[bytes] = []
        with self._told():
            for rank in ranks:
                row = self._connection.execute("SELECT sealed FROM element WHERE rank = ?", (rank,)).fetchone()
                if row is not None:
                    found.append(row[0])
        return found

    def totals(self) -> Totals:
        with self._told():
            rows = self._connection.execute("SELECT kind, count(*), sum(length(sealed)) FROM element GROUP BY kind")
            kinds = {kind: (count, size) for kind, count, size in rows}
            (authors,) = self._connection.execute("SELECT count(DISTINCT author) FROM element").fetchone()
        counts = {kind: count for kind, (count, _) in sorted(kinds.items())}
        return Totals(counts, authors, sum(size for _, size in kinds.values()))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise told(error, self._path) from error
