"""A buffer that becomes good from its start on, and those who wait for its bytes.

What is encoded, fetched or reduced piece by piece is handed on through one of these before it is whole: `bulk.Bulk`
serves what is ready of it to peers, and fetches into it.
"""

from __future__ import annotations

import math

import trio


class Growing:
    """`ready` bytes at the head of `buffer` are good and stay as they are. One task makes it grow, any number wait.

    What is offered may have a `name` that nothing else has: whoever fetched a part of it can go on from there later,
    under another key too. The `kept` bytes at the head of a buffer to fetch into came so, from an offer of that `name`;
    they become good when the source says that it is the same.
    """

    def __init__(self, buffer: bytearray | memoryview, *, name: bytes = b"", kept: int = 0) -> None:
        self.buffer = memoryview(buffer).cast("B")
        self.size = self.buffer.nbytes
        self.ready = 0
        self.name = name
        self.kept = kept
        self._ended = False
        self._awaited = math.inf  # the least that somebody waits for
        self._waiting = trio.lowlevel.ParkingLot()

    def grow(self, ready: int) -> None:
        """The first `ready` bytes are good now."""
        self.ready = max(self.ready, ready)
        if self.ready >= self._awaited:
            self._wake()

    def end(self) -> None:
        """No more comes: nobody waits any longer."""
        self._ended = True
        self._wake()

    async def reach(self, size: int) -> bool:
        """Wait until the first `size` bytes are good; False where they never will be."""
        while self.ready < size and not self._ended:
            self._awaited = min(self._awaited, size)
            await self._waiting.park()
        return self.ready >= size

    def _wake(self) -> None:
        self._awaited = math.inf
        self._waiting.unpark_all()
