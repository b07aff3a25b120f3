"""A corpus of 3 GB, and a small one: its creator and a joiner stay below 1 GB of memory, and the joiner soon trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from realnodes import environment

BENCH = Path(__file__).parents[2] / "bench" / "corpus.py"


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [0.1, pytest.param(3, marks=pytest.mark.scale)])
@pytest.mark.timeout(1500)
def test_a_corpus_is_cut_and_joined_in_bounded_memory(tmp_path: Path, gigabytes: float) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--gigabytes", str(gigabytes), "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == [] and told["bytes"] > 0.95e9 * gigabytes
