"""Hybrid logical clock: stamps that follow real time and never run backwards (Kulkarni et al. 2014).

A stamp is one 64-bit integer: 48 bits of milliseconds since the Unix epoch, then a counter of 16 bits. Integers
compare as time does, and a full counter carries into the milliseconds by itself. Real time is an argument, in
milliseconds.
"""

from __future__ import annotations

COUNTER_BITS = 16
MAX_STAMP = (1 << 64) - 1
MAX_TIME = (1 << 48) - 1  # ms, in the year 10889
MAX_AHEAD = 60_000  # ms; a stamp further ahead of this node's time is somebody's broken or lying clock


def stamp_at(time: int, counter: int = 0) -> int:
    """The stamp of `time` ms. Raises ValueError outside 48 and 16 bits."""
    if not 0 <= time <= MAX_TIME or not 0 <= counter < 1 << COUNTER_BITS:
        raise ValueError(f"no stamp for {time} ms and counter {counter}; expected 48 and 16 bits")
    return time << COUNTER_BITS | counter


def time_of(stamp: int) -> int:
    """Milliseconds since the epoch in `stamp`."""
    return stamp >> COUNTER_BITS


def is_ahead(stamp: int, now: int) -> bool:
    """Whether `stamp` is too far in the future at `now` ms to be believed."""
    return time_of(stamp) > now + MAX_AHEAD


def expiry_of(hlc: int, ttl: int) -> bytes:
    """When something stamped `hlc` that lives `ttl` ms expires: a stamp as u64 big-endian, which sorts as it does."""
    return min(hlc + (ttl << COUNTER_BITS), MAX_STAMP).to_bytes(8, "big")


def hlc_of(expiry: bytes, ttl: int) -> int:
    """The stamp of what expires at `expiry`, of which the first 8 bytes count, having lived `ttl` ms."""
    return int.from_bytes(expiry[:8], "big") - (ttl << COUNTER_BITS)


def expiring_after(cutoff: int) -> bytes:
    """The bound at and above which expiries after `cutoff` ms sort, and below which all others do."""
    return stamp_at(min(max(0, cutoff + 1), MAX_TIME)).to_bytes(8, "big")


class HybridClock:
    """The clock of one author. `last` is the greatest stamp made or seen: store it, and start from it again.

    Promised: every `tick` is greater than every stamp that this clock made or observed before, also when real time
    steps back; and no stamp from elsewhere moves it more than `MAX_AHEAD` beyond real time.
    """

    def __init__(self, last: int = 0) -> None:
        if not 0 <= last <= MAX_STAMP:
            raise ValueError(f"{last} is no stamp")
        self._last = last

    @property
    def last(self) -> int:
        return self._last

    def tick(self, now: int) -> int:
        """A new stamp for something that happens at `now` ms."""
        self._last = max(stamp_at(now), self._last + 1)
        return self._last

    def observe(self, stamp: int, now: int) -> None:
        """Be greater than a stamp from elsewhere from now on; but not where it is too far ahead to be believed."""
        if not 0 <= stamp <= MAX_STAMP:
            raise ValueError(f"{stamp} is no stamp")
        if not is_ahead(stamp, now):
            self._last = max(self._last, stamp)
