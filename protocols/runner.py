"""Where blocking work runs.

A jumping MockClock beside worker threads is not deterministic, so nothing calls `trio.to_thread` itself: it is given a
runner. The daemon gives `in_thread`, simulations give `inline`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Runner(Protocol):
    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop and return its result."""


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a worker thread; cancellation waits for it to end."""
    return await trio.to_thread.run_sync(work)


async def inline(work: Callable[[], T]) -> T:
    """Run `work` here and now, then let other tasks go on."""
    result = work()
    await trio.lowlevel.checkpoint()
    return result
