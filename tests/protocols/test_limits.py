"""What a holder took is remembered as long as others take, and not as long as others are merely named."""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.protocols.limits import MAX_HOLDERS, Allowance, Budget
from swarmnode.testing.simnet import SimWorld


def test_who_is_asked_about_costs_nobody_its_account(simulated: Callable[..., None]) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        budget = Budget[str](Allowance(rate=1, burst=10))
        assert budget.take("author", 10) and budget.wait("author", 10) == 10
        for number in range(MAX_HOLDERS + 1):
            assert budget.wait(f"invented {number}", 10) == 0
        assert budget.wait("author", 10) == 10 and not budget.take("author", 1)
        await trio.sleep(4)
        assert budget.wait("author", 10) == 6
        for number in range(MAX_HOLDERS):
            assert budget.take(f"other {number}", 1)
        assert budget.wait("author", 10) == 0, "it was idle longest, and is forgotten"

    simulated(main)
