"""Port mapping at routers in name only: NAT-PMP, then UPnP; renewed, given back at the end, never waited for."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import miniupnpc
import pytest
import trio
import trio.testing

from swarmnode.node.nat import portmap
from swarmnode.node.nat.portmap import (
    ASK_AGAIN,
    GIVE_BACK_WITHIN,
    LEASE,
    MappingRefused,
    PortMapping,
    default_gateway,
)
from swarmnode.node.nat.reachability import Mapping, Reach, Reachability

FIND_IGD = portmap._find_igd  # the real one; tests put another in its place
OUTER = "45.80.10.3"
PORT = 4077


class Router:
    """NAT-PMP on loopback. `mapped` is from inner to outer port; `lifetimes` those asked for."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.lifetimes: list[int] = []
        self.result = 0
        self.silent = False
        self.taken: set[int] = set()
        self.seconds = LEASE
        self.port = 0

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            await udp.bind(("127.0.0.1", 0))
            self.port = udp.getsockname()[1]
            task_status.started()
            while True:
                request, asker = await udp.recvfrom(64)
                if not self.silent:
                    await udp.sendto(self._answer(request), asker)

    def _answer(self, request: bytes) -> bytes:
        if request[1] == 0:
            return struct.pack("!BBHI4s", 0, 128, self.result, 1, socket.inet_aton(OUTER))
        _, _, _, inner, wanted, lifetime = struct.unpack("!BBHHHI", request)
        self.lifetimes.append(lifetime)
        outer = wanted + 1 if wanted in self.taken else wanted
        if lifetime:
            self.mapped[inner] = outer
        else:
            self.mapped.pop(inner, None)
        return struct.pack("!BBHIHHI", 0, 130, self.result, 1, inner, outer, min(lifetime, self.seconds))


class Igd:
    """A UPnP router, as miniupnpc shows it."""

    lanaddr = "192.168.1.2"

    def __init__(self, *, permanent_only: bool = False, taken: tuple[int, ...] = ()) -> None:
        self.mapped: dict[int, tuple[str, int, int]] = {}
        self._permanent_only = permanent_only
        self._taken = taken

    def externalipaddress(self) -> str:
        return OUTER

    def addportmapping(
        self, outer: int, kind: str, host: str, inner: int, _what: str, _remote: str, lease: int
    ) -> bool:
        if outer in self._taken:
            raise Exception("ConflictInMappingEntry")
        if lease and self._permanent_only:
            raise Exception("OnlyPermanentLeasesSupported")
        self.mapped[outer] = (host, inner, lease)
        return True

    def deleteportmapping(self, outer: int, kind: str) -> bool:
        return self.mapped.pop(outer, None) is not None


class Counted(Reachability):
    """Counts how often the mapping became another one."""

    changes = 0

    def _forget_verdicts(self) -> None:
        self.changes += 1


