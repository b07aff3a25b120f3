"""What the shard store keeps, what it gives up, and what it is after a crash."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnode.node.exitcodes import NO_SPACE
from swarmnode.node.storage import shardstore
from swarmnode.node.storage.shardstore import ShardStore, StoreFull, Unreadable
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardId, ShardManifest
from swarmnode.protocols.transfer.shard_wire import Holding, ShardError, ShardNotHeld


def content(seed: int, size: int = 2 * CHUNK + 100) -> bytes:
    return random.Random(seed).randbytes(size)


def chunks_of(whole: bytes) -> list[bytes]:
    return [whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK)]


def put(store: ShardStore, whole: bytes) -> ShardId:
    source = store.folder.parent / "source"
    source.write_bytes(whole)
    *_, shard = store.put(source)
    assert shard is not None
    return shard


def fetched(store: ShardStore, whole: bytes, chunks: int | None = None) -> ShardId:
    """Write the first `chunks` chunks as a fetch would, and finish where that is all."""
    manifest = ShardManifest.of(whole)
    have = store.begin(manifest)
    for index, chunk in enumerate(chunks_of(whole)[:chunks]):
        if not have >> index & 1:
            store.write(manifest.id, [(index, memoryview(chunk))])
    if chunks is None:
        store.finish(manifest.id)
    return manifest.id


def chunk_of(store: ShardStore, shard: ShardId, index: int) -> bytes:
    room = memoryview(bytearray(CHUNK))
    return bytes(room[: store.read(shard, index, room)])


def read(store: ShardStore, shard: ShardId) -> bytes:
    return b"".join(chunk_of(store, shard, index) for index in range(store.manifest(shard).chunks))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardStore:
    ticks = itertools.count(1_700_000_000)
    monkeypatch.setattr(shardstore, "time", SimpleNamespace(time=lambda: next(ticks)))
    return ShardStore(tmp_path / "shards", cap=10 * CHUNK)


def reopened(store: ShardStore) -> ShardStore:
    return ShardStore(store.folder, cap=store.cap)


def test_what_is_put_or_fetched_is_there_after_a_restart(store: ShardStore, tmp_path: Path) -> None:
    one, two = put(store, content(1)), fetched(store, content(2))
    store.pin(two)
    for found in (store, reopened(store)):
        assert {kept.shard: kept.pinned for kept in found.kept()} == {one: False, two: True}
        assert found.holding(one) == Holding(len(content(1)), True)
        assert read(found, one) == content(1) and read(found, two) == content(2)
        assert found.used == len(content(1)) + len(content(2))
        found.export(one, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content(1)
    assert one == ShardManifest.of(content(1)).id
    assert put(store, content(1)) == one
    assert len(store.kept()) == 2
    assert (store.folder.stat().st_mode & 0o777) == 0o700
    assert {file.stat().st_mode & 0o077 for file in store.folder.iterdir()} == {0}


def test_wrong_bytes_are_never_read_even_where_they_were_written(store: ShardStore) -> None:
    manifest, good = ShardManifest.of(content(1)), chunks_of(content(1))
    store.begin(manifest)
    for index, wrong in (
        (0, good[1]),
        (0, good[0][:-1]),
        (2, good[0]),
        (3, b""),
        (-1, good[2]),
        (1, good[1] + good[1]),
    ):
        assert not manifest.fit(index, memoryview(wrong))
    assert manifest.fit(1, memoryview(good[1] + good[2]))
    store.write(manifest.id, [(0, memoryview(good[1])), (1, memoryview(good[1]))])
    for _ in range(2):
        with pytest.raises(ShardNotHeld):
            chunk_of(store, manifest.id, 0)
        assert store.holding(manifest.id) == Holding()
    assert reopened(store).begin(manifest) == 0b010


def test_half_a_shard_is_served_now_and_continued_after_a_restart(store: ShardStore) -> None:
    shard = fetched(store, content(1), chunks=2)
    assert store.holding(shard).bits() == 0b011
    assert chunk_of(store, shard, 1) == chunks_of(content(1))[1]
    with pytest.raises(ShardNotHeld):
        chunk_of(store, shard, 2)
    with pytest.raises(ShardNotHeld):
        store.path(shard)
    again = reopened(store)
    assert not again.holding(shard).bits()
    part = again.folder / f"{shard.hex()}.part"
    with part.open("r+b") as file:  # what a power cut may leave of a chunk
        file.seek(CHUNK + 5)
        file.write(bytes(1000))
    assert again.begin(again.manifest(shard)) == 0b001
    again.suspend(shard)
    assert fetched(again, content(1)) == shard
    assert read(reopened(again), shard) == content(1)
    assert not part.exists()


def test_as_many_chunks_are_read_at_once_as_fit_and_are_here(store: ShardStore) -> None:
    whole = put(store, content(1, 4 * CHUNK + 100))
    half = ShardManifest.of(content(2, 4 * CHUNK))
    store.begin(half)
    part = half.id
    store.write(part, [(1, memoryview(content(2, 4 * CHUNK))[CHUNK : 3 * CHUNK])])
    room = memoryview(bytearray(3 * CHUNK))
    for shard, first, size in ((whole, 0, 3 * CHUNK), (whole, 3, CHUNK + 100), (whole, 4, 100), (part, 1, 2 * CHUNK)):
        assert store.read(shard, first, room) == size
        assert room[:size] == content(1 if shard == whole else 2, 4 * CHUNK + 100)[first * CHUNK :][:size]
    assert store.read(whole, 0, room[:CHUNK]) == CHUNK
    for shard, first in ((part, 0), (part, 3), (whole, 5)):
        with pytest.raises(ShardNotHeld):
            store.read(shard, first, room)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux says what is in memory")
def test_only_what_was_verified_lately_is_read_without_a_hash(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr(shardstore, "time", SimpleNamespace(time=lambda: now[0]))
    shard, room = put(store, content(1)), memoryview(bytearray(3 * CHUNK))
    assert store.read_now(shard, 0, room) == 0  # what was put is not what the disk gives
    store.read(shard, 0, room[: 2 * CHUNK])
    room[:] = bytes(len(room))
    assert store.read_now(shard, 0, room[: 2 * CHUNK]) == 2 * CHUNK
    assert room[: 2 * CHUNK] == content(1)[: 2 * CHUNK]
    assert store.read_now(shard, 1, room) == store.read_now(shard, 2, room) == store.read_now(shard, 9, room) == 0
    assert store.read_now(bytes(32), 0, room) == store.read_now(shard, 0, room[:5]) == 0
    now[0] += 61
    assert store.read_now(shard, 0, room[:CHUNK]) == 0
    store.read(shard, 2, room)
    assert store.read_now(shard, 0, room[:CHUNK]) == 0
    store.read(shard, 0, room)
    assert store.read_now(shard, 0, room) == len(content(1))
    with store.path(shard).open("r+b") as file:
        file.write(b"rot")
    now[0] += 61
    with pytest.raises(ShardNotHeld):
        store.read(shard, 0, room)
    assert store.read_now(shard, 1, room[:CHUNK]) == 0
    store.collect()
    assert store.read_now(shard, 0, room) == 0


def test_a_disk_that_takes_nothing_past_the_cache_is_written_through_it(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, how: int, *rest: int) -> int:
        if how & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, how, *rest)

    monkeypatch.setattr(os, "open", refusing)
    shard = fetched(store, content(1))
    assert read(reopened(store), shard) == content(1)


def test_the_least_recently_used_goes_first_and_the_pinned_never(store: ShardStore) -> None:
    a, b, c = (put(store, content(seed, 3 * CHUNK)) for seed in (1, 2, 3))
    store.pin(b)
    chunk_of(store, a, 0)
    d = put(store, content(4, 3 * CHUNK))
    assert {kept.shard for kept in store.kept()} == {a, b, d}
    e = put(store, content(5, 3 * CHUNK))
    assert {kept.shard for kept in store.kept()} == {b, d, e}
    store.pin(d)
    store.pin(e)
    with pytest.raises(StoreFull, match="or raise shards_cap"):
        put(store, content(6, 3 * CHUNK))
    store.pin(b, False)
    put(store, content(6, 3 * CHUNK))
    assert b not in {kept.shard for kept in reopened(store).kept()}
    assert store.used <= store.cap
    assert c not in store._entries


def test_the_order_of_use_survives_a_restart(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (put(store, content(seed, 4 * CHUNK)) for seed in (1, 2))
    for at, shard in ((2_000_000_000, b), (2_000_000_100, a)):
        monkeypatch.setattr(shardstore, "time", SimpleNamespace(time=lambda at=at: at))
        chunk_of(store, shard, 0)
    again = reopened(store)
    assert [kept.shard for kept in again.kept()] == [a, b]
    put(again, content(3, 4 * CHUNK))
    assert b not in again._entries and a in again._entries


def test_nothing_is_evicted_for_what_would_not_fit_anyway(store: ShardStore) -> None:
    a = put(store, content(1, 4 * CHUNK))
    b = put(store, content(2, 4 * CHUNK))
    store.pin(b)
    with pytest.raises(StoreFull):
        store.begin(ShardManifest.of(content(3, 7 * CHUNK)))
    assert read(store, a) == content(1, 4 * CHUNK)
    with pytest.raises(StoreFull):
        put(store, content(4, 11 * CHUNK))
    assert {kept.shard for kept in store.kept()} == {a, b}


def test_shards_being_fetched_keep_their_room_and_abandoned_ones_lose_it(store: ShardStore) -> None:
    shard = fetched(store, content(1, 8 * CHUNK), chunks=1)
    with pytest.raises(StoreFull):
        put(store, content(2, 3 * CHUNK))
    store.suspend(shard)
    put(store, content(2, 3 * CHUNK))
    assert not list(store.folder.glob(f"{shard.hex()}.*"))


def test_a_shard_is_dropped_unless_it_is_pinned_or_being_fetched(store: ShardStore) -> None:
    pinned, loose = put(store, content(1)), put(store, content(2))
    busy = fetched(store, content(3), chunks=1)
    store.pin(pinned)
    for shard in (pinned, loose, busy, loose):
        store.drop(shard)
    assert {kept.shard for kept in store.kept()} == {pinned, busy}


def test_collection_frees_what_nobody_needs(store: ShardStore) -> None:
    pinned, loose = put(store, content(1)), put(store, content(2))
    store.pin(pinned)
    half, busy = fetched(store, content(3), chunks=1), fetched(store, content(4), chunks=1)
    store.suspend(half)
    assert list(store.collect()) == [half]
    assert store.collect(unpinned=True) == {loose: len(content(2))}
    assert {kept.shard for kept in store.kept()} == {pinned, busy}
    store.cap = 0
    assert store.collect() == {}
    with pytest.raises(ShardNotHeld):
        store.pin(loose)


def test_a_full_disk_is_a_typed_error_and_loses_nothing(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = put(store, content(1))
    shard = fetched(store, content(2), chunks=1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreFull) as caught:
            store.write(shard, [(1, memoryview(chunks_of(content(2))[1]))])
        assert caught.value.exit_code == NO_SPACE
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFull):
            put(store, content(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreFull):
            store.begin(ShardManifest.of(content(4)))
    with monkeypatch.context() as patch:
        patch.setattr(shardstore, "MARGIN", 1 << 60)
        with pytest.raises(StoreFull, match=r"disk.*or make room on the disk"):
            put(store, content(3))
    assert {kept.shard for kept in store.kept()} == {before, shard}
    assert store.used == len(content(1)) + len(content(2))
    assert {file.suffix for file in store.folder.iterdir()} == {".shard", ".tree", ".part"}
    assert fetched(store, content(2)) == shard
    assert read(store, shard) == content(2)


def test_a_disk_that_fails_is_a_typed_error_wherever_it_does(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    shard, half = put(store, content(1)), fetched(store, content(2), chunks=1)
    store.suspend(half)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", failed)
        with pytest.raises(Unreadable, match="Input/output"):
            store.begin(ShardManifest.of(content(3)))
        with pytest.raises(Unreadable, match="Input/output"):
            put(store, content(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", failed)
        assert read(store, shard) == content(1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failed)
        store.drop(half)
        patch.setattr(shardstore, "write_tree", failed)
        with pytest.raises(Unreadable, match="Input/output"):
            store.begin(ShardManifest.of(content(3)))
        assert store.used == sum(len(content(seed)) for seed in (1, 2, 3)), "what cannot be deleted counts"
    store.collect()
    assert [kept.shard for kept in store.kept()] == [shard]
    with store.path(shard).open("r+b") as file:
        file.write(b"rot")
    monkeypatch.setattr(os, "link", failed)
    with pytest.raises(Unreadable, match="Input/output"):
        chunk_of(store, shard, 0)


def test_a_tree_that_the_disk_does_not_take_leaves_nothing_behind(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failed)
        with pytest.raises(StoreFull):
            store.begin(ShardManifest.of(content(3)))
    assert list(store.folder.iterdir()) == []


def test_a_changed_disk_is_noticed_and_mended_by_fetching_again(store: ShardStore) -> None:
    shard = put(store, content(1))
    path = store.path(shard)
    with path.open("r+b") as file:
        file.write(b"rot")
    assert chunk_of(store, shard, 1) == chunks_of(content(1))[1]
    with pytest.raises(ShardNotHeld):
        chunk_of(store, shard, 0)
    assert not store.holding(shard).complete
    assert path.exists(), "a trainer opens it for each draw"
    assert store.begin(ShardManifest.of(content(1))) == 0b110
    store.write(shard, [(0, memoryview(chunks_of(content(1))[0]))])
    store.finish(shard)
    assert read(store, shard) == path.read_bytes() == content(1)
    assert {file.suffix for file in store.folder.iterdir()} == {".shard", ".tree"}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_sector_that_cannot_be_read_is_as_good_as_other_bytes(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Of several chunks at once Linux gives those before the sector."""
    shard, place = put(store, content(1)), bad * CHUNK
    disk, pread, preadv = store.path(shard).stat().st_ino, os.pread, os.preadv

    def readable(file: int, size: int, offset: int) -> int:
        if os.fstat(file).st_ino != disk or not offset <= place < offset + size:
            return size
        if offset == place:
            raise OSError(errno.EIO, "Input/output error")
        return place - offset

    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, readable(file, size, at), at))
    monkeypatch.setattr(os, "preadv", lambda file, to, at: preadv(file, [to[0][: readable(file, len(to[0]), at)]], at))
    with pytest.raises(ShardNotHeld):
        store.read(shard, 0, memoryview(bytearray(4 * CHUNK)))
    assert not store.holding(shard).complete, "nobody is told that it is whole"
    have = store.begin(ShardManifest.of(content(1)))
    assert not have >> bad & 1
    disk = 0  # what is written goes to another sector
    lacking = [(index, chunk) for index, chunk in enumerate(chunks_of(content(1))) if not have >> index & 1]
    store.write(shard, [(index, memoryview(chunk)) for index, chunk in lacking])
    store.finish(shard)
    assert read(store, shard) == content(1)


