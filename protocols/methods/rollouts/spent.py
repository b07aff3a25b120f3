"""What sharing rollouts takes of a node's processor: signing, checking, weighing, choosing what to hand on.

    runner = spent.running(runner)          # work in it counts, in whatever thread
    with spent.counted(): ...               # so does what the event loop does at once

Not counted is what any call costs: framing, encryption and the system's network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from swarmnode.protocols.runner import Runner

T = TypeVar("T")


class Spent:
    """CPU seconds of this process so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """For code without awaits: what other tasks take must not count."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - began

    def running(self, runner: Runner) -> Runner:
        """The same runner, with its work counted."""

        async def run(work: Callable[[], T]) -> T:
            took = 0.0

            def timed() -> T:
                nonlocal took
                began = time.thread_time()
                try:
                    return work()
                finally:
                    took = time.thread_time() - began

            try:
                return await runner(timed)
            finally:
                self.seconds += took

        return run
