"""One key in several lives: a node that comes back with nothing else, and a second daemon beside one that runs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import trio
from openswarm import Scene
from roundadversary import AFTER, RoundAdversary
from undefended import NO_MEMORY, NO_TWINS

from swarmnode.protocols.twins import KeyInUse


class RestoredBackup(RoundAdversary):
    """A node is killed and comes back three times with nothing but its key, in the middle of rounds."""

    name = "a node comes back from its key alone, three times"
    slower = 4.0
    lacks = NO_MEMORY

    async def attack(self, target: Scene) -> None:
        self.first = target.round + 1
        target.bad.add("c")
        for _ in range(3):
            target.swarm.kill("c")
            await trio.sleep(3.0)
            await target.swarm.start("c", join="b")
            await trio.sleep(13.0)
        await target.done(2)

    async def broken(self, target: Scene) -> list[str]:
        held = await self._proved(target)
        return [f"{held} records of equivocation"] if held else []

    async def achieved(self, target: Scene) -> str:
        return f"{await self._proved(target)} contradictions of its own are proved"

    async def _proved(self, target: Scene) -> int:
        return max([await target.evidence(name) for name in target.honest])


class Copy:
    """The network of a second daemon with the key of `original`, reached through a network identity of its own."""

    def __init__(self, carrier: Any, original: Any) -> None:
        self._carrier = carrier
        self.me, self.sign = original.me, original.sign

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)


class TwoDaemons(RestoredBackup):
    """A second daemon is started with a node's key, as from a copied disk; it says of itself what it is."""

    name = "a second daemon with the key of one that runs"
    lacks = NO_TWINS

    async def attack(self, target: Scene) -> None:
        self.first, self.stopped = target.round + 1, False
        target.bad.add("c")
        swarm, original = target.swarm, target.swarm.nodes["c"].network
        node, usual = swarm.world.node, swarm._live

        async def live(*given: Any, **more: Any) -> None:
            try:
                await usual(*given, **more)
            except* KeyInUse:
                self.stopped = True

        def network(name: str) -> Any:
            return Copy(node(name), original) if name == "twin" else node(name)

        with patch.object(swarm.world, "node", network), patch.object(swarm, "_live", live):
            await swarm.start("twin", join="b")
            await target.done(self.times(6, AFTER))

    async def broken(self, target: Scene) -> list[str]:
        return [*await super().broken(target), *([] if self.stopped else ["both of them go on"])]

    async def achieved(self, target: Scene) -> str:
        return f"{'the younger stops' if self.stopped else 'both go on'}, {await super().achieved(target)}"


def everyone() -> list[RoundAdversary]:
    """A new adversary of every kind."""
    return [RestoredBackup(), TwoDaemons()]
