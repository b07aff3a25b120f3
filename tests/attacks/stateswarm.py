"""Sixteen simulated nodes with one replicated state, some of them for the adversary: ours, or naive ones.

A naive node keeps by author and key whatever it is sent with the latest stamp, and passes it on: no signatures, no
bounds, no limit to the future. It shows that an attack is real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgpack
import trio
from harness import SimPeer, Swarm, simulated_swarm
from statenodes import RUN, StateNode, now, signed

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.record import Record
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.state.wire import Push, Pushed, batches

CLOCKS_HEARD = 8.0  # seconds until all have repaired with their neighbours


class Attacker:
    """A peer that answers nothing and says what it likes."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer = peer
        self.me = peer.network.me

    def signs(self, key: str, value: Value, *, ahead: int = 0) -> Record:
        return signed(self.peer.network, key, value, at=now() + ahead)

    async def push(self, target: str, *sealed: bytes) -> bool:
        """Whether the target took all."""
        try:
            for batch in batches(sealed):
                await self.peer.rpc.call(target, "state.push", Push(RUN, batch), Pushed, timeout=30)
        except CallError:
            return False
        return True


class NaiveNode:
    """Believes what it is sent."""

    def __init__(self, peer: SimPeer, swarm: Swarm) -> None:
        self._peer, self._swarm = peer, swarm
        self.held: dict[tuple[str, str], tuple[int, bytes]] = {}  # (author, key) -> stamp, sealed
        peer.rpc.serve("state.push", Push, self._on_push)

    async def _on_push(self, peer: str, push: Push) -> Pushed:
        news = [raw for raw in push.sealed if self._keep(raw)]
        for sealed in batches(news):
            async with trio.open_nursery() as nursery:
                for other in self._swarm.honest:
                    if other is not self._peer:
                        nursery.start_soon(self._pass_on, other, sealed)
        return Pushed()

    def _keep(self, raw: bytes) -> bool:
        with suppress(ValueError, KeyError, TypeError, msgpack.UnpackException):
            fields = msgpack.unpackb(msgpack.unpackb(raw)[0])
            slot, stamp = (fields["author"], fields["key"]), fields["hlc"]
            if self.held.get(slot, (-1, b""))[0] < stamp:
                self.held[slot] = (stamp, raw)
                return True
        return False

    async def _pass_on(self, other: SimPeer, sealed: tuple[bytes, ...]) -> None:
        with suppress(CallError):
            await self._peer.rpc.call(other.network.me, "state.push", Push(RUN, sealed), Pushed, timeout=30)

    @property
    def size(self) -> int:
        return sum(len(raw) for _, raw in self.held.values())


@dataclass
class StateSwarm:
    """`honest` nodes or their `naive` counterparts, and `malicious` peers that are connected to all."""

    swarm: Swarm
    honest: list[StateNode] = field(default_factory=list)
    naive: list[NaiveNode] = field(default_factory=list)
    attackers: list[Attacker] = field(default_factory=list)
    shunned: set[tuple[str, str]] = field(default_factory=set)  # (honest node, attacker), see `watch`
    expected: list[Record] = field(default_factory=list)  # what honest nodes wrote during the attack

    @property
    def targets(self) -> list[str]:
        return [peer.network.me for peer in self.swarm.honest]

    async def write(self, number: int) -> None:
        """An honest node says something; on naive nodes nothing is to be said."""
        if self.honest:
            author = self.honest[number % len(self.honest)]
            self.expected.append(await author.sync.write(f"note/{number}", number))

    async def watch(self) -> None:
        """Note who tells an attacker nothing, at any time: a refused one is let back when it has been quiet."""
        while True:
            for node in self.honest:
                self.shunned |= {
                    (node.me, each.me) for each in self.attackers if not node.sync.neighbours.trusts(each.me)
                }
            await trio.sleep(0.5)

    def shunning(self) -> set[str]:
        """The honest nodes that shunned each of the attackers."""
        return {node.me for node in self.honest if all((node.me, each.me) in self.shunned for each in self.attackers)}


@asynccontextmanager
async def state_swarm(malicious: int, *, undefended: bool = False) -> AsyncIterator[StateSwarm]:
    """Running nodes that have met; authors are admitted where they are peers of the swarm."""
    async with simulated_swarm(malicious) as swarm, trio.open_nursery() as nursery:
        peers = {peer.network.me for peer in swarm.peers}
        found = StateSwarm(swarm)
        for peer in swarm.peers:
            if peer.malicious:
                found.attackers.append(Attacker(peer))
            elif undefended:
                found.naive.append(NaiveNode(peer, swarm))
            else:
                node = StateNode.make(peer.network, rpc=peer.rpc, admitted=peers)
                found.honest.append(node)
                await nursery.start(node.state.run)
                await nursery.start(node.sync.run)
        await trio.sleep(CLOCKS_HEARD)
        nursery.start_soon(found.watch)
        yield found
        nursery.cancel_scope.cancel()
