"""A greeting says who has to upgrade."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import ProtocolUnsupported, Stream, StreamBroken
from swarmnode.protocols.peers.hello import (
    MAX_HELLO,
    MOST_TOLD,
    PROTOCOL,
    PROTOCOL_MAJOR,
    Hello,
    Incompatible,
    greet,
    serve_hello,
)
from swarmnode.protocols.wire import encode
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]


def test_equal_versions_greet_each_other(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = world.node("alice"), world.node("bob")
        serve_hello(bob, "swarmnode/0.1.0")
        for node in (alice, bob):
            await nursery.start(node.run)
        assert await greet(alice, bob.me, timeout=1) == Hello(PROTOCOL_MAJOR, "swarmnode/0.1.0")

    simulated(main)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (frame(encode(Hello(3, "swarmnode/0.9"))), r"speaks protocol 3 \(swarmnode/0.9\), .* 2: upgrade this node"),
        (frame(encode(Hello(1, "old\n"))), r"speaks protocol 1 \(old\?\), .* 2: upgrade that peer"),
        (b"\x05hello", "does not say hello"),
        (b"\xff\xff\x7f", "does not say hello"),
    ],
)
def test_a_mismatch_says_which_side_to_upgrade(simulated: Simulated, said: bytes, told: str) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = world.node("alice"), world.node("bob")

        async def answer(stream: Stream) -> None:
            await stream.send_all(said)

        bob.serve(PROTOCOL, answer)
        for node in (alice, bob):
            await nursery.start(node.run)
        with pytest.raises(Incompatible, match=told):
            await greet(alice, bob.me, timeout=1)

    simulated(main)


def test_who_is_greeted_by_another_version_is_told_as_well_and_once(
    simulated: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = world.node("alice"), world.node("bob")
        serve_hello(bob, "swarmnode/0.1.0")
        for node in (alice, bob):
            await nursery.start(node.run)
        for major in (1, 1, PROTOCOL_MAJOR, *range(3, 99)):
            stream = await alice.open_stream(bob.me, PROTOCOL, timeout=1)
            await stream.send_all(frame(encode(Hello(major, "another\n"))))
            await stream.send_eof()
            assert await FrameReader(stream, limit=MAX_HELLO).frame() == encode(
                Hello(PROTOCOL_MAJOR, "swarmnode/0.1.0")
            )
            await stream.aclose()
        await trio.sleep(1)

    simulated(main)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("hello")]
    assert len(told) == MOST_TOLD - 1, "and no more, whatever strangers say"
    assert "protocol 1 (another?), this node speaks 2: upgrade that peer" in told[0]
    assert all("upgrade this node" in text for text in told[1:])


@pytest.mark.parametrize("said", [b"\x05hello", b"\xff\xff\x7f", frame(encode(Hello(2, ""))) + b"\xff\xff\x7f"])
def test_who_greets_with_something_else_does_not_fill_the_log(
    simulated: Simulated, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = world.node("alice"), world.node("bob")
        serve_hello(bob, "swarmnode/0.1.0")
        for node in (alice, bob):
            await nursery.start(node.run)
        stream = await alice.open_stream(bob.me, PROTOCOL, timeout=1)
        await stream.send_all(said)
        await trio.sleep(1)
        assert (await greet(alice, bob.me, timeout=1)).major == PROTOCOL_MAJOR

    simulated(main)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_silent_peer_and_a_stranger_are_told_apart(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, carol = (world.node(name) for name in ("alice", "bob", "carol"))

        async def silent(_stream: Stream) -> None:
            await trio.sleep_forever()

        bob.serve(PROTOCOL, silent)
        for node in (alice, bob, carol):
            await nursery.start(node.run)
        with pytest.raises(StreamBroken, match="did not say hello within 2 s"):
            await greet(alice, bob.me, timeout=2)
        with pytest.raises(ProtocolUnsupported):
            await greet(alice, carol.me, timeout=2)

    simulated(main)
