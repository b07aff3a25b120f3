"""What each peer may take of this node's connections: bytes a second, streams, and bytes that nobody has read yet.

Members of a run send and are sent to freely, strangers at a LAN's rate, the slowed slowly. Nothing is refused for its
rate: a peer beyond it is not read from, so its TCP waits, and what it is sent waits here, in outboxes that have bounds.
A peer that is slowed for its violations is still served, at that slow rate.

A peer's connections have one `PeerAllowance`, so that a second connection makes no second allowance; all of them draw
on one `HostAllowance`, which counts every byte at the sockets as well, and holds them to the volunteer's caps.
"""

from __future__ import annotations

from collections import Counter
from weakref import WeakValueDictionary

import trio

from swarmnode.node.host.limits import ConnectionLimits, RateLimits
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind, PeerScoring, ScoringLimits, Standing, Violations

BYTES = Metric("swarmnode_bytes_total", COUNTER, "bytes at the sockets, all overheads included", "direction")
RECEIVED = Metric("swarmnode_received_bytes_total", COUNTER, "bytes of streams that came, by protocol", "protocol")
SENT = Metric("swarmnode_sent_bytes_total", COUNTER, "bytes of streams to be sent, by protocol", "protocol")
STREAMS = Metric("swarmnode_streams", GAUGE, "streams that peers have open here")
UNREAD = Metric("swarmnode_unread_bytes", GAUGE, "bytes that arrived and were not read yet, with what pieces cost")
WAITED = Metric("swarmnode_paced_seconds_total", COUNTER, "seconds that peers beyond their rate waited", "direction")
IN, OUT = "in", "out"
OTHER = "other"  # what libp2p says of itself, and what comes before two sides agree on a protocol
WIDE_PIECE = 256 * 1024  # bytes read or written at once: each piece costs as much as encrypting 64 KiB, for calls
CAPPED_PIECE = 64 * 1024  # bytes read or written at once where the volunteer set a cap, and so let through in one go
FRAME = 2 * 1024  # bytes for which a frame counts beside its length: taking it costs as much as encrypting them
SLOW_PIECE = 4 * 1024  # bytes read of a slowed peer at once, or written: 16 times a second
BURST = 0.25  # seconds of traffic that an idle link may catch up on


class PeerPolicy:
    """How a node treats its peers. This one is that of a node without a run, which is among friends.

    What a node of a run makes of its peers is decided in `node.reputation`.
    """

    def is_member(self, peer: PeerId) -> bool:
        """Whether the peer takes part in this node's run, so that its bytes are not held up."""
        return True

    def relays_for(self, peer: PeerId) -> bool:
        """Whether this node, where it is public, carries circuits of the peer."""
        return True

    def standing(self, peer: PeerId) -> float:
        """What share of the places of this node a peer may have, 0 to 1: where they do not suffice, more keeps them."""
        return 1.0


