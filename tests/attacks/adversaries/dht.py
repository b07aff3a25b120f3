"""Liars in the DHT: authors of what they may not write, and routers that lead astray."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import msgpack
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dhtswarm import DhtPeer, DhtSwarm
from harness import Adversary
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.crdt.envelope import Envelope, unsealed
from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.dht.lookup import sorted_by_distance
from swarmnode.protocols.dht.records import MAX_LIFETIME, MAX_SEALED, DhtRecord, seal
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import NetworkError, Stream

GROUND = 1000  # identities made to be near a key


class Ground:
    """An identity that exists only as a key pair."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.me = peer_id_of(self.key.public_key().public_bytes_raw())


async def store_everywhere(attacker: DhtPeer, swarm: DhtSwarm, key: bytes, raw: bytes) -> None:
    """Store past the client's own checks, at every honest node."""
    for peer in swarm.honest:
        try:
            await attacker.raw_put(peer.me, key, raw)
        except NetworkError:
            continue  # refused: the storer closed the stream


class BadStore(Adversary):
    """Stores something about the first honest peer's record, which must stay what it was."""

    async def attack(self, target: DhtSwarm) -> None:
        author, attacker = target.honest[0], target.malicious[0]
        until = target.expiry(3600)  # one for both: what expires earlier does not supersede
        live = DhtRecord(author.me, "head", b"live", 2, until)
        old = DhtRecord(author.me, "head", b"old", 1, until)
        await author.publish(seal(author.network.sign, old), old.key)
        await author.publish(seal(author.network.sign, live), live.key)
        target.expect(live, older=(b"old",))
        for raw in self.bad(target, seal(author.network.sign, live), seal(author.network.sign, old)):
            await store_everywhere(attacker, target, live.key, raw)

    @abstractmethod
    def bad(self, swarm: DhtSwarm, live: bytes, old: bytes) -> list[bytes]: ...


class ForgedOwner(BadStore):
    name = "forged owner"

    def bad(self, swarm: DhtSwarm, live: bytes, old: bytes) -> list[bytes]:
        attacker = swarm.malicious[0]
        lie = DhtRecord(swarm.honest[0].me, "head", b"lie", 1 << 61, swarm.expiry(MAX_LIFETIME))
        taken = unsealed(live, max_size=MAX_SEALED)
        fields = {**msgpack.unpackb(taken.payload), "sequence": 1 << 61, "value": b"lie"}
        renamed = Envelope(msgpack.packb(fields), taken.signature).sealed
        return [seal(attacker.network.sign, lie), renamed, b"", b"lie"]


class ReplayAndRollback(BadStore):
    name = "replay of an old signed value, and rollback"

    def bad(self, swarm: DhtSwarm, live: bytes, old: bytes) -> list[bytes]:
        return [old, old]


class EndlessExpiry(BadStore):
    name = "far-future and NaN expiry"

    def bad(self, swarm: DhtSwarm, live: bytes, old: bytes) -> list[bytes]:
        author = swarm.honest[0]  # its key was stolen, or it is itself the attacker
        far = DhtRecord(author.me, "head", b"lie", 1 << 61, swarm.expiry(100 * MAX_LIFETIME))
        signed = unsealed(seal(author.network.sign, far), max_size=MAX_SEALED)
        fields = msgpack.unpackb(signed.payload)
        return [signed.sealed] + [
            signed._replace(payload=msgpack.packb({**fields, "expires": never})).sealed
            for never in (math.nan, math.inf, 1 << 63)
        ]


class GroundAuthors(Adversary):
    """A thousand authors with records of their own, each valid, chosen to be the neighbours of a live one."""

    name = "1000 ground identities near a key, as authors"

    async def attack(self, target: DhtSwarm) -> None:
        author, attacker = target.honest[0], target.malicious[0]
        live = DhtRecord(author.me, "head", b"live", 1, target.expiry(3600))
        await author.publish(seal(author.network.sign, live), live.key)
        target.expect(live)
        for _ in range(self.times(GROUND)):
            ground = Ground()
            record = DhtRecord(ground.me, "head", b"x" * 64, 1, target.expiry(3600))
            for peer in target.honest[:2]:
                await attacker.raw_put(peer.me, record.key, seal(ground.key.sign, record))


class LyingRouters(Adversary):
    """Every malicious node keeps nothing, says that it does, and knows twenty ground identities that are closer."""

    name = "20 % malicious routers with 1000 ground identities near every key"

    async def attack(self, target: DhtSwarm) -> None:
        ground = [Ground().me for _ in range(self.times(GROUND, least=200))]
        for liar in target.malicious:
            liar.network.serve(str(PROTOCOL_ID), lambda stream, liar=liar: self._lie(stream, liar, ground))
        for number in range(self.times(8)):
            author = target.honest[number % len(target.honest)]
            record = DhtRecord(author.me, f"name-{number}", b"live", 1, target.expiry(3600))
            await author.publish(seal(author.network.sign, record), record.key)
            await target.look_up(record)

    async def _lie(self, stream: Stream, liar: DhtPeer, ground: list[str]) -> None:
        reader = FrameReader(stream, limit=1 << 20)
        here = Multiaddr(liar.network.addresses[0].partition("/p2p/")[0]).to_bytes()
        while (raw := await reader.frame()) is not None:
            asked = Message.FromString(bytes(raw))
            answer = Message(type=asked.type, key=asked.key)
            for peer in sorted_by_distance(asked.key, ground)[:20]:
                answer.closerPeers.add(id=ID.from_base58(peer).to_bytes(), addrs=[here])
            await stream.send_all(frame(answer.SerializeToString()))


class SilentStreams(Adversary):
    """Opens DHT streams to every honest node and says nothing on them; the malicious nodes answer nobody."""

    name = "64 silent DHT streams to every node"

    async def attack(self, target: DhtSwarm) -> None:
        attacker = target.malicious[0]
        for peer in target.malicious:
            peer.network.serve(str(PROTOCOL_ID), _hang_up)
        held: list[Any] = []
        for peer in target.honest:
            for _ in range(64):
                try:
                    held.append(await attacker.network.open_stream(peer.me, str(PROTOCOL_ID)))
                except NetworkError:
                    break
        await trio.sleep(0.2)
        author = target.honest[0]
        record = DhtRecord(author.me, "head", b"live", 1, target.expiry(3600))
        await author.publish(seal(author.network.sign, record), record.key)
        await target.look_up(record)


async def _hang_up(stream: Stream) -> None:
    await stream.aclose()


def everyone() -> list[Adversary]:
    return [ForgedOwner(), ReplayAndRollback(), EndlessExpiry(), GroundAuthors(), LyingRouters(), SilentStreams()]
