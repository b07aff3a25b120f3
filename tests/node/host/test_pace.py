"""Peers go by their rates: members freely, strangers at theirs and all together at theirs, the slowed slowly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from libp2p.io.exceptions import ConnectionClosedError

from swarmnode.node.host.allowances import FRAME, IN, OUT, HostAllowance, PeerPolicy
from swarmnode.node.host.limits import MIB, RateLimits
from swarmnode.node.host.tcp import WRITE_STALL, MeteredStream
from swarmnode.protocols.peers.scoring import Kind, PeerScoring, ScoringLimits

RATES = RateLimits(stranger=1.0 * MIB, strangers=1.5 * MIB, slowed=64.0 * 1024)
PIECE = 64 * 1024


class Members(PeerPolicy):
    def __init__(self, *members: str) -> None:
        self._members = members

    def is_member(self, peer: str) -> bool:
        return peer in self._members


def allowances(policy: PeerPolicy | None = None) -> tuple[HostAllowance, PeerScoring]:
    scoring = PeerScoring(ScoringLimits())
    return HostAllowance(rates=RATES, scoring=scoring, policy=policy), scoring


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def seconds(host: HostAllowance, *peers: str, size: int = 4 * MIB) -> float:
    """How long it takes until `size` bytes of each peer were read."""
    began = trio.current_time()

    async def read(peer: str) -> None:
        allowance = host.of(peer)
        for _ in range(size // PIECE):
            await allowance.wait(IN, PIECE)

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(read, peer)
    return trio.current_time() - began


def test_members_wait_for_nothing_and_strangers_go_at_their_rate() -> None:
    async def main() -> None:
        host, _ = allowances()
        assert await seconds(host, "anybody") == 0.0
        host, _ = allowances(Members("member"))
        assert await seconds(host, "member") == 0.0
        assert all(host.of("member").send_now(MIB) for _ in range(100))
        assert host.of("stranger").send_now(1000)
        assert not host.of("stranger").send_now(MIB)
        assert await seconds(host, "stranger") == pytest.approx(4.0, rel=0.1)

    run(main)


def test_frames_cost_strangers_what_they_cost_this_node() -> None:
    async def main() -> None:
        host, scoring = allowances(Members("member"))
        scoring.offended("slowed", "a lie", Kind.LIE)
        scoring.offended("slowed", "a lie", Kind.LIE)
        for peer, expected in (("member", 0.0), ("slowed", 0.0), ("stranger", 4.0)):
            began, allowance = trio.current_time(), host.of(peer)
            for _ in range(4 * MIB // FRAME // 256):
                await allowance.wait_for_frames(256)
            assert trio.current_time() - began == pytest.approx(expected, rel=0.1)

    run(main)


def test_all_strangers_together_have_a_rate_and_no_member_waits_for_it() -> None:
    async def main() -> None:
        host, _ = allowances(Members("member"))
        strangers = [f"stranger {number}" for number in range(6)]
        async with trio.open_nursery() as nursery:

            async def flood() -> None:
                assert await seconds(host, *strangers) == pytest.approx(6 * 4 / 1.5, rel=0.1)

            nursery.start_soon(flood)
            await trio.sleep(1)
            assert await seconds(host, "member") == 0.0

    run(main)


def test_what_waits_for_all_strangers_together_is_paid_for_once() -> None:
    async def main() -> None:
        host, _ = allowances(Members())
        stranger = host.of("stranger")
        assert host.of("another").send_now(4 * PIECE) and host.of("a third").send_now(2 * PIECE)
        assert not any(stranger.send_now(PIECE) for _ in range(4))
        began = trio.current_time()
        await stranger.wait(OUT, 4 * PIECE)
        assert trio.current_time() - began == pytest.approx(0.25 / 1.5)

    run(main)


def test_two_connections_of_a_stranger_are_no_faster_than_one() -> None:
    async def main() -> None:
        host, _ = allowances(Members())
        assert await seconds(host, "stranger", "stranger") == pytest.approx(8.0, rel=0.1)

    run(main)


def test_a_slowed_member_is_read_slowly_until_it_is_forgiven() -> None:
    async def main() -> None:
        host, scoring = allowances()
        scoring.offended("member", "a lie", Kind.LIE)
        scoring.offended("member", "a lie", Kind.LIE)
        assert not host.of("member").send_now(PIECE)
        assert await seconds(host, "other") == 0.0
        assert await seconds(host, "member", size=20 * PIECE) == pytest.approx(20.0, rel=0.1)
        await trio.sleep(2 * ScoringLimits().half_life)
        assert await seconds(host, "member") == 0.0

    run(main)


# --- a socket that takes nothing --------------------------------------------------------------------------------------


async def connected(host: HostAllowance) -> tuple[MeteredStream, trio.SocketListener]:
    """A connection to somebody who reads nothing."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    return MeteredStream(await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1]), host), listener


def test_a_socket_that_takes_nothing_ends_its_connection() -> None:
    async def main() -> None:
        stream, _ = await connected(HostAllowance())
        with pytest.raises(ConnectionClosedError, match="took nothing"), trio.fail_after(2 * WRITE_STALL):
            while True:
                await stream.write(bytes(1 << 20))

    run(main)


def test_what_the_owners_cap_has_wait_ends_no_connection() -> None:
    async def main() -> None:
        stream, _ = await connected(HostAllowance(up=1000.0))
        began = trio.current_time()
        await stream.write(bytes(30_000))
        assert trio.current_time() - began > 2 * WRITE_STALL

    run(main)
