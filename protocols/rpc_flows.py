"""Items of one call in one direction, within a window: who reads slowly stops who writes, and nobody's memory grows.

The reader's side gives credit in bytes. It starts with WINDOW and gives back what was taken once that is half of it, so
whatever an honest writer sends, at most WINDOW bytes wait for the reader. An item costs its length and ITEM_COST, which
stands for what Python keeps beside the bytes, and at most half a window: so it always fits once all before it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from swarmnode.protocols.rpc_frames import ITEM, Frame, Outbox
from swarmnode.protocols.wire import WireError

WINDOW = 256 * 1024  # bytes: 20 MB/s at 12 ms; larger things go by bulk
ITEM_COST = 64  # bytes
MAX_ITEM = WINDOW // 2 - ITEM_COST  # bytes of one item


class Outflow:
    """The writer's end: items of call `number` into an outbox, as far as the peer gave credit."""

    def __init__(self, outbox: Outbox, number: int, credit: int, queued: int) -> None:
        self._outbox = outbox
        self._number = number
        self._credit = credit
        self._queued = queued  # bytes in the outbox above which items wait, whatever the credit
        self._changed = trio.lowlevel.ParkingLot()
        self._ended = False

    async def send(self, body: bytes) -> bool:
        """Send one item; waits for credit. False where the call has ended and the item goes nowhere.

        Raises ValueError for an item of more than MAX_ITEM bytes.
        """
        if len(body) > MAX_ITEM:
            raise ValueError(f"an item of {len(body)} bytes, at most {MAX_ITEM} fit")
        await trio.lowlevel.checkpoint()
        cost = len(body) + ITEM_COST
        while not self._ended:
            if self._credit < cost:
                await self._changed.park()
            elif self._outbox.size >= self._queued:
                await self._outbox.below(self._queued)
            else:
                self._credit -= cost
                self._outbox.put_item(Frame(ITEM, self._number, body=body))
                return True
        return False

    def grant(self, credit: int) -> None:
        """The peer takes `credit` bytes more. Raises WireError where that is no credit."""
        if credit <= 0:
            raise WireError(f"a credit of {credit} bytes")
        self._credit += credit
        self._changed.unpark_all()

    def end(self) -> None:
        """The call is over: nobody waits here any more."""
        self._ended = True
        self._changed.unpark_all()


class Inflow:
    """The reader's end. `give(n)` tells the peer that it may send `n` bytes more."""

    def __init__(self, give: Callable[[int], object]) -> None:
        self._give = give
        self._bodies: deque[bytes] = deque()
        self._allowed = WINDOW
        self._taken = 0  # bytes taken and not given back as credit yet
        self._ended = False
        self._changed = trio.lowlevel.ParkingLot()

    def feed(self, body: bytes) -> None:
        """One item from the peer. Raises WireError where it had no credit for it, or said that there are no more."""
        cost = len(body) + ITEM_COST
        if self._ended or cost > self._allowed:
            raise WireError(f"an item of {len(body)} bytes beyond its credit or its end")
        self._allowed -= cost
        self._bodies.append(body)
        self._changed.unpark_all()

    def end(self) -> None:
        """No more items come; those that came can still be read."""
        self._ended = True
        self._changed.unpark_all()

    async def receive(self) -> bytes | None:
        """The next item, None after the last."""
        await trio.lowlevel.checkpoint()
        while not self._bodies:
            if self._ended:
                return None
            await self._changed.park()
        body = self._bodies.popleft()
        self._taken += len(body) + ITEM_COST
        if self._taken >= WINDOW // 2 and not self._ended:
            self._allowed += self._taken
            self._give(self._taken)
            self._taken = 0
        return body
