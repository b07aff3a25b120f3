"""The rollout group in short: four nodes, a few rounds."""

from __future__ import annotations

import pytest
import rolloutflood
import rolloutproofs
import rollouts
from adversaries import rollouts as adversaries
from adversaries import samplers
from adversaries.rollouts import Flood, Overlong, RolloutLie, Sybils
from adversaries.samplers import Honest, SamplerLie
from rolloutswarm import Size

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(("flood", "rounds"), [(Flood(), 1), (Sybils(), 2)], ids=["Flood", "Sybils"])
def test_the_share_of_any_batch_stays_below_the_cap_under(flood: Flood, rounds: int) -> None:
    assert rolloutflood.damage(flood, rounds=rounds).failures() == ()


def test_without_quotas_who_floods_has_the_pool() -> None:
    assert rolloutflood.damage(Flood(), defended=False, rounds=1).pool > 0.75
