"""What strikes a node, when, and for how long: drawn from a seed, so that a soak can be repeated.

Each strike names the nodes in an order of its own; it meets the first of them that stands at that moment and may be
struck so. What came before decides who stands, the seed everything else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# seconds from the strike to its repair, at least and at most
KINDS: dict[str, tuple[float, float]] = {
    "kill": (0.5, 8.0),  # SIGKILL to the daemon; it is started again
    "kill-trainer": (0.0, 0.0),  # SIGKILL to the trainer, as when memory runs out; the daemon mends that itself
    "freeze": (1.0, 12.0),  # SIGSTOP to daemon and trainer, as when a lid is closed; SIGCONT
    "freeze-daemon": (1.0, 12.0),
    "freeze-trainer": (1.0, 12.0),
    "restart": (0.0, 0.0),  # SIGINT, and a start when it has ended
    "cut": (1.0, 15.0),  # the cable is out, in silence
    "full": (2.0, 15.0),  # the file system of the data directory has no byte left
    "clock": (5.0, 30.0),  # the clock is CLOCK_STEP seconds ahead, and then right again
}
CLOCK_STEP = 90  # s; records that are dated more than a minute ahead are refused
FATAL = frozenset({"kill", "restart"})  # after these a node is a new process


@dataclass(frozen=True)
class Strike:
    """Something that goes wrong `at` seconds into the soak."""

    at: float
    kind: str
    order: tuple[int, ...]  # nodes, by number
    seconds: float  # until it is repaired


def schedule(seed: int, nodes: int, kinds: Sequence[str], every: float) -> Iterator[Strike]:
    """A strike every so many seconds, without end."""
    rng = random.Random(seed)
    for number in itertools.count(1):
        kind = rng.choice(kinds)
        yield Strike(number * every, kind, tuple(rng.sample(range(nodes), nodes)), rng.uniform(*KINDS[kind]))
