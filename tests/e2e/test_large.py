"""A model of 135 M parameters in real daemons: bench/large.py finds that memory, exchange, hashes and joiner hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.training.memory import Machine

BENCH = Path(__file__).resolve().parents[2] / "bench" / "large.py"
ROOM = 20e9  # bytes: three nodes, of which each takes less than 6 GB


@pytest.mark.slow
@pytest.mark.scale
def test_a_large_model_takes_what_its_table_says_and_a_joiner_catches_up(tmp_path: Path) -> None:
    if Machine.here(str(tmp_path), None).memory < ROOM:
        pytest.skip(f"three nodes take {ROOM / 1e9:.0f} GB of memory, which are not free here")
    done = subprocess.run([sys.executable, BENCH], capture_output=True, text=True, timeout=3000)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and lines[-1]["what"] == "summary", done.stderr
    assert not lines[-1]["failed"]


@pytest.mark.slow
def test_the_same_of_a_small_one() -> None:
    done = subprocess.run([sys.executable, BENCH, "--tiny"], capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["what"] for line in lines} >= {"joined", "round", "node", "summary"}, done.stderr
    assert all(line["needs"]["memory"] > 0 for line in lines if line["what"] == "node")
