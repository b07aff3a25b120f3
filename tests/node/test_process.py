"""What a daemon sets for its process, in processes of their own; and defects that it bears."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmnode.node import process
from swarmnode.node.assembly import Node, RunOptions
from swarmnode.node.config import NodeConfig
from swarmnode.node.control.api import problems_of
from swarmnode.node.daemon import Daemon
from swarmnode.node.identity import load_or_create
from swarmnode.node.logs import Ring
from swarmnode.node.process import Defects
from swarmnode.node.storage.datadir import DataDir, NoSpace
from swarmnode.protocols.state.membership import KeyInUse

# Threads that hold 8 MB for a moment, one after another, as a daemon's workers do. Prints what stays, in MB.
CHURN = """
import ctypes, sys, threading
from swarmnode.node.process import resident_bytes, share_arenas
if sys.argv[1] == "shared":
    share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, where glibc itself comes to once such vectors were freed
before, all_live, one = resident_bytes(), threading.Barrier(12), threading.Lock()
def work():
    all_live.wait()
    with one:
        held = libc.malloc(8 << 20)
        ctypes.memset(held, 1, 8 << 20)
        libc.malloc(1 << 16)  # what the thread goes on needing lies above
        libc.free(held)
    all_live.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print((resident_bytes() - before) / 2**20)
"""


# Says 5000 lines of 100 bytes, to one who reads none before all are said; then has no reader at all.
SAYS = """
import sys, time
from swarmnode.node.process import unhurried
before = time.monotonic()
with unhurried():
    for number in range(5000):
        print(f"{number:099d}")
        print(number, file=sys.stderr)
    said = time.monotonic()
    sys.stdin.readline()
open(sys.argv[1], "w").write(str(said - before))
"""


def test_what_is_said_waits_for_no_reader_and_lines_stay_whole(tmp_path: Path) -> None:
    took = tmp_path / "took"
    command = [sys.executable, "-c", SAYS, str(took)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as unread:
        unread.stdin.write("\n")
        unread.stdin.flush()
        unread.wait(60)
        lines = unread.stdout.read().splitlines(keepends=True)
        unread.stderr.close()
    assert float(took.read_text()) < 2 and unread.returncode == 0
    whole = [line for line in lines if line.endswith("\n")]
    assert len(whole) >= len(lines) - 1 and [int(line) for line in whole] == [*range(len(whole))]
    pipes["stderr"] = None
    with subprocess.Popen(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], text=True, **pipes) as read:
        said, _ = read.communicate("\n")
    told = [int(line) for line in said.splitlines() if len(line) == 99]  # between what goes here for want of errors
    assert told[:100] == [*range(100)] and read.returncode == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_what_one_thread_freed_serves_another() -> None:
    def kept(arenas: str) -> float:
        done = subprocess.run([sys.executable, "-c", CHURN, arenas], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert kept("shared") < 0.3 * kept("own")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_part_that_a_defect_ended_begins_anew_and_nothing_else_does(at_start: bool) -> None:
    async def body() -> None:
        defects, begun = Defects(), 0

        async def part(*, task_status: trio.TaskStatus[None]) -> None:
            nonlocal begun
            begun += 1
            if not at_start or begun == 3:
                task_status.started()
            if begun < 3:
                async with trio.open_nursery():
                    raise OverflowError("int too large to convert to float")
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(defects.keep, part)
            await trio.sleep(3 * process.AFTER_DEFECT)
            assert begun == 3 and "OverflowError" in defects.warning
            await trio.sleep(process.TOLD_FOR)
            assert not defects.warning
            nursery.cancel_scope.cancel()

    trio.run(body, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("error", [NoSpace("full"), KeyInUse("in use"), OSError(errno.ENOSPC, "full")])
def test_what_a_person_must_mend_ends_a_part(error: Exception) -> None:
    async def part(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        async with trio.open_nursery():
            raise error

    with pytest.raises(BaseExceptionGroup):
        trio.run(Defects().keep, part)


@pytest.mark.parametrize("part", ["discovery._meet", "network._notice_identified", "catalogue._collect", "nat._check"])
def test_a_defect_in_any_part_does_not_end_the_daemon(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "AFTER_DEFECT", 0.1)
    config = NodeConfig(data_dir=str(tmp_path / "a"), role="watch", listen="127.0.0.1", port=0, upnp=False, mdns=False)

    async def body(datadir: DataDir) -> None:
        options = RunOptions(None, None, None, stay=False, json_events=True)
        node = Node(config, datadir, load_or_create(datadir.identity, None), Ring(64), options)
        owner, name = part.split(".")
        works: Any = getattr(getattr(node, owner), name)

        async def fails(*arguments: Any) -> Any:
            monkeypatch.setattr(getattr(node, owner), name, works)
            raise KeyError("peer")

        monkeypatch.setattr(getattr(node, owner), name, fails)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Daemon(node).run)
            while not node.defects.warning:
                await trio.sleep(0.1)
                if node.ready and part == "network._notice_identified" and node.network.connections.nursery:
                    node.network.connections.nursery.start_soon(node.network._notice_identified, "a peer")
            assert any("KeyError('peer')" in problem for problem in problems_of(node))
            await trio.sleep(0.5)
            node.stopping.set()

    with DataDir(tmp_path / "a") as datadir:
        trio.run(body, datadir)
    assert "KeyError: 'peer'" in caplog.text
