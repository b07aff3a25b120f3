"""The simulated network keeps its own promises: time, order, faults, scale, and the same run twice."""

from __future__ import annotations

import pytest
import trio

from swarmnode.protocols.network import PeerEvent, PeerId, Stream, StreamBroken, Unreachable
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery
from swarmnode.testing.simnode import WINDOW

ECHO = "/test/echo"


async def echo(stream: Stream) -> None:
    while piece := await stream.receive_some(1 << 16):
        await stream.send_all(piece)
    await stream.send_eof()


async def started(world: SimWorld, nursery: trio.Nursery, *names: str | int) -> list[SimNetwork]:
    nodes = [world.node(name) for name in names]
    for node in nodes:
        node.serve(ECHO, echo)
        await nursery.start(node.run)
    return nodes


async def expect_unreachable(network: SimNetwork, peer: PeerId) -> None:
    with pytest.raises(Unreachable):
        await network.connect(peer, timeout=3)


async def read(stream: Stream, size: int) -> bytes:
    whole = b""
    while len(whole) < size:
        piece = await stream.receive_some(size - len(whole))
        assert piece
        whole += piece
    return whole


def test_latency_and_bandwidth_take_their_time() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        world.link(a.me, b.me, latency=0.05)
        stream = await a.open_stream(b.me, ECHO)
        assert trio.current_time() == pytest.approx(0.2)  # dial and open: a round trip each
        await stream.send_all(b"x")
        await stream.receive_some(1)
        assert trio.current_time() == pytest.approx(0.3)
        world.link(a.me, b.me, bandwidth=100_000)
        began = trio.current_time()
        await stream.send_all(bytes(100_000))
        await read(stream, 100_000)
        assert trio.current_time() - began == pytest.approx(1.1 + 0.65, abs=0.1)  # the echo begins with the first piece

    run_with_nursery(main, SimWorld())


def test_a_sender_blocks_when_nobody_reads() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        held: list[Stream] = []

        async def hold(stream: Stream) -> None:
            held.append(stream)
            await trio.sleep_forever()

        b.serve("/test/hold", hold)
        stream = await a.open_stream(b.me, "/test/hold")
        await stream.send_all(bytes(WINDOW))
        with trio.move_on_after(100) as scope:
            await stream.send_all(b"x")
        assert scope.cancelled_caught
        await read(held[0], 10)
        with trio.fail_after(0.1):
            await stream.send_all(b"x")

    run_with_nursery(main, SimWorld())


def test_a_frozen_node_hears_and_says_nothing_until_thawed() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        stream = await a.open_stream(b.me, ECHO)
        world.freeze(b.me)
        heard = b.traffic().bytes_in
        await stream.send_all(b"hello")
        with trio.move_on_after(1000) as scope:
            await stream.receive_some(10)
        assert scope.cancelled_caught
        assert b.traffic().bytes_in == heard
        with pytest.raises(Unreachable):
            await a.open_stream(b.me, ECHO, timeout=3)
        assert [view.peer for view in a.peers()] == [b.me]
        world.thaw(b.me)
        with trio.fail_after(0.1):
            assert await read(stream, 5) == b"hello"

    run_with_nursery(main, SimWorld())


def test_what_a_frozen_node_sends_waits_for_the_thaw() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        stream = await a.open_stream(b.me, ECHO)
        world.freeze(a.me)
        await stream.send_all(b"hello")
        await trio.sleep(50)
        assert b.traffic().bytes_in < 100
        world.thaw(a.me)
        with trio.fail_after(0.1):
            assert await read(stream, 5) == b"hello"

    run_with_nursery(main, SimWorld())


def test_a_short_partition_delays_and_a_long_one_breaks() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b, c = await started(world, nursery, "a", "b", "c")
        stream = await a.open_stream(b.me, ECHO)
        inside = await b.open_stream(c.me, ECHO)
        await a.provide(b"k" * 32)
        assert await b.find_providers(b"k" * 32) == (a.me,)
        world.partition([[a.me], [b.me, c.me]])
        await stream.send_all(b"hello")
        assert await b.find_providers(b"k" * 32) == ()
        with pytest.raises(Unreachable):
            await a.open_stream(c.me, ECHO, timeout=2)
        await trio.sleep(5)
        world.heal()
        assert await read(stream, 5) == b"hello"
        with a.watch_peers() as events:
            world.partition([[a.me]])
            with pytest.raises(StreamBroken):
                await stream.receive_some(1)
            assert await events.receive() == PeerEvent(b.me, up=False)
        await inside.send_all(b"x")
        assert await inside.receive_some(1) == b"x"
        world.heal()
        await a.open_stream(b.me, ECHO, timeout=1)

    run_with_nursery(main, SimWorld())


