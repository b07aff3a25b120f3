"""What is done with many identities: joining a run for nothing, and surrounding a node from one network (an eclipse).

Each acts on a `Scene` of `identity.py`, and leaves there how much of what it wanted it got.
"""

from __future__ import annotations

import hashlib
import random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness import Adversary
from identity import Scene, address, slots

from swarmnode.node.discovery import finder
from swarmnode.node.discovery.finder import AddressBook
from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.diversity import sample, spread
from swarmnode.protocols.state.membership import admitted
from swarmnode.training.runspec import parse_runspec

BITS = 8  # in the attack, so that it takes seconds; a run would ask for 20 and more
ATTACKERS = 200  # all in one network
HONEST = 20  # each in a network of its own


def identity_of(name: str) -> PeerId:
    seed = hashlib.sha256(name.encode()).digest()
    return peer_id_of(Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw())


class FreeIdentities(Adversary):
    """Makes identities as fast as it can, and joins with each."""

    name = f"2000 identities made for nothing join a run that asks for {BITS} bits of work"

    async def attack(self, target: Scene) -> None:
        bits = 0 if target.undefended else BITS
        tables = {"run": {"name": "r", "trust": "open"}, "trust": {"identity_bits": bits}}
        may_join = admitted(parse_runspec(tables, source="attack"))
        count = self.times(2000, 500)
        target.wanted = count
        target.got = sum(identity_of(f"free {number}") in may_join for number in range(count))
        target.allowed = 2 * count // 2**BITS + 3
        target.told = "{got} of {wanted} admitted"


class Crowd(Adversary):
    """Many identities behind one address, beside a few honest peers elsewhere."""

    def peers(self, target: Scene) -> list[tuple[PeerId, str]]:
        """The attackers' and the honest ones, with the address of each."""
        attackers = [(identity_of(f"evil {n}"), address(target.attackers_host, n)) for n in range(ATTACKERS)]
        honest = [(identity_of(f"good {n}"), address(f"{20 + n}.8.8.8", 4077)) for n in range(HONEST)]
        return [*attackers, *honest]

    def is_honest(self, where: str) -> bool:
        return not where.startswith("/ip4/8.8.8.")


class FillTheBook(Crowd):
    name = f"{ATTACKERS * 3} identities of one network connect after {HONEST} honest peers, to fill the address book"

    async def attack(self, target: Scene) -> None:
        book = AddressBook(None)
        honest = [pair for pair in self.peers(target) if self.is_honest(pair[1])]
        evil = [(identity_of(f"evil {n}"), address(target.attackers_host, n)) for n in range(3 * ATTACKERS)]
        with target.blind(finder):
            for peer, where in (*honest, *evil):
                book.answered(peer, (f"{where}/p2p/{peer}",), target.group(where))
        remembered = {peer for peer, _ in book.entries()}
        target.wanted, target.got = len(honest), sum(peer not in remembered for peer, _ in honest)
        target.told = "{got} of {wanted} honest peers forgotten"


class BeginnersOfLookups(Crowd):
    """Its identities are ground to be nearer to the key than any honest one: `first_hand` begins with the nearest."""

    name = f"{ATTACKERS} identities of one network, nearest to a key, crowd out whom its lookups begin with"
    room = 48  # as in `kademlia.first_hand`

    async def attack(self, target: Scene) -> None:
        begun = spread(self.peers(target), lambda pair: target.group(pair[1]))[: self.room]
        target.wanted = HONEST
        target.got = HONEST - sum(self.is_honest(where) for _, where in begun)
        target.told = "{got} of {wanted} honest peers left out"


class PartnersOfRepair(Crowd):
    name = f"{ATTACKERS} identities of one network, to be whom a node repairs its state with"
    draws = 1000

    async def attack(self, target: Scene) -> None:
        rng, peers, count = random.Random(1), self.peers(target), self.times(self.draws, 200)
        drawn = [sample(rng, peers, 1, lambda pair: target.group(pair[1]))[0] for _ in range(count)]
        target.wanted = count
        target.got = sum(not self.is_honest(where) for _, where in drawn)
        target.allowed = count // 10
        target.told = "{got} of {wanted} repairs with attackers"


class TakeEverySlot(Adversary):
    """Real hosts: the attackers, all from one network, are connected first and take all that a node has room for."""

    name = "16 identities of one network hold all 8 connections that a node has room for; 6 others dial it"
    seconds = 20.0

    async def attack(self, target: Scene) -> None:
        connected = await slots(target, room=8, attackers=16, honest=6)
        target.wanted, target.got = 6, 6 - connected
        target.told = "{got} of {wanted} honest peers turned away"


def everyone() -> list[Adversary]:
    """A new adversary of every kind."""
    return [FreeIdentities(), FillTheBook(), BeginnersOfLookups(), PartnersOfRepair(), TakeEverySlot()]
