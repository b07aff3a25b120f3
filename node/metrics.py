"""All metrics of a node, from its parts; `python -m swarmnode.node.metrics --document` prints their page."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import trio

from swarmnode import __version__
from swarmnode.node.host.limits import Limits
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics

VERSION = Metric("swarmnode_info", GAUGE, "always 1; the version of the node", "version")
UPTIME = Metric("swarmnode_uptime_seconds", GAUGE, "seconds since the node started")
RESIDENT = Metric("swarmnode_resident_bytes", GAUGE, "bytes of memory that the daemon holds; its trainer not included")
TASKS = Metric("swarmnode_tasks", GAUGE, "tasks that the daemon runs at the same time")
LIMIT = Metric("swarmnode_limit", GAUGE, "what peers may take, in the unit that node/host/limits.py names", "limit")


class Measured(Protocol):
    """A part that has numbers to show."""

    def measure(self, metrics: Metrics) -> None: ...


def metrics_of(limits: Limits, *parts: Measured) -> Metrics:
    """The metrics of a node that starts now and consists of `parts`."""
    metrics = Metrics()
    started = time.monotonic()
    metrics.show(VERSION, lambda: {__version__: 1})
    metrics.show(UPTIME, lambda: time.monotonic() - started)
    metrics.show(RESIDENT, resident_bytes)
    metrics.show(TASKS, lambda: float(trio.lowlevel.current_statistics().tasks_living))
    flat = flattened(limits)
    metrics.show(LIMIT, lambda: flat)
    for part in parts:
        part.measure(metrics)
    return metrics


def flattened(limits: Limits) -> dict[str, float]:
    """All limits that are numbers, as `part.name`, or `part.part.name` where a part has parts."""
    return dict(_numbers(limits, ""))


def _numbers(limits: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{field.name}", float(value)


def resident_bytes() -> float:
    """Of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def document(metrics: Iterable[Metric]) -> str:
    """docs/metrics.md: every metric with its kind, label and meaning."""
    lines = [
        "# Metrics",
        "",
        "Written by `python -m swarmnode.node.metrics --document > docs/metrics.md`; change the declarations beside",
        "what they measure, not this page.",
        "",
        "`swarmnode metrics` prints what a running node counts, in Prometheus' text format; `--json` prints it as a",
        "list of metrics with their samples. The node opens no port for it. To collect it, let node_exporter read a",
        "file:",
        "",
        "```",
        "swarmnode metrics > /var/lib/node_exporter/swarmnode.prom.new",
        "mv /var/lib/node_exporter/swarmnode.prom.new /var/lib/node_exporter/swarmnode.prom",
        "```",
        "",
        "every 15 s or so, from a timer of the user that the node runs as, with node_exporter's option",
        "`--collector.textfile.directory=/var/lib/node_exporter`. The file is moved into place because it may be read",
        "at any time. node_exporter does not say which file a sample came from: give a second node on the machine a",
        "node_exporter of its own.",
        "",
        "Peers are not labels: there can be any number of them. `swarmnode peers` shows how each one stands. A limit",
        "is near where a gauge comes near the `swarmnode_limit` of its name, such as `swarmnode_unread_bytes` and",
        "`connections.unread_in_all`.",
        "",
        "| metric | kind | label | meaning |",
        "|---|---|---|---|",
    ]
    for metric in metrics:
        label = f"`{metric.label}`" if metric.label else ""
        lines.append(f"| `{metric.name}` | {metric.kind} | {label} | {metric.help} |")
    return "\n".join(lines) + "\n"


def declared() -> tuple[Metric, ...]:
    """All metrics that a node can show, by name: those that stand as constants beside what they measure."""
    import swarmnode.node.daemon  # noqa: F401 (with it come all parts of a node)

    found = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("swarmnode.") and module is not None
        for value in vars(module).values()
        if isinstance(value, Metric)
    }
    return tuple(sorted(found, key=lambda metric: metric.name))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="python -m swarmnode.node.metrics", description="Print docs/metrics.md.")
    parser.add_argument("--document", action="store_true", required=True, help="print the page on standard output")
    parser.parse_args()
    os.write(1, document(declared()).encode())
