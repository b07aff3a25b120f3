"""python bench/rpc.py [--baseline libp2p] [--baseline lattica --lattica-python VENV/bin/python] [--repeats 3]

Echo calls between two processes of one machine, as JSON lines: `calls_s`, latencies in milliseconds, and the CPU
microseconds of each side for one call. The measurements: 128 B and 256 KiB both ways, with 1 caller and with 32, and
for swarmnode 128 B beside a bulk transfer that takes all it can get (`beside` is its MB a second). A turn of all three
systems takes half a minute.

Baselines in the same run: `libp2p` echoes over one plain stream for each caller of an unpatched py-libp2p; `lattica`
calls its `rpc_method`. CPU is shared with whatever else runs here, so compare within one run, and see `load`.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pair

WORKLOADS = ((128, 1), (128, 32), (256 * 1024, 1), (256 * 1024, 32))  # bytes each way, callers
WARM_UP = 0.3  # seconds before each measurement
BULK = 64 << 20  # bytes of the buffer that is fetched beside calls

Call = Callable[[int, bytes], Awaitable[bytes]]  # the caller's number and the payload to its echo


@dataclass
class Tally:
    """One measurement."""

    system: str
    size: int
    callers: int
    server_pid: int
    seconds: float
    latencies: list[float]
    what: str = "echo"

    def begin(self) -> None:
        self.latencies.clear()
        self._cpu, self._server_cpu = pair.cpu_seconds(), pair.cpu_seconds(self.server_pid)
        self._began = time.perf_counter()

    def emit(self, **more: Any) -> None:
        took = time.perf_counter() - self._began
        calls = len(self.latencies)
        pair.emit(
            system=self.system,
            what=self.what,
            size=self.size,
            callers=self.callers,
            calls_s=round(calls / took, 1),
            p50_ms=round(1e3 * pair.percentile(self.latencies, 0.5), 3),
            p99_ms=round(1e3 * pair.percentile(self.latencies, 0.99), 3),
            cpu_us=round(1e6 * (pair.cpu_seconds() - self._cpu) / calls, 1),
            server_cpu_us=round(1e6 * (pair.cpu_seconds(self.server_pid) - self._server_cpu) / calls, 1),
            load=round(os.getloadavg()[0], 2),
            **more,
        )


async def echo_for(tally: Tally, call: Call, nursery_of: Any) -> None:
    """All callers of one measurement, each with one call at a time."""
    payload = os.urandom(tally.size)

    async def caller(number: int, until: float) -> None:
        while (began := time.perf_counter()) < until:
            if await call(number, payload) != payload:
                raise RuntimeError("the echo is not what was sent")
            tally.latencies.append(time.perf_counter() - began)

    for seconds in (WARM_UP, tally.seconds):
        tally.begin()
        async with nursery_of() as nursery:
            for number in range(tally.callers):
                nursery.start_soon(caller, number, time.perf_counter() + seconds)


# -- swarmnode


@dataclass(frozen=True)
class Echo:
    body: bytes


def swarmnode_server() -> None:
    from swarmnode.protocols.calls.rpc import Rpc
    from swarmnode.protocols.transfer.bulk import Bulk

    async def answer(_peer: str, request: Echo) -> Echo:
        return request

    network = pair.swarmnode_network()
    rpc, bulk = Rpc(network), Bulk(network)
    rpc.serve("echo", Echo, answer)
    bulk.offer(("bytes",), os.urandom(BULK))
    pair.swarmnode_serve(network, rpc, bulk)


def swarmnode_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    import trio

    from swarmnode.node.process import rest_what_stays
    from swarmnode.protocols.calls.rpc import Rpc
    from swarmnode.protocols.transfer.bulk import Bulk

    async def drive() -> None:
        network = pair.swarmnode_network()
        rpc, bulk = Rpc(network), Bulk(network)
        peer = place["peer"]

        async def call(_caller: int, payload: bytes) -> bytes:
            return (await rpc.call(peer, "echo", Echo(payload), Echo, timeout=60)).body

        fetched = 0
        into = memoryview(bytearray(BULK))

        async def fetch() -> None:
            nonlocal fetched

            def note(received: int) -> None:
                nonlocal fetched
                fetched = before + received

            while True:
                before = fetched
                await bulk.fetch(peer, ("bytes",), into=into, max_size=BULK, progress=note)

        async with trio.open_nursery() as nursery:
            for part in (network, rpc, bulk):
                await nursery.start(part.run)
            rest_what_stays()
            await network.connect(place["address"])
            for size, callers in WORKLOADS:
                tally = Tally("swarmnode", size, callers, place["pid"], chosen.seconds, [])
                await echo_for(tally, call, trio.open_nursery)
                tally.emit()
            tally = Tally("swarmnode", 128, 1, place["pid"], 2 * chosen.seconds, [], "echo beside bulk")
            before = trio.current_time()
            nursery.start_soon(fetch)
            await echo_for(tally, call, trio.open_nursery)
            tally.emit(beside=round(fetched / 1e6 / (trio.current_time() - before), 1))
            nursery.cancel_scope.cancel()

    trio.run(drive)


# -- py-libp2p as it is installed

ECHO = "/bench/echo/1"


async def _frame_from(stream: Any) -> bytes:
    size = await _exactly(stream, 4)
    return await _exactly(stream, int.from_bytes(size, "big"))


async def _exactly(stream: Any, size: int) -> bytes:
    parts = []
    while size:
        part = await stream.read(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


async def _echo(stream: Any) -> None:
    while True:
        body = await _frame_from(stream)
        await stream.write(len(body).to_bytes(4, "big") + body)


def libp2p_server() -> None:
    pair.libp2p_serve(ECHO, _echo)


def libp2p_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    import trio

    async def drive(streams: list[Any]) -> None:
        async def call(caller: int, payload: bytes) -> bytes:
            await streams[caller].write(len(payload).to_bytes(4, "big") + payload)
            return await _frame_from(streams[caller])

        for size, callers in WORKLOADS:
            tally = Tally("libp2p", size, callers, place["pid"], chosen.seconds, [])
            await echo_for(tally, call, trio.open_nursery)
            tally.emit()

    pair.libp2p_drive(place, ECHO, max(callers for _, callers in WORKLOADS), drive)


# -- Lattica


def _echo_service(node: Any) -> Any:
    from lattica import ConnectionHandler, rpc_method

    class EchoService(ConnectionHandler):
        @rpc_method
        def echo(self, body: bytes) -> bytes:
            return body

    return EchoService(node)


def lattica_server() -> None:
    services = []

    def prepare(node: Any) -> dict[str, Any]:
        services.append(_echo_service(node))  # kept for as long as it serves
        return {}

    pair.lattica_serve(prepare)


def lattica_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    def drive(node: Any) -> None:
        stub = _echo_service(node).get_stub(place["peer"])
        for size, callers in WORKLOADS:
            _lattica_echoes(stub, Tally("lattica", size, callers, place["pid"], chosen.seconds, []))

    pair.lattica_drive(place, drive)


def _lattica_echoes(stub: Any, tally: Tally) -> None:
    payload = os.urandom(tally.size)

    def caller(until: float) -> None:
        while (began := time.perf_counter()) < until:
            if stub.echo(payload).result() != payload:
                raise RuntimeError("the echo is not what was sent")
            tally.latencies.append(time.perf_counter() - began)

    for seconds in (WARM_UP, tally.seconds):
        tally.begin()
        until = time.perf_counter() + seconds
        threads = [threading.Thread(target=caller, args=(until,)) for _ in range(tally.callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tally.emit()


if __name__ == "__main__":
    pair.main(
        pair.parser("Echo calls between two processes.").parse_args(),
        {"swarmnode": swarmnode_server, "libp2p": libp2p_server, "lattica": lattica_server},
        {"swarmnode": swarmnode_driver, "libp2p": libp2p_driver, "lattica": lattica_driver},
    )
