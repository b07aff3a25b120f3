"""A swarm larger than a group: all members go through the same states, whoever dies, freezes or comes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import pytest
from simswarm import SimSwarm, simulate

from swarmnode.testing.toy import ToyModel
from swarmnode.training.runspec import RunSpec

pytestmark = pytest.mark.slow

NAMES = tuple("abcdefghijkl")
PARAMETERS = 12 * 1024  # a part for each


class GroupedSwarm(SimSwarm):
    """Members reduce in groups of four."""

    @cached_property
    def spec(self) -> RunSpec:
        spec = super().spec
        return replace(spec, exchange=replace(spec.exchange, group_size=4))


def test_twelve_members_in_groups_of_four_have_one_history_through_death_freeze_and_joining() -> None:
    async def body(swarm: GroupedSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        assert all(swarm.nodes[name].rounds[2]["members"] == 12 for name in NAMES)
        swarm.kill("c")
        swarm.world.freeze(swarm.peer("h"))
        rest = [name for name in NAMES if name not in "ch"]
        await swarm.round_done(4, *rest)
        assert swarm.nodes["a"].rounds[4]["members"] == 10
        swarm.world.thaw(swarm.peer("h"))
        await swarm.start("late", join="b")
        await swarm.until(lambda: swarm.nodes["a"].rounds[max(swarm.nodes["a"].rounds)]["members"] == 12)
        last = max(swarm.nodes["a"].rounds) + 1
        everybody = [*rest, "h", "late"]
        await swarm.round_done(last, *everybody)
        assert all(len(swarm.hashes(round)) == 1 for round in range(last + 1))
        assert len({event["bits"] for _, event in swarm.told if event["round"] == last}) == 1
        losses = [swarm.nodes["a"].rounds[round]["loss"] for round in range(last + 1)]
        assert losses[-1] < losses[0]

    def model(name: str, peer: str) -> ToyModel:
        return ToyModel(dimension=PARAMETERS - 1, peer_id=peer, lr=1e-5)

    simulate(body, *NAMES, swarm=GroupedSwarm, model=model)
