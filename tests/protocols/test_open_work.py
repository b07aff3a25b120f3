"""What is trained for an open run is counted, and a trainer that is away holds up no round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmnode.node.toytrainer import SimTrainer
from swarmnode.protocols.exchange import open_work
from swarmnode.protocols.exchange.open_work import Work
from swarmnode.protocols.runner import inline
from swarmnode.protocols.trainer import TrainerDied, Worked
from swarmnode.training.outer import OuterState
from swarmnode.training.toy import ToyModel

STEPS = 100  # of a round


def work_of(trainer: SimTrainer) -> Work:
    work = Work(trainer, inline, codec_name="fp32", steps=STEPS)
    parameters = trainer.parameters()
    work.base = OuterState(parameters, np.zeros_like(parameters))
    return work


def toy(**more: Any) -> SimTrainer:
    return SimTrainer(ToyModel(seed=0, peer_id="me"), seconds_per_step=1.0, **more)


def test_steps_of_the_call_that_a_round_cut_short_count() -> None:
    async def main() -> None:
        work = work_of(toy())
        for _ in range(2):
            with trio.move_on_after(10.5):
                await work.run(0, lambda: None)
        assert trio.current_time() == pytest.approx(22)  # the step in hand was taken to its end
        assert work.since_offer.steps == work.since_offer.samples // work._trainer.toy.batch == 22  # type: ignore[attr-defined]

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Stuck(SimTrainer):
    """Its step never ends, until the call is cancelled."""

    async def interrupt(self) -> None:
        await trio.lowlevel.checkpoint()


def test_a_step_that_does_not_end_holds_up_no_round() -> None:
    async def main() -> None:
        trainer = Stuck(ToyModel(seed=0, peer_id="me"), seconds_per_step=1e6)
        with trio.move_on_after(5):
            await work_of(trainer).run(0, lambda: None)
        assert trio.current_time() == 5 + open_work.LET_GO

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Broken(SimTrainer):
    async def train(self, *, round: int, steps: int, seconds: float) -> Worked:
        raise ValueError("it cannot")


def test_what_a_trainer_cannot_do_is_raised_as_it_is() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="it cannot"):
            await work_of(Broken(ToyModel(seed=0, peer_id="me"))).run(0, lambda: None)

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Away(SimTrainer):
    """Died, and is back in a minute."""

    async def evaluate(self, *, thorough: bool, seed: int | None = None, wait: bool = True) -> float:
        if not wait:
            raise TrainerDied("it is being started again")
        await trio.sleep(60)
        return await super().evaluate(thorough=thorough, seed=seed)


def test_a_move_waits_for_no_trainer_that_is_being_started_again() -> None:
    async def main() -> None:
        trainer = Away(ToyModel(seed=0, peer_id="me"))
        work = work_of(trainer)
        moved = OuterState(trainer.parameters() + 1, np.zeros_like(trainer.parameters()))
        assert math.isnan(await work.move(moved))
        assert trio.current_time() == 0
        assert work.base is moved
        assert np.array_equal(trainer.parameters(), moved.parameters)

    trio.run(main, clock=MockClock(autojump_threshold=0))
