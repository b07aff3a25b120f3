"""Which of the elements that peers offer this node asks for, and whom.

Several neighbours offer the same element within a moment. The first is asked; the others are remembered, and one of
them is asked where the element has not come in `ASKED_FOR` seconds, as who was asked may be gone, or its push lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from swarmnode.protocols.network import PeerId
from swarmnode.protocols.state.backend import Rank

ASKED_FOR = 1.0  # seconds in which an element that was asked for is expected
MOST = 8192  # elements that are remembered as asked for
OTHERS = 3  # peers remembered for each


@dataclass
class _Asked:
    at: float  # trio time
    others: list[PeerId] = field(default_factory=list)  # who offers it as well, and was not asked


class Asking:
    """What was asked for and has not come."""

    def __init__(self, lacks: Callable[[Rank], bool]) -> None:
        """`lacks(rank)` says whether an element is worth asking for."""
        self._lacks = lacks
        self._asked: OrderedDict[Rank, _Asked] = OrderedDict()  # asked longest ago first

    def asks(self, peer: PeerId, rank: Rank) -> bool:
        """Whether to ask `peer`, who offers an element: where it is lacking, and nobody was asked just now."""
        if not self._lacks(rank):
            return False
        now = trio.current_time()
        asked = self._asked.get(rank)
        if asked is not None and now < asked.at + ASKED_FOR:
            if len(asked.others) < OTHERS and peer not in asked.others:
                asked.others.append(peer)
            return False
        self._note(rank, _Asked(now))
        return True

    def overdue(self) -> dict[PeerId, list[Rank]]:
        """Elements that did not come, by who is to be asked now."""
        now = trio.current_time()
        found: dict[PeerId, list[Rank]] = {}
        while self._asked and next(iter(self._asked.values())).at + ASKED_FOR <= now:
            rank, asked = self._asked.popitem(last=False)
            if asked.others and self._lacks(rank):
                peer, *others = asked.others
                found.setdefault(peer, []).append(rank)
                self._note(rank, _Asked(now, others))
        return found

    def _note(self, rank: Rank, asked: _Asked) -> None:
        self._asked[rank] = asked
        self._asked.move_to_end(rank)
        if len(self._asked) > MOST:
            self._asked.popitem(last=False)
