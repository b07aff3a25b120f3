"""QUIC's congestion control on a simulated link: losses that mean nothing, and a queue that is full."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

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
