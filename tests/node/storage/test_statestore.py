"""What the store on disk promises beyond the seam: restarts, full and failing disks, damage, versions."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import COUNTER_BITS, stamp_at, time_of
from swarmnode.crdt.kinds import KINDS
from swarmnode.crdt.law import Merged
from swarmnode.crdt.ranges import END, START
from swarmnode.crdt.record import Record, write
from swarmnode.node.exitcodes import DATADIR_VERSION, NO_SPACE
from swarmnode.node.identity import peer_id_of
from swarmnode.node.storage import datadir, statedb, statestore
from swarmnode.node.storage.datadir import DataDirVersion
from swarmnode.node.storage.statedb import StateFull
from swarmnode.node.storage.statestore import StateStore
from swarmnode.protocols.runner import inline
from swarmnode.protocols.state.backend import AlreadyWritten, Unwritable
from swarmnode.testing.memorystate import clocks_of
from swarmnode.testing.simnet import run_simulation

pytestmark = pytest.mark.virtual_time

RUN = "ab" * 32
NOW = 1_800_000_000_000  # ms


class Author:
    def __init__(self, seed: int) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "big"))
        self.id = peer_id_of(self.key.public_key().public_bytes_raw())

    def says(self, key: str, value: Value, time: int = NOW, counter: int = 0) -> Record:
        return write(RUN, self.id, key, value, hlc=stamp_at(time, counter), sign=self.key.sign)


ALICE, ME = Author(1), Author(9)


class Lab:
    """Opens the store of one folder again and again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run" / "state.db"
        self.time = NOW

    def store(self, run: str = RUN, **settings: Any) -> StateStore:
        clocks = clocks_of(lambda: self.time)
        settings = {"me": ME.id, "sign": ME.key.sign, "clocks": clocks, "runner": inline, **settings}
        return StateStore(self.path, run, **settings)

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[StateStore]:
        store = self.store(**settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            yield store
            nursery.cancel_scope.cancel()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def rank(record: Record) -> bytes:
    return record.rank


def notes(number: int, first: int = 0) -> list[Record]:
    """Notes of as many authors as they take."""
    slots = KINDS["note"].slots
    return [Author(100 + n // slots).says(f"note/{n % slots}", n, NOW, n) for n in range(first, first + number)]


def connection_of(store: StateStore) -> sqlite3.Connection:
    return store._database._connection


def test_all_is_there_after_a_restart(lab: Lab) -> None:
    async def main() -> None:
        async with lab.running() as store:
            heard = notes(300)
            await store.merge(heard)
            mine = await store.write("note/mine", 1)
            ranks = store.snapshot(0).keys(START, END)
        async with lab.running() as store:
            assert store.snapshot(0).keys(START, END) == ranks
            assert await store.get(ME.id, "note/mine") == mine
            assert await store.merge(heard[:2]) == [Merged.KNOWN] * 2
            slots = KINDS["note"].slots  # how full an author's slots are is known again as well
            full = Author(100)
            assert await store.merge([full.says("note/more", 1, NOW - 1)]) == [Merged.QUOTA]
            assert await store.merge([full.says("note/more", 1, NOW + 1)]) == [Merged.STORED]
            assert len(await store.select("note/", author=full.id, limit=999)) == slots

    run_simulation(main)
    assert {file.stat().st_mode & 0o077 for file in lab.path.parent.iterdir()} == {0}


async def test_stamps_grow_over_restarts_and_crashes_whatever_the_real_clock_does(lab: Lab) -> None:
    def crash(store: StateStore) -> None:
        """The clock's file is as a SIGKILL leaves it."""
        store._stamps.release = lambda: None  # type: ignore[method-assign]

    last = 0
    for number in range(6):
        async with lab.running() as store:
            stamps = [(await store.write(f"note/{number}", n)).hlc for n in range(3)]
            assert last < stamps[0] and stamps == sorted(stamps)
            last = stamps[-1]
            if number % 2:
                crash(store)
        if number == 3:
            for file in lab.path.parent.glob("state.db*"):
                file.unlink()  # the database is lost; the clock's own file is enough
        if number == 4:
            lab.path.with_suffix(".clock").unlink()  # and the database alone is
        lab.time -= 15_000 if number < 3 else 0


async def test_the_clock_reserves_ahead_and_settles_at_an_orderly_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = datadir.write_atomic

    def noted(path: Path, content: bytes) -> None:
        written.append(int(content))
        real(path, content)

    monkeypatch.setattr(statestore, "write_atomic", noted)
    async with lab.running() as store:
        records = [await store.write("note/a", n) for n in range(50)]
        assert len(written) == 1 and written[0] >= records[-1].hlc
        assert time_of(written[0]) - NOW <= 1000
        lab.time += 1001
        records.append(await store.write("note/a", 50))
        assert len(written) == 2 and written[1] > records[-1].hlc
    assert written[2:] == [records[-1].hlc]
    async with lab.running() as store:
        again = await store.write("note/a", 51)
        assert again.hlc == records[-1].hlc + 1


async def test_a_stamp_is_not_used_where_it_could_not_be_made_durable(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise datadir.NoSpace("no space")

    async with lab.running() as store:
        with monkeypatch.context() as patch:
            patch.setattr(statestore, "write_atomic", full)
            with pytest.raises(StateFull) as caught:
                await store.write("note/a", 1)
            assert caught.value.exit_code == NO_SPACE
        assert len(store.snapshot(0)) == 0
        await store.write("note/a", 1)


async def test_a_garbled_clock_file_is_passed_over(lab: Lab) -> None:
    async with lab.running() as store:
        mine = await store.write("note/a", 1)
    for garbage in ("", "x", "-1", str(1 << 64)):
        lab.path.with_suffix(".clock").write_text(garbage)
        lab.time -= 5_000
        async with lab.running() as store:
            later = await store.write("note/a", garbage)
            assert later.hlc > mine.hlc
            mine = later


async def test_what_was_said_once_stands_after_a_restart(lab: Lab) -> None:
    async with lab.running() as store:
        said = await store.write("commit/00000001/0", 1)
    async with lab.running() as store:
        with pytest.raises(AlreadyWritten):
            await store.write("commit/00000001/0", 2)
        assert await store.write("commit/00000001/0", 1) == said


def test_a_full_disk_acknowledges_nothing_and_is_forgotten_once_there_is_room(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with lab.running() as store:
            few = notes(5)
            await store.merge(few)
            (pages,) = connection_of(store).execute("PRAGMA page_count").fetchone()
            connection_of(store).execute(f"PRAGMA max_page_count = {pages + 2}")
            before = store.snapshot(0).digest
            many = notes(3000)
            for _ in range(2):
                with pytest.raises(StateFull, match="no space"):
                    await store.merge(many)
            assert store.snapshot(0).digest == before and len(store.snapshot(0)) == 5
            assert [await store.get(r.author, r.key) for r in many[:6]] == [*few, None]
            assert "no space" in store.warning and (await store.stats()).warning == store.warning
            connection_of(store).execute("PRAGMA max_page_count = 1000000")
            assert (await store.merge(many)).count(Merged.STORED) == 2995
            assert store.warning == ""
        async with lab.running() as store:
            assert len(store.snapshot(0)) == 3000

    with caplog.at_level(logging.WARNING):
        run_simulation(main)
    assert len([r for r in caplog.records if "no space" in r.message]) == 1, "said once, not at every try"


def test_one_refused_batch_does_not_end_the_others(lab: Lab) -> None:
    async def main() -> None:
        async with lab.running() as store:
            apply, calls = store._database.apply, 0

            def fails_first(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 1:
                    raise Unwritable("the disk hiccups")
                return apply(*args, **kwargs)

            store._database.apply = fails_first  # type: ignore[method-assign]
            with pytest.raises(Unwritable):
                await store.merge(notes(1))
            assert await store.merge(notes(1)) == [Merged.STORED]

    run_simulation(main)


async def test_waiting_merges_become_one_transaction(lab: Lab) -> None:
    async with lab.running() as store:
        apply, sizes = store._database.apply, []

        def counted(elements: Any, **times: Any) -> Any:
            sizes.append(len(elements))
            return apply(elements, **times)

        store._database.apply = counted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for record in notes(40):
                nursery.start_soon(store.merge, [record])
        assert sum(sizes) == 40 and len(sizes) <= 3
        assert len(store.snapshot(0)) == 40


async def test_whoever_waits_when_the_store_ends_is_told(lab: Lab) -> None:
    store, ended = lab.store(), []
    async with trio.open_nursery() as outer:

        async def late(number: int) -> None:
            try:
                told = await store.merge(notes(1, first=number)) == [Merged.STORED]
            except Unwritable:
                told = False
            ended.append((number, told))

        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            nursery.cancel_scope.cancel()
            for number in range(3):
                outer.start_soon(late, number)
        outer.start_soon(late, 3)
    assert len(ended) == 4 and not dict(ended)[3], "afterwards nothing is stored"
    async with lab.running() as again:
        assert len(again.snapshot(0)) == sum(told for _, told in ended)
    with pytest.raises(RuntimeError):
        store.has(bytes(40))


def garble(path: Path, offset: int, size: int = 4096) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(size))


@pytest.mark.parametrize("where", ["header", "first table", "everywhere"])
async def test_a_damaged_database_is_moved_aside_and_begun_anew(lab: Lab, where: str) -> None:
    async with lab.running() as store:
        heard = notes(2000)
        await store.merge(heard)
        last = (await store.write("note/mine", 1)).hlc
        store._stamps.release = lambda: None  # type: ignore[method-assign]
    size = lab.path.stat().st_size
    offsets = {"header": [0], "first table": [4096], "everywhere": range(4096, size - 4096, 4096)}[where]
    for offset in offsets:
        garble(lab.path, offset, 100 if where == "header" else 4096)
    async with lab.running() as store:
        assert len(store.snapshot(0)) == 0
        assert "damaged" in store.warning and "state.db.damaged" in store.warning
        assert lab.path.with_name("state.db.damaged").stat().st_size == size
        assert (await store.merge(heard)).count(Merged.STORED) == 2000
        assert "damaged" in store.warning, "said until the next start"
        lab.time -= 10_000
        assert (await store.write("note/mine", 2)).hlc > last
    async with lab.running() as store:
        assert len(store.snapshot(0)) == 2001 and store.warning == ""


def test_the_log_of_a_damaged_database_never_meets_the_new_one(lab: Lab) -> None:
    lab.path.parent.mkdir()
    for suffix in ("", "-wal", "-shm"):
        lab.path.with_name(f"state.db{suffix}").write_text(suffix)
    aside = statedb.set_aside(lab.path)
    assert {file.name: file.read_text() for file in lab.path.parent.iterdir()} == {
        f"{aside.name}{suffix}": suffix for suffix in ("", "-wal", "-shm")
    }


@pytest.mark.parametrize("found_by", ["a look", "a merge"])
async def test_damage_that_shows_while_it_runs_does_not_end_it(lab: Lab, found_by: str) -> None:
    async with lab.running() as store:
        await store.merge(notes(2000))
        connection_of(store).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for connection in (connection_of(store), store._database._reader):
            connection.execute("PRAGMA shrink_memory")
        for offset in range(4096, lab.path.stat().st_size, 4096):
            garble(lab.path, offset)
        if found_by == "a look":
            for record in notes(2000):
                await store.get(record.author, record.key)
        else:
            await store.merge(notes(2000, first=64 * 100))
        assert "damaged" in store.warning
        assert (await store.merge(notes(2000))).count(Merged.STORED) == 2000
        assert len(store.snapshot(0)) == (2000 if found_by == "a look" else 4000)
        await store.write("note/a", 1)


async def test_rot_within_an_element_is_noticed(lab: Lab) -> None:
    async with lab.running() as store:
        await store.merge([ALICE.says("note/a", 1)])
        other = ALICE.says("note/a", 2).sealed
        for rot in (b"\x93" * 50, other):
            connection_of(store).execute("UPDATE element SET sealed = ?", (rot,))
            assert await store.get(ALICE.id, "note/a") is None
            assert "damaged" in store.warning
            assert await store.merge([ALICE.says("note/a", 1)]) == [Merged.STORED]


async def test_a_database_of_another_version_or_another_run_is_left_alone(lab: Lab) -> None:
    async with lab.running() as store:
        await store.merge(notes(3))
    for other in (99, -1):
        with sqlite3.connect(lab.path) as raw:
            raw.execute(f"PRAGMA user_version = {other}")
        content = lab.path.read_bytes()
        with pytest.raises(DataDirVersion, match=f"schema {other}") as caught:
            await lab.store().run()
        assert caught.value.exit_code == DATADIR_VERSION
        assert lab.path.read_bytes() == content
    with sqlite3.connect(lab.path) as raw:
        raw.execute(f"PRAGMA user_version = {statedb.VERSION}")
    with pytest.raises(DataDirVersion, match="of run"):
        await lab.store("cd" * 32).run()
    async with lab.running() as store:
        assert len(store.snapshot(0)) == 3


async def test_expired_elements_give_their_room_back(lab: Lab) -> None:
    async with lab.running() as store:
        leases = [Author(1000 + n).says("member", "x" * 800) for n in range(3000)]
        await store.merge(leases)
        await store.merge(notes(5))
        connection_of(store).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        full = lab.path.stat().st_size
        lab.time += KINDS["member"].ttl
        assert await store.sweep() == 3000
        for _ in range(3):
            assert await store.sweep() == 0
        connection_of(store).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert lab.path.stat().st_size < full / 10
        assert (await store.stats()).authors == 1
        lab.time -= 10_000
    async with lab.running() as store:
        assert set(await store.merge(leases[:5])) == {Merged.EXPIRED}, "also after a restart"


def test_a_place_that_cannot_be_written_is_said_in_words(lab: Lab) -> None:
    lab.path.parent.parent.joinpath("run").write_text("a file")
    with pytest.raises(datadir.DataDirError, match="run"):
        run_simulation(lab.store().run)


def test_a_block_of_stamps_is_a_second() -> None:
    assert statestore.STAMPS == 1000 << COUNTER_BITS
