"""How a person's command reaches the running daemon: JSON-RPC 2.0, one object a line, over a unix socket.

    -> {"jsonrpc": "2.0", "id": 1, "method": "status", "params": {}}
    <- {"jsonrpc": "2.0", "id": 1, "result": {…}}

A stream answers with any number of `{"jsonrpc": "2.0", "method": "item", "params": {"id": 1, "item": …}}` before its
result, and ends when the client closes. `server` is trio and lives in the daemon; `client` is plain blocking sockets,
so that commands start quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from swarmnode.node.exitcodes import ExpectedError, UsageMistake
from swarmnode.node.storage.datadir import DataDirError

N = TypeVar("N", int, float)

LINE_LIMIT = 1 << 20  # bytes of one line in either direction; a whole log ring or peer list fits many times
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INTERNAL_ERROR = -32603
REFUSED = -32000  # the method understood the request and says no; the text is fit for a person


class Declined(ExpectedError):
    """Raised by a method of the daemon: the request cannot be met, and the text tells a person why and what to do."""


@contextmanager
def done_but(unwritten: str) -> Iterator[None]:
    """Decline what the block does where the disk does not take it; `unwritten`: what is then true all the same."""
    try:
        yield
    except DataDirError as error:
        raise Declined(f"{unwritten}: {error}", exit_code=error.exit_code) from error


def number_in(params: Mapping[str, Any], name: str, usual: N) -> N:
    """A number of a request, of the type of `usual`, which it is where none is given.

    It fits 63 bits, and is neither negative nor NaN. Raises UsageMistake for what is none.
    """
    given = params.get(name)
    try:
        found = type(usual)(usual if given in (None, "") else given)
        if 0 <= found < 1 << 63:
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageMistake(f"{name}: {str(given)[:80]!r} is no number that can be meant")
