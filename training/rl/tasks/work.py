"""What one is asked who samples for another's policy: drawn from who it is, so that nobody picks questions. Torch-free.

    work(run_id, "12D3…", 7, version=30, policy="ab…", tasks=asked(5))        # TaskRef("digits/sort", 5, 5920…)

The receiver draws the same again and refuses other questions. The hash of the weights goes into it, so that nobody
knows his questions before there are the weights to answer them with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from swarmnode.training.rl.tasks import MAX_SEED, TaskRef
from swarmnode.training.rl.tasks.digits import NAMES

TAG = b"swarmnode/work/1\0"


def asked(difficulty: int) -> tuple[tuple[str, int], ...]:
    """What a run by rollouts asks: names and difficulties of tasks."""
    return tuple((name, difficulty) for name in NAMES)


def work(
    run_id: str, sampler: str, counter: int, *, version: int, policy: str, tasks: Sequence[tuple[str, int]]
) -> TaskRef:
    """What `sampler` answers with its group number `counter`, by `version` of the policy with hash `policy`."""
    said = "\0".join((run_id, sampler, str(counter), str(version), policy))
    drawn = int.from_bytes(hashlib.sha256(TAG + said.encode()).digest(), "big")
    name, difficulty = tasks[drawn % len(tasks)]
    return TaskRef(name, difficulty, (drawn >> 64) & MAX_SEED)
