"""Sixteen hosts in one process that keep a DHT together: ours, or py-libp2p's KadDHT as it is installed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgpack
import trio
from harness import SWARM
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from victim import LISTEN, new_identity

from swarmnode.crdt.envelope import unsealed
from swarmnode.node.discovery.dht_values import put_message
from swarmnode.node.host.limits import DhtLimits, Limits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.protocols.dht.records import MAX_SEALED, BadRecord, DhtRecord
from swarmnode.protocols.network import NetworkError

MALICIOUS = 3  # of 16: a fifth
NEIGHBOURS = 5  # that each node dials: tables are incomplete, so lookups take hops
PATIENCE = 10.0  # seconds for one lookup
ROOM = 64  # records that a node of this swarm keeps for others, so that an attack has not to bring 4096
LIMITS = Limits(dht=DhtLimits(records=ROOM))


class DhtPeer:
    def __init__(self, *, undefended: bool, malicious: bool) -> None:
        self.network = Libp2pNetwork(new_identity(), HostSettings(listen=(LISTEN,), limits=LIMITS))
        self.malicious = malicious
        self.kademlia = self.network.kademlia
        self.records = self.network.records
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

    async def publish(self, raw: bytes, key: bytes) -> None:
        """Store a sealed record of this node's own, as it is, at the nodes that should have it."""
        with trio.move_on_after(PATIENCE):
            if self.stock is not None:
                await self.stock.put_value(key.decode(), raw)
                return
            answered = await self.records._look_up(key)
            with suppress(BadRecord):  # there may be no room, as in the product's own
                self.records.store.keep(key, raw)
            for peer in answered:
                try:
                    await self.kademlia.tell(peer, put_message(key, raw))
                except NetworkError:
                    continue

    async def get(self, record: DhtRecord) -> bytes | None:
        """The value that this node reads under the record's key."""
        with trio.move_on_after(PATIENCE):
            if self.stock is None:
                found = await self.records.get(record.author, record.name)
                return found.value if found else None
            return _value(await self.stock.get_value(record.key.decode()))
        return None

    def held(self, key: bytes) -> bytes | None:
        """The value that it keeps under `key` for others."""
        if self.stock is None:
            record = self.records.store.held(key)
            return record.value if record else None
        entry = self.stock.value_store.get(key)
        return _value(entry.value) if entry else None

    @property
    def records_kept(self) -> int:
        return len(self.records.store._records) if self.stock is None else len(self.stock.value_store.store)

    async def raw_put(self, peer: str, key: bytes, raw: bytes) -> None:
        with trio.move_on_after(2):
            await self.kademlia.tell(peer, put_message(key, raw))


def _value(raw: bytes | None) -> bytes | None:
    """What an undefended reader takes for the value: whatever is there."""
    if not raw:
        return None
    try:
        envelope = unsealed(raw, max_size=MAX_SEALED)
        return msgpack.unpackb(envelope.payload)["value"] if envelope else raw
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return raw


@dataclass
class DhtSwarm:
    peers: list[DhtPeer] = field(default_factory=list)
    expected: list[DhtRecord] = field(default_factory=list)
    older: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)  # genuine values before the live one
    holders: dict[bytes, set[str]] = field(default_factory=dict)  # who held an expected record before the attack
    lookups: int = 0
    found: int = 0

    @property
    def honest(self) -> list[DhtPeer]:
        return [peer for peer in self.peers if not peer.malicious]

    @property
    def malicious(self) -> list[DhtPeer]:
        return [peer for peer in self.peers if peer.malicious]

    @staticmethod
    def expiry(seconds: float) -> int:
        return int((time.time() + seconds) * 1000)

    def expect(self, record: DhtRecord, older: tuple[bytes, ...] = ()) -> None:
        """From now on, who holds the record must go on holding it, and readers must read it.

        A node that never had it cannot know that an `older` value, genuine and unexpired, is not the last.
        """
        self.expected.append(record)
        self.older[record.key] = older
        self.holders[record.key] = {peer.me for peer in self.honest if peer.held(record.key) == record.value}

    async def look_up(self, record: DhtRecord) -> None:
        """Let every honest node but its author read the record."""
        for peer in self.honest:
            if peer.me != record.author:
                self.lookups += 1
                self.found += await peer.get(record) == record.value


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
        with trio.fail_after(20):
            for peer in swarm.peers:
                while len(peer.kademlia.speakers()) < len(peer.network.peers()):  # noqa: ASYNC110 (no event upstream)
                    await trio.sleep(0.02)
                await peer.meet()
        yield swarm
        nursery.cancel_scope.cancel()
