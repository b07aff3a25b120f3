"""What nodes on simnet share; statenodes.py and rolloutnodes.py make those of one subject, simswarm.py whole ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.peers.scoring import PeerScoring
from swarmnode.testing.simnet import SimNetwork

RUN = "ab" * 32
EPOCH = 1_700_000_000_000  # ms; what clocks show at virtual time 0

Run = Callable[..., Awaitable[None]]


def now() -> int:
    return EPOCH + int(1000 * trio.current_time())


@dataclass
class SimNode:
    """One node: its network, its parts in the order of their start, and who judges peers."""

    network: SimNetwork
    rpc: Rpc
    parts: Sequence[Run]
    scoring: PeerScoring
    scope: trio.CancelScope = field(default_factory=trio.CancelScope, init=False)

    @property
    def me(self) -> str:
        return self.network.me

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Everything but the network, which runs already or is run by who made it."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                for part in self.parts:
                    await nursery.start(part)
                task_status.started()
                await trio.sleep_forever()


async def start_all(nursery: trio.Nursery, nodes: Iterable[SimNode]) -> None:
    for node in nodes:
        await nursery.start(node.network.run)
        await nursery.start(node.run)


async def connect(pairs: Iterable[tuple[SimNode, SimNode]]) -> None:
    async with trio.open_nursery() as nursery:
        for one, other in pairs:
            nursery.start_soon(one.network.connect, other.me)
