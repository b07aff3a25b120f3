"""A trainer in a process of its own, as a daemon has it, for as long as a test needs one.

async with running_trainer(spec, settings) as trainer:
    await trainer.train(round=0, steps=1, seconds=60)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.training.runspec import RunSpec


@asynccontextmanager
async def running_trainer(
    spec: RunSpec, settings: TrainerSettings, *, within: float = 60
) -> AsyncIterator[TrainerProcess]:
    """A trainer that is ready, and is stopped at the end; what is done with it may take `within` seconds."""
    trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="alice", settings=settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        with trio.fail_after(within):
            yield trainer
        nursery.cancel_scope.cancel()
