"""What `demo` promises beside what every method does: few bytes, accounts of momentum, steps by signs, by all alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from simswarm import Body, SimSwarm

from swarmnode.protocols.methods.demo import Gather
from swarmnode.protocols.methods.trainer import NOTHING, TrainStats
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.topk import kept_of
from swarmnode.training.demo import BETA, dct
from swarmnode.training.outer import Layout

NAMES = ("a", "b", "c", "d")
DIMENSION = 6_000
LR = 0.05  # of all simulated runs by `demo`


class Steady(ToyModel):
    """Each node's step is a vector of its own, always the same."""

    def __init__(self, name: str, peer: str, dimension: int = DIMENSION) -> None:
        super().__init__(dimension=dimension, peer_id=peer)
        self.drift = np.random.default_rng(NAMES.index(name)).standard_normal(dimension + 1).astype(np.float32)
        self.steps = 0

    def step(self, *, round: int, steps: int) -> float:
        self.vector -= np.float32(steps) * self.drift
        self.steps += steps
        return self.heldout_loss()

    def heldout_loss(self, seed: int | None = None) -> float:
        return float(np.mean(np.abs(self.vector[:10])))


def simulate(body: Body, *names: str, **options: Any) -> None:
    simswarm.simulate(body, *names or NAMES, **{"method": "demo", "steps": 1, "model": Steady, **options})


def model_of(swarm: SimSwarm, name: str) -> Steady:
    trainer = swarm.nodes[name].trainer
    assert isinstance(trainer, SimTrainer) and isinstance(trainer.toy, Steady)
    return trainer.toy


def reducer_of(swarm: SimSwarm, name: str) -> Gather:
    found = swarm.nodes[name].method.allreduce  # type: ignore[attr-defined]
    assert isinstance(found, Gather)
    return found


def test_each_round_moves_all_parameters_by_the_rate_or_not_at_all() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(24, *NAMES)  # warmed up
        method = swarm.nodes["a"].method
        before, place = method.saved().state.parameters.copy(), method.place
        assert place is not None
        await swarm.round_done(place.round, "a")
        moved = np.abs(method.saved().state.parameters - before)
        assert np.all((moved < 1e-6) | (np.abs(moved - LR) < 1e-5)) and np.mean(moved > 0) > 0.9

    simulate(body)


class Idle(SimTrainer):
    """Takes steps in the first rounds only."""

    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        worked = await super().train(round=round, steps=steps if round < 3 else 0, seconds=seconds)
        return worked if round < 3 else NOTHING


def test_a_round_in_which_nobody_worked_moves_nothing() -> None:
    def idle(name: str, peer: str) -> Idle:
        model = Steady(name, peer)
        model.layout = Layout.of([("weight", (DIMENSION // 100, 100)), ("bias", (1,))])  # a matrix, which fades
        return Idle(model, seconds_per_step=0.4)

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        before = swarm.nodes["a"].method.saved().state.parameters
        await swarm.round_done(5, *NAMES)
        assert before.any() and np.array_equal(swarm.nodes["a"].method.saved().state.parameters, before)

    simulate(body, trainer=idle)


def test_what_a_node_sends_leaves_its_momentum_which_keeps_the_rest() -> None:
    async def body(swarm: SimSwarm) -> None:
        reducer, done = reducer_of(swarm, "a"), dct(model_of(swarm, "a").drift)
        await swarm.round_done(0, "a")
        for round in range(1, 6):
            before = reducer.sent.export()
            await swarm.round_done(round, "a")
            sent = BETA * before + done - reducer.sent.export()
            assert np.count_nonzero(np.abs(sent) > 1e-3) == kept_of(DIMENSION + 1)

    simulate(body, *NAMES[:1])


def test_a_round_sends_each_other_one_encoding() -> None:
    size = 40_000

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(6, *NAMES)
        events = [event for name in NAMES for number, event in swarm.nodes[name].rounds.items() if number >= 2]
        sent = sum(event["bytes_out"] for event in events) / len(events)
        expected = 3 * codec("topk").encoded_size(size + 1)
        assert expected < sent < 1.25 * expected + 4000

    simulate(body, model=partial(Steady, dimension=size))


def test_momentum_is_saved_in_the_parameters_own_space_and_taken_back() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        reducer = reducer_of(swarm, "a")
        reducer.rollback()
        given = np.random.default_rng(7).standard_normal(DIMENSION + 1).astype(np.float32)
        reducer.restore(given)
        np.testing.assert_allclose(reducer.left_over(), given, atol=2e-3)
        assert not reducer.give_back(np.full(DIMENSION + 1, np.inf, np.float32)) and reducer.give_back(given)
        np.testing.assert_allclose(reducer.left_over(), 2 * given, atol=4e-3)
        for wrong in (np.zeros(3, np.float32), np.full(DIMENSION + 1, np.nan, np.float32)):
            with pytest.raises(ValueError, match="residual"):
                reducer.restore(wrong)

    simulate(body)


def test_work_that_did_not_count_goes_back_to_the_momentum() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        await trio.sleep(1.0)  # in the third of five steps
        before, drift = reducer_of(swarm, "c").left_over(), model_of(swarm, "c").drift
        await swarm.nodes["c"].session.pause()
        await swarm.round_done(4, "a", "b")
        more = reducer_of(swarm, "c").left_over() - before
        assert np.dot(more, drift) / np.dot(drift, drift) == pytest.approx(2, abs=0.2)

    simulate(body, steps=5)


def test_rates_are_of_members_of_the_round() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, "a", "b")
        reducer = reducer_of(swarm, "a")
        reducer.rates = {f"gone {number}": 1.0 for number in range(1000)}
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 2, "a", "b")
        assert set(reducer.rates) <= {swarm.peer("b")}

    simulate(body, "a", "b")
