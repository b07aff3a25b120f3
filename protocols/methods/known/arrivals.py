"""How what a peer sends arrives, and how long it may send nothing."""

from __future__ import annotations

import trio

RATE_FROM = 1 << 20  # bytes; fewer measure the round trip, not the link
SILENT_SHARE = 0.3  # of the usual time of a reduction: what is lost when a frozen peer is noticed
SILENT_LEAST = 0.5  # seconds that a peer may be silent in any case: a lost packet is sent again after half of it


def silence_allowed(usual: float | None, failed: int) -> float | None:
    """Seconds of silence in a reduction that usually takes `usual` seconds; None before that is known.

    For `Liveness.watching`, which knows what silences are like a peer. A frozen peer costs a round a part of its usual
    time, then; where rounds take long, unanswered pings come first. Each of the attempts of the round that `failed`
    doubles it: what these had under way still fills the links.
    """
    return None if usual is None else max(SILENT_LEAST, SILENT_SHARE * usual) * 2**failed


class Arrivals:
    """The flow of one fetch of `size` bytes. Pass `moving` as its `progress`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: tuple[float, int] | None = None  # when the first bytes came (trio time), and how many

    def moving(self, done: int) -> None:
        """`done` bytes are in hand."""
        if self._first is None:
            self._first = trio.current_time(), done  # the wait for the offer says nothing about the link

    def rate(self) -> float | None:
        """Bytes a second up to now; None where too little came to tell."""
        if self._first is None:
            return None
        began, there = self._first
        seconds, moved = trio.current_time() - began, self._size - there
        return moved / seconds if moved >= RATE_FROM and seconds > 0 else None
