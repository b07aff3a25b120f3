"""The round group in short: a stop of each kind, what a leader can do, a backup; and that to nodes without defences."""

from __future__ import annotations

import pytest
import rounds
from adversaries import rounds as adversaries
from adversaries.leaders import Omission, TwoRosters, WrongWeights
from adversaries.lives import LonelyBackup, RestoredBackup
from roundadversary import RoundAdversary

pytestmark = pytest.mark.slow

SHORT = [*adversaries.stops(short=True), TwoRosters(), Omission(), WrongWeights(), RestoredBackup(), LonelyBackup()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("adversary", SHORT, ids=lambda adversary: adversary.name)
def test_honest_nodes_go_on_in_one_state_under(adversary: RoundAdversary) -> None:
    assert rounds.damage(adversary).failures() == ()


BITES = [adversaries.stops(short=True)[0], TwoRosters(), RestoredBackup(), LonelyBackup()]


@pytest.mark.thorough
@pytest.mark.parametrize("adversary", BITES, ids=lambda adversary: adversary.name)
def test_nodes_without_the_defence_are_harmed_by(adversary: RoundAdversary) -> None:
    assert rounds.undefended(adversary).failures()
