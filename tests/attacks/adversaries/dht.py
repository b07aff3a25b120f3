"""Liars in the DHT: authors of what they may not write, and routers that lead astray."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from functools import cache
from itertools import count
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
from swarmnode.protocols.dht.lookup import place, sorted_by_distance
from swarmnode.protocols.dht.records import MAX_LIFETIME, MAX_SEALED, DhtRecord, record_key, seal
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import NetworkError, PeerId, Stream

GROUND_BITS = 15  # the attacker searches 2^15 key pairs for identities near the keys that it wants
NEAREST = 20  # of them that a lying router names: as many as an answer may have
CROWD = 5  # identities with as many records each as a storer takes of one author: more than it has room for


@cache
def searched(bits: int) -> tuple[PeerId, ...]:
    """The identities of 2^bits key pairs: what an attacker looks through for those nearest to a key.

    The nearest 20 of 2^15 share some ten bits with any key; the nearest of thirteen honest nodes shares four.
    """
    seeds = (number.to_bytes(32, "big") for number in range(1 << bits))
    return tuple(
        peer_id_of(Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()) for seed in seeds
    )


@cache
def ground(key: bytes, bits: int) -> list[PeerId]:
    """Of those, the identities nearest to a key."""
    return sorted_by_distance(key, searched(bits))[:NEAREST]


def shared_bits(key: bytes, peer: PeerId) -> int:
    """How many leading bits of its place a peer shares with a key."""
    return 256 - (place(peer) ^ int.from_bytes(hashlib.sha256(key).digest(), "big")).bit_length()


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


class CrowdOfAuthors(Adversary):
    """Many identities that cost nothing, each with as many valid records as a storer takes of one author.

    Handed out by one connected peer to every honest node before an honest author publishes: where all of them are
    kept, there is no room left for what is to be found. Without a bound, nothing is crowded out, and memory grows.
    """

    name = f"{CROWD} identities with 16 records each, given to every node before a value is published"

    async def attack(self, target: DhtSwarm) -> None:
        author, attacker = target.honest[0], target.malicious[0]
        until = target.expiry(3600)
        puts = []
        for number in range(CROWD):
            key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"crowd %d" % number).digest())
            me = peer_id_of(key.public_key().public_bytes_raw())
            records = [DhtRecord(me, f"name-{name}", b"x" * 64, 1, until) for name in range(16)]
            puts += [(record.key, seal(key.sign, record)) for record in records]
        async with trio.open_nursery() as nursery:
            for peer in target.honest:
                nursery.start_soon(self._fill, attacker, peer, puts)
        live = DhtRecord(author.me, "head", b"live", 1, target.expiry(3600))
        await author.publish(seal(author.network.sign, live), live.key)
        target.expect(live)

    async def _fill(self, attacker: DhtPeer, victim: DhtPeer, puts: list[tuple[bytes, bytes]]) -> None:
        refusals = 0
        for key, raw in puts:
            try:
                await attacker.raw_put(victim.me, key, raw)
            except NetworkError:
                refusals += 1
                if refusals == 64:  # it takes nothing from this peer
                    return


class LyingRouters(Adversary):
    """Every malicious node keeps nothing, says that it does, and names the nearest of all identities that it made."""

    name = f"20 % malicious routers that name, near every key, the nearest 20 of 2^{GROUND_BITS} identities made for it"

    async def attack(self, target: DhtSwarm) -> None:
        bits = GROUND_BITS if self.scale == 1.0 else GROUND_BITS - 3
        searched(bits)
        for liar in target.malicious:
            liar.network.serve(str(PROTOCOL_ID), lambda stream, liar=liar: self._lie(stream, liar, bits))
        for number in range(self.times(8)):
            author = target.honest[number % len(target.honest)]
            names = (f"name-{number}-{again}" for again in count())
            name = next(name for name in names if self._is_nearest(record_key(author.me, name), bits, target))
            record = DhtRecord(author.me, name, b"live", 1, target.expiry(3600))
            await author.publish(seal(author.network.sign, record), record.key)
            await target.look_up(record)

    @staticmethod
    def _is_nearest(key: bytes, bits: int, target: DhtSwarm) -> bool:
        """Whether all twenty are nearer to a key than any honest node is; the search may miss it by chance."""
        theirs = [shared_bits(key, peer) for peer in ground(key, bits)]
        return min(theirs) > max(shared_bits(key, peer.me) for peer in target.honest)

    async def _lie(self, stream: Stream, liar: DhtPeer, bits: int) -> None:
        reader = FrameReader(stream, limit=1 << 20)
        here = Multiaddr(liar.network.addresses[0].partition("/p2p/")[0]).to_bytes()
        while (raw := await reader.frame()) is not None:
            asked = Message.FromString(bytes(raw))
            answer = Message(type=asked.type, key=asked.key)
            for peer in ground(asked.key, bits):
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
    return [ForgedOwner(), ReplayAndRollback(), EndlessExpiry(), CrowdOfAuthors(), LyingRouters(), SilentStreams()]
