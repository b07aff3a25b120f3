"""What each peer may take of this node's connections: bytes a second, streams, and bytes that nobody has read yet.

Members of a run send and are sent to freely, strangers at a LAN's rate, the slowed slowly. Nothing is refused for its
rate: a peer beyond it is not read from, so its TCP waits, and what it is sent waits here, in outboxes that have bounds.
A peer that is slowed for its violations is still served, at that slow rate.

A peer's connections have one `PeerShare` of streams and unread bytes, so that a second connection makes no second
allowance; all shares draw on one `HostPool`. A connection starts with a share of its own, until its peer is known.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import trio

from swarmnode.node.host.limits import ConnectionLimits, RateLimits
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import PeerScoring, Standing

WAITED = Metric("swarmnode_paced_seconds_total", COUNTER, "seconds that peers beyond their rate waited", "direction")
IN, OUT = "in", "out"
WIDE_PIECE = (
    256 * 1024
)  # bytes read or written at once: each piece costs as much as encrypting 64 KiB, for calls and switches
SLOW_PIECE = 4 * 1024  # bytes read of a slowed peer at once, or written: 16 times a second
BURST = 0.25  # seconds of traffic that an idle link may catch up on


class TokenBucket:
    """Lets `rate` bytes per second through on average; 0 means no cap."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._tokens = rate * BURST
        self._filled_at = -float("inf")

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may pass. Debts are allowed, so callers queue up in the order in which they came."""
        if not self.rate:
            return
        now = trio.current_time()
        self._tokens = min(self.rate * BURST, self._tokens + (now - self._filled_at) * self.rate) - size
        self._filled_at = now
        if self._tokens < 0:
            await trio.sleep(-self._tokens / self.rate)

    def take_now(self, size: int) -> bool:
        """Whether `size` bytes may pass without waiting; then they have."""
        if not self.rate:
            return True
        now = trio.current_time()
        self._tokens = min(self.rate * BURST, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
        if self._tokens < size:
            return False
        self._tokens -= size
        return True


class Pacer:
    """The rates of all peers of a host."""

    def __init__(
        self, limits: RateLimits, scoring: PeerScoring, is_member: Callable[[PeerId], bool] = lambda peer: True
    ) -> None:
        self._limits = limits
        self.scoring = scoring
        self._is_member = is_member
        self._paces: WeakValueDictionary[PeerId, Pace] = WeakValueDictionary()
        self._strangers = {direction: TokenBucket(limits.strangers) for direction in (IN, OUT)}
        self.waited = dict.fromkeys((IN, OUT), 0.0)  # seconds

    def of(self, peer: PeerId) -> Pace:
        """The rates that all connections of `peer` share."""
        pace = self._paces.get(peer)
        if pace is None:
            pace = self._paces[peer] = Pace(self, peer)
        return pace

    def buckets(self, pace: Pace, direction: str) -> tuple[TokenBucket, ...]:
        """The buckets that the peer's bytes must pass now."""
        own = pace.own[direction]
        member = self._is_member(pace.peer)
        own.rate = self._limits.member if member else self._limits.stranger
        if self.scoring.standing(pace.peer) is not Standing.GOOD:
            own.rate = self._limits.slowed
        return (own,) if member else (own, self._strangers[direction])

    def measure(self, metrics: Metrics) -> None:
        metrics.show(WAITED, lambda: self.waited)


class Pace:
    """The rates of one peer, for its sockets."""

    def __init__(self, pacer: Pacer, peer: PeerId) -> None:
        self.peer = peer
        self.own = {direction: TokenBucket(0.0) for direction in (IN, OUT)}
        self._pacer = pacer

    def piece(self) -> int:
        """Bytes to read or write at once: few for a slowed peer, so that it is not read in bursts a second apart."""
        return WIDE_PIECE if self._pacer.scoring.standing(self.peer) is Standing.GOOD else SLOW_PIECE

    def send_now(self, size: int) -> bool:
        """Whether so much may be written without waiting; then it counts as written."""
        return all(bucket.take_now(size) for bucket in self._pacer.buckets(self, OUT))

    async def received(self, size: int) -> None:
        """Wait before more is read."""
        await self._wait(IN, size)

    async def sending(self, size: int) -> None:
        """Wait before this is written."""
        await self._wait(OUT, size)

    async def _wait(self, direction: str, size: int) -> None:
        began = trio.current_time()
        for bucket in self._pacer.buckets(self, direction):
            await bucket.take(size)
        self._pacer.waited[direction] += trio.current_time() - began


class HostPool:
    """What all peers of a host take together."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.unread = 0
        self.streams = 0


class PeerShare:
    """One peer's part of a pool."""

    def __init__(self, pool: HostPool | None = None) -> None:
        self._pool = pool if pool is not None else HostPool(ConnectionLimits())
        self.unread = 0  # bytes, with what a piece costs beside its length
        self.streams = 0  # that the peer opened

    @property
    def idle(self) -> bool:
        return not self.unread and not self.streams

    @property
    def piece(self) -> int:
        """Bytes that each piece costs beside its length."""
        return self._pool.limits.unread_chunk

    def keep(self, size: int) -> bool:
        """Account for `size` bytes more; False, and nothing, where the peer may not leave so many unread."""
        if size > self.room():
            return False
        self.unread += size
        self._pool.unread += size
        return True

    def room(self) -> int:
        """Bytes that the peer may leave unread beside those that it has; negative once the node has become crowded."""
        limits = self._pool.limits
        crowded = self._pool.unread > limits.unread_in_all // 2
        return (limits.unread_in_all // 2 // limits.peers if crowded else limits.unread) - self.unread

    def give_back(self, size: int) -> None:
        self.unread -= size
        self._pool.unread -= size

    def open(self) -> bool:
        """Account for one stream more; False, and nothing, where the peer may not open it."""
        limits, pool = self._pool.limits, self._pool
        if self.streams >= limits.streams or pool.streams >= limits.streams_in_all:
            return False
        self.streams += 1
        pool.streams += 1
        return True

    def close(self) -> None:
        self.streams -= 1
        self._pool.streams -= 1

    def take_over(self, other: PeerShare) -> None:
        """The other's holdings are this one's now."""
        unread, streams = other.unread, other.streams
        other.give_back(unread)
        other.streams -= streams
        other._pool.streams -= streams
        self.unread += unread
        self._pool.unread += unread
        self.streams += streams
        self._pool.streams += streams
