"""Swarms of strangers that come, leave, die and freeze, and what larger ones cost a node: bench/open_sim.py."""

from __future__ import annotations

import pytest
import trio
from churn import Churn, ChurnSwarm, one_answer_for_all
from straightcalls import straight_calls

from swarmnode.testing.simnet import run_with_nursery

pytestmark = pytest.mark.slow

NODES = 10
ROUNDS = 8


def test_rounds_end_and_all_agree_while_nodes_come_leave_die_and_freeze() -> None:
    async def main(nursery: trio.Nursery) -> None:
        swarm = ChurnSwarm(nursery, NODES, validators=5, parameters=4096, seed=1)
        await swarm.begin()
        for _ in range(ROUNDS):
            await swarm.next_round(within=120)
            await swarm.churn(Churn.of(0.2))
        assert sum(swarm.happened.values()) >= ROUNDS
        assert max(round.seconds for round in swarm.history) < 60  # with five validators, of whom three are gone
        swarm.thaw_all()
        settled = swarm.height() + 3
        await swarm.swarm.until(lambda: swarm.height() >= settled and swarm.agree(), within=60)
        await swarm.swarm.until(lambda: swarm.look_at(swarm.height()).members > 0, within=60)
        assert swarm.look_at(swarm.height()).loss < swarm.history[0].loss - 0.2

    with one_answer_for_all(), straight_calls():
        run_with_nursery(main)


@pytest.mark.thorough
def test_what_a_node_sends_in_a_round_grows_little_beyond_the_participants_that_are_aimed_at() -> None:
    """Swarms of 12 and 36 nodes, of which some 6 contribute and 4 judge: bytes that the average node sends.

    How many contribute is drawn in each round, 6 on average: over four rounds the draw shows little.
    """

    async def sent_by(nodes: int, nursery: trio.Nursery) -> float:
        swarm = ChurnSwarm(nursery, nodes, validators=4, parameters=4096, seed=1, participants=6)
        await swarm.begin()
        for _ in range(2):  # at first nothing is known of how many come
            await swarm.next_round(within=30)
        before = swarm.sent()
        for _ in range(ROUNDS // 2):
            found = await swarm.next_round(within=120)
            assert found.hashes == 1
            assert 4 <= found.members <= 12
        average = (swarm.sent() - before) / nodes
        return average

    with one_answer_for_all(), straight_calls():
        few, many = (run_with_nursery(sent_by, nodes) for nodes in (12, 36))
    assert many < 1.5 * few
