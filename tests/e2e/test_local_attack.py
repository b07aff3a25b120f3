"""`swarmnode local --attack` with real processes: a liar among four honest nodes changes nothing but its own score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from realnodes import RUN_TOML, swarmnode

pytestmark = pytest.mark.slow

BUSY = 300.0  # s; by itself it takes a tenth of that, on a machine that other tests share more


@pytest.mark.timeout(BUSY + 20)
def test_a_flipped_sign_is_refused_and_the_honest_learn(tmp_path: Path, corpus: Path) -> None:
    run_file = tmp_path / "open.toml"
    run_file.write_text(RUN_TOML.replace('name = "tiny"', 'name = "tiny"\ntrust = "open"'))
    done = swarmnode(
        *("local", run_file, "--nodes", "5", "--attack", "sign-flip", "--rounds", "5", "--json"),
        *("--report", tmp_path / "report"),
        timeout=BUSY,
        SWARMNODE_CORPUS=str(corpus),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    summary = events[-1]
    attack = summary["attack"]
    losses = [event["loss"] for event in events if event["event"] == "round" and event["node"] == 0]

    assert [event.get("lie") for event in events[:5]] == [None] * 4 + ["sign-flip"]
    assert (attack["attack"], attack["liars"], attack["lies_accepted"]) == ("sign-flip", 1, 0)
    assert attack["lies_refused"] >= 1 and attack["honest_accepted"] > attack["honest_refused"]
    assert "does harm on held-out text" in attack["nodes"][4]["refused"]  # it may also come too late
    assert attack["nodes"][4]["score"] == 0 < max(node["score"] for node in attack["nodes"][:4])
    assert summary["hashes_agree"] and losses[-1] < losses[0] - 0.5
    assert "Traceback" not in done.stderr
