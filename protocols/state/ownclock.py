"""What keeps a node from signing what it should not: a clock that peers do not confirm, and a past it has forgotten.

Clock: each peer that answers tells its time. A node more than 30 s from the median of at least three refuses to sign
and says so; fewer than half of those asked can lie about it.

Past: a node that comes back from a backup may have signed things that it does not know. Before it signs what is
write-once, it asks `ENOUGH` peers for its own records and so advances past them; its other records replace one another,
and an older stamp merely loses.
"""

from __future__ import annotations

from collections import OrderedDict
from statistics import median

from swarmnode.protocols.network import PeerId

MAX_OFF = 30_000  # ms from the median; two such nodes are at most as far apart as a stamp may lie ahead
ENOUGH = 3  # peers whose clocks, or whose memory of this node, count as confirmation
HEARD = 32  # peers whose clocks are remembered, the last heard ones


class ClockGuard:
    """This node's clock against that of its peers."""

    def __init__(self) -> None:
        self._ahead: OrderedDict[PeerId, int] = OrderedDict()  # ms that a peer's clock is ahead of this node's

    def heard(self, peer: PeerId, ahead: int) -> None:
        """`peer`'s clock is so many ms ahead of this node's."""
        self._ahead[peer] = ahead
        self._ahead.move_to_end(peer)
        if len(self._ahead) > HEARD:
            self._ahead.popitem(last=False)

    def forget(self, peer: PeerId) -> None:
        """`peer` is gone: what it said of a clock that may since have been set right does not count any more."""
        self._ahead.pop(peer, None)

    @property
    def off(self) -> int | None:
        """Milliseconds that the median of peers is ahead of this node; None while too few are known."""
        return int(median(self._ahead.values())) if len(self._ahead) >= ENOUGH else None

    @property
    def confirmed(self) -> bool:
        """Whether enough peers agree with this node's clock."""
        return self.off is not None and abs(self.off) <= MAX_OFF

    @property
    def complaint(self) -> str:
        """Why this node must not sign, for its owner; "" where it may."""
        off = self.off
        if off is None or abs(off) <= MAX_OFF:
            return ""
        return (
            f"the clock of this machine is {abs(off) / 1000:.0f} s {'behind' if off > 0 else 'ahead of'} that of "
            "other nodes: this node signs nothing until it is set right, so others will take it for gone"
        )
