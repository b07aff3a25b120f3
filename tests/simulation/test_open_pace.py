"""Rounds of a model that trains in no time: none is too short, and who is far behind comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from simswarm import SimSwarm

from swarmnode.node.simnet import SimWorld, run_simulation

SHORTEST = 1.0  # seconds, by default


def simulate(body: Callable[[SimSwarm], Awaitable[None]], *names: str) -> None:
    """`body` with a swarm of one elector, the first, whose rounds need next to no training."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = SimWorld(latency=0.02)
            swarm = SimSwarm(nursery, world=world, method="open", electors=names[:1], seconds_per_step=0.01)
            await swarm.start(names[0], wait_peers=len(names) - 1)
            for name in names[1:]:
                await swarm.start(name, join=names[0])
            await body(swarm)
            nursery.cancel_scope.cancel()

    run_simulation(main)


def test_rounds_are_not_shorter_than_the_shortest_window() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(10, "a", "b")
        assert sum(swarm.nodes["a"].rounds[round]["seconds"] for round in range(1, 10)) > 8 * SHORTEST

    simulate(body, "a", "b")


def test_who_was_cut_off_for_longer_than_others_remember_is_soon_where_they_are() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, "a", "b", "c")
        swarm.world.partition([[swarm.peer("a"), swarm.peer("b")], [swarm.peer("c")]])
        await swarm.round_done(75, "a", "b")
        swarm.world.heal()
        healed = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: max(swarm.nodes["c"].rounds) > healed, within=30)
        await swarm.until(lambda: swarm.all_agree(after=healed), within=30)

    simulate(body, "a", "b", "c")
