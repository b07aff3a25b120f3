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
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pair import cpu_seconds

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from realnodes import Node

SETTLE = 5.0  # seconds after `ready` until memory is read


@contextmanager
def relay(*options: str) -> Iterator[Node]:
    """A relay on loopback that is ready, told to stop at the end of the block."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Node(Path(folder) / "node", "--role", "relay", *options, corpus=None) as node,
    ):
        assert node.ready
        yield node


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024 / 1e6


def connected(one: Node) -> int:
    return len(one.command_line("peers")["peers"])


def starting(starts: int) -> dict[str, object]:
    times, sizes = [], []
    for _ in range(starts):
        start = time.perf_counter()
        with relay() as one:
            times.append(time.perf_counter() - start)
            time.sleep(SETTLE)
            sizes.append(resident_mb(one.process.pid))
    return {
        "measure": "start",
        "starts": starts,
        "ready_seconds": round(statistics.median(times), 2),
        "rss_mb": round(statistics.median(sizes), 1),
    }


def idling(peers: int, seconds: float) -> dict[str, object]:
    with ExitStack() as nodes:
        one = nodes.enter_context(relay())
        for _ in range(peers):
            nodes.enter_context(relay("--join", one.ready["multiaddr"]))
        deadline = time.monotonic() + 60
        while (reached := connected(one)) < peers:
            if time.monotonic() > deadline:
                raise SystemExit(f"{reached} of {peers} peers were connected after 60 s")
            time.sleep(1)
        time.sleep(2 * SETTLE)  # identify, first pings and the DHT's tables
        before = cpu_seconds(one.process.pid)
        time.sleep(seconds)
        used = cpu_seconds(one.process.pid) - before
        return {
            "measure": "idle",
            "peers": connected(one),
            "seconds": seconds,
            "idle_cpu_share": round(used / seconds, 4),
            "rss_mb": round(resident_mb(one.process.pid), 1),
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
