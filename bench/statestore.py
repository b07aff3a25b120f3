"""The replicated state on disk: ingest beside plain verification, restart, memory, as JSON lines.

    python bench/statestore.py [--records 100000] [--authors 1000] [--repeats 3]

Records are small notes and scores of many authors, signed for real. Each repeat measures, in a process of its own:
- `ingest`, on one core and on all, in two orders of arrival: `ranked`, the order of stamps, as records arise and as
  repair asks for them, and `shuffled`, in no order at all, the worst for every index. First, as the baseline, how many
  signatures one core verifies a second and nothing else, on a part of the same records; then records a second from
  bytes to disk: parsed, verified in threads, merged, synced, AT_ONCE batches on their way at a time, as from as many
  peers. `ratio` is the second over the first, `ratio_opened` over parsing and verifying without the store, and
  `ratio_cpu` the first in records a second of processor time, which other programs' load changes less;
- `restart`: seconds until a store with all records answers, as its process measures it, and the bytes of memory a
  record that this takes, by RSS and by tracemalloc (the latter in a run of its own);
- `own`: milliseconds for a record of this node's own, signed, durable, at the median and at the 99th percentile;
- `ask`: milliseconds for a snapshot with its hash, and for a look at one key, with all records there.

A line each, and last the medians. `load` is that of the machine while it went.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import Element, parse, write
from swarmnode.node.host.addresses import public_key
from swarmnode.node.identity import peer_id_of
from swarmnode.node.storage.statestore import StateStore
from swarmnode.protocols.runner import in_thread
from swarmnode.testing.memorystate import clocks_of

RUN = "ab" * 32
BATCH = 896  # records that are verified, and then merged, at once: as many as one message of 256 KiB carries
AT_ONCE = 2  # batches on their way
BASELINE = 5000  # records that the baseline verifies, before and again after
INGESTS = ("ingest_one_core_ranked", "ingest_one_core_shuffled", "ingest_ranked", "ingest_shuffled")
OWN = 300  # records of this node's own
MEDIANS = (
    *((what, key) for what in INGESTS for key in ("ratio", "ratio_opened", "ratio_cpu", "records_s")),
    ("restart", "seconds"),
    ("restart", "rss_a_record"),
    ("restart", "traced_a_record"),
    ("own", "p50_ms"),
)


def verify(author: str, message: bytes, signature: bytes) -> bool:
    """As the host does it."""
    try:
        public_key(author).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def signed(records: int, authors: int, now: int) -> Iterator[bytes]:
    """Sealed records in order of their stamps, as repair asks for them and as they arise; authors in no order."""
    draw = random.Random(0)
    keys = [Ed25519PrivateKey.from_private_bytes(draw.randbytes(32)) for _ in range(authors)]
    names = [peer_id_of(key.public_key().public_bytes_raw()) for key in keys]
    spaced = 86_400_000 // records  # ms: the records of a day
    for number in range(records):
        who, nth = number % authors, number // authors
        key = f"note/{nth}" if nth < 50 else f"score/{nth:08d}/0"
        stamp = stamp_at(now - (records - number) * spaced, nth)
        value = {"mean": draw.random(), "of": draw.randbytes(8)}
        yield write(RUN, names[who], key, value, hlc=stamp, sign=keys[who].sign).sealed


def kept(path: Path) -> list[bytes]:
    """Sealed records from a file: each behind its length in two bytes."""
    raw, found, at = path.read_bytes(), [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 2], "big")
        found.append(raw[at + 2 : at + 2 + size])
        at += 2 + size
    return found


def new_store(path: Path) -> StateStore:
    key = Ed25519PrivateKey.generate()
    me = peer_id_of(key.public_key().public_bytes_raw())
    return StateStore(path, RUN, me=me, sign=key.sign, clocks=clocks_of(lambda: time.time_ns() // 1_000_000))


def verified_alone(elements: list[Element]) -> tuple[float, float]:
    """Seconds, and seconds of processor time, that verifying takes."""
    began, cpu = time.perf_counter(), time.process_time()
    assert all(element.is_genuine(verify) for element in elements)
    return time.perf_counter() - began, time.process_time() - cpu


async def ingest(folder: Path, shuffled: bool) -> dict[str, float]:
    sealed = kept(folder / "records")
    if shuffled:
        random.Random(1).shuffle(sealed)
    some = [parse(raw) for raw in sealed[:BASELINE]]
    before = verified_alone(some)
    began = time.perf_counter()
    assert all(parse(raw).is_genuine(verify) for raw in sealed[:BASELINE])
    opened = len(some) / (time.perf_counter() - began)
    batches = iter([sealed[at : at + BATCH] for at in range(0, len(sealed), BATCH)])
    store = new_store(folder / "ingest" / "state.db")

    def open_batch(raws: list[bytes]) -> list[Element]:
        elements = [parse(raw) for raw in raws]
        assert all(element.is_genuine(verify) for element in elements)
        return elements

    async def work() -> None:
        for raws in batches:
            elements = await in_thread(lambda raws=raws: open_batch(raws))
            verdicts = await store.merge(elements)
            assert set(verdicts) == {Merged.STORED}

    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        began, cpu = time.perf_counter(), time.process_time()
        async with trio.open_nursery() as workers:
            for _ in range(AT_ONCE):
                workers.start_soon(work)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        disk = (await store.stats()).disk
        nursery.cancel_scope.cancel()
    after = verified_alone(some)  # the load of the machine may have changed meanwhile
    verified, cpu_verified = (2 * len(some) / (first + second) for first, second in zip(before, after, strict=True))
    rate = len(sealed) / took
    return {
        "verified_s": verified,
        "opened_s": opened,
        "records_s": rate,
        "ratio": rate / verified,
        "ratio_opened": rate / opened,
        "ratio_cpu": len(sealed) / cpu / cpu_verified,
        "disk_a_record": disk / len(sealed),
    }


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def restart(folder: Path, traced: bool) -> dict[str, float]:
    async with trio.open_nursery() as nursery:  # imports, threads and pages of SQLite are no record's
        await nursery.start(new_store(folder / "small" / "state.db").run)
        nursery.cancel_scope.cancel()
    store = new_store(folder / "ingest" / "state.db")
    before = rss()
    if traced:
        tracemalloc.start()
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        took = time.perf_counter() - began
        after, count = rss(), len(store.snapshot(0))
        if traced:
            size, _ = tracemalloc.get_traced_memory()
            nursery.cancel_scope.cancel()
            return {"traced_a_record": size / count}
        nursery.cancel_scope.cancel()
    return {"seconds": took, "records": count, "rss_a_record": (after - before) / count}


async def own(folder: Path) -> dict[str, float]:
    store, took = new_store(folder / "own" / "state.db"), []
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for number in range(OWN):
            began = time.perf_counter()
            await store.write(f"note/{number % 10}", {"x": number})
            took.append(1000 * (time.perf_counter() - began))
        nursery.cancel_scope.cancel()
    return {"p50_ms": statistics.median(took), "p99_ms": statistics.quantiles(took, n=100)[98]}


async def ask(folder: Path) -> dict[str, float]:
    store, found = new_store(folder / "ingest" / "state.db"), {}
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        cutoff = time.time_ns() // 1_000_000 + 2000
        (author,) = {element.author for element in await store.select("note/", limit=1)}
        began = time.perf_counter()
        for _ in range(100):
            assert store.snapshot(cutoff).digest
        found["state_hash_ms"] = 10 * (time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(100):
            assert await store.get(author, "note/0") is not None
        found["get_ms"] = 10 * (time.perf_counter() - began)
        nursery.cancel_scope.cancel()
    return found


def measured(part: str, folder: Path, *, one_core: bool = False, shuffled: bool = False) -> dict[str, Any]:
    """What the child process for `part` found."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
    command += ["--one-core"] * one_core + ["--shuffled"] * shuffled
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description="The replicated state on disk, beside plain verification.")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--authors", type=int, default=1000, help="at most 50 + 160 records an author")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-core", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shuffled", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        if chosen.one_core:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        parts = {
            "ingest": lambda: ingest(chosen.folder, chosen.shuffled),
            "restart": lambda: restart(chosen.folder, False),
            "traced": lambda: restart(chosen.folder, True),
            "own": lambda: own(chosen.folder),
            "ask": lambda: ask(chosen.folder),
        }
        print(json.dumps(trio.run(parts[chosen.part])))
        return 0
    results: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=".") as name:  # beside the program, as /tmp may be memory
        folder = Path(name)
        with (folder / "records").open("wb") as file:
            for raw in signed(chosen.records, chosen.authors, time.time_ns() // 1_000_000):
                file.write(len(raw).to_bytes(2, "big") + raw)
        for repeat in range(chosen.repeats):
            result: dict[str, dict[str, Any]] = {}
            for what in (*INGESTS, "restart", "own", "ask"):
                if what in INGESTS:
                    for file_there in (folder / "ingest").glob("*"):
                        file_there.unlink()
                    result[what] = measured(
                        "ingest", folder, one_core="one_core" in what, shuffled=what.endswith("shuffled")
                    )
                else:
                    result[what] = measured(what, folder)
                if what == "restart":
                    result[what] |= measured("traced", folder)
                shown = {key: round(value, 3) for key, value in result[what].items()}
                load = round(os.getloadavg()[0], 2)
                print(
                    json.dumps({"bench": "statestore", "what": what, "repeat": repeat, **shown, "load": load}),
                    flush=True,
                )
            results.append(result)
    medians = {
        f"{what}_{key}": round(statistics.median(result[what][key] for result in results), 3) for what, key in MEDIANS
    }
    print(json.dumps({"bench": "statestore", "what": "median", "records": chosen.records, **medians}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
