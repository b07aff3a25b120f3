"""The rollout group in short: four nodes, a few rounds."""

from __future__ import annotations

import pytest
import rolloutflood
import rolloutproofs
import rollouts
from adversaries import rollouts as adversaries
from adversaries import samplers
from adversaries.rollouts import Flood, KeySybils, Overlong, RolloutLie, Sybils
from adversaries.samplers import Honest, SamplerLie
from rolloutswarm import Size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # floods take a minute each of a fast machine

SHORT = Size(nodes=4, liars=1, rounds=8, warm_up=300)


@pytest.mark.parametrize("lie", adversaries.everyone(), ids=lambda lie: type(lie).__name__)
def test_nothing_is_learned_from_and_little_lost_to(lie: RolloutLie) -> None:
    found = rollouts.damage(lie, SHORT)
    assert found.course.offered and found.course.honest_checked
    assert found.failures() == ()


def test_without_defence_answers_grow_as_liars_want() -> None:
    found = rollouts.damage(Overlong(), SHORT)
    assert found.undefended.length > 1.2 * found.clean.length


@pytest.mark.parametrize("lie", samplers.everyone(), ids=lambda lie: type(lie).__name__)
def test_a_trainer_learns_nothing_from_samplers_with(lie: SamplerLie) -> None:
    found = rolloutproofs.damage(lie, batches=3)
    assert found.naive == 1.0 and found.failures() == ()


def test_a_trainer_learns_from_all_that_honest_samplers_give() -> None:
    found = rolloutproofs.damage(Honest(), batches=3)
    assert (found.rejected, found.honest_lost) == (0, 0)


def smaller(flood: Flood) -> Flood:
    flood.identities = min(flood.identities, 7)
    return flood


@pytest.mark.parametrize("flood", [Flood(), Sybils()], ids=["Flood", "Sybils"])
def test_the_share_of_any_batch_stays_below_the_cap_under(flood: Flood) -> None:
    found = rolloutflood.damage(smaller(flood), size=rolloutflood.Size(honest=4, before=4, rounds=4))
    assert found.made > 0.5 and found.failures() == ()


def test_without_quotas_who_floods_has_the_pool() -> None:
    few = rolloutflood.Size(honest=4, before=1, rounds=2)
    assert rolloutflood.damage(Flood(), defended=False, size=few).pool > 0.75


def test_new_identities_whose_answers_hold_up_have_more_than_newcomers_may() -> None:
    """What is missed today: nothing tells them from as many newcomers who work."""
    found = rolloutflood.damage(smaller(KeySybils()), size=rolloutflood.Size(honest=4, before=4, rounds=6))
    assert found.batch > found.cap
