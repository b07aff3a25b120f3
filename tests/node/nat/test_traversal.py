"""A node's way through NATs as a whole: what it is found to be decides what it announces and whether it relays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarmnode.node.host.allowances import HostAllowance, PeerPolicy
from swarmnode.node.host.limits import RelayLimits
from swarmnode.node.host.stream import BadMessage, receive, send
from swarmnode.node.nat import traversal
from swarmnode.node.nat.reachability import AUTONAT, DialVerdict, Mapping
from swarmnode.node.nat.relay import HOP, RELAY_KEY, RelayClient, RelayRefused, Reservation
from swarmnode.node.nat.traversal import CHECK_AGAIN, CHECK_EVERY, NatTraversal
from swarmnode.protocols.network import Address, PeerEvent, PeerId, PeerView, StreamHandler

pytestmark = pytest.mark.virtual_time

ME = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OWN = "/ip4/192.168.1.2/tcp/4077"
OUTSIDE = "/ip4/45.80.10.3/tcp/4077"


class Client(RelayClient):
    """Gets a place at every relay that is connected."""

    def __init__(self, network: FakeNetwork) -> None:
        self.fake = network
        super().__init__(cast(Any, network), cast(Any, None), HostAllowance())

    async def reserve(self, relay: PeerId) -> Reservation:
        if relay not in self.fake.hosts:
            raise RelayRefused(relay, pb.NO_RESERVATION)
        place = f"/ip4/{self.fake.hosts[relay]}/tcp/1/p2p/{relay}/p2p-circuit/p2p/{ME}"
        return Reservation(1e12, (place,))


@dataclass
class Lookout:
    """A connection by which a peer sees where the listening port is."""

    is_closed: bool = False


class FakeNetwork:
    """What the traversal uses of a host: peers at addresses of their own, and what is announced."""

    me = ME
    policy = PeerPolicy()

    def __init__(self) -> None:
        self.swarm = self
        self.hosts: dict[PeerId, str] = {}
        self.hops: set[PeerId] = set()
        self.unseen: set[PeerId] = set()  # who cannot be dialled from the listening port
        self.lookouts: dict[PeerId, Lookout] = {}
        self.through: dict[PeerId, PeerId] = {}  # peers that dialled this node through a relay
        self.own: tuple[Address, ...] = (f"{OWN}/p2p/{ME}",)
        self.announced: tuple[Address, ...] | None = None
        self.served: dict[str, StreamHandler] = {}
        self.provided: set[bytes] = set()
        self._feeds: set[trio.MemorySendChannel[PeerEvent]] = set()
        self.relay_client = Client(self)
        self.connections = SimpleNamespace(of=lambda peer: ())

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.own if self.announced is None else self.announced

    @property
    def own_addresses(self) -> tuple[Address, ...]:
        return self.own

    def announce_instead(self, found: tuple[Address, ...] | None) -> None:
        self.announced = found

    def peers(self) -> tuple[PeerView, ...]:
        everybody = (*self.hosts, *self.through)
        return tuple(PeerView(p, "direct" if p in self.hosts else "relayed", 0.0, True, "") for p in everybody)

    def speaks(self, peer: PeerId, protocol: str) -> bool:
        return protocol == AUTONAT or (protocol == HOP and peer in self.hops)

    def host_of(self, peer: PeerId) -> str | None:
        return self.hosts.get(peer)

    def rtt(self, peer: PeerId) -> float | None:
        return 0.02

    def is_direct(self, peer: PeerId) -> bool:
        return peer in self.hosts

    def dialled_through_relay(self, peer: PeerId) -> bool:
        return peer in self.through

    def dial_source(self, host: str) -> tuple[str, int]:
        return "0.0.0.0", 4077

    async def connect_from_listening_port(self, peer: PeerId) -> Lookout | None:
        await trio.lowlevel.checkpoint()
        return None if peer in self.unseen else self.lookouts.setdefault(peer, Lookout())

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self.served[protocol] = handler

    async def provide(self, key: bytes) -> None:
        self.provided.add(key)

    def withdraw(self, key: bytes) -> None:
        self.provided.discard(key)

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        return ()

    @contextmanager
    def watch_peers(self) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        sender, reader = trio.open_memory_channel[PeerEvent](64)
        self._feeds.add(sender)
        try:
            yield reader
        finally:
            self._feeds.discard(sender)

    def comes(self, peer: PeerId, host: str, *, hop: bool = True) -> None:
        self.hosts[peer] = host
        self.hops |= {peer} if hop else set()
        self._tell(PeerEvent(peer, up=True))

    def goes(self, peer: PeerId) -> None:
        del self.hosts[peer]
        self._tell(PeerEvent(peer, up=False))

    def dials_through(self, peer: PeerId, relay: PeerId) -> None:
        self.through[peer] = relay
        self._tell(PeerEvent(peer, up=True))

    def _tell(self, event: PeerEvent) -> None:
        for feed in self._feeds:
            feed.send_nowait(event)


class Helpers:
    """Stands for AutoNAT: each helper answers what the test says, reached where it says."""

    def __init__(self, *_: object) -> None:
        self.place: Address | None = None  # where helpers get through; None: nowhere
        self.liars: set[PeerId] = set()
        self.mute: set[PeerId] = set()
        self.decline: set[PeerId] = set()
        self.seconds = 0.1  # that an answer takes
        self.asked: list[tuple[PeerId, tuple[Address, ...]]] = []

    async def ask(self, helper: PeerId, host: str, places: tuple[Address, ...]) -> DialVerdict | None:
        self.asked.append((helper, places))
        await trio.sleep(self.seconds)
        if helper in self.mute:
            raise BadMessage(f"{helper} says nothing")
        if helper in self.decline:
            return None
        through = (self.place is None) if helper in self.liars else (self.place is not None)
        return DialVerdict(host, through, trio.current_time(), (self.place or OWN) if through else None)


class Lab:
    def __init__(self) -> None:
        self.network = FakeNetwork()
        network: Any = self.network
        network.quic = SimpleNamespace(endpoints=[])  # it listens on no UDP port
        self.nat = NatTraversal(network, limits=RelayLimits(), upnp=False)
        self.helpers: Helpers = self.nat._autonat  # type: ignore[assignment]

    @property
    def reachability(self) -> str:
        return self.nat.how_reached

    @property
    def announced(self) -> set[Address]:
        return {address.partition(f"/p2p/{ME}")[0] for address in self.network.addresses}


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def seen_by(session: PeerId) -> Address:
        await trio.lowlevel.checkpoint()
        return OWN

    monkeypatch.setattr(traversal, "AutoNat", Helpers)
    monkeypatch.setattr(traversal, "seen_by", seen_by)


@asynccontextmanager
async def running(place: Address | None, helpers: int = 3) -> AsyncIterator[Lab]:
    """A node among `helpers` public peers that reach it at `place`."""
    lab = Lab()
    lab.helpers.place = place
    async with trio.open_nursery() as nursery:
        await nursery.start(lab.nat.run)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(helpers):
            lab.network.comes(f"h{number}", f"45.0.0.{number + 1}")
        await trio.sleep(5)
        yield lab
        nursery.cancel_scope.cancel()


async def may_reserve(lab: Lab) -> bool:
    """Whether this node takes a reservation of a peer now."""
    near, far = trio.testing.memory_stream_pair()

    class End:
        def __init__(self, stream: trio.StapledStream) -> None:
            self.peer, self._stream = next(iter(lab.network.hosts), ""), stream

        async def send_all(self, data: bytes) -> None:
            await self._stream.send_all(data)

        async def receive_some(self, most: int) -> bytes:
            return await self._stream.receive_some(most)

    here: Any
    there: Any
    here, there = End(near), End(far)
    handler = lab.network.served.get(HOP)
    if handler is None:
        return False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handler, there)
        await send(here, pb.HopMessage(type=pb.HopMessage.RESERVE))
        return bool((await receive(here, pb.HopMessage)).status == pb.OK)


async def test_where_others_saw_the_node_holds_for_as_long_as_their_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A provider gives another address over night, and the same peers come again."""
    place = OUTSIDE

    async def seen_by(session: Lookout) -> Address:
        await trio.lowlevel.checkpoint()
        return place

    monkeypatch.setattr(traversal, "seen_by", seen_by)
    async with running(OUTSIDE) as lab:
        seen = lab.nat.reachability.seen
        assert set(seen.values()) == {OUTSIDE}
        place = "/ip4/45.80.10.9/tcp/4077"
        for lookout in lab.network.lookouts.values():
            lookout.is_closed = True
        lab.network.lookouts.clear()
        lab.nat.reachability.changed.set()
        await trio.sleep(120)
        assert set(seen.values()) == {place}


