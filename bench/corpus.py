"""A corpus that is larger than memory may be: how long it is cut, what that takes, and how soon a joiner trains on it.

    python bench/corpus.py [--gigabytes 3] [--vocabulary 256]

Writes synthetic text (lines of words that follow Zipf's law, in files of 64 MB), starts a creator with it and a joiner
that has none, both real daemons on loopback, and prints one JSON object:

    cut_seconds            from the creator's start until it is ready, its trainer included
    steps                  seconds that each part of that took, as its events told
    shards, bytes          what it made
    creator_peak_mib       most memory that its daemon held (VmHWM); it starts no helper but the trainer
    trainer_peak_mib       of the creator's trainer, which maps the shards: pages of the file cache count as its own
    asleep_ms              longest time in which the daemon answered no question about its status while it cut
    first_shard_seconds    from the joiner's start until it had a shard
    to_first_round_seconds from then until its first round had ended, which is later than its first step
    joiner_peak_mib        most memory of its daemon

`failed` names what was missed (1024 MiB for a daemon, 60 s), and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path += [str(SUPPORT), str(SUPPORT.parent / "netlab")]

from realnodes import LOCAL, RUN_TOML, Node, peak_mib  # noqa: E402 (found in the folders above)

from swarmnode.node.control.client import ControlClient  # noqa: E402
from swarmnode.node.exitcodes import ExpectedError  # noqa: E402

FILE = 64_000_000  # bytes of a file
WORDS = 30_000
LINES = 40_000  # that files are drawn from
MOST_MEMORY = 1024  # MiB
MOST_SECONDS = 60.0
PATIENCE = 7200.0  # s


def write_corpus(folder: Path, size: int, seed: int = 1) -> None:
    """`size` bytes of text; each line has a number, so that no two documents are alike."""
    chance = np.random.default_rng(seed)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgk", np.uint8)
    words = [bytes(chance.choice(letters, chance.integers(2, 11))) for _ in range(WORDS)]
    ranks = np.minimum(chance.zipf(1.2, LINES * 16) - 1, WORDS - 1)
    lines = [b" ".join(words[rank] for rank in row) for row in ranks.reshape(LINES, 16)]
    folder.mkdir(parents=True)
    number = 0
    while size > 0:
        text = bytearray()
        for drawn in chance.integers(0, LINES, min(FILE, size) // 100):
            text += b"%d %s\n" % (number, lines[drawn])
            number += 1
        (folder / f"{number:010d}.txt").write_bytes(text)
        size -= len(text)


class Watch:
    """How long the daemon leaves questions unanswered, until `stop`."""

    def __init__(self, home: Path) -> None:
        self.longest = 0.0
        self._client = ControlClient(home)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(0.2):
            began = time.monotonic()
            try:
                self._client.call("status", timeout=60.0)
            except ExpectedError:
                continue
            self.longest = max(self.longest, time.monotonic() - began)

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self.longest


def measure(size: int, vocabulary: int, folder: Path) -> dict[str, Any]:
    text, run = folder / "text", folder / "run.toml"
    began = time.monotonic()
    write_corpus(text, size)
    (folder / "nothing").mkdir()
    run.write_text(RUN_TOML + f"[data]\nvocabulary = {vocabulary}\n")
    told: dict[str, Any] = {"bytes_of_text": size, "vocabulary": vocabulary, "writing": time.monotonic() - began}
    with ExitStack() as stack:
        began = time.monotonic()
        cap = ("--shards-cap", "100")
        home = folder / "creator"
        creator = stack.enter_context(Node(home, run, "--wait-peers", "1", *cap, corpus=text, flags=LOCAL))
        watch = Watch(home)
        ready = creator.wait_for("ready", within=PATIENCE)
        told["cut_seconds"] = time.monotonic() - began
        told["asleep_ms"] = 1000 * watch.stop()
        told["steps"] = steps_of(creator)
        told["creator_peak_mib"] = peak_mib(ready["pid"])
        told["trainer_peak_mib"] = peak_mib(ready["trainer_pid"])
        index = creator.command_line("shards", "ls")
        told |= {"shards": len(index["shards"]), "bytes": index["bytes"]}
        began = time.monotonic()
        join = ("--join", ready["multiaddr"], *cap)
        joiner = stack.enter_context(Node(folder / "joiner", *join, corpus=folder / "nothing", flags=LOCAL))
        joiner.wait_for("data", lambda event: event["shards"] > 0, within=PATIENCE)
        told["first_shard_seconds"] = time.monotonic() - began
        began = time.monotonic()
        joiner.wait_for("round", lambda event: event["steps"] > 0, within=PATIENCE)
        told["to_first_round_seconds"] = time.monotonic() - began
        told["joiner_peak_mib"] = peak_mib(joiner.ready["pid"])
        told["creator_peak_mib"] = max(told["creator_peak_mib"], peak_mib(ready["pid"]))
    checks = {
        "creator_peak_mib": told["creator_peak_mib"] <= MOST_MEMORY,
        "joiner_peak_mib": told["joiner_peak_mib"] <= MOST_MEMORY,
        "to_first_round_seconds": told["to_first_round_seconds"] <= MOST_SECONDS,
    }
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in told.items()}
    failed = [name for name, held in checks.items() if not held]
    return {**rounded, "load": [round(load, 1) for load in os.getloadavg()], "failed": failed}


def steps_of(creator: Node) -> dict[str, float]:
    """Seconds that each step of cutting took, to the second at which events come."""
    found: dict[str, float] = {}
    for event in creator.events:
        if event["event"] == "corpus":
            found[event["step"]] = found.get(event["step"], 0.0) + 1.0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="A large corpus: time and memory of cutting it and of joining.")
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of text")
    parser.add_argument("--vocabulary", type=int, default=256, help="more than 256 trains a tokenizer of that size")
    parser.add_argument("--folder", type=Path, help="where to work; it needs three times the text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-corpus-", dir=options.folder) as folder:
        told = measure(int(options.gigabytes * 1e9), options.vocabulary, Path(folder))
    print(json.dumps(told), flush=True)
    return 1 if told["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
