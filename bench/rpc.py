"""python bench/rpc.py [--baseline libp2p] [--baseline lattica --lattica-python VENV/bin/python] [--repeats 3]

Echo calls between two processes of one machine, as JSON lines: `calls_s`, latencies in milliseconds, and the CPU
microseconds of each side for one call. The measurements: 128 B and 256 KiB both ways, with 1 caller and with 32, and
for swarmnode 128 B beside a bulk transfer that takes all it can get (`beside` is its MB a second).

Baselines in the same run: `libp2p` echoes over one plain stream for each caller of an unpatched py-libp2p; `lattica`
calls its `rpc_method`. CPU is shared with whatever else runs here, so compare within one run, and see `load`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pair

WORKLOADS = ((128, 1), (128, 32), (256 * 1024, 1), (256 * 1024, 32))  # bytes each way, callers
WARM_UP = 0.5  # seconds before each measurement
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

    def begin(self) -> None:
        self.latencies.clear()
        self._cpu, self._server_cpu = pair.cpu_seconds(), pair.cpu_seconds(self.server_pid)
        self._began = time.perf_counter()

    def emit(self, **more: Any) -> None:
        took = time.perf_counter() - self._began
        calls = len(self.latencies)
        pair.emit(
            system=self.system,
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


def swarmnode_network() -> Any:
    """A node with a fresh identity on a free port of 127.0.0.1."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnode.node.host import HostSettings, Libp2pNetwork
    from swarmnode.node.identity import Identity, peer_id_of

    key = Ed25519PrivateKey.generate()
    identity = Identity(key, peer_id_of(key.public_key().public_bytes_raw()))
    return Libp2pNetwork(identity, HostSettings(listen=("/ip4/127.0.0.1/tcp/0",)))


def swarmnode_server() -> None:
    import trio

    from swarmnode.protocols.bulk import Bulk
    from swarmnode.protocols.rpc import Rpc
    from swarmnode.protocols.runner import in_thread

    async def answer(_peer: str, request: Echo) -> Echo:
        return request

    async def serve() -> None:
        network = swarmnode_network()
        rpc, bulk = Rpc(network), Bulk(network, runner=in_thread)
        rpc.serve("echo", Echo, answer)
        bulk.offer(("bytes",), os.urandom(BULK))
        async with trio.open_nursery() as nursery:
            for part in (network, rpc, bulk):
                await nursery.start(part.run)
            pair.emit(address=network.addresses[0], peer=network.me, pid=os.getpid())

    trio.run(serve)


def swarmnode_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    import trio

    from swarmnode.protocols.bulk import Bulk
    from swarmnode.protocols.rpc import Rpc
    from swarmnode.protocols.runner import in_thread

    async def drive() -> None:
        network = swarmnode_network()
        rpc, bulk = Rpc(network), Bulk(network, runner=in_thread)
        peer = place["peer"]

        async def call(_caller: int, payload: bytes) -> bytes:
            return (await rpc.call(peer, "echo", Echo(payload), Echo, timeout=60)).body

        fetched = 0
        into = memoryview(bytearray(BULK))

        async def fetch() -> None:
            nonlocal fetched
            while True:
                fetched += len(await bulk.fetch(peer, ("bytes",), into=into, max_size=BULK))

        async with trio.open_nursery() as nursery:
            for part in (network, rpc, bulk):
                await nursery.start(part.run)
            await network.connect(place["address"])
            for size, callers in WORKLOADS:
                tally = Tally("swarmnode", size, callers, place["pid"], chosen.seconds, [])
                await echo_for(tally, call, trio.open_nursery)
                tally.emit()
            tally = Tally("swarmnode", 128, 1, place["pid"], 2 * chosen.seconds, [])
            nursery.start_soon(fetch)
            before = trio.current_time()
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


def libp2p_server() -> None:
    import trio
    from libp2p import new_host
    from multiaddr import Multiaddr

    async def echo(stream: Any) -> None:
        while True:
            body = await _frame_from(stream)
            await stream.write(len(body).to_bytes(4, "big") + body)

    async def serve() -> None:
        host = new_host(muxer_preference="YAMUX")
        host.set_stream_handler(ECHO, echo)
        async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            pair.emit(address=str(host.get_addrs()[0]), pid=os.getpid())
            await trio.sleep_forever()

    trio.run(serve)


def libp2p_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    import trio
    from libp2p import new_host
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    async def drive() -> None:
        host = new_host(muxer_preference="YAMUX")
        peer = info_from_p2p_addr(Multiaddr(place["address"]))
        async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            await host.connect(peer)
            streams = [await host.new_stream(peer.peer_id, [ECHO]) for _ in range(max(c for _, c in WORKLOADS))]

            async def call(caller: int, payload: bytes) -> bytes:
                await streams[caller].write(len(payload).to_bytes(4, "big") + payload)
                return await _frame_from(streams[caller])

            for size, callers in WORKLOADS:
                tally = Tally("libp2p", size, callers, place["pid"], chosen.seconds, [])
                await echo_for(tally, call, trio.open_nursery)
                tally.emit()
            os._exit(0)  # its shutdown takes seconds and is not what is measured

    trio.run(drive)


# -- Lattica


def _lattica_service(port: int, bootstraps: list[str]) -> tuple[Any, Any]:
    from lattica import ConnectionHandler, Lattica, rpc_method

    class EchoService(ConnectionHandler):
        @rpc_method
        def echo(self, body: bytes) -> bytes:
            return body

    builder = Lattica.builder().with_listen_addrs([f"/ip4/127.0.0.1/tcp/{port}"]).with_mdns(False).with_upnp(False)
    if bootstraps:
        builder = builder.with_bootstraps(bootstraps)
    node = builder.build()
    return node, EchoService(node)


def lattica_server() -> None:
    port = pair.free_port()  # it does not tell which one it took
    node, _service = _lattica_service(port, [])
    time.sleep(1.0)  # it listens some time after `build`
    pair.emit(address=f"/ip4/127.0.0.1/tcp/{port}/p2p/{node.peer_id()}", peer=node.peer_id(), pid=os.getpid())
    time.sleep(3600)


def lattica_driver(place: dict[str, Any], chosen: argparse.Namespace) -> None:
    import threading

    _node, service = _lattica_service(0, [place["address"]])
    stub = service.get_stub(place["peer"])
    time.sleep(2.0)
    for size, callers in WORKLOADS:
        payload = os.urandom(size)
        tally = Tally("lattica", size, callers, place["pid"], chosen.seconds, [])

        def caller(until: float, payload: bytes = payload, latencies: list[float] = tally.latencies) -> None:
            while (began := time.perf_counter()) < until:
                if stub.echo(payload).result() != payload:
                    raise RuntimeError("the echo is not what was sent")
                latencies.append(time.perf_counter() - began)

        for seconds in (WARM_UP, chosen.seconds):
            tally.begin()
            until = time.perf_counter() + seconds
            threads = [threading.Thread(target=caller, args=(until,)) for _ in range(callers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        tally.emit()
    os._exit(0)  # its shutdown takes seconds and is not what is measured


if __name__ == "__main__":
    pair.main(
        pair.parser("Echo calls between two processes.").parse_args(),
        {"swarmnode": swarmnode_server, "libp2p": libp2p_server, "lattica": lattica_server},
        {"swarmnode": swarmnode_driver, "libp2p": libp2p_driver, "lattica": lattica_driver},
    )
