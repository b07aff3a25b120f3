"""The identity group: what many identities get, of a run that asks for work and of a node that looks where peers are.

Measured: identities admitted, and the honest peers that a node loses sight of while hundreds from one network surround
it. The undefended run asks for nothing; the undefended node takes every identity for a peer like any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import trio
from harness import Adversary, Outcome
from victim import LISTEN, new_identity

from swarmnode.node.host import connections
from swarmnode.node.host.limits import ConnectionLimits, Limits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.protocols.network import NetworkError
from swarmnode.protocols.peers.diversity import Group, group_of_addresses

SETTLED = 3.0  # seconds for connections to come and go


def address(host: str, port: int) -> str:
    return f"/ip4/{host}/tcp/{1024 + port}"


@dataclass
class Scene:
    """What an adversary acts upon, and what it got."""

    undefended: bool = False
    attackers_host: str = "8.8.8.8"
    wanted: int = 0
    got: int = 0
    allowed: int = 0
    told: str = ""

    def group(self, where: str) -> Group:
        """Where an address is, to a node that looks at it."""
        return None if self.undefended else group_of_addresses([where if "/" in where else address(where, 1)])

    def blind(self, module: ModuleType) -> AbstractContextManager[object]:
        """Where undefended, this part of the node sees no crowd."""
        return patch.object(module, "crowd", lambda groups, least: None) if self.undefended else nullcontext()

    def __str__(self) -> str:
        return self.told.format(got=self.got, wanted=self.wanted)

    def failures(self) -> tuple[str, ...]:
        return (f"{self}, at most {self.allowed} may",) if self.got > self.allowed else ()


async def slots(scene: Scene, *, room: int, attackers: int, honest: int) -> int:
    """Honest peers connected in the end to a host with so much room, which the attackers filled before.

    All are on loopback; the victim is told other addresses, as if they came from there.
    """
    limits = Limits(connections=ConnectionLimits(peers=room))
    victim = Libp2pNetwork(new_identity(), HostSettings(listen=(LISTEN,), limits=limits))
    crowd, others = ([Libp2pNetwork(new_identity(), HostSettings(listen=(LISTEN,))) for _ in range(count)]
                     for count in (attackers, honest))  # fmt: skip
    came_from = {each.me: scene.attackers_host for each in crowd}
    came_from |= {each.me: f"{20 + number}.8.8.8" for number, each in enumerate(others)}

    def group_of(connection: connections.Connection) -> Group:
        host = came_from.get(str(connection.session.peer_id))
        return scene.group(host) if host is not None else None

    with patch.object(connections.Connection, "group", property(group_of)):
        async with AsyncExitStack() as stack:
            for each in (victim, *crowd, *others):
                await stack.enter_async_context(_running(each))
            for each in (*crowd, *others):
                try:
                    await each.connect(victim.addresses[0], timeout=5.0)
                except NetworkError:
                    continue
                await trio.sleep(0.1)
            await trio.sleep(SETTLED)
            seen = {view.peer for view in victim.peers()}
            return sum(each.me in seen for each in others)


@asynccontextmanager
async def _running(network: Libp2pNetwork) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        yield
        nursery.cancel_scope.cancel()


async def damage(adversary: Adversary, *, undefended: bool = False) -> Scene:
    scene = Scene(undefended)
    with trio.fail_after(100):
        await adversary.attack(scene)
    return scene


async def outcomes() -> AsyncIterator[Outcome]:
    """Every attack in full, beside a node without the defence."""
    from adversaries import identity as adversaries

    for adversary in adversaries.everyone():
        defended, undefended = await damage(adversary), await damage(adversary, undefended=True)
        shows = "" if undefended.failures() else adversary.shows
        yield Outcome("identity", adversary.name, str(defended), str(undefended), defended.failures(), shows)
