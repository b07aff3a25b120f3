"""The state group in short."""

from __future__ import annotations

import pytest
import state
from adversaries import state as adversaries
from adversaries.state import StateAdversary

from swarmnode.testing.simnet import run_simulation

pytestmark = pytest.mark.slow


def short(adversary: StateAdversary) -> object:
    marks = [pytest.mark.thorough] if isinstance(adversary, adversaries.ManyAuthors) else []
    return pytest.param(adversary, marks=marks)


@pytest.mark.parametrize(
    "adversary", map(short, adversaries.everyone()), ids=lambda adversary: type(adversary).__name__
)
def test_honest_nodes_keep_one_state_within_quotas_under(adversary: StateAdversary) -> None:
    adversary.scale = 0.1
    found = run_simulation(state.damage, adversary)
    assert found.failures() == ()
