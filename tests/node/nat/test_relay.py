"""Relays and circuits between real hosts on loopback: who is served, how much, and what the two ends find."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from disconnecting import disconnect
from hosts import echo, network, running, until
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarmnode.node.host.allowances import PeerPolicy
from swarmnode.node.host.limits import RelayLimits
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import peer_bytes, receive, send
from swarmnode.node.nat.relay import HOP, STOP, RelayClient, RelayRefused, RelayServer
from swarmnode.protocols.network import NetworkError, Stream, StreamBroken
from swarmnode.protocols.peers.hello import PROTOCOL as HELLO
from swarmnode.protocols.peers.hello import serve_hello

ECHO = "/test/echo/1"


@dataclass
class End:
    """A node behind a relay."""

    network: Libp2pNetwork
    circuits: RelayClient


@dataclass
class Policy(PeerPolicy):
    relays_for: Any = lambda peer: True
    standing: Any = lambda peer: 1.0


@asynccontextmanager
async def relayed(
    ends: int = 2,
    admits: Any = lambda peer: True,
    standing: Any = lambda peer: 1.0,
    **limits: Any,
) -> AsyncIterator[tuple[Any, ...]]:
    """A relay and `ends` that are connected to it, and to nobody else."""
    at = network()
    relay = RelayServer(at, Policy(relays_for=admits, standing=standing), RelayLimits(**limits))
    async with running(at, relay) as nursery:
        behind = []
        for _ in range(ends):
            end = network()
            await nursery.start(end.run)
            end.serve(ECHO, echo)
            await end.connect(at.addresses[0])
            behind.append(End(end, end.relay_client))
        yield (at, relay, *behind)


async def there_and_back(node: Libp2pNetwork, peer: str, message: bytes) -> bytes:
    stream = await node.open_stream(peer, ECHO)

    async def ask() -> None:
        await stream.send_all(message)
        await stream.send_eof()

    answer = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while chunk := await stream.receive_some(1 << 16):
            answer += chunk
    return bytes(answer)


async def test_a_circuit_is_a_connection_that_carries_everything_both_ways() -> None:
    async with relayed() as (at, relay, a, b):
        place = await a.circuits.reserve(at.me)
        assert relay.reservations == (a.network.me,)
        assert place.addresses == (f"{at.addresses[0]}/p2p-circuit/p2p/{a.network.me}",)
        await b.circuits.dial(at.me, a.network.me)
        paths = {view.peer: (view.path, view.inbound) for view in a.network.peers()}
        assert paths == {at.me: ("direct", False), b.network.me: ("relayed", True)}
        message = os.urandom(3_000_000)  # many windows and Noise messages
        assert await there_and_back(b.network, a.network.me, message) == message
        assert await there_and_back(a.network, b.network.me, b"back") == b"back"
        assert relay.open_circuits == 1 and relay.bytes_relayed > 6_000_000


async def test_a_relay_whose_handler_is_ended_lets_go_of_the_private_node_that_it_asked() -> None:
    async with relayed() as (at, _, a, b):
        await a.circuits.reserve(at.me)
        asked = trio.Event()

        async def take_long(stream: Stream) -> None:
            await receive(stream, pb.StopMessage)
            asked.set()
            await trio.sleep_forever()

        async def dial() -> None:
            with pytest.raises(NetworkError):
                await b.circuits.dial(at.me, a.network.me)

        a.network.serve(STOP, take_long)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            await asked.wait()
            at.handlers.cancel(HOP)
        (connection,) = at.connections.of(a.network.me)
        await until(lambda: not connection.session.open_streams)


async def test_who_begins_circuits_and_does_not_go_on_keeps_out_none_through_the_relays_of_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarmnode.node.nat.relay.MAX_INBOUND", 2)
    connect = pb.StopMessage.CONNECT
    async with relayed(3) as (at, _, a, b, c):
        a.circuits._held[at.me] = await a.circuits.reserve(at.me)
        await b.network.connect(a.network.addresses[0])
        for status in (pb.OK, pb.OK, pb.RESOURCE_LIMIT_EXCEEDED):
            stream = await b.network.open_stream(a.network.me, STOP)
            await send(stream, pb.StopMessage(type=connect, peer=pb.PeerId(id=peer_bytes(b.network.me))))
            assert (await receive(stream, pb.StopMessage)).status == status
        await c.circuits.dial(at.me, a.network.me)
        assert c.network.connections.path(a.network.me) == "relayed"


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 64, b"\x13/multistream/1.0.0\n\x07/noise\n\0\x05hello"])
async def test_garbage_on_a_circuit_is_no_fault_of_the_handler(garbage: bytes) -> None:
    a, b = network(), network()
    async with running(a, b):
        await b.connect(a.addresses[0])
        stream = await b.open_stream(a.me, STOP)
        await send(stream, pb.StopMessage(type=pb.StopMessage.CONNECT, peer=pb.PeerId(id=peer_bytes(b.me))))
        assert (await receive(stream, pb.StopMessage)).status == pb.OK
        await stream.send_all(garbage)
        with pytest.raises(StreamBroken):
            await stream.send_eof()  # where it is not reset yet
            while await stream.receive_some(1000):
                pass
        assert not a._failures and not a.relay_client._inbound


async def test_without_a_place_at_the_relay_nobody_is_reached() -> None:
    async with relayed() as (at, _relay, a, b):
        with pytest.raises(RelayRefused, match="no reservation"):
            await b.circuits.dial(at.me, a.network.me)


async def test_strangers_get_neither_places_nor_circuits() -> None:
    members: set[str] = set()
    async with relayed(admits=lambda peer: peer in members) as (at, _relay, a, b):
        with pytest.raises(RelayRefused, match="permission denied"):
            await a.circuits.reserve(at.me)
        members.add(a.network.me)
        await a.circuits.reserve(at.me)
        with pytest.raises(RelayRefused, match="permission denied"):
            await b.circuits.dial(at.me, a.network.me)


async def test_nodes_of_our_kind_are_served_as_soon_as_they_have_said_so_and_others_are_not() -> None:
    """As for `--role relay`, which has no run whose members it could serve."""
    at: list[Libp2pNetwork] = []
    async with relayed(1, admits=lambda peer: at[0].speaks(peer, HELLO)) as (relay, _relay, stranger):
        at.append(relay)
        node = network()
        serve_hello(node, "test")
        async with running(node):
            await node.connect(relay.addresses[0])
            await node.relay_client.reserve(relay.me)  # identify is still under way
        with pytest.raises(RelayRefused, match="permission denied"):
            await stranger.circuits.reserve(relay.me)


async def test_a_place_ends_with_the_connection_of_its_holder() -> None:
    async with relayed() as (at, relay, a, _b):
        await a.circuits.reserve(at.me)
        await disconnect(a.network, at.me)
        await until(lambda: relay.reservations == ())


async def test_who_left_before_it_was_admitted_gets_no_place() -> None:
    """Else strangers that come, ask and go would fill a relay for as long as a place lasts."""

    admitted: list[str] = []
    async with relayed(1, admits=admitted.__contains__) as (at, relay, a):
        stream = await a.network.open_stream(at.me, HOP)
        await send(stream, pb.HopMessage(type=pb.HopMessage.RESERVE))
        await trio.sleep(0.2)
        await disconnect(a.network, at.me)
        await until(lambda: a.network.me not in at.connections)
        admitted.append(a.network.me)
        await trio.sleep(0.3)
        assert relay.reservations == ()


async def test_who_is_admitted_after_the_other_lost_its_place_gets_no_circuit() -> None:
    admitted: list[str] = []
    async with relayed(2, admits=admitted.__contains__) as (at, relay, a, b):
        admitted.append(a.network.me)
        await a.circuits.reserve(at.me)
        async with trio.open_nursery() as nursery:

            async def dial() -> None:
                with pytest.raises(RelayRefused, match="no reservation"):
                    await b.circuits.dial(at.me, a.network.me)

            nursery.start_soon(dial)
            await trio.sleep(0.2)
            relay._reservations.clear()  # given to another
            admitted.append(b.network.me)


async def test_full_relays_refuse_and_go_on_serving_those_they_have() -> None:
    async with relayed(3, reservations=1, circuits_per_peer=1) as (at, _relay, a, b, c):
        await a.circuits.reserve(at.me)
        with pytest.raises(RelayRefused, match="reservation refused"):
            await b.circuits.reserve(at.me)
        await a.circuits.reserve(at.me)  # renewing needs no further place
        await b.circuits.dial(at.me, a.network.me)
        with pytest.raises(RelayRefused, match="resource limit"):
            await c.circuits.dial(at.me, a.network.me)
        assert await there_and_back(b.network, a.network.me, b"still here") == b"still here"


async def test_where_all_places_are_taken_who_has_more_standing_gets_that_of_who_has_least() -> None:
    standing: dict[str, float] = {}
    async with relayed(4, standing=lambda p: standing.get(p, 1.0), reservations=2) as (at, relay, *ends):
        low, fair, good, better = ends
        lost = []
        for end in ends:
            end.circuits.lose = lambda where, who=end.network.me: lost.append((who, where))
        await low.circuits.reserve(at.me)
        await fair.circuits.reserve(at.me)
        with pytest.raises(RelayRefused, match="reservation refused"):
            await better.circuits.reserve(at.me)  # nothing is known of standings
        standing.update(zip((end.network.me for end in ends), (0.3, 0.5, 0.54, 0.9), strict=True))
        await good.circuits.dial(at.me, low.network.me)
        with pytest.raises(RelayRefused, match="reservation refused"):
            await good.circuits.reserve(at.me)  # a little more does not move anybody
        await better.circuits.reserve(at.me)
        await until(lambda: lost == [(low.network.me, at.me)])
        assert set(relay.reservations) == {fair.network.me, better.network.me}
        with pytest.raises(RelayRefused, match="no reservation"):
            await fair.circuits.dial(at.me, low.network.me)
        assert await there_and_back(good.network, low.network.me, b"still here") == b"still here"
        with pytest.raises(RelayRefused, match="reservation refused"):
            await low.circuits.reserve(at.me)
        assert len(lost) == 1 and not at._failures


async def test_who_asks_too_often_is_refused() -> None:
    async with relayed(1, requests_per_minute=3) as (at, _relay, a):
        for _ in range(3):
            await a.circuits.reserve(at.me)
        with pytest.raises(RelayRefused, match="resource limit"):
            await a.circuits.reserve(at.me)
        await disconnect(a.network, at.me)  # which brings no other allowance
        await until(lambda: a.network.me not in at.connections)
        await a.network.connect(at.addresses[0])
        with pytest.raises(RelayRefused, match="resource limit"):
            await a.circuits.reserve(at.me)


async def test_a_circuit_at_its_limit_of_bytes_breaks_at_both_ends_and_frees_its_place() -> None:
    async with relayed(circuit_bytes=200_000) as (at, relay, a, b):
        await a.circuits.reserve(at.me)
        await b.circuits.dial(at.me, a.network.me)
        stream = await b.network.open_stream(a.network.me, ECHO)
        with pytest.raises(StreamBroken):
            while True:
                await stream.send_all(bytes(50_000))
        await until(lambda: relay.open_circuits == 0)
        await until(lambda: b.network.me not in {view.peer for view in a.network.peers()})
        assert relay.bytes_relayed <= 2 * 200_000


async def test_a_circuit_ends_when_the_relay_loses_one_end() -> None:
    async with relayed() as (at, relay, a, b):
        await a.circuits.reserve(at.me)
        await b.circuits.dial(at.me, a.network.me)
        await disconnect(at, a.network.me)
        await until(lambda: a.network.me not in {view.peer for view in b.network.peers()})
        await until(lambda: relay.open_circuits == 0)


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff\x0f", b"\x05abcde", b"\x02\x08\x01", b""])
async def test_a_malformed_request_is_refused_and_harms_nobody(raw: bytes) -> None:
    async with relayed() as (at, relay, a, b):
        stream = await b.network.open_stream(at.me, HOP)
        await stream.send_all(raw)
        await stream.send_eof()
        while await stream.receive_some(1 << 16):
            pass
        await a.circuits.reserve(at.me)
        assert relay.reservations == (a.network.me,) and not at._failures


async def test_a_relay_does_not_tell_an_address_that_libp2p_cannot_read() -> None:
    """An owner may announce a container's name, which may have an underscore."""

    async with relayed(1) as (at, _relay, a):
        own = at.own_addresses
        at.announce_instead((f"/dns4/my_relay/tcp/4077/p2p/{at.me}", *own))
        assert (await a.circuits.reserve(at.me)).addresses == (f"{own[0]}/p2p-circuit/p2p/{a.network.me}",)


async def test_a_circuit_through_a_relay_that_announces_a_name_is_dialled() -> None:
    async with relayed() as (at, _relay, a, b):
        at.announce_instead((f"/dns4/localhost/tcp/{at.addresses[0].split('/')[4]}/p2p/{at.me}",))
        (place,) = (await a.circuits.reserve(at.me)).addresses
        assert place.startswith("/dns4/localhost/")
        await b.network.connect(place)
        assert b.network.connections.path(a.network.me) == "relayed"


async def test_two_who_hold_places_at_one_relay_dial_each_other() -> None:
    """Their addresses differ in who stands at the end only, which is not what tells a node's own from others'."""

    async with relayed() as (at, _relay, a, b):
        for end in (a, b):
            end.network.announce_instead((await end.circuits.reserve(at.me)).addresses)
        b.network.learn(a.network.me, a.network.addresses)
        await b.network.connect(a.network.me)
        assert await there_and_back(b.network, a.network.me, b"hello") == b"hello"
