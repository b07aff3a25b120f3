"""The dashboard's server over real sockets, before a control socket with a few methods: who may ask, what is told."""

from __future__ import annotations

import json
import re
import stat
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from swarmnode.node.control import Declined
from swarmnode.node.control.server import ControlServer
from swarmnode.node.dashboard import server as server_module
from swarmnode.node.dashboard.server import BODY_LIMIT, METHODS, Dashboard, listen, served, token_in
from swarmnode.node.storage.datadir import DataDir

JSON = {"Content-Type": "application/json"}


class FakeNode:
    """The methods of a daemon, as far as the page needs them, and what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.problems: list[str] = []
        self.ready = True
        self.send, self.receive = trio.open_memory_channel[dict[str, Any]](10)
        self.readers = 0

    def status(self) -> dict[str, Any]:
        return {"peer_id": "12D3KooWme", "ready": self.ready, "problems": self.problems}

    def methods(self) -> dict[str, Any]:
        def answering(name: str, result: Callable[[], Any]) -> Callable[[dict[str, Any]], Awaitable[Any]]:
            async def answer(params: dict[str, Any]) -> Any:
                self.asked.append((name, params))
                return result()

            return answer

        return {
            "status": answering("status", self.status),
            "peers": answering("peers", lambda: {"peers": [], "kept_out": []}),
            "metrics": answering("metrics", lambda: {"text": "# TYPE a gauge\na 1\n", "metrics": []}),
            "pause": answering("pause", dict),
            "choose": answering("choose", dict),
            "leave": answering("leave", dict),
            "rollouts_show": self._decline,
            "events": self._events,
        }

    async def _decline(self, params: dict[str, Any]) -> Any:
        raise Declined("there is no such group", exit_code=8)

    async def _events(self, params: dict[str, Any]) -> AsyncIterator[Any]:
        self.readers += 1
        try:
            async for item in self.receive:
                yield item
        finally:
            self.readers -= 1


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Site:
    """A dashboard that serves one node, and how to ask it."""

    dashboard: Dashboard
    node: FakeNode
    token: str
    port: int
    stop: Callable[[], None]

    async def request(
        self, method: str, path: str, body: bytes = b"", *, token: str | None = None, **headers: str
    ) -> trio.SocketStream:
        """Send a request with the token and what else a browser sends; its connection."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        sent = {
            "Host": f"127.0.0.1:{self.port}",
            "Authorization": f"Bearer {self.token if token is None else token}",
            "Content-Length": str(len(body)),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value)]
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
        return stream

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: Any) -> Answer:
        async with await self.request(method, path, body, Connection="close", **headers) as stream:
            got = b"".join([chunk async for chunk in stream])
        head, _, rest = got.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        told = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Answer(int(first.split()[1]), told, rest)

    async def readers(self, count: int) -> None:
        """Wait until so many read the node's events."""
        while self.node.readers != count:  # noqa: ASYNC110 (a fake has no event for it)
            await trio.sleep(0.01)

    async def call(self, method: str, **params: Any) -> Answer:
        return await self.ask(
            "POST", f"/api/nodes/0/{method}", json.dumps(params).encode(), Content_Type="application/json"
        )


def serve(home: Path, check: Callable[[Site], Awaitable[None]], *, address: str = "127.0.0.1:0") -> None:
    """Run `check` while a dashboard serves a fake node that lives in `home`."""

    async def main() -> None:
        data_dir, node = DataDir(home), FakeNode()
        data_dir.prepare()
        listener = listen(address)
        dashboard = Dashboard([("first", home)], token_in(home), listener)
        port = listener.getsockname()[1]
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(data_dir.prepare_socket(), node.methods()).run)
                async with trio.open_nursery() as inner:
                    await inner.start(dashboard.run)
                    stop = inner.cancel_scope.cancel
                    await check(Site(dashboard, node, token_in(home), port, stop))
                    stop()
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_the_page_comes_without_a_token_and_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        page = await site.ask("GET", "/", token="")
        assert page.status == 200 and b"<script src=" in page.body
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        assert page.headers["cache-control"] == "no-store"
        assert not [name for name in page.headers if name.startswith("access-control")]
        for path in ("/../server.py", "/%2e%2e/server.py", "/server.py", "/..%2fserver.py"):
            assert (await site.ask("GET", path)).status == 404

    serve(tmp_path, check)


