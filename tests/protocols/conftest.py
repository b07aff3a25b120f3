"""Simulated nodes for protocol tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from shardnodes import Nodes

from swarmnode.testing.simnet import SimWorld, run_with_nursery

Main = Callable[[SimWorld, trio.Nursery], Awaitable[None]]


@pytest.fixture
def simulated() -> Callable[..., None]:
    """Run `main(world, nursery)` under a jumping clock; what it started in the nursery ends with it."""

    def run(main: Main, **world: Any) -> None:
        run_with_nursery(main, SimWorld(**world))

    return run


@pytest.fixture
def nodes(simulated: Callable[..., None], tmp_path: Path) -> Callable[..., None]:
    """Run `main(nodes)` with nodes that have shards; keyword arguments are the world's."""

    def run(main: Callable[[Nodes], Awaitable[None]], **world: float) -> None:
        async def inner(made: SimWorld, nursery: trio.Nursery) -> None:
            await main(Nodes(made, nursery, tmp_path))

        simulated(inner, **world)

    return run
