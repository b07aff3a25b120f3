"""Daemons that lie about their own work, in swarms of real processes with the default of audits, lose their weight.

Each is honest for two rounds and then lies in every one, with a record of work that is as any other's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from realnodes import swarmnode

pytestmark = pytest.mark.slow

BUSY = 600.0  # s; by itself it takes a sixth of that, on a machine that other tests share more
FIRST = 2  # round with a lie
# Rounds from there on in which a lie may count. Half of the steps is false in half of the stretches, and an author is
# audited in three rounds of four: so five rounds are enough in nine of ten runs only, which misses what was aimed at.
WITHIN = {"half-steps": 16, "other-data": 5, "copied": 5, "stale": 5}
NO_STANDING = "its author has no standing with the judges"

# Rounds whose training takes longer than what an audit costs beside its steps.
RUN = """
[run]
name = "audited"
seed = 3
trust = "open"
[model]
layers = 2
heads = 2
width = 64
context = 64
[inner]
batch = 4
steps = 80
warmup = 2
[exchange]
deadline_floor = 1.0
deadline_ceiling = 20.0
"""


@pytest.mark.thorough
@pytest.mark.timeout(BUSY + 20)
@pytest.mark.parametrize("lie", WITHIN)
def test_a_daemon_that_lies_about_its_work_loses_its_weight_within_some_rounds(
    lie: str, tmp_path: Path, corpus: Path
) -> None:
    run_file = tmp_path / "open.toml"
    run_file.write_text(RUN)
    done = swarmnode(
        *("local", run_file, "--nodes", "5", "--attack", lie, "--rounds", str(FIRST + WITHIN[lie] + 2), "--json"),
        *("--report", tmp_path / "report"),
        timeout=BUSY,
        SWARMNODE_CORPUS=str(corpus),
        LIES_FROM_ROUND=str(FIRST),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (liar,) = (event["peer_id"] for event in events if event["event"] == "node" and event.get("lie"))
    rounds = {event["round"]: event for event in events if event["event"] == "round" and event["node"] == 0}
    refused = {number: {*(event.get("verdicts") or {}).items()} for number, event in rounds.items()}

    counted = [number for number, event in rounds.items() if liar in (event.get("counted") or ())]
    assert max(counted, default=0) < FIRST + WITHIN[lie], counted
    assert any((liar, NO_STANDING) in refused[number] for number in rounds if number > FIRST)
    assert not any(why == NO_STANDING for each in refused.values() for peer, why in each if peer != liar)
