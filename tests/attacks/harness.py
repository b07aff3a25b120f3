"""What all attack tests share: the adversary, the swarm of 16 on simnet, and what an attack came to.

An attack is an `Adversary` of about 30 lines in `adversaries/`. A group (`transport.py`, `dht.py`) knows what its
adversaries act upon and how to measure what they cost, and returns one `Outcome` for each: the figure of this node
beside that of an undefended one, where there is one, so that it is seen that the attack is real.

    python tests/attacks [GROUP ...]      all attacks in full; prints the lines and writes docs/attacks.md
    pytest tests/attacks                  the short form
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.testing.simnet import SimNetwork, SimWorld

SWARM = 16  # peers of the simulated swarm
MIB = 1 << 20


class Adversary(ABC):
    """One way to misbehave. `attack` runs until it is cancelled, or returns when it has done its worst."""

    name: ClassVar[str]  # as in the table
    scale = 1.0  # share of the full attack: the short form takes less
    seconds: ClassVar[float] = 0.0  # that it needs at least
    victim: ClassVar[tuple[str, ...]] = ()  # how its victim is started, beside the usual
    shows: ClassVar[str] = "that it costs no more here"  # where it harms no undefended node either

    def times(self, full: int, least: int = 1) -> int:
        """How many of `full` this form of the attack takes."""
        return max(least, round(full * self.scale))

    @abstractmethod
    async def attack(self, target: Any) -> None: ...

    def harm(self, target: Any) -> str | None:
        """What the attack achieved beyond cost, in words; None where nothing."""
        return None


@dataclass(frozen=True)
class Outcome:
    """What one attack came to."""

    group: str
    attack: str
    defended: str  # the figures of this node
    undefended: str  # those of a node without the defence, or why there are none
    failures: tuple[str, ...] = ()  # promises that were broken
    shows: str = ""  # what the line shows where the undefended bear the attack as well; empty where it harms them

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass
class SimPeer:
    """One node of the simulated swarm, with what every node serves."""

    network: SimNetwork
    rpc: Rpc
    bulk: Bulk
    malicious: bool = False


@dataclass
class Swarm:
    """`honest` and `malicious` peers, all connected to all."""

    world: SimWorld
    peers: list[SimPeer] = field(default_factory=list)

    @property
    def honest(self) -> list[SimPeer]:
        return [peer for peer in self.peers if not peer.malicious]

    @property
    def malicious(self) -> list[SimPeer]:
        return [peer for peer in self.peers if peer.malicious]


@asynccontextmanager
async def simulated_swarm(malicious: int, *, size: int = SWARM, latency: float = 0.02) -> AsyncIterator[Swarm]:
    """`size` running peers, the last `malicious` of them for the adversary to use; for `run_simulation`."""
    swarm = Swarm(SimWorld(latency=latency))
    async with trio.open_nursery() as nursery:
        for number in range(size):
            network = swarm.world.node(number)
            await nursery.start(network.run)
            peer = SimPeer(network, Rpc(network), Bulk(network), number >= size - malicious)
            await nursery.start(peer.rpc.run)
            await nursery.start(peer.bulk.run)
            for other in swarm.peers:
                await network.connect(other.network.me)
            swarm.peers.append(peer)
        yield swarm
        nursery.cancel_scope.cancel()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
