"""What a wait for heads counts: not the time in which this node stood still."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from swarmnode.protocols.methods.open.timeouts import QUIET, Timeouts

PATIENCE = 5.0  # s


@pytest.mark.parametrize(("stood_still_at", "ends"), [(-math.inf, 10.0), (3.0, 15.0), (12.0, 20.0)])
def test_who_stood_still_waits_on(stood_still_at: float, ends: float) -> None:
    """A node that was frozen for as long as it was to wait went on alone at once, with the others' votes unread."""
    waits = Timeouts.__new__(Timeouts)
    waits._liveness = SimpleNamespace(stalled_since=lambda time: stood_still_at > time)  # type: ignore[assignment]
    waits._patience = lambda phase: PATIENCE  # type: ignore[method-assign]

    async def main() -> None:
        began = trio.current_time()
        await waits._sleep_awake(began + 10.0)
        assert trio.current_time() - began == pytest.approx(ends + QUIET)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
