"""Two processes of one machine for a benchmark: a server and a driver, measured by the same clock and CPU accounts.

Each system under test (`swarmnode`, `libp2p`, `lattica`) runs in processes of its own, so that no patch or event loop
of one reaches another. Lattica runs in a network namespace without a way out, because it asks STUN servers when it
starts.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY = 60.0  # seconds for a server to say where it is
SYSTEMS = ("swarmnode", "libp2p", "lattica")

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
    options.add_argument("--repeats", type=int, default=1, help="times that each system is measured, in turn")
    options.add_argument("--seconds", type=float, default=3.0, help="seconds of each measurement")
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
        for _ in range(chosen.repeats):
            for system in dict.fromkeys(["swarmnode", *chosen.baseline]):
                _run_system(system, chosen)


def _run_system(system: str, chosen: argparse.Namespace) -> None:
    python, wrapper = sys.executable, []
    if system == "lattica":
        python = chosen.lattica_python
        if subprocess.run([python, "-c", "import lattica"], capture_output=True).returncode:
            emit(system=system, skipped=f"lattica is not installed for {python}: pip install lattica")
            return
        if not shutil.which("unshare") or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
            emit(system=system, skipped="no network namespace can be made here, and lattica would ask STUN servers")
            return
        wrapper = ["unshare", "-rn"]
    offline = ["--offline"] if wrapper else []
    emit(system=system, load=os.getloadavg()[0], cpus=os.cpu_count())
    subprocess.run([*wrapper, python, *sys.argv, "--system", system, *offline], check=False)


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


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
