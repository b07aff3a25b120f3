"""One key in several lives: nodes that come back with nothing else or from a backup, and a second daemon beside one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import trio
from openswarm import Scene
from roundadversary import AFTER, RoundAdversary
from undefended import NEVER_SILENT, NO_MEMORY, NO_TWINS

from swarmnode.crdt.record import Element
from swarmnode.protocols.chain.statements import AvailabilityVote, Commit, Seal
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.state.membership import KeyInUse

EVERYTHING = 65_536  # elements; more than a small swarm's state has


class KeyAlone(RoundAdversary):
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


@dataclass
class Kept:
    """The newest checkpoint of one node: in place of `Checkpoints`, without files."""

    saved: Saved

    def newest(self) -> Saved:
        return self.saved

    def save(self, saved: Saved) -> None:
        self.saved = saved


@dataclass(frozen=True)
class Backup:
    """What a node's disk held at a moment: its state, and a checkpoint of just then."""

    state: list[Element]
    saved: Saved

    @classmethod
    async def of(cls, method: Open) -> Backup:
        return cls(await method.sync._state.select(limit=EVERYTHING), method.saved())

    async def start(self, target: Scene, name: str, **how: Any) -> None:
        """Start a node with this on its disk."""
        with patch.object(target.swarm, "_checkpoints_of", lambda name, layout: Kept(self.saved)):
            await target.swarm.start(name, holds=self.state, **how)


class RestoredBackup(KeyAlone):
    """All that a node holds is put back to what it was some rounds before, three times, and each time to the same.

    It is killed when others know what it has just said in the round, which the backup does not.
    """

    name = "a backup of four rounds ago is restored in the middle of a round, three times"
    age = 4  # rounds, when it is first restored

    async def attack(self, target: Scene) -> None:
        backup = await Backup.of(target.method("c"))
        await target.done(self.age - 1)
        self.first = target.round + 1
        target.bad.add("c")
        await self._restore(target, backup)
        self._back = target.round + 1
        await target.done(self.times(6, AFTER))

    async def _restore(self, target: Scene, backup: Backup) -> None:
        for statement in (Commit, AvailabilityVote, Seal):
            await self._said(target, statement)
            target.swarm.kill("c")
            await trio.sleep(1.0)
            await backup.start(target, "c", join="b")

    async def _said(self, target: Scene, kind: type) -> None:
        """Until the others may know a statement of this kind that the node makes from now on; a minute at most."""
        said = trio.Event()

        async def say(usual: Any, statement: Any) -> Any:
            record = await usual(statement)
            if isinstance(statement, kind):
                said.set()
            return record

        target.change_words("c", say)
        with trio.move_on_after(60.0):
            await said.wait()
        await trio.sleep(0.2)

    async def broken(self, target: Scene) -> list[str]:
        broken = await super().broken(target)
        if not self._counts(target):
            broken.append("its work counts no more")
        if odd := [round for round in target.swarm.nodes["c"].rounds if len(target.swarm.hashes(round)) > 1]:
            broken.append(f"it has another state of {len(odd)} rounds")
        return broken

    async def achieved(self, target: Scene) -> str:
        return f"{await super().achieved(target)}, its work counts {'again' if self._counts(target) else 'no more'}"

    def _counts(self, target: Scene) -> bool:
        return "accepted" in target.verdicts("c", self._back)


class LonelyBackup(RestoredBackup):
    """It goes on alone from the backup, in a round that the others ended with it, before it reaches them."""

    name = "a backup of four rounds ago is restored where nobody is reached for 40 s"
    lacks = NEVER_SILENT

    async def _restore(self, target: Scene, backup: Backup) -> None:
        target.swarm.kill("c")
        others = {target.peer(name): target.swarm.nodes[name].network.addresses for name in target.honest}
        target.swarm.world.partition([[target.peer("c")], list(others)])
        await backup.start(target, "c")
        await trio.sleep(40.0)
        target.swarm.world.heal()
        network = target.swarm.nodes["c"].network
        for peer, addresses in others.items():
            network.learn(peer, addresses)
            await network.connect(peer)


class Copy:
    """The network of a second daemon with the key of `original`, reached through a network identity of its own."""

    def __init__(self, carrier: Any, original: Any) -> None:
        self._carrier = carrier
        self.me, self.sign = original.me, original.sign

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)


class TwoDaemons(KeyAlone):
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
    return [KeyAlone(), RestoredBackup(), LonelyBackup(), TwoDaemons()]