def test_a_hash_tree_that_cannot_be_read_is_made_again(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = put(store, content(1))
    again, usual = reopened(store), Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.suffix == ".tree":
            raise OSError(errno.EIO, "Input/output error")
        return usual(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert again.manifest(shard) == ShardManifest.of(content(1))


def test_a_shard_that_the_disk_cut_off_has_its_size_again_as_it_is_fetched(store: ShardStore) -> None:
    whole = content(1, 9 * CHUNK)
    shard = put(store, whole)
    os.truncate(store.path(shard), CHUNK)
    again = reopened(store)
    with pytest.raises(ShardNotHeld):
        chunk_of(again, shard, 1)
    assert again.begin(ShardManifest.of(whole)) == 0b1
    for index, chunk in enumerate(chunks_of(whole)):
        again.write(shard, [(index, memoryview(chunk))])
        assert again.holding(shard).bits() == (2 << index) - 1
    again.finish(shard)
    assert again.holding(shard) == Holding(len(whole), True) and again.used == len(whole)
    assert read(again, shard) == whole


def test_a_lost_or_false_tree_is_made_again_or_the_shard_forgotten(store: ShardStore) -> None:
    a, b = put(store, content(1)), put(store, content(2))
    (store.folder / f"{a.hex()}.tree").unlink()
    (store.folder / f"{b.hex()}.tree").write_bytes(b"\xff" * 72)
    again = reopened(store)
    assert read(again, a) == content(1) and read(again, b) == content(2)
    (store.folder / f"{b.hex()}.tree").unlink()
    (store.folder / f"{b.hex()}.shard").write_bytes(content(3))
    again = reopened(store)
    with pytest.raises(ShardNotHeld):
        again.manifest(b)
    assert [kept.shard for kept in again.kept()] == [a]


def test_leftovers_are_cleared_at_start_and_strange_files_left_alone(store: ShardStore) -> None:
    a = put(store, content(1))
    name = "ab" * 32
    for leftover in (f"{name}.part", f"{'cd' * 32}.tree", f"{'ef' * 32}.pin", ".in-abc", f".{name}.tree.x.part"):
        (store.folder / leftover).write_bytes(b"x")
    (store.folder / "README").write_text("mine")
    again = reopened(store)
    assert [kept.shard for kept in again.kept()] == [a]
    assert {file.name for file in store.folder.iterdir()} == {f"{a.hex()}.shard", f"{a.hex()}.tree", "README"}


def test_bytes_in_memory_are_the_same_shard_and_leave_no_other_file(store: ShardStore) -> None:
    shard = put(store, content(1))
    files = set(store.folder.iterdir())
    store.drop(shard)
    *_, again = store.put(memoryview(content(1)))
    assert again == shard and read(store, shard) == content(1) and set(store.folder.iterdir()) == files


def test_a_file_that_cannot_be_read_is_a_typed_error(store: ShardStore, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"/missing cannot be read: No such file or directory$"):
        next(store.put(tmp_path / "missing"))
    with pytest.raises(Unreadable, match=r"Is a directory$"):
        next(store.put(tmp_path))
    shard = put(store, content(1))
    with pytest.raises(ShardError, match=r"/target cannot be written: No such file or directory$"):
        store.export(shard, tmp_path / "no folder" / "target")
    assert store.used == len(content(1))


def test_a_thousand_shards_are_listed_without_reading_one(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    for _ in range(1000):
        name = draw.randbytes(32).hex()
        for suffix in ("shard", "tree"):
            (store.folder / f"{name}.{suffix}").write_bytes(b"x")
    opened: list[object] = []
    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", lambda path, *rest, **named: opened.append(path))
    again = reopened(store)
    monkeypatch.undo()
    assert not opened
    assert len(again.kept()) == 1000


KILLED = """
import os, random, sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from swarmnode.node.storage.shardstore import ShardStore
sys.path.insert(0, {tests!r})
from test_shardstore import content, fetched, put
store = ShardStore(Path({folder!r}), cap=1 << 30)
print("ready", flush=True)
for seed in range(10_000):
    (put if seed % 2 else fetched)(store, content(seed % 7, 300_000))
    store.collect(unpinned=seed % 3 == 0)
"""


def test_a_kill_at_any_moment_leaves_whole_shards_only(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    draw = random.Random(4)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(draw.uniform(0.01, 0.15))  # a real process, killed at a moment of its own
            process.send_signal(signal.SIGKILL)
        store = ShardStore(folder, cap=1 << 30)
        for kept in store.kept():
            if kept.complete:
                assert ShardManifest.of(read(store, kept.shard)).id == kept.shard
        known = {kept.shard.hex() for kept in store.kept()}
        assert {file.name.split(".")[0] for file in folder.iterdir()} <= known
        for seed in range(7):
            shard = fetched(store, content(seed, 300_000))
            assert read(store, shard) == content(seed, 300_000)


def test_a_shard_may_be_put_while_it_is_fetched(store: ShardStore) -> None:
    shard = fetched(store, content(1), chunks=1)
    assert put(store, content(1)) == shard
    store.write(shard, [(1, memoryview(chunks_of(content(1))[1]))])  # what was under way still arrives
    store.finish(shard)
    half = fetched(store, content(2), chunks=1)
    store.suspend(half)
    put(store, content(2))
    for found in (store, reopened(store)):
        assert read(found, shard) == content(1) and read(found, half) == content(2)
        assert {file.suffix for file in store.folder.iterdir()} == {".shard", ".tree"}
    assert store.collect() == {}
