"""How a person's command reaches the running daemon: JSON-RPC 2.0, one object a line, over a unix socket.

    -> {"jsonrpc": "2.0", "id": 1, "method": "status", "params": {}}
    <- {"jsonrpc": "2.0", "id": 1, "result": {…}}

A stream answers with any number of `{"jsonrpc": "2.0", "method": "item", "params": {"id": 1, "item": …}}` before its
result, and ends when the client closes. `server` is trio and lives in the daemon; `client` is plain blocking sockets,
so that commands start quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.node.exitcodes import ExpectedError

LINE_LIMIT = 1 << 20  # bytes of one line in either direction; a whole log ring or peer list fits many times
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
REFUSED = -32000  # the method understood the request and says no; the text is fit for a person


class Declined(ExpectedError):
    """Raised by a method of the daemon: the request cannot be met, and the text tells a person why and what to do."""


def absolute_path(value: Any) -> Path:
    """A path that a command gave. Raises Declined where it is relative: the daemon has another working directory."""
    path = Path(str(value or ""))
    if not path.is_absolute():
        raise Declined(f"{str(path)!r} is not an absolute path; the daemon has a working directory of its own")
    return path
