"""Where others see the listening port: most observers decide, a single one never says what kind of NAT there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hosts import network, running

from swarmnode.node.host.addresses import parse
from swarmnode.node.nat import udp
from swarmnode.node.nat.reachability import AGE, ANSWER_WITHIN, MAX_OBSERVERS, Reachability, seen_by
from swarmnode.protocols.network import NetworkError

HERE, THERE = "/ip4/45.80.10.3/tcp/4077", "/ip4/45.80.10.3/tcp/61044"
SIXTH = "/ip6/2a10:4580::2/tcp/4077"  # where nothing is translated


def seen(*places: str) -> Reachability:
    observed = Reachability()
    for number, place in enumerate(places):
        observed.seen[f"2a10::{number + 1}" if "ip6" in place else f"45.0.0.{number + 1}"] = place
    return observed


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        ((), None),
        ((HERE,), None),
        ((HERE, HERE), True),
        ((HERE, THERE), False),
        ((HERE, HERE, THERE), True),  # one liar, or one that sees an older mapping
        (tuple(f"/ip4/45.80.10.3/tcp/{port}" for port in (1001, 1002, 1003)), False),
        ((HERE, HERE, THERE, THERE), False),
        ((SIXTH, SIXTH), True),
        ((HERE, HERE, SIXTH, SIXTH, SIXTH), True),
        ((HERE, THERE, SIXTH, SIXTH, SIXTH), False),
    ],
)
def test_the_kind_of_nat_follows_from_what_most_observers_see(places: tuple[str, ...], kind: bool | None) -> None:
    assert seen(*places).endpoint_independent() is kind


def test_the_place_that_most_see_comes_first() -> None:
    assert seen(THERE, HERE, HERE).observed() == (HERE, THERE)


def test_an_observer_counts_once_by_its_last_word() -> None:
    observed = seen(HERE, HERE)
    observed.seen["45.0.0.1"] = THERE
    observed.seen["45.0.0.1"] = THERE
    assert set(observed.seen) == {"45.0.0.1", "45.0.0.2"} and observed.endpoint_independent() is False


def test_the_number_of_observers_is_bounded_and_the_oldest_go() -> None:
    observed = seen(*[HERE] * (MAX_OBSERVERS + 3))
    assert len(observed.seen) == MAX_OBSERVERS and "45.0.0.1" not in observed.seen


def test_a_changed_network_forgets_what_was_seen() -> None:
    observed = seen(HERE, HERE)
    observed.forget()
    assert observed.observed() == () and observed.endpoint_independent() is None


def test_a_connection_from_the_listening_port_is_seen_to_come_from_there() -> None:
    async def main() -> None:
        a, b = network(), network()
        async with running(a, b):
            await a.connect(b.addresses[0])
            session: Any = await a.connect_from_listening_port(b.me)
            own = parse(a.own_addresses[0])
            assert own is not None and await seen_by(session) == own.place

    trio.run(main)


class Mute:
    """A connection whose other side lets no stream be opened, or opens one and never says a word on it."""

    peer, protocol = "peer", ""

    def __init__(self, opens: bool) -> None:
        self._opens = opens

    async def open_stream(self) -> Mute:
        if not self._opens:
            await trio.sleep_forever()
        return self

    async def send_all(self, data: bytes) -> None: ...

    async def receive_some(self, most: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    def abort(self) -> None: ...


@pytest.mark.parametrize("opens", [False, True])
def test_a_peer_that_never_says_is_not_waited_for(opens: bool) -> None:
    """Else one such peer among those that are asked would keep a node from finding out how it is reached."""

    async def main() -> None:
        session: Any = Mute(opens)
        with trio.fail_after(2 * ANSWER_WITHIN), pytest.raises(NetworkError):
            await seen_by(session)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_over_quic_an_observer_is_asked_anew_as_its_connection_outlives_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = iter(f"/ip4/45.80.10.{number}/udp/4077/quic-v1" for number in (3, 4))

    async def seen_by(session: Any) -> str:
        return next(places)

    async def connected(peer: str, host: str) -> Any:
        return SimpleNamespace(is_closed=False)

    async def main() -> None:
        quic = SimpleNamespace(endpoints=[object()])
        network: Any = SimpleNamespace(me="me", quic=quic, connect_over_quic=connected)
        puncher, told = udp.UdpPuncher(network), []
        for wait in (0, AGE - 1, 2):
            await trio.sleep(wait)
            await puncher.look("45.0.0.1", "peer")
            told += puncher.seen()
        assert [place.split("/")[2] for place in told] == ["45.80.10.3", "45.80.10.3", "45.80.10.4"]

    monkeypatch.setattr(udp, "seen_by", seen_by)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
