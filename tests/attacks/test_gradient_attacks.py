"""The gradient group in short: one setting of each attack on the rules, and two of those through the network."""

from __future__ import annotations

import gradient
import offers
import pytest
from adversaries import gradient as adversaries
from adversaries.gradient import GradientLie
from adversaries.offers import CopiedReveal, Malformed, OfferAdversary
from gradient import SETTINGS
from openrounds import RULES, Lie

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lie", adversaries.everyone(), ids=lambda lie: type(lie).__name__)
def test_a_third_of_liars_who_judge_and_lead_cost_the_swarm_a_twentieth_at_most(lie: GradientLie) -> None:
    assert gradient.damage(lie, SETTINGS[0]).failures() == ()


@pytest.mark.parametrize(
    "lie", [adversaries.SignFlip(), adversaries.LittleIsEnough()], ids=lambda lie: type(lie).__name__
)
def test_so_it_is_where_contributions_come_in_turns_and_have_momentum(lie: GradientLie) -> None:
    assert gradient.damage(lie, gradient.IN_TURNS[0]).failures() == ()


def test_a_quarter_of_liars_costs_a_twentieth_at_most_where_a_committee_judges() -> None:
    setting = gradient.WITH_COMMITTEE[0]
    assert setting.peers > RULES.committee
    found = gradient.damage(adversaries.LargerInnerProduct(), setting)
    assert found.failures() == ()
    assert found.undefended < setting.least * found.clean


@pytest.mark.parametrize("lie", adversaries.breaking(), ids=lambda lie: type(lie).__name__)
def test_the_plain_mean_breaks_under(lie: GradientLie) -> None:
    found = gradient.damage(lie, SETTINGS[1])
    assert found.undefended < 0.7 * found.clean
    assert found.failures() == ()


def test_without_liars_the_rules_of_the_chain_cost_nothing() -> None:
    found = gradient.damage(Lie(), gradient.Setting("IID", None, 0, 0.95))
    assert found.failures() == ()
    assert found.course.refused <= found.course.honest / 10


@pytest.mark.parametrize("liars", [1, 7])
def test_a_first_strike_moves_the_parameters_by_two_steps_at_most_and_is_undone_where_it_harms(liars: int) -> None:
    _, broken = gradient.strike(liars)
    assert broken == ()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("adversary", [Malformed(), CopiedReveal()], ids=lambda adversary: type(adversary).__name__)
def test_what_is_malformed_or_copied_is_refused_and_the_round_goes_on(adversary: OfferAdversary) -> None:
    assert offers.damage(adversary).failures() == ()


@pytest.mark.parametrize("adversary", [Malformed(), CopiedReveal()], ids=lambda adversary: type(adversary).__name__)
def test_nodes_without_the_defence_take_what_is_malformed_or_copied(adversary: OfferAdversary) -> None:
    assert offers.undefended(adversary).verdicts[offers.ACCEPTED]
