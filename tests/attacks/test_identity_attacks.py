"""The identity group in short."""

from __future__ import annotations

import identity
import pytest
import trio
from adversaries import identity as adversaries
from harness import Adversary

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("adversary", adversaries.everyone(), ids=lambda adversary: type(adversary).__name__)
def test_many_identities_get_no_further_than_one(adversary: Adversary) -> None:
    adversary.scale = 0.25
    scene = trio.run(identity.damage, adversary)
    assert scene.wanted > 0 and scene.failures() == ()


@pytest.mark.thorough
@pytest.mark.parametrize("adversary", adversaries.everyone(), ids=lambda adversary: type(adversary).__name__)
def test_without_the_defence_they_get_what_they_want(adversary: Adversary) -> None:
    adversary.scale = 0.25
    scene = trio.run(lambda: identity.damage(adversary, undefended=True))
    assert scene.failures()
