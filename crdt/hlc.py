"""Hybrid logical clock: stamps that follow real time and never run backwards (Kulkarni et al. 2014).

A stamp is one 64-bit integer: 48 bits of milliseconds since the Unix epoch, then a counter of 16 bits. Integers
compare as time does, and a full counter carries into the milliseconds by itself. Real time is an argument, in ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

COUNTER_BITS = 16
MAX_STAMP = (1 << 64) - 1
MAX_TIME = (1 << 48) - 1  # ms, in the year 10889
MAX_AHEAD = 60_000  # ms; a stamp further ahead of this node's time is somebody's broken or lying clock
MAX_OFF = 30_000  # ms from the median of peers' clocks; two such nodes are a minute apart, as a stamp may lie ahead
ENOUGH = 3  # peers whose clocks, or whose memory of this node, count as confirmation


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
    return stamp >> COUNTER_BITS > now + MAX_AHEAD


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
        self.last = last

    def tick(self, now: int) -> int:
        """A new stamp for something that happens at `now` ms."""
        self.last = max(stamp_at(now), self.last + 1)
        return self.last

    def observe(self, stamp: int, now: int) -> None:
        """Be greater than a stamp from elsewhere from now on; but not where it is too far ahead to be believed."""
        if not is_ahead(stamp, now):
            self.last = max(self.last, stamp)


class PeerClocks:
    """This node's clock against those of its peers: each one that answers tells its time.

    Peers' times are kept against a steady clock, so it shows at once when this node's clock is set. Where that takes it
    more than MAX_OFF from the median of peers, the node goes by the time that at least ENOUGH of them confirmed before,
    also when fewer are left; one whose time they never confirmed refuses to sign, and says so. Fewer than half of those
    asked can lie about it, and whoever does keeps a node from signing, but cannot move its time.
    """

    def __init__(self, now: Callable[[], int], steady: Callable[[], float]) -> None:
        """`now`: what this node's clock shows, ms; `steady`: seconds by a clock that nobody sets."""
        self.shown, self._steady = now, steady  # peers are told what is shown: else all would confirm what nobody shows
        self._peers: dict[str, float] = {}  # what the clock of a connected peer showed, less steady time, ms
        self._median = 0.0  # of these
        self._confirmed = math.inf  # what this node's showed when peers confirmed it, less steady time; at first inf

    def time(self) -> int:
        """This node's time, ms."""
        shown, steady = self.shown(), 1000 * self._steady()
        if not self._peers:
            return shown
        if abs(self._median + steady - shown) <= MAX_OFF:
            if len(self._peers) >= ENOUGH:
                self._confirmed = shown - steady
            return shown
        return round(steady + self._confirmed) if abs(self._median - self._confirmed) <= MAX_OFF else shown

    def record(self, peer: str, time: int) -> None:
        """`peer`'s clock shows `time` ms."""
        self._peers[peer] = time - 1000 * self._steady()
        self._median = median(self._peers.values())

    def forget(self, peer: str) -> None:
        """`peer` is gone: what it said of a clock that may since have been set right does not count any more."""
        if self._peers.pop(peer, None) is not None:
            self._median = median(self._peers.values() or (0.0,))

    @property
    def off(self) -> int | None:
        """Milliseconds that the median of peers is ahead of this node's clock; None while too few are known."""
        return self._off if len(self._peers) >= ENOUGH else None

    @property
    def confirmed(self) -> bool:
        """Whether enough peers agree with this node's clock."""
        return self.off is not None and abs(self.off) <= MAX_OFF

    @property
    def doubt(self) -> str:
        """That the clock is wrong, or peers too few to tell have another time, for its owner; else ""."""
        if abs(self._off) <= MAX_OFF or self.complaint:
            return ""
        if abs(self._median - self._confirmed) <= MAX_OFF:  # so it was set: what was confirmed is still right by them
            return f"{self._apart} other nodes: this node goes by the time that it had before; set the clock right"
        return f"{self._apart} {len(self._peers)} peer(s): one is wrong, and what it signs is refused; check yours"

    @property
    def complaint(self) -> str:
        """Why this node must not sign, for its owner; "" where it may."""
        if self.off is None or self.confirmed or abs(self._median - self._confirmed) <= MAX_OFF:
            return ""
        return f"{self._apart} other nodes: this node signs nothing until it is right, so others take it for gone"

    @property
    def _off(self) -> int:
        """As `off`, however few they are; 0 without any."""
        return round(self._median + 1000 * self._steady() - self.shown()) if self._peers else 0

    @property
    def _apart(self) -> str:
        way = "behind" if self._off > 0 else "ahead of"
        return f"the clock of this machine is {abs(self._off) / 1000:.0f} s {way} that of"
