"""What became of each round of a run, as this node saw it end: `runs/<run id>/history.jsonl`, which only grows.

One JSON object a line: `round` (from 0), `hash` of the state after it, `roster` where the method has a chain of them,
`at` (seconds since 1970), and `counted`, the peers whose work is in that state, where they are others than in the line
before. About 120 bytes a line (200 with a roster), and 55 for each peer when they change.

A line for a round that is not later than those before it takes their place: this node went over to another history.
Rounds that it missed are missing. A line that was cut off when the machine stopped is left out.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from swarmnode.node.storage.datadir import explain
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

NAME = "history.jsonl"


@dataclass(frozen=True)
class Entry:
    """One round."""

    round: int  # from 0; the state after it has round + 1 rounds in it
    state_hash: str
    counted: tuple[PeerId, ...]
    roster: str = ""
    at: int = 0  # seconds since 1970


class History:
    """Appends to the history of one run. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counted: tuple[PeerId, ...] | None = None  # of the line before, where this object wrote it

    def append(self, entry: Entry) -> None:
        """Write one line. Raises NoSpace or DataDirError; the lines before are then intact."""
        line: dict[str, object] = {"round": entry.round, "hash": entry.state_hash, "at": entry.at}
        if entry.roster:
            line["roster"] = entry.roster
        if entry.counted != self._counted:
            line["counted"] = list(entry.counted)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                encoded = b"\n" * torn + json.dumps(line, separators=(",", ":")).encode() + b"\n"
                if file.write(encoded) != len(encoded):
                    raise OSError(28, os.strerror(28))
        except OSError as error:
            self._counted = None
            raise explain(error, self._path) from error
        self._counted = entry.counted


def read_history(path: Path) -> tuple[Entry, ...]:
    """The rounds of the history that this node is on, in order. Blocking. Raises OSError where it cannot be read."""
    entries: list[Entry] = []
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
                roster, at = str(found.get("roster", "")), int(found["at"])
                entry = Entry(int(found["round"]), str(found["hash"]), counted, roster, at)
            except (ValueError, KeyError, TypeError) as error:
                if line.strip():
                    logger.warning("%s: line %d is left out: %s", path, number, error)
                continue
            while entries and entries[-1].round >= entry.round:
                entries.pop()
            entries.append(entry)
    return tuple(entries)
