"""A model of 135 M parameters in real daemons: bench/large.py finds that memory, exchange, hashes and joiner hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from swarmnode.training.memory import Machine

BENCH = Path(__file__).resolve().parents[2] / "bench" / "large.py"
ROOM = 20e9  # bytes: three nodes, of which each takes less than 6 GB


def told_by(*command: str | Path) -> list[dict[str, Any]]:
    """What a program tells, in lines of JSON; its nodes end with it, also where the test's time is over."""
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        told, errors = bench.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(bench.pid, signal.SIGKILL)
    assert told, errors
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.slow
@pytest.mark.scale
def test_a_large_model_takes_what_its_table_says_and_a_joiner_catches_up(tmp_path: Path) -> None:
    if Machine.here(str(tmp_path), None).memory < ROOM:
        pytest.skip(f"three nodes take {ROOM / 1e9:.0f} GB of memory, which are not free here")
    lines = told_by(sys.executable, BENCH)
    assert lines[-1]["what"] == "summary"
    assert not lines[-1]["failed"]


@pytest.mark.slow
def test_the_same_of_a_small_one() -> None:
    lines = told_by(sys.executable, BENCH, "--tiny")
    assert {line["what"] for line in lines} >= {"joined", "round", "node", "summary"}
    assert all(line["needs"]["memory"] > 0 for line in lines if line["what"] == "node")
    assert "parity" not in lines[-1]["failed"]  # how long an exchange takes is judged of large ones only
