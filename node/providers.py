"""Who has what: provider records in a Kademlia DHT, py-libp2p's `KadDHT` in server mode with lookups of our own.

Upstream's tables, stores and handlers are used as they are. Its lookups are not: they answer from the local store first
(so a node that provides a key finds only itself), wait up to 10 s for each dead peer, and its background loop looks up
random keys all day. Here a lookup is one iterative GET_PROVIDERS walk within `LOOKUP` seconds, the table is filled from
connected peers that speak the protocol, and announcements are paced below the 10 in 10 s that a peer accepts.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import trio
from libp2p.abc import IHost
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.utils import sort_peer_ids_by_distance
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from swarmnode.protocols.network import PeerId

log = logging.getLogger(__name__)

LOOKUP = 5.0  # seconds a lookup may take in all
ASK = 2.0  # seconds one peer has for its answer
WIDTH = 8  # peers asked at once
REACH = 20  # closest peers that hold a record (Kademlia's k)
REPEAT = 600.0  # seconds between announcements of a key; records live for 48 h upstream, peers do not
PACE = (9, 10.5)  # announcements, seconds: a peer drops the eleventh in 10 s
MAX_KEYS = 64  # that one node keeps announced


class Providers:
    """`run()` keeps what was provided announced; both calls work while it runs."""

    def __init__(self, host: IHost) -> None:
        self._host = host
        self._dht = KadDHT(host, DHTMode.SERVER)
        self._keys: dict[bytes, float] = {}  # key -> when it was last announced
        self._recent: deque[float] = deque(maxlen=PACE[0])
        self._pacing = trio.Lock()
        self._changed = trio.Event()

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            for key, at in list(self._keys.items()):
                if now - at >= REPEAT:
                    await self._announce(key)
            self._dht.provider_store.cleanup_expired()
            with trio.move_on_after(REPEAT / 10):
                await self._changed.wait()

    def peer_arrived(self) -> None:
        """A peer that speaks Kademlia came: it may be close to a key, so announcements are due again."""
        if self._keys and len(self._speakers()) <= REACH:
            self._keys = dict.fromkeys(self._keys, -float("inf"))
            self._changed.set()

    async def provide(self, key: bytes) -> None:
        """Announce `key` now and from now on. Raises ValueError above MAX_KEYS keys."""
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            raise ValueError(f"a node announces at most {MAX_KEYS} keys")
        self._keys[key] = -float("inf")
        await self._announce(key)

    async def find(self, key: bytes, limit: int) -> dict[PeerId, tuple[str, ...]]:
        """Providers of `key` other than this node with their addresses, at most `limit`."""
        found: dict[PeerId, tuple[str, ...]] = {}
        _keep(found, self._dht.provider_store.get_providers(key), self._host.get_id())
        with trio.move_on_after(LOOKUP):
            await self._walk(key, found, limit)
        return dict(list(found.items())[:limit])

    async def _walk(self, key: bytes, found: dict[PeerId, tuple[str, ...]], limit: int) -> list[ID]:
        """Ask ever closer peers who provides `key`; returns those that answered, closest first."""
        me = self._host.get_id()
        await self._fill_table()
        known = list(dict.fromkeys(self._dht.routing_table.find_local_closest_peers(key, REACH) + self._speakers()))
        asked: set[ID] = {me}
        answered: list[ID] = []

        async def ask(peer: ID) -> None:
            with trio.move_on_after(ASK):
                store = self._dht.provider_store
                providers, closer = await store._get_providers_from_peer_with_closers(peer, key)
                answered.append(peer)
                _keep(found, providers, me)
                known.extend(closer[:REACH])

        while len(found) < limit:
            closest = sort_peer_ids_by_distance(key, list(dict.fromkeys(known)))[:REACH]
            todo = [peer for peer in closest if peer not in asked][:WIDTH]
            if not todo:
                break
            asked.update(todo)
            async with trio.open_nursery() as nursery:
                for peer in todo:
                    nursery.start_soon(_unless_unreachable, ask, peer)
        return sort_peer_ids_by_distance(key, answered)

    async def _announce(self, key: bytes) -> None:
        async with self._pacing:
            if len(self._recent) == PACE[0]:
                await trio.sleep_until(self._recent[0] + PACE[1])
            self._recent.append(trio.current_time())
        store = self._dht.provider_store
        store.add_provider(key, PeerInfo(self._host.get_id(), self._host.get_addrs()))  # for those who ask this node
        closest: list[ID] = []
        with trio.move_on_after(LOOKUP):
            closest = await self._walk(key, {}, limit=1 << 30)
        if not closest:
            closest = self._speakers()

        async def tell(peer: ID) -> None:
            with trio.move_on_after(ASK):
                await store._send_add_provider(peer, key)

        async with trio.open_nursery() as nursery:
            for peer in closest[:REACH]:
                nursery.start_soon(_unless_unreachable, tell, peer)
        if closest:
            self._keys[key] = trio.current_time()

    def _speakers(self) -> list[ID]:
        """Connected peers that said in identify that they speak Kademlia."""
        store = self._host.get_peerstore()
        protocol = str(TProtocol(PROTOCOL_ID))
        return [
            peer
            for peer in self._host.get_connected_peers()
            if store.has_peer(peer) and store.supports_protocols(peer, [protocol])
        ]

    async def _fill_table(self) -> None:
        for peer in self._speakers():
            await self._dht.add_peer(peer, skip_server_mode_check=True)


async def _unless_unreachable(work: Any, peer: ID) -> None:
    try:
        await work(peer)
    except Exception as error:
        log.debug("Kademlia: %s: %r", peer, error)


def _keep(found: dict[PeerId, tuple[str, ...]], providers: list[Any], me: ID) -> None:
    for provider in providers:
        if provider.peer_id != me:
            found.setdefault(str(provider.peer_id), tuple(str(address) for address in provider.addrs[:16]))
