"""The DHT group in short."""

from __future__ import annotations

import dht
import pytest
import trio
from adversaries import dht as adversaries
from harness import Adversary

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("adversary", adversaries.everyone(), ids=lambda adversary: type(adversary).__name__)
def test_no_value_is_kept_and_lookups_succeed_under(adversary: Adversary) -> None:
    adversary.scale = 0.1
    result = trio.run(lambda: dht.damage(adversary))
    assert result.lookups >= 12
    assert result.failures() == ()


@pytest.mark.thorough
def test_a_dht_as_it_is_installed_keeps_values_for_others() -> None:
    adversary = adversaries.ValuesForOthers()
    adversary.scale = 0.1
    assert trio.run(lambda: dht.damage(adversary, undefended=True)).kept > 0