class Lab:
    """`listens` is where the node does, `reachability` whether it needs a port, and which one it has."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.reachability = Counted()
        self.listens: tuple[str, int] | None = ("0.0.0.0", PORT)
        network: Any = SimpleNamespace(dial_source=lambda host: self.listens)
        self.ports = PortMapping(network, self.reachability)
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    async def run(self) -> None:
        with self.scope:
            await self.ports.run()
        self.ended.set()

    async def settled(self) -> Mapping | None:
        """The mapping once the first attempt is over."""
        while self.ports.state == "not asked for yet":  # noqa: ASYNC110 (the clock jumps)
            await trio.sleep(0.25)
        return self.reachability.mapping


@pytest.fixture(autouse=True)
def igd(monkeypatch: pytest.MonkeyPatch) -> list[Igd]:
    """The UPnP routers that answer: the first one, where there is any."""
    found: list[Igd] = []

    def find() -> Igd:
        if not found:
            raise Exception("no router answers")
        return found[0]

    monkeypatch.setattr(portmap, "_find_igd", find)
    monkeypatch.setattr(portmap, "default_gateway", lambda: "127.0.0.1")
    return found


@asynccontextmanager
async def lab(**how: Any) -> AsyncIterator[Lab]:
    with trio.fail_after(30_000):
        async with trio.open_nursery() as nursery:
            router = Router()
            for name, value in how.items():
                setattr(router, name, value)
            await nursery.start(router.run)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(portmap, "NAT_PMP_PORT", router.port)
                made = Lab(router)
                nursery.start_soon(made.run)
                yield made
            nursery.cancel_scope.cancel()


def under_jumping_clock(main: Any) -> None:
    """As fast as the sockets of this machine answer."""
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_a_router_with_nat_pmp_maps_the_listening_port() -> None:
    async def main() -> None:
        async with lab() as it:
            assert await it.settled() == Mapping("NAT-PMP", OUTER, PORT, PORT, LEASE)
            assert it.reachability.mapping is not None and it.reachability.mapping.address == f"/ip4/{OUTER}/tcp/{PORT}"
            assert it.reachability.changes == 1 and it.router.mapped == {PORT: PORT}

    under_jumping_clock(main)


def test_a_port_that_is_taken_gives_another_one_and_it_is_kept() -> None:
    async def main() -> None:
        async with lab(taken={PORT}) as it:
            mapping = await it.settled()
            assert mapping is not None and mapping.port == PORT + 1
            it.router.taken.clear()
            await trio.sleep(LEASE)
            assert it.reachability.mapping == mapping and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_mapping_is_renewed_at_half_its_lease() -> None:
    async def main() -> None:
        async with lab(seconds=100) as it:
            await it.settled()
            await trio.sleep(48)
            assert len(it.router.lifetimes) == 1
            await trio.sleep(4)
            assert it.router.lifetimes == [LEASE, LEASE] and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_mapping_is_renewed_while_the_node_is_public_by_it() -> None:
    async def main() -> None:
        async with lab(seconds=100) as it:
            await it.settled()
            it.reachability.state = Reach.PUBLIC
            await trio.sleep(52)
            assert len(it.router.lifetimes) == 2 and it.reachability.mapping is not None

    under_jumping_clock(main)


def test_the_mapping_is_given_back_at_the_end() -> None:
    async def main() -> None:
        async with lab() as it:
            await it.settled()
            it.scope.cancel()
            await it.ended.wait()
            assert it.router.lifetimes == [LEASE, 0] and it.router.mapped == {} and it.reachability.mapping is None

    under_jumping_clock(main)


def test_a_router_that_went_silent_does_not_hold_up_the_end() -> None:
    async def main() -> None:
        async with lab() as it:
            await it.settled()
            it.router.silent = True
            began = trio.current_time()
            it.scope.cancel()
            await it.ended.wait()
            assert trio.current_time() - began <= GIVE_BACK_WITHIN + 0.5

    under_jumping_clock(main)


def test_upnp_is_asked_where_nat_pmp_is_not_spoken_and_unmapped_at_the_end(igd: list[Igd]) -> None:
    igd.append(Igd())

    async def main() -> None:
        async with lab(silent=True) as it:
            mapping = await it.settled()
            assert mapping is not None and (mapping.way, mapping.port) == ("UPnP", PORT)
            assert igd[0].mapped == {PORT: (Igd.lanaddr, PORT, LEASE)}
            it.scope.cancel()
            while igd[0].mapped:  # noqa: ASYNC110 (a thread does it)
                await trio.sleep(0.01)

    under_jumping_clock(main)


def test_a_upnp_router_without_leases_maps_all_the_same(igd: list[Igd]) -> None:
    igd.append(Igd(permanent_only=True))

    async def main() -> None:
        async with lab(silent=True) as it:
            assert await it.settled() is not None and igd[0].mapped == {PORT: (Igd.lanaddr, PORT, 0)}

    under_jumping_clock(main)


def test_upnp_takes_the_next_port_where_another_machine_has_this_one(igd: list[Igd]) -> None:
    igd.append(Igd(taken=(PORT, PORT + 1)))

    async def main() -> None:
        async with lab(silent=True) as it:
            mapping = await it.settled()
            assert mapping is not None and mapping.port == PORT + 2

    under_jumping_clock(main)


def test_a_network_without_any_upnp_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody:
        """What miniupnpc 2.3 does where nothing answers."""

        def discover(self) -> int:
            raise Exception("Success")

    monkeypatch.setattr(miniupnpc, "UPnP", Nobody)
    with pytest.raises(MappingRefused, match="no router answers"):
        FIND_IGD()


def test_refusals_of_both_kinds_are_told_and_the_router_is_left_alone_for_a_while() -> None:
    async def main() -> None:
        async with lab(result=2) as it:
            assert await it.settled() is None and it.reachability.changes == 0
            assert "NAT-PMP: the router refuses (result 2)" in it.ports.state and "no router answers" in it.ports.state
            it.router.result = 0
            await trio.sleep(ASK_AGAIN - 10)
            assert it.reachability.mapping is None
            await trio.sleep(20)
            assert it.reachability.mapping is not None and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_mapping_that_is_not_renewed_is_no_more() -> None:
    async def main() -> None:
        async with lab() as it:
            await it.settled()
            it.router.silent = True
            await trio.sleep(LEASE)
            assert it.reachability.mapping is None and it.reachability.changes == 2

    under_jumping_clock(main)


def test_no_router_is_asked_by_a_node_that_is_public() -> None:
    async def main() -> None:
        async with lab() as it:
            it.reachability.state = Reach.PUBLIC
            await trio.sleep(100)
            assert it.ports.state == "not needed" and it.router.lifetimes == []

    under_jumping_clock(main)


@pytest.mark.parametrize(
    ("listens", "gateway"),
    [
        (None, "127.0.0.1"),  # on IPv6 only
        (("127.0.0.1", PORT), "127.0.0.1"),  # for this machine only
        (("0.0.0.0", PORT), None),  # no way to the internet
        (("0.0.0.0", PORT), "45.0.0.1"),  # this machine has a public address
    ],
)
def test_no_router_is_asked_where_there_is_none_in_front(
    listens: tuple[str, int] | None, gateway: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portmap, "default_gateway", lambda: gateway)

    async def main() -> None:
        async with lab() as it:
            it.listens = listens
            assert await it.settled() is None and it.ports.state == "no router to ask"
            assert it.router.lifetimes == []

    under_jumping_clock(main)


def test_after_a_change_of_the_network_the_router_is_asked_anew() -> None:
    async def main() -> None:
        async with lab() as it:
            await it.settled()
            it.ports.ask_anew()
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert it.router.lifetimes == [LEASE, LEASE] and it.reachability.mapping is not None

    under_jumping_clock(main)


def test_the_gateway_is_that_of_the_default_route_with_the_least_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
    routes = [
        head,
        "wlan0\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0",
        "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0",
        "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0",
    ]
    monkeypatch.setattr(portmap, "ROUTES", tmp_path / "route")
    portmap.ROUTES.write_text("\n".join(routes))
    assert default_gateway() == "192.168.1.1"
    portmap.ROUTES.write_text("\n".join([head, routes[3]]))
    assert default_gateway() is None
