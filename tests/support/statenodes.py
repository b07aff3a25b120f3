"""Nodes that keep one replicated state in step on simnet, in virtual time, with states in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import trio
from simnodes import RUN, SimNode, now, start_all

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.law import EVERYBODY
from swarmnode.crdt.record import Record, write
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.peers.scoring import PeerScoring, ScoringLimits
from swarmnode.protocols.runner import inline
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.state.wire import Pushed
from swarmnode.testing.memorystate import MemoryState, clocks_of
from swarmnode.testing.simnet import SimNetwork, SimWorld


class LossyRpc(Rpc):
    """Calls of which a share of the pushes vanishes: their sender is answered as if they had arrived."""

    def __init__(self, network: SimNetwork, *, loss: float = 0.0) -> None:
        super().__init__(network)
        self._loss = loss
        self._rng = random.Random(f"loss {network.me}")

    async def call(self, peer: str, method: str, request: Any, reply: type[Any], *, timeout: float) -> Any:
        if method == "state.push" and self._rng.random() < self._loss:
            await trio.sleep(0.1)
            return Pushed()
        return await super().call(peer, method, request, reply, timeout=timeout)


def signed(network: SimNetwork, key: str, value: Value, *, at: int) -> Record:
    """A record of `network`'s dated `at` ms, which it has told nobody."""
    stamp = stamp_at(at, random.Random(f"{key} {value!r}").getrandbits(16))
    return write(RUN, network.me, key, value, hlc=stamp, sign=network.sign)


@dataclass
class StateNode(SimNode):
    """One with a state, what keeps that in step, and a clock."""

    state: MemoryState
    sync: StateSync
    clock: Callable[[], int]

    @classmethod
    def make(
        cls,
        network: SimNetwork,
        *,
        rpc: Rpc | None = None,
        loss: float = 0.0,
        admitted: Container[str] = EVERYBODY,
        clock: Callable[[], int] = now,
        seed: int = 0,
    ) -> StateNode:
        rpc = rpc or LossyRpc(network, loss=loss)
        state = MemoryState(RUN, me=network.me, sign=network.sign, clocks=clocks_of(clock), admitted=admitted)
        rng = random.Random(f"{seed} {network.me}")
        sync = StateSync(state, network=network, rpc=rpc, runner=inline, rng=rng)
        scoring = PeerScoring(ScoringLimits())
        scoring.watch(sync.violations)
        return cls(network, rpc, (rpc.run, state.run, sync.run), scoring, state, sync, clock)

    def signs(self, key: str, value: Value, *, ahead: int = 0) -> Record:
        """A record of this node's that it has told nobody; `ahead` ms of its time."""
        return signed(self.network, key, value, at=self.clock() + ahead)

    def hash(self, *, after: int = 10_000) -> str:
        """The hash of what still lives in `after` ms."""
        return self.state.snapshot(now() + after).digest


async def start(nursery: trio.Nursery, world: SimWorld, count: int, **options: Any) -> list[StateNode]:
    """`count` running nodes that nobody has connected."""
    nodes = [StateNode.make(world.node(f"node {number}"), **options) for number in range(count)]
    await start_all(nursery, nodes)
    return nodes


def ring_and_chords(nodes: list[StateNode], degree: int, rng: random.Random) -> list[tuple[StateNode, StateNode]]:
    """A connected graph in which each node has about `degree` neighbours."""
    pairs = [(node, nodes[number - 1]) for number, node in enumerate(nodes)]
    for node in nodes:
        for _ in range(degree // 2 - 1):
            other = rng.choice(nodes)
            if other is not node:
                pairs.append((node, other))
    return pairs