@pytest.mark.parametrize("fault", ["partition", "freeze"])
def test_a_dial_given_up_makes_no_connection_when_the_way_opens(fault: str) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        if fault == "partition":
            world.partition([[a.me]])
        else:
            world.freeze(b.me)
        with pytest.raises(Unreachable):
            await a.connect(b.me, timeout=3)
        await trio.sleep(60)
        with a.watch_peers() as at_a, b.watch_peers() as at_b:
            world.heal()
            world.thaw(b.me)
            await trio.sleep(1)
            for events in (at_a, at_b):
                with pytest.raises(trio.WouldBlock):
                    events.receive_nowait()
        await a.connect(b.me, timeout=1)

    run_with_nursery(main, SimWorld())


def test_a_dial_given_up_before_it_was_confirmed_leaves_no_half_connection() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        world.link(a.me, b.me, latency=1.0)
        with b.watch_peers() as events:
            with pytest.raises(Unreachable):
                await a.connect(b.me, timeout=1.5)  # b accepted after 1 s
            await trio.sleep(1)
            assert [events.receive_nowait().up, events.receive_nowait().up] == [True, False]
        assert not a.peers() and not b.peers()
        nursery.start_soon(a.connect, b.me)  # two dials at once, of which one waits long enough
        with pytest.raises(Unreachable):
            await a.connect(b.me, timeout=1.5)
        await trio.sleep(1)
        assert [view.peer for view in a.peers()] == [b.me]
        assert [view.peer for view in b.peers()] == [a.me]

    run_with_nursery(main, SimWorld())


def test_a_killed_node_comes_back_with_its_identity() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        stream = await a.open_stream(b.me, ECHO)
        at = trio.current_time()
        world.kill(b.me)
        with pytest.raises(StreamBroken):
            await stream.receive_some(1)
        assert trio.current_time() == at
        with pytest.raises(Unreachable):
            await a.open_stream(b.me, ECHO)
        (again,) = await started(world, nursery, "b")
        assert again is not b
        assert (again.me, again.addresses) == (b.me, b.addresses)
        await a.open_stream(b.me, ECHO)

    run_with_nursery(main, SimWorld())


def diary_of_a_busy_world(nodes: int) -> list[tuple[object, ...]]:
    diary: list[tuple[object, ...]] = []

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        network = await started(world, nursery, *range(nodes))

        async def work(number: int) -> None:
            for step in (1, 7, 31):
                stream = await network[number].open_stream(network[(number + step) % nodes].me, ECHO)
                await stream.send_all(bytes(5000))
                await read(stream, 5000)
                diary.append((trio.current_time(), number, step))

        async with trio.open_nursery() as working:
            for number in range(nodes):
                working.start_soon(work, number)
        await trio.sleep(5)

    run_with_nursery(main, SimWorld(seed=3, bandwidth=1e6))
    return diary


def test_a_frozen_dial_does_not_reach_an_earlier_life_of_who_came_back() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        world.freeze(a.me)
        nursery.start_soon(expect_unreachable, a, b.me)
        await trio.sleep(0.1)
        world.kill(b.me)
        (again,) = await started(world, nursery, "b")
        world.thaw(a.me)
        await trio.sleep(5)
        stream = await a.open_stream(again.me, ECHO, timeout=1)
        await stream.send_all(b"x")
        assert await read(stream, 1) == b"x"

    run_with_nursery(main, SimWorld())


def test_who_was_killed_while_it_dialled_is_reached_in_its_next_life() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        a, b = await started(world, nursery, "a", "b")
        world.link(a.me, b.me, latency=0.1)
        nursery.start_soon(expect_unreachable, a, b.me)
        await trio.sleep(0.15)  # b has taken the call, and a has not heard so
        world.kill(a.me)
        (again,) = await started(world, nursery, "a")
        await again.connect(b.me)
        stream = await b.open_stream(again.me, ECHO, timeout=1)
        await stream.send_all(b"x")
        assert await read(stream, 1) == b"x"

    run_with_nursery(main, SimWorld())


def test_the_same_world_twice_is_the_same_to_the_last_event() -> None:
    first = diary_of_a_busy_world(60)
    assert len(first) == 3 * 60
    assert diary_of_a_busy_world(60) == first


@pytest.mark.thorough
@pytest.mark.slow
def test_a_thousand_nodes_fit_in_a_process() -> None:
    diary = diary_of_a_busy_world(1000)
    assert len(diary) == 3000
