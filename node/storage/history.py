"""The history of a run: one line for each round that this node saw end, in `runs/<run id>/history.jsonl`.

A line is a JSON object. What a provenance record is made of (`PastRound`): `round` (from 0), `hash` of the state after
it, `roster` where the method has a chain of them, `at` (seconds since 1970), and `counted`, the peers whose work is in
that state, where they are others than in the line before. Beside it stand figures for people, where they are known:
docs/cli.md says which (What history tells).

About 400 bytes a line, and 55 for each peer when they change. A line for a round that is not later than those before
it takes their place: this node went over to another history. Rounds that it missed are missing. A line that was cut off
when the machine stopped is left out. A file of more than LIMIT loses the older half.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.node.storage.datadir import explaining, replacing, write_all

if TYPE_CHECKING:
    from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

HISTORY = "history.jsonl"  # in the run's folder
LIMIT = 1 << 26  # bytes of the file
MOST = 1000  # rounds that are shown; of more, every second or third … is, but the newest
WHOLE = 60  # of them, of which none is left out
ALL = 10**9  # rounds, and so all that there are
BLOCK = 1 << 16  # bytes read at a time from the end


@dataclass(frozen=True)
class PastRound:
    round: int  # from 0; the state after it has round + 1 rounds in it
    state_hash: str
    counted: tuple[PeerId, ...]
    roster: str = ""
    at: float = 0  # seconds since 1970
    figures: Mapping[str, Any] = field(default_factory=dict, compare=False)


class History:
    """Appends to the history of one run. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counted: tuple[PeerId, ...] | None = None  # of the line before, where this object wrote it

    def append(self, entry: PastRound) -> None:
        """Write one line. Raises NoSpace or DataDirError; the lines before are then intact."""
        line: dict[str, Any] = {"round": entry.round, "hash": entry.state_hash, "at": entry.at}
        if entry.roster:
            line["roster"] = entry.roster
        before, self._counted = self._counted, None  # until the line is there
        if entry.counted != before:
            line["counted"] = list(entry.counted)
        line |= {key: value for key, value in entry.figures.items() if key not in line and key != "counted"}
        with explaining(self._path):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                write_all(file, b"\n" * torn + json.dumps(line, separators=(",", ":")).encode() + b"\n")
            if size > LIMIT:
                self._shorten()
        self._counted = entry.counted

    def _shorten(self) -> None:
        """Leave out the older half; the first line that stays names who counted."""
        counted: Any = []
        with self._path.open("rb") as lines:
            for line in lines:
                found = _read(line) or {}
                counted = found.get("counted", counted)
                if found and lines.tell() > LIMIT // 2:
                    break
            with replacing(self._path) as file:
                write_all(file, json.dumps(found | {"counted": counted}, separators=(",", ":")).encode() + b"\n")
                while part := lines.read(BLOCK):
                    write_all(file, part)


def read_history(path: Path) -> tuple[PastRound, ...]:
    """The rounds of the history that this node is on, in order. Blocking. Raises OSError where it cannot be read."""
    entries: list[PastRound] = []
    counted: tuple[PeerId, ...] = ()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return ()
    with file:
        for number, line in enumerate(file, start=1):
            try:
                found = json.loads(line)
                if "counted" in found:
                    counted = tuple(map(str, found["counted"]))
                roster, at = str(found.get("roster", "")), float(found["at"])
                entry = PastRound(int(found["round"]), str(found["hash"]), counted, roster, at)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                if line.strip():
                    logger.warning("%s: line %d is left out: %s", path, number, error)
                continue
            while entries and entries[-1].round >= entry.round:
                entries.pop()
            entries.append(entry)
    return tuple(entries)


def figures(path: Path, since: int = 0, *, most: int = MOST) -> list[dict[str, Any]]:
    """The rounds from `since` on with their figures, for people: `round`, `time` (s since 1970) and the others above.

    At the `most` so many: the WHOLE newest, and those before evenly apart. Blocking. Raises DataDirError.
    """
    lines: list[bytes] = []
    with explaining(path), suppress(FileNotFoundError):
        lines = list(_since(path, since))  # the newest first
    every = -(-len(lines) // (most - WHOLE))
    told: list[dict[str, Any]] = []
    for found in map(_read, lines[:WHOLE] + lines[WHOLE :: max(every, 1)]):
        if found is None or (told and found["round"] >= told[-1]["round"]):
            continue  # torn, or given up for the history that follows
        found["time"] = found.pop("at")
        told.append({name: value for name, value in found.items() if name not in ("hash", "roster", "counted")})
    return told[::-1]


def _since(path: Path, since: int) -> Iterator[bytes]:
    """Lines from the end of the file back to the first one of a round before `since`."""
    with path.open("rb") as file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at:
            size = min(at, BLOCK)
            at -= size
            file.seek(at)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            for line in [*([rest] if not at else []), *lines][::-1]:
                if since > 0 and (found := _read(line)) is not None and found["round"] < since:
                    return
                if line.endswith(b"}"):
                    yield line


def _read(line: bytes) -> dict[str, Any] | None:
    """A line that names a round and a time; None where it was cut off."""
    try:
        found = json.loads(line)
        return found if isinstance(found["round"], int) and isinstance(found["at"], float | int) else None
    except (ValueError, KeyError, TypeError):
        return None
