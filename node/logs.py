"""What the node says: one JSON object a line in the data directory, plain lines on the console, a ring in memory.

    {"time": "2025-01-31T12:00:00.123Z", "level": "INFO", "logger": "swarmnode.node.daemon", "message": "…"}

The file is rotated by size, so logs hold at most `(FILES + 1) * FILE_SIZE` bytes of disk. The ring serves `swarmnode
logs --follow`: a reader that is too slow misses the oldest lines and never holds the daemon back.
"""

from __future__ import annotations

import errno
import json
import logging
import logging.handlers
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import trio

FILE_NAME = "swarmnode.jsonl"
FILE_SIZE = 8 << 20  # bytes of one log file before it is rotated
FILES = 3  # rotated files kept beside the current one
RING = 2000  # lines kept in memory; about 1 MB
LINE_LIMIT = 8 << 10  # characters of one message; the rest of it is cut, as peers' words may be in it
TAIL_CHUNK = 64 << 10  # bytes read at a time from the end of a log file

Line = dict[str, Any]  # {"time", "level", "logger", "message"}


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
    }


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(as_line(record), ensure_ascii=False)


class _ConsoleLines(logging.Formatter):
    """`12:00:00 WARNING node.daemon: …`, in local time, without the package's name."""

    def format(self, record: logging.LogRecord) -> str:
        line = as_line(record)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock} {record.levelname:<7} {record.name.removeprefix('swarmnode.')}: {line['message']}"


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


class LogRing(logging.Handler):
    """The newest lines, for whoever asks. Lines may come from any thread."""

    def __init__(self, size: int = RING) -> None:
        super().__init__()
        self._lines: deque[tuple[int, Line]] = deque(maxlen=size)
        self._count = 0
        self._guard = threading.Lock()
        self._followers: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = as_line(record)
        with self._guard:
            self._count += 1
            self._lines.append((self._count, line))
            followers, self._followers = self._followers, []
        if followers:
            import trio

            for token, event in followers:
                try:
                    token.run_sync_soon(event.set, idempotent=True)
                except trio.RunFinishedError:
                    continue  # the loop that followed has ended, and its follower with it

    def newest(self, lines: int) -> list[Line]:
        """Up to `lines` lines, oldest first."""
        with self._guard:
            return [line for _, line in self._lines][-lines:] if lines > 0 else []

    async def stream(self, lines: int, follow: bool) -> AsyncIterator[Line]:
        """The newest `lines` lines, and with `follow` each further one as it comes, until it is closed."""
        import trio

        with self._guard:
            seen = self._count - min(max(lines, 0), len(self._lines))
        while True:
            event = trio.Event()
            with self._guard:
                fresh = [(number, line) for number, line in self._lines if number > seen]
                if not fresh and follow:
                    self._followers.append((trio.lowlevel.current_trio_token(), event))
            for number, line in fresh:
                seen = number
                yield line
            if not follow:
                return
            if not fresh:
                await event.wait()


def setup_logs(folder: Path | None, level: str, *, console: TextIO | None = sys.stderr) -> LogRing:
    """Send all logging to `folder`/swarmnode.jsonl, to `console` and to the ring that is returned.

    Replaces handlers that were there. Call `adopt("libp2p")` after libp2p is imported. Raises OSError where the file
    cannot be opened.
    """
    root = logging.getLogger()
    ring = LogRing()
    handlers: list[logging.Handler] = [ring]
    if folder is not None:
        file = _RotatedFile(folder / FILE_NAME, maxBytes=FILE_SIZE, backupCount=FILES, encoding="utf-8")
        (folder / FILE_NAME).chmod(0o600)
        file.setFormatter(_JsonLines())
        handlers.append(file)
    if console is not None:
        lines = logging.StreamHandler(console)
        lines.setFormatter(_ConsoleLines())
        handlers.append(lines)
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level.upper())
    return ring


def adopt(name: str, *, level: int = logging.WARNING) -> None:
    """Take in a library's logger that had cut itself off, as `import libp2p` does (`propagate = False`)."""
    library = logging.getLogger(name)
    library.handlers.clear()
    library.propagate = True
    library.setLevel(level)


def read_tail(folder: Path, lines: int) -> list[Line]:
    """The last `lines` lines of the log files in `folder`, oldest first; lines that are not JSON are left out."""
    found: list[Line] = []
    for number in range(FILES + 1):
        path = folder / (FILE_NAME if number == 0 else f"{FILE_NAME}.{number}")
        if len(found) >= lines or not path.exists():
            break
        found = [line for raw in _last_lines(path, lines - len(found)) if (line := _parse(raw))] + found
    return found


def _parse(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"time", "level", "logger", "message"} <= line.keys() else None


def _last_lines(path: Path, lines: int) -> list[bytes]:
    """The last `lines` lines of a file, reading backwards so that a large file costs no more than its end."""
    with path.open("rb") as file:
        at = file.seek(0, 2)
        tail = b""
        while at > 0 and tail.count(b"\n") <= lines:
            step = min(TAIL_CHUNK, at)
            at -= step
            file.seek(at)
            tail = file.read(step) + tail
    return tail.splitlines()[-lines:]
