"""What peers did wrong, counted: the first of each kind is logged with the peer, the rest only add up.

A peer chooses how often it offends, so neither the log nor the memory may grow with it. What an offence leads to is
decided by `conduct`, which listens.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId

MAX_PEERS = 4096  # remembered offenders; the longest silent is forgotten first

OFFENCES = Metric("swarmnode_offences_total", COUNTER, "what peers did wrong, by protocol and kind", "what")

log = logging.getLogger(__name__)


class Kind(Enum):
    """How bad an offence is."""

    LOAD = "load"  # more than this node gives one peer at once: honest peers do it on a bad day
    BREACH = "breach"  # what no working implementation sends
    LIE = "lie"  # bytes or records that are proved false


Listener = Callable[[PeerId, str, Kind], None]


class PeerJudge(Protocol):
    """Who weighs offences (`scoring.Conduct`)."""

    def offended(self, peer: PeerId, what: str, kind: Kind) -> None: ...

    def refusal(self, peer: PeerId) -> str | None: ...


class Offences:
    """Offences of peers against one protocol."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._counts: OrderedDict[PeerId, Counter[Kind]] = OrderedDict()
        self._listeners: list[Listener] = []
        self.totals: Counter[Kind] = Counter()
        self._judge: PeerJudge | None = None

    def note(self, peer: PeerId, what: str, kind: Kind = Kind.BREACH) -> None:
        """Count one offence; log it where it is the peer's first of its kind; tell the listeners."""
        counts = self._counts.pop(peer, Counter())
        self._counts[peer] = counts
        counts[kind] += 1
        self.totals[kind] += 1
        if counts[kind] == 1:
            did = {Kind.LOAD: "asks too much of", Kind.BREACH: "broke the rules of", Kind.LIE: "lied in"}[kind]
            log.warning("peer %s %s %s: %s (further ones are only counted)", peer, did, self._protocol, what)
        if len(self._counts) > MAX_PEERS:
            self._counts.popitem(last=False)
        for listener in self._listeners:
            listener(peer, what, kind)

    def count(self, peer: PeerId) -> int:
        """Offences of `peer` of all kinds."""
        return self._counts[peer].total() if peer in self._counts else 0

    def report_to(self, judge: PeerJudge) -> None:
        """Tell `judge` of each offence from now on, and ask it whom to refuse."""
        self.tell(judge.offended)
        self._judge = judge

    def refuses(self, peer: PeerId) -> str | None:
        """Why the peer gets nothing now; None where it is served."""
        return self._judge.refusal(peer) if self._judge is not None else None

    def tell(self, listener: Listener) -> None:
        """Call `listener(peer, what, kind)` for each offence from now on."""
        self._listeners.append(listener)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(OFFENCES, lambda: {f"{self._protocol} {kind.value}": self.totals[kind] for kind in Kind})
