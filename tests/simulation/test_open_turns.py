"""Open runs on simnet that take turns: thirds of the vector, outer momentum, residuals in the local parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from simswarm import SimSwarm, simulate

from swarmnode.training.runspec import RunSpec

NAMES = ("a", "b", "c", "d")


class Turns(SimSwarm):
    """Its run has the codec `sign3` and outer momentum."""

    @cached_property
    def spec(self) -> RunSpec:
        spec = super().spec
        exchange, outer = replace(spec.exchange, codec="sign3"), replace(spec.outer, lr=0.7, momentum=0.8)
        return replace(spec, exchange=exchange, outer=outer)


def test_deaths_cuts_and_restarts_leave_one_history_that_learns(tmp_path: Path) -> None:
    async def body(swarm: Turns) -> None:
        swarm.checkpoints = tmp_path
        await swarm.begin(NAMES)
        await swarm.round_done(4, *NAMES)
        swarm.kill("d")
        await swarm.round_done(8, *NAMES[:3])
        await swarm.leave("c")
        for name in ("c", "d"):
            await swarm.start(name, join="a")
        resumed_in = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: swarm.all_agree(after=resumed_in + 3), within=300)
        for name in NAMES:
            carries_what_was_left_over(swarm, name)
        rounds = swarm.nodes["a"].rounds
        assert rounds[max(rounds)]["loss"] < 0.7 * rounds[0]["loss"]

    simulate(body, swarm=Turns, method="open", validators=NAMES, steps=10)


def carries_what_was_left_over(swarm: Turns, name: str) -> None:
    """Where a node stands and what it left over tell where what it trains for the next contribution began."""
    method = swarm.nodes[name].open
    assert method.local.base is not None
    left = method.local.feedback.export()
    assert left.any()
    np.testing.assert_array_equal(method.local.start, method.local.base.parameters - left)
