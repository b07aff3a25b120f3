"""Simulated nodes for protocol tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from swarmnode.node.simnet import SimWorld, run_simulation

Main = Callable[[SimWorld, trio.Nursery], Awaitable[None]]


@pytest.fixture
def simulated() -> Callable[..., None]:
    """Run `main(world, nursery)` under a jumping clock; what it started in the nursery ends with it."""

    def run(main: Main, **world: Any) -> None:
        async def inner() -> None:
            async with trio.open_nursery() as nursery:
                await main(SimWorld(**world), nursery)
                nursery.cancel_scope.cancel()

        run_simulation(inner)

    return run