async def test_before_anything_is_known_a_node_announces_its_own_addresses_and_relays_nothing() -> None:
    async with running(OUTSIDE, helpers=0) as lab:
        assert lab.reachability == "unknown" and lab.announced == {OWN}
        assert lab.helpers.asked == [] and not await may_reserve(lab)


async def test_a_public_node_announces_where_it_was_reached_first_and_relays() -> None:
    async with running(OUTSIDE) as lab:
        assert lab.reachability == "public"
        assert lab.network.addresses == (f"{OUTSIDE}/p2p/{ME}", f"{OWN}/p2p/{ME}")
        assert RELAY_KEY in lab.network.provided and await may_reserve(lab)


async def test_a_node_that_is_public_at_its_own_address_announces_just_that() -> None:
    async with running(OWN) as lab:
        assert lab.reachability == "public" and lab.network.announced is None


async def test_a_private_node_announces_circuits_only_and_relays_nothing() -> None:
    async with running(None) as lab:
        assert lab.reachability == "relayed" and len(lab.network.relay_client.relays) == 2
        assert len(lab.announced) == 2 and all("/p2p-circuit" in address for address in lab.announced)
        assert RELAY_KEY not in lab.network.provided and not await may_reserve(lab)


async def test_a_private_node_without_relays_announces_nothing() -> None:
    async with running(None, helpers=0) as lab:
        for number in range(3):
            lab.network.comes(f"x{number}", f"45.0.1.{number}", hop=False)
        await trio.sleep(30)
        assert lab.reachability == "private" and lab.announced == set()


