"""Flooded messages: heard once by everyone, forged by nobody, and bounded per peer."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import msgpack
import trio

from swarmnode.node import gossip
from swarmnode.node.gossip import DOMAIN, PROTOCOL, Gossip
from swarmnode.node.simnet import SimNetwork, SimWorld, run_simulation

Heard = list[tuple[str, str, bytes]]


def simulate(main: Callable[[SimWorld, trio.Nursery], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with trio.open_nursery() as nursery:
            await main(SimWorld(), nursery)
            nursery.cancel_scope.cancel()

    run_simulation(whole)


async def start(world: SimWorld, nursery: trio.Nursery, name: str, heard: Heard) -> tuple[SimNetwork, Gossip]:
    node = world.node(name)
    flood = Gossip(node)

    async def hear(author: str, message: bytes) -> None:
        heard.append((name, author, message))

    flood.subscribe("topic", hear)
    await nursery.start(node.run)
    await nursery.start(flood.run)
    return node, flood


def frame_of(node: SimNetwork, author: str, payload: bytes, nonce: bytes = b"n" * 16) -> bytes:
    body = ["topic", author, nonce, payload]
    frame = msgpack.packb([*body, node.sign(DOMAIN + msgpack.packb(body))])
    return gossip._varint(len(frame)) + frame


def test_message_crosses_a_line_of_peers_and_is_heard_once_each() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        heard: Heard = []
        started = [await start(world, nursery, name, heard) for name in "abcd"]
        nodes = [node for node, _ in started]
        for left, right in (*itertools.pairwise(nodes), (nodes[3], nodes[1])):
            await left.connect(right.addresses[0])
        await trio.sleep(1)
        await started[0][1].publish("topic", b"news")
        await trio.sleep(2)
        assert sorted(heard) == [(name, nodes[0].me, b"news") for name in "bcd"]

    simulate(main)


def test_message_in_anothers_name_is_not_heard_and_ends_the_stream() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        heard: Heard = []
        victim, _ = await start(world, nursery, "victim", heard)
        forger = world.node("forger")
        await nursery.start(forger.run)
        await forger.connect(victim.addresses[0])
        stream = await forger.open_stream(victim.me, PROTOCOL)
        await stream.send_all(frame_of(forger, forger.me, b"mine"))
        await stream.send_all(frame_of(forger, world.node("somebody").me, b"forged", b"o" * 16))
        await stream.send_all(frame_of(forger, forger.me, b"later", b"p" * 16))
        await trio.sleep(1)
        assert heard == [("victim", forger.me, b"mine")]

    simulate(main)


def test_malformed_and_oversized_frames_end_the_stream_only() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        heard: Heard = []
        victim, _ = await start(world, nursery, "victim", heard)
        rude = world.node("rude")
        await nursery.start(rude.run)
        await rude.connect(victim.addresses[0])
        for rubbish in (b"\xff\xff\xff\xff", b"\x03abc", gossip._varint(5) + msgpack.packb([1, 2]) + b"xx", b"\x00"):
            stream = await rude.open_stream(victim.me, PROTOCOL)
            await stream.send_all(rubbish)
            await trio.sleep(0.5)
        stream = await rude.open_stream(victim.me, PROTOCOL)
        await stream.send_all(frame_of(rude, rude.me, b"polite"))
        await trio.sleep(1)
        assert heard == [("victim", rude.me, b"polite")]

    simulate(main)


def test_flooding_peer_is_heard_at_its_rate_only() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        heard: Heard = []
        victim, _ = await start(world, nursery, "victim", heard)
        loud = world.node("loud")
        await nursery.start(loud.run)
        await loud.connect(victim.addresses[0])
        stream = await loud.open_stream(victim.me, PROTOCOL)
        for number in range(1500):
            await stream.send_all(frame_of(loud, loud.me, b"x", number.to_bytes(16)))
        await trio.sleep(1)
        assert gossip.BURST <= len(heard) <= gossip.BURST + 2 * gossip.RATE

    simulate(main)