class TokenBucket:
    """Lets `rate` bytes per second through on average; 0 means no cap."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._tokens = rate * BURST
        self._filled_at = -float("inf")

    @property
    def piece(self) -> int:
        """Bytes to let through at once."""
        return CAPPED_PIECE if self.rate else WIDE_PIECE

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may pass. Debts are allowed, so callers queue up in the order in which they came."""
        if (wait := self.pay(size)) > 0:
            await trio.sleep(wait)

    def pay(self, size: int) -> float:
        """Have `size` bytes pass; the seconds until they may, 0 or less where that is now."""
        if not self.rate:
            return 0.0
        self._refill()
        self._tokens -= size
        return -self._tokens / self.rate

    def has(self, size: int) -> bool:
        """Whether `size` bytes may pass without waiting."""
        if self.rate:
            self._refill()
        return not self.rate or self._tokens >= size

    def _refill(self) -> None:
        now = trio.current_time()
        self._tokens = min(self.rate * BURST, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now


class HostAllowance:
    """What all peers of a host may take together, and what they have; `up` and `down` are the caps, in bytes/s."""

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        rates: RateLimits | None = None,
        scoring: PeerScoring | None = None,
        policy: PeerPolicy | None = None,
        up: float = 0.0,
        down: float = 0.0,
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self.rates = rates or RateLimits()
        self.scoring = scoring or PeerScoring(ScoringLimits())
        self.policy = policy or PeerPolicy()
        self.violations = Violations("connections")
        self.scoring.watch(self.violations)
        self.strangers = {direction: TokenBucket(self.rates.strangers) for direction in (IN, OUT)}
        self.waited = dict.fromkeys((IN, OUT), 0.0)  # seconds
        self.unread = 0
        self.streams = 0
        self.bytes_in = 0  # at all sockets, since the start
        self.bytes_out = 0
        self.bytes_of = {direction: Counter[str]() for direction in (IN, OUT)}  # of streams, by protocol
        self.up, self.down = TokenBucket(up), TokenBucket(down)
        self.scratch = bytearray(0)  # what a socket gave, until its reader runs on: one for all connections
        self._peers: WeakValueDictionary[PeerId, PeerAllowance] = WeakValueDictionary()

    def of(self, peer: PeerId) -> PeerAllowance:
        """What all connections of `peer` share."""
        return self._peers.setdefault(peer, PeerAllowance(self, peer))

    def measure(self, metrics: Metrics) -> None:
        metrics.show(BYTES, lambda: {IN: self.bytes_in, OUT: self.bytes_out})
        metrics.show(RECEIVED, lambda: self.bytes_of[IN])
        metrics.show(SENT, lambda: self.bytes_of[OUT])
        metrics.show(STREAMS, lambda: self.streams)
        metrics.show(UNREAD, lambda: self.unread)
        metrics.show(WAITED, lambda: self.waited)
        self.violations.measure(metrics)


class PeerAllowance:
    """What one peer has on all its connections, and may have."""

    def __init__(self, host: HostAllowance, peer: PeerId) -> None:
        self._host = host
        self._peer = peer
        self._own = {direction: TokenBucket(0.0) for direction in (IN, OUT)}
        self.unread = 0  # bytes, with what a chunk costs beside its length
        self.streams = 0  # that the peer opened
        self.bytes_of = {direction: Counter[str]() for direction in (IN, OUT)}  # of its streams, while it is connected
        self.chunk_cost = host.limits.unread_chunk  # bytes that each chunk costs beside its length

    def offended(self, what: str, kind: Kind) -> None:
        """The peer did something wrong on a connection."""
        self._host.violations.note(self._peer, what, kind)

    def count(self, direction: str, protocol: str, size: int) -> None:
        """So many bytes of a stream came, or are to be sent."""
        self.bytes_of[direction][protocol] += size
        self._host.bytes_of[direction][protocol] += size

    # --- bytes a second ---------------------------------------------------------------------------------------------

    def piece(self, cap: TokenBucket) -> int:
        """Bytes to read or write at once: few for a slowed peer, so that it is not read in bursts a second apart."""
        return cap.piece if self._host.scoring.standing(self._peer) is Standing.GOOD else SLOW_PIECE

    def send_now(self, size: int) -> bool:
        """Whether so much may be written without waiting; then it counts as written."""
        buckets = self._buckets(OUT)
        if free := all(bucket.has(size) for bucket in buckets):
            for bucket in buckets:
                bucket.pay(size)
        return free

    async def wait(self, direction: str, size: int) -> None:
        """Wait before more is read (IN), or before this is written (OUT)."""
        began = trio.current_time()
        for bucket in self._buckets(direction):
            await bucket.take(size)
        self._host.waited[direction] += trio.current_time() - began

    async def wait_for_frames(self, count: int) -> None:
        """Wait as for the bytes that so many frames count for, and let others run; the slowed bring few as it is."""
        if self._host.scoring.standing(self._peer) is Standing.GOOD:
            await self.wait(IN, count * FRAME)
        await trio.lowlevel.checkpoint()

    def _buckets(self, direction: str) -> tuple[TokenBucket, ...]:
        """The buckets that the peer's bytes must pass now."""
        own, rates = self._own[direction], self._host.rates
        member = self._host.policy.is_member(self._peer)
        own.rate = 0.0 if member else rates.stranger
        if self._host.scoring.standing(self._peer) is not Standing.GOOD:
            own.rate = rates.slowed
        return (own,) if member else (own, self._host.strangers[direction])

    # --- streams and unread bytes -----------------------------------------------------------------------------------

    def keep(self, size: int) -> bool:
        """Account for `size` bytes more; False where the peer may not leave so many unread: an offence as in `open`."""
        if size > self.room():
            if self.unread + size > self._host.limits.unread:
                self.offended(f"more than {self.unread} bytes that nobody read", Kind.LOAD)
            return False
        self.unread += size
        self._host.unread += size
        return True

    def room(self) -> int:
        """Bytes that the peer may leave unread beside those that it has; negative once the node has become crowded."""
        limits = self._host.limits
        crowded = self._host.unread > limits.unread_in_all // 2
        return (limits.unread_in_all // 2 // limits.peers if crowded else limits.unread) - self.unread

    def give_back(self, size: int) -> None:
        self.unread -= size
        self._host.unread -= size

    def open(self) -> bool:
        """Account for one stream more; False where the peer may not: an offence, unless others fill the node."""
        limits = self._host.limits
        crowded = self._host.streams >= limits.streams_in_all
        if self.streams >= limits.streams:
            self.offended(f"more than {self.streams} streams", Kind.LOAD)
            return False
        if crowded and self.streams >= limits.streams_in_all // limits.peers:
            return False
        self.streams += 1
        self._host.streams += 1
        return True

    def close(self) -> None:
        self.streams -= 1
        self._host.streams -= 1
