"""The store after a SIGKILL at any moment and on a disk that is really full: real processes, real files.

STATE_KILLS says how often the first test kills; `make crashes` does it 50 times.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.record import Record, parse, write
from swarmnode.node.identity import peer_id_of
from swarmnode.node.storage.statestore import StateStore
from swarmnode.protocols.state.backend import AlreadyWritten, StateError, Unwritable
from swarmnode.testing.memorystate import clocks_of

KILLS = int(os.environ.get("STATE_KILLS", "5"))
RUN = "ab" * 32
FEW = 40  # commits of one author, fewer than it has slots: none displaces another


def author(seed: int) -> tuple[Ed25519PrivateKey, str]:
    key = Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "big"))
    return key, peer_id_of(key.public_key().public_bytes_raw())


def now() -> int:
    return time.time_ns() // 1_000_000


def new_store(path: Path) -> StateStore:
    key, me = author(1)
    return StateStore(path, RUN, me=me, sign=key.sign, clocks=clocks_of(now))


def tell(**said: object) -> None:
    """One line that is out of the process whole or not at all: what a peer may have heard."""
    os.write(1, json.dumps(said).encode() + b"\n")


async def write_until_killed(path: Path, seed: int, first: int) -> None:
    """Merge batches of others' records, and write own ones; say what was acknowledged as soon as it is."""
    store, draw = new_store(path), random.Random(seed)

    async def hear(number: int) -> None:
        for batch in range(10_000):
            key, name = author(1000 * (3 * seed + number) + batch + 10)
            records = [
                write(RUN, name, f"commit/{n:08d}/0", n, hlc=stamp_at(now(), n), sign=key.sign)
                for n in range(draw.randrange(1, FEW))
            ]
            await store.merge(records)
            tell(merged=[record.rank.hex() for record in records])

    async def say() -> None:
        for number in range(first, 1_000_000):
            key, value = f"commit/{number:08d}/0", draw.getrandbits(40)
            try:
                record = await store.write(key, value)
            except AlreadyWritten:
                found = await store.get(author(1)[1], key)
                assert isinstance(found, Record)
                record = found
            tell(own=number, rank=record.rank.hex())

    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        tell(ready=True)
        nursery.start_soon(say)
        for number in range(3):
            nursery.start_soon(hear, number)
        while True:
            await trio.sleep(0.02)
            await store.sweep()


async def fill(path: Path) -> None:
    """Write until the disk is full, go on trying; say what happened; then, with room again, write once more."""
    store = new_store(path)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        tell(ready=True)
        refused = batch = 0
        while refused < 5:
            batch += 1
            key, name = author(batch + 10)
            records = [
                write(RUN, name, f"commit/{n:08d}/0", "x" * 300, hlc=stamp_at(now(), n), sign=key.sign)
                for n in range(FEW)
            ]
            try:
                await store.merge(records)
                tell(merged=[record.rank.hex() for record in records])
            except Unwritable as error:
                refused += 1
                assert not any(store.has(record.rank) for record in records)
                tell(refused=str(error), warning=store.warning)
        try:
            await store.write("note/a", 1)
        except StateError as error:
            tell(unsigned=str(error))
        os.unlink(path.parent / "ballast")
        assert all(verdict.value == "stored" for verdict in await store.merge(records))
        await store.write("note/a", 2)
        tell(warning=store.warning)
        nursery.cancel_scope.cancel()


def start(what: str, path: Path, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, what, str(path), *map(str, arguments)], stdout=subprocess.PIPE)


def test_a_kill_at_any_moment_loses_nothing_acknowledged_and_never_equivocates(tmp_path: Path) -> None:
    path, draw = tmp_path / "run" / "state.db", random.Random()
    merged: set[bytes] = set()  # acknowledged as durable, of others
    own: dict[int, set[bytes]] = defaultdict(set)  # ranks of own commits that left the node, by number
    for seed in range(KILLS):
        process = start("write", path, seed, max(own, default=0))
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.25))  # a real process, killed at a moment of its own
        process.send_signal(signal.SIGKILL)
        for line in process.stdout.read().splitlines(keepends=True):
            if line.endswith(b"\n"):
                said = json.loads(line)
                merged.update(map(bytes.fromhex, said.get("merged", ())))
                if "own" in said:
                    own[said["own"]].add(bytes.fromhex(said["rank"]))
        process.wait()
        with sqlite3.connect(path) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        trio.run(look_after_crash, path, merged, max(own, default=None), own)
    assert merged and len(own) > KILLS
    assert all(len(ranks) == 1 for ranks in own.values()), "two records under one write-once key left the node"
    stamps = [rank for _, (rank,) in sorted(own.items())]
    assert stamps == sorted(set(stamps)), "a stamp was used again, or an earlier one"


async def look_after_crash(path: Path, merged: set[bytes], newest: int | None, own: dict[int, set[bytes]]) -> None:
    store = new_store(path)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        assert store.warning == ""
        assert all(map(store.has, merged)), "something acknowledged is gone"
        assert newest is None or all(map(store.has, own[newest]))
        assert not await store.select("evidence/", limit=9)
        for rank, sealed in zip(merged, await store.sealed(list(merged)), strict=True):
            element = parse(sealed)
            assert element.rank == rank
        nursery.cancel_scope.cancel()


def mount_script(folder: Path) -> list[str] | None:
    """A command prefix that mounts a small tmpfs on `folder`, for itself; None where that is not allowed."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return None
    script = f'mount -t tmpfs -o size=2m tmpfs "{folder}" && exec "$@"'
    prefix = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True)
    return prefix if tried.returncode == 0 else None


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    prefix = mount_script(tmp_path)
    if prefix is None:
        pytest.skip("mounting a small tmpfs is not allowed here")
    done = subprocess.run(
        [*prefix, sys.executable, __file__, "fill", str(tmp_path / "state.db")], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    said = [json.loads(line) for line in done.stdout.splitlines()]
    refusals = [line for line in said if "refused" in line]
    assert len(refusals) == 5 and sum("merged" in line for line in said) > 3
    assert all("no space" in line["refused"] and line["warning"] == line["refused"] for line in refusals)
    assert said[-1] == {"warning": ""}
    assert not any("note" in line for line in done.stderr.decode().splitlines())


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    if what == "write":
        trio.run(write_until_killed, Path(place), int(rest[0]), int(rest[1]))
    else:
        Path(place).with_name("ballast").write_bytes(bytes(512 << 10))
        trio.run(fill, Path(place))
