"""Where blocking work runs.

A jumping MockClock beside worker threads is not deterministic, so nothing calls `trio.to_thread` itself: it is given a
runner. The daemon gives `in_thread`, simulations give `inline`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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


async def surely(work: Awaitable[T]) -> T:
    """What `work` gives. It is done to its end also where whoever waits for it is cancelled."""
    with trio.CancelScope(shield=True):
        result = await work
    return result


class TimedRunner:
    """Implements `Runner` by another one, and counts the CPU seconds of this process that its work took so far.

    What the event loop does at once is counted by `with timed.counted(): ...`. Not counted is what any call costs:
    framing, encryption and the system's network.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    async def __call__(self, work: Callable[[], T]) -> T:
        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return work(), time.thread_time() - began

        result, seconds = await self._runner(timed)
        self.seconds += seconds
        return result

    @contextmanager
    def counted(self) -> Iterator[None]:
        """For code without awaits: what other tasks take must not count."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - began
