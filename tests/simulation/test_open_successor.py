"""A run that continues another one begins from that one's state, also where nobody has its file any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simswarm import RUN, SimSwarm, simulate

from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.protocols.methods.method import Saved
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.outer import OuterState

MOMENTUM = 0.25


def keep_parents_state(swarm: SimSwarm, folder: Path, *names: str) -> np.ndarray:
    """Give these nodes the parent's state, as `parent_state` leaves it for them; its parameters."""
    trainer = swarm._trainer("parent", swarm.world.node("parent").me)
    parameters = trainer.parameters() + np.float32(1)
    state = OuterState(parameters, np.full_like(parameters, MOMENTUM))
    for name in names:
        kept = Checkpoints(folder / name, run_id=RUN, layout=trainer.layout, keep=3)
        kept.save(Saved(0, state, np.zeros_like(parameters), (), "diloco"))
    return parameters


@pytest.mark.parametrize("with_file", [True, False])
def test_all_begin_from_the_parents_state_also_who_does_not_have_it(tmp_path: Path, with_file: bool) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        parameters = keep_parents_state(swarm, tmp_path, "a", "b")
        began = await swarm.start("a", creator=with_file)
        await swarm.until(lambda: began.session.place is not None, within=60)
        held = began.method.store
        genesis = held.block
        while genesis.chain.round:  # a round may have ended meanwhile
            genesis = held.tree[genesis.parent]
        state = held.state(genesis.id)
        assert (state.parameters == parameters).all() and (state.momentum == np.float32(MOMENTUM)).all()
        await swarm.start("b", join="a", creator=False)
        await swarm.start("c", join="a", creator=False)
        await swarm.until(lambda: swarm.all_agree(after=3), within=120)

    simulate(body, world=SimWorld(latency=0.05), method="open", validators=("a",))
