"""What Bulk promises to those who offer and to those who fetch."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import trio
from disconnecting import disconnect

from swarmnode.protocols.frames import frame
from swarmnode.protocols.network import PeerId, Stream, StreamBroken, Unreachable
from swarmnode.protocols.transfer import bulk
from swarmnode.protocols.transfer.bulk import (
    CHUNK,
    PROTOCOL,
    WINDOW,
    Bulk,
    BulkHeader,
    BulkLimits,
    BulkWant,
    Corrupt,
    NotOffered,
    StreamingBuffer,
)
from swarmnode.protocols.wire import encode
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]
CONTENT = random.Random(7).randbytes(2_000_000)
UNEVEN = bytes(round(each) & 0xFF for each in map(random.Random(7).gauss, [128] * 1000, [40] * 1000)) * 2000
DEFAULT = BulkLimits()


async def pair(world: SimWorld, nursery: trio.Nursery, limits: BulkLimits = DEFAULT) -> tuple[Bulk, Bulk, PeerId]:
    """Alice's and Bob's Bulk, and Bob's peer id."""
    made = []
    for name in ("alice", "bob"):
        made.append(Bulk(world.node(name), limits=limits))
        await nursery.start(world.node(name).run)
        await nursery.start(made[-1].run)
    return made[0], made[1], world.node("bob").me


