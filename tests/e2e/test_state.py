"""What the nodes of a run know together, from the command line of two of them; copied keys and old backups as well."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from realnodes import PROGRAM, Node, environment, swarmnode, until

from swarmnode.node.exitcodes import ERROR, KEY_IN_USE, NOT_RUNNING, USAGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, corpus: Path, run_file: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes of a run that have met, and rest."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        first = stack.enter_context(Node(folder / "first", run_file, "--wait-peers", "1", corpus=corpus))
        second = stack.enter_context(Node(folder / "second", "--join", first.ready["multiaddr"], corpus=corpus))
        second.wait_for("round")
        for node in (first, second):
            node.command_line("pause")
        yield first, second


def words(node: Node, *arguments: str, code: int = 0) -> str:
    """What `swarmnode state …` says to a person."""
    done = swarmnode("state", *arguments, "--data-dir", node.home)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def notes(node: Node, key: str) -> dict[str, Any]:
    """The value of each author under `key`, as this node has it."""
    found = node.command_line("state", "ls", key)["elements"]
    return {element["author"]: element["value"] for element in found if element["key"] == key}


def test_note_that_one_node_puts_is_got_watched_and_hashed_by_the_other(pair: tuple[Node, Node]) -> None:
    first, second = pair
    me = first.ready["peer_id"]
    watch = subprocess.Popen(
        [str(PROGRAM), "state", "watch", "note/", "--json", "--data-dir", str(second.home)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert watch.stdout is not None
        for number in range(60):  # until it watches; from then on nothing is missed
            second.command_line("state", "put", "note/here", str(number))
            if select.select([watch.stdout], [], [], 1.0)[0]:
                break
        assert "note/greeting: written" in words(first, "put", "note/greeting", "hello")
        until(lambda: notes(second, "note/greeting") == {me: "hello"}, within=10)
        seen = {"key": "note/here"}
        while seen["key"] == "note/here":
            seen = json.loads(watch.stdout.readline())
        assert (seen["key"], seen["value"], seen["author"]) == ("note/greeting", "hello", me)
    finally:
        watch.terminate()
        watch.wait(10)
    assert words(second, "get", "note/greeting") == "hello\n"
    assert "note/greeting" in words(second, "ls", "note/") and me in words(second, "ls", "note/")
    cutoff = str(int(1000 * second.command_line("state", "get", "note/greeting")["elements"][0]["written"]) + 180_000)
    until(lambda: len({node.command_line("state", "stats", "--cutoff", cutoff)["state_hash"] for node in pair}) == 1)
    assert "deleted" in words(first, "put", "note/greeting", "--delete")
    until(lambda: notes(second, "note/greeting") == {me: None}, within=10)


def test_exported_state_is_taken_in_by_another_node_of_the_run(pair: tuple[Node, Node], tmp_path: Path) -> None:
    first, second = pair
    words(first, "put", "note/kept", '{"a": 1}')
    assert "elements in" in words(first, "export", str(tmp_path / "state"))
    assert "new element" in words(second, "import", str(tmp_path / "state"))
    assert notes(second, "note/kept") == {first.ready["peer_id"]: {"a": 1}}


def test_mistakes_are_answered_with_what_to_do(pair: tuple[Node, Node], tmp_path: Path) -> None:
    node = pair[0]
    assert "nobody says anything under 'note/none'" in words(node, "get", "note/none", code=ERROR)
    assert "begin with note/" in words(node, "put", "score/1", "2", code=USAGE)
    too_large = words(node, "put", "note/large", "x" * 5000, code=USAGE)
    assert "note" in too_large and "bytes" in too_large and "2048" in too_large
    (tmp_path / "no-export").write_bytes(b"something else")
    assert "no-export" in words(node, "import", str(tmp_path / "no-export"), code=USAGE)
    nobody = swarmnode("state", "ls", "--data-dir", tmp_path / "nobody")
    assert nobody.returncode == NOT_RUNNING and "swarmnode run" in nobody.stderr


def test_node_in_no_run_says_that_it_holds_no_state(tmp_path: Path) -> None:
    with Node(tmp_path / "relay", "--role", "relay", corpus=None) as node:
        assert node.ready["run_id"] is None
        assert "in no run" in words(node, "ls", code=ERROR)


def test_of_two_daemons_with_one_key_the_younger_stops(pair: tuple[Node, Node], tmp_path: Path, corpus: Path) -> None:
    first, second = pair
    home = tmp_path / "copy"
    home.mkdir(mode=0o700)
    shutil.copy2(second.home / "identity.key", home)
    with Node(home, "--join", first.ready["multiaddr"], corpus=corpus) as copy:
        assert copy.wait() == KEY_IN_USE, copy.log()
        assert copy.ready["peer_id"] == second.ready["peer_id"]
    assert "another daemon runs with this node's key" in copy.log() and "--data-dir" in copy.log()
    assert "Traceback" not in copy.log()
    assert second.process.poll() is None
    words(second, "put", "note/still", "here")
    until(lambda: second.ready["peer_id"] in notes(first, "note/still"), within=10)
    assert first.command_line("state", "ls", "evidence")["elements"] == []


def test_restored_backup_says_nothing_that_contradicts_what_it_forgot(
    pair: tuple[Node, Node], tmp_path: Path, corpus: Path
) -> None:
    first, _ = pair
    home, backup = tmp_path / "node", tmp_path / "backup"
    node = Node(home, "--join", first.ready["multiaddr"], corpus=corpus)
    with node:
        me = node.ready["peer_id"]
        words(node, "put", "note/diary", "monday")
        until(lambda: notes(first, "note/diary") == {me: "monday"}, within=10)
        node.command_line("stop")
        assert node.wait() == 0
    shutil.copytree(home, backup, ignore=lambda folder, names: [name for name in names if name.endswith(".sock")])
    with node:
        assert node.ready["peer_id"] == me
        words(node, "put", "note/diary", "tuesday")
        until(lambda: notes(first, "note/diary") == {me: "tuesday"}, within=10)
        node.command_line("stop")
        assert node.wait() == 0
    shutil.rmtree(home)
    backup.rename(home)
    with node:
        assert node.ready["peer_id"] == me
        until(lambda: notes(node, "note/diary") == {me: "tuesday"}, within=20)
        words(node, "put", "note/diary", "wednesday")
        until(lambda: notes(first, "note/diary") == {me: "wednesday"}, within=10)
        assert first.command_line("state", "ls", "evidence")["elements"] == []
    for each in (first, node):
        assert "Traceback" not in each.log() and "not running" not in each.log()
