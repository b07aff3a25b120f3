"""Places at relays: two are kept, renewed in time, replaced within ten seconds; who refuses is left alone a while."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.nat.relay import (
    DRAW_FROM,
    HOP,
    RELAY_KEY,
    RENEW_EVERY,
    REST,
    WANTED,
    RelayClient,
    RelayRefused,
    Reservation,
)
from swarmnode.protocols.network import PeerId, Unreachable
from swarmnode.testing.simnet import SimNetwork, SimWorld

pytestmark = pytest.mark.virtual_time


class Behind:
    """A simulated network of which some peers relay, with what is announced each time; `rtts` in seconds by peer."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self.hop: Callable[[PeerId], bool] = lambda peer: True
        self.rtt: Callable[[PeerId], float | None] = lambda peer: None
        self.changes: list[tuple[str, ...] | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def speaks(self, peer: PeerId, protocol: str) -> bool:
        return protocol == HOP and self.hop(peer)

    def announce_instead(self, found: tuple[str, ...] | None) -> None:
        self.changes.append(found)


class Client(RelayClient):
    """Gets places at relays, or does not."""

    def __init__(self, network: Behind, names: dict[PeerId, str], kill: Callable[[PeerId], None]) -> None:
        super().__init__(cast(Any, network), cast(Any, None), HostAllowance())
        self._names, self._kill = names, kill
        self.asked: list[tuple[float, str]] = []  # when, which
        self.refuse: set[str] = set()
        self.silent: set[str] = set()
        self.gone: set[str] = set()
        self.dies: set[str] = set()  # as it answers

    async def reserve(self, relay: PeerId) -> Reservation:
        name = self._names[relay]
        self.asked.append((trio.current_time(), name))
        if name in self.silent:
            await trio.sleep_forever()
        await trio.sleep(0.1)
        if name in self.refuse:
            raise RelayRefused(relay, pb.RESERVATION_REFUSED)
        if name in self.gone:
            raise Unreachable(f"{name} is gone")
        await self._network.connect(relay)
        if name in self.dies:
            self._kill(relay)
            await trio.sleep(0.1)
        return Reservation(trio.current_time(), (f"/ip4/45.0.0.1/tcp/1/p2p/{relay}/p2p-circuit",))

    def count(self, name: str) -> int:
        return sum(asked == name for _, asked in self.asked)


class Lab:
    """A private node that is connected to relays r0, r1, …; `changes` are the addresses after each change."""

    def __init__(self, world: SimWorld, me: SimNetwork, relays: dict[str, SimNetwork]) -> None:
        self.world, self.me, self.nodes = world, me, relays
        self._names = {node.me: name for name, node in relays.items()}
        self.hop = set(relays)
        self.rtts: dict[str, float] = {}
        behind = Behind(me)
        behind.hop = lambda peer: self._names.get(peer) in self.hop
        behind.rtt = lambda peer: self.rtts.get(self._names[peer])
        self.changes = behind.changes
        self.relays = Client(behind, self._names, world.kill)

    @property
    def held(self) -> set[str]:
        return {self._names[relay] for relay in self.relays.relays}


@asynccontextmanager
async def private(relays: int, connected: int | None = None) -> AsyncIterator[Lab]:
    world = SimWorld(latency=0.02, silence=5.0)
    async with trio.open_nursery() as nursery:
        me = world.node("me")
        nodes = {f"r{number}": world.node(f"r{number}") for number in range(relays)}
        for node in (me, *nodes.values()):
            await nursery.start(node.run)
        for node in list(nodes.values())[:connected]:
            await me.connect(node.addresses[0])
        lab = Lab(world, me, nodes)
        nursery.start_soon(lab.relays.run)
        yield lab
        nursery.cancel_scope.cancel()


async def test_two_places_are_held_and_their_addresses_told() -> None:
    async with private(4) as lab:
        await trio.sleep(1)
        assert len(lab.held) == WANTED == 2
        assert len(lab.relays.addresses) == 2 and lab.changes[-1] == lab.relays.addresses


async def test_peers_that_do_not_relay_are_not_asked() -> None:
    async with private(3) as lab:
        lab.hop = {"r1"}
        await trio.sleep(30)
        assert lab.held == {"r1"} and {name for _, name in lab.relays.asked} == {"r1"}


async def test_a_dead_relay_is_replaced_within_ten_seconds() -> None:
    async with private(4) as lab:
        await trio.sleep(1)
        dead = min(lab.held)
        lab.relays.gone.add(dead)
        lab.world.kill(lab.nodes[dead].me)
        await trio.sleep(10)
        assert len(lab.held) == 2 and dead not in lab.held


async def test_a_dead_relay_is_replaced_within_ten_seconds_though_the_next_one_is_silent() -> None:
    for seed in range(6):  # whichever is drawn first
        async with private(4) as lab:
            lab.relays._random.seed(seed)
            lab.hop = {"r0", "r1"}
            await trio.sleep(1)
            lab.hop, lab.relays.silent = {"r0", "r1", "r2", "r3"}, {"r2"}
            lab.world.kill(lab.nodes["r0"].me)
            await trio.sleep(10)
            assert lab.held == {"r1", "r3"}


async def test_a_relay_lost_as_its_answer_is_read_is_not_held() -> None:
    async with private(1) as lab:
        lab.relays.dies = {"r0"}
        await trio.sleep(30)
        assert lab.relays.count("r0") == 1 and lab.held == set() and lab.relays.addresses == ()


async def test_both_relays_lost_at_once_are_both_replaced() -> None:
    async with private(4) as lab:
        await trio.sleep(1)
        for name in lab.held:
            lab.world.kill(lab.nodes[name].me)
        await trio.sleep(10)
        assert len(lab.held) == 2


async def test_a_relay_that_gave_the_place_to_another_rests_and_is_asked_again_later() -> None:
    async with private(2) as lab:
        await trio.sleep(1)
        lab.relays.lose(lab.nodes["r0"].me)
        assert lab.held == {"r1"} and lab.changes[-1] == lab.relays.addresses
        await trio.sleep(REST - 1)
        assert lab.held == {"r1"} and lab.relays.count("r0") == 1
        await trio.sleep(10)
        assert lab.held == {"r0", "r1"}


async def test_a_relay_that_refuses_rests_and_is_asked_again_later() -> None:
    async with private(1) as lab:
        lab.relays.refuse = {"r0"}
        await trio.sleep(REST - 1)
        assert lab.relays.count("r0") == 1 and lab.held == set()
        lab.relays.refuse.clear()
        await trio.sleep(10)
        assert lab.held == {"r0"}


async def test_places_are_asked_for_again_every_five_minutes_and_no_address_changes() -> None:
    async with private(2) as lab:
        await trio.sleep(1)
        changes, began = len(lab.changes), len(lab.relays.asked)
        await trio.sleep(RENEW_EVERY - 10)
        assert len(lab.relays.asked) == began  # not all the time
        await trio.sleep(70)
        assert len(lab.relays.asked) == began + 2 and len(lab.held) == 2 and len(lab.changes) == changes


async def test_a_place_that_is_not_renewed_is_given_up() -> None:
    async with private(3) as lab:
        await trio.sleep(1)
        (given_up, *_), other = sorted(lab.held), {"r0", "r1", "r2"} - lab.held
        lab.relays.refuse = {given_up}
        await trio.sleep(RENEW_EVERY + 100)
        assert given_up not in lab.held and other < lab.held


async def test_relays_that_nobody_is_connected_to_are_found_in_the_dht() -> None:
    async with private(2, connected=1) as lab:
        await lab.nodes["r1"].provide(RELAY_KEY)
        await lab.nodes["r1"].connect(lab.nodes["r0"].addresses[0])
        await trio.sleep(40)
        assert lab.held == {"r0", "r1"}


async def test_a_silent_dht_keeps_no_place_from_being_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: SimNetwork, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(SimNetwork, "find_providers", never)
    async with private(2, connected=1) as lab:
        await trio.sleep(1)
        assert lab.held == {"r0"}
        await lab.me.connect(lab.nodes["r1"].addresses[0])
        await trio.sleep(6)
        assert lab.held == {"r0", "r1"}


async def test_the_two_places_are_not_of_one_network_where_another_relays_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(6):
        async with private(DRAW_FROM + 1) as lab:
            far, views = lab.nodes[f"r{DRAW_FROM}"].me, lab.me.peers
            near = {view.peer for view in views()} - {far}
            seen = [replace(view, group="a" if view.peer in near else "b") for view in views()]
            monkeypatch.setattr(lab.me, "peers", lambda seen=seen: seen)
            lab.relays._random.seed(seed)
            lab.rtts = {f"r{number}": 0.01 * (number + 1) for number in range(DRAW_FROM + 1)}
            await trio.sleep(1)
            assert f"r{DRAW_FROM}" in lab.held and len(lab.held) == WANTED


async def test_nodes_spread_over_the_nearest_relays_and_leave_far_ones_alone() -> None:
    drawn: set[str] = set()
    for seed in range(12):
        async with private(DRAW_FROM + 3) as lab:
            lab.relays._random.seed(seed)
            lab.rtts = {f"r{number}": 0.01 * (number + 1) for number in range(DRAW_FROM + 3)}
            await trio.sleep(1)
            drawn |= lab.held
    assert drawn >= {f"r{number}" for number in range(DRAW_FROM)} and f"r{DRAW_FROM + 2}" not in drawn


async def test_who_becomes_public_has_no_circuits_to_announce_any_more() -> None:
    async with private(2) as lab:
        await trio.sleep(1)
        assert lab.relays.addresses
    assert lab.relays.addresses == ()