async def test_circuit_addresses_follow_the_relays() -> None:
    async with running(None) as lab:
        lost, *_ = lab.network.relay_client.relays
        lab.network.goes(lost)
        await trio.sleep(10)
        assert len(lab.announced) == 2 and not any(lost in address for address in lab.announced)


async def test_a_relay_that_gives_the_place_to_another_is_replaced() -> None:
    async with running(None) as lab:
        gave_up, *_ = lab.network.relay_client.relays
        lab.network.relay_client.lose("h7")  # where this node has no place
        assert len(lab.announced) == 2
        lab.network.relay_client.lose(gave_up)
        await trio.sleep(10)
        assert len(lab.announced) == 2 and not any(gave_up in address for address in lab.announced)


@pytest.mark.parametrize(("place", "state"), [(OUTSIDE, "public"), (None, "relayed")])
async def test_one_liar_among_the_helpers_changes_nothing(place: Address | None, state: str) -> None:
    for liar in ("h0", "h1", "h2"):
        async with running(place, helpers=0) as lab:
            lab.helpers.liars = {liar}
            for number in range(3):
                lab.network.comes(f"h{number}", f"45.0.0.{number + 1}")
            await trio.sleep(CHECK_AGAIN)
            assert lab.reachability == state


async def test_helpers_that_say_nothing_do_not_keep_the_others_from_deciding() -> None:
    async with running(OUTSIDE, helpers=0) as lab:
        lab.helpers.mute, lab.helpers.decline = {"h0"}, {"h1"}
        for number in range(3):
            lab.network.comes(f"h{number}", f"45.0.0.{number + 1}")
        await trio.sleep(5)
        assert lab.reachability == "public" and lab.nat.reachability.counts()[0] == 1


async def test_helpers_are_asked_at_once_since_each_may_dial_in_vain_for_long() -> None:
    async with running(None, helpers=0) as lab:
        lab.helpers.seconds = 4.0
        for number in range(3):
            lab.network.comes(f"h{number}", f"45.0.0.{number + 1}")
        await trio.sleep(6)
        assert lab.reachability == "relayed" and lab.nat.reachability.counts()[1] == 3


async def test_no_more_helpers_are_asked_than_it_takes() -> None:
    async with running(OUTSIDE, helpers=0) as lab:
        for number in range(20):
            lab.network.comes(f"h{number}", f"45.0.0.{number + 1}")
        await trio.sleep(5)
        assert len(lab.helpers.asked) == 3
        lab.helpers.decline = set(lab.network.hosts)
        await trio.sleep(CHECK_EVERY - 1)
        assert len(lab.helpers.asked) == 3 + traversal.ASK_AT_MOST


async def test_the_kind_of_nat_is_looked_for_again_soon_and_then_ever_later() -> None:
    async with running(None, helpers=0) as lab:
        lab.helpers.decline = lab.network.unseen = {"h1", "h2"}
        for number in range(3):
            lab.network.comes(f"h{number}", f"45.0.0.{number + 1}")
        await trio.sleep(CHECK_EVERY / 2)
        assert lab.reachability == "relayed" and lab.nat.reachability.endpoint_independent() is None
        assert len(lab.helpers.asked) == 3 * 4  # after 20, 40 and 80 s
        lab.network.unseen = set()
        await trio.sleep(CHECK_EVERY)
        assert lab.nat.reachability.endpoint_independent() is True


