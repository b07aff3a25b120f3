"""Many join at once: all arrive, members give about one copy each, and no death among them harms the rest."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.runner import inline
from swarmnode.protocols.transfer.catchup import CatchUp, CatchUpFailed
from swarmnode.protocols.transfer.shard_manifest import CHUNK
from swarmnode.protocols.transfer.shard_memory import MemoryShards
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.outer import Layout, OuterState, state_hash

Simulated = Callable[..., None]
RUN = "ab" * 32
CHUNKS = 64  # of a state; its momentum is not used
LAYOUT = Layout.of([("weights", (CHUNK * CHUNKS // 4,))])
SIZE = 4 * LAYOUT.parameters  # bytes of a state that travel
MEMBERS = 4


class Swarm:
    """Members that stand on a state, and joiners who want it."""

    def __init__(self, world: SimWorld, nursery: trio.Nursery, *, joiners: int) -> None:
        self._world, self._nursery, self._count = world, nursery, joiners
        parameters = np.random.default_rng(1).standard_normal(LAYOUT.parameters, np.float32)
        self.state = OuterState(parameters, np.zeros_like(parameters))
        self.hash = state_hash(7, LAYOUT, self.state)
        self.members: list[SimNetwork] = []
        self.joiners: list[SimNetwork] = []
        self.fetchers: dict[str, CatchUp] = {}
        self.arrived: dict[str, float] = {}  # peer -> seconds

    async def _node(self, name: str) -> tuple[SimNetwork, CatchUp]:
        network = self._world.node(name)
        rpc = Rpc(network)
        shards, liveness = Shards(network, rpc, MemoryShards(), runner=inline, seed=len(self.fetchers)), Liveness(rpc)
        for part in (network.run, rpc.run, shards.run, liveness.run):
            await self._nursery.start(part)
        common = {"run_id": RUN, "runner": inline, "trainer": SimpleNamespace(layout=LAYOUT)}
        parts: Any = SimpleNamespace(rpc=rpc, shards=shards, liveness=liveness, **common)
        fetcher = CatchUp(parts)
        self.fetchers[network.me] = fetcher
        return network, fetcher

    async def start(self) -> None:
        for number in range(MEMBERS):
            network, catch_up = await self._node(f"member {number}")
            catch_up.serve_state(7, self.hash, self.state)
            self.members.append(network)
        for number in range(self._count):
            network, catch_up = await self._node(f"joiner {number}")
            self.joiners.append(network)
            self._nursery.start_soon(self._join, network, catch_up, 0.01 * number)

    async def _join(self, network: SimNetwork, catch_up: CatchUp, after: float) -> None:
        for other in (*self.members, *self.joiners):
            network.learn(other.me, other.addresses)
        await trio.sleep(after)
        began = trio.current_time()
        try:
            _, hash, state = await catch_up.fetch([m.me for m in self.members], state_hash=self.hash)
        except CatchUpFailed:  # all_arrived names those who must not
            return
        assert hash == self.hash and state.parameters.tobytes() == self.state.parameters.tobytes()
        self.arrived[network.me] = trio.current_time() - began

    async def all_arrived(self, *but: SimNetwork, within: float) -> None:
        wanted = {joiner.me for joiner in self.joiners} - {node.me for node in but}
        with trio.fail_after(within):
            while not wanted <= self.arrived.keys():  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.1)

    def copies(self) -> list[float]:
        """How often each member gave the state away."""
        return [member.traffic().bytes_out / SIZE for member in self.members]


@pytest.mark.slow
def test_many_joiners_take_little_from_each_member_and_the_rest_from_one_another(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        swarm = Swarm(world, nursery, joiners=8)
        await swarm.start()
        await swarm.all_arrived(within=60)
        assert max(swarm.copies()) <= 1.3, swarm.copies()  # 2 each, where joiners do not serve joiners

    simulated(main, bandwidth=CHUNK)


@pytest.mark.parametrize("who", ["members", "joiners"])
def test_deaths_on_the_way_harm_nobody_else(simulated: Simulated, who: str) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        swarm = Swarm(world, nursery, joiners=6)
        await swarm.start()
        await trio.sleep(4)
        assert not swarm.arrived
        dead = swarm.members[:2] if who == "members" else swarm.joiners[::4]
        world.freeze(dead[0].me)
        for node in dead[1:]:
            world.kill(node.me)
        await swarm.all_arrived(*dead, within=60)

    simulated(main, bandwidth=CHUNK)


def test_a_joiner_that_lies_about_what_it_has_costs_nobody_the_state(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        swarm = Swarm(world, nursery, joiners=6)
        await swarm.start()
        await trio.sleep(0.5)
        for number in range(0, 6, 4):
            liar = swarm.fetchers[swarm.joiners[number].me]
            assert liar._unfinished is not None
            for shard, part in zip(liar._unfinished.manifest.shards, liar._unfinished.parts, strict=True):
                manifest = swarm.fetchers[swarm.members[0].me]._shards.memory.manifest(shard)
                liar._shards.memory.offer(manifest, memoryview(bytes(len(part))))  # wrong bytes, and all of them
        honest = [joiner for number, joiner in enumerate(swarm.joiners) if number % 4]
        with trio.fail_after(60):
            while not {joiner.me for joiner in honest} <= swarm.arrived.keys():  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.1)

    simulated(main, bandwidth=CHUNK)
