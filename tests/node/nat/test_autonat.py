"""AutoNAT between real hosts on loopback: a dial back is a new connection, to the asker's own address only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import hosts
import pytest
import trio
from libp2p.host.autonat.pb import autonat_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import BadMessage, receive, send
from swarmnode.node.nat import reachability
from swarmnode.node.nat.reachability import AUTONAT, AutoNat
from swarmnode.protocols.network import Address, NetworkError, Stream, StreamBroken


@dataclass
class Node:
    network: Libp2pNetwork
    autonat: AutoNat

    @property
    def place(self) -> Address:
        return self.network.addresses[0].partition("/p2p/")[0]


def make() -> Node:
    network = hosts.network()
    return Node(network, AutoNat(network))


async def ask(asker: Node, helper: Node, places: tuple[Address, ...]) -> tuple[bool | None, Address | None]:
    """Whether, and where, the helper reached the asker."""
    verdict = await asker.autonat.ask(helper.network.me, "127.0.0.1", places)
    return (verdict.reached, verdict.place) if verdict is not None else (None, None)


@asynccontextmanager
async def nodes(count: int = 2) -> AsyncIterator[list[Node]]:
    """Nodes of which all others are connected to the first."""
    made = [make() for _ in range(count)]
    async with hosts.running(*(node.network for node in made)):
        for node in made[1:]:
            await node.network.connect(made[0].network.addresses[0])
        yield made


async def listening() -> tuple[trio.SocketListener, int, list[int]]:
    """A listener that belongs to nobody's node, and the number of connections that it got."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    return listener, listener.socket.getsockname()[1], [0]


async def count(listener: trio.SocketListener, accepted: list[int]) -> None:
    while True:
        async with await listener.accept():
            accepted[0] += 1


async def test_who_answers_at_its_address_is_told_so_and_where() -> None:
    async with nodes() as (helper, asker):
        answer = await ask(asker, helper, asker.network.addresses)
        assert answer == (True, asker.place)


async def test_a_dial_back_is_a_new_connection_that_does_not_stay() -> None:
    async with nodes() as (helper, asker):
        dialled: list[str] = []
        transport = helper.network.swarm.transport_manager.transport_for_dialing(Multiaddr(asker.place))
        assert transport is not None
        dial = transport.dial

        async def noting(where: Multiaddr, *rest: object, **more: object) -> object:
            dialled.append(str(where))
            return await dial(where, *rest, **more)

        transport.dial = noting  # type: ignore[method-assign, assignment]
        await ask(asker, helper, asker.network.addresses)
        assert dialled == [asker.place]
        assert sum(map(len, helper.network.swarm.connections.values())) == 1


async def test_an_open_connection_does_not_make_a_deaf_node_public() -> None:
    async with nodes() as (helper, asker):
        listener, port, _ = await listening()
        await listener.aclose()
        answer = await ask(asker, helper, (f"/ip4/127.0.0.1/tcp/{port}",))
        assert answer == (False, None)


async def test_no_address_but_the_askers_own_is_dialled() -> None:
    async with nodes() as (helper, asker), trio.open_nursery() as nursery:
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.9"))[0]
        victim, accepted = listener.socket.getsockname()[1], [0]
        nursery.start_soon(count, listener, accepted)
        only = await ask(asker, helper, (f"/ip4/127.0.0.9/tcp/{victim}",))
        assert only == (None, None)
        both = await ask(asker, helper, (f"/ip4/127.0.0.9/tcp/{victim}", asker.place))
        assert both == (True, asker.place) and accepted == [0]
        nursery.cancel_scope.cancel()


async def test_somebody_else_at_the_address_is_not_the_asker() -> None:
    async with nodes(3) as (helper, asker, other):
        answer = await ask(asker, helper, (other.place,))
        assert answer == (False, None)


async def test_a_mute_listener_is_not_the_asker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "DIAL_WITHIN", 0.3)
    async with nodes() as (helper, asker):
        listener, port, _ = await listening()
        answer = await ask(asker, helper, (f"/ip4/127.0.0.1/tcp/{port}",))
        await listener.aclose()
        assert answer == (False, None)


async def test_a_second_question_too_soon_is_declined_and_others_are_served() -> None:
    async with nodes(3) as (helper, asker, other):
        assert (await ask(asker, helper, asker.network.addresses))[0] is True
        assert (await ask(asker, helper, asker.network.addresses))[0] is None
        assert (await ask(other, helper, other.network.addresses))[0] is True


async def test_dials_for_all_askers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "AT_ONCE", 0)
    async with nodes() as (helper, asker):
        assert (await ask(asker, helper, asker.network.addresses))[0] is None


async def test_only_a_few_addresses_are_dialled_for_one_question() -> None:
    async with nodes() as (helper, asker):
        nobody = tuple(f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 1 + reachability.MAX_ADDRESSES))
        assert await ask(asker, helper, (*nobody, asker.place)) == (False, None)


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff\x0f", b"\x05abcde", b"\x02\x08\x01", b"", b"\x02\x08\x00"])
async def test_a_malformed_question_harms_nobody(raw: bytes) -> None:
    async with nodes(3) as (helper, asker, other):
        stream = await other.network.open_stream(helper.network.me, AUTONAT)
        await stream.send_all(raw)
        await stream.send_eof()
        with contextlib.suppress(StreamBroken):
            while await stream.receive_some(1 << 16):
                pass
        assert (await ask(asker, helper, asker.network.addresses))[0] is True
        assert not helper.network._failures


async def test_addresses_that_are_none_are_passed_over() -> None:
    async with nodes() as (helper, asker):
        stream = await asker.network.open_stream(helper.network.me, AUTONAT)
        addresses = [os.urandom(7), b"", b"\x04", Multiaddr(asker.place).to_bytes()]
        peer = pb.Message.PeerInfo(id=b"whoever", addrs=addresses)
        await send(stream, pb.Message(type=pb.Message.DIAL, dial=pb.Message.Dial(peer=peer)))
        answer = await receive(stream, pb.Message)
        assert answer.dialResponse.status == pb.Message.OK and not helper.network._failures


@pytest.mark.parametrize(
    "answer",
    [
        pb.Message(type=pb.Message.DIAL),
        pb.Message(
            type=pb.Message.DIAL_RESPONSE,
            dialResponse=pb.Message.DialResponse(
                status=pb.Message.OK, addr=Multiaddr("/ip4/198.51.100.1/tcp/1").to_bytes()
            ),
        ),
        pb.Message(
            type=pb.Message.DIAL_RESPONSE, dialResponse=pb.Message.DialResponse(status=pb.Message.OK, addr=b"\xff\xff")
        ),
    ],
    ids=["another message", "an address that was not asked about", "no address"],
)
async def test_an_answer_that_makes_no_sense_is_no_verdict(answer: pb.Message) -> None:
    async def lie(stream: Stream) -> None:
        await receive(stream, pb.Message)
        await send(stream, answer)

    async with nodes() as (helper, asker):
        helper.network.serve(AUTONAT, lie)
        with pytest.raises(BadMessage):
            await ask(asker, helper, asker.network.addresses)


async def test_a_helper_that_hangs_up_is_a_network_error() -> None:
    async def hang_up(stream: Stream) -> None:
        await stream.aclose()

    async with nodes() as (helper, asker):
        helper.network.serve(AUTONAT, hang_up)
        with pytest.raises(NetworkError):
            await ask(asker, helper, asker.network.addresses)
