"""Logs: whole JSON lines on disk, the newest in memory, a follower that gets each one, and libp2p's among them."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from swarmnode.node import logs


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:], root.level = before, level


def newest(ring: logs.Ring[logs.Line]) -> list[logs.Line]:
    async def main() -> list[logs.Line]:
        return [line async for line in ring.stream(10, follow=False)]

    return trio.run(main)


def test_lines_reach_file_console_and_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = logs.setup_logs(tmp_path, "info")
    logging.getLogger("swarmnode.node.x").warning("two\nlines %d", 7)
    logging.getLogger("swarmnode.node.x").debug("not this")
    (line,) = logs.read_tail(tmp_path, 10)
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "swarmnode.node.x", "two\nlines 7")
    assert newest(ring) == [line]
    assert "WARNING node.x: two" in capsys.readouterr().err
    assert (tmp_path / logs.FILE_NAME).stat().st_mode & 0o077 == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_rounds_share_a_line_of_a_terminal_and_have_one_each_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    logs.setup_logs(tmp_path, "info")
    log = logging.getLogger("x")
    for number in range(2):
        log.info("round %d", number, extra={"ahead": lambda: "the next in 0:00:31"})
    log.info("other")
    log.info("round 2", extra={"ahead": lambda: "a" * 40})
    log.info("round 3", extra={"ahead": lambda: "b"})
    logs.show_ahead("c")
    logs.show_ahead("d")
    log.info("other")
    moving = [logs.show_ahead(text) for text in ("alone", "again")]
    assert moving == 2 * [stream.isatty()]
    logs.show_ahead("")
    said = stream.getvalue()
    up, up_two = "\x1b[1A\x1b[J", "\x1b[2A\x1b[J"
    if stream.isatty():
        assert re.fullmatch(
            rf"\S+ round 0; the next in 0:00:31\n{re.escape(up)}\S+ round 1; the next in 0:00:31\n.* other\n"
            rf"\S+ round 2; a+\n{re.escape(up_two)}\S+ round 3; b\n"
            rf"{re.escape(up)}\S+ round 3; c\n{re.escape(up)}\S+ round 3; d\n.* other\nalone\n{re.escape(up)}again\n"
            rf"{re.escape(up)}",
            said,
        ), said
    else:
        assert said.count("\n") == 6 and "\x1b" not in said and ";" not in said


def test_what_peers_say_moves_no_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    logs.setup_logs(tmp_path, "info")
    logging.getLogger("x").info("run %s:\n\tone", "\x1b]52;c;AAAA\x07\x9b2J\u202enaem\r")
    assert said.getvalue().endswith("run ?]52;c;AAAA??2J?naem?:\n\tone\n")


def test_the_file_is_rotated_and_bounded_and_read_across_rotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FILE_SIZE", 2000)
    logs.setup_logs(tmp_path, "info")
    for number in range(200):
        logging.getLogger("x").info("line %d", number)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= (logs.FILES + 1) * 2000
    assert [line["message"] for line in logs.read_tail(tmp_path, 30)] == [f"line {n}" for n in range(170, 200)]


def test_a_follower_gets_lines_from_any_thread_and_the_last_ones_first(tmp_path: Path) -> None:
    ring = logs.setup_logs(tmp_path, "info")
    log = logging.getLogger("x")
    log.info("old")
    log.info("before")

    async def main() -> list[str]:
        got: list[str] = []
        with trio.fail_after(5):
            stream = ring.stream(1, True)
            async for line in stream:
                got.append(line["message"])
                if len(got) == 1:
                    threading.Thread(target=log.info, args=("from a thread",)).start()
                else:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
        return got

    assert trio.run(main) == ["before", "from a thread"]


def test_a_follower_that_leaves_is_forgotten() -> None:
    ring = logs.Ring[str]()

    async def main() -> None:
        for _ in range(3):
            with trio.move_on_after(0.01):
                await anext(aiter(ring.stream(0, True)))

    trio.run(main)
    assert not ring._followers


def test_the_ring_is_bounded_and_a_long_message_is_cut() -> None:
    ring: logs.Ring[logs.Line] = logs.Ring(3)
    for number in range(5):
        record = logging.makeLogRecord({"msg": f"{number}" + "x" * 20_000, "levelname": "INFO", "name": "x"})
        ring.put(logs.as_line(record))
    lines = newest(ring)
    assert [line["message"][0] for line in lines] == ["2", "3", "4"]
    assert all(len(line["message"]) < logs.LINE_LIMIT + 50 for line in lines)


def test_what_is_no_json_in_the_file_is_left_out(tmp_path: Path) -> None:
    good = json.dumps({"time": "t", "level": "INFO", "logger": "x", "message": "m"})
    (tmp_path / logs.FILE_NAME).write_text(f'{good}\nhalf a li\n[1]\n{{"a":1}}\n{good}\n')
    assert len(logs.read_tail(tmp_path, 10)) == 2


def test_a_collector_reads_on_the_console_what_the_file_has_with_run_and_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_about", {})
    logs.setup_logs(tmp_path, "info", "json")
    logging.getLogger("swarmnode.node.x").warning("two\nlines")
    logs.tell_with_each_line(run="3f9c", round=12)
    try:
        raise OSError("broken")
    except OSError:
        logging.getLogger("swarmnode.node.x").exception("später")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert [first, second] == logs.read_tail(tmp_path, 10)
    assert first.keys() == {"time", "level", "logger", "message"} and first["message"] == "two\nlines"
    assert (second["run"], second["round"], second["level"]) == ("3f9c", 12, "ERROR")
    assert second["message"].startswith("später\nTraceback") and "broken" in second["message"]


def test_one_part_logs_more_than_the_others_until_all_are_set_again() -> None:
    before = logging.root.level
    logging.getLogger("swarmnode.testlevels.inner")
    try:
        logs.set_level("", "warning")
        logs.set_level("testlevels", "debug")
        assert logging.getLogger("swarmnode.testlevels.inner").isEnabledFor(logging.DEBUG)
        assert logs.levels()[""] == "WARNING" and logs.levels()["testlevels"] == "DEBUG"
        logs.set_level("", "error")
        assert "testlevels" not in logs.levels() and logs.levels()[""] == "ERROR"
        assert logs.levels("testlevels") == {"testlevels": "ERROR"}
        quiet = logging.getLogger("testlibrary")
        quiet.setLevel(logging.CRITICAL)
        logs.set_level("", "debug")
        assert quiet.level == logging.CRITICAL and logs.levels("testlibrary") == {"testlibrary": "CRITICAL"}
        logs.set_level("testlibrary", "debug")
        logs.set_level("testlibrary", "default")
        assert quiet.level == logging.CRITICAL and logs.levels()[""] == "DEBUG"
        logs.set_level("testlibrary", "info")
        logs.set_level("", "default")
        assert quiet.level == logging.CRITICAL and logging.root.level == before
        for part, level, why in (("nonsense", "info", "no part of the node"), ("", "loud", "no level")):
            with pytest.raises(ValueError, match=why):
                logs.set_level(part, level)
    finally:
        logging.root.setLevel(before)
