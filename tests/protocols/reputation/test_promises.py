"""Promises of shards: what is kept is told, and what is broken counts."""

from __future__ import annotations

from collections.abc import Callable

import trio
from shardnodes import CONTENT, SHARD, Nodes, falsehood

from swarmnode.protocols.frames import frame
from swarmnode.protocols.network import Stream
from swarmnode.protocols.reputation import observations
from swarmnode.protocols.reputation.attestation import Finding, Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.observations import PromiseChecks, Promises
from swarmnode.protocols.transfer.shard_manifest import CHUNK
from swarmnode.protocols.transfer.shard_wire import Holding, Piece, ShardNotHeld, ShardWant
from swarmnode.protocols.wire import encode

EVIDENCE = SHARD[:16]


def heard(promises: Promises) -> Ledger:
    """A ledger that was told what was counted until now."""
    ledger = Ledger("me", now=lambda: 0)
    promises.tell(ledger)
    return ledger


def told(promises: Promises, peer: str) -> tuple[Finding, ...]:
    return heard(promises).found(peer)


async def nothing(stream: Stream, _want: ShardWant) -> None:
    """It does not have the chunk."""
    await stream.send_all(frame(encode(Piece())))


def test_what_was_counted_is_told_once() -> None:
    promises = Promises()
    for kept in (True, True, False):
        promises.note("a", SHARD, kept)
    assert told(promises, "a") == (Finding(Saw.KEPT, 2, 1, EVIDENCE),)
    assert told(promises, "a") == ()


def test_a_fetch_says_of_each_provider_that_sent_something_that_it_kept_its_promise(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        a, b = await swarm.start("a", holds=CONTENT), await swarm.start("b", holds=CONTENT)
        me = await swarm.start("me", promises=promises)
        await me.shards.fetch(SHARD, providers=[a.me, b.me])
        await trio.sleep(1)
        ledger = heard(promises)
        assert ledger.found(a.me) == ledger.found(b.me) == (Finding(Saw.KEPT, 1, 0, EVIDENCE),)

    nodes(main)


def test_who_says_to_have_a_shard_and_sends_nothing_of_it_breaks_a_promise(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        honest = await swarm.start("a", holds=CONTENT)
        empty = await swarm.liar("b", nothing)
        me = await swarm.start("me", promises=promises)
        await me.shards.fetch(SHARD, providers=[honest.me, empty.me])
        await trio.sleep(60)
        assert told(promises, empty.me) == (Finding(Saw.KEPT, 0, 1, EVIDENCE),)

    nodes(main)


def test_who_drops_a_shard_while_it_is_fetched_breaks_no_promise(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        honest, forgets = await swarm.start("a", holds=CONTENT), await swarm.start("b", holds=CONTENT)
        asked = []

        def read_now(shard: bytes, index: int, room: memoryview) -> int:
            asked.append(index)
            if len(asked) == 2:
                swarm._nursery.start_soon(forgets.shards.drop, SHARD)
            return 0

        def read(shard: bytes, index: int, room: memoryview) -> int:
            raise ShardNotHeld("it is gone")

        forgets.store.read_now, forgets.store.read = read_now, read  # type: ignore[method-assign]
        me = await swarm.start("me", promises=promises)
        await me.shards.fetch(SHARD, providers=[honest.me, forgets.me])
        await trio.sleep(60)
        assert len(asked) >= 2 and not told(promises, forgets.me)

    nodes(main, latency=0.05)


def test_a_promise_is_tested_with_one_chunk_that_its_hash_ties_to_the_shard(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        honest, me = await swarm.start("a", holds=CONTENT), await swarm.start("me", holds=CONTENT)
        await me.network.connect(honest.me)
        checks = PromiseChecks(me.shards, me.store, promises, seed=1)
        swarm._nursery.start_soon(checks.run)
        await trio.sleep(10 * observations.EVERY)
        ((saw, good, bad),) = [(one.saw, one.good, one.bad) for one in told(promises, honest.me)]
        assert saw is Saw.KEPT and 6 <= good <= 20 and not bad
        assert honest.shards.counts["bytes_served"] <= good * CHUNK

    nodes(main)


def test_a_promise_is_tested_though_the_own_files_of_the_shard_are_lost(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        honest, me = await swarm.start("a", holds=CONTENT), await swarm.start("me", holds=CONTENT)
        await me.network.connect(honest.me)
        for file in me.store.folder.iterdir():
            file.unlink()
        me.store._trees.pop(SHARD, None)
        await PromiseChecks(me.shards, me.store, promises, seed=1).test_one()
        assert told(promises, honest.me) == (Finding(Saw.KEPT, 1, 0, EVIDENCE),)

    nodes(main)


def test_tests_find_who_lies_about_having_it_and_spare_who_says_that_it_is_gone(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        me = await swarm.start("me", holds=CONTENT)
        liars = [await swarm.liar("b", nothing), await swarm.liar("c", falsehood)]
        gone = await swarm.start("d", holds=CONTENT)
        for peer in (*(liar.me for liar in liars), gone.me):
            await me.network.connect(peer)
        checks = PromiseChecks(me.shards, me.store, promises, seed=1)
        asked = me.shards.read

        async def read(peer: str, shard: bytes, index: int) -> bytes:
            if peer == gone.me:
                await gone.shards.drop(SHARD)  # between what it said and what it is asked for
            return await asked(peer, shard, index)

        me.shards.read = read  # type: ignore[method-assign]
        for _ in range(12):
            await checks.test_one()
        ledger = heard(promises)
        for liar in liars:
            (finding,) = ledger.found(liar.me)
            assert (finding.saw, finding.good) == (Saw.KEPT, 0) and finding.bad >= 1
        assert not ledger.found(gone.me)

    nodes(main)


def test_a_node_without_shards_and_one_whose_shards_nobody_has_test_nothing(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        promises = Promises()
        for name, holds in (("me", None), ("alone", CONTENT)):
            node = await swarm.start(name, holds=holds)
            await PromiseChecks(node.shards, node.store, promises).test_one()
            assert node.store.recent(1) == (() if holds is None else (SHARD,))
        half = Holding(len(CONTENT), False, b"\x01")
        await node.network.connect((await swarm.liar("half", nothing, holding=half)).me)
        await PromiseChecks(node.shards, node.store, promises).test_one()
        assert not heard(promises).accounts()

    nodes(main)
