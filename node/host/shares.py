"""What one peer may take of this node's connections: streams, and bytes that nobody has read yet.

A peer's connections have one `Share`, so that a second connection makes no second allowance; all shares draw on one
`Pool`, which is the host's. A connection starts with a share of its own, until it is known whose it is.
"""

from __future__ import annotations

from swarmnode.node.host.limits import ConnectionLimits


class Pool:
    """What all peers of a host take together."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.unread = 0
        self.streams = 0


class Share:
    """One peer's part of a pool."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool if pool is not None else Pool(ConnectionLimits())
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

    def take_over(self, other: Share) -> None:
        """The other's holdings are this one's now."""
        unread, streams = other.unread, other.streams
        other.give_back(unread)
        other.streams -= streams
        other._pool.streams -= streams
        self.unread += unread
        self._pool.unread += unread
        self.streams += streams
        self._pool.streams += streams
