"""Sixteen hosts in one process that keep a DHT together: ours, or py-libp2p's KadDHT as it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from harness import SWARM
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from victim import LISTEN, new_identity

from swarmnode.node.host.network import HostSettings, Libp2pNetwork

MALICIOUS = 3  # of 16: a fifth
NEIGHBOURS = 5  # that each node dials: tables are incomplete, so lookups take hops
PATIENCE = 10.0  # seconds for one lookup


class DhtPeer:
    def __init__(self, *, undefended: bool, malicious: bool) -> None:
        self.network = Libp2pNetwork(new_identity(), HostSettings(listen=(LISTEN,)))
        self.malicious = malicious
        self.kademlia = self.network.kademlia
        self.stock = KadDHT(self.network._host, DHTMode.SERVER) if undefended else None

    @property
    def me(self) -> str:
        return self.network.me

    async def meet(self) -> None:
        """Put everyone connected into the table."""
        await self.kademlia.fill_table()
        if self.stock is not None:
            for peer in self.kademlia.speakers():
                await self.stock.add_peer(ID.from_base58(peer), skip_server_mode_check=True)

    async def provide(self, key: bytes) -> None:
        """Announce that this node has what `key` names."""
        with trio.move_on_after(PATIENCE):
            await (self.network if self.stock is None else self.stock).provide(key)

    async def finds(self, key: bytes, provider: str) -> bool:
        """Whether it learns that `provider` has `key`."""
        with trio.move_on_after(PATIENCE):
            if self.stock is None:
                return provider in await self.network.find_providers(key)
            return provider in {str(found.peer_id) for found in await self.stock.find_providers(key)}
        return False

    @property
    def values(self) -> int:
        """How many values it keeps for others."""
        return len((self.kademlia if self.stock is None else self.stock).value_store.store)


@dataclass
class DhtSwarm:
    peers: list[DhtPeer] = field(default_factory=list)
    lookups: int = 0
    found: int = 0

    @property
    def honest(self) -> list[DhtPeer]:
        return [peer for peer in self.peers if not peer.malicious]

    @property
    def malicious(self) -> list[DhtPeer]:
        return [peer for peer in self.peers if peer.malicious]

    async def publish_and_find(self, author: DhtPeer, key: bytes) -> None:
        """Let `author` announce `key`, and every other honest node look who has it."""
        await author.provide(key)
        for peer in self.honest:
            if peer is not author:
                self.lookups += 1
                self.found += await peer.finds(key, author.me)


@asynccontextmanager
async def dht_swarm(*, undefended: bool = False, size: int = SWARM) -> AsyncIterator[DhtSwarm]:
    """Running peers, of which a fifth is malicious, each connected to `NEIGHBOURS` on either side.

    The malicious ones are connected to everybody.
    """
    malicious = {round((number + 0.5) * size / MALICIOUS) for number in range(MALICIOUS)}
    swarm = DhtSwarm([DhtPeer(undefended=undefended, malicious=number in malicious) for number in range(size)])
    async with trio.open_nursery() as nursery:
        for peer in swarm.peers:
            await nursery.start(peer.network.run)
        for number, peer in enumerate(swarm.peers):
            for step in range(1, NEIGHBOURS + 1):
                await peer.network.connect(swarm.peers[(number + step) % size].network.addresses[0])
        for attacker in swarm.malicious:
            for peer in swarm.honest:
                await attacker.network.connect(peer.network.addresses[0])
        with trio.fail_after(60):
            for peer in swarm.peers:
                while len(peer.kademlia.speakers()) < len(peer.network.peers()):  # noqa: ASYNC110 (no event upstream)
                    await trio.sleep(0.02)
                await peer.meet()
        yield swarm
        nursery.cancel_scope.cancel()
