"""What a node costs before it trains: time until it is ready, memory, and CPU while idle with peers, as JSON lines.

    python bench/daemon.py [--peers 8] [--seconds 60] [--starts 5]

Real `swarmnode run --role relay` processes on loopback, in folders that are removed at the end. `ready_seconds` is the
wall time from the process's start to its `ready` line, the median of the starts; `rss_mb` is its resident memory (10^6
bytes) 5 s later; `idle_cpu_share` is the user and system time of one node over `seconds`, as a share of one core, while
`peers` others are joined to it and nobody does anything. Reads /proc, so Linux only.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pair import cpu_seconds

SETTLE = 5.0  # seconds after `ready` until memory is read


@dataclass(frozen=True)
class Node:
    """A running daemon."""

    pid: int
    data_dir: Path
    address: str
    ready_seconds: float


@contextmanager
def node(*options: str) -> Iterator[Node]:
    """A relay on loopback, told to stop at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "swarmnode", "run", "--role", "relay", "--listen", "127.0.0.1", "--port", "0"]
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--no-mdns", "--json", "--data-dir", folder, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            ready_seconds = time.perf_counter() - start
            if not line:
                raise SystemExit(f"a node ended at once, with exit code {process.wait()}: {' '.join(command)}")
            yield Node(process.pid, Path(folder), json.loads(line)["multiaddr"], ready_seconds)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024 / 1e6


def connected(one: Node) -> int:
    command = [sys.executable, "-m", "swarmnode", "peers", "--json", "--data-dir", str(one.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return len(json.loads(done.stdout)["peers"])


def starting(starts: int) -> dict[str, object]:
    times, sizes = [], []
    for _ in range(starts):
        with node() as one:
            times.append(one.ready_seconds)
            time.sleep(SETTLE)
            sizes.append(resident_mb(one.pid))
    return {
        "measure": "start",
        "starts": starts,
        "ready_seconds": round(statistics.median(times), 2),
        "rss_mb": round(statistics.median(sizes), 1),
    }


def idling(peers: int, seconds: float) -> dict[str, object]:
    with ExitStack() as nodes:
        one = nodes.enter_context(node())
        for _ in range(peers):
            nodes.enter_context(node("--join", one.address))
        deadline = time.monotonic() + 60
        while (reached := connected(one)) < peers:
            if time.monotonic() > deadline:
                raise SystemExit(f"{reached} of {peers} peers were connected after 60 s")
            time.sleep(1)
        time.sleep(2 * SETTLE)  # identify, first pings and the DHT's tables
        before = cpu_seconds(one.pid)
        time.sleep(seconds)
        used = cpu_seconds(one.pid) - before
        return {
            "measure": "idle",
            "peers": connected(one),
            "seconds": seconds,
            "idle_cpu_share": round(used / seconds, 4),
            "rss_mb": round(resident_mb(one.pid), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a node costs before it trains, as JSON lines.")
    parser.add_argument("--peers", type=int, default=8, help="nodes joined to the one that idles")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long idling is measured")
    parser.add_argument("--starts", type=int, default=5, help="starts that the median is taken of")
    chosen = parser.parse_args()
    print(json.dumps(starting(chosen.starts)), flush=True)
    print(json.dumps(idling(chosen.peers, chosen.seconds)), flush=True)


if __name__ == "__main__":
    main()
