"""Hole punching: both sides dial at one moment, three times at the most, and failures are remembered for long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import trio
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import receive, send
from swarmnode.node.nat import udp
from swarmnode.node.nat.holepunch import (
    ANSWERS,
    ANSWERS_AT_ONCE,
    ATTEMPTS,
    DCUTR,
    DIAL_WITHIN,
    GREETING,
    RETRY_AFTER,
    RETRY_AT_MOST,
    HolePuncher,
)
from swarmnode.node.nat.reachability import Reachability
from swarmnode.node.nat.relay import RelayServer
from swarmnode.protocols.network import NetworkError, Stream
from swarmnode.testing.simnet import SimNetwork, SimWorld

pytestmark = pytest.mark.virtual_time

LATENCY = 0.08  # s one way
HERE = "/ip4/45.80.10.3/tcp/4077"
THERE = "/ip4/45.80.10.4/tcp/61044"


@dataclass
class Dials:
    """Stands for py-libp2p's swarm and for what a dial brings: notes what is dialled, when, and in which role."""

    works: bool = False
    raises: Exception | None = None  # else that nobody answers
    direct: bool = False
    heard: bytes = b""  # from the other side, once it is connected, before this side speaks
    made: list[tuple[float, str, str]] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)  # what is dialled from another port than the listening one

    @property
    def transport_manager(self) -> Any:
        return SimpleNamespace(transport_for_dialing=lambda place: self)

    async def dial_with_source(self, place: Multiaddr, source: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if source is None:
            self.elsewhere.append(str(place))
            await trio.sleep(DIAL_WITHIN)
            raise SwarmException("nobody answers")

        async def speaks() -> None:
            if not self.heard:
                await trio.sleep_forever()

        stream = SimpleNamespace(speaks=speaks, waiting=lambda: len(self.heard), abort=lambda: None)
        return SimpleNamespace(stream=stream, place=place, at=trio.current_time())

    async def upgrade_outbound_raw_conn(self, raw: Any, peer: ID) -> None:
        await self._upgrade("speaks first", raw)

    async def upgrade_inbound_raw_conn(self, raw: Any, place: Multiaddr) -> None:
        await self._upgrade("answers", raw)

    async def _upgrade(self, role: str, raw: Any) -> None:
        self.made.append((raw.at, role, str(raw.place)))
        await trio.lowlevel.checkpoint()
        if not self.works:
            raise self.raises or SwarmException("nobody answers")
        self.direct = True


@dataclass
class Side:
    network: SimNetwork
    dials: Dials
    puncher: HolePuncher


class Punching:
    """A simulated network with the dials of a swarm."""

    def __init__(self, network: SimNetwork, dials: Dials) -> None:
        self._network = network
        self.swarm = dials
        self.connections = SimpleNamespace(note=lambda peer, why: None, path=lambda peer: "relayed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    own_addresses: tuple[str, ...] = ()

    def dial_source(self, host: str) -> tuple[str, int]:
        return "0.0.0.0", 4077

    def is_direct(self, peer: str) -> bool:
        return self.swarm.direct


def side(network: SimNetwork, place: str, **how: Any) -> Side:
    dials = Dials(**how)
    punching: Any = Punching(network, dials)
    places = (f"{place}/p2p/{network.me}",)
    reachability: Any = SimpleNamespace(places=lambda own: places, mapped_udp=(), contacted=lambda host: None)
    without_udp: Any = SimpleNamespace(look_around=trio.lowlevel.checkpoint, places=lambda mapped: ())
    return Side(network, dials, HolePuncher(punching, reachability, without_udp))


@asynccontextmanager
async def two(**how: Any) -> AsyncIterator[tuple[Side, Side]]:
    """B, who was dialled through a relay, and A, who dialled; with addresses HERE and THERE."""
    world = SimWorld(latency=LATENCY)
    async with trio.open_nursery() as nursery:
        b, a = (world.node(name) for name in ("b", "a"))
        for node in (b, a):
            await nursery.start(node.run)
        await b.connect(a.addresses[0])
        yield side(b, HERE, **how), side(a, THERE, **how)
        nursery.cancel_scope.cancel()


async def test_both_dial_the_others_address_at_one_moment() -> None:
    async with two(works=True, heard=GREETING) as (b, a):
        assert await b.puncher.punch(a.network.me)
        ((at_b, _, dialled_by_b),), ((at_a, _, dialled_by_a),) = b.dials.made, a.dials.made
        assert (dialled_by_b, dialled_by_a) == (THERE, HERE)
        assert abs(at_b - at_a) < LATENCY / 4
        assert (b.puncher.succeeded, b.puncher.failed) == (1, 0)


async def test_who_dialled_through_the_relay_speaks_first_and_from_the_second_attempt_on_both_do() -> None:
    async with two() as (b, a):
        assert not await b.puncher.punch(a.network.me)
        assert [role for _, role, _ in b.dials.made] == ["answers"] + ["speaks first"] * (ATTEMPTS - 1)
        assert [role for _, role, _ in a.dials.made] == ["speaks first"] * ATTEMPTS
        assert (b.dials.elsewhere, a.dials.elsewhere) == ([THERE], []), "a listener that lets all in is met at once"


async def test_over_udp_who_dialled_dials_and_from_the_second_attempt_on_both_do() -> None:
    """A go-libp2p that dialled waits to be dialled itself."""
    spoke: dict[str, list[bool]] = {}
    async with two() as (b, a):
        for name, side in (("b", b), ("a", a)):

            async def punch(peer: str, theirs: Any, *, dials: bool, speaks: bool, name: str = name) -> None:
                spoke.setdefault(name, []).append(speaks)

            udp_of: Any = side.puncher._udp
            udp_of.punch, udp_of.probes = punch, lambda theirs: False
            udp_of.places = lambda mapped: ("/ip4/45.80.10.5/udp/4077/quic-v1",)
        assert not await b.puncher.punch(a.network.me)
    assert spoke == {"b": [False] + [True] * (ATTEMPTS - 1), "a": [True] * ATTEMPTS}


@pytest.mark.parametrize(("heard", "role"), [(GREETING, "speaks first"), (GREETING + b"\x07/noise\n", "answers")])
async def test_who_dialled_answers_a_side_that_is_heard_to_propose_first(heard: bytes, role: str) -> None:
    """As go-libp2p does; a greeting alone comes from those as well who answer."""
    async with two(works=True, heard=heard) as (b, a):
        assert await b.puncher.punch(a.network.me)
        assert [made for _, made, _ in a.dials.made] == [role]


async def test_a_pair_that_cannot_be_punched_is_tried_a_few_times_and_then_left_alone() -> None:
    async with two() as (b, a):
        began, peer = trio.current_time(), a.network.me
        assert b.puncher.worth_trying(peer)
        assert not await b.puncher.punch(peer)
        assert trio.current_time() - began < ATTEMPTS * (DIAL_WITHIN + 8 * LATENCY)
        assert len(b.dials.made) == ATTEMPTS and b.puncher.failed == 1
        assert not b.puncher.worth_trying(peer)
        await trio.sleep(RETRY_AFTER - 1)
        assert not b.puncher.worth_trying(peer)
        await trio.sleep(2)
        assert b.puncher.worth_trying(peer)


async def test_whatever_a_dial_raises_it_has_failed() -> None:
    """Who answers at the address that a peer named may say anything."""

    garbage = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    async with two(raises=garbage) as (b, a):
        assert not await b.puncher.punch(a.network.me)
        assert b.puncher.failed == 1


async def test_an_address_that_libp2p_cannot_read_is_not_told() -> None:
    """An owner may announce a container's name, which may have an underscore."""

    async with two(works=True, heard=GREETING) as (b, a):
        reachability: Any = b.puncher._reachability
        reachability.places = lambda own: ("/dns4/my_seed/tcp/4077", HERE)
        assert await b.puncher.punch(a.network.me)
        assert [place for _, _, place in a.dials.made] == [HERE]


def test_where_no_further_socket_can_be_opened_nothing_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        network: Any = SimpleNamespace(me="me")
        await udp.UdpPuncher(network)._open_many("peer", ("192.0.2.1", 4077), dials=True)

    monkeypatch.setattr(udp, "SOCKETS", 0)
    trio.run(main)


def test_a_process_without_a_limit_of_files_opens_as_many_sockets_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        network: Any = SimpleNamespace(me="me")
        puncher = udp.UdpPuncher(network)
        with trio.move_on_after(0.2):
            await puncher._open_many("peer", ("127.0.0.1", 9), dials=False)
        return puncher.packets["further sockets"]

    monkeypatch.setattr(udp, "SOCKETS", 3)
    monkeypatch.setattr(udp.resource, "getrlimit", lambda _: (udp.resource.RLIM_INFINITY,) * 2)
    assert trio.run(main) == 3


async def test_each_failure_is_remembered_longer_up_to_a_bound() -> None:
    async with two() as (b, a):
        waits = []
        for _ in range(8):
            await b.puncher.punch(a.network.me)
            began = trio.current_time()
            while not b.puncher.worth_trying(a.network.me):  # noqa: ASYNC110 (the clock jumps)
                await trio.sleep(30)
            waits.append(trio.current_time() - began)
        assert waits[1] == pytest.approx(2 * waits[0], abs=60) and waits[2] == pytest.approx(4 * waits[0], abs=60)
        assert waits[-2:] == pytest.approx([RETRY_AT_MOST] * 2, abs=60)


async def test_a_changed_network_makes_everybody_worth_trying() -> None:
    async with two() as (b, a):
        await b.puncher.punch(a.network.me)
        b.puncher.forget_failures()
        assert b.puncher.worth_trying(a.network.me)


async def test_a_peer_that_does_not_take_part_is_tried_once() -> None:
    asked = []

    async def refuse(stream: Stream) -> None:
        asked.append(await receive(stream, pb.HolePunch))
        await send(stream, pb.HolePunch(type=pb.HolePunch.SYNC))

    async with two() as (b, a):
        a.network.serve(DCUTR, refuse)
        assert not await b.puncher.punch(a.network.me)
        assert len(asked) == 1 and b.dials.made == [] and not b.puncher.worth_trying(a.network.me)


async def test_one_peer_is_punched_to_once_at_a_time() -> None:
    async with two() as (b, a), trio.open_nursery() as nursery:
        nursery.start_soon(b.puncher.punch, a.network.me)
        await trio.sleep(LATENCY)
        assert not b.puncher.worth_trying(a.network.me)
        assert not await b.puncher.punch(a.network.me)
        assert b.puncher.failed == 0  # the second did nothing


async def test_a_direct_connection_is_not_punched_for() -> None:
    async with two(direct=True) as (b, a):
        assert await b.puncher.punch(a.network.me)
        assert b.dials.made == a.dials.made == []


@pytest.mark.parametrize(
    "messages",
    [
        [pb.HolePunch(type=pb.HolePunch.SYNC)],
        [pb.HolePunch(type=pb.HolePunch.CONNECT), pb.HolePunch(type=pb.HolePunch.CONNECT)],
        [],
    ],
    ids=["SYNC first", "CONNECT twice", "nothing"],
)
async def test_messages_in_another_order_dial_nobody(messages: list[Any]) -> None:
    async with two() as (b, a):
        stream = await b.network.open_stream(a.network.me, DCUTR)
        for message in messages:
            await send(stream, message)
        await stream.send_eof()
        await trio.sleep(60)
        assert a.dials.made == []


async def ask(network: SimNetwork, peer: str, *places: str) -> None:
    """Have `peer` take part, and dial `places`."""
    stream = await network.open_stream(peer, DCUTR)
    try:
        packed = [Multiaddr(place).to_bytes() for place in places]
        await send(stream, pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=packed))
        await receive(stream, pb.HolePunch)
        await send(stream, pb.HolePunch(type=pb.HolePunch.SYNC))
        await stream.receive_some(1)
    except NetworkError:
        await stream.aclose()


async def test_a_peer_that_is_connected_directly_has_this_node_dial_nobody() -> None:
    async with two(direct=True) as (b, a):
        await ask(b.network, a.network.me, HERE)
        assert a.dials.made == []


async def test_places_of_local_networks_are_dialled_from_within_them_only() -> None:
    local = [f"/ip{6 if ':' in host else 4}/{host}/tcp/4077" for host in ("127.0.0.1", "192.168.7.3", "fd00::7")]
    disguised = "/ip6/::ffff:127.0.0.1/tcp/4077"
    async with two() as (b, a):
        await ask(b.network, a.network.me, *local, disguised, HERE)
        assert [place for _, _, place in a.dials.made] == [HERE]
        a.dials.made.clear()
        a.puncher._network.own_addresses = ("/dns4/seed/tcp/4077", "/ip4/192.168.2.9/tcp/4077")  # type: ignore[misc]
        await ask(b.network, a.network.me, *local, disguised)
        assert [place for _, _, place in a.dials.made] == ["/ip4/192.168.7.3/tcp/4077"]


async def test_a_peer_cannot_have_this_node_dial_many_times_at_once() -> None:
    async with two() as (b, a):
        with trio.move_on_after(DIAL_WITHIN):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask, b.network, a.network.me, HERE)
        assert len(a.dials.made) == ANSWERS_AT_ONCE


