"""How what a peer sends arrives: how fast, and whether it has stopped.

A member encodes and sends its values without waiting for anybody, so its bytes come in a flow whose gaps show what its
link and both machines make of it. One that freezes leaves a gap unlike those before: that is seen in about a second,
where unanswered pings (`liveness.py`), which must not be mistaken on any link, take several.
"""

from __future__ import annotations

import trio

RATE_FROM = 1 << 20  # bytes; fewer measure the round trip, not the link
QUIET = 1.0  # seconds without a byte that are no reason to worry, however regular the flow was
UNLIKE = 8.0  # times the longest gap so far, before a gap is unlike the others
JUDGED_FROM = 16  # arrivals before which nothing is known about gaps


class Arrivals:
    """The flow of one fetch of `size` bytes. Pass `moving` as its `progress`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._count = 0
        self._first: tuple[float, int] = (0.0, size)  # when the first bytes came (trio time), and how many
        self._last = 0.0  # when the latest came, trio time
        self._longest = 0.0  # seconds, of the gaps

    def moving(self, done: int) -> None:
        """`done` bytes are in hand."""
        now = trio.current_time()
        if self._count:
            self._longest = max(self._longest, now - self._last)
        else:
            self._first = now, done  # the wait for the offer says nothing about the link
        self._count += 1
        self._last = now

    def rate(self) -> float | None:
        """Bytes a second up to now; None where too little came to tell."""
        began, there = self._first
        seconds, moved = trio.current_time() - began, self._size - there
        return moved / seconds if moved >= RATE_FROM and seconds > 0 else None

    async def stopped(self) -> None:
        """Return when the flow has stopped. A gap in which this node itself stood still does not count."""
        while True:
            known = self._count >= JUDGED_FROM
            allowed = max(QUIET, UNLIKE * self._longest)
            look_at = max(self._last + allowed if known else 0.0, trio.current_time() + QUIET / 4)
            before = self._count
            await trio.sleep_until(look_at)
            late = trio.current_time() - look_at
            if known and self._count == before and late < QUIET / 4 and look_at >= self._last + allowed:
                return
            if late >= QUIET / 4:
                self._last = trio.current_time()
