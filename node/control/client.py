"""The command line's side of the control socket, with blocking sockets and nothing else.

ControlClient("~/.local/share/swarmnode").call("status")["run"]["round"]
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarmnode.node.exitcodes import ERROR, NOT_RUNNING, ExpectedError
from swarmnode.node.storage.datadir import DataDir


class NotRunning(ExpectedError):
    """No daemon answers on the data directory."""

    exit_code = NOT_RUNNING

    def __init__(self, data_dir: Path, why: str = "") -> None:
        reason = f" ({why})" if why else ""
        super().__init__(
            f"no swarmnode daemon is running on {data_dir}{reason}. Start one with: swarmnode run RUN.toml "
            "(or swarmnode join LINK, or swarmnode open on a terminal). If it runs elsewhere, name its directory "
            "with --data-dir."
        )


class ControlError(ExpectedError):
    """The daemon answered and said no, or did not answer in time. The text is the daemon's own where there is one."""


class ControlClient:
    """Asks the daemon of one data directory. Each call has a connection of its own."""

    def __init__(self, data_dir: Path | str) -> None:
        self.data_dir = DataDir(data_dir)

    def call(self, method: str, *, timeout: float = 30.0, **params: Any) -> Any:
        """The result of `method`. Raises NotRunning, or ControlError where it fails or takes more than `timeout` s."""
        lines = self._request(method, params, timeout)
        return result_of(next(lines, None), method)

    def stream(self, method: str, *, timeout: float | None = None, **params: Any) -> Iterator[Any]:
        """The items of a stream as they come; `timeout` is the longest silence between two, None for any.

        Closing the iterator ends the stream in the daemon. Raises NotRunning or ControlError.
        """
        for message in self._request(method, params, timeout):
            if message.get("method") != "item":
                result_of(message, method)
                return
            yield message["params"]["item"]
        raise ControlError("the daemon ended while it was sending; swarmnode logs says why")

    def _request(self, method: str, params: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
        path = self.data_dir.find_socket()
        if path is None:
            raise NotRunning(self.data_dir.path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            try:
                connection.connect(str(path))
                request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                connection.sendall(json.dumps(request).encode() + b"\n")
                yield from _messages(connection)
            except TimeoutError:
                pid = self.data_dir.holder() or "PID"
                raise ControlError(
                    f"the daemon (pid {pid}) did not answer {method} within {timeout:g} s. It is busy, or stands "
                    f"still: kill -CONT {pid} wakes one that was stopped (Ctrl-Z), kill -9 {pid} ends it by force"
                ) from None
            except (ConnectionRefusedError, FileNotFoundError):
                raise NotRunning(self.data_dir.path, "its socket is left over from one that crashed") from None
            except PermissionError:
                raise ControlError(
                    f"{path}: the daemon belongs to another user; run the command as that user "
                    "(sudo -u USER swarmnode …)"
                ) from None
            except (BrokenPipeError, ConnectionResetError):
                raise ControlError("the daemon closed the connection: it is ending, or has too many clients") from None


ANSWER_LIMIT = 256 << 20  # bytes of an answer, from this user's own daemon


def _messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The JSON objects that come, a line each, until the other side closes."""
    with connection.makefile("rb") as lines:
        while line := lines.readline(ANSWER_LIMIT + 1):
            if line.endswith(b"\n"):
                yield json.loads(line)
            elif len(line) > ANSWER_LIMIT:
                raise ControlError(
                    f"the daemon sent a line of more than {ANSWER_LIMIT} bytes; is it of another version?"
                )


def result_of(message: dict[str, Any] | None, method: str) -> Any:
    """What the daemon's answer says; None stands for a closed connection. Raises ControlError."""
    if message is None:
        raise ControlError(f"the daemon closed the connection before it answered {method}; swarmnode logs says why")
    error = message.get("error")
    if error is None:
        return message.get("result")
    exit_code = error.get("data", {}).get("exit_code", ERROR)
    raise ControlError(str(error.get("message", "")), exit_code=exit_code)
