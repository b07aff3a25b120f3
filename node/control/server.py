"""The daemon's side of the control socket.

Who may speak: processes of the daemon's own user, and root. The socket is 0600 in a 0700 directory, and the kernel's
word on the peer (SO_PEERCRED) is checked besides. One client's requests are answered in order; clients do not wait for
one another. A line that is too long or no JSON ends that client's connection; a failing method ends only its request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from swarmnode.crdt.record import InvalidRecord
from swarmnode.node.control import INTERNAL_ERROR, INVALID_REQUEST, LINE_LIMIT, METHOD_NOT_FOUND, PARSE_ERROR, REFUSED
from swarmnode.node.exitcodes import CONFIG, ERROR, USAGE, ExpectedError
from swarmnode.node.logs import strict_json
from swarmnode.protocols.state.backend import StateError
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.training.options import SettingError

Method = Callable[[dict[str, Any]], Awaitable[Any] | AsyncGenerator[Any, None]]

MAX_CLIENTS = 32  # connections at once; further ones are closed at once
SEND_LIMIT = 10.0  # s; a client that does not read for so long is dropped
REFUSALS = (ExpectedError, SettingError, InvalidRecord, StateError, ShardError)  # their texts are fit for a person
EXIT_CODES: dict[type[Exception], int] = {SettingError: CONFIG, InvalidRecord: USAGE}  # of those that have none

log = logging.getLogger(__name__)


def may_connect(peer_uid: int | None, own_uid: int) -> bool:
    """Whether a process of user `peer_uid` may steer a daemon of user `own_uid`: its own user and root may.

    None is a system that does not tell; there the modes of the socket and its directory decide.
    """
    return peer_uid is None or peer_uid in (own_uid, 0)


def peer_uid_of(connection: socket.socket | trio.socket.SocketType) -> int | None:
    """The user at the other end of a unix socket, from the kernel; None where the system has no SO_PEERCRED."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


def served(*apis: object) -> dict[str, Method]:
    """The public methods of these objects that take a request's `params`, by name: what `ControlServer` answers."""
    public = [(api, name) for api in apis for name in vars(type(api)) if not name.startswith("_")]
    methods = {name: getattr(api, name) for api, name in public}
    return {name: method for name, method in methods.items() if "params" in getattr(method, "__annotations__", ())}


class ControlServer:
    """Answers `methods` on the unix socket `path` for as long as `run` runs.

    Methods take the request's params and return JSON, or an async generator of JSON, which is a stream. They raise one
    of REFUSALS, such as `Declined`, with a text for the person; ValueError, KeyError and TypeError in a method's
    reading of its params are its own to turn into `Declined`. All else is logged, and told as an internal error.
    """

    def __init__(self, path: Path, methods: Mapping[str, Method]) -> None:
        self.path = path
        self._methods = methods
        self._clients = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; started once connections are accepted. The socket file is removed at the end.

        The caller holds the data directory's lock, so a socket file that is already there is left from a crash.
        """
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            self.path.unlink(missing_ok=True)
            await listener.bind(str(self.path))  # in a folder that is the owner's alone, under this process's umask
            self.path.chmod(0o600)
            bound = self.path.lstat().st_ino
            listener.listen(MAX_CLIENTS)
            task_status.started()
            try:  # where there are too few descriptors, clients wait
                await trio.serve_listeners(self._client, [trio.SocketListener(listener)])
            finally:
                with contextlib.suppress(FileNotFoundError):
                    if self.path.lstat().st_ino == bound:
                        self.path.unlink()

    async def _client(self, stream: trio.SocketStream) -> None:
        async with stream:
            uid = peer_uid_of(stream.socket)
            if not may_connect(uid, os.getuid()):
                log.warning("a process of user %s was refused at the control socket", uid)
                return
            if self._clients >= MAX_CLIENTS:
                log.warning("control socket: %d clients are connected, one more was turned away", self._clients)
                return
            self._clients += 1
            try:
                await self._answer_lines(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                log.debug("a control client went away before it was answered")
            finally:
                self._clients -= 1

    async def _answer_lines(self, stream: trio.SocketStream) -> None:
        rest = b""
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_LIMIT:  # wherever it ends
                lines.append(rest)
            for line in lines:
                if not await self._answer(stream, line):
                    return

    async def _answer(self, stream: trio.SocketStream, line: bytes) -> bool:
        """Answer one request; False when the connection is then to be closed."""
        if len(line) > LINE_LIMIT:
            await _send(stream, _error(None, INVALID_REQUEST, f"a request has at most {LINE_LIMIT} bytes"))
            return False
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            await _send(stream, _error(None, PARSE_ERROR, "the line is not JSON"))
            return False
        if not isinstance(request, dict) or not isinstance(request.get("method"), str):
            await _send(stream, _error(None, INVALID_REQUEST, "a request is an object with a method"))
            return True
        key, name, params = request.get("id"), request["method"], request.get("params", {})
        if not isinstance(params, dict) or isinstance(key, (dict, list)):
            await _send(stream, _error(None, INVALID_REQUEST, "params are an object, and an id is text or a number"))
            return True
        try:
            if name in self._methods:
                result: Any = self._methods[name](params)
                if isinstance(result, AsyncGenerator):
                    if not await self._send_items(stream, key, result):
                        return False
                    result = None
                else:
                    result = await result
                answer = {"jsonrpc": "2.0", "id": key, "result": result}
            else:
                known = ", ".join(sorted(self._methods))
                answer = _error(key, METHOD_NOT_FOUND, f"this daemon has no method {name!r}; it has: {known}")
        except REFUSALS as refusal:
            usual = EXIT_CODES.get(type(refusal), ERROR)
            answer = _error(key, REFUSED, str(refusal), exit_code=getattr(refusal, "exit_code", usual))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            raise  # the client's connection, not the method
        except Exception:  # a defect of the method is told and logged, and ends neither the daemon nor the connection
            log.exception("control method %s failed", name)
            answer = _error(key, INTERNAL_ERROR, f"{name} failed inside the daemon; swarmnode logs has the traceback")
        with trio.CancelScope(shield=True):  # what was done is told, though the daemon is ending
            await _send(stream, answer)
        return True

    async def _send_items(self, stream: trio.SocketStream, key: Any, items: AsyncGenerator[Any, None]) -> bool:
        """Send a stream's items; False when the client closed (or spoke) before the stream ended."""
        ended = False
        failure: Exception | None = None

        async def stop_when_client_speaks(scope: trio.CancelScope) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.receive_some(1)
            scope.cancel()

        # The iterator is read in this task, never in a nursery's child: an async generator must not change tasks.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_when_client_speaks, nursery.cancel_scope)
            try:
                async with contextlib.aclosing(items):
                    async for item in items:
                        await _send(stream, {"jsonrpc": "2.0", "method": "item", "params": {"id": key, "item": item}})
                ended = True
            except Exception as error:  # all of them: raised below for `_answer`, as a nursery would wrap it in a group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return ended


async def _send(stream: trio.SocketStream, message: dict[str, Any]) -> None:
    with trio.fail_after(SEND_LIMIT):
        text = json.dumps(strict_json(message), ensure_ascii=False)
        await stream.send_all(text.encode(errors="backslashreplace") + b"\n")


def _error(key: Any, code: int, text: str, *, exit_code: int | None = None) -> dict[str, Any]:
    error: dict[str, Any] = {"code": code, "message": text}
    if exit_code is not None:
        error["data"] = {"exit_code": exit_code}
    return {"jsonrpc": "2.0", "id": key, "error": error}
