"""The DHT group: each adversary in a swarm of 16 real hosts of which a fifth is malicious.

Measured, here and on py-libp2p's KadDHT as installed: how many values honest nodes keep that nobody asked for, and how
many lookups found who had announced a key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio
from adversaries import dht as adversaries
from dhtswarm import dht_swarm
from harness import Adversary, Outcome

SUCCESS = 0.99  # of lookups


@dataclass(frozen=True)
class Damage:
    """What an attack did to the honest nodes."""

    kept: int  # values at the honest node that keeps most
    lookups: int
    found: int

    def __str__(self) -> str:
        return f"{self.kept} values kept at most, {self.found} of {self.lookups} lookups"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.kept:
            broken.append(f"{self.kept} values kept for others")
        if self.found < SUCCESS * self.lookups:
            broken.append(f"{self.found} of {self.lookups} lookups succeeded")
        return tuple(broken)


async def damage(adversary: Adversary, *, undefended: bool = False) -> Damage:
    """Run one attack to its end in a swarm of its own, then look at every honest node."""
    async with dht_swarm(undefended=undefended) as swarm:
        with trio.fail_after(300):
            await adversary.attack(swarm)
        return Damage(max(peer.values for peer in swarm.honest), swarm.lookups, swarm.found)


async def outcomes() -> AsyncIterator[Outcome]:
    """All attacks of the group in full."""
    for adversary in adversaries.everyone():
        defended, stock = await damage(adversary), await damage(adversary, undefended=True)
        shows = "" if stock.failures() else adversary.shows
        yield Outcome("DHT", adversary.name, str(defended), str(stock), defended.failures(), shows)
