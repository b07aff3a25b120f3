"""Members that banned somebody go on without it, whoever leads and whether or not that one is still there."""

from __future__ import annotations

import trio
from simswarm import SimSwarm

from swarmnode.protocols.methods.btard.method import Btard
from swarmnode.testing.simnet import SimWorld, run_simulation

HONEST, BANNED = ("a", "b", "c", "d"), "e"
USUAL = 10.0  # virtual seconds in which a round ends, many times over


def test_nobody_is_waited_for_who_would_not_be_let_in() -> None:
    """It answers pings and has a vote, and no leader knows yet how long stragglers take: they took a minute."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, world=SimWorld(latency=0.02), method="btard", steps=2)
            await swarm.start("a", wait_peers=4)
            for name in (*HONEST[1:], BANNED):
                await swarm.start(name, join="a")
            await swarm.until(lambda: all(node.session.place is not None for node in swarm.nodes.values()), within=60)
            for name in HONEST:
                method = swarm.nodes[name].method
                assert isinstance(method, Btard)
                method.bans.convict(swarm.peer(BANNED), "was seen to lie")
            for round in range(4):
                await swarm.round_done(round, *HONEST, within=USUAL)
                assert len({swarm.nodes[name].rounds[round]["state_hash"] for name in HONEST}) == 1
            nursery.cancel_scope.cancel()

    run_simulation(main)
