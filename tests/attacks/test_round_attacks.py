"""The round group in short: a stop of each kind, what a leader can do, and both to nodes without the defence."""

from __future__ import annotations

import pytest
import rounds
from adversaries import rounds as adversaries
from adversaries.leaders import Omission, TwoRosters, WrongWeights
from roundadversary import RoundAdversary

SHORT = [*adversaries.stops(short=True), TwoRosters(), Omission(), WrongWeights()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("adversary", SHORT, ids=lambda adversary: adversary.name)
def test_honest_nodes_go_on_in_one_state_under(adversary: RoundAdversary) -> None:
    assert rounds.damage(adversary).failures() == ()


BITES = [adversaries.stops(short=True)[0], TwoRosters()]


@pytest.mark.parametrize("adversary", BITES, ids=lambda adversary: adversary.name)
def test_nodes_without_the_defence_are_harmed_by(adversary: RoundAdversary) -> None:
    assert rounds.undefended(adversary).failures()
