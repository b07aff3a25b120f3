"""How fast QUIC sends: by the rate at which packets arrive, as BBR (draft-ietf-ccwg-bbr), in small.

aioquic has Reno and CUBIC, which take each loss for a full queue: at 1 % and 50 ms they leave 0.2 MB/s of a link of 100
Mbit/s, where this leaves 1.2. Its HyStart takes jitter for a queue as well.

A round is the shortest round trip. The window is what arrives in a round at the best rate of the last `ROUNDS`, and a
quarter more, to find out whether there is room. Where much of a round was lost there is none, and the window shrinks
below it until the queue is gone. A round in which less was sent than the window admits says nothing of the way. At
the start, and after a silence, the window doubles each round until the rate no longer grows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket

ALGORITHM = "by rate"
ROUNDS = 10  # whose best rate counts
LEAST = 10  # packets of the window
SHORTEST = 0.01  # s of a round, at least; on shorter ways Python's turns are what is measured
RENEWED = 30.0  # s after which the shortest round trip is forgotten: the way may have changed
GROWS = 1.25  # times the rate of before that count as growth at the start
PLATEAU = 3  # rounds without growth that end the start
SOME, MUCH = 0.05, 0.15  # part lost of a round up to which the window grows, and is kept


class ByRate(QuicCongestionControl):
    """The congestion control of one connection; rates in bytes/s."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._datagram = max_datagram_size
        self._rates: deque[float] = deque(maxlen=ROUNDS)
        self._shortest = self._shortest_lately = math.inf  # s
        self._renewed_at = 0.0
        self._restart()
        self._begin(0.0)

    def _restart(self) -> None:
        self._starting, self._plateau, self._grown_to = True, 0, 0.0
        self._rates.clear()

    def _begin(self, now: float) -> None:
        """A round."""
        self._began = now
        self._arrived = self._lost = self._most = 0  # bytes; the most that were on the way at once

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        self.bytes_in_flight += packet.sent_bytes
        self._most = max(self._most, self.bytes_in_flight)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.bytes_in_flight -= packet.sent_bytes
        self._arrived += packet.sent_bytes
        if self._starting:
            self.congestion_window += packet.sent_bytes
        if now - self._began >= max(SHORTEST, min(self._shortest, 1.0)):
            self._look_back(now)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        self.bytes_in_flight -= sum(packet.sent_bytes for packet in packets)

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        size = sum(packet.sent_bytes for packet in packets)
        self.bytes_in_flight -= size
        self._lost += size

    def on_persistent_congestion(self) -> None:
        self._restart()
        self.congestion_window = LEAST * self._datagram

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        self._shortest, self._shortest_lately = min(self._shortest, rtt), min(self._shortest_lately, rtt)
        if now - self._renewed_at > RENEWED:
            self._shortest, self._shortest_lately, self._renewed_at = self._shortest_lately, math.inf, now

    def _look_back(self, now: float) -> None:
        rate = self._arrived / (now - self._began)
        lost = self._lost / (self._lost + self._arrived)
        was_full = 2 * self._most >= self.congestion_window
        if was_full or rate > max(self._rates, default=0.0):
            self._rates.append(rate)
        best = max(self._rates, default=0.0)
        if self._starting and was_full:
            grows = best > GROWS * self._grown_to
            self._grown_to, self._plateau = (best, 0) if grows else (self._grown_to, self._plateau + 1)
            self._starting = self._plateau < PLATEAU and lost <= MUCH
        if not self._starting and self._shortest < math.inf:
            gain = 1.25 if lost < SOME else 1.0 if lost < MUCH else 0.75
            self.congestion_window = int(max(LEAST * self._datagram, gain * best * self._shortest))
        self._begin(now)


register_congestion_control(ALGORITHM, ByRate)
