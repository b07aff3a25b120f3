"""QUIC beside TCP between two nodes, in the same run: bulk, what it costs, and calls, as JSON lines.

    .venv/bin/python bench/quic.py [--seconds 5] [--repeats 3]
    sudo .venv/bin/python bench/quic.py --wan [--rate 100] [--rtt 0.05] [--loss 0.01]

Each node is a process. Without `--wan` they meet on loopback; with it they have a network namespace each, and between
them lies a link as tests/netlab makes it, with the loss each way. The transports take turns.

Over TCP the first node sends once by the congestion control that the product prefers and once by CUBIC, what most
systems have by default (`tcp`, `tcp-cubic`).

A line for each turn: `mb_s` of one stream from the one node to the other, `cpu_s_gb` of both processes for each 10^9
bytes of it, `call_p50_ms` and `call_p99_ms` of calls of 1 KB one after another on streams of their own, with nothing
beside them, and `loaded_p99_ms` while the stream goes the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "netlab")]

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lab import Lab, Link, why_not
from pair import cpu_seconds, emit

from swarmnode.node.host import tcp
from swarmnode.node.host.limits import Limits, RateLimits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.protocols.network import Stream

TAKE, ECHO = "/bench/take/1", "/bench/echo/1"
PIECE = 256 << 10  # bytes handed over at once
CALL = 1000  # bytes
PATIENCE = 120.0  # s for anything to end


def node(listen: str) -> Libp2pNetwork:
    identity = Identity(Ed25519PrivateKey.generate())
    limits = Limits(rates=RateLimits(stranger=0.0, strangers=0.0))
    return Libp2pNetwork(identity, HostSettings(listen=(f"/ip4/{listen}/tcp/0",), limits=limits, quic=True))


async def take(stream: Stream) -> None:
    """Count what comes, and say so after its end."""
    size = 0
    while piece := await stream.receive_some(PIECE):
        size += len(piece)
    await stream.send_all(size.to_bytes(8, "big"))


async def echo(stream: Stream) -> None:
    while piece := await stream.receive_some(PIECE):
        await stream.send_all(piece)


async def serve(listen: str) -> None:
    network = node(listen)
    network.serve(TAKE, take)
    network.serve(ECHO, echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        emit(addresses=network.own_addresses, pid=os.getpid())


async def pour(network: Libp2pNetwork, peer: str, seconds: float) -> tuple[int, float]:
    """Send for so long; bytes, and seconds until all of them were taken."""
    stream = await network.open_stream(peer, TAKE)
    began = trio.current_time()
    with trio.move_on_after(seconds):
        while True:
            await stream.send_all(bytes(PIECE))
    await stream.send_eof()
    taken = b""
    while len(taken) < 8:
        taken += await stream.receive_some(8)
    return int.from_bytes(taken, "big"), trio.current_time() - began


async def call(network: Libp2pNetwork, peer: str, seconds: float) -> list[float]:
    """Milliseconds of calls, one after another for so long, each on a stream of its own."""
    times: list[float] = []
    until = trio.current_time() + seconds
    while trio.current_time() < until:
        began = trio.current_time()
        stream = await network.open_stream(peer, ECHO)
        await stream.send_all(bytes(CALL))
        left = CALL
        while left:
            left -= len(await stream.receive_some(left))
        times.append(1000 * (trio.current_time() - began))
        await stream.aclose()
    return times


def p99(times: list[float]) -> float:
    return round(quantiles(times, n=100)[98] if len(times) > 1 else times[0], 2)


async def drive(listen: str, address: str, server: int, seconds: float) -> None:
    network = node(listen)
    peer = address.rpartition("/")[2]
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        with trio.fail_after(PATIENCE):
            await network.connect(address)
            idle = await call(network, peer, seconds)
            before = cpu_seconds() + cpu_seconds(server)
            size, took = await pour(network, peer, seconds)
            spent = cpu_seconds() + cpu_seconds(server) - before
            loaded: list[float] = []
            async with trio.open_nursery() as both:
                both.start_soon(pour, network, peer, seconds)
                loaded += await call(network, peer, seconds)
        emit(
            mb_s=round(size / took / 1e6, 2),
            cpu_s_gb=round(spent / size * 1e9, 2),
            call_p50_ms=round(sorted(idle)[len(idle) // 2], 2),
            call_p99_ms=p99(idle),
            loaded_p99_ms=p99(loaded),
            calls=len(idle),
        )
        nursery.cancel_scope.cancel()


@contextmanager
def places(chosen: argparse.Namespace) -> Iterator[tuple[tuple[tuple[str, ...], str], ...]]:
    """For the two nodes: what stands before their command, and the address to listen on."""
    if not chosen.wan:
        yield ((), "127.0.0.1"), ((), "127.0.0.1")
        return
    link = Link(delay=chosen.rtt / 4, loss=chosen.loss / 2, rate=chosen.rate)  # each of the two has one
    with Lab() as lab:
        hosts = [lab.public(name, link) for name in ("one", "other")]
        yield tuple((host.enter, host.address) for host in hosts)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--wan", action="store_true", help="over a link of tests/netlab")
    options.add_argument("--rate", type=float, default=100.0, help="Mbit/s")
    options.add_argument("--rtt", type=float, default=0.05, help="s")
    options.add_argument("--loss", type=float, default=0.01, help="probability, each way")
    options.add_argument("--congestion", default="", help=argparse.SUPPRESS)
    options.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    tcp.CONGESTION = chosen.congestion.encode() or tcp.CONGESTION
    match chosen.role:
        case ["server", listen]:
            trio.run(serve, listen)
        case ["driver", listen, address, server]:
            trio.run(drive, listen, address, int(server), chosen.seconds)
        case _:
            if chosen.wan and (reason := why_not()) is not None:
                raise SystemExit(f"no network laboratory can be made here: {reason}")
            measure(chosen)


def measure(chosen: argparse.Namespace) -> None:
    way = {"rate": chosen.rate, "rtt": chosen.rtt, "loss": chosen.loss} if chosen.wan else {}
    with tempfile.TemporaryFile() as log, places(chosen) as (one, other):
        command = [sys.executable, __file__, "--seconds", str(chosen.seconds), "--role"]
        for turn in range(chosen.repeats):
            for over in ("tcp", "tcp-cubic", "quic"):
                by = [*command[:-1], "--congestion", "cubic", "--role"] if over == "tcp-cubic" else command
                with subprocess.Popen(
                    [*one[0], *by, "server", one[1]], stdout=subprocess.PIPE, stderr=log, text=True
                ) as server:
                    try:
                        assert server.stdout is not None
                        at: dict[str, Any] = json.loads(server.stdout.readline())
                        address = next(place for place in at["addresses"] if ("/quic" in place) == (over == "quic"))
                        driver = [*other[0], *by, "driver", other[1], address, str(at["pid"])]
                        done = subprocess.run(driver, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
                        found = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.returncode}
                        emit(over=over, turn=turn, **way, **found)
                    finally:
                        server.kill()


if __name__ == "__main__":
    main()
