"""Bytes, half rounds and CPU time of reconciling two replicas, as JSON lines.

    python bench/reconcile.py [--most 100000] [--repeats 3]

For n ranks in all, a second apart on average, of which d are at one side only: anywhere ("scattered") or the last ones
("recent"). `bytes` and `half_rounds` are of the worst of the repeats; `c` is (bytes - 48) / (d log2 n); `list_bytes` is
what a list of all ids takes, the simplest way to find the same; `cpu_ms` is the median CPU time of both sides together,
and `list_cpu_ms` that of comparing two sets of ids, to compare machines by. The first line tells the memory of a rank
in a `RankSet` and in a plain set, and how long building and inserting take; the last, the greatest c.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from conversing import converse

from swarmnode.crdt.ranges import RankSet
from swarmnode.crdt.reconcile import Initiator, Responder, SessionLimits

START = 1_700_000_000_000  # ms since the epoch
GAP = 1000  # ms between elements, on average: 100 000 take a day
FREE = SessionLimits(frames=100_000, size=1 << 30, work=1 << 30)


def ranks_of(rng: random.Random, count: int) -> list[bytes]:
    times = accumulate((rng.expovariate(1 / GAP) for _ in range(count - 1)), initial=float(START))
    return sorted((int(at) << 16).to_bytes(8, "big") + rng.randbytes(32) for at in times)


def cpu_of(work: Callable[[], object]) -> float:
    """CPU time in ms."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def session(rng: random.Random, every: list[bytes], d: int, recent: bool) -> dict[str, float]:
    """One session between two replicas that hold all of `every` but half of d each."""
    differ = every[len(every) - d :] if recent else rng.sample(every, d)
    mine, yours = set(differ[::2]), set(differ[1::2])
    a = RankSet(rank for rank in every if rank not in yours)
    b = RankSet(rank for rank in every if rank not in mine)
    initiator = Initiator(a, cutoff=START - 1, nonce=rng.randbytes(8), limits=FREE)
    responder = Responder(b, cutoff=START - 1, nonce=rng.randbytes(8), limits=FREE)
    began = time.process_time()
    transcript = converse(initiator, responder)
    spent = 1000 * (time.process_time() - began)
    assert (initiator.have, initiator.need, initiator.agreed) == (mine, yours, True)
    ours, theirs = a.keys(), b.keys()
    return {
        "bytes": transcript.size,
        "half_rounds": transcript.half_rounds,
        "first": transcript.frames[0],
        "cpu_ms": spent,
        "list_cpu_ms": cpu_of(lambda: set(ours) ^ set(theirs)),
    }


def memory_of(make: Callable[[], object]) -> int:
    """Bytes that stay allocated with what is made."""
    tracemalloc.start()
    kept = make()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


def grown(ranks: Iterable[bytes]) -> RankSet:
    found = RankSet()
    for rank in ranks:
        found = found.changed([rank])
    return found


def changed(ranks: RankSet, changes: list[bytes], *, added: bool) -> RankSet:
    """One after another."""
    for rank in changes:
        ranks = ranks.changed([rank]) if added else ranks.changed(removed=[rank])
    return ranks


def tree_line(rng: random.Random, n: int) -> dict[str, object]:
    every = ranks_of(rng, n)
    shuffled = rng.sample(every, n)
    some = RankSet(every)
    more = ranks_of(rng, 2000)
    more_too = some.changed(more)
    return {
        "n": n,
        "bytes_a_rank_in_order": round(memory_of(lambda: grown(every)) / n, 1),
        "bytes_a_rank_shuffled": round(memory_of(lambda: grown(shuffled)) / n, 1),
        "bytes_a_rank_plain_set": round(memory_of(lambda: {bytes(bytearray(rank)) for rank in every}) / n, 1),
        "build_ms": round(cpu_of(lambda: RankSet(every)), 1),
        "insert_us": round(1000 * cpu_of(lambda: changed(some, more, added=True)) / len(more), 1),
        "remove_us": round(1000 * cpu_of(lambda: changed(more_too, more, added=False)) / len(more), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of reconciling two replicas, as JSON lines.")
    parser.add_argument("--most", type=int, default=100_000, help="greatest n, up to 1000000")
    parser.add_argument("--repeats", type=int, default=3, help="sessions of each kind")
    chosen = parser.parse_args()
    rng = random.Random(0)
    greatest = 0.0
    print(json.dumps(tree_line(rng, min(chosen.most, 100_000))), flush=True)
    for n in (n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= chosen.most):
        every = ranks_of(rng, n)
        for d in (d for d in (0, 1, 10, 100, 1_000, 10_000) if d <= n // 10):
            for place in ("scattered", "recent") if d else ("equal",):
                runs = [session(rng, every, d, place == "recent") for _ in range(chosen.repeats)]
                size = max(run["bytes"] for run in runs)
                line = {
                    "n": n,
                    "d": d,
                    "differences": place,
                    "bytes": size,
                    "first_bytes": max(run["first"] for run in runs),
                    "half_rounds": max(run["half_rounds"] for run in runs),
                    "c": round((size - 48) / (d * math.log2(n)), 1) if d else None,
                    "list_bytes": 32 * n,
                    "cpu_ms": round(statistics.median(run["cpu_ms"] for run in runs), 1),
                    "list_cpu_ms": round(statistics.median(run["list_cpu_ms"] for run in runs), 1),
                }
                greatest = max(greatest, float(line["c"] or 0))
                print(json.dumps(line), flush=True)
    print(json.dumps({"bytes_at_most": "48 + c * d * log2(n)", "c": greatest}))


if __name__ == "__main__":
    main()
