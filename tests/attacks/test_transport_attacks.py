"""The transport group in short: one real node takes every attack in turn, smaller and briefer than `make attacks`.

Small delays are for `make attacks` to judge, on a machine with nothing else to do. What is judged here depends little
on the machine: memory, how long the victim's loop computes without a pause (in CPU time), that it lives, what was
executed, and that nobody waits as long as at a node that answers one call after another, which one test shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transport
import trio
from adversaries import transport as adversaries

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_every_transport_attack_leaves_memory_and_the_node_whole_and_its_loop_free(tmp_path: Path) -> None:
    async def main() -> dict[str, tuple[str, ...]]:
        broken = {}
        async with transport.scene() as stage:
            for adversary in adversaries.everyone(tmp_path / "executed"):
                adversary.scale = 0.2
                if adversary.victim:
                    continue  # below
                cost = await stage.cost(adversary, quiet=0.5, seconds=1.0, floor=transport.ANYWHERE)
                print(f"{adversary.name}: {cost}")
                if cost.failures(transport.ANYWHERE):
                    broken[adversary.name] = cost.failures(transport.ANYWHERE)
        return broken

    assert trio.run(main) == {}


@pytest.mark.timeout(120)
def test_who_goes_on_beyond_its_limits_meets_every_rung_and_costs_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        adversary = adversaries.OverLimits()
        async with transport.scene(*adversary.victim) as stage:
            cost = await stage.cost(adversary, quiet=0.5, seconds=1.0, floor=transport.ANYWHERE)
            assert cost.failures(transport.ANYWHERE) == ()

    trio.run(main)


@pytest.mark.timeout(120)
def test_a_node_that_answers_one_call_after_another_is_told_by_its_delays(tmp_path: Path) -> None:
    async def main() -> None:
        async with transport.scene("--serial") as stage:
            cost = await stage.cost(adversaries.ManyCalls(), quiet=0.5, seconds=1.0, floor=transport.ANYWHERE, tries=1)
            assert cost.slow(transport.ANYWHERE) and any("p99" in one for one in cost.failures(transport.ANYWHERE))

    trio.run(main)
