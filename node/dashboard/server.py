"""The dashboard's server: a page for the owner's browser, over HTTP on this machine.

It serves the page's files, and what docs/cli.md (The page) lists for programs.
All but the files, /healthz and /readyz want `Authorization: Bearer TOKEN`. The token lies in the data directory, which
is closed to other users, and reaches the page in the fragment of its address, which browsers send to nobody. Pages of
other origins cannot ask: a foreign Origin or Host is refused (the second is DNS rebinding), no header allows another
origin to read, and only POST with JSON changes anything.

What is asked is passed on to the control socket of the node that it is about. So one server serves one daemon from
inside or a whole local swarm, and no request can do more than one of the command line.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from ipaddress import ip_address
from math import inf
from mimetypes import guess_type
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from swarmnode.node.control import LINE_LIMIT
from swarmnode.node.control.client import ControlError, NotRunning, result_of
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.storage.datadir import DataDir, write_atomic

# The control methods that may be asked for: those that the page needs, and `status` for programs.
METHODS = frozenset(
    {"status", "peers", "metrics", "history", "scores", "shards_ls", "caps", "pause", "resume", "stop"}
    | {"choices", "choose", "discover", "rollouts_ls", "rollouts_show", "rollouts_pool", "rollouts_stats"}
)
HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:\d+)?", re.IGNORECASE)
PAGE = Path(__file__).parent / "page"
MOST_CONNECTIONS = 32  # a browser opens six to one origin
BODY_LIMIT = 64 << 10  # bytes
BODY_WITHIN = 10.0  # s for a request's body to arrive
ANSWER_WITHIN = 300.0  # s; the trainer answers between two rounds' work
LOOK_WITHIN = 5.0  # s for a node to say how it is
SEND_LIMIT = 10.0  # s; a browser that does not read for so long is dropped
SEND_BUFFER = 64 << 10  # bytes that the kernel keeps for such a one
GONE_WITHIN = 1.0  # s for a request to end whose client left
VIEW_EVERY = 1.0  # s; also between looks for /readyz, as anybody may ask
TOKEN_BYTES = 32

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

log = logging.getLogger(__name__)


def token_in(data_dir: Path) -> str:
    """The token of a data directory, drawn at the first use and kept. Raises NoSpace or DataDirError."""
    file = DataDir(data_dir).dashboard_token
    found = file.read_text(encoding="ascii", errors="replace").strip() if file.exists() else ""
    if len(found) < TOKEN_BYTES:
        found = secrets.token_urlsafe(TOKEN_BYTES)
        write_atomic(file, f"{found}\n".encode())
    return found


def listen(address: str) -> socket.socket:
    """A socket that listens on HOST:PORT, or on any free port of that host where the port is taken. Raises OSError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    for number in (int(port), 0):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of the connections as well
            listener.bind((host, number))
            listener.listen(MOST_CONNECTIONS)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or not number:
                raise
    raise AssertionError  # port 0 is never taken


