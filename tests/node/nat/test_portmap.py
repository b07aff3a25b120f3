"""Port mapping at routers in name only: PCP, NAT-PMP, then UPnP; renewed, given back at the end, never waited for."""

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

from swarmnode.node.nat import portmap, routers
from swarmnode.node.nat.portmap import (
    ASK_AGAIN,
    CHECK_EVERY,
    GIVE_BACK_WITHIN,
    PortMapping,
    default_gateway,
    default_gateway_of_ipv6,
)
from swarmnode.node.nat.reachability import Mapping, Reach, Reachability
from swarmnode.node.nat.routers import LEASE, MappingRefused

FIND_IGD = routers.find_igd  # the real one; tests put another in its place
OUTER = "45.80.10.3"
PORT = 4077


class Router:
    """NAT-PMP on loopback, PCP if it `knows_pcp`. `mapped` is from inner to outer port; `lifetimes` those asked for."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.mapped_udp: dict[int, int] = {}
        self.lifetimes: list[int] = []
        self.nonces: set[bytes] = set()
        self.result = 0
        self.silent = False
        self.knows_pcp = False
        self.taken: set[int] = set()
        self.seconds = LEASE
        self.outer = OUTER
        self.port = 0
        self.host = "127.0.0.1"

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_DGRAM) as udp:
            await udp.bind((self.host, 0))
            self.port = udp.getsockname()[1]
            task_status.started()
            while True:
                request, asker = await udp.recvfrom(64)
                if not self.silent:
                    await udp.sendto(self._answer(request), asker)

    def _answer(self, request: bytes) -> bytes:
        if request[0] == 2:
            return self._answer_pcp(request)
        if request[1] == 0:
            return struct.pack("!BBHI4s", 0, 128, self.result, 1, socket.inet_aton(self.outer))
        _, opcode, _, inner, wanted, lifetime = struct.unpack("!BBHHHI", request)
        outer = self._map(inner, wanted, lifetime, tcp=opcode == 2)
        seconds = min(lifetime, self.seconds)
        return struct.pack("!BBHIHHI", 0, 128 + opcode, self.result, 1, inner, outer, seconds)

    def _answer_pcp(self, request: bytes) -> bytes:
        if not self.knows_pcp:
            return struct.pack("!BBHI", 0, 128 + request[1], 1, 1)  # RFC 6886, section 3.5
        _, opcode, _, lifetime, client = struct.unpack("!BBHI16s", request[:24])
        assert client == (bytes(15) + b"\1" if ":" in self.host else bytes(10) + b"\xff\xff" + b"\x7f\0\0\1")
        head = struct.pack("!BBBBII12x", 2, 128 + opcode, 0, self.result, min(lifetime, self.seconds), 1)
        nonce, kind, inner, wanted, _ = struct.unpack("!12sB3xHH16s", request[24:])
        self.nonces.add(nonce)
        outer = self._map(inner, wanted, lifetime, tcp=kind == 6)
        packed = client if ":" in self.host else bytes(10) + b"\xff\xff" + socket.inet_aton(self.outer)
        return head + struct.pack("!12sB3xHH16s", nonce, kind, inner, outer, packed)

    def _map(self, inner: int, wanted: int, lifetime: int, *, tcp: bool) -> int:
        if tcp:
            self.lifetimes.append(lifetime)
        outer = wanted + 1 if wanted in self.taken else wanted
        mapped = self.mapped if tcp else self.mapped_udp
        if lifetime:
            mapped[inner] = outer
        else:
            mapped.pop(inner, None)
        return outer


class Igd:
    """A UPnP router, as miniupnpc shows it."""

    lanaddr = "192.168.1.2"

    def __init__(self, *, permanent_only: bool = False, taken: tuple[int, ...] = ()) -> None:
        self.mapped: dict[int, tuple[str, int, int]] = {}
        self.added = 0
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
        self.added += 1
        return True

    def deleteportmapping(self, outer: int, kind: str) -> bool:
        return self.mapped.pop(outer, None) is not None

    def getspecificportmapping(self, outer: int, kind: str) -> tuple[str, int, str, bool, int] | None:
        there = self.mapped.get(outer)
        return (there[0], there[1], "", True, there[2]) if there is not None else None


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
        self.network = SimpleNamespace(dial_source=lambda host: self.listens, own_addresses=(), sign=lambda what: what)
        network: Any = self.network
        self.ports, self.ports_of_ipv6 = (PortMapping(of, network, self.reachability) for of in ("ip4", "ip6"))
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    @property
    def mapping(self) -> Mapping | None:
        return self.reachability.mappings.get("ip4")

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.ports.run)
                nursery.start_soon(self.ports_of_ipv6.run)
        self.ended.set()

    async def settled(self) -> Mapping | None:
        """The mapping once the first attempt is over."""
        while self.ports.state == "not asked for yet":  # noqa: ASYNC110 (the clock jumps)
            await trio.sleep(0.25)
        return self.mapping


@pytest.fixture(autouse=True)
def igd(monkeypatch: pytest.MonkeyPatch) -> list[Igd]:
    """The UPnP routers that answer: the first one, where there is any."""
    found: list[Igd] = []

    def find() -> Igd:
        if not found:
            raise Exception("no router answers")
        return found[0]

    monkeypatch.setattr(routers, "find_igd", find)
    monkeypatch.setattr(portmap, "default_gateway_of_ipv6", lambda: None)
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
                patch.setattr(routers, "SERVER_PORT", router.port)
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
            assert await it.settled() == Mapping("NAT-PMP", OUTER, PORT, PORT)
            assert it.mapping is not None and it.mapping.address == f"/ip4/{OUTER}/tcp/{PORT}"
            assert it.reachability.changes == 1 and it.router.mapped == {PORT: PORT}

    under_jumping_clock(main)


def test_a_port_that_is_taken_gives_another_one_and_it_is_kept() -> None:
    async def main() -> None:
        async with lab(taken={PORT}, seconds=100) as it:
            mapping = await it.settled()
            assert mapping is not None and mapping.port == PORT + 1
            it.router.taken.clear()
            await trio.sleep(100)
            assert it.mapping == mapping and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_router_is_asked_again_and_again_whether_it_still_maps() -> None:
    async def main() -> None:
        async with lab() as it:
            await it.settled()
            await trio.sleep(3 * CHECK_EVERY + 5)
            assert it.router.lifetimes == 4 * [LEASE] and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_upnp_mapping_is_renewed_at_half_its_lease(igd: list[Igd], monkeypatch: pytest.MonkeyPatch) -> None:
    igd.append(Igd())
    monkeypatch.setattr(routers, "LEASE", 100)

    async def main() -> None:
        async with lab(silent=True) as it:
            await it.settled()
            await trio.sleep(44)
            assert igd[0].added == 1
            await trio.sleep(15)
            assert igd[0].added == 2 and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_mapping_is_renewed_while_the_node_is_public_by_it() -> None:
    async def main() -> None:
        async with lab(seconds=100) as it:
            await it.settled()
            it.reachability.state = Reach.PUBLIC
            await trio.sleep(52)
            assert len(it.router.lifetimes) > 2 and it.mapping is not None

    under_jumping_clock(main)


def test_the_mapping_is_given_back_at_the_end() -> None:
    async def main() -> None:
        async with lab() as it:
            await it.settled()
            it.scope.cancel()
            await it.ended.wait()
            assert it.router.lifetimes == [LEASE, 0] and it.router.mapped == {} and it.mapping is None

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


def test_a_upnp_router_that_tells_no_address_maps_nothing(igd: list[Igd], monkeypatch: pytest.MonkeyPatch) -> None:
    igd.append(Igd())
    monkeypatch.setattr(Igd, "externalipaddress", lambda self: "x")

    async def main() -> None:
        async with lab(silent=True) as it:
            assert await it.settled() is None and not igd[0].mapped

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
            assert it.mapping is None
            await trio.sleep(20)
            assert it.mapping is not None and it.reachability.changes == 1

    under_jumping_clock(main)


def test_a_mapping_that_is_not_renewed_is_no_more() -> None:
    async def main() -> None:
        async with lab(seconds=100) as it:
            await it.settled()
            it.router.silent = True
            await trio.sleep(100 - CHECK_EVERY)
            assert it.mapping is not None  # it restarts, perhaps
            await trio.sleep(2 * CHECK_EVERY)
            assert it.mapping is None and it.reachability.changes == 2

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
            assert it.router.lifetimes == [LEASE, LEASE] and it.mapping is not None

    under_jumping_clock(main)


def test_what_one_router_mapped_is_no_more_where_another_one_that_maps_nothing_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with lab() as it:
            assert await it.settled() is not None
            monkeypatch.setattr(portmap, "default_gateway", lambda: "127.0.0.2")
            await trio.sleep(2 * CHECK_EVERY)
            assert it.mapping is None and "not offered" in it.ports.state

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


def test_a_router_with_pcp_maps_tcp_and_udp_with_one_nonce_each_and_unmaps_both() -> None:
    async def main() -> None:
        async with lab(knows_pcp=True, seconds=100) as it:
            it.network.own_addresses = (f"/ip4/192.168.1.2/udp/{PORT}/quic-v1/p2p/me",)
            mapping = await it.settled()
            assert mapping == Mapping("PCP", OUTER, PORT, PORT, PORT)
            assert mapping.addresses == (f"/ip4/{OUTER}/tcp/{PORT}", f"/ip4/{OUTER}/udp/{PORT}/quic-v1")
            assert it.router.mapped == it.router.mapped_udp == {PORT: PORT}
            await trio.sleep(55)
            assert set(it.router.lifetimes) == {LEASE} and len(it.router.nonces) == 2
            it.scope.cancel()
            await it.ended.wait()
            assert it.router.mapped == it.router.mapped_udp == {} and len(it.router.nonces) == 2

    under_jumping_clock(main)


@pytest.mark.parametrize("knows_pcp", [True, False], ids=["PCP", "NAT-PMP"])
def test_a_router_that_restarts_is_asked_anew_within_seconds_and_its_new_address_is_told(knows_pcp: bool) -> None:
    async def main() -> None:
        async with lab(knows_pcp=knows_pcp) as it:
            await it.settled()
            await trio.sleep(20)
            it.router.silent = True
            await trio.sleep(40)
            assert it.mapping is not None
            it.router.mapped.clear()
            it.router.silent, it.router.outer = False, "45.80.10.9"
            await trio.sleep(CHECK_EVERY + 3)
            assert it.router.mapped == {PORT: PORT} and it.reachability.changes == 2
            assert it.mapping is not None and it.mapping.host == "45.80.10.9"

    under_jumping_clock(main)


def test_a_upnp_router_that_forgot_is_asked_anew_within_seconds(igd: list[Igd]) -> None:
    igd.append(Igd())

    async def main() -> None:
        async with lab(silent=True) as it:
            await it.settled()
            igd[0].mapped.clear()
            with trio.fail_after(2 * CHECK_EVERY):
                while not igd[0].mapped:  # noqa: ASYNC110 (a thread does it)
                    await trio.sleep(0.1)
            assert it.reachability.changes == 1  # the place is the same

    under_jumping_clock(main)


def test_over_ipv6_a_hole_in_the_firewall_is_asked_for_at_the_nodes_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6, not even ::1")
    monkeypatch.setattr(portmap, "default_gateway", lambda: None)
    monkeypatch.setattr(portmap, "default_gateway_of_ipv6", lambda: "::1")
    monkeypatch.setattr(portmap, "is_local", lambda host: False)

    async def main() -> None:
        async with lab(knows_pcp=True, host="::1") as it:
            it.listens = ("::1", PORT)
            while "ip6" not in it.reachability.mappings:  # noqa: ASYNC110 (the clock jumps)
                await trio.sleep(0.25)
            assert it.reachability.mappings["ip6"] == Mapping("PCP", "::1", PORT, PORT)
            assert it.mapping is None and it.ports_of_ipv6.state == "mapped"
            assert it.reachability.places(()) == (f"/ip6/::1/tcp/{PORT}",)

    under_jumping_clock(main)


def answers_to_pcp(how: str, request: bytes) -> bytes:
    """What no router should send."""
    good = struct.pack("!BBBBII12x", 2, 129, 0, 0, LEASE, 1) + request[24:44] + bytes(10) + b"\xff\xff\x2d\x50\x0a\x03"
    zeros = bytes(16)
    return {
        "empty": b"",
        "random": bytes(range(7, 67)),
        "short": good[:40],
        "another nonce": good[:24] + bytes(12) + good[36:],
        "another port": good[:40] + b"\0\1" + good[42:],
        "a question": request,
        "no time": good[:4] + bytes(4) + good[8:],
        "no port": good[:42] + b"\0\0" + good[44:],
        "nowhere": good[:44] + zeros,
        "another family": good[:44] + b"\x20" + bytes(15),
        "version 1": b"\1" + good[1:],
        "refusal": good[:3] + b"\2" + good[4:],
        "unheard of": good[:3] + b"\xff" + good[4:],
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "random", "short", "another nonce", "another port", "a question"),
        *("no time", "no port", "nowhere", "another family", "version 1", "refusal", "unheard of"),
    ],
)
def test_nonsense_from_a_router_is_a_refusal_in_words(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            await udp.bind(("127.0.0.1", 0))
            monkeypatch.setattr(routers, "SERVER_PORT", udp.getsockname()[1])

            async def answer() -> None:
                while True:
                    request, asker = await udp.recvfrom(1100)
                    await udp.sendto(answers_to_pcp(how, request), asker)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                with pytest.raises(MappingRefused, match=r"^PCP: "):
                    await routers.Pcp("127.0.0.1", "127.0.0.1", b"secret").map("tcp", PORT, PORT)
                nursery.cancel_scope.cancel()

    under_jumping_clock(main)


def test_the_gateway_of_ipv6_is_told_with_its_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none, linklocal = "0" * 32, "fe80" + "0" * 27 + "1"
    row = "{} 00 {} 00 {} {:08x} 00000001 00000000 00000003     {}"
    rows = [
        row.format(none, none, none, 0x100, "eth0"),
        row.format(none, none, linklocal, 0x400, "eth1"),
        row.format(none, none, "2a10" + "0" * 27 + "1", 0x200, "eth0"),
        row.format(none, none, none, 0xFFFFFFFF, "lo"),
    ]
    monkeypatch.setattr(portmap, "ROUTES_OF_IPV6", tmp_path / "routes")
    portmap.ROUTES_OF_IPV6.write_text("\n".join(rows))
    assert default_gateway_of_ipv6() == "2a10::1"
    portmap.ROUTES_OF_IPV6.write_text("\n".join(rows[:2]))
    assert default_gateway_of_ipv6() == "fe80::1%eth1"
    portmap.ROUTES_OF_IPV6.write_text(rows[0])
    assert default_gateway_of_ipv6() is None
