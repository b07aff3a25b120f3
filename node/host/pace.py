"""How fast each peer may send and be sent to: members of a run freely, strangers at a LAN's rate, the slowed slowly.

Nothing is refused: a peer beyond its rate is not read from, so its TCP waits, and what it is sent waits here, in
outboxes that have bounds. Whoever is slowed for what it did is served in the little that it is read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import trio

from swarmnode.node.host.limits import RateLimits
from swarmnode.node.host.metered_tcp import WIDE_PIECE, TokenBucket
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Conduct, Standing

WAITED = Metric("swarmnode_paced_seconds_total", COUNTER, "seconds that peers beyond their rate waited", "direction")
IN, OUT = "in", "out"
SLOW_PIECE = 4 * 1024  # bytes read of a slowed peer at once, or written: 16 times a second


class Pacer:
    """The rates of all peers of a host."""

    def __init__(self, limits: RateLimits, conduct: Conduct) -> None:
        self._limits = limits
        self._conduct = conduct
        self._paces: WeakValueDictionary[PeerId, Pace] = WeakValueDictionary()
        self._strangers = {direction: TokenBucket(limits.strangers) for direction in (IN, OUT)}
        self._waited = dict.fromkeys((IN, OUT), 0.0)
        self.is_member: Callable[[PeerId], bool] = lambda peer: True  # a node without a run is among friends

    def of(self, peer: PeerId) -> Pace:
        """What all connections of `peer` go by."""
        pace = self._paces.get(peer)
        if pace is None:
            pace = self._paces[peer] = Pace(self, peer)
        return pace

    def piece(self, peer: PeerId) -> int:
        return WIDE_PIECE if self._conduct.standing(peer) is Standing.GOOD else SLOW_PIECE

    async def wait(self, pace: Pace, direction: str, size: int) -> None:
        """Return when `size` bytes of the peer may pass."""
        began = trio.current_time()
        for bucket in self._buckets(pace, direction):
            await bucket.take(size)
        self._waited[direction] += trio.current_time() - began

    def at_once(self, pace: Pace, direction: str, size: int) -> bool:
        """Whether `size` bytes of the peer may pass now; then they count."""
        return all(bucket.take_now(size) for bucket in self._buckets(pace, direction))

    def _buckets(self, pace: Pace, direction: str) -> tuple[TokenBucket, ...]:
        """What the peer's bytes must pass now."""
        own = pace.buckets[direction]
        member = self.is_member(pace.peer)
        own.rate = self._limits.member if member else self._limits.stranger
        if self._conduct.standing(pace.peer) is not Standing.GOOD:
            own.rate = self._limits.slowed
        return (own,) if member else (own, self._strangers[direction])

    def measure(self, metrics: Metrics) -> None:
        metrics.show(WAITED, lambda: self._waited)


class Pace:
    """One peer's, for the sockets."""

    def __init__(self, pacer: Pacer, peer: PeerId) -> None:
        self.peer = peer
        self.buckets = {direction: TokenBucket(0.0) for direction in (IN, OUT)}
        self._pacer = pacer

    def piece(self) -> int:
        """Bytes to read or write at once: little of who is slowed, so that it is not read in bursts a second apart."""
        return self._pacer.piece(self.peer)

    def send_now(self, size: int) -> bool:
        """Whether so much may be written without waiting; then it counts as written."""
        return self._pacer.at_once(self, OUT, size)

    async def received(self, size: int) -> None:
        """Wait before more is read."""
        await self._pacer.wait(self, IN, size)

    async def sending(self, size: int) -> None:
        """Wait before this is written."""
        await self._pacer.wait(self, OUT, size)