class Dashboard:
    """Serves the page of some nodes, each given as (name, data directory), on one listening socket."""

    def __init__(self, nodes: Sequence[tuple[str, Path]], token: str, listener: socket.socket) -> None:
        self._nodes = nodes
        self._token = token
        self._listener = listener
        self._open: dict[tuple[str, int], trio.SocketStream] = {}  # by the other side's address, the oldest first
        self._owners: set[tuple[str, int]] = set()  # those of them that have shown the token
        self._looking = trio.Lock()
        self._ready, self._looked_at = False, -inf  # as /readyz says, trio time
        host, port = listener.getsockname()[:2]
        self._at_home = {host, "localhost"} if ip_address(host).is_loopback else None
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        node = "/api/nodes/{node:int}"
        files = {file.name: file for file in PAGE.iterdir()}
        self._files = {"/": files["index.html"], **{f"/{name}": file for name, file in files.items()}}
        self._app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/api/nodes", self._list),
                Route(f"{node}/live", self._live),
                Route(f"{node}/{{method}}", self._call, methods=["POST"]),
                *(Route(path, self._file) for path in self._files),
            ],
            exception_handlers={ExpectedError: _declined},
        )
        self._app.router.redirect_slashes = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. No request and no connection ends it."""
        if self._at_home is None:
            log.warning(
                "the dashboard is served beyond this machine and is not encrypted: whoever reads that network's "
                "traffic can take its token, and with it steer this node. Name 127.0.0.1 and use ssh -L instead"
            )
        config = Config()
        config.errorlog = log
        config.include_server_header = False
        config.h2_max_concurrent_streams = 8
        app = ASGIWrapper(self._guarded)  # type: ignore[arg-type]  # the same protocol, by two libraries
        serve = partial(self._connection, partial(TCPServer, app, config, WorkerContext(None)))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._close_at_the_end)
            await nursery.start(trio.serve_listeners, serve, [listener])
            task_status.started()

    async def _close_at_the_end(self) -> None:
        """hypercorn shields what it sends: only a closed socket ends it where nobody reads."""
        try:
            await trio.sleep_forever()
        finally:
            for stream in self._open.values():
                stream.socket.close()

    async def _connection(self, server: partial[TCPServer], stream: trio.SocketStream) -> None:
        stranger = next((each for each in self._open if each not in self._owners), None)
        if len(self._open) >= MOST_CONNECTIONS and stranger is not None:  # any user of this machine may hold some
            self._open.pop(stranger).socket.close()
        if len(self._open) >= MOST_CONNECTIONS:
            return await trio.aclose_forcefully(stream)
        try:
            client = stream.socket.getpeername()[:2]
        except OSError:  # it is gone already
            return await trio.aclose_forcefully(stream)
        self._open[client] = stream
        try:
            with trio.CancelScope() as life:
                patient: Any = _Patient(stream, life)
                await server(ConnectionState({}), patient).run()
        except Exception:  # a defect here or in hypercorn is logged, and ends neither the page nor the daemon
            log.exception("a connection to the dashboard failed")
        finally:
            if self._open.get(client) is stream:
                del self._open[client]
            self._owners.discard(client)
            await trio.aclose_forcefully(stream)

    # --- who may ask --------------------------------------------------------------------------------------------------

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The page's app for whoever may ask, with HEADERS in each answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            return  # there are no websockets here
        refusal = self._refusal(Request(scope))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        named = HOST.fullmatch(host)  # an odd one would change what its URL's path is
        if named is None or (self._at_home is not None and named[1].strip("[]") not in self._at_home):
            return _error(403, f"this page is at {self.address}; it answers to no other name")
        if request.headers.get("origin", f"http://{host}") != f"http://{host}":
            return _error(403, "another page may not ask")
        if request.scope["path"] not in (*self._files, "/healthz", "/readyz"):
            given = request.headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
                refusal = _error(401, "the token is missing or wrong; swarmnode open opens the page with it")
                refusal.headers["www-authenticate"] = "Bearer"
                return refusal
            self._owners.add(request.scope["client"])
        if request.method not in ("GET", "HEAD"):
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return _error(415, "what changes something is sent as application/json")
        return None

    # --- what is asked ------------------------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        """A file of the page. Starlette's own way to serve files and hypercorn's end of an answer hang together."""
        file = self._files[request.scope["path"]]
        return Response(file.read_bytes(), media_type=guess_type(file.name)[0])

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        async with self._looking:
            if trio.current_time() - self._looked_at >= VIEW_EVERY:
                found = await self._statuses()
                self._ready = all(one is not None and one["ready"] and not one["problems"] for one in found)
                self._looked_at = trio.current_time()
        return PlainTextResponse("ready\n" if self._ready else "not ready\n", 200 if self._ready else 503)

    async def _metrics(self, request: Request) -> Response:
        number = request.query_params.get("node", "0")
        home = self._home(int(number) if re.fullmatch("[0-9]{1,4}", number) else -1)
        answer = await _ask(home, "metrics", {}, LOOK_WITHIN)
        return PlainTextResponse(answer["text"], media_type="text/plain; version=0.0.4")

    async def _list(self, request: Request) -> Response:
        listed = []
        for number, ((name, _), status) in enumerate(zip(self._nodes, await self._statuses(), strict=True)):
            told = status or {}
            listed.append({"node": number, "name": name or told.get("name") or "", "peer_id": told.get("peer_id")})
        return JSONResponse(listed)

    async def _statuses(self) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * len(self._nodes)

        async def look(number: int) -> None:
            try:
                found[number] = await _ask(self._nodes[number][1], "status", {}, LOOK_WITHIN)
            except ExpectedError:
                log.debug("node %d does not say how it is", number, exc_info=True)

        async with trio.open_nursery() as nursery:
            for number in range(len(self._nodes)):
                nursery.start_soon(look, number)
        return found

    async def _call(self, request: Request) -> Response:
        method = request.path_params["method"]
        if method not in METHODS:
            return _error(404, f"the page may not ask for {method}; it may for {', '.join(sorted(METHODS))}")
        body = bytearray()
        with trio.move_on_after(BODY_WITHIN) as patience:
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_LIMIT:
                    return _error(413, f"a request has at most {BODY_LIMIT} bytes")
        if patience.cancelled_caught:
            return _error(408, f"the request did not arrive within {BODY_WITHIN:g} s")
        try:
            params = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            params = None
        if not isinstance(params, dict):
            return _error(400, "the body is not a JSON object")
        return JSONResponse(await _ask(self._home(request.path_params["node"]), method, params, ANSWER_WITHIN))

    async def _live(self, request: Request) -> Response:
        return _Live(self._home(request.path_params["node"]))

    def _home(self, node: int) -> Path:
        if not 0 <= node < len(self._nodes):
            raise ControlError(f"there is no node {node} here; there are {len(self._nodes)}, the first is 0")
        return self._nodes[node][1]


class _Patient:
    """A connection that ends when its other side is gone, or takes nothing for SEND_LIMIT seconds.

    hypercorn waits for ever for both: when it sends, and where a client asked for HTTP/2 and left.
    """

    def __init__(self, stream: trio.SocketStream, life: trio.CancelScope) -> None:
        self._stream = stream
        self._life = life

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive_some(self, most: int) -> bytes:
        data = b""
        try:
            data = bytes(await self._stream.receive_some(most))
        finally:
            if not data:
                self._life.deadline = trio.current_time() + GONE_WITHIN
        return data

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(SEND_LIMIT) as patience:
            await self._stream.send_all(data)
        if patience.cancelled_caught:
            self._stream.socket.close()
            raise trio.BrokenResourceError(f"the reader took nothing for {SEND_LIMIT:g} s")


class _Live(Response):
    """The life of one node for as long as somebody reads it: it ends with its connection."""

    def __init__(self, home: Path) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._home = home

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _control(self._home) as views, _control(self._home) as events:
            await events.request("events", {})
            view = await self._view(views)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell_rounds, events, send, nursery.cancel_scope)
                while True:
                    await _tell(send, "view", view)
                    await trio.sleep(VIEW_EVERY)
                    try:
                        view = await self._view(views)
                    except ControlError:
                        break
                nursery.cancel_scope.cancel()
            await send({"type": "http.response.body", "body": b""})

    async def _view(self, control: _Control) -> dict[str, Any]:
        return {"status": await control.call("status", {}), "peers": await control.call("peers", {})}

    async def _tell_rounds(self, events: _Control, send: Send, life: trio.CancelScope) -> None:
        while (message := await events.message()) is not None and "params" in message:
            await _tell(send, "round", message["params"]["item"])
        life.cancel()  # the node ended


async def _tell(send: Send, event: str, data: Any) -> None:
    text = f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


class _Control:
    """A connection to a daemon's control socket; `control/client.py` is that of commands, which run without trio."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._pending = bytearray()

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result of `method`. Raises ControlError."""
        await self.request(method, params)
        return result_of(await self.message(), method)

    async def request(self, method: str, params: Mapping[str, Any]) -> None:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            await self._stream.send_all(json.dumps(request).encode() + b"\n")
        except trio.BrokenResourceError:
            raise ControlError("the daemon closed the connection: it is ending, or has too many clients") from None

    async def message(self) -> dict[str, Any] | None:
        """The next one that comes; None where the daemon closed the connection. Raises ControlError."""
        while (end := self._pending.find(b"\n")) < 0:
            try:
                chunk = await self._stream.receive_some(LINE_LIMIT)
            except trio.BrokenResourceError:
                chunk = b""
            if not chunk:
                return None
            self._pending += chunk
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return dict(json.loads(line))


@asynccontextmanager
async def _control(home: Path) -> AsyncIterator[_Control]:
    """A connection to the daemon of a data directory. Raises NotRunning."""
    path = DataDir(home).find_socket()
    if path is None:
        raise NotRunning(home)
    try:
        stream = await trio.open_unix_socket(path)
    except OSError:
        raise NotRunning(home, "its socket is left over from one that crashed") from None
    async with stream:
        yield _Control(stream)


async def _ask(home: Path, method: str, params: Mapping[str, Any], within: float) -> Any:
    """What the daemon answers. Raises NotRunning; ControlError where it declines or takes more than `within` s."""
    with trio.move_on_after(within):
        async with _control(home) as control:
            return await control.call(method, params)
    raise ControlError(f"the daemon did not answer {method} within {within:g} s; it may be busy or frozen")


async def _declined(request: Request, error: Exception) -> Response:
    return _error(400, str(error), getattr(error, "exit_code", 1))


def _error(status: int, message: str, exit_code: int = 1) -> JSONResponse:
    return JSONResponse({"error": {"exit_code": exit_code, "message": message}}, status)


@contextmanager
def served(nodes: Sequence[tuple[str, Path]], folder: Path, address: str) -> Iterator[str]:
    """Serve the page in a thread for as long as the block runs; its address, token included. Raises OSError."""
    token = token_in(folder)
    dashboard = Dashboard(nodes, token, listen(address))
    life = trio.CancelScope()
    begun = SimpleQueue[trio.lowlevel.TrioToken | None]()

    async def main() -> None:
        with life:
            async with trio.open_nursery() as nursery:
                await nursery.start(dashboard.run)
                begun.put(trio.lowlevel.current_trio_token())

    def run() -> None:
        try:
            trio.run(main)
        finally:
            begun.put(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    inside = begun.get()
    if inside is None:
        raise OSError("its server did not start")
    try:
        yield f"{dashboard.address}#{token}"
    finally:
        inside.run_sync_soon(life.cancel)
        thread.join(SEND_LIMIT)
