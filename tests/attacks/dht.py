"""The DHT group: each adversary in a swarm of 16 real hosts of which a fifth is malicious.

Measured, here and on py-libp2p's KadDHT as installed: how many honest nodes hold a value that its author never
published, how many lost the live one, and how many lookups found what was published.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio
from adversaries import dht as adversaries
from dhtswarm import ROOM, dht_swarm
from harness import Adversary, Outcome

SUCCESS = 0.99  # of lookups


@dataclass(frozen=True)
class Damage:
    """What an attack did to the honest nodes."""

    accepted: int  # values held that their author never published
    evicted: int  # live values that their holders lost, to an older one or altogether
    lookups: int
    found: int
    kept: int  # records of others at the honest node that has most

    def __str__(self) -> str:
        told = f"{self.accepted} false values, {self.evicted} evicted, {self.found} of {self.lookups} lookups"
        return f"{told}, {self.kept} records kept at most"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.accepted:
            broken.append(f"{self.accepted} false values accepted")
        if self.evicted:
            broken.append(f"{self.evicted} live values evicted")
        if self.found < SUCCESS * self.lookups:
            broken.append(f"{self.found} of {self.lookups} lookups succeeded")
        if self.kept > ROOM:
            broken.append(f"{self.kept} records kept, {ROOM} may be")
        return tuple(broken)


async def damage(adversary: Adversary, *, undefended: bool = False) -> Damage:
    """Run one attack to its end in a swarm of its own, then look at every honest node."""
    async with dht_swarm(undefended=undefended) as swarm:
        with trio.fail_after(300):
            await adversary.attack(swarm)
            for record in swarm.expected:
                await swarm.look_up(record)
        accepted = evicted = 0
        for record in swarm.expected:
            for peer in swarm.honest:
                held = peer.held(record.key)
                accepted += held not in (None, record.value, *swarm.older[record.key])
                evicted += peer.me in swarm.holders[record.key] and held != record.value
        kept = max(peer.records_kept for peer in swarm.honest)
        return Damage(accepted, evicted, swarm.lookups, swarm.found, kept)


async def outcomes() -> AsyncIterator[Outcome]:
    """All attacks of the group in full."""
    for adversary in adversaries.everyone():
        defended, stock = await damage(adversary), await damage(adversary, undefended=True)
        shows = "" if stock.failures() else adversary.shows
        yield Outcome("DHT", adversary.name, str(defended), str(stock), defended.failures(), shows)