def test_a_fetch_waits_for_the_offer_for_longer_than_one_request_may(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        late = 2.5 * DEFAULT.longest_wait
        began = trio.current_time()

        async def offer_later() -> None:
            await trio.sleep(late)
            bob.offer(("part", 1), b"here")

        nursery.start_soon(offer_later)
        with pytest.raises(NotOffered):
            await alice.fetch(peer, ("part", 1), max_size=10, wait=late - 10.0)
        assert trio.current_time() - began == pytest.approx(late - 10.0, abs=0.1)
        assert await alice.fetch(peer, ("part", 1), max_size=10, wait=float("inf")) == b"here"
        assert trio.current_time() - began == pytest.approx(late, abs=0.1)

    simulated(main)


def test_a_buffer_arrives_whole(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("snapshot", 3), CONTENT)
        seen: list[int] = []
        assert await alice.fetch(peer, ("snapshot", 3), max_size=len(CONTENT), progress=seen.append) == CONTENT
        assert seen == sorted(seen)
        assert seen[-1] == len(CONTENT)
        room = bytearray(len(CONTENT) + 10)
        view = await alice.fetch(peer, ("snapshot", 3), into=memoryview(room), max_size=len(room))
        assert isinstance(view, memoryview)
        assert view == CONTENT
        assert room[len(CONTENT) :] == bytes(10)
        bob.offer(("empty",), b"")
        assert await alice.fetch(peer, ("empty",), max_size=0) == b""

    simulated(main)


def test_a_fetch_waits_for_the_offer(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        began = trio.current_time()

        async def offer_later() -> None:
            await trio.sleep(7)
            bob.offer(("part", 1), b"here")

        nursery.start_soon(offer_later)
        with pytest.raises(NotOffered):
            await alice.fetch(peer, ("part", 1), max_size=10, wait=2)
        assert trio.current_time() - began == pytest.approx(2, abs=0.1)
        assert await alice.fetch(peer, ("part", 1), max_size=10, wait=20) == b"here"
        assert trio.current_time() - began == pytest.approx(7, abs=0.1)

    simulated(main)


def test_only_the_addressees_get_an_offer_and_withdrawn_ones_are_gone(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("a", 1), b"x", to=frozenset({"somebody else"}))
        bob.offer(("a", 2), b"y", to=frozenset({world.node("alice").me}))
        bob.offer(("ab",), b"z")
        with pytest.raises(NotOffered):
            await alice.fetch(peer, ("a", 1), max_size=10)
        assert await alice.fetch(peer, ("a", 2), max_size=10) == b"y"
        bob.withdraw(("a",))
        with pytest.raises(NotOffered):
            await alice.fetch(peer, ("a", 2), max_size=10)
        assert await alice.fetch(peer, ("ab",), max_size=10) == b"z"

    simulated(main)


def test_streams_are_used_again(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)
        opened = []
        open_stream = world.node("alice").open_stream

        async def counting(peer: PeerId, protocol: str, *, timeout: float = 10.0) -> Stream:
            opened.append(protocol)
            return await open_stream(peer, protocol, timeout=timeout)

        world.node("alice").open_stream = counting  # type: ignore[method-assign]
        for _ in range(5):
            await alice.fetch(peer, ("x",), max_size=len(CONTENT))
            with pytest.raises(NotOffered):
                await alice.fetch(peer, ("none",), max_size=1)
        assert len(opened) == 1

        async def fetch() -> None:
            await alice.fetch(peer, ("x",), max_size=len(CONTENT))

        async with trio.open_nursery() as fetching:
            for _ in range(50):
                fetching.start_soon(fetch)
        assert len(opened) == DEFAULT.streams

    simulated(main)


def test_what_is_too_large_is_refused_before_a_byte(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)
        taken: list[int] = []
        for wrong in (
            {"max_size": len(CONTENT) - 1},
            {"max_size": len(CONTENT), "into": memoryview(bytearray(10))},
        ):
            with pytest.raises(Corrupt):
                await alice.fetch(peer, ("x",), progress=taken.append, **wrong)  # type: ignore[arg-type]
        assert not taken
        assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT

    simulated(main)


def test_a_broken_connection_is_resumed_where_it_broke(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)

        async def cut() -> None:
            for _ in range(2):
                await trio.sleep(0.8)
                await disconnect(world.node("alice"), peer)

        nursery.start_soon(cut)
        assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT
        assert world.node("alice").traffic().bytes_in < len(CONTENT) + 4 * CHUNK

    simulated(main, bandwidth=1_000_000)


@pytest.mark.parametrize("same", [True, False])
def test_a_fetch_goes_on_where_what_is_offered_again_has_the_same_name(simulated: Simulated, same: bool) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)

        def offer(name: bytes) -> None:
            whole = StreamingBuffer(CONTENT, name=name)
            whole.grow(whole.size)
            bob.offer(("x",), whole)

        async def again() -> None:
            await trio.sleep(1)
            offer(b"one" if same else b"two")

        offer(b"one")
        nursery.start_soon(again)
        with nullcontext() if same else pytest.raises(Corrupt, match="changed"):
            assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT
        assert world.node("alice").traffic().bytes_in < len(CONTENT) + 4 * CHUNK

    simulated(main, bandwidth=1_000_000)


def test_a_dead_or_frozen_peer_ends_the_fetch_and_a_slow_one_does_not(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)
        began = trio.current_time()
        assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT
        assert trio.current_time() - began > 99  # 2 MB at 20 kB/s

        async def after(seconds: float, happens: Callable[[PeerId], None]) -> None:
            await trio.sleep(seconds)
            happens(peer)

        began = trio.current_time()
        nursery.start_soon(after, 10, world.freeze)
        with pytest.raises(StreamBroken):
            await alice.fetch(peer, ("x",), max_size=len(CONTENT))
        assert 15 <= trio.current_time() - began < 30  # what was in flight at the freeze still took 13 s to arrive
        world.thaw(peer)
        nursery.start_soon(after, 30, world.kill)
        with pytest.raises(Unreachable):
            await alice.fetch(peer, ("x",), max_size=len(CONTENT))

    simulated(main, bandwidth=20_000)


def test_a_withdrawn_buffer_is_not_read_any_more(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        buffer = bytearray(CONTENT)
        bob.offer(("x",), buffer)
        room = bytearray(len(CONTENT))

        async def use_again() -> None:
            await trio.sleep(1)
            bob.withdraw(("x",))
            buffer[:] = bytes(len(buffer))

        nursery.start_soon(use_again)
        with pytest.raises(NotOffered):
            await alice.fetch(peer, ("x",), into=memoryview(room), max_size=len(room))
        kept = max(i for i in range(0, len(room), 1000) if any(room[i : i + 1000])) // CHUNK * CHUNK
        assert kept > CHUNK
        assert room[:kept] == CONTENT[:kept]

    simulated(main, bandwidth=1_000_000)


def test_a_cancelled_fetch_leaves_the_next_one_unharmed(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)
        for _ in range(20):
            with trio.move_on_after(0.3):
                await alice.fetch(peer, ("x",), max_size=len(CONTENT))
        assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT
        assert bob.violations.count(world.node("alice").me) == 0

    simulated(main, bandwidth=1_000_000)


# -- buffers that grow


def test_what_grows_is_handed_on_in_whole_chunks_while_the_rest_is_made(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        made, got = StreamingBuffer(bytearray(CONTENT)), StreamingBuffer(bytearray(len(CONTENT)))
        bob.offer(("x",), made)
        nursery.start_soon(lambda: alice.fetch(peer, ("x",), into=got, max_size=got.size, stall=60.0))
        for ready in (100, CHUNK, 2 * CHUNK + 5, len(CONTENT) - 1):
            made.grow(ready)
            await trio.sleep(10)
            assert got.ready == ready // CHUNK * CHUNK
            assert got.buffer[: got.ready] == CONTENT[: got.ready]
        made.grow(len(CONTENT))
        assert await got.reach(len(CONTENT))
        assert got.buffer == CONTENT

    simulated(main)


def test_what_grows_is_resumed_where_it_broke_and_what_was_handed_on_stays(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        made, got = StreamingBuffer(bytearray(CONTENT)), StreamingBuffer(bytearray(len(CONTENT)))
        bob.offer(("x",), made)
        made.grow(5 * CHUNK + 7)

        async def cut() -> None:
            await trio.sleep(0.8)
            await disconnect(world.node("alice"), peer)
            handed_on = got.ready
            assert handed_on > 0
            got.buffer[:handed_on] = bytes(handed_on)  # as its reader may do: it is not sent again
            made.grow(made.size)
            await got.reach(got.size)
            assert not any(got.buffer[:handed_on])
            assert got.buffer[handed_on:] == CONTENT[handed_on:]

        nursery.start_soon(cut)
        await alice.fetch(peer, ("x",), into=got, max_size=got.size, wait=10.0, stall=60.0)

    simulated(main, bandwidth=1_000_000)


def test_what_grows_under_one_name_is_fetched_on_from_what_is_kept_of_it(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        for kept in (0, 1, 2 * CHUNK + 5, len(CONTENT)):
            made = StreamingBuffer(bytearray(CONTENT), name=b"one")
            made.grow(3 * CHUNK)
            bob.offer(("x", kept), made)
            got = StreamingBuffer(bytearray(len(CONTENT)), name=b"one", kept=kept)
            seen: list[int] = []
            nursery.start_soon(made_whole_after, 5.0, made)
            await alice.fetch(peer, ("x", kept), into=got, max_size=got.size, stall=60.0, progress=seen.append)
            assert got.ready == got.size and got.buffer[kept:] == CONTENT[kept:]
            assert not any(got.buffer[:kept])  # it was not sent again
            assert all(done > kept for done in seen)

    simulated(main)


async def made_whole_after(seconds: float, made: StreamingBuffer) -> None:
    await trio.sleep(seconds)
    made.grow(made.size)


@pytest.mark.parametrize("name", [b"", b"two"])
def test_what_is_kept_of_something_else_is_fetched_anew(simulated: Simulated, name: bytes) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        made = StreamingBuffer(bytearray(CONTENT), name=name)
        made.grow(made.size)
        bob.offer(("x",), made)
        got = StreamingBuffer(bytearray(len(CONTENT)), name=b"one", kept=2 * CHUNK + 5)
        ready: list[int] = []
        async with trio.open_nursery() as both:
            both.start_soon(lambda: alice.fetch(peer, ("x",), into=got, max_size=got.size))
            await got.reach(1)
            ready.append(got.ready)
        assert got.buffer == CONTENT and got.name == name
        assert ready == [CHUNK]  # nobody read what was kept
        assert alice.violations.count(peer) == 0

    simulated(main)


def test_an_offer_that_is_withdrawn_while_it_grows_ends_its_fetches(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        made = StreamingBuffer(bytearray(CONTENT))
        bob.offer(("x",), made)
        made.grow(CHUNK)

        async def withdraw() -> None:
            await trio.sleep(3)
            bob.withdraw(("x",))

        nursery.start_soon(withdraw)
        with trio.fail_after(20), pytest.raises(NotOffered):
            await alice.fetch(peer, ("x",), into=StreamingBuffer(bytearray(made.size)), max_size=made.size, stall=60.0)
        assert not await made.reach(made.size)

    simulated(main)


def test_what_grows_is_fetched_into_what_grows_only_where_that_has_its_size(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        made = StreamingBuffer(bytearray(CONTENT))
        made.grow(made.size)
        bob.offer(("x",), made)
        for into in (StreamingBuffer(bytearray(made.size + 1)), StreamingBuffer(bytearray(made.size - 1))):
            with pytest.raises(Corrupt):
                await alice.fetch(peer, ("x",), into=into, max_size=2 * made.size)

    simulated(main)


@pytest.mark.parametrize(("bandwidth", "packs", "less"), [(2.5e6, True, 0.09), (2.5e6, False, 0), (1e9, True, 0)])
def test_what_pays_is_packed_once_a_link_was_slow(
    simulated: Simulated, bandwidth: float, packs: bool, less: float
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        node = world.node("alice")
        world.link(node.me, peer, bandwidth=bandwidth)
        bob.offer(("x",), UNEVEN, packs=packs)
        sizes = []
        for _ in range(3):
            before = node.traffic().bytes_in
            assert await alice.fetch(peer, ("x",), max_size=len(UNEVEN)) == UNEVEN
            sizes.append((node.traffic().bytes_in - before) / len(UNEVEN))
        assert sizes == pytest.approx([1, 1 - less, 1 - less], abs=0.01)  # the first shows how slow it is

    simulated(main)


def test_what_is_packed_is_resumed_where_it_broke(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        world.link(world.node("alice").me, peer, bandwidth=2.5e6)
        bob.offer(("x",), UNEVEN, packs=True)
        await alice.fetch(peer, ("x",), max_size=len(UNEVEN))
        seen: list[int] = []

        def progress(received: int) -> None:
            if not seen:
                nursery.start_soon(disconnect, world.node("alice"), peer)
            seen.append(received)

        assert await alice.fetch(peer, ("x",), max_size=len(UNEVEN), progress=progress) == UNEVEN

    simulated(main)


# -- peers that break the rules


def packed(content: bytes, end: int = zlib.Z_FINISH, size: int = 4) -> bytes:
    packs = zlib.compressobj(9, zlib.DEFLATED, WINDOW)
    return frame(encode(BulkHeader(True, size, b"name", packed=True))) + packs.compress(content) + packs.flush(end)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (frame(encode(BulkHeader(True, 4, b"name"))) + b"goodmore", Corrupt),
        (frame(encode(BulkHeader(True, -1, bytes(32)))), Corrupt),
        (frame(encode(BulkHeader(True, 4, bytes(33)))) + b"good", Corrupt),
        (frame(encode(BulkHeader(True, 1 << 60, bytes(32)))), Corrupt),
        (b"\xff\xff\xff\xff\x7f", Corrupt),
        (b"\x05hello", Corrupt),
        (frame(encode(BulkHeader(True, 400, bytes(32)))) + b"half", StreamBroken),
        (packed(b"good") + b"more", Corrupt),
        (packed(b"more" * 100_000), Corrupt),
        (packed(bytes(100_000), size=100_000), Corrupt),  # a bomb, of the size that is allowed
        (packed(b"")[:-2] + b"\xff\xff\xff", Corrupt),
        (packed(b"goo"), StreamBroken),
        (packed(b"good", zlib.Z_SYNC_FLUSH), Corrupt),
        (b"", StreamBroken),
    ],
)
def test_a_server_that_lies_is_found_out(simulated: Simulated, answer: bytes, error: type[Exception]) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, _, _ = await pair(world, nursery)
        mallory = world.node("mallory")

        async def lie(stream: Stream) -> None:
            await stream.receive_some(1000)
            await stream.send_all(answer)
            await stream.send_eof()
            await trio.sleep(1)

        mallory.serve(PROTOCOL, lie)
        await nursery.start(mallory.run)
        with pytest.raises(error):
            await alice.fetch(mallory.me, ("x",), max_size=100_000)

    simulated(main)


@pytest.mark.parametrize(
    "attack",
    [
        b"\xff\xff\xff\xff\x7f",
        b"\x05hello",
        frame(encode(BulkWant(("x",), -1))),
        frame(encode(BulkWant(("x",), len(CONTENT) + 1))),
        frame(encode(BulkWant(("y",), 0, float("nan")))),
        frame(encode(BulkWant(("y",), 0, 9.0))) * 2,
    ],
)
def test_a_fetcher_that_breaks_the_rules_loses_only_its_stream(simulated: Simulated, attack: bytes) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)
        mallory = world.node("mallory")
        await nursery.start(mallory.run)
        stream = await mallory.open_stream(peer, PROTOCOL)
        await stream.send_all(attack)
        with trio.fail_after(1), pytest.raises(StreamBroken):
            while await stream.receive_some(1000):
                pass
        assert bob.violations.count(mallory.me) == 1
        assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT

    simulated(main)


def test_a_fetcher_that_asks_on_and_never_reads_has_one_task(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[BulkWant] = []
    serve = bulk.BulkConnection._serve

    async def counted(connection: bulk.BulkConnection, want: BulkWant) -> None:
        begun.append(want)
        connection._stream.send_all = stuck  # type: ignore[method-assign]
        await serve(connection, want)

    async def stuck(data: bytes) -> None:
        await trio.sleep_forever()

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        _, _, peer = await pair(world, nursery)
        mallory = world.node("mallory")
        await nursery.start(mallory.run)
        stream = await mallory.open_stream(peer, PROTOCOL)
        for number in range(20):
            await stream.send_all(frame(encode(BulkWant(("not there", number)))))
            await trio.sleep(0.1)
        assert len(begun) == 1

    monkeypatch.setattr(bulk.BulkConnection, "_serve", counted)
    simulated(main)


def test_a_fetcher_that_never_reads_is_dropped_and_streams_are_bounded(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, peer = await pair(world, nursery)
        bob.offer(("x",), CONTENT)
        mallory = world.node("mallory")
        await nursery.start(mallory.run)
        streams = [await mallory.open_stream(peer, PROTOCOL) for _ in range(DEFAULT.serves + 3)]
        await trio.sleep(0.1)
        for stream in streams[DEFAULT.serves :]:
            with pytest.raises(StreamBroken):
                await stream.receive_some(1)
        await streams[0].send_all(frame(encode(BulkWant(("x",)))))
        assert await alice.fetch(peer, ("x",), max_size=len(CONTENT)) == CONTENT
        await trio.sleep(DEFAULT.serve_stall + 1)
        with pytest.raises(StreamBroken):
            while await streams[0].receive_some(1000):
                pass

    simulated(main)