@pytest.mark.parametrize(
    "path", ["/api/nodes", "/api/nodes/0/live", "/metrics", "/api/nodes/0/pause", "/api/nodes/0/choose"]
)
def test_without_the_token_nothing_is_told_and_nothing_changes(tmp_path: Path, path: str) -> None:
    async def check(site: Site) -> None:
        for token in ("", "wrong", site.token[:-1], site.token + "x", "ü"):
            for method in ("GET", "POST"):
                refused = await site.ask(method, path, b"{}", token=token, **JSON)
                assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
                assert refused.json["error"]["message"]
        assert site.node.asked == []

    serve(tmp_path, check)


def test_no_way_to_write_a_path_or_a_host_gets_around_the_token(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        for path in ("/api/nodes?/healthz", "/healthz/../api/nodes", "/%61pi/nodes", "//api/nodes", "/nothing"):
            assert (await site.ask("GET", path, token="")).status == 401
        for host in (
            "localhost/healthz?",
            "localhost/#",
            "localhost:80/",
            "localhost\t",
            "a@localhost",
            "localhost:1:2",
        ):
            assert (await site.ask("GET", "/api/nodes", Host=host, token="")).status in (400, 401, 403)
        assert site.node.asked == []

    serve(tmp_path, check)


def test_the_token_is_long_private_and_kept(tmp_path: Path) -> None:
    token = token_in(tmp_path)
    assert token == token_in(tmp_path) != token_in(tmp_path.parent)
    assert len(token) == 43 and stat.S_IMODE((tmp_path / "dashboard.token").stat().st_mode) == 0o600
    (tmp_path / "dashboard.token").write_text("")  # a disk that was full
    assert len(token_in(tmp_path)) == 43


def test_other_origins_and_names_may_not_ask(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        here = f"127.0.0.1:{site.port}"
        origins = ("http://evil.example", "null", f"https://{here}", f"http://127.0.0.1:{site.port + 1}", here)
        for origin in origins:
            assert (await site.ask("POST", "/api/nodes/0/pause", b"{}", Origin=origin, **JSON)).status == 403
        for host in (
            "evil.example",
            f"evil.example:{site.port}",
            f"127.0.0.1.evil.example:{site.port}",
            "10.0.0.1",
            "@",
        ):
            assert (await site.ask("GET", "/api/nodes", Host=host)).status in (400, 403)
            assert (await site.ask("GET", "/", Host=host)).status in (400, 403)
        assert site.node.asked == []
        assert (await site.ask("GET", "/api/nodes", Origin=f"http://{here}")).status == 200
        assert (await site.ask("GET", "/api/nodes", Host="localhost:8080")).status == 200  # ssh -L

    serve(tmp_path, check)


def test_only_json_that_is_posted_changes_anything(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        path = "/api/nodes/0/pause"
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert (await site.ask("POST", path, b"{}", Content_Type=kind)).status == 415
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert (await site.ask(method, path, **JSON)).status == 405
        for body in (b"{", b"[]", b"1", b"[" * 50_000):
            assert (await site.ask("POST", path, body, **JSON)).status == 400
        assert (await site.ask("POST", path, b"{" + b" " * BODY_LIMIT, **JSON)).status == 413
        assert site.node.asked == []
        assert (await site.call("pause")).json == {}
        assert site.node.asked == [("pause", {})]

    serve(tmp_path, check)


def test_what_is_served_is_what_the_page_asks_for_and_how_the_node_is() -> None:
    script = (server_module.PAGE / "app.js").read_text(encoding="utf-8")
    asked = re.findall(r'(?:daemon\.call|\bask)\((?:[\w.]+\([\w.]+\)|\w+), "(\w+)"', script)
    steered = re.findall(r"\bsteer\(([^;]*)\);", script)
    assert {*asked, *re.findall(r'"(\w+)"', " ".join(steered)), "status"} == METHODS


def test_what_takes_paths_deletes_or_never_ends_is_not_served(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        for method in ("leave", "shards_put", "shards_get", "state_export", "successor_publish", "events", "logs", "x"):
            assert (await site.call(method)).status == 404
        assert site.node.asked == []

    serve(tmp_path, check)


def test_a_method_that_says_no_says_why(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        refused = await site.call("rollouts_show", id="x")
        assert refused.status == 400
        assert refused.json == {"error": {"exit_code": 8, "message": "there is no such group"}}
        nobody = await site.ask("POST", "/api/nodes/1/status", b"{}", **JSON)
        assert nobody.status == 400 and "the first is 0" in nobody.json["error"]["message"]
        unknown = await site.call("scores")  # by this daemon, of another version
        assert unknown.status == 400 and "no method" in unknown.json["error"]["message"]

    serve(tmp_path, check)


def test_nodes_metrics_health_and_readiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(site: Site) -> None:
        assert (await site.ask("GET", "/api/nodes")).json == [{"node": 0, "name": "first", "peer_id": "12D3KooWme"}]
        metrics = await site.ask("GET", "/metrics")
        assert metrics.body == b"# TYPE a gauge\na 1\n"
        assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        for number in ("x", "-1", "1", "%C2%B2", "9" * 5000):
            assert (await site.ask("GET", f"/metrics?node={number}")).status == 400
        assert (await site.ask("GET", "/healthz", token="")).status == 200
        assert (await site.ask("GET", "/readyz", token="")).status == 200
        site.node.problems = ["the disk is full: /secret"]
        unready = await site.ask("GET", "/readyz", token="")
        assert unready.status == 503 and b"secret" not in unready.body
        site.node.problems, site.node.ready = [], False  # it is still starting
        assert (await site.ask("GET", "/readyz", token="")).status == 503

    monkeypatch.setattr(server_module, "VIEW_EVERY", 0.0)
    serve(tmp_path, check)


def test_readiness_is_asked_of_a_node_once_however_many_want_to_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(site: Site) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(partial(site.ask, "GET", "/readyz", token=""))
        assert (await site.ask("GET", "/readyz", token="")).status == 200
        assert site.node.asked == [("status", {})]

    monkeypatch.setattr(server_module, "VIEW_EVERY", 60.0)
    serve(tmp_path, check)


async def events_of(stream: trio.SocketStream) -> AsyncIterator[tuple[str, Any]]:
    """The server-sent events of an answer, as they come."""
    pending = b""
    async for chunk in stream:
        pending += chunk
        while (begin := pending.find(b"event: ")) >= 0 and (end := pending.find(b"\n\n", begin)) >= 0:
            kind, data = pending[begin:end].decode().split("\n", 1)
            pending = pending[end + 2 :]
            yield kind.removeprefix("event: "), json.loads(data.replace("\n", "").removeprefix("data: "))


def test_live_tells_the_view_each_second_and_a_round_when_it_happens(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        began = trio.current_time()
        async with await site.request("GET", "/api/nodes/0/live") as stream, aclosing(events_of(stream)) as events:
            assert await anext(events) == (
                "view",
                {
                    "status": site.node.status(),
                    "peers": {"peers": [], "kept_out": []},
                },
            )
            assert site.node.readers == 1
            await site.node.send.send({"event": "round", "round": 7})
            assert await anext(events) == ("round", {"event": "round", "round": 7})  # before the next view is due
            assert (await anext(events))[0] == "view"
            assert 1 <= trio.current_time() - began < 10

    serve(tmp_path, check)


def test_who_stops_reading_costs_nothing_any_more(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        async with await site.request("GET", "/api/nodes/0/live") as stream, aclosing(events_of(stream)) as events:
            await anext(events)
        with trio.fail_after(server_module.GONE_WITHIN + 1):
            await site.readers(0)
        asked = len(site.node.asked)
        await trio.sleep(2 * server_module.VIEW_EVERY)
        assert len(site.node.asked) == asked

    serve(tmp_path, check)


def test_a_reader_that_stalls_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SEND_LIMIT", 0.3)

    async def check(site: Site) -> None:
        async with await site.request("GET", "/api/nodes/0/live"):
            with trio.move_on_after(10) as patience:
                await site.readers(1)
                while site.node.readers:
                    with trio.move_on_after(0.1):
                        await site.node.send.send({"event": "round", "text": "x" * 500_000})
            assert not patience.cancelled_caught
        assert (await site.ask("GET", "/api/nodes")).status == 200

    serve(tmp_path, check)


def test_the_end_is_quick_with_readers_of_every_kind(tmp_path: Path) -> None:
    began: list[float] = []

    async def check(site: Site) -> None:
        stalled = [await site.request("GET", "/api/nodes/0/live") for _ in range(2)]
        silent, half = [await trio.open_tcp_stream("127.0.0.1", site.port) for _ in range(2)]
        await half.send_all(b"POST /api/nodes/0/pause HTTP/1.1\r\nHost: loc")
        body = await site.request("POST", "/api/nodes/0/pause", Content_Length="100", Content_Type="application/json")
        await site.readers(2)
        for _ in range(20):  # until nothing more fits
            with trio.move_on_after(0.2):
                await site.node.send.send({"event": "round", "text": "x" * 900_000})
        held.extend([*stalled, silent, half, body])  # open to the end
        began.append(time.monotonic())

    held: list[trio.SocketStream] = []
    serve(tmp_path, check)
    assert time.monotonic() - began[0] < server_module.SEND_LIMIT / 2


def test_a_connection_that_fails_ends_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Any) -> None:
        raise RuntimeError("a bug of a library")

    async def check(site: Site) -> None:
        with monkeypatch.context() as patch, pytest.raises((trio.BrokenResourceError, IndexError)):
            patch.setattr(server_module.TCPServer, "run", fail)
            await site.ask("GET", "/healthz")
        assert (await site.ask("GET", "/healthz")).status == 200

    serve(tmp_path, check)
    assert "a bug of a library" in caplog.text


def test_too_many_connections_and_garbage_end_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 4)
    nonsense = (
        b"\x00" * 100,
        b"GET / HTTP/9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nHTTP2-Settings: ???\r\nConnection: upgrade\r\n\r\n",
        b"GET /" + b"a" * 20_000,
        b"GET /api/nodes/0/live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    )

    async def check(site: Site) -> None:
        for sent in nonsense:
            async with await trio.open_tcp_stream("127.0.0.1", site.port) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(sent)
                    await stream.send_eof()
                    got = b"".join([chunk async for chunk in stream])
                    assert b" 200" not in got and b" 101 \r\nsec-websocket" not in got.lower()
        strangers = [await site.request("GET", "/healthz", token="") for _ in range(5)]
        owners = [await site.request("GET", "/api/nodes/0/live") for _ in range(4)]
        await site.readers(4)
        for stream in strangers:  # made room, the oldest first
            with suppress(trio.BrokenResourceError), trio.fail_after(5):
                while await stream.receive_some():
                    pass
        with pytest.raises((trio.BrokenResourceError, ValueError, IndexError)):
            await site.ask("GET", "/healthz")
        assert site.node.readers == 4
        for stream in owners:
            await stream.aclose()
        await site.readers(0)
        await trio.sleep(server_module.GONE_WITHIN + 0.2)
        assert (await site.ask("GET", "/healthz")).status == 200

    serve(tmp_path, check)
    assert "Traceback" not in caplog.text


def test_a_port_that_is_taken_is_no_reason_to_fail() -> None:
    with listen("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        with listen(f"127.0.0.1:{port}") as second:
            assert second.getsockname()[1] != port
    with pytest.raises(OSError):
        listen("192.0.2.1:0")


def test_on_an_address_of_the_network_every_name_of_the_machine_will_do_and_the_owner_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(site: Site) -> None:
        assert site.dashboard.address == f"http://127.0.0.1:{site.port}/" and "ssh -L" in caplog.text
        assert (await site.ask("GET", "/healthz", Host="worker:4078")).status == 200  # Prometheus beside a container
        assert (await site.ask("GET", "/api/nodes", Host="worker:4078", token="")).status == 401
        assert (await site.ask("GET", "/api/nodes", Host="worker:4078", Origin="http://x.example")).status == 403

    serve(tmp_path, check, address="0.0.0.0:0")


def test_one_page_serves_several_nodes_from_a_thread_and_says_which_are_gone(tmp_path: Path) -> None:
    homes = [tmp_path / "0", tmp_path / "1"]

    async def ask(address: str) -> list[dict[str, Any]]:
        base, _, token = address.partition("#")
        request = urllib.request.Request(f"{base}api/nodes", headers={"Authorization": f"Bearer {token}"})
        body = await trio.to_thread.run_sync(lambda: urllib.request.urlopen(request, timeout=10).read())
        return list(json.loads(body))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            data_dir = DataDir(homes[0])
            data_dir.prepare()
            await nursery.start(ControlServer(data_dir.prepare_socket(), FakeNode().methods()).run)
            with served([("first", homes[0]), ("second", homes[1])], tmp_path, "127.0.0.1:0") as address:
                assert await ask(address) == [
                    {"node": 0, "name": "first", "peer_id": "12D3KooWme"},
                    {"node": 1, "name": "second", "peer_id": None},
                ]
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_whose_thread_fails_is_waited_for_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(main: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(trio, "run", fail)
    with pytest.raises(OSError, match="did not start"), served([("first", tmp_path)], tmp_path, "127.0.0.1:0"):
        pass
