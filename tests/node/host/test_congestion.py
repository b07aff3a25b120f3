"""Congestion control: QUIC's on a simulated link, with losses by chance and a full queue; the choice of TCP's."""

from __future__ import annotations

import random
import socket
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmnode.node.host import tcp
from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.host.congestion import ByRate

SIZE = 1200  # bytes of a packet
RTT = 0.05  # s


def carried(*, rate: float, loss: float, queue: int, seconds: float = 6.0) -> tuple[float, float]:
    """Part of a link of `rate` bytes/s that is used in the second half, and part of the packets that its queue drops.

    The link loses `loss` of the packets by chance, and those that find `queue` others waiting.
    """
    control, rng = ByRate(max_datagram_size=SIZE), random.Random(1)
    now, free_at = 0.0, 0.0
    on_way: deque[tuple[float, bool, Any]] = deque()
    late = dropped = sent = 0
    while now < seconds:
        while control.bytes_in_flight + SIZE <= control.congestion_window:
            packet: Any = SimpleNamespace(sent_bytes=SIZE)
            control.on_packet_sent(packet=packet)
            sent += 1
            waits = max(0.0, free_at - now)
            full = waits > queue * SIZE / rate
            dropped += full
            free_at = free_at if full else max(free_at, now) + SIZE / rate
            on_way.append((max(free_at, now) + RTT, full or rng.random() < loss, packet))
        due, is_lost, packet = on_way.popleft()
        now = max(now, due)
        if is_lost:
            control.on_packets_lost(now=now, packets=[packet])
        else:
            control.on_rtt_measurement(now=now, rtt=RTT + max(0.0, free_at - now) * 0.5)
            control.on_packet_acked(now=now, packet=packet)
            late += SIZE * (now > seconds / 2)
    return late / (rate * seconds / 2), dropped / sent


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.03])
def test_a_loss_by_chance_does_not_slow_it_down(loss: float) -> None:
    used, _ = carried(rate=5e6, loss=loss, queue=400)
    assert used > 0.7


def test_a_full_queue_makes_it_give_way() -> None:
    used, dropped = carried(rate=1e6, loss=0.0, queue=20)
    assert used > 0.6 and dropped < 0.15


def test_it_begins_anew_after_a_silence() -> None:
    control = ByRate(max_datagram_size=SIZE)
    control.congestion_window = 1_000_000
    control.on_persistent_congestion()
    assert control.congestion_window == 10 * SIZE


def test_tcp_sends_by_what_is_preferred_and_by_the_systems_own_where_that_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def used_by(one: socket.socket) -> str:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    with socket.socket() as plain, socket.socket() as other, socket.socket() as third:
        usual = used_by(plain)
        monkeypatch.setattr(tcp, "CONGESTION", b"reno")
        tcp.MeteredStream(trio.SocketStream(trio.socket.from_stdlib_socket(other.dup())), HostAllowance())
        assert used_by(other) == "reno"
        monkeypatch.setattr(tcp, "CONGESTION", b"no such one")
        assert tcp.sends_by(third) == usual == used_by(third)
