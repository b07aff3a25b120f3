"""What the processes of a node hold, looked at from outside, and whether it grows.

Memory, descriptors and threads come from /proc, of the daemon and of its trainer; the daemon's tasks from its metrics.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from member import Member, children

from swarmnode.node.control.client import ControlClient, ControlError, NotRunning

ANSWER_WITHIN = 5.0  # s
PAGE = os.sysconf("SC_PAGE_SIZE")

# What may come in between the second and the last quarter of a soak: a share of what was there, and so much more.
ALLOWED = {
    "memory_mb": (0.15, 16.0),
    "descriptors": (0.0, 8.0),
    "threads": (0.0, 6.0),
    "tasks": (0.1, 16.0),
    "trainer_memory_mb": (0.15, 16.0),
    "trainer_descriptors": (0.0, 4.0),
    "trainer_threads": (0.0, 4.0),
}


@dataclass(frozen=True)
class Held:
    """At one moment. What could not be learned is None."""

    memory_mb: float | None = None  # resident, 10^6 bytes
    descriptors: float | None = None
    threads: float | None = None
    tasks: float | None = None
    trainer_memory_mb: float | None = None
    trainer_descriptors: float | None = None
    trainer_threads: float | None = None


def look(members: Sequence[Member]) -> list[Held]:
    """What each holds now; nothing of one that does not stand."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(_held, members))


def _held(member: Member) -> Held:
    if not member.stands:
        return Held()
    daemon, trainer = _process(member.pid), (None, None, None)
    for pid in children(member.pid):
        trainer = _process(pid)
    return Held(*daemon, _tasks(member.home), *trainer)


def _process(pid: int) -> tuple[float | None, float | None, float | None]:
    """Memory in 10^6 bytes, descriptors, threads."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        status = Path(f"/proc/{pid}/status").read_text()
        threads = int(status.partition("\nThreads:")[2].split()[0])
        return pages * PAGE / 1e6, len(os.listdir(f"/proc/{pid}/fd")), threads
    except (FileNotFoundError, ProcessLookupError):
        return None, None, None  # it ended meanwhile


def _tasks(home: Path) -> float | None:
    try:
        metrics = ControlClient(home).call("metrics", timeout=ANSWER_WITHIN)["metrics"]
    except (ControlError, NotRunning, OSError):
        return None  # it was struck meanwhile, or is too busy
    return next((metric["samples"][0]["value"] for metric in metrics if metric["name"] == "swarmnode_tasks"), None)


def peaks(samples: Sequence[Held]) -> dict[str, float]:
    """The most of each."""
    return {
        field.name: round(max(values), 1)
        for field in fields(Held)
        if (values := [value for held in samples if (value := getattr(held, field.name)) is not None])
    }


def growth(samples: Sequence[Held]) -> dict[str, dict[str, float]]:
    """For each: the median in the second quarter of `samples`, that in the last, and how much more is allowed."""
    quarter = len(samples) // 4
    found = {}
    for name, (share, more) in ALLOWED.items():
        early, late = (
            [value for held in part if (value := getattr(held, name)) is not None]
            for part in (samples[quarter : 2 * quarter], samples[3 * quarter :])
        )
        if early and late:
            before, after = median(early), median(late)
            found[name] = {"from": round(before, 1), "to": round(after, 1), "allowed": round(share * before + more, 1)}
    return found


def grown(growth: dict[str, dict[str, float]]) -> list[str]:
    """What came beyond what is allowed."""
    return [name for name, g in growth.items() if g["to"] - g["from"] > g["allowed"]]
