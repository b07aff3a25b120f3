"""Which connected peers take part in the state of this run, as far as this node knows."""

from __future__ import annotations

import logging
import random
from collections.abc import Container

import trio

from swarmnode.protocols.calls.rpc import CallError, Refused
from swarmnode.protocols.network import Network, PeerId, PeerView
from swarmnode.protocols.peers.diversity import sample
from swarmnode.protocols.peers.violations import Offences

log = logging.getLogger(__name__)

ASK_AGAIN_AFTER = 60.0  # seconds until a peer that is not of this run is tried again
LATER = 5.0  # seconds until one that is busy or did not answer is
DISTRUSTED_FOR = 600.0  # seconds that one which repairs falsely is not asked or told anything
STRANGERS = ("unknown-run", "unknown-method")


class Neighbours:
    """Connected peers, without those who refused, failed lately, or are not trusted."""

    def __init__(self, network: Network, offences: Offences) -> None:
        self._network = network
        self._offences = offences
        self.equivocators: set[str] = set()
        self._until: dict[PeerId, float] = {}  # peer -> trio time until which it is left alone
        self._distrusted: dict[PeerId, float] = {}  # the same, for what it said

    def here(self) -> list[PeerId]:
        """Peers to talk to now."""
        return [view.peer for view in self._views()]

    def _views(self) -> list[PeerView]:
        now = trio.current_time()
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return [view for view in self._network.peers() if view.peer not in self._until and self.trusts(view.peer)]

    def some(self, rng: random.Random, count: int, *, but: Container[PeerId] = ()) -> list[PeerId]:
        """At most so many peers to talk to now, by chance; each network as likely as any other."""
        views = [view for view in self._views() if view.peer not in but]
        return [view.peer for view in sample(rng, views, count, lambda view: view.group)]

    def trusts(self, peer: PeerId) -> bool:
        """Whether the peer is told news and asked to repair, where it is here."""
        return (
            self._distrusted.get(peer, 0.0) <= trio.current_time()
            and peer not in self.equivocators
            and self._offences.refuses(peer) is None
        )

    def distrust(self, peer: PeerId) -> None:
        """It did not repair as an honest node does."""
        now = trio.current_time()
        self._distrusted = {each: until for each, until in self._distrusted.items() if until > now}
        self._distrusted[peer] = now + DISTRUSTED_FOR

    def leave_alone(self, peer: PeerId) -> None:
        """It is too slow to be asked again soon."""
        self._until[peer] = trio.current_time() + ASK_AGAIN_AFTER

    def failed(self, peer: PeerId, error: CallError) -> None:
        """A call to the peer brought no answer."""
        stranger = isinstance(error, Refused) and error.code in STRANGERS
        self._until[peer] = trio.current_time() + (ASK_AGAIN_AFTER if stranger else LATER)
        log.debug("%s is left alone for a while: %s", peer, error)

    def welcome(self, peer: PeerId) -> None:
        """It connected, or spoke of this run: whatever was before is no matter."""
        self._until.pop(peer, None)
