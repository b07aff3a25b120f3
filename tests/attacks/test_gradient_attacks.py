"""The gradient group in short: the settings that take the most, fewer rounds."""

from __future__ import annotations

import gradient
import pytest
from adversaries import gradient as adversaries
from adversaries.gradient import GradientLie
from gradient import SETTINGS
from openrounds import Lie


@pytest.mark.parametrize("lie", adversaries.everyone(), ids=lambda lie: type(lie).__name__)
def test_a_third_of_liars_who_judge_and_lead_cost_the_swarm_a_twentieth_at_most(lie: GradientLie) -> None:
    assert gradient.damage(lie, SETTINGS[0]).failures() == ()


@pytest.mark.parametrize("lie", adversaries.breaking(), ids=lambda lie: type(lie).__name__)
def test_the_plain_mean_breaks_under(lie: GradientLie) -> None:
    found = gradient.damage(lie, SETTINGS[1])
    assert found.undefended < 0.7 * found.clean
    assert found.failures() == ()


def test_without_liars_the_rules_of_the_chain_cost_nothing() -> None:
    found = gradient.damage(Lie(), gradient.Setting("IID", None, 0, 0.95))
    assert found.failures() == ()
    assert found.course.refused <= found.course.honest / 10
