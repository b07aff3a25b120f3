"""What shards promise to those who fetch, those who serve, and those who attack either."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
from shardnodes import (
    CHUNKS,
    CONTENT,
    MANIFEST_OF_CONTENT,
    SHARD,
    Answer,
    Node,
    Nodes,
    chunk,
    falsehood,
    is_whole,
    truth,
)

from swarmnode.node.storage.shardstore import Unreadable
from swarmnode.protocols.calls.rpc import Refused, Rpc
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import PeerId, Stream, StreamBroken
from swarmnode.protocols.runner import T, inline
from swarmnode.protocols.transfer.channels import MAX_MESSAGE
from swarmnode.protocols.transfer.shard_manifest import CHUNK, MAX_SIZE, ShardManifest, parse_id
from swarmnode.protocols.transfer.shard_plan import Plan, Source
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    PROTOCOL,
    RUN,
    RUN_BYTES,
    Have,
    Holding,
    Holdings,
    NoRoom,
    Piece,
    ShardLimits,
    ShardWant,
    Unavailable,
)
from swarmnode.protocols.wire import decode, encode
from swarmnode.testing.simnet import SimNetwork

# -- manifests


def test_a_chunk_fits_at_its_place_in_its_shard_and_nowhere_else() -> None:
    manifest, last = MANIFEST_OF_CONTENT, chunk(CHUNKS - 1)
    assert manifest.fit(0, chunk(0)) and manifest.fit(CHUNKS - 1, last)
    assert not manifest.fit(1, chunk(0)) and not manifest.fit(-1, last) and not manifest.fit(CHUNKS, last)
    assert not manifest.fit(0, chunk(0)[:-1]) and not manifest.fit(CHUNKS - 1, last[:-1])
    assert not manifest.fit(CHUNKS - 1, bytes([last[0] ^ 1]) + last[1:])
    both = memoryview(chunk(3, 2))
    assert manifest.fit(3, both) and not manifest.fit(4, both) and not manifest.fit(3, both[:0])


def test_an_id_fixes_size_and_bytes() -> None:
    contents = (b"", b"\0", b"\0\0", b"a", bytes(CHUNK), bytes(CHUNK + 1))
    assert len({ShardManifest.of(content).id for content in contents}) == 6
    assert ShardManifest.of(b"shard").id.hex() == "75294fd1207eb89b4dfbd493906e8368b848d961e6af3cbf5e9a7b7d9908b912"
    assert parse_id(SHARD.hex().upper()) == SHARD
    for wrong in ("", "ab", SHARD.hex() + "0", "g" * 64, " " * 64, "é" * 64):
        with pytest.raises(ValueError):
            parse_id(wrong)
    for size, leaves in ((-1, b""), (1, b""), (CHUNK + 1, bytes(32)), (MAX_SIZE + 1, b""), (0, bytes(32))):
        with pytest.raises(ValueError):
            ShardManifest(size, leaves)


# -- fetching


def test_a_shard_comes_from_several_providers_at_once(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        providers = [await swarm.start(name, holds=CONTENT) for name in ("a", "b", "c")]
        me = await swarm.start("me")
        seen: list[tuple[int, int]] = []
        began = trio.current_time()
        await me.shards.fetch(SHARD, progress=lambda done, size: seen.append((done, size)))
        took = trio.current_time() - began
        assert is_whole(me)
        assert seen == sorted(seen) and seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
        served = [node.shards.counts["chunks_served"] for node in providers]
        assert min(served) >= 8
        assert sum(served) <= CHUNKS + 6
        assert took < 2.2 * len(CONTENT) / 3e6 + 1  # 1 MB/s each

    nodes(main, bandwidth=1e6)


@pytest.mark.parametrize("bandwidth, fewest, most", [(5e7, 0, 15), (5e5, CHUNKS, CHUNKS)])
def test_a_fast_provider_is_asked_for_several_chunks_at_once_and_a_slow_one_for_single_ones(
    nodes: Callable[..., None], bandwidth: float, fewest: int, most: int
) -> None:
    counts: list[int] = []

    async def answer(stream: Stream, want: ShardWant) -> None:
        counts.append(want.count)
        await truth(stream, want)

    async def main(swarm: Nodes) -> None:
        source = await swarm.liar("source", answer)
        me = await swarm.start("me")
        await me.shards.fetch(SHARD, providers=[source.me])
        assert is_whole(me) and sum(counts) == CHUNKS
        assert fewest <= len(counts) <= most

    nodes(main, bandwidth=bandwidth)


def test_the_rarest_chunks_are_asked_for_first_and_what_is_lacking_never_again(nodes: Callable[..., None]) -> None:
    async def main(_: Nodes) -> None:
        limits = ShardLimits(window=(8, 8), answer=1.0)
        everything = (1 << CHUNKS) - 1
        plan = Plan(MANIFEST_OF_CONTENT, everything & ~0b11111111, seed=1)  # the first eight are missing
        common, rare = (Source(name, plan.chunks_of(Holding()), limits) for name in ("common", "rare"))
        common.has[[0, 1, 2, 3, 4, 6]] = rare.has[:8] = True
        for source in (common, rare):
            plan.add(source)
            source.pace.observe(0.01)
        asked = plan.next_for(rare, now=0.0)
        assert {run.start for run in asked[:2]} == {5, 7} and [len(run) for run in asked[:2]] == [1, 1]
        assert range(4) in asked and sum(map(len, asked)) == 8
        assert plan.next_for(common, now=0.0) == []
        while rare.asked:
            plan.answered(rare, 0)
        assert plan.next_for(rare, now=0.0) == [range(1, 4)]
        assert range(1) in plan.next_for(common, now=0.0)

    nodes(main)


def test_a_fetch_is_over_only_when_all_is_written(nodes: Callable[..., None]) -> None:
    async def slow(work: Callable[[], T]) -> T:
        await trio.sleep(1)
        return work()

    async def main(swarm: Nodes) -> None:
        for name in ("a", "b", "c"):
            await swarm.start(name, holds=CONTENT)
        me = await swarm.start("me", runner=slow)
        finish, written = me.store.finish, []

        def noted(shard: bytes) -> None:
            written.append(me.store.holding(shard).bits().bit_count())
            finish(shard)

        me.store.finish = noted  # type: ignore[method-assign]
        await me.shards.fetch(SHARD)
        assert written == [CHUNKS] and is_whole(me)

    nodes(main)


def test_a_slow_disk_slows_the_fetch_and_loses_nothing(nodes: Callable[..., None]) -> None:
    async def slow(work: Callable[[], T]) -> T:
        await trio.sleep(0.5)
        return await inline(work)

    async def main(swarm: Nodes) -> None:
        for name in ("a", "b", "c"):
            await swarm.start(name, holds=CONTENT)
        me = await swarm.start("me", runner=slow)
        seen: list[int] = []

        def progress(done: int, _: int) -> None:
            held = me.store.holding(SHARD).bits().bit_count() * CHUNK
            assert done - held <= 8 * RUN_BYTES  # what is verified and not yet written
            seen.append(done)

        await me.shards.fetch(SHARD, progress=progress)
        assert is_whole(me) and seen[-1] == len(CONTENT)

    nodes(main)


def test_what_was_fetched_is_served_onwards(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        first = await swarm.start("b")
        await first.shards.fetch(SHARD, providers=[source.me])
        await trio.sleep(1)
        source.scope.cancel()
        second = await swarm.start("c")
        await second.shards.fetch(SHARD)  # found by its announcement
        assert is_whole(second)
        assert [p.peer for p in await second.shards.providers(SHARD)] == [first.me]

    nodes(main)


def test_several_callers_share_one_fetch_and_the_last_to_leave_ends_it(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me")
        await me.network.connect(source.me)

        async def impatient() -> None:
            with trio.move_on_after(3):
                await me.shards.fetch(SHARD)

        async with trio.open_nursery() as fetching:
            for _ in range(3):
                fetching.start_soon(impatient)
        assert not is_whole(me)
        held = me.store.holding(SHARD)
        assert 0 < held.bits().bit_count() < CHUNKS
        before = source.shards.counts["chunks_served"]
        await trio.sleep(30)
        assert source.shards.counts["chunks_served"] <= before + 2
        async with trio.open_nursery() as fetching:
            for _ in range(3):
                fetching.start_soon(me.shards.fetch, SHARD)
        assert is_whole(me)
        assert source.shards.counts["chunks_served"] <= CHUNKS + 4

    nodes(main, bandwidth=1e6)


def test_sizes_that_one_caller_was_told_wrongly_stop_no_other(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me")
        misled: list[Exception] = []

        async def mislead() -> None:
            try:
                await me.shards.fetch(SHARD, providers=[source.me], sizes=range(1))
            except Unavailable as error:
                misled.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(mislead)
            await trio.testing.wait_all_tasks_blocked()
            await me.shards.fetch(SHARD, providers=[source.me])
        assert is_whole(me) and len(misled) == 1

    nodes(main)


def test_a_fetch_goes_on_after_a_restart(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me")
        with trio.move_on_after(5):
            await me.shards.fetch(SHARD, providers=[source.me])
        me.scope.cancel()
        await trio.sleep(1)
        held = me.store.holding(SHARD).bits().bit_count()
        assert 8 < held < CHUNKS
        again = await swarm.start("me")
        assert not again.store.holding(SHARD).bits()  # believes nothing before it has hashed it
        seen: list[int] = []
        await again.shards.fetch(SHARD, providers=[source.me], progress=lambda done, _: seen.append(done))
        assert is_whole(again)
        assert -(-seen[0] // CHUNK) == held
        assert again.shards.counts["chunks_fetched"] == CHUNKS - held

    nodes(main, bandwidth=1e6)


def test_a_fetch_ends_where_all_who_had_the_shard_let_go_of_it(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        sources = [await swarm.start(name, holds=CONTENT) for name in ("a", "b")]
        me = await swarm.start("me", limits=ShardLimits(patience=10.0))

        def progress(done: int, size: int) -> None:
            if size - done < 6 * CHUNK:
                for source in sources:
                    source.store.drop(SHARD)

        with trio.fail_after(60), pytest.raises(Unavailable, match="nobody who can be reached has the rest"):
            await me.shards.fetch(SHARD, progress=progress)

    nodes(main, bandwidth=1e6)


def test_a_state_whose_only_source_was_silent_is_asked_for_again(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source, me = await swarm.start("a"), await swarm.start("me")
        manifest = ShardManifest.of(CONTENT)
        source.shards.memory.offer(manifest, memoryview(CONTENT))
        me.shards.memory.expect(manifest.id, memoryview(bytearray(len(CONTENT))))
        frozen = False

        def progress(done: int, size: int) -> None:
            nonlocal frozen
            if not frozen and done > size // 2:
                frozen = True
                swarm.world.freeze(source.me)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(me.shards.fetch, manifest.id, providers=[source.me], progress=progress))
            while not frozen:  # noqa: ASYNC110 (there is no event)
                await trio.sleep(0.1)
            await trio.sleep(24)
            swarm.world.thaw(source.me)
        assert bytes(me.shards.memory.content(manifest.id)) == CONTENT

    nodes(main, bandwidth=1e6)


def test_empty_and_small_shards_travel_too(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        me = await swarm.start("me")
        for number, content in enumerate((b"", b"x", bytes(CHUNK))):
            source = await swarm.start(f"source {number}", holds=content)
            shard = ShardManifest.of(content).id
            await me.shards.fetch(shard, providers=[source.me])
            assert me.store.path(shard).read_bytes() == content

    nodes(main)


def test_one_chunk_can_be_read_alone(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me")
        for index in (0, 17, CHUNKS - 1):
            assert await me.shards.read(source.me, SHARD, index) == chunk(index)
        for index in (CHUNKS, 1 << 13):
            with pytest.raises(Unavailable):
                await me.shards.read(source.me, SHARD, index)

        liar = await swarm.liar("liar", falsehood)
        with pytest.raises(Unavailable):
            await me.shards.read(liar.me, SHARD, 3)
        assert me.shards.violations.count(liar.me) == 1
        assert me.store.kept() == ()

    nodes(main)


def test_of_chunks_asked_for_in_a_row_those_that_are_here_come(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        half = await swarm.start("half")
        half.store.begin(MANIFEST_OF_CONTENT)
        half.store.write(SHARD, [(5, memoryview(chunk(5, 2)))])
        stream = await swarm.world.node("hub").open_stream(half.me, PROTOCOL)
        reader = FrameReader(stream, limit=MAX_MESSAGE)
        for first, count in ((5, 2), (6, 1), (4, 0)):
            await stream.send_all(frame(encode(ShardWant(SHARD, first, count=RUN))))
            raw = await reader.frame()
            assert raw is not None and decode(Piece, raw).size == (count * CHUNK or -1)
            got = memoryview(bytearray(count * CHUNK))
            assert await reader.fill(got) and got == chunk(first, count)

    nodes(main)


# -- providers that fail


def fetch_beside(nodes: Callable[..., None], bad: Answer, check: Callable[[Node, SimNetwork], None]) -> None:
    """ShardFetch from an honest provider and one that answers as `bad`; then `check(me, bad one)`."""

    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        liar = await swarm.liar("liar", bad)
        me = await swarm.start("me")
        await me.network.connect(liar.me)
        with trio.fail_after(60):
            await me.shards.fetch(SHARD, providers=[source.me])
        assert is_whole(me)
        check(me, liar)

    nodes(main, bandwidth=1e6)


def test_a_provider_of_wrong_bytes_is_dropped_and_counted(nodes: Callable[..., None]) -> None:
    def check(me: Node, liar: SimNetwork) -> None:
        assert me.shards.violations.count(liar.me) == 1
        assert me.shards.counts["lies"] == 1

    fetch_beside(nodes, falsehood, check)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK + 1, 1 << 40, -2])
def test_a_provider_of_wrong_sizes_is_dropped_and_no_memory_taken(nodes: Callable[..., None], size: int) -> None:
    async def answer(stream: Stream, want: ShardWant) -> None:
        await stream.send_all(frame(encode(Piece(size))) + bytes(min(max(size, 0), CHUNK)))

    def check(me: Node, liar: SimNetwork) -> None:
        assert me.shards.violations.count(liar.me) == (size >= 0)

    fetch_beside(nodes, answer, check)


def test_a_provider_of_rubbish_is_dropped(nodes: Callable[..., None]) -> None:
    async def answer(stream: Stream, want: ShardWant) -> None:
        await stream.send_all(b"\xff" * 100)

    fetch_beside(nodes, answer, lambda me, liar: None if me.shards.violations.count(liar.me) == 1 else pytest.fail())


def test_one_byte_a_second_delays_nobody(nodes: Callable[..., None]) -> None:
    async def answer(stream: Stream, want: ShardWant) -> None:
        await stream.send_all(frame(encode(Piece(len(chunk(want.index))))))
        for byte in chunk(want.index):
            await trio.sleep(1)
            await stream.send_all(bytes([byte]))

    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        slow = await swarm.liar("slow", answer)
        me = await swarm.start("me")
        await me.network.connect(slow.me)
        began = trio.current_time()
        await me.shards.fetch(SHARD, providers=[source.me])
        assert trio.current_time() - began < 1.3 * len(CONTENT) / 1e6 + 1
        assert is_whole(me)

    nodes(main, bandwidth=1e6)


def test_a_lone_provider_of_one_byte_a_second_is_given_up(nodes: Callable[..., None]) -> None:
    async def answer(stream: Stream, want: ShardWant) -> None:
        await stream.send_all(frame(encode(Piece(len(chunk(want.index))))))
        while True:
            await trio.sleep(1)
            await stream.send_all(b"x")

    async def main(swarm: Nodes) -> None:
        slow = await swarm.liar("slow", answer)
        me = await swarm.start("me")
        began = trio.current_time()
        with pytest.raises(Unavailable, match="0 of 41 chunks"):
            await me.shards.fetch(SHARD, providers=[slow.me])
        assert trio.current_time() - began < 120

    nodes(main)


def test_a_provider_that_hangs_up_is_asked_again_in_a_while_only(nodes: Callable[..., None]) -> None:
    asked = 0

    async def hang_up(stream: Stream, want: ShardWant) -> None:
        nonlocal asked
        asked += 1
        await stream.aclose()

    async def main(swarm: Nodes) -> None:
        liar = await swarm.liar("liar", hang_up)
        me = await swarm.start("me")
        with trio.move_on_after(20):
            await me.shards.fetch(SHARD, providers=[liar.me])
        assert 2 <= asked <= 20

    nodes(main)


def test_a_fetch_that_goes_on_from_much_waits_until_that_was_looked_at(nodes: Callable[..., None]) -> None:
    begun: list[ShardManifest] = []

    async def runner(work: Callable[[], T]) -> T:
        before = len(begun)
        result = await inline(work)
        if len(begun) > before:
            await trio.sleep(40)
        return result

    async def main(swarm: Nodes) -> None:
        await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me", runner=runner)
        begin = me.store.begin

        def looks(manifest: ShardManifest) -> Any:
            begun.append(manifest)
            return begin(manifest)

        me.store.begin = looks  # type: ignore[method-assign]
        await me.shards.fetch(SHARD)
        assert is_whole(me) and begun

    nodes(main)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_provider_that_dies_or_freezes_loses_its_chunks_to_others(nodes: Callable[..., None], how: str) -> None:
    async def main(swarm: Nodes) -> None:
        providers = [await swarm.start(name, holds=CONTENT) for name in ("a", "b", "c")]
        me = await swarm.start("me")
        began = trio.current_time()

        async def strike() -> None:
            await trio.sleep(1.5)
            assert 0 < me.store.holding(SHARD).bits().bit_count() < CHUNKS
            getattr(swarm.world, how)(providers[0].me)

        async with trio.open_nursery() as fetching:
            fetching.start_soon(strike)
            await me.shards.fetch(SHARD)
        assert is_whole(me)
        assert trio.current_time() - began < len(CONTENT) / 2e6 + 1  # its silence is not waited out

    nodes(main, bandwidth=1e6)


def test_providers_that_go_while_the_disk_is_behind_take_no_chunk_with_them(nodes: Callable[..., None]) -> None:
    async def slow(work: Callable[[], T]) -> T:
        await trio.sleep(0.5)
        return await inline(work)

    async def main(swarm: Nodes) -> None:
        given = Counter[Stream]()

        async def answer(stream: Stream, want: ShardWant) -> None:
            await truth(stream, want)
            given[stream] += 1
            if given[stream] == 3:
                await stream.aclose()  # what was sent still arrives

        lost = [await swarm.liar(name, answer) for name in "abcde"]
        source = await swarm.start("source", holds=CONTENT)
        me = await swarm.start("me", runner=slow)
        with trio.fail_after(120):
            await me.shards.fetch(SHARD, providers=[source.me, *(peer.me for peer in lost)])
        assert is_whole(me)

    nodes(main)


def test_broken_promises_are_borne_for_a_while_only(nodes: Callable[..., None]) -> None:
    asked: list[int] = []

    async def has_not(stream: Stream, want: ShardWant) -> None:
        asked.append(want.index)
        await stream.send_all(frame(encode(Piece())))

    fetch_beside(nodes, has_not, lambda me, liar: None)
    assert 0 < len(asked) <= 3 * 10  # eight and what was under way, each time it was tried


def test_a_manifest_of_another_shard_is_a_lie(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        other = SHARD[:-1] + bytes([SHARD[-1] ^ 1])
        liar = await swarm.liar("liar", truth)
        me = await swarm.start("me")
        with pytest.raises(Unavailable):
            await me.shards.fetch(other, providers=[liar.me])
        assert me.shards.violations.count(liar.me) == 1
        assert me.store.kept() == ()

    nodes(main)


@pytest.mark.parametrize("size, chunks", [(1 << 60, b""), (-5, b""), (len(CONTENT), bytes(100)), (5 * CHUNK, b"\x1f")])
def test_impossible_holdings_harm_nothing(nodes: Callable[..., None], size: int, chunks: bytes) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        liar = await swarm.liar("liar", truth, holding=Holding(size, False, chunks))
        me = await swarm.start("me")
        await me.network.connect(liar.me)
        await me.shards.fetch(SHARD, providers=[source.me])
        assert is_whole(me)
        assert me.shards.violations.count(liar.me) >= 1

    nodes(main, bandwidth=1e6)


def test_nobody_has_it(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        other = await swarm.start("a")
        me = await swarm.start("me")
        await me.network.connect(other.me)
        began = trio.current_time()
        with pytest.raises(Unavailable, match="nobody"):
            await me.shards.fetch(SHARD)
        assert trio.current_time() - began < 45
        late = trio.current_time() + 10

        async def come_late() -> None:
            await trio.sleep_until(late)
            await swarm.start("late", holds=CONTENT)

        async with trio.open_nursery() as waiting:
            waiting.start_soon(come_late)
            await me.shards.fetch(SHARD)
        assert is_whole(me)

    nodes(main)


def test_a_shard_over_the_cap_is_refused_before_a_chunk_comes(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        source = await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me", cap=len(CONTENT) - 1)
        with pytest.raises(NoRoom):
            await me.shards.fetch(SHARD, providers=[source.me])
        assert source.shards.counts["chunks_served"] == 0
        assert me.store.used == 0

    nodes(main)


# -- those who ask


def test_asking_in_vain_a_hundred_thousand_times_is_bounded_and_counted(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        server = await swarm.start("a", holds=CONTENT)
        attacker = swarm.world.node("attacker")
        rpc = Rpc(attacker)
        async with trio.open_nursery() as nursery:
            await nursery.start(attacker.run)
            await nursery.start(rpc.run)
            draw = random.Random(3)
            refused = 0
            for _ in range(100_000 // 64):
                ids = tuple(draw.randbytes(32) for _ in range(64))
                try:
                    assert await rpc.call(server.me, HAVE, Have(ids), Holdings, timeout=5) == Holdings(
                        (Holding(),) * 64
                    )
                except Refused as refusal:
                    assert refusal.code == "busy"
                    refused += 1
            assert refused > 1000
            assert server.shards.violations.count(attacker.me) == refused
            assert server.shards.counts["misses"] == 64 * (100_000 // 64)
            stream = await attacker.open_stream(server.me, PROTOCOL)
            with pytest.raises(StreamBroken):
                for _ in range(10_000):
                    await stream.send_all(frame(encode(ShardWant(draw.randbytes(32), 0))))
                    await stream.receive_some(100)
            nursery.cancel_scope.cancel()
        honest = await swarm.start("honest")
        await honest.shards.fetch(SHARD, providers=[server.me])  # others notice nothing
        assert is_whole(honest)

    nodes(main, latency=0.0001)


def test_streams_of_one_peer_and_in_all_are_bounded(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        limits = ShardLimits(streams=4, streams_in_all=8)
        server = await swarm.start("a", holds=CONTENT, limits=limits)
        for number in range(5):
            greedy = swarm.world.node(f"greedy {number}")
            swarm._nursery.start_soon(greedy.run)
            await trio.sleep(0.01)
            for _ in range(10):
                await greedy.open_stream(server.me, PROTOCOL)
            await trio.sleep(1)
            assert len(server.shards.server.served) <= 8
            assert server.shards.violations.count(greedy.me) == 6
        me = await swarm.start("me")
        await me.shards.fetch(SHARD, providers=[server.me])  # idle streams make room
        assert is_whole(me)

    nodes(main)


def test_where_not_all_can_be_served_those_of_more_standing_are(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        standing = {"low": 0.25, "fair": 0.6, "good": 0.7, "better": 0.9}
        peers = {name: swarm.world.node(name) for name in standing}

        class Ranked:
            def standing(self, peer: PeerId) -> float:
                return {peers[name].me: standing[name] for name in peers}[peer]

        limits = ShardLimits(streams=1, streams_in_all=2)
        server = await swarm.start("a", holds=CONTENT, limits=limits, standings=Ranked())
        streams = {}
        for name, network in peers.items():
            swarm._nursery.start_soon(network.run)
            await trio.sleep(0.01)
            streams[name] = await network.open_stream(server.me, PROTOCOL)
            for index in range(8):  # and reads nothing: it is being served
                await streams[name].send_all(frame(encode(ShardWant(SHARD, index))))
            await trio.sleep(0.1)
        served = []
        for name, stream in streams.items():
            with trio.move_on_after(1) as waiting, suppress(StreamBroken):
                while await stream.receive_some(CHUNK):
                    pass
            if waiting.cancelled_caught:  # it is neither broken nor at its end
                served.append(name)
        assert served == ["good", "better"]

    nodes(main)


def test_who_does_not_read_loses_the_stream(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        server = await swarm.start("a", holds=CONTENT)
        sleeper = swarm.world.node("sleeper")
        swarm._nursery.start_soon(sleeper.run)
        await trio.sleep(0.01)
        stream = await sleeper.open_stream(server.me, PROTOCOL)
        for index in range(CHUNKS):
            await stream.send_all(frame(encode(ShardWant(SHARD, index))))
        await trio.sleep(40)
        assert not server.shards.server.served
        assert server.shards.counts["chunks_served"] <= 3
        assert not server.shards.violations.count(sleeper.me), "this node's own line may be as slow"

    nodes(main)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 6,
        frame(bytes(50)),
        frame(encode(ShardWant(b"short", 0))),
        frame(encode(ShardWant(SHARD, -1))),
        frame(encode(ShardWant(SHARD, 0, count=0))),
        frame(encode(ShardWant(SHARD, 0, count=RUN + 1))),
    ],
)
def test_malformed_requests_end_their_stream_only(nodes: Callable[..., None], raw: bytes) -> None:
    async def main(swarm: Nodes) -> None:
        server = await swarm.start("a", holds=CONTENT)
        me = await swarm.start("me")
        stream = await me.network.open_stream(server.me, PROTOCOL)
        await stream.send_all(raw)
        with trio.fail_after(10), pytest.raises(StreamBroken):
            while await stream.receive_some(100):
                pass
            raise StreamBroken("ended")
        assert server.shards.violations.count(me.me) == 1
        with pytest.raises(Refused):
            await me.rpc.call(server.me, HAVE, Have((SHARD,) * 65), Holdings, timeout=5)
        assert await me.shards.read(server.me, SHARD, 0) == chunk(0)

    nodes(main)


def test_a_manifest_that_cannot_be_read_here_is_asked_for(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        def failed(shard: bytes) -> ShardManifest:
            raise Unreadable("Input/output error")

        server, me = await swarm.start("a", holds=CONTENT), await swarm.start("me")
        known, me.store.manifest = me.store.manifest, failed  # type: ignore[method-assign]
        await me.shards.fetch(SHARD, providers=[server.me])
        assert await me.shards.read(server.me, SHARD, 1) == chunk(1)
        me.store.manifest = known  # type: ignore[method-assign]
        assert is_whole(me)

    nodes(main)


def test_a_rotten_disk_costs_the_shard_and_not_the_name(nodes: Callable[..., None]) -> None:
    async def main(swarm: Nodes) -> None:
        good = await swarm.start("a", holds=CONTENT)
        rotten = await swarm.start("b", holds=CONTENT)
        rotten.store.path(SHARD).write_bytes(bytes(byte ^ 1 for byte in CONTENT))  # in each chunk
        me = await swarm.start("me")
        await me.shards.fetch(SHARD, providers=[good.me, rotten.me])
        assert is_whole(me)
        assert me.shards.counts["lies"] == 0
        assert not rotten.store.holding(SHARD).complete

    nodes(main)


@pytest.mark.parametrize("turns", range(8))
def test_who_fetches_in_any_turn_of_the_end_is_told_that_nothing_is_fetched(
    nodes: Callable[..., None], turns: int
) -> None:
    async def main(swarm: Nodes) -> None:
        for number in range(10):  # trio draws the order within a turn
            me = await swarm.start(f"me {number}")
            me.scope.cancel()
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            with trio.fail_after(10), pytest.raises(Unavailable):
                await me.shards.fetch(SHARD)

    nodes(main)
