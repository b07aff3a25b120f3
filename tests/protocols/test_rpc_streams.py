"""What feeds and uploads promise: order, a bounded window, and an end that reaches both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import trio

from swarmnode.node.simnet import SimNetwork, SimWorld
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import PeerId, Stream
from swarmnode.protocols.rpc import (
    CALL,
    PROTOCOL,
    CallError,
    DeadlineExceeded,
    Frame,
    Items,
    PeerGone,
    Refuse,
    Refused,
    Rpc,
    Send,
)
from swarmnode.protocols.rpc_flows import MAX_ITEM, WINDOW
from swarmnode.protocols.rpc_frames import CREDIT, END, FEED, ITEM, UPLOAD
from swarmnode.protocols.wire import decode, encode

Simulated = Callable[..., None]


@dataclass(frozen=True)
class Ask:
    count: int = 0
    size: int = 0


@dataclass(frozen=True)
class Item:
    number: int
    load: bytes = b""


@dataclass(frozen=True)
class Sum:
    total: int


class Node:
    """Serves the feed "count" and the uploads "add", which takes all items, and "first", which takes one."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.rpc = Rpc(network)
        self.diary: list[str] = []
        self.sent = 0
        self.taken = 0
        self.pace = 0.0  # seconds that "add" takes for an item
        self.rpc.serve_feed("count", Ask, self.count)
        self.rpc.serve_upload("add", Ask, Item, self.add)
        self.rpc.serve_upload("first", Ask, Item, self.first)

    async def count(self, _peer: PeerId, ask: Ask, send: Send) -> None:
        try:
            for number in range(ask.count):
                await send(Item(number, bytes(ask.size)))
                self.sent += 1
            if ask.count == 3:
                raise Refuse("three", "that was enough")
        except trio.Cancelled:
            self.diary.append("cancelled")
            raise

    async def add(self, _peer: PeerId, _ask: Ask, items: Items[Item]) -> Sum:
        total = 0
        try:
            async for item in items:
                total += item.number
                self.taken += 1
                await trio.sleep(self.pace)
        except trio.Cancelled:
            self.diary.append("cancelled")
            raise
        return Sum(total)

    async def first(self, _peer: PeerId, _ask: Ask, items: Items[Item]) -> Sum:
        return Sum((await anext(items)).number)


async def pair(world: SimWorld, nursery: trio.Nursery) -> tuple[Node, Node]:
    nodes = Node(world.node("alice")), Node(world.node("bob"))
    for node in nodes:
        await nursery.start(node.network.run)
        await nursery.start(node.rpc.run)
    return nodes


