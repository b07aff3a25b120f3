"""Liars in the DHT: peers that store what nobody reads, and routers that lead astray."""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import count
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dhtswarm import DhtPeer, DhtSwarm
from harness import Adversary
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.dht.lookup import place, sorted_by_distance
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import NetworkError, PeerId, Stream

GROUND_BITS = 15  # the attacker searches 2^15 key pairs for identities near the keys that it wants
NEAREST = 20  # of them that a lying router names: as many as an answer may have


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


class ValuesForOthers(Adversary):
    """Asks every honest node to keep values: under bare keys, in the namespaces of libp2p and in one of its own."""

    name = "values to keep for others, under 64 keys"

    async def attack(self, target: DhtSwarm) -> None:
        spaces = ("", "/pk/", "/ipns/", "/swarmnode/")
        keys = [f"{spaces[number % 4]}{number}".encode() for number in range(self.times(64, 4))]
        async with trio.open_nursery() as nursery:
            for peer in target.honest:
                nursery.start_soon(self._put, target.malicious[0], peer, keys)
        await target.publish_and_find(target.honest[0], b"live")

    async def _put(self, attacker: DhtPeer, victim: DhtPeer, keys: list[bytes]) -> None:
        for key in keys:
            record = Record(key=key, value=b"lie" * 100)
            try:
                with trio.move_on_after(2):
                    question = Message(type=Message.MessageType.PUT_VALUE, key=key, record=record)
                    await attacker.kademlia.exchange(victim.me, question)
            except NetworkError:
                continue  # refused: it closed the stream


class LyingRouters(Adversary):
    """Every malicious node keeps nothing, says that it does, and names the nearest of all identities that it made."""

    name = f"20 % malicious routers that name, near every key, the nearest 20 of 2^{GROUND_BITS} identities made for it"

    async def attack(self, target: DhtSwarm) -> None:
        bits = GROUND_BITS if self.scale == 1.0 else GROUND_BITS - 3
        searched(bits)
        for liar in target.malicious:
            liar.network.serve(str(PROTOCOL_ID), lambda stream, liar=liar: self._lie(stream, liar, bits))
        for number in range(self.times(8)):
            names = (hashlib.sha256(b"%d %d" % (number, again)).digest() for again in count())
            key = next(name for name in names if self._is_nearest(name, bits, target))
            await target.publish_and_find(target.honest[number % len(target.honest)], key)

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
        await target.publish_and_find(target.honest[0], b"live")


async def _hang_up(stream: Stream) -> None:
    await stream.aclose()


def everyone() -> list[Adversary]:
    return [ValuesForOthers(), LyingRouters(), SilentStreams()]
