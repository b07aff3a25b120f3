"""Two processes of one machine for a benchmark: a server and a driver, measured by the same clock and CPU accounts.

Each system under test (`swarmnode`, `libp2p`, `lattica`) runs in processes of its own, so that no patch or event loop
of one reaches another. Lattica runs in a network namespace without a way out, because it asks STUN servers when it
starts.

With `--repeats` the systems take turns, and at the end come `summary` lines: the medians of each measurement, and how
swarmnode compares with each baseline: the median of the ratios within a turn, and the worst and best of them. What
else the machine does then weighs on both sides of a ratio.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
READY = 60.0  # seconds for a server to say where it is
SYSTEMS = ("swarmnode", "libp2p", "lattica")
WHAT = ("what", "size", "callers")  # figures that say which measurement a line is of
COMPARED = ("calls_s", "mb_s", "cpu_s_gb")  # figures that have a ratio to a baseline's

Server = Callable[[], None]
Driver = Callable[[dict[str, Any], argparse.Namespace], None]


def emit(**figures: Any) -> None:
    """One JSON line."""
    print(json.dumps(figures), flush=True)


def cpu_seconds(pid: int | str = "self") -> float:
    """CPU time of a process since its start, all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark of two processes has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--baseline", action="append", choices=SYSTEMS[1:], default=[], help="also measure this one")
    options.add_argument("--repeats", type=int, default=1, help="turns, in each of which every system is measured")
    options.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement")
    options.add_argument("--lattica-python", default=sys.executable, help="interpreter of a venv that has lattica")
    options.add_argument("--role", choices=("server", "driver"), help=argparse.SUPPRESS)
    options.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    options.add_argument("--place", help=argparse.SUPPRESS)
    options.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    return options


def main(chosen: argparse.Namespace, servers: dict[str, Server], drivers: dict[str, Driver]) -> None:
    """Be the role that was asked for; without one, run each system's pair in turn."""
    if chosen.role == "server":
        servers[chosen.system]()
    elif chosen.role == "driver":
        drivers[chosen.system](json.loads(chosen.place), chosen)
    elif chosen.system:
        if chosen.offline:
            _loopback_up()
        _run_pair(chosen.system)
    else:
        turns: list[dict[str, Any]] = []
        for turn in range(chosen.repeats):
            for system in dict.fromkeys(["swarmnode", *chosen.baseline]):
                turns += [{**line, "turn": turn} for line in _run_system(system, chosen)]
        for line in summary(turns):
            emit(**line)


