"""`swarmnode state` against two nodes with real stores: what a person does with the state, and what goes wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.cli import state
from swarmnode.crdt.record import open_element
from swarmnode.node.control.client import ControlClient, ControlError
from swarmnode.node.control.server import ControlServer, served
from swarmnode.node.control.stores_api import StoresApi
from swarmnode.node.exitcodes import USAGE
from swarmnode.node.host.addresses import public_key
from swarmnode.node.identity import peer_id_of
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.statestore import StateStore
from swarmnode.testing.memorystate import clocks_of

RUN = "ab" * 32
OTHER_RUN = "cd" * 32
Ask = Callable[..., Any]


def now() -> int:
    return time.time_ns() // 1_000_000


def verify(author: str, message: bytes, signature: bytes) -> bool:
    try:
        public_key(author).verify(signature, message)
    except Exception:
        return False
    return True


@pytest.fixture
def app() -> typer.Typer:
    return state.state


@pytest.fixture
def homes(tmp_path: Path, in_a_thread: Any) -> Iterator[tuple[Path, ...]]:
    """The data directories of two nodes of a run, one of another run, and one that is in none."""
    folders = tuple(tmp_path / name for name in "abcd")

    async def start(nursery: trio.Nursery) -> None:
        for folder, run in zip(folders, (RUN, RUN, OTHER_RUN, None), strict=True):
            key = Ed25519PrivateKey.generate()
            me = peer_id_of(key.public_key().public_bytes_raw())
            store = None
            if run is not None:
                store = StateStore(folder / "runs" / run / "state.db", run, me=me, sign=key.sign, clocks=clocks_of(now))
                await nursery.start(store.run)
            node: Any = SimpleNamespace(state=store, network=SimpleNamespace(me=me, verify=verify))
            folder.mkdir(mode=0o700, exist_ok=True)
            server = ControlServer(DataDir(folder).prepare_socket(), served(StoresApi(node)))
            await nursery.start(server.run)

    with in_a_thread(start):
        yield folders


def test_what_is_put_is_got_listed_and_deleted(homes: tuple[Path, ...], ask: Ask) -> None:
    here = homes[0]
    put = ask(here, "put", "note/a", '{"x": [1, 2.5, null], "raw": {"$bytes": "00ff"}}')
    assert (put["key"], put["deleted"]) == ("note/a", False)
    assert put["value"] == {"x": [1, 2.5, None], "raw": {"$bytes": "00ff"}}
    assert put["expires"] - put["written"] == 7 * 86400 and abs(put["written"] - time.time()) < 10
    ask(here, "put", "note/b", "hello there")
    assert ask(here, "get", "note/b")["elements"][0]["value"] == "hello there"
    assert ask(here, "get", "note/b", "--author", "me", words=True) == "hello there\n"
    assert [e["key"] for e in ask(here, "ls", "note/")["elements"]] == ["note/a", "note/b"]
    listed = ask(here, "ls", "--limit", "1")
    assert listed["more"] and len(listed["elements"]) == 1
    assert "1 element; there are more" in ask(here, "ls", "--limit", "1", words=True)
    assert ask(here, "ls", "vote") == {"elements": [], "more": False}
    assert ask(here, "put", "note/b", "--delete")["deleted"] is True
    assert "(deleted)" in ask(here, "ls", "note/b", words=True)
    with pytest.raises(ControlError, match="nobody"):
        ask(here, "get", "note/b")
    words = ask(here, "put", "note/c", "7", words=True)
    assert words == "note/c: written, for 7 d 0 h\n"
    assert ask(here, "get", "note/c")["elements"][0]["value"] == 7


def test_a_value_cannot_drive_a_terminal(homes: tuple[Path, ...], ask: Ask) -> None:
    ask(homes[0], "put", "note/a", "red \x1b[31m alert\nsecond line")
    for words in (ask(homes[0], "ls", words=True), ask(homes[0], "get", "note/a", words=True)):
        assert "\x1b" not in words and "alert second line" in words


def test_what_goes_wrong_is_said_in_words(homes: tuple[Path, ...], ask: Ask, tmp_path: Path) -> None:
    here, _, other, idle = homes
    for arguments, said in (
        (("put", "member", "1"), "not a key that people write"),
        (("put", "commit/00000001/0", "1"), "begin with note/"),
        (("put", "note/", "1"), "of the form note/NAME"),
        (("put", "note/a", "null"), "--delete"),
        (("put", "note/a", "NaN"), "not a number"),
        (("put", "note/a", "1" + "0" * 40), "encoded"),
        (("put", "note/a", "x" * 3000), "at most 2048"),
        (("put", "note/a", '{"$bytes": "xy"}'), "hex digits"),
        (("put", "note/" + "k" * 200, "1"), "has 205 characters; at most 128"),
        (("import", str(tmp_path / "b" / "runs" / RUN / "state.db")), "no file that swarmnode state export wrote"),
    ):
        with pytest.raises(ControlError, match=said) as caught:
            ask(here, *arguments)
        assert caught.value.exit_code == USAGE, arguments
    os.mkfifo(tmp_path / "pipe")
    for command in ("import", "export"):
        with pytest.raises(ControlError, match="is a pipe; name a file"):
            ask(here, command, str(tmp_path / "pipe"))
    with pytest.raises(ControlError, match=r"missing cannot be read: No such file or directory$"):
        ask(here, "import", str(tmp_path / "missing"))
    with pytest.raises(ControlError, match=r"no folder/file cannot be written: No such file or directory$"):
        ask(here, "export", str(tmp_path / "no folder" / "file"))
    for arguments in (("ls",), ("put", "note/a", "1"), ("stats",), ("get", "note/a")):
        with pytest.raises(ControlError, match="in no run"):
            ask(idle, *arguments)
    ask(here, "put", "note/gone", "--delete")
    for arguments, said in (
        (("note/none",), "nobody says anything under 'note/none';"),
        (("note/none", "--author", "me"), "this node says nothing under 'note/none';"),
        (("note/none", "--author", "12D3KooWx"), "12D3KooWx says nothing under"),
        (("note/gone",), "nobody says anything under 'note/gone' any more;"),
    ):
        with pytest.raises(ControlError, match=said):
            ask(here, "get", *arguments)
    with pytest.raises(ControlError, match="in no run"):
        next(iter(ControlClient(idle).stream("state_watch", prefix="")))
    for arguments in (("put", "note/a"), ("put", "note/a", "1", "--delete")):
        with pytest.raises(Exception, match="not both"):
            ask(here, *arguments)
    ask(other, "put", "note/a", "1")
    ask(other, "export", str(tmp_path / "file"))
    with pytest.raises(ControlError, match="of run cdcdcd"):
        ask(here, "import", str(tmp_path / "file"))


def test_an_export_is_taken_in_elsewhere_and_every_element_verified(
    homes: tuple[Path, ...], ask: Ask, tmp_path: Path
) -> None:
    here, there, *_ = homes
    for number in range(20):
        ask(here, "put", f"note/{number}", f"value {number}")
    file = tmp_path / "exported"
    assert ask(here, "export", str(file)) == {"path": str(file), "elements": 20}
    assert file.stat().st_mode & 0o077 == 0
    content = file.read_bytes()
    head, _, rest = content.partition(b"\n")
    assert head == f"swarmnode-state/1 {RUN}".encode()
    assert open_element(rest[4 : 4 + int.from_bytes(rest[:4], "big")], verify).run == RUN
    forged = content.replace(b"value 7", b"value 8", 1)
    file.write_bytes(forged)
    taken = ask(there, "import", str(file))
    assert taken == {"path": str(file), "stored": 19, "verdicts": {"stored": 19, "invalid": 1}}
    file.write_bytes(content)
    assert "1 new element; 19 known" in ask(there, "import", str(file), words=True)
    cutoff = str(now() + 60_000)
    one, two = (ask(home, "stats", "--cutoff", cutoff) for home in (here, there))
    assert one["state_hash"] == two["state_hash"] and one["elements"] == two["elements"] == 20
    assert one["kinds"] == {"note": 20} and one["authors"] == 1 and one["size"] > 20 * 100 < one["disk"]
    ask(there, "put", "note/0", "mine")
    assert ask(there, "stats", "--cutoff", cutoff)["state_hash"] != one["state_hash"]
    both = ask(there, "get", "note/0")["elements"]
    assert {e["value"] for e in both} == {"value 0", "mine"} and len({e["author"] for e in both}) == 2
    assert len(ask(there, "get", "note/0", words=True).splitlines()) == 2
    words = ask(there, "stats", words=True)
    assert "21 elements of 2 authors" in words and "state hash" in words
    with pytest.raises(ControlError, match="the cut-off 1 lies in the past"):
        ask(here, "stats", "--cutoff", "1")
    file.write_bytes(content[:-5])
    with pytest.raises(ControlError, match="cut off"):
        ask(there, "import", str(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d", "exported"]


def test_a_file_that_is_cut_off_gives_all_that_comes_before(homes: tuple[Path, ...], ask: Ask, tmp_path: Path) -> None:
    here, there, *_ = homes
    for number in range(3):
        ask(here, "put", f"note/{number}", "1")
    file = tmp_path / "exported"
    ask(here, "export", str(file))
    content = file.read_bytes()
    for damaged, before in ((content[:-5], 2), (content + b"\0\0", 3)):
        file.write_bytes(damaged)
        with pytest.raises(ControlError, match="cut off"):
            ask(there, "import", str(file))
        assert ask(there, "stats")["elements"] == before


def test_watch_streams_what_is_stored(homes: tuple[Path, ...], ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    here = homes[0]
    stream = ControlClient(here).stream("state_watch", timeout=20, prefix="note/x")
    seen: list[Any] = []
    reader = threading.Thread(target=lambda: seen.append(next(stream)))
    reader.start()
    while reader.is_alive():  # until the stream is there, nobody is told
        ask(here, "put", "note/y", "1")
        ask(here, "put", "note/x", "2")
        reader.join(0.05)
    assert (seen[0]["key"], seen[0]["value"], seen[0]["lost"]) == ("note/x", 2, 0)
    stream.close()