async def test_several_peers_at_one_host_have_one_voice() -> None:
    async with running(None, helpers=0) as lab:
        lab.helpers.liars = {f"sybil{number}" for number in range(9)}
        for number in range(9):
            lab.network.comes(f"sybil{number}", "45.0.9.9")
        lab.network.comes("h1", "45.0.0.1")
        lab.network.comes("h2", "45.0.0.2")
        await trio.sleep(5)
        assert lab.reachability == "relayed"


async def test_the_local_network_is_not_asked_where_others_can_be() -> None:
    async with running(None, helpers=0) as lab:
        lab.helpers.liars = {"tv", "laptop", "printer"}  # they reach this node: they are in the same room
        for number, name in enumerate(sorted(lab.helpers.liars)):
            lab.network.comes(name, f"192.168.1.{number + 10}", hop=False)
        await trio.sleep(5)
        assert lab.reachability == "public"
        lab.network.comes("h0", "45.0.0.1")
        await trio.sleep(5)
        assert lab.reachability == "relayed" and lab.nat.reachability.counts()[0] == 0


async def test_a_node_that_becomes_public_gives_up_circuits_and_relays_itself() -> None:
    async with running(None) as lab:
        lab.helpers.place = OUTSIDE
        await trio.sleep(CHECK_EVERY + 5)
        assert lab.reachability == "public" and lab.network.relay_client.relays == ()
        assert lab.announced == {OUTSIDE, OWN} and await may_reserve(lab)


async def test_a_node_that_is_public_no_more_stops_relaying_and_saying_so() -> None:
    async with running(OUTSIDE) as lab:
        lab.helpers.place = None
        await trio.sleep(CHECK_EVERY + 5)
        assert lab.reachability == "relayed" and RELAY_KEY not in lab.network.provided
        assert not await may_reserve(lab) and OUTSIDE not in lab.announced


async def test_after_a_change_of_the_network_it_goes_on_as_before_until_it_is_known_anew() -> None:
    async with running(None) as lab:
        lab.helpers.decline = set(lab.network.hosts)
        lab.network.own = (f"/ip4/192.168.7.2/tcp/4077/p2p/{ME}",)
        await trio.sleep(30)
        assert lab.nat.reachability.counts() == (0, 0)
        assert all("/p2p-circuit" in address for address in lab.announced)
        lab.helpers.decline, lab.helpers.place = set(), OUTSIDE
        await trio.sleep(CHECK_AGAIN + 5)
        assert lab.reachability == "public" and OUTSIDE in lab.announced


async def test_a_private_node_that_is_reached_over_ipv6_announces_that_beside_its_relays() -> None:
    place = "/ip6/2a10:4580::2/tcp/4077"
    async with running(None) as lab:
        assert lab.reachability == "relayed" and len(lab.announced) == 2
        lab.helpers.place, lab.helpers.liars = (
            place,
            set(lab.network.hosts),
        )  # who came by IPv4 does not get through
        lab.network.comes("sixth", "2a10:4580:1::1", hop=False)
        await trio.sleep(5)
        assert lab.helpers.asked[-1] == ("sixth", ())  # of its own family: none here
        assert lab.reachability == "relayed" and place in lab.announced
        assert len(lab.announced) == 3 and lab.network.addresses[-1] == f"{place}/p2p/{ME}"


async def test_a_port_that_the_router_opened_is_asked_about_and_announced_once_it_works() -> None:
    mapped = "/ip4/45.80.10.3/tcp/50123"
    async with running(None, helpers=12) as lab:  # others may be asked than those that failed
        assert lab.reachability == "relayed"
        lab.helpers.place = mapped
        lab.nat.reachability.map_to("ip4", Mapping("UPnP", "45.80.10.3", 50123, 4077))
        await trio.sleep(5)
        assert lab.helpers.asked[-1][1][0] == mapped
        assert lab.reachability == "public" and lab.network.addresses[0] == f"{mapped}/p2p/{ME}"


async def test_who_dials_through_a_relay_is_punched_to_at_once_and_again_much_later() -> None:
    tried: list[float] = []
    async with running(None) as lab:

        async def fail(peer: PeerId) -> bool:
            tried.append(trio.current_time())
            lab.nat.puncher._remember(peer)
            return False

        lab.nat.puncher.punch = fail  # type: ignore[method-assign]
        began = trio.current_time()
        lab.network.dials_through("a", "h0")
        await trio.sleep(1)
        assert len(tried) == 1 and tried[0] - began < 1
        await trio.sleep(3600)
        assert len(tried) == 3  # after 10 and 20 minutes more, not every minute