def summary(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Medians over the turns of each measurement, and ratios to the baselines where they did the same."""
    measured: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for line in lines:
        same = tuple(line.get(name) for name in WHAT)
        measured.setdefault(same, {}).setdefault(line["system"], {})[line["turn"]] = line
    for same, systems in measured.items():
        named = {name: value for name, value in zip(WHAT, same, strict=True) if value is not None}
        for system, turns in systems.items():
            figures = next(iter(turns.values())).keys() - {*WHAT, "system", "turn"}
            medians = {
                name: round(statistics.median(turn[name] for turn in turns.values()), 3) for name in sorted(figures)
            }
            yield {"summary": system, **named, "turns": len(turns), **medians}
        ours = systems.get("swarmnode", {})
        for system, turns in systems.items():
            shared = sorted(ours.keys() & turns.keys()) if system != "swarmnode" else []
            for name in COMPARED if shared else ():
                if name in ours[shared[0]] and name in turns[shared[0]]:
                    ratios = [ours[turn][name] / turns[turn][name] for turn in shared]
                    spread = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
                    yield {
                        "summary": f"swarmnode / {system}",
                        **named,
                        "figure": name,
                        **{key: round(ratio, 2) for key, ratio in spread.items()},
                    }


def _run_system(system: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Let a pair of processes measure; what they printed is printed here, and returned without what is no figure."""
    python, wrapper = sys.executable, []
    if system == "lattica":
        python = chosen.lattica_python
        if subprocess.run([python, "-c", "import lattica"], capture_output=True).returncode:
            emit(system=system, skipped=f"lattica is not installed for {python}: pip install lattica")
            return []
        if not shutil.which("unshare") or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
            emit(system=system, skipped="no network namespace can be made here, and lattica would ask STUN servers")
            return []
        wrapper = ["unshare", "-rn"]
    offline = ["--offline"] if wrapper else []
    command = [*wrapper, python, *sys.argv, "--system", system, *offline]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as both:
        assert both.stdout is not None
        for line in both.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                printed.append(json.loads(line))
    return [line for line in printed if line.keys() & {*COMPARED}]


def _run_pair(system: str) -> None:
    command = [sys.executable, *sys.argv, "--system", system]
    with subprocess.Popen([*command, "--role", "server"], stdout=subprocess.PIPE, text=True) as server:
        try:
            place = _first_line(server)
            driven = subprocess.run([*command, "--role", "driver", "--place", place], check=False)
            if driven.returncode:
                emit(system=system, failed=f"the driver ended with code {driven.returncode}")
        finally:
            server.kill()


def _first_line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    began = time.monotonic()
    for line in server.stdout:
        if line.startswith("{"):
            return line
        if time.monotonic() - began > READY:
            break
    raise SystemExit("the server did not start")


def _loopback_up() -> None:
    """In a fresh network namespace the loopback interface is down."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | up))


# -- the systems


def swarmnode_network() -> Any:
    """A node with a fresh identity on a free port of 127.0.0.1, which gives strangers the rates of members: none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnode.node.host.limits import Limits, RateLimits
    from swarmnode.node.host.network import HostSettings, Libp2pNetwork
    from swarmnode.node.identity import Identity

    identity = Identity(Ed25519PrivateKey.generate())
    limits = Limits(rates=RateLimits(stranger=0.0, strangers=0.0))
    return Libp2pNetwork(identity, HostSettings(listen=(LOOPBACK,), limits=limits))


def swarmnode_serve(network: Any, *protocols: Any) -> None:
    """Run a node and protocols on it, and say where it is, until killed."""
    import trio

    from swarmnode.node.process import rest_what_stays

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            for part in (network, *protocols):
                await nursery.start(part.run)
            rest_what_stays()  # as the daemon does
            emit(address=network.addresses[0], peer=network.me, pid=os.getpid())

    trio.run(serve)


def libp2p_serve(protocol: str, handler: Callable[[Any], Awaitable[None]]) -> None:
    """Run a py-libp2p as it is installed that answers `protocol`, and say where it is, until killed."""
    import trio
    from libp2p import new_host
    from multiaddr import Multiaddr

    async def serve() -> None:
        host = new_host(muxer_preference="YAMUX")
        host.set_stream_handler(protocol, handler)
        async with host.run(listen_addrs=[Multiaddr(LOOPBACK)]):
            emit(address=str(host.get_addrs()[0]), pid=os.getpid())
            await trio.sleep_forever()

    trio.run(serve)


def libp2p_drive(
    place: dict[str, Any], protocol: str, streams: int, drive: Callable[[list[Any]], Awaitable[None]]
) -> None:
    """Connect a py-libp2p as it is installed, open `streams` streams, and `drive` them."""
    import trio
    from libp2p import new_host
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    async def run() -> None:
        host = new_host(muxer_preference="YAMUX")
        peer = info_from_p2p_addr(Multiaddr(place["address"]))
        async with host.run(listen_addrs=[Multiaddr(LOOPBACK)]):
            await host.connect(peer)
            await drive([await host.new_stream(peer.peer_id, [protocol]) for _ in range(streams)])
            os._exit(0)  # its shutdown takes seconds and is not what is measured

    trio.run(run)


def lattica_node(port: int, bootstraps: list[str]) -> Any:
    from lattica import Lattica

    builder = Lattica.builder().with_listen_addrs([f"/ip4/127.0.0.1/tcp/{port}"]).with_mdns(False).with_upnp(False)
    return (builder.with_bootstraps(bootstraps) if bootstraps else builder).build()


def lattica_serve(prepare: Callable[[Any], dict[str, Any]]) -> None:
    """Run a Lattica node, `prepare` it, and say where it is and what that returned, until killed."""
    port = _free_port()  # it does not tell which one it took
    node = lattica_node(port, [])
    time.sleep(1.0)  # it listens some time after `build`
    more = prepare(node)
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{node.peer_id()}"
    emit(address=address, peer=node.peer_id(), pid=os.getpid(), **more)
    time.sleep(3600)


def lattica_drive(place: dict[str, Any], drive: Callable[[Any], None]) -> None:
    """Connect a Lattica node and `drive` it."""
    node = lattica_node(0, [place["address"]])
    time.sleep(2.0)
    drive(node)
    os._exit(0)  # its shutdown takes seconds and is not what is measured


def _free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
