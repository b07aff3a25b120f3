"""Turns at something of which there is too little for all who want it at once: so many at a time, shared fairly.

Those who wait are served peer by peer, in a circle; what one peer asks for comes in its own order. So a peer that asks
for much waits longer, and does not make the others wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from swarmnode.protocols.network import PeerId

LOOK_EVERY = 1.0  # seconds after which one that waits looks whether a turn has become old, or may be had again
EASED_FOR = 10.0  # seconds, at most, for which turns are held back: whatever goes before them, they go on
BREATH = 0.25  # seconds between two turns while they are held back


class Turns:
    """At most `at_once` turns at a time, of which one peer has at most `each`. Who waits is bounded by the callers.

    A turn that is older than `longest` seconds takes nobody else's place any more, only one of its own peer's: those
    who are slow, or mean to be, do not keep the others out.
    """

    def __init__(self, at_once: int, each: int, *, longest: float) -> None:
        self._at_once, self._each, self._longest = at_once, each, longest
        self._waiting: OrderedDict[PeerId, deque[trio.Event]] = OrderedDict()  # who is next in the circle first
        self._having: dict[trio.Event, tuple[PeerId, float]] = {}  # and since when, trio time
        self._eased_until = self._last = -float("inf")  # trio time; `_last`: when a turn was given

    @asynccontextmanager
    async def turn(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for a turn of `peer` and hold it in the block. May be cancelled at any time."""
        mine = trio.Event()
        self._waiting.setdefault(peer, deque()).append(mine)
        try:
            self._hand_out()
            while not mine.is_set():
                with trio.move_on_after(LOOK_EVERY):
                    await mine.wait()
                self._hand_out()
            yield
        finally:
            if self._having.pop(mine, None) is None:
                self._waiting[peer].remove(mine)
                if not self._waiting[peer]:
                    del self._waiting[peer]
            self._hand_out()

    @contextmanager
    def eased(self) -> Iterator[None]:
        """In the block few turns, one at a time, as something goes before; for EASED_FOR seconds and no longer."""
        self._eased_until = trio.current_time() + EASED_FOR
        try:
            yield
        finally:
            self._eased_until = -float("inf")
            self._hand_out()

    def _hand_out(self) -> None:
        now = trio.current_time()
        at_once = self._at_once
        if now < self._eased_until:
            at_once = 1 if now >= self._last + BREATH else 0
        held = Counter(peer for peer, _ in self._having.values())
        taken = sum(now - since < self._longest for _, since in self._having.values())
        while taken < at_once:
            peer = next((peer for peer in self._waiting if held[peer] < self._each), None)
            if peer is None:
                return
            mine = self._waiting[peer].popleft()
            mine.set()
            self._having[mine] = peer, now
            self._last = now
            held[peer] += 1
            taken += 1
            self._waiting.move_to_end(peer)
            if not self._waiting[peer]:
                del self._waiting[peer]
