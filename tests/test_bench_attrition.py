"""bench/attrition.py: the rules of the validators alone, in a swarm of which a twelfth leaves or dies in each round."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from attrition import Swarm, attrition


def test_a_swarm_of_which_a_twelfth_goes_in_each_round_keeps_its_validator_set_and_few_rounds_end_empty() -> None:
    found = attrition(64, 16, 0.2, rounds=100, runs=10)
    assert float(str(found["empty_rounds_mean"])) < 5
    assert float(str(found["validators_there_in_the_second_half"])) > 12


def test_without_churn_no_round_ends_empty_and_the_validator_set_grows() -> None:
    swarm = Swarm(64, 16, 0.0, 0)
    assert all(swarm.round() for _ in range(100))
    assert len(swarm.chain.validators) > 24
