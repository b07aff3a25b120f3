"""The transport group in short: one real node takes every attack in turn, smaller and briefer than `make attacks`."""

from __future__ import annotations

from pathlib import Path

import pytest
import transport
import trio
from adversaries import transport as adversaries

FLOOR = 100.0  # ms; short phases on a machine that runs other tests. How long the victim computes tells more than that
TRIES = 5  # of a phase that comes out slow


@pytest.mark.timeout(240)
def test_every_transport_attack_leaves_memory_latency_and_the_node_whole(tmp_path: Path) -> None:
    async def main() -> dict[str, tuple[str, ...]]:
        broken = {}
        async with transport.scene() as stage:
            for adversary in adversaries.everyone(tmp_path / "executed"):
                adversary.scale = 0.2
                if adversary.victim:
                    continue  # below
                cost = await stage.cost(adversary, quiet=0.5, seconds=1.0, floor=FLOOR, tries=TRIES)
                print(f"{adversary.name}: {cost}")
                if cost.failures(FLOOR):
                    broken[adversary.name] = cost.failures(FLOOR)
        return broken

    assert trio.run(main) == {}


@pytest.mark.timeout(120)
def test_who_goes_on_beyond_its_limits_meets_every_rung_and_costs_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        adversary = adversaries.OverLimits()
        async with transport.scene(*adversary.victim) as stage:
            cost = await stage.cost(adversary, quiet=0.5, seconds=1.0, floor=FLOOR, tries=TRIES)
            assert cost.failures(FLOOR) == ()

    trio.run(main)
