"""All metrics of a node, from its parts. `docs/generate.py` writes their page."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
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
