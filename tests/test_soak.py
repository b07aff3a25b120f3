"""What the soak (bench/soak) concludes from what it saw: contradictions, stalls, growth, and strikes that repeat."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("bench/soak", "tests/netlab")]

import member
from faults import FATAL, KINDS, schedule
from history import History
from resources import Held, grown, growth, peaks


def told(round: int, hash: str, members: int) -> dict[str, Any]:
    return {
        "event": "round",
        "round": round,
        "state_hash": hash,
        "members": members,
        "seconds": 2.0,
        "compute_seconds": 1.5,
        "outcome": "Completed",
    }


def test_two_companies_with_different_states_contradict_each_other() -> None:
    history = History()
    for node, hash in enumerate("aabb"):
        history.add(node, told(6, hash, 2), 10.0)
    assert history.contradictions() == [7]


def test_a_node_that_goes_on_alone_contradicts_nobody() -> None:
    history = History()
    for node in range(3):
        history.add(node, told(6, "a", 3), 10.0)
    history.add(3, told(6, "b", 1), 10.0)
    assert history.contradictions() == []
    assert list(history.forks()) == [7]


def test_one_that_fetched_another_state_contradicts_nobody_by_itself() -> None:
    history = History()
    history.add(0, told(6, "a", 3), 10.0)
    history.add(1, {"event": "caught_up", "round": 7, "state_hash": "b", "seconds": 1.0}, 11.0)
    assert list(history.forks()) == [7]
    assert history.contradictions() == []


def test_the_longest_stall_is_that_of_the_swarm_and_lasts_to_the_end() -> None:
    history = History()
    history.add(0, told(0, "a", 2), 5.0)
    history.add(1, told(1, "b", 1), 15.0)  # alone: the swarm stands still
    history.add(0, told(1, "c", 2), 25.0)
    assert (history.longest_stall, history.stalled_at) == (20.0, 1)
    history.end(60.0)
    assert (history.longest_stall, history.stalled_at) == (35.0, 2)


def test_nodes_are_in_step_when_all_told_one_state_lately() -> None:
    history = History()
    for node in range(3):
        history.add(node, told(4, "a", 3), 10.0 + node)
    history.add(0, told(5, "b", 3), 14.0)
    assert history.in_step(3, since=9.0) == 5
    assert history.in_step(3, since=10.5) is None
    assert history.in_step(4, since=9.0) is None


def test_growth_is_noticed_and_a_level_is_not() -> None:
    level = [Held(memory_mb=100.0, descriptors=30.0 + n % 2, tasks=100.0) for n in range(40)]
    assert grown(growth(level)) == []
    leaking = [Held(memory_mb=100.0 + 4 * n, descriptors=30.0 + n, tasks=100.0) for n in range(40)]
    assert grown(growth(leaking)) == ["memory_mb", "descriptors"]
    assert peaks(leaking) == {"memory_mb": 256.0, "descriptors": 69.0, "tasks": 100.0}


def test_a_node_that_was_down_when_looked_at_has_no_growth() -> None:
    assert growth([Held()] * 40) == {}


def test_a_seed_repeats_its_strikes_and_another_does_not() -> None:
    first, again, other = (list(islice(schedule(seed, 6, list(KINDS), 5.0), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert {strike.kind for strike in first} == set(KINDS) > FATAL
    assert [strike.at for strike in first[:3]] == [5.0, 10.0, 15.0]
    assert all(KINDS[s.kind][0] <= s.seconds <= KINDS[s.kind][1] and sorted(s.order) == list(range(6)) for s in first)


@pytest.mark.skipif(not member.FAKETIME.exists(), reason="Debian's package libfaketime is not installed")
def test_a_clock_is_stepped_and_threads_that_wait_for_one_another_do_not_spin(tmp_path: Path) -> None:
    program = (
        "import hashlib, json, os, threading, time\n"
        "end, text = time.monotonic() + 1, bytes(100_000)\n"
        "def sums():\n"
        "    while time.monotonic() < end: hashlib.sha256(text).digest()\n"
        "threads = [threading.Thread(target=sums) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "while time.monotonic() < end: sum(range(300))\n"
        "for thread in threads: thread.join()\n"
        "print(json.dumps([time.time(), os.times().system]))\n"
    )
    file = tmp_path / "clock"
    with_clock = member.with_clock(file)
    file.write_text("+90s")

    def run(*told: str) -> list[float]:
        command = [*with_clock, *told, sys.executable, "-c", program]
        clock, in_kernel = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        return [clock - time.time(), in_kernel]

    ahead, waiting = run()
    assert ahead == pytest.approx(90, abs=10)
    _, spinning = run("FAKETIME_FORCE_MONOTONIC_FIX=1")
    assert 2 * waiting < spinning, "libfaketime no longer needs to be told"
