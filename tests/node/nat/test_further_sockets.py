"""How many sockets a node opens to get through routers, whatever others name."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from swarmnode.node.nat import udp
from swarmnode.node.nat.udp import OPENED_AT_ONCE, UdpPuncher

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def test_who_names_many_places_has_few_sockets_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Counted(socket.socket):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def sendto(self, *arguments: Any) -> int:
            return 0

    async def main() -> None:
        network: Any = SimpleNamespace(me=PEER)
        puncher = UdpPuncher(network)
        for port, observer in enumerate(("45.0.0.1", "45.0.0.2")):
            puncher._seen[observer] = f"/ip4/45.80.10.3/udp/{port + 1}/quic-v1"
        assert puncher.is_symmetric
        places = tuple(f"/ip4/45.0.0.{number}/udp/4077/quic-v1" for number in range(16))
        for _ in range(2):  # those of the first are given back
            made.clear()
            with trio.move_on_after(0.5):
                await puncher.punch(PEER, places, dials=True, speaks=True)
            assert len(made) == OPENED_AT_ONCE * 4 and all(each.fileno() == -1 for each in made)

    monkeypatch.setattr(udp, "SOCKETS", 4)
    monkeypatch.setattr(UdpPuncher, "_dial", _nothing)
    monkeypatch.setattr(udp.socket, "socket", Counted)
    trio.run(main)


def test_who_names_many_places_has_few_of_them_probed_at_once() -> None:
    """Nobody knows whose places they are."""
    sent: list[tuple[str, int]] = []

    async def main() -> None:
        endpoint = SimpleNamespace(try_to_send=lambda datagram, target: sent.append(target))
        quic = SimpleNamespace(endpoint_for=lambda host: endpoint)
        network: Any = SimpleNamespace(me=PEER, quic=quic)
        puncher = UdpPuncher(network)
        assert not puncher.is_symmetric
        places = tuple(f"/ip4/45.0.0.{host}/udp/{port}/quic-v1" for host in range(8) for port in (4077, 4078))
        with trio.move_on_after(udp.AFTER + udp.PROBES / udp.BATCH * udp.EVERY):
            await puncher.punch(PEER, places, dials=True, speaks=True)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(UdpPuncher, "_dial", _nothing)
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert 0 < len(sent) <= OPENED_AT_ONCE * udp.PROBES and len({host for host, _ in sent}) <= OPENED_AT_ONCE


@pytest.mark.parametrize("seen", [4077, 65_500, 65_535])
def test_a_port_that_is_guessed_for_two_such_routers_is_one(seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: set[tuple[str, int]] = set()

    class Told(socket.socket):
        def sendto(self, data: bytes, target: tuple[str, int]) -> int:  # type: ignore[override]
            targets.add(target)
            return len(data)

    async def main() -> None:
        network: Any = SimpleNamespace(me=PEER)
        puncher = UdpPuncher(network)
        for port, observer in enumerate(("45.0.0.1", "45.0.0.2")):
            puncher._seen[observer] = f"/ip4/45.80.10.3/udp/{port + 1}/quic-v1"
        places = tuple(f"/ip4/45.0.0.9/udp/{port}/quic-v1" for port in (seen - 1, seen))
        with trio.move_on_after(0.5):
            await puncher.punch(PEER, places, dials=True, speaks=True)

    monkeypatch.setattr(UdpPuncher, "_dial", _nothing)
    monkeypatch.setattr(udp.socket, "socket", Told)
    trio.run(main)
    assert targets == {("45.0.0.9", min(seen + udp.SOCKETS // 2, 65_535))}


async def _nothing(*_: Any) -> None:
    await trio.lowlevel.checkpoint()
