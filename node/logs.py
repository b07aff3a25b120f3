"""What the node says: one JSON object a line in the data directory, plain lines on the console, a ring in memory.

    {"time": "2025-01-31T12:00:00.123Z", "level": "INFO", "logger": "swarmnode.node.daemon", "message": "…",
     "run": "5f0c…", "round": 12}

The run is there once the node has one, and the round, of which it last told a result, from the first one on. With
`log_format = "json"` the console has the same objects, for a collector of logs.

The file is rotated by size, so logs hold at most `(FILES + 1) * FILE_SIZE` bytes of disk. The ring serves `swarmnode
logs --follow`: a reader that is too slow misses the oldest lines and never holds the daemon back.
"""

from __future__ import annotations

import errno
import json
import logging
import logging.handlers
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import trio

FILE_NAME = "swarmnode.jsonl"
FILE_SIZE = 8 << 20  # bytes of one log file before it is rotated
FILES = 3  # rotated files kept beside the current one
RING = 2000  # lines, or events, kept in memory; about 1 MB
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "DEFAULT")
OURS = "swarmnode."  # how the names of our loggers begin; lines for people leave it out
LINE_LIMIT = 8 << 10  # characters of one message; the rest of it is cut, as peers' words may be in it

T = TypeVar("T")
Line = dict[str, Any]  # {"time", "level", "logger", "message"}, and what _about has

_about: dict[str, Any] = {}  # what all lines tell
_at_first: dict[str, int] = {}  # levels that loggers had before they were set, by name


def tell_with_each_line(**facts: Any) -> None:
    """Have all lines of this process carry `facts` from now on, such as the run and its round."""
    _about.update(facts)


def as_line(record: logging.LogRecord) -> Line:
    """A log record as the object that is written and sent; a traceback follows in the message."""
    message = record.getMessage()
    if record.exc_info:
        message += "\n" + logging.Formatter().formatException(record.exc_info)
    if len(message) > LINE_LIMIT:
        message = message[:LINE_LIMIT] + f"… ({len(message) - LINE_LIMIT} characters cut)"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname,
        "logger": record.name,
        "message": message,
        **_about,
    }


class _AsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(as_line(record), ensure_ascii=False)


