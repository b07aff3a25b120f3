"""The butterfly group in short: two of seven members lie inside the all-reduce for three rounds."""

from __future__ import annotations

import butterfly
import pytest
from adversaries import butterfly as adversaries
from adversaries.butterfly import ButterflyLie, LargeSignFlip, LongUnequalCommitments, WrongCentre

pytestmark = pytest.mark.slow

ROUNDS = 3


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lie", [*adversaries.everyone(), LongUnequalCommitments()], ids=lambda lie: type(lie).__name__)
def test_liars_are_banned_by_proof_and_the_honest_agree_and_learn(lie: ButterflyLie) -> None:
    assert butterfly.harm(lie, rounds=ROUNDS).failures() == ()


@pytest.mark.timeout(240)
def test_without_liars_nobody_is_banned() -> None:
    found = butterfly.harm(None, rounds=ROUNDS)
    assert (found.split, found.victims) == (0, 0)


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("lie", [WrongCentre(), LargeSignFlip()], ids=lambda lie: type(lie).__name__)
def test_members_that_check_nothing_are_spoilt_by(lie: ButterflyLie) -> None:
    found = butterfly.harm(lie, method="diloco", rounds=ROUNDS)
    assert not found.loss < 2 * found.clean
