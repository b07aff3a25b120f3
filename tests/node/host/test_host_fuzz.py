"""Strangers that send nonsense, nothing, or too much, on real loopback: the host lives, and an honest peer gets in.

Every input is derived from one seed; a failure is repeated by running the test again.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
from hosts import echo, network, running, until

from swarmnode.node.host import libp2p_host
from swarmnode.node.host.limits import ConnectionLimits
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.patches.yamux_session import DATA, GO_AWAY, HEADER, PING, SYN, WINDOW_UPDATE

SEED = 20
MAX_PEERS = 8  # of a host that is flooded
ECHO = "/test/echo/1"
MULTISTREAM = b"\x13/multistream/1.0.0\n"
NOISE = b"\x07/noise\n"


def port_of(node: Libp2pNetwork) -> int:
    return int(node.addresses[0].split("/")[4])


async def serves_an_honest_peer(node: Libp2pNetwork) -> None:
    """A new peer connects, is answered on a stream and on a ping, and nothing of the strangers is left behind."""
    honest = network()
    async with running(honest):
        await honest.connect(node.addresses[0], timeout=3)
        stream = await honest.open_stream(node.me, ECHO, timeout=3)
        await stream.send_all(b"still there?")
        await stream.send_eof()
        answer = b""
        while chunk := await stream.receive_some(100):
            answer += chunk
        assert answer == b"still there?"
        await until(lambda: honest.rtt(node.me) is not None)
        assert [view.peer for view in node.peers()] == [honest.me]
        assert len(node.swarm.get_connections()) == 1 and not node._handshakes.waiting


def against(main: Callable[[Libp2pNetwork], Awaitable[None]], *, max_peers: int = 64) -> None:
    """Run strangers against a host, let what they left time out, and see that the host is as good as new."""

    async def whole() -> None:
        node = network(max_peers=max_peers)
        node.serve(ECHO, echo)
        async with running(node):
            await main(node)
            await until(lambda: not node.peers() and not node._handshakes.waiting)
            await serves_an_honest_peer(node)

    trio.run(whole)


@pytest.fixture(autouse=True)
def quick_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_host, "UPGRADE", 0.5)


def nonsense(dice: random.Random) -> bytes:
    """What a stranger may send instead of, or in the middle of, the handshakes."""
    tail = dice.randbytes(dice.choice([0, 1, 2, 19, 64, 700]))
    return dice.choice(
        [
            tail,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            MULTISTREAM + tail,
            MULTISTREAM[: dice.randrange(20)],
            b"\x04\xff\xfe\xfd\n",
            MULTISTREAM + b"\x04\xff\xfe\xfd\n",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + tail,
            b"\x00" * dice.randrange(1, 50),
            MULTISTREAM + NOISE + tail,
            MULTISTREAM + NOISE + b"\x00\x00" + tail,
            MULTISTREAM + NOISE + b"\x00\x20" + dice.randbytes(32) + tail,
            MULTISTREAM + NOISE + b"\x00\x20" + dice.randbytes(32) + b"\xff\xff" + tail,
            MULTISTREAM + b"\x0a/tls/1.0.0\n" + tail,
        ]
    )


def test_nonsense_before_and_in_the_handshakes_leaves_nothing_behind() -> None:
    async def main(node: Libp2pNetwork) -> None:
        dice = random.Random(SEED)

        async def stranger(sent: bytes, reset: bool) -> None:
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(node))
            with trio.move_on_after(0.2):
                try:
                    for byte_or_all in [sent] if len(sent) > 100 else [sent[:7], sent[7:]]:
                        await stream.send_all(byte_or_all)
                    while await stream.receive_some(4096):
                        pass
                except trio.BrokenResourceError:
                    pass  # hung up on, as it should be
            if reset:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(stranger, nonsense(dice), dice.random() < 0.3)

    against(main)


def broken_frames(dice: random.Random) -> bytes:
    """Yamux frames cut short, with wrong versions, kinds, flags, streams and lengths."""
    kind = dice.choice([DATA, WINDOW_UPDATE, PING, GO_AWAY, 4, 255])
    flags = dice.choice([0, SYN, SYN, 2, 4, 8, 0xFFFF])
    stream = dice.choice([0, 1, 2, 3, 7, 0xFFFFFFFF])
    frame = HEADER.pack(
        dice.choice([0, 0, 0, 1]), kind, flags, stream, dice.choice([0, 5, 70_000, 1 << 20, 0xFFFFFFFF])
    )
    opened = HEADER.pack(0, WINDOW_UPDATE, SYN, 101, 0)
    words = dice.choice(
        [b"\x04\xff\xfe\xfd\n", MULTISTREAM + b"\xff\xff\xff\x7f", MULTISTREAM + b"\x03na", b"\x80" * 9]
    )
    return dice.choice(
        [
            frame,
            frame + dice.randbytes(5),
            frame[: dice.randrange(1, 12)],
            opened + HEADER.pack(0, DATA, 0, 101, len(words)) + words,
            opened + HEADER.pack(0, DATA, 4, 101, 100) + b"cut",
            opened * 2,
            b"".join(HEADER.pack(0, WINDOW_UPDATE, SYN, 2 * n + 1, 0) for n in range(300)),
        ]
    )


def test_broken_frames_of_a_peer_that_shook_hands_leave_nothing_behind() -> None:
    async def main(node: Libp2pNetwork) -> None:
        dice = random.Random(SEED)
        for _ in range(40):
            stranger = network()
            async with running(stranger):
                await stranger.connect(node.addresses[0])
                connection = stranger.connections.best(node.me)
                assert connection is not None
                connection.session.answer(broken_frames(dice))
                with trio.move_on_after(0.02):
                    while not connection.session.is_closed:  # noqa: ASYNC110 (nobody else waits for it)
                        await trio.sleep(0.001)

    against(main)


def test_hundreds_of_connections_in_a_lifetime_leave_nothing_behind() -> None:
    async def main(node: Libp2pNetwork) -> None:
        for _ in range(300):
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(node))
            await stream.aclose()

    against(main, max_peers=4)


@pytest.mark.slow
def test_silent_sockets_keep_nobody_out() -> None:
    async def main(node: Libp2pNetwork) -> None:
        silent = [await trio.open_tcp_stream("127.0.0.1", port_of(node)) for _ in range(50)]
        await until(lambda: len(node._handshakes.waiting) == 50)
        honest = network()
        async with running(honest):
            await honest.connect(node.addresses[0], timeout=5)
        for stream in silent:
            while await stream.receive_some(100):
                pass  # until the host hangs up
            await stream.aclose()

    against(main)


def test_renewed_silent_sockets_from_one_address_keep_nobody_out() -> None:
    async def main(node: Libp2pNetwork) -> None:
        async with trio.open_nursery() as nursery:

            async def renew() -> None:
                while True:
                    async with await trio.open_tcp_stream("127.0.0.1", port_of(node)) as silent:
                        while await silent.receive_some(100):
                            pass  # until the host hangs up: there is another at once

            for _ in range(2 * ConnectionLimits().handshakes):
                nursery.start_soon(renew)
            await until(lambda: len(node._handshakes.waiting) == ConnectionLimits().handshakes)
            for _ in range(5):
                honest = network()
                async with running(honest):
                    await honest.connect(node.addresses[0], timeout=5)
            nursery.cancel_scope.cancel()

    against(main)


@pytest.mark.slow
def test_flood_of_connections_from_one_address_is_bounded_and_forgotten() -> None:
    async def main(node: Libp2pNetwork) -> None:
        flood = [await trio.open_tcp_stream("127.0.0.1", port_of(node)) for _ in range(400)]
        hung_up = 0

        async def listen(stream: trio.SocketStream) -> None:
            nonlocal hung_up
            with suppress(trio.BrokenResourceError):
                while await stream.receive_some(100):
                    pass
            hung_up += 1

        async with trio.open_nursery() as nursery:
            for stream in flood:
                nursery.start_soon(listen, stream)
            await until(lambda: hung_up >= 400 - ConnectionLimits().handshakes)
        for stream in flood:
            await stream.aclose()

    against(main, max_peers=MAX_PEERS)
