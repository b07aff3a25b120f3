"""The database of the replicated state: its schema, how it is opened, and what its errors mean.

SQLite in WAL mode, so readers never wait for the writer; synchronous=FULL, so what was committed outlasts a power cut
as far as the disk keeps its word. `user_version` is the schema's, `about` says whose run it is. A database that is
damaged is moved aside as `<name>.damaged` (one is kept, for a person to look at) and begun anew: peers have the rest.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from swarmnode.node.exitcodes import DATADIR_VERSION, NO_SPACE, ExpectedError
from swarmnode.node.storage.datadir import DataDirError, explain
from swarmnode.protocols.state.backend import StateError, Unwritable

APPLICATION = int.from_bytes(b"swst", "big")  # tells the file's owner to `file` and to us
CACHE = 2048  # KiB of pages that a reader keeps in memory; the system keeps more of the file
WRITER_CACHE = 4096  # KiB; most of the indexes of 100 000 elements
CHECKPOINT = 4000  # pages of 4 KiB in the write-ahead log, after which they go into the database, each once

# One script for each version of the schema, each from the one before. `rank` is hlc as u64 big-endian, then the id.
# Indexes are few and narrow: elements arrive scattered over them, and each touched page is written to the log.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE author (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
    CREATE TABLE element (
        rank   BLOB NOT NULL CHECK (length(rank) = 40),
        author INTEGER NOT NULL REFERENCES author,
        kind   TEXT NOT NULL,
        key    TEXT NOT NULL,
        sealed BLOB NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX element_by_rank ON element (rank, kind);
    CREATE INDEX element_by_author ON element (author, key);
    CREATE TABLE pinned (
        rank        BLOB PRIMARY KEY,
        until_round INTEGER NOT NULL,
        sealed      BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    "DROP TABLE pinned",  # copies for open rounds; the lifetimes of records keep what those refer to
    "DELETE FROM element WHERE kind IN ('counter', 'shard')",  # kinds that nothing wrote
)

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Damaged(StateError):
    """The database contains what SQLite, or this program, never wrote."""


class StateVersion(ExpectedError):
    """The database was written by a later version of swarmnode, or for another run."""

    exit_code = DATADIR_VERSION


class StateFull(Unwritable):
    """The disk is full, or a quota is used up."""

    exit_code = NO_SPACE


def told(error: sqlite3.Error, path: Path) -> StateError:
    """`error`, met while working on `path`, in words that say what it means. Anything that is a bug is raised again."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _DAMAGE:
        return Damaged(f"{path}: the state's database is damaged ({error})")
    if code == sqlite3.SQLITE_FULL:
        return StateFull(
            f"{path}: no space left on the disk, so nothing more of the replicated state is stored. What was stored is "
            "intact; free some space, and the node goes on by itself."
        )
    if code in (
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
    ):
        return Unwritable(
            f"{path}: the disk does not take the replicated state ({error}). What was stored is intact; look at the "
            "disk and at who may write there. The node tries again by itself."
        )
    raise error


def open_database(path: Path, run_id: str) -> sqlite3.Connection:
    """The writer's connection, with the present schema.

    Raises Damaged, StateVersion, Unwritable, or DataDirError where the directory cannot be used.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would leave it open to others
    except OSError as error:
        raise explain(error, path) from error
    connection = _connect(path)
    try:
        _prepare(connection, path, run_id)
    except sqlite3.Error as error:
        connection.close()
        raise told(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A second connection, for reading beside the writer. Raises Damaged or Unwritable."""
    connection = _connect(path)
    try:
        connection.execute(f"PRAGMA cache_size = -{CACHE}")
        connection.execute("PRAGMA query_only = 1")
        connection.execute("SELECT count(*) FROM about").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise told(error, path) from error
    return connection


def set_aside(path: Path) -> Path:
    """Move a damaged database out of the way; returns where it is now. Raises DataDirError."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        # The log before the database: a new database must never meet the old one's log.
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    except OSError as error:
        raise explain(error, path) from error
    return aside


def size_on_disk(path: Path) -> int:
    """Bytes of the database and its log."""
    total = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(OSError):
            total += os.stat(f"{path}{suffix}").st_size
    return total


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    except sqlite3.Error as error:
        raise told(error, path) from error


def _prepare(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
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
    if version > len(MIGRATIONS):
        raise StateVersion(
            f"{path}: the replicated state has schema {version}, this swarmnode knows {len(MIGRATIONS)}; nothing was "
            "changed. Upgrade swarmnode, or delete the file: peers have what is in it."
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        # One transaction a version: killed in between, the next start goes on from there.
        connection.executescript(
            f"BEGIN IMMEDIATE; {script}; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {number}; COMMIT;"
        )
    connection.execute("INSERT OR IGNORE INTO about VALUES ('run', ?)", (run_id,))
    (found,) = connection.execute("SELECT value FROM about WHERE name = 'run'").fetchone()
    if found != run_id:
        raise StateVersion(f"{path}: holds the state of run {found[:12]}…, not of {run_id[:12]}…; move it elsewhere")
