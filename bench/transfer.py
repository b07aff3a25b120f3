"""python bench/transfer.py [--baseline libp2p] [--baseline lattica --lattica-python VENV/bin/python] [--repeats 3]

One buffer after another from one process to another on the same machine, over one stream and encrypted, as JSON lines:
`mb_s` (10^6 bytes a second, median of the transfers) and `cpu_s_gb`, the CPU seconds of both sides for 10^9 bytes.

`what` is "bulk" for `Bulk.fetch` into memory of the caller, and "stream" for a plain stream that is
read and dropped. Baselines in the same run: `libp2p`, a plain stream of an unpatched py-libp2p (Noise, Yamux) that
stands against both, and `lattica`, one `get_block` for each 4 MiB (hashed as well). See `load` for what else ran.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pair

SIZE = 64 << 20  # bytes of one buffer
PIECE = 1 << 20  # bytes written at once to a plain stream
BLOCK = 4 << 20  # bytes of a Lattica block
PLAIN = "/bench/plain/1"


class Clock:
    """Transfers of one kind, timed with the CPU of both sides."""

    def __init__(self, system: str, what: str, server_pid: int) -> None:
        self._system, self._what, self._pid = system, what, server_pid
        self._rates: list[float] = []
        self._sizes = 0
        self._cpu = self._all_cpu()

    def _all_cpu(self) -> float:
        return pair.cpu_seconds() + pair.cpu_seconds(self._pid)

    def note(self, size: int, seconds: float) -> None:
        self._rates.append(size / seconds / 1e6)
        self._sizes += size

    def emit(self) -> None:
        pair.emit(
            system=self._system,
            what=self._what,
            mb_s=round(statistics.median(self._rates), 1),
            slowest=round(min(self._rates), 1),
            cpu_s_gb=round((self._all_cpu() - self._cpu) / self._sizes * 1e9, 2),
            transfers=len(self._rates),
            load=round(os.getloadavg()[0], 2),
        )


async def repeat(clock_of: Callable[[], Clock], seconds: float, transfer: Callable[[], Awaitable[int]]) -> None:
    """Once to warm up, then for `seconds`."""
    await transfer()
    clock, until = clock_of(), time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        clock.note(await transfer(), time.perf_counter() - began)
    clock.emit()


# -- swarmnode


def swarmnode_server() -> None:
    from swarmnode.protocols.transfer.bulk import Bulk

    buffer = os.urandom(SIZE)

    async def plain(stream: Any) -> None:
        while await stream.receive_some(1):
            await stream.send_all(buffer)

    network = pair.swarmnode_network()
    bulk = Bulk(network)
    bulk.offer(("bytes",), buffer)
    network.serve(PLAIN, plain)
    pair.swarmnode_serve(network, bulk)


def swarmnode_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    import trio

    from swarmnode.protocols.transfer.bulk import Bulk

    async def drive() -> None:
        network = pair.swarmnode_network()
        bulk = Bulk(network)
        into = memoryview(bytearray(SIZE))
        async with trio.open_nursery() as nursery:
            for part in (network, bulk):
                await nursery.start(part.run)
            await network.connect(place["address"])
            stream = await network.open_stream(place["peer"], PLAIN)

            async def fetch() -> int:
                return len(await bulk.fetch(place["peer"], ("bytes",), into=into, max_size=SIZE))

            async def drain() -> int:
                await stream.send_all(b"!")
                left = SIZE
                while left:
                    left -= len(await stream.receive_some(min(left, 1 << 16)))
                return SIZE

            for what, transfer in (("bulk", fetch), ("stream", drain)):
                await repeat(lambda what=what: Clock("swarmnode", what, place["pid"]), chosen.seconds, transfer)
            nursery.cancel_scope.cancel()

    trio.run(drive)


# -- py-libp2p as it is installed


def libp2p_server() -> None:
    piece = os.urandom(PIECE)

    async def plain(stream: Any) -> None:
        while await stream.read(1):
            for _ in range(SIZE // PIECE):
                await stream.write(piece)

    pair.libp2p_serve(PLAIN, plain)


def libp2p_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    async def drive(streams: list[Any]) -> None:
        (stream,) = streams

        async def drain() -> int:
            await stream.write(b"!")
            left = SIZE
            while left:
                left -= len(await stream.read(min(left, 1 << 16)))
            return SIZE

        for what in ("stream", "bulk"):  # it has one way for both
            await repeat(lambda what=what: Clock("libp2p", what, place["pid"]), chosen.seconds, drain)

    pair.libp2p_drive(place, PLAIN, 1, drive)


# -- Lattica


def lattica_server() -> None:
    pair.lattica_serve(lambda node: {"blocks": [node.put_block(os.urandom(BLOCK)) for _ in range(SIZE // BLOCK)]})


def lattica_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    def drive(node: Any) -> None:
        clock = Clock("lattica", "bulk", place["pid"])
        for block in place["blocks"]:  # each once: a block that was fetched is kept
            began = time.perf_counter()
            found = node.get_block(block)[1]
            clock.note(len(found), time.perf_counter() - began)
        clock.emit()

    pair.lattica_drive(place, drive)


if __name__ == "__main__":
    pair.main(
        pair.parser("Bytes from one process to another.").parse_args(),
        {"swarmnode": swarmnode_server, "libp2p": libp2p_server, "lattica": lattica_server},
        {"swarmnode": swarmnode_driver, "libp2p": libp2p_driver, "lattica": lattica_driver},
    )
