"""Who hears of whom that has a shard, or will have it soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio
from shardnodes import CHUNKS, CONTENT, SHARD, Nodes, is_whole

from swarmnode.protocols.transfer.shard_fetch import Askers
from swarmnode.protocols.transfer.shard_manifest import ShardId
from swarmnode.protocols.transfer.shard_wire import ShardLimits


def test_a_node_that_announces_no_more_fetches_on(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        node = await swarm.start("b", holds=b"all that it may announce", limits=ShardLimits(announced=1))
        await node.shards.fetch(SHARD, providers=[source.me])
        assert is_whole(node)

    nodes(main)


def test_what_lives_briefly_is_served_to_the_connected_announced_by_nobody_and_dropped(
    nodes: Callable[..., None], tmp_path: Path
) -> None:
    async def main(swarm: Nodes) -> None:
        (tmp_path / "weights").write_bytes(CONTENT)
        source, first = await swarm.start("a"), await swarm.start("b")
        assert await source.shards.put(tmp_path / "weights", announce=False) == SHARD
        await first.network.connect(source.me)
        await first.shards.fetch(SHARD, providers=[source.me], announce=False)
        assert await first.shards.content(SHARD) == CONTENT
        await trio.sleep(1)
        assert await first.network.find_providers(SHARD) == ()
        await first.shards.drop(SHARD)
        assert not is_whole(first) and is_whole(source)

    nodes(main)


def test_those_who_fetch_together_serve_one_another(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        takers = [await swarm.start("taker" + "r" * number) for number in range(3)]
        for taker in takers:
            for other in (source, *takers):
                if other is not taker:
                    await taker.network.connect(other.me)
            swarm.world.link(source.me, taker.me, bandwidth=5e5)
        async with trio.open_nursery() as fetching:
            for taker in takers:
                fetching.start_soon(taker.shards.fetch, SHARD)
        assert all(map(is_whole, takers))
        assert source.shards.counts["chunks_served"] < 2 * CHUNKS  # alone it would be three times
        assert sum(taker.shards.counts["chunks_served"] for taker in takers) > CHUNKS

    nodes(main)


def test_what_was_put_last_is_announced_and_what_is_dropped_no_more(nodes: Callable[..., None], tmp_path: Path) -> None:
    async def main(swarm: Nodes) -> None:
        node = await swarm.start("a", holds=CONTENT, limits=ShardLimits(announced=1))
        other = await swarm.start("b")

        async def put(name: str) -> ShardId:
            (tmp_path / name).write_bytes(name.encode())
            shard = await node.shards.put(tmp_path / name)
            await trio.sleep(1)
            return shard

        async def announced(*shards: ShardId) -> list[ShardId]:
            return [shard for shard in shards if await other.network.find_providers(shard) == (node.me,)]

        assert await announced(SHARD) == [SHARD]
        later = await put("later")
        assert await announced(SHARD, later) == [later]
        node.store.pin(later, True)
        await node.shards.drop(later)
        assert await announced(later) == [later], "it is here still"
        node.store.pin(later, False)
        await node.shards.drop(later)
        assert await announced(SHARD, later) == []
        last = await put("last")
        assert await announced(SHARD, later, last) == [last]
        node.store.collect(unpinned=True)  # as by `swarmnode shards gc --unpinned`
        node.shards.withdraw_lost()
        await trio.sleep(1)
        assert await announced(last) == []

    nodes(main)


def test_who_asks_for_many_shards_displaces_nobody_who_asks_for_one() -> None:
    async def main() -> None:
        askers = Askers()
        askers.note(SHARD, "honest")
        for number in range(5000):
            askers.note(number.to_bytes(32, "big"), "flooder")
        assert askers.of(SHARD) == ("honest",) and askers.of((4999).to_bytes(32, "big")) == ("flooder",)
        askers.note(SHARD, "flooder")
        assert set(askers.of(SHARD)) == {"honest", "flooder"}

    trio.run(main)
