"""A long way in user space, for kernels without netem: carries frames between two interfaces, late and with losses.

    python wanlink.py IF_A IF_B --delay 0.02 [--jitter 0.002] [--loss 0.01] [--seed 7]

`delay` and `jitter` are seconds one way, `loss` is a probability per frame. Frames of one direction never overtake one
another. The rate is better limited by the kernel (`tc … tbf`). Ends when an interface goes.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import time
from collections import deque
from contextlib import suppress

EVERYTHING = 3  # ETH_P_ALL
PACKET_IGNORE_OUTGOING = 23  # of SOL_PACKET: what is sent here is not also received
SOL_PACKET = 263
BUFFER = 8 << 20  # bytes; a burst of a whole TCP window must fit
AT_ONCE = 64  # frames taken from one side before the other is looked at


class Way:
    """One direction."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.due: deque[tuple[float, bytes]] = deque()  # by time, which never decreases

    def take(self, now: float, options: argparse.Namespace, rng: random.Random) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = self.source.recv(65535)
            except BlockingIOError:
                return
            if rng.random() < options.loss:
                continue
            at = now + options.delay + rng.uniform(-options.jitter, options.jitter)
            self.due.append((max(at, self.due[-1][0]) if self.due else at, frame))

    def pass_on(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            with suppress(OSError):  # a full queue loses the frame, as a real one does
                self.sink.send(self.due.popleft()[1])


def opened(interface: str) -> socket.socket:
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING))
    wire.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    wire.bind((interface, 0))
    wire.setblocking(False)
    return wire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    a, b = opened(options.a), opened(options.b)
    ways = (Way(a, b), Way(b, a))
    while True:
        next_due = min((way.due[0][0] for way in ways if way.due), default=None)
        wait = None if next_due is None else max(0.0, next_due - time.monotonic())
        ready, _, _ = select.select([a, b], [], [], wait)
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                try:
                    way.take(now, options, rng)
                except OSError:
                    return  # the interface was taken down
            way.pass_on(now)


if __name__ == "__main__":
    main()