def strict_json(value: Any) -> Any:
    """`value` as strict JSON has it: null in place of NaN and infinities, {"$bytes": hex digits} of bytes."""
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    return [strict_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def for_terminal(text: str) -> str:
    """What is fit for a terminal: text from peers may be in it, and must not move its cursor or set its title."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


class _Console(logging.StreamHandler[Any]):
    """`12:00:00 WARNING node.daemon: …`, in local time, without the package's name.

    On a terminal what has something `ahead`, a function without arguments, says what that returns, and takes the
    place of such a line before it; `show` changes what is ahead, or shows it alone.
    """

    _rows = 0  # of the terminal, above the cursor, whose place is taken
    _result = ""  # what stays of them, where something else is said

    def format(self, record: logging.LogRecord) -> str:
        clock, message = time.strftime("%H:%M:%S", time.localtime(record.created)), as_line(record)["message"]
        message, ahead = for_terminal(message), getattr(record, "ahead", None)
        if ahead is not None and self.moves and (ahead := ahead()):
            return self._in_place(f"{clock} {message}", ahead)
        return self._leave() + f"{clock} {record.levelname:<7} {record.name.removeprefix('swarmnode.')}: {message}"

    @property
    def moves(self) -> bool:
        """Whether a line can take the place of another."""
        return self.stream.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, ahead: str) -> None:
        with self.lock or threading.RLock():
            self.stream.write(self._in_place(self._result, ahead) + self.terminator if ahead else self._leave())
            self.flush()

    def _in_place(self, result: str, ahead: str) -> str:
        line, rows = "; ".join(filter(None, (result, ahead))), self._rows
        self._rows, self._result = -(-len(line) // shutil.get_terminal_size().columns), result
        return (f"\x1b[{rows}A\x1b[J" if rows else "") + line

    def _leave(self) -> str:
        """What erases the line in whose place the next would stand, unless it is a result; no other takes its place."""
        rows, result, self._rows, self._result = self._rows, self._result, 0, ""
        return f"\x1b[{rows}A\x1b[J" if rows and not result else ""


def show_ahead(text: str) -> bool:
    """Show on the console what goes on now, in the place of what was shown so before; says whether it is a terminal.

    Without a text nothing is shown any more. To be called so before something else writes to the terminal.
    """
    consoles = [each for each in logging.getLogger().handlers if isinstance(each, _Console) and each.moves]
    for console in consoles:
        console.show(text)
    return bool(consoles)


class _RotatedFile(logging.handlers.RotatingFileHandler):
    """A full disk stops the log and is said once on the console; it does not stop the node."""

    _full = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            super().handleError(record)
        elif not self._full:
            self._full = True
            print(f"{self.baseFilename}: disk full, log lines are lost until there is space", file=sys.stderr)


class Ring(Generic[T]):
    """The newest items, for whoever asks. They may be put from any thread; a reader that is too slow misses some."""

    def __init__(self, size: int = RING) -> None:
        self._items: deque[tuple[int, T]] = deque(maxlen=size)
        self._count = 0
        self._guard = threading.Lock()
        self._followers: dict[trio.Event, trio.lowlevel.TrioToken] = {}

    def put(self, item: T) -> None:
        with self._guard:
            self._count += 1
            self._items.append((self._count, item))
            followers, self._followers = self._followers, {}
        if followers:
            import trio

            for event, token in followers.items():
                try:
                    token.run_sync_soon(event.set, idempotent=True)
                except trio.RunFinishedError:
                    continue  # the loop that followed has ended, and its follower with it

    async def stream(self, newest: int, follow: bool) -> AsyncIterator[T]:
        """The `newest` items, and with `follow` each further one as it comes, until it is closed."""
        import trio

        with self._guard:
            seen = self._count - min(max(newest, 0), len(self._items))
        while True:
            event = trio.Event()
            with self._guard:
                fresh = [(number, item) for number, item in self._items if number > seen]
                if not fresh and follow:
                    self._followers[event] = trio.lowlevel.current_trio_token()
            for number, item in fresh:
                seen = number
                yield item
            if not follow:
                return
            if not fresh:
                try:
                    await event.wait()
                finally:
                    with self._guard:
                        self._followers.pop(event, None)


class _IntoRing(logging.Handler):
    def __init__(self, ring: Ring[Line]) -> None:
        super().__init__()
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        self._ring.put(as_line(record))


def setup_logs(folder: Path, level: str, console: str = "plain") -> Ring[Line]:
    """Send all logging to `folder`/swarmnode.jsonl, to standard error as `console` says, and to the ring returned.

    Replaces handlers that were there. Raises OSError where the file cannot be opened.
    """
    ring: Ring[Line] = Ring()
    file = _RotatedFile(folder / FILE_NAME, maxBytes=FILE_SIZE, backupCount=FILES, encoding="utf-8")
    (folder / FILE_NAME).chmod(0o600)
    shown = logging.StreamHandler(sys.stderr) if console == "json" else _Console(sys.stderr)
    for written in (file, shown):
        written.setFormatter(_AsJson())  # which _Console does without
    logging.basicConfig(handlers=(_IntoRing(ring), file, shown), level=level.upper(), force=True)
    return ring


def set_level(part: str, level: str) -> None:
    """Let `part` log from `level` on, until the process ends; "" stands for all, and ends what was set for ours.

    `default` is the level before any was set; of all, each part has its own again, also what libraries had.
    A part is called as its lines are, without "swarmnode." at the beginning, or a package such as libp2p. Raises
    ValueError, with a text for a person, where there is no such part or level.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"{level!r} is no level of the log: {', '.join(LEVELS).lower()}")
    named, back = _full_name(part), level.upper() == "DEFAULT"
    for name in [each for each in _at_first if each == named or not part]:
        if back or name.startswith(OURS):  # libraries would say too much at the level of all
            logging.getLogger(name).setLevel(_at_first.pop(name))
    if not back:
        _at_first.setdefault(named, logging.getLogger(named).level)
        logging.getLogger(named).setLevel(level.upper())


def levels(part: str = "") -> dict[str, str]:
    """The level of each part with one of its own, and under "" of the others; or of `part`. Raises as `set_level`."""
    if part:
        return {part: logging.getLevelName(logging.getLogger(_full_name(part)).getEffectiveLevel())}
    names = [name for name in logging.root.manager.loggerDict if name.startswith(OURS) or "." not in name]
    own = {name: level for name in sorted(names) if (level := logging.getLogger(name).level)}
    told = {name.removeprefix(OURS): logging.getLevelName(level) for name, level in own.items()}
    return {"": logging.getLevelName(logging.root.level), **told}


def _full_name(part: str) -> str:
    """The logger of a part; raises ValueError where nothing logs by that name."""
    if not part:
        return ""
    known = list(logging.root.manager.loggerDict)
    for name in (OURS + part.removeprefix(OURS), part):
        if any(each == name or each.startswith(f"{name}.") for each in known):
            return name
    parts = sorted({".".join(each.removeprefix(OURS).split(".")[:2]) for each in known if each.startswith(OURS)})
    raise ValueError(f"no part of the node logs as {part!r}; there are {', '.join(parts)}")


def read_tail(folder: Path, lines: int) -> list[Line]:
    """The last `lines` lines of the log files in `folder`, oldest first; lines that are not JSON are left out."""
    found: list[Line] = []
    for number in range(FILES + 1):
        path = folder / (FILE_NAME if number == 0 else f"{FILE_NAME}.{number}")
        if len(found) >= lines or not path.exists():
            break
        with path.open("rb") as file:
            newest = deque(file, maxlen=lines - len(found))
        found = [line for raw in newest if (line := _parse(raw))] + found
    return found


def _parse(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"time", "level", "logger", "message"} <= line.keys() else None