def test_a_feed_brings_all_items_in_order_and_then_ends(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        for count, size in ((0, 0), (2000, 10), (100, 10_000), (20, MAX_ITEM - 50)):
            async with alice.rpc.feed(bob.network.me, "count", Ask(count, size), Item, timeout=60) as items:
                assert [item.number async for item in items] == list(range(count))

    simulated(main)


def test_an_upload_brings_all_items_and_their_answer(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        for size in (0, 5_000, MAX_ITEM - 50):
            async with alice.rpc.upload(bob.network.me, "add", Ask(), Item, Sum, timeout=60) as upload:
                for number in range(100):
                    assert await upload.send(Item(number, bytes(size)))
                assert await upload.finish() == Sum(4950)

    simulated(main)


def test_a_reader_that_stops_stops_the_writer_within_a_window_and_delays_no_call(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        size = 10_000
        async with alice.rpc.feed(bob.network.me, "count", Ask(1000, size), Item, timeout=600) as items:
            await anext(items)
            await trio.sleep(30)
            assert bob.sent <= WINDOW / size
            assert await alice.rpc.ping(bob.network.me, timeout=1) < 0.1
            assert sum([1 async for _ in items]) == 999
        bob.pace = 100.0
        sent = 0
        async with alice.rpc.upload(bob.network.me, "add", Ask(), Item, Sum, timeout=600) as upload:
            with trio.move_on_after(30):
                while True:
                    await upload.send(Item(1, bytes(size)))
                    sent += 1
            assert bob.taken == 1
            assert 10 < sent <= WINDOW / size
            assert await alice.rpc.ping(bob.network.me, timeout=1) < 0.1

    simulated(main)


def test_leaving_early_cancels_the_handler_and_gives_the_slot_back(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        for left in range(1, 101):  # more than may be in flight
            async with alice.rpc.feed(bob.network.me, "count", Ask(1000, 10_000), Item, timeout=600) as items:
                await anext(items)
            async with alice.rpc.upload(bob.network.me, "add", Ask(), Item, Sum, timeout=600) as upload:
                await upload.send(Item(1))
            await trio.sleep(0.1)
            assert bob.diary == ["cancelled"] * 2 * left
        assert bob.rpc.offences.count(alice.network.me) == 0

    simulated(main)


def test_deadlines_end_both_sides(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        bob.pace = 1000.0
        began = trio.current_time()
        async with alice.rpc.upload(bob.network.me, "add", Ask(), Item, Sum, timeout=2) as upload:
            await upload.send(Item(1))
            with pytest.raises(DeadlineExceeded):
                await upload.finish()
        async with alice.rpc.feed(bob.network.me, "count", Ask(1000, 10_000), Item, timeout=2) as items:
            await anext(items)
            await trio.sleep(3)
            with pytest.raises(DeadlineExceeded):
                async for _ in items:
                    await trio.sleep(0.01)
        assert 5 < trio.current_time() - began < 5.5
        assert bob.diary == ["cancelled"] * 2

    simulated(main)


def test_refusals_come_after_the_items_before_them(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        seen = []
        with pytest.raises(Refused) as caught:
            async with alice.rpc.feed(bob.network.me, "count", Ask(3), Item, timeout=5) as items:
                async for item in items:
                    seen.append(item.number)
        assert (seen, caught.value.code) == ([0, 1, 2], "three")
        codes = {}
        for method in ("none", "ping", "add"):
            with pytest.raises(Refused) as caught:
                async with alice.rpc.feed(bob.network.me, method, Ask(), Item, timeout=5) as items:
                    await anext(items)
            codes[method] = caught.value.code
        with pytest.raises(Refused) as caught:
            await alice.rpc.call(bob.network.me, "count", Ask(1), Sum, timeout=5)
        codes["count"] = caught.value.code
        with pytest.raises(Refused) as caught:
            async with alice.rpc.upload(bob.network.me, "add", Ask(), Ask, Sum, timeout=5) as upload:
                await upload.send(Ask(1, 1))
                await upload.finish()
        codes["items"] = caught.value.code
        assert codes == {
            "none": "unknown-method",
            "ping": "wrong-style",
            "add": "wrong-style",
            "count": "wrong-style",
            "items": "malformed",
        }

    simulated(main)


def test_an_answer_before_the_last_item_ends_the_sending(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        async with alice.rpc.upload(bob.network.me, "first", Ask(), Item, Sum, timeout=5) as upload:
            sent = 0
            while await upload.send(Item(7, bytes(1000))):
                sent += 1
            assert sent <= WINDOW / 1000
            assert await upload.finish() == Sum(7)

    simulated(main)


def test_both_sides_end_when_the_peer_dies(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        endings: list[type[CallError]] = []

        async def feed() -> None:
            with pytest.raises(CallError) as caught:
                async with alice.rpc.feed(bob.network.me, "count", Ask(10**6, 100), Item, timeout=600) as items:
                    async for _ in items:
                        await trio.sleep(0.01)
            endings.append(caught.type)

        async def upload() -> None:
            with pytest.raises(CallError) as caught:
                async with alice.rpc.upload(bob.network.me, "add", Ask(), Item, Sum, timeout=600) as upload:
                    while True:
                        await upload.send(Item(1, bytes(1000)))
            endings.append(caught.type)

        async def orphan() -> None:
            async with bob.rpc.upload(alice.network.me, "add", Ask(), Item, Sum, timeout=600) as upload:
                await upload.send(Item(1))
                await trio.sleep_forever()

        bob.pace = 1.0
        async with trio.open_nursery() as asking:
            nursery.start_soon(orphan)
            asking.start_soon(feed)
            asking.start_soon(upload)
            await trio.sleep(2)
            world.kill(bob.network.me)
        assert endings == [PeerGone] * 2
        assert alice.diary == ["cancelled"]

    simulated(main)


def test_a_large_item_is_refused_where_it_is_sent(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        async with alice.rpc.upload(bob.network.me, "add", Ask(), Item, Sum, timeout=5) as upload:
            with pytest.raises(ValueError, match="at most"):
                await upload.send(Item(1, bytes(MAX_ITEM)))
            assert await upload.finish() == Sum(0)

    simulated(main)


# -- peers that break the rules

CALL_ADD = Frame(CALL, 1, "add", 60.0, encode(Ask()), style=UPLOAD)
CALL_COUNT = Frame(CALL, 1, "count", 60.0, encode(Ask(10**6, 1000)), style=FEED, credit=5000)
CALL_SLEEP = Frame(CALL, 1, "sleep", 60.0, encode(Ask()))
ONE = Frame(ITEM, 1, body=encode(Item(1)))
LARGE = Frame(ITEM, 1, body=encode(Item(1, bytes(MAX_ITEM - 50))))


async def sleep(_peer: PeerId, _ask: Ask) -> Ask:
    await trio.sleep_forever()


async def raw_caller(world: SimWorld, nursery: trio.Nursery, bob: Node) -> Stream:
    mallory = world.node("mallory")
    await nursery.start(mallory.run)
    return await mallory.open_stream(bob.network.me, PROTOCOL)


@pytest.mark.parametrize(
    "attack",
    [
        [CALL_ADD, LARGE, LARGE, LARGE],  # more than the credit
        [CALL_ADD, ONE, Frame(END, 1), ONE],
        [CALL_ADD, Frame(CREDIT, 1, credit=1)],
        [CALL_COUNT, ONE],
        [CALL_COUNT, Frame(CREDIT, 1, credit=0)],
        [CALL_COUNT, Frame(CREDIT, 1, credit=-(1 << 60))],
        [Frame(CALL, 1, "count", 60.0, encode(Ask(1)), style=FEED, credit=-1)],
        [CALL_SLEEP, Frame(ITEM, 1, body=b"x")],
        [CALL_SLEEP, Frame(CREDIT, 1, credit=1)],
    ],
)
def test_a_caller_that_breaks_the_rules_of_items_loses_its_stream(simulated: Simulated, attack: list[Frame]) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        bob.pace = 1000.0
        bob.rpc.serve("sleep", Ask, sleep)
        stream = await raw_caller(world, nursery, bob)
        with trio.fail_after(10), pytest.raises(Exception, match="closed"):
            for message in attack:
                await stream.send_all(frame(encode(message)))
                await trio.sleep(0.1)
            while await stream.receive_some(1000):
                pass
        assert bob.rpc.offences.count(world.node("mallory").me) == 1
        await alice.rpc.ping(bob.network.me, timeout=1)

    simulated(main)


def test_a_feed_reader_with_endless_credit_that_never_reads_fills_no_memory(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        _, bob = await pair(world, nursery)
        stream = await raw_caller(world, nursery, bob)
        call = Frame(CALL, 1, "count", 600.0, encode(Ask(10**6, 10_000)), style=FEED, credit=1 << 62)
        await stream.send_all(frame(encode(call)))
        await trio.sleep(10)
        assert bob.sent * 10_000 < 6 << 20

    simulated(main)


def test_items_that_no_call_asked_for_end_the_stream(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, _ = await pair(world, nursery)
        mallory = world.node("mallory")

        async def pour(stream: Stream) -> None:
            raw = await FrameReader(stream).frame()
            assert raw is not None
            number = decode(Frame, raw).id
            for _ in range(3):  # more than a window
                await stream.send_all(frame(encode(Frame(ITEM, number, body=bytes(MAX_ITEM)))))
            await trio.sleep_forever()

        mallory.serve(PROTOCOL, pour)
        await nursery.start(mallory.run)
        with pytest.raises(PeerGone):
            await alice.rpc.call(mallory.me, "add", Ask(), Sum, timeout=5)
        async with alice.rpc.feed(mallory.me, "count", Ask(), Item, timeout=5) as items:
            await trio.sleep(2)
            with pytest.raises(CallError):
                async for _ in items:
                    pass
        assert alice.rpc.offences.count(mallory.me) == 2

    simulated(main)
