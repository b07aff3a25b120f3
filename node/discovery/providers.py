"""Who has what: provider records in the Kademlia DHT, announced again and again, and found by lookups of our own.

`node.kademlia` speaks to one peer, `protocols.lookup` decides whom to ask. Announcements are paced below the 10 in 10 s
that a peer accepts.
"""

from __future__ import annotations

import logging
from collections import deque

import trio
from libp2p.abc import IHost
from libp2p.peer.peerinfo import PeerInfo

from swarmnode.node.discovery.kademlia import CLOSER, Kademlia
from swarmnode.node.discovery.kademlia import Providers as Found
from swarmnode.protocols.dht.lookup import LookupLimits, lookup
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, NetworkError, PeerId

log = logging.getLogger(__name__)

LIMITS = LookupLimits()
REACH = CLOSER  # closest peers that hold a record (Kademlia's k)
REPEAT = 600.0  # seconds between announcements of a key; records live for 48 h upstream, peers do not
PACE = (9, 10.5)  # announcements, seconds: a peer drops the eleventh in 10 s
MAX_KEYS = 64  # that one node keeps announced

PROVIDED = Metric("swarmnode_dht_provided_keys", GAUGE, "keys that this node announces in the DHT")


class Providers:
    """`run()` keeps what was provided announced; both calls work while it runs."""

    def __init__(self, host: IHost, network: Network, kademlia: Kademlia) -> None:
        self._host = host
        self._network = network
        self._kademlia = kademlia
        self._keys: dict[bytes, float] = {}  # key -> when it was last announced
        self._recent: deque[float] = deque(maxlen=PACE[0])
        self._pacing = trio.Lock()
        self._changed = trio.Event()
        self._addresses = 0  # how often this node's addresses changed

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            await self._kademlia.fill_table()
            now = trio.current_time()
            for key, at in list(self._keys.items()):
                if key in self._keys and now - at >= REPEAT:
                    await self._announce(key)
            self._kademlia.provider_store.cleanup_expired()
            with trio.move_on_after(REPEAT / 10):
                await self._changed.wait()

    def peer_arrived(self) -> None:
        """A peer that speaks Kademlia came: it may be close to a key, so announcements are due again."""
        if self._keys and len(self._kademlia.speakers()) <= REACH:
            self._keys = dict.fromkeys(self._keys, -float("inf"))
        self._changed.set()

    def addresses_changed(self) -> None:
        """What was announced names addresses that are this node's no more, also what is being announced now."""
        self._addresses += 1
        self._keys = dict.fromkeys(self._keys, -float("inf"))
        self._changed.set()

    async def provide(self, key: bytes) -> None:
        """Announce `key` now and from now on. Raises ValueError above MAX_KEYS keys."""
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            raise ValueError(f"a node announces at most {MAX_KEYS} keys")
        self._keys[key] = -float("inf")
        await self._announce(key)

    def withdraw(self, key: bytes) -> None:
        """Announce `key` no more, and do not name this node for it."""
        self._keys.pop(key, None)
        self._kademlia.provider_store.withdraw(key, self._host.get_id())

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PROVIDED, lambda: len(self._keys))

    async def find(self, key: bytes, limit: int) -> Found:
        """Providers of `key` other than this node with their addresses, at most `limit`."""
        found: Found = {}
        me = self._host.get_id()
        for provider in self._kademlia.provider_store.get_providers(key):
            if provider.peer_id != me:
                found[str(provider.peer_id)] = tuple(str(address) for address in provider.addrs[:16])
        if len(found) < limit:
            await self._look_up(key, found, limit)
        return dict(list(found.items())[:limit])

    async def _look_up(self, key: bytes, found: Found, limit: int) -> list[PeerId]:
        """Add to `found` whom others know to provide `key`; returns those that answered, closest first."""

        async def ask(peer: PeerId) -> list[PeerId] | None:
            try:
                providers, closer = await self._kademlia.find_providers(peer, key)
            except NetworkError as error:
                log.debug("Kademlia: %s: %s", peer, error)
                return None
            for provider, addresses in providers.items():
                found.setdefault(provider, addresses)
            return closer

        first_hand = await self._kademlia.first_hand(key)
        return await lookup(
            key, first_hand, ask, me=self._network.me, limits=LIMITS, enough=lambda: len(found) >= limit
        )

    async def _announce(self, key: bytes) -> None:
        async with self._pacing:
            if len(self._recent) == PACE[0]:
                await trio.sleep_until(self._recent[0] + PACE[1])
            self._recent.append(trio.current_time())
        if key not in self._keys:
            return  # withdrawn meanwhile
        addresses = self._addresses
        here = PeerInfo(self._host.get_id(), self._host.get_addrs())
        self._kademlia.provider_store.add_provider(key, here)  # for those who ask this node
        answered = await self._look_up(key, {}, limit=1 << 30)
        anchors = [peer for peer in self._kademlia.anchors() if peer in answered]
        closest = list(dict.fromkeys((*answered[: REACH - len(anchors)], *anchors, *answered)))[:REACH]

        async def tell(peer: PeerId) -> None:
            with trio.move_on_after(LIMITS.patience):
                try:
                    await self._kademlia.announce(peer, key)
                except NetworkError as error:
                    log.debug("Kademlia: %s: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in closest:
                nursery.start_soon(tell, peer)
        if closest and key in self._keys and addresses == self._addresses:
            self._keys[key] = trio.current_time()
