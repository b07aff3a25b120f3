"""bench/samplers.py in miniature: real policies over the simulated network, and one sampler that cheats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import samplers


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_trainers_learn_from_six_samplers_and_the_one_with_other_weights_is_caught_in_three_rounds() -> None:
    told = samplers.run_arm("cheated", 1, updates=12, sampling=0.5, update=0.2)
    assert told["accepted"] > 100 and told["staleness_worst_update"] <= 4
    for found in told["cheat"]:
        assert found["rounds"] <= 3 and found["learned_from"] == 0
    assert set(told["refused"]) <= {"stale", "for-another", "no-standing", "logprobs", "other-activations"}
    assert 0 < told["reward_per_update"] < 1


def test_who_is_alone_asks_itself_as_many_questions_as_three_samplers_would() -> None:
    told = samplers.run_arm("colocated", 1, updates=2, sampling=0.5, update=0.2)
    assert told["came"] == 0 and told["informative_per_update"] > 4
