"""The transport group in short: one real node takes every attack in turn, smaller and briefer than `make attacks`."""

from __future__ import annotations

from pathlib import Path

import pytest
import transport
import trio
from adversaries import transport as adversaries

FLOOR = 250.0  # ms: short phases on a machine that runs other tests tell a stall from a delay, not 10 ms from 20


@pytest.mark.timeout(240)
def test_every_transport_attack_leaves_memory_latency_and_the_node_whole(tmp_path: Path) -> None:
    async def main() -> dict[str, tuple[str, ...]]:
        broken = {}
        async with transport.scene() as stage:
            for adversary in adversaries.everyone(tmp_path / "executed"):
                adversary.scale = 0.2
                cost = await stage.cost(adversary, quiet=0.5, seconds=1.0)
                print(f"{adversary.name}: {cost}")
                if cost.failures(FLOOR):
                    broken[adversary.name] = cost.failures(FLOOR)
        return broken

    assert trio.run(main) == {}
