"""Verified chunks on their way to the disk: several answers go in one trip to a worker thread.

A trip costs more than hashing a chunk does, most of it in handing Python's lock to and fro. So chunks are hashed where
they arrive, and gathered here until there are BATCH answers, or GATHER seconds passed, or no more come. Their memory
changes hands instead of being copied: who brings a full room takes an empty one along.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_tree import ShardId
from swarmnode.protocols.transfer.shard_wire import ShardError, Store

BATCH = 2  # answers written at once; four gain nothing that could be measured, and take twice the memory
ROOMS = 2 * BATCH  # answers that wait or are being written; who brings one more waits, so this bounds the memory
GATHER = 0.01  # seconds that a verified answer waits for others

NO_ROOM = memoryview(b"")


class Shelf:
    """Calls `written(answers put and not yet written)` after each trip, or `failed(error)` where that is impossible."""

    def __init__(
        self,
        shard: ShardId,
        *,
        store: Store,
        runner: Runner,
        written: Callable[[int], None],
        failed: Callable[[ShardError], None],
    ) -> None:
        self._shard = shard
        self._store = store
        self._runner = runner
        self._written = written
        self._failed = failed
        self._waiting: list[tuple[int, memoryview, memoryview]] = []  # first chunk, chunks, the room that they lie in
        self._unwritten = 0
        self._rooms = [NO_ROOM] * ROOMS
        self._returned = trio.lowlevel.ParkingLot()
        self._some, self._enough = trio.Event(), trio.Event()

    async def put(self, first: int, chunks: memoryview, room: memoryview, *, last: bool) -> memoryview:
        """Write verified `chunks`, which lie in `room`; `last`: no more will come. Returns an empty room for it."""
        self._unwritten += 1
        while not self._rooms:
            await self._returned.park()
        self._waiting.append((first, chunks, room))
        self._some.set()
        if last or len(self._waiting) >= BATCH:
            self._enough.set()
        return self._rooms.pop()

    async def run(self) -> None:
        """Write what is put, until cancelled."""
        while True:
            await self._some.wait()
            with trio.move_on_after(GATHER):
                await self._enough.wait()
            batch, self._waiting = self._waiting, []
            self._some, self._enough = trio.Event(), trio.Event()
            answers = [(first, chunks) for first, chunks, _ in batch]
            try:
                await self._runner(lambda answers=answers: self._store.write(self._shard, answers))  # type: ignore[misc]
            except ShardError as error:
                self._failed(error)
                return
            self._rooms.extend(room for _, _, room in batch)
            self._returned.unpark_all()
            self._unwritten -= len(batch)
            self._written(self._unwritten)
