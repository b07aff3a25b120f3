"""bench/sapo.py in miniature: swarms learn, runs resume and are written up."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import sapo
from sapo_swarm.networked import over_simnet
from sapo_swarm.report import gym_table
from sapo_swarm.swarm import Arm, train

TABLES = ("sapo-split", "sapo-unequal", "sapo-gym", "sapo-gym-daemons", "sapo-specialists", "sapo-networks")
TINY = Arm("4/4", own=2, external=2, rounds=2, warm_up=2)


def test_equal_seeds_give_equal_swarms() -> None:
    first, again, other = (train(TINY, seed, lambda round, reward: None) for seed in (1, 1, 2))
    assert first == again != other
    assert first.reward == pytest.approx(sum(first.per_node))
    assert first.curve[-1][0] == 2 and len(first.per_node) == 8


def test_swarms_learn_tasks_of_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra rl is not installed")
    assert {arm.name for arm in sapo.ON_GYM} >= {"8/0", "4/4", "adaptive tapered", "8/0 oversampled"}
    outcome = train(replace(TINY, task=sapo.GYM, warm_up=60), 1, lambda round, reward: None)
    assert len(outcome.per_node) == 8 and outcome.reward > 0


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_generalist_learns_of_tasks_that_it_never_asks_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "results.md"
    page.write_text("".join(f"<!-- {name} -->\nas before\n<!-- /{name} -->\n" for name in TABLES), encoding="utf-8")
    sapo.main(["--task", "specialists", "--seeds", "1", "--out", str(tmp_path / "out"), "--docs", str(tmp_path)])
    alone, together = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert alone["beginning"] == together["beginning"]
    assert all(together["right"][task] > alone["right"][task] for task in ("digits/sort", "digits/swap"))
    assert min(line["right"]["digits/complement"] for line in (alone, together)) > 0.9
    written = page.read_text(encoding="utf-8")
    assert "| in the beginning | 11 % | 11 % | 11 % |" in written and written.count("as before") == len(TABLES) - 1


def test_the_table_of_reasoning_gym_tells_the_worst_seed() -> None:
    line = {"table": "gym", "heldout": 0.5, "informative": 4.0, "taken": 4.0, "curve": [[1, 0.5, 2000]]}
    line["by_task"] = {"gym/lcm": [0.1, 0.6]}
    lines = [
        {**line, "arm": {"name": name}, "seed": seed, "reward": reward}
        for name, rewards in (("8/0", (200, 300)), ("adaptive", (300, 330)), ("8/0 oversampled", (300, 300)))
        for seed, reward in enumerate(rewards)
    ]
    assert "| adaptive | 300, 330 | 1.10 × | 1.00 × | 50.0 % | 4.0 + 4.0 | 2.0 k | lcm 10 → 60 % |" in gym_table(lines)
    by_daemons = [line for line in lines if line["arm"]["name"] != "8/0 oversampled"]
    rows = [row for row in gym_table(lines).splitlines() if "oversampled |" not in row[:20]]
    assert gym_table(by_daemons, lines) == "\n".join(rows)


def test_finished_runs_are_kept_and_written_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sapo, "SPLIT", (replace(TINY, name="8/0", own=2, external=0), TINY))
    monkeypatch.setattr(sapo, "UNEQUAL", tuple(replace(arm, policies="unequal") for arm in sapo.SPLIT))
    page = tmp_path / "results.md"
    page.write_text("".join(f"<!-- {name} -->\nas before\n<!-- /{name} -->\n" for name in TABLES), encoding="utf-8")
    arguments = ["--seeds", "1", "--out", str(tmp_path / "out"), "--docs", str(tmp_path)]
    sapo.main(arguments)
    first = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert Counter(line["table"] for line in first) == {"split": 2, "unequal": 2}
    written = page.read_text(encoding="utf-8")
    assert "| 4/4 |" in written and written.count("as before") == 4
    assert {file.name for file in tmp_path.glob("*.svg")} == {"sapo-split.svg"}
    sapo.main(arguments)
    assert capsys.readouterr().out == ""
    assert page.read_text(encoding="utf-8") == written


def test_the_same_arms_run_over_the_products_own_protocol_on_simnet() -> None:
    outcome = over_simnet(replace(TINY, own=4, external=4, rounds=4, warm_up=60), 1, lambda round, reward: None)
    assert len(outcome.per_node) == 8 and outcome.reward == pytest.approx(sum(outcome.per_node))
    assert outcome.taken > 0, "nodes learned from one another"
    assert outcome.external == 4 and outcome.curve[-1][0] == 4
