"""Two hundred nodes with one state: news is everywhere within hops, a swarm that was cut in two becomes one."""

from __future__ import annotations

import random

import pytest
import trio
from simnodes import connect
from statenodes import StateNode, ring_and_chords, start

from swarmnode.protocols.state.push import COLLECT
from swarmnode.protocols.state.sync import REPAIR_EVERY
from swarmnode.testing.simnet import SimWorld, run_with_nursery

pytestmark = pytest.mark.slow

NODES = 200
DEGREE = 10
LATENCY = 0.05  # seconds
LOSS = 0.05
HOP = COLLECT + LATENCY
SETTLE = 15.0  # seconds: the greetings of all connections are over


async def write_some(nodes: list[StateNode], rng: random.Random, count: int, name: str) -> list[bytes]:
    """So many notes by random nodes; their ranks."""
    ranks = []
    for number in range(count):
        record = await rng.choice(nodes).sync.write(f"note/{name}-{number}", number)
        ranks.append(record.rank)
    return ranks


def share(nodes: list[StateNode], ranks: list[bytes]) -> float:
    return sum(node.state.has(rank) for node in nodes for rank in ranks) / len(nodes) / len(ranks)


def test_a_record_reaches_99_percent_within_five_hops_and_all_by_the_next_repair() -> None:
    async def main(nursery: trio.Nursery) -> None:
        rng = random.Random(1)
        nodes = await start(nursery, SimWorld(latency=LATENCY), NODES, loss=LOSS)
        await connect(ring_and_chords(nodes, DEGREE, rng))
        await trio.sleep(SETTLE)
        ranks = await write_some(nodes, rng, 5, "news")
        await trio.sleep(5 * HOP)
        assert share(nodes, ranks) >= 0.99
        await trio.sleep(REPAIR_EVERY - 5 * HOP)
        assert share(nodes, ranks) == 1.0
        assert len({node.hash() for node in nodes}) == 1

    run_with_nursery(main)


def cut_and_heal(seconds: float, many: int = NODES) -> None:
    """Both halves of a swarm write while they are apart for so long; one repair interval later all hold all."""

    async def main(nursery: trio.Nursery) -> None:
        rng = random.Random(2)
        world = SimWorld(latency=LATENCY)
        nodes = await start(nursery, world, many, loss=LOSS)
        pairs = ring_and_chords(nodes, DEGREE, rng)
        await connect(pairs)
        await trio.sleep(SETTLE)
        left = set(rng.sample(range(many), many // 2))
        halves = [[node for number, node in enumerate(nodes) if (number in left) is side] for side in (True, False)]
        world.partition([[node.me for node in half] for half in halves])
        ranks = await write_some(halves[0], rng, 10, "left") + await write_some(halves[1], rng, 10, "right")
        await trio.sleep(seconds)
        assert abs(share(halves[0], ranks[:10]) - 1) + share(halves[0], ranks[10:]) < 0.01
        world.heal()
        healed = trio.current_time()
        await connect(pairs)  # as whoever keeps connections to members does
        await trio.sleep(healed + REPAIR_EVERY - trio.current_time())
        assert share(nodes, ranks) == 1.0
        assert len({node.hash() for node in nodes}) == 1

    run_with_nursery(main)


@pytest.mark.parametrize("many", [NODES // 2, pytest.param(NODES, marks=pytest.mark.thorough)])
def test_a_swarm_cut_for_a_minute_is_one_within_a_repair_interval(many: int) -> None:
    cut_and_heal(60.0, many)  # connections across the cut broke, and are made anew


@pytest.mark.thorough
def test_a_swarm_cut_so_shortly_that_connections_held_is_one_within_a_repair_interval() -> None:
    cut_and_heal(10.0)
