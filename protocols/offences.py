"""What peers did wrong, counted: the first time is logged with the peer, the rest only add up.

A peer chooses how often it offends, so neither the log nor the memory may grow with it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from swarmnode.protocols.network import PeerId

MAX_PEERS = 4096  # remembered offenders; the longest silent is forgotten first

log = logging.getLogger(__name__)


class Offences:
    """Offences of peers against one protocol."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._counts: OrderedDict[PeerId, int] = OrderedDict()

    def note(self, peer: PeerId, what: str) -> None:
        """Count one offence; log it where it is the peer's first."""
        count = self._counts.pop(peer, 0) + 1
        self._counts[peer] = count
        if count == 1:
            log.warning("peer %s broke the rules of %s: %s (further ones are only counted)", peer, self._protocol, what)
        if len(self._counts) > MAX_PEERS:
            self._counts.popitem(last=False)

    def count(self, peer: PeerId) -> int:
        return self._counts.get(peer, 0)
