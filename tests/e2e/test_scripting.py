"""`from swarmnode import Node`, as docs/scripts.md shows it, and what becomes of a node that cannot start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from realnodes import RUN_TOML, environment

from swarmnode import Node, scripting
from swarmnode.node.exitcodes import CONFIG
from swarmnode.scripting import NodeEnded
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import parse_runspec

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"


def test_the_examples_of_the_page_run_one_after_the_other(tmp_path: Path, corpus: Path) -> None:
    """The second goes on where the first one ended."""
    (tmp_path / "run.toml").write_text(RUN_TOML)
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    told = []
    for example in examples:
        done = subprocess.run(
            [sys.executable, "-c", example],
            cwd=tmp_path,
            env=environment(SWARMNODE_CORPUS=str(corpus), SWARMNODE_LISTEN="127.0.0.1", SWARMNODE_MDNS="false"),
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        told.append(re.findall(r"^(\d+) (\d+\.\d+)$", done.stdout, re.MULTILINE))
    assert [[int(round) for round, _ in each] for each in told] == [[0, 1, 2], [3, 4]]


def test_a_node_joins_by_the_line_or_the_link_that_another_one_printed(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    settings = {"listen": "127.0.0.1", "mdns": False, "port": 0}
    with Node(tmp_path / "run.toml", data_dir=tmp_path / "a", corpus=str(corpus), **settings) as one:
        line = one.ready["join"]
        for said in (line, line.removeprefix("swarmnode join ")):
            with Node(said, data_dir=tmp_path / "b", **settings) as other:
                assert other.ready["run_id"] == one.ready["run_id"]


def test_a_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(NodeEnded, match="no such file") as ended, Node(tmp_path / "none.toml", data_dir=tmp_path):
        pass
    assert ended.value.exit_code == CONFIG
    with pytest.raises(SettingError, match="prot: no such setting"):
        Node("run.toml", data_dir=tmp_path, prot=1)


def test_where_only_linux_could_tie_a_node_to_the_script_it_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def starts(command: list[str], **_: object) -> None:
        started.append(command)
        raise OSError("not in this test")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "Popen", starts)
    with pytest.raises(OSError, match="not in this test"):
        Node("run.toml", data_dir=tmp_path).start()
    assert started[0][:5] == [sys.executable, "-P", "-m", "swarmnode", "run"]


def test_a_node_that_is_killed_in_the_middle_of_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = 'import os; os.write(1, b\'{"event": "ready"}\\n{"event": "rou\'); os._exit(3)'
    monkeypatch.setattr(scripting, "NODE", (sys.executable, "-S", "-c", dying))
    with Node("", data_dir=tmp_path) as node, pytest.raises(NodeEnded) as ended:
        list(node.rounds())
    assert ended.value.exit_code == 3


def test_a_round_that_ends_after_a_wait_for_it_was_cancelled_is_told_to_who_asks_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    tells = """os.write(1, b'{"event": "round", "round": 0}\\n{"event": "finished"}\\n')"""
    ready = """os.write(1, b'{"event": "ready"}\\n')\n"""
    monkeypatch.setattr(scripting, "NODE", (sys.executable, "-S", "-c", f"import os\n{ready}{waits}{tells}"))

    async def use() -> list[int]:
        async with Node.open("", data_dir=tmp_path) as node:
            with trio.move_on_after(0.5) as cancelled:
                _ = [round async for round in node.rounds()]
            assert cancelled.cancelled_caught
            go.touch()
            await trio.sleep(0.5)
            return [round["round"] async for round in node.rounds()]

    assert trio.run(use) == [0]


def test_the_rounds_of_a_run_that_is_over_are_over_for_who_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of a notebook that is run once more would wait for ever: the node serves others on."""
    ends = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # it may be ignored here
    tells = """os.write(1, b'{"event": "ready"}\\n{"event": "round", "round": 0}\\n{"event": "finished"}\\n')"""
    monkeypatch.setattr(
        scripting, "NODE", (sys.executable, "-S", "-c", f"import os, time\n{ends}\n{tells}\ntime.sleep(60)")
    )
    node = Node("", data_dir=tmp_path)
    with pytest.raises(NodeEnded), node:  # by the signal, which this one does not heed
        assert [round["round"] for round in node.rounds()] == [0]
        assert list(node.rounds()) == []


def test_a_block_whose_node_failed_says_so_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = """os.write(1, b'{"event": "ready"}\\n'); print("the disk is full", file=sys.stderr); sys.exit(7)"""
    monkeypatch.setattr(scripting, "NODE", (sys.executable, "-S", "-c", f"import os, sys; {fails}"))
    with pytest.raises(NodeEnded, match="the disk is full") as ended, Node("", data_dir=tmp_path) as node:
        assert node._process is not None
        node._process.wait(10)
    assert ended.value.exit_code == 7


def test_a_run_called_like_a_file_of_the_data_directory_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("port = 4078\n")
    node = Node(parse_runspec({"run": {"name": "config"}}, source="test"), data_dir=tmp_path)
    assert node._arguments()[0] != str(tmp_path / "config.toml")
    assert (tmp_path / "config.toml").read_text() == "port = 4078\n"
