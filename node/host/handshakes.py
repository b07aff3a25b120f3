"""Places for inbound connections, over TCP and QUIC, until their peer is known.

Before its handshake an inbound connection has an address and nothing else: it has one of few places among the
`Handshakes` until it is `settled`, and nobody can keep the others out. There is room for `most`; one more takes the
place of one from the network that has the most (a network: a /24 of IPv4, a /48 of IPv6), of the oldest that has not
said a word, or else of the oldest. So who opens connections again and again displaces its own, and a newcomer from
anywhere else has a place. Nothing is remembered of an address that has no connection here: many nodes may be behind it.

Work begins with the first byte, which the dialling side sends at once (multistream-select): a silent connection costs
its place, and no more. It begins for one connection in a turn of the loop, so that a crowd that speaks at once is
spread over many turns, between which everything else goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import trio

from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.peers.diversity import network_of

UNDER_WAY = Metric("swarmnode_handshakes_under_way", GAUGE, "inbound connections whose peer is not known yet")
ENDED = Metric("swarmnode_handshakes_total", COUNTER, "inbound connections by what became of them", "outcome")
OUTCOMES = ("known", "failed", "displaced")


class Newcomer(Protocol):
    """An inbound connection whose peer is not known yet."""

    handshake: Handshake | None

    def get_remote_address(self) -> tuple[str, int] | None: ...

    def abort(self) -> None: ...


class Handshake:
    """The place of one inbound connection."""

    def __init__(self, among: Handshakes, stream: Newcomer) -> None:
        self._among = among
        self.stream = stream
        self.network = network_of((stream.get_remote_address() or ("", 0))[0])
        self.spoke = False

    def leave(self, outcome: str) -> None:
        """The place is free, for a reason of OUTCOMES; the first one counts."""
        if self in self._among.waiting:
            del self._among.waiting[self]
            self._among.outcomes[outcome] += 1


class Handshakes:
    """The places of a host's inbound connections whose peer is not known yet."""

    def __init__(self, most: int, patience: float) -> None:
        self._most = most
        self.patience = patience  # seconds until the first byte
        self.waiting: dict[Handshake, None] = {}  # the oldest first
        self.outcomes: Counter[str] = Counter()
        self._gate = trio.Lock()

    @contextmanager
    def place(self, stream: Newcomer) -> Iterator[Handshake]:
        """A place for a connection until it is settled, or until the block ends. It is aborted if another takes it."""
        handshake = stream.handshake = Handshake(self, stream)
        if len(self.waiting) >= self._most:
            ((crowd, _),) = Counter(each.network for each in self.waiting).most_common(1)
            of_crowd = [each for each in self.waiting if each.network == crowd]
            given_up = next((each for each in of_crowd if not each.spoke), of_crowd[0])
            given_up.leave("displaced")
            given_up.stream.abort()
        self.waiting[handshake] = None
        try:
            yield handshake
        finally:
            handshake.leave("failed")

    def is_busy(self) -> bool:
        """Whether so many places are taken that addresses are proven before another is given."""
        return 4 * len(self.waiting) >= self._most

    async def turn(self) -> None:
        """Wait for a turn of the loop in which no other handshake begins."""
        async with self._gate:
            await trio.lowlevel.checkpoint()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(UNDER_WAY, lambda: len(self.waiting))
        metrics.show(ENDED, lambda: {outcome: self.outcomes[outcome] for outcome in OUTCOMES})