async def test_a_peer_cannot_have_this_node_dial_again_and_again() -> None:
    """Wherever it says that it is, such as at the machine of a third."""
    async with two() as (b, a):
        for _ in range(20):
            with trio.move_on_after(DIAL_WITHIN):
                await ask(b.network, a.network.me, HERE)
        assert len(a.dials.made) == ANSWERS.burst
        await trio.sleep(1 / ANSWERS.rate)
        with trio.move_on_after(DIAL_WITHIN):
            await ask(b.network, a.network.me, HERE)
        assert len(a.dials.made) == ANSWERS.burst + 1


def relay_of(node: Libp2pNetwork, peer: Libp2pNetwork) -> str | None:
    best = node.connections.best(peer.me)
    assert best is not None
    return best.relay


def test_a_circuit_between_real_hosts_becomes_direct() -> None:
    async def main() -> None:
        at, a, b = hosts.network(), hosts.network(), hosts.network()
        async with hosts.running(at, a, b, RelayServer(at, at.policy)):
            punchers = [HolePuncher(node, Reachability(), udp.UdpPuncher(node)) for node in (a, b)]
            for network in (a, b):
                await network.connect(at.addresses[0])
            await b.relay_client.reserve(at.me)
            await a.relay_client.dial(at.me, b.me)
            assert b.dialled_through_relay(a.me) and relay_of(b, a) == relay_of(a, b) == at.me
            assert await punchers[1].punch(a.me)
            assert b.is_direct(a.me) and relay_of(b, a) is None and not b.dialled_through_relay(a.me)

    trio.run(main)


def test_who_is_gone_when_its_turn_comes_is_not_dialled_again() -> None:
    async def main() -> None:
        async with two(works=True) as (b, a):
            b.puncher._network.connections.path = lambda peer: "none"  # type: ignore[method-assign]
            assert not await b.puncher.punch(a.network.me)
            assert not b.dials.made and not b.puncher.failed and b.puncher.worth_trying(a.network.me)

    trio.run(main)
