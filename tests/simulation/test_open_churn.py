"""Swarms of strangers in which a fifth of the nodes joins, leaves, dies or freezes in each round: bench/open_sim.py."""

from __future__ import annotations

import trio
from churn import Churn, ChurnSwarm, one_answer_for_all
from straightcalls import straight_calls

from swarmnode.node.simnet import run_simulation

NODES = 10
ROUNDS = 8


def test_rounds_end_and_all_agree_while_nodes_come_leave_die_and_freeze() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            swarm = ChurnSwarm(nursery, NODES, electors=5, parameters=4096, seed=1)
            await swarm.begin()
            for _ in range(ROUNDS):
                await swarm.next_round(within=120)
                await swarm.churn(Churn.of(0.2))
            assert sum(swarm.happened.values()) >= ROUNDS
            assert max(round.seconds for round in swarm.history) < 30  # with five electors, of whom three are gone
            swarm.thaw_all()
            settled = swarm.height() + 3
            await swarm.swarm.until(lambda: swarm.height() >= settled and swarm.agree(), within=60)
            await swarm.swarm.until(lambda: swarm.look_at(swarm.height()).members > 0, within=60)
            assert swarm.look_at(swarm.height()).loss < swarm.history[0].loss - 0.2
            nursery.cancel_scope.cancel()

    with one_answer_for_all(), straight_calls():
        run_simulation(main)
