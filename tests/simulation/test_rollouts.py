"""Swarms that share rollouts in rounds: everybody has enough to learn from, at a cost that does not grow with them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio
from rolloutnodes import RolloutNode, everybody, group, ring_and_chords, start
from simnodes import connect, now

from swarmnode.protocols.limits import Allowance
from swarmnode.protocols.methods.rollouts.pool import PoolLimits, Rates, RolloutLimits
from swarmnode.testing.simnet import SimWorld, run_with_nursery

DEGREE = 10
ROUND = 10.0  # seconds
PUBLISHED = 4  # groups of a node in a round
ENOUGH = 12  # groups of others: three for each of four that a batch takes


async def one_round(nodes: list[RolloutNode], number: int, count: int = PUBLISHED) -> None:
    for index, node in enumerate(nodes):
        first = 1000 * (100 * number + index)
        await node.rollouts.publish([group(first + k, version=number) for k in range(count)])
        await trio.sleep(ROUND / 2 / len(nodes))
    await trio.sleep(ROUND / 2)


def fresh(node: RolloutNode, since: int) -> Counter[str]:
    """Groups made since then that a node holds, by author."""
    return Counter(kept.signed.author for kept in node.rollouts.pool if kept.signed.packed.made_at >= since)


def test_twenty_nodes_all_hear_of_enough_groups_of_enough_authors_each_round() -> None:
    async def main(nursery: trio.Nursery) -> None:
        nodes = await start(nursery, SimWorld(latency=0.05), 20)
        await connect(ring_and_chords(nodes, DEGREE, random.Random(1)))
        await trio.sleep(3)
        for number in range(4):
            await one_round(nodes, number)
            for node in nodes:
                drawn = node.rollouts.pool.candidates(ENOUGH, random.Random(number))
                node.rollouts.pool.used(each.id for each in drawn)
                assert len(drawn) >= ENOUGH - 4 * (number == 0) and len({each.author for each in drawn}) >= 4
        assert not any(node.rollouts.violations.totals.total() for node in nodes)

    run_with_nursery(main)


def bytes_per_node(count: int) -> float:
    """That a node receives in a round of a swarm of `count`."""
    found: list[float] = []

    async def main(nursery: trio.Nursery) -> None:
        nodes = await start(nursery, SimWorld(latency=0.05), count, verify=lambda *_: True)
        await connect(ring_and_chords(nodes, DEGREE, random.Random(count)))
        await trio.sleep(3)
        await one_round(nodes, 0)
        before = sum(node.network.bytes_in for node in nodes)
        await one_round(nodes, 1)
        found.append((sum(node.network.bytes_in for node in nodes) - before) / count)

    run_with_nursery(main)
    return found[0]


@pytest.mark.thorough
@pytest.mark.slow
def test_what_a_node_receives_does_not_grow_with_the_swarm() -> None:
    few, many = bytes_per_node(16), bytes_per_node(64)
    assert 0.92 < many / few < 1.08


def test_a_peer_that_makes_nine_tenths_of_the_traffic_has_its_share_and_no_more() -> None:
    async def main(nursery: trio.Nursery) -> None:
        author = Rates(groups=Allowance(2, 64), bytes=Allowance(10_000, 3 << 20))
        limits = RolloutLimits(author=author, pool=PoolLimits(share=0.25, few=4))
        nodes = await start(nursery, SimWorld(latency=0.05), 12, limits=limits)
        flooder, honest = nodes[0], nodes[1:]
        await connect(everybody(nodes))
        await trio.sleep(3)
        made = 0
        for number in range(3):
            count = 9 * PUBLISHED * len(honest)
            made += count
            await flooder.rollouts.publish([group(10**7 + number * count + k) for k in range(count)])
            await one_round(honest, number)
        for node in honest:
            stats = {each.author: each for each in node.rollouts.pool.by_author()}
            assert stats[flooder.me].groups <= max(4, 0.25 * len(node.rollouts.pool))
            assert stats[flooder.me].came < made / 4
            drawn = Counter(each.author for each in node.rollouts.pool.candidates(22, random.Random(1)))
            assert drawn[flooder.me] <= 3  # eleven others take turns
            assert sum(stats[other.me].groups > 0 for other in honest if other is not node) >= 9

    run_with_nursery(main)


def test_a_swarm_that_was_cut_in_two_shares_on_each_side_and_is_one_when_it_heals() -> None:
    async def main(nursery: trio.Nursery) -> None:
        world = SimWorld(latency=0.05)
        nodes = await start(nursery, world, 12)
        await connect(everybody(nodes))
        await trio.sleep(3)
        await one_round(nodes, 0)
        left, right = nodes[:4], nodes[4:]
        world.partition([[node.me for node in side] for side in (left, right)])
        await trio.sleep(20)  # connections across the cut break
        began = now()
        await one_round(nodes, 1)
        for side, other in ((left, right), (right, left)):
            for node in side:
                heard = fresh(node, began)
                assert heard.total() >= ENOUGH and not {each.me for each in other} & heard.keys()
        world.heal()
        await connect(everybody(nodes))
        began = now()
        await one_round(nodes, 2)
        for side, other in ((left, right), (right, left)):
            assert all({each.me for each in other} & fresh(node, began).keys() for node in side)

    run_with_nursery(main)


def test_who_was_away_has_enough_to_learn_from_seconds_after_it_is_back() -> None:
    async def main(nursery: trio.Nursery) -> None:
        world = SimWorld(latency=0.05)
        nodes = await start(nursery, world, 10)
        away, others = nodes[0], nodes[1:]
        await connect(everybody(nodes))
        await trio.sleep(3)
        world.partition([[away.me]])
        await trio.sleep(20)
        assert away.rollouts.stats()["alone"]
        await one_round(nodes, 0)
        await one_round(nodes, 1)
        assert len(away.rollouts.pool) == 0 and len(away.rollouts.pool.own()) == 2 * PUBLISHED
        world.heal()
        await connect([(away, node) for node in others])
        await trio.sleep(3)
        assert len(away.rollouts.pool) >= ENOUGH
        await trio.sleep(10)
        heard = sum(any(kept.signed.author == away.me for kept in node.rollouts.pool) for node in others)
        assert heard >= 7  # what it made while it was alone

    run_with_nursery(main)
