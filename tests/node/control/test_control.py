"""The control socket, over real unix sockets: answers, streams, and what ends only the one who caused it."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from swarmnode.node.control import LINE_LIMIT, METHOD_NOT_FOUND, PARSE_ERROR, Declined
from swarmnode.node.control import server as server_module
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.control.server import ControlServer, may_connect
from swarmnode.node.storage.datadir import DataDir


async def echo(params: dict[str, Any]) -> Any:
    return params


async def decline(params: dict[str, Any]) -> Any:
    raise Declined("no trainer here: start one", exit_code=8)


async def broken(params: dict[str, Any]) -> Any:
    raise RuntimeError("a bug")


async def three(params: dict[str, Any]) -> AsyncIterator[Any]:
    for number in range(3):
        yield {"number": number}


def serve(
    home: Path,
    check: Callable[[DataDir], Awaitable[None]],
    streams: dict[str, Any] | None = None,
) -> None:
    """Run `check` while a server with a few methods listens on the data directory `home`."""

    async def main() -> None:
        data_dir = DataDir(home)
        data_dir.prepare()
        methods = {"echo": echo, "decline": decline, "broken": broken, **(streams or {"three": three})}
        server = ControlServer(data_dir.prepare_socket(), methods)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                await check(data_dir)
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_call_is_answered_and_the_socket_is_private_and_goes_away(tmp_path: Path) -> None:
    async def check(home: DataDir) -> None:
        client = ControlClient(home.path)
        assert await trio.to_thread.run_sync(lambda: client.call("echo", text="größe", n=1)) == {
            "text": "größe",
            "n": 1,
        }
        assert stat.S_IMODE((home.path / "control.sock").stat().st_mode) == 0o600

    serve(tmp_path, check)
    assert not (tmp_path / "control.sock").exists()
    with pytest.raises(NotRunning, match="swarmnode run"):
        ControlClient(tmp_path).call("echo")


def test_what_no_number_is_comes_as_null(tmp_path: Path) -> None:
    async def diverged(params: dict[str, Any]) -> Any:
        return {"losses": (1.5, math.nan, math.inf)}

    async def check(home: DataDir) -> None:
        (answer,) = await talk(home, b'{"id": 1, "method": "diverged"}\n', 1)
        assert answer["result"] == {"losses": [1.5, None, None]}

    serve(tmp_path, check, {"diverged": diverged})


def test_a_stream_delivers_its_items_and_ends(tmp_path: Path) -> None:
    async def check(home: DataDir) -> None:
        items = await trio.to_thread.run_sync(lambda: list(ControlClient(home.path).stream("three")))
        assert items == [{"number": 0}, {"number": 1}, {"number": 2}]

    serve(tmp_path, check)


def test_a_client_that_leaves_ends_its_stream_in_the_daemon(tmp_path: Path) -> None:
    ended = trio.Event()

    async def endless(params: dict[str, Any]) -> AsyncIterator[Any]:
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            ended.set()

    async def check(home: DataDir) -> None:
        def first() -> Any:
            stream = ControlClient(home.path).stream("endless")
            item = next(stream)
            stream.close()  # type: ignore[attr-defined]
            return item

        assert await trio.to_thread.run_sync(first) == 1
        await ended.wait()

    serve(tmp_path, check, streams={"endless": endless})


def test_a_refusal_reaches_the_person_with_its_exit_code(tmp_path: Path) -> None:
    async def check(home: DataDir) -> None:
        with pytest.raises(ControlError, match="no trainer here") as refused:
            await trio.to_thread.run_sync(lambda: ControlClient(home.path).call("decline"))
        assert refused.value.exit_code == 8

    serve(tmp_path, check)


def test_a_stream_can_decline_as_a_call_can(tmp_path: Path) -> None:
    async def refusing(params: dict[str, Any]) -> AsyncIterator[Any]:
        yield 1
        raise Declined("enough of that")

    async def check(home: DataDir) -> None:
        with pytest.raises(ControlError, match="enough of that"):
            await trio.to_thread.run_sync(lambda: list(ControlClient(home.path).stream("refusing")))

    serve(tmp_path, check, streams={"refusing": refusing})


def test_a_bug_in_a_method_ends_neither_server_nor_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(home: DataDir) -> None:
        answers = await talk(home, b'{"id":1,"method":"broken"}\n{"id":2,"method":"echo","params":{"a":1}}\n', 2)
        assert "swarmnode logs" in answers[0]["error"]["message"]
        assert answers[1]["result"] == {"a": 1}

    serve(tmp_path, check)
    assert "a bug" in caplog.text


def test_what_was_done_as_the_daemon_ended_is_answered(tmp_path: Path) -> None:
    begun = trio.Event()

    async def finish(params: dict[str, Any]) -> Any:
        with trio.CancelScope(shield=True):
            begun.set()
            await trio.sleep(0.2)
        return "done"

    async def main() -> None:
        data_dir = DataDir(tmp_path)
        data_dir.prepare()
        server = ControlServer(data_dir.prepare_socket(), {"finish": finish})
        said: list[Any] = []

        async def ask() -> None:
            said.append(await trio.to_thread.run_sync(lambda: ControlClient(tmp_path).call("finish")))

        with trio.fail_after(20):
            async with trio.open_nursery() as client, trio.open_nursery() as daemon:
                await daemon.start(server.run)
                client.start_soon(ask)
                await begun.wait()
                daemon.cancel_scope.cancel()
        assert said == ["done"]

    trio.run(main)


def test_an_unknown_method_is_named_beside_those_there_are(tmp_path: Path) -> None:
    async def check(home: DataDir) -> None:
        (answer,) = await talk(home, b'{"id":1,"method":"dance"}\n', 1)
        assert answer["error"]["code"] == METHOD_NOT_FOUND
        assert "'dance'" in answer["error"]["message"] and "echo" in answer["error"]["message"]

    serve(tmp_path, check)


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[" * 100_000 + b"\n",
        b'{"method": "echo", "id": ' + b"[" * 600 + b"]" * 600 + b"}\n",
        b'{"pad": "' + b"x" * (LINE_LIMIT + 1),
    ],
)
def test_a_broken_or_endless_line_ends_only_its_connection(tmp_path: Path, line: bytes) -> None:
    async def check(home: DataDir) -> None:
        (answer,) = await talk(home, line, 1)
        assert answer["error"]["code"] < 0 and (len(line) > 100 or answer["error"]["code"] == PARSE_ERROR)
        assert await trio.to_thread.run_sync(lambda: ControlClient(home.path).call("echo", a=1)) == {"a": 1}

    serve(tmp_path, check)


def test_half_a_character_in_a_request_is_answered_as_it_came(tmp_path: Path) -> None:
    async def check(home: DataDir) -> None:
        (answer,) = await talk(home, b'{"id":"\\ud800","method":"echo","params":{"a":"\\udfff"}}\n', 1)
        assert answer["id"] == "\ud800" and answer["result"] == {"a": "\udfff"}

    serve(tmp_path, check)


def test_without_a_descriptor_for_a_client_the_server_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, left = trio._socket._SocketType.accept, [None, None]

    async def short(listener: Any) -> Any:
        if left:
            left.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listener)

    async def check(home: DataDir) -> None:
        assert await trio.to_thread.run_sync(lambda: ControlClient(home.path).call("echo", a=1)) == {"a": 1}

    monkeypatch.setattr(trio._socket._SocketType, "accept", short)
    serve(tmp_path, check)
    assert not left


def test_only_the_owner_and_root_may_connect() -> None:
    assert may_connect(1000, 1000)
    assert may_connect(0, 1000)
    assert not may_connect(1001, 1000)
    assert not may_connect(1000, 0)


def test_another_user_is_turned_away_before_a_request_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def nobody(peer: int | None, own: int) -> bool:
        asked.append(peer)
        return False

    async def check(home: DataDir) -> None:
        with pytest.raises(ControlError, match="closed the connection"):
            await trio.to_thread.run_sync(lambda: ControlClient(home.path).call("echo"))

    monkeypatch.setattr(server_module, "may_connect", nobody)
    serve(tmp_path, check)
    assert asked == [os.getuid()]


def test_a_socket_left_by_a_crash_is_replaced_by_the_server_and_explained_by_the_client(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(tmp_path / "control.sock"))
    with pytest.raises(NotRunning, match="crashed"):
        ControlClient(tmp_path).call("echo")

    async def check(home: DataDir) -> None:
        assert await trio.to_thread.run_sync(lambda: ControlClient(home.path).call("echo", a=1)) == {"a": 1}

    serve(tmp_path, check)


def test_a_silent_daemon_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "control.sock"))
        frozen.listen()
        with pytest.raises(ControlError, match=r"did not answer echo within 0\.05 s"):
            ControlClient(tmp_path).call("echo", timeout=0.05)


async def talk(home: DataDir, request: bytes, answers: int) -> list[dict[str, Any]]:
    """Send raw bytes to the server of `home` and read `answers` lines."""
    async with (
        await trio.open_unix_socket(str(home.path / "control.sock")) as stream,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_send_ignoring_end, stream, request)
        got = b""
        while got.count(b"\n") < answers:
            chunk = await stream.receive_some()
            assert chunk, "the server closed before it answered"
            got += chunk
        nursery.cancel_scope.cancel()
    return [json.loads(line) for line in got.splitlines()]


async def _send_ignoring_end(stream: trio.SocketStream, request: bytes) -> None:
    try:
        await stream.send_all(request)
    except trio.BrokenResourceError:
        return  # the server refused the line before all of it was sent
