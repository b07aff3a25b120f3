"""What `streaming` promises beside what every method does: it trains while it exchanges, a fragment at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from signature import AXES, STRIDE, SignatureModel, origin_of
from simswarm import Body, SimSwarm
from trio.testing import MockClock

from swarmnode.node.session import LEAVE_WITHIN
from swarmnode.protocols.methods.streaming import Streaming
from swarmnode.protocols.methods.trainer import ASK_AGAIN, TrainStats, Turns
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.outer import Layout

NAMES = ("a", "b", "c", "d")
STEPS = 10
FRAGMENTS = 4
DIMENSION = 160_000


def simulate(
    body: Body,
    *,
    world: SimWorld | None = None,
    method: str = "streaming",
    step: float = 0.4,
    model: Callable[[str, str], ToyModel] | None = None,
    trainer: Callable[[str, str], SimTrainer] | None = None,
    **exchange: Any,
) -> None:
    given = {"fragments": FRAGMENTS, "tau": 3, **exchange} if method == "streaming" else exchange
    options = {"method": method, "world": world, "steps": STEPS, "seconds_per_step": step, "exchange": given}
    options["trainer"] = trainer
    simswarm.simulate(body, *NAMES, model=model or signature, **options)


def signature(name: str, peer: str) -> SignatureModel:
    return SignatureModel(axis=NAMES.index(name), peer_id=peer)


def method_of(swarm: SimSwarm, name: str) -> Streaming:
    found = swarm.nodes[name].method
    assert isinstance(found, Streaming)
    return found


def model_of(swarm: SimSwarm, name: str) -> SignatureModel:
    trainer = swarm.nodes[name].trainer
    assert isinstance(trainer, SimTrainer) and isinstance(trainer.toy, SignatureModel)
    return trainer.toy


@pytest.mark.parametrize(
    "taken_over", [{"eager": True}, *({"eager": False, "alpha": alpha} for alpha in (0.0, 0.5, 1.0))]
)
def test_all_work_counts_once_however_results_are_taken_over(taken_over: dict[str, Any]) -> None:
    rounds = 3 * FRAGMENTS

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(rounds - 1, *NAMES)
        for name in NAMES:
            model, saved = model_of(swarm, name), swarm.nodes[name].method.saved()
            shared = saved.state.parameters[model.axis]
            origin = origin_of(swarm.nodes[name].method)[model.axis]
            left = model.vector[model.axis] - origin - saved.residual[model.axis]
            assert len(NAMES) * shared + left == pytest.approx(model.work, abs=3 * STRIDE), name

    simulate(body, codec="fp32", **taken_over)


class Holding(SimTrainer):
    """Takes no step while it is held, as a trainer process."""

    goes = trio.Event()

    async def hold(self) -> None:
        self.goes = trio.Event()
        await self.interrupt()

    async def release(self) -> bool:
        return self.go_on()

    def go_on(self) -> bool:
        self.goes.set()
        return True

    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        await self.goes.wait()
        return await super().train(round=round, steps=steps, seconds=seconds)


def test_work_that_a_result_has_is_not_returned_where_a_pause_came_before_the_steps_beside() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(FRAGMENTS - 1, *NAMES)  # the next fragment has the axes
        node, model = swarm.nodes["c"], model_of(swarm, "c")
        await trio.sleep(1.0)
        while node.session.phase != "exchanging":  # noqa: ASYNC110 (it has no event)
            await trio.sleep(0.01)
        await node.session.pause()
        await swarm.round_done(FRAGMENTS + 2, "a")
        assert FRAGMENTS not in node.rounds
        await trio.sleep(LEAVE_WITHIN)
        shared = swarm.nodes["a"].method.saved().state.parameters[model.axis]
        residual = node.method.saved().residual[model.axis]
        assert len(NAMES) * shared - residual == pytest.approx(model.work, abs=STRIDE)

    simulate(body, trainer=lambda name, peer: Holding(signature(name, peer), seconds_per_step=0.4), codec="fp32")


def test_a_pause_that_is_over_before_the_exchange_costs_a_round_nothing() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *NAMES)
        node = swarm.nodes["c"]
        for phase in ("training", "exchanging"):  # its steps beside are to come
            while node.session.phase != phase:  # noqa: ASYNC110 (it has no event)
                await trio.sleep(0.01)
        await node.session.pause()
        await trio.sleep(0.1)
        node.session.resume()
        await swarm.round_done(3, *NAMES)
        assert {2, 3} <= node.rounds.keys() and swarm.nodes["a"].rounds[2]["members"] == len(NAMES)

    slow = {"trainer": lambda name, peer: Holding(signature(name, peer), seconds_per_step=0.4 if name != "a" else 4.0)}
    simulate(body, **slow)


def test_a_round_moves_its_fragment_and_nothing_else() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(FRAGMENTS, *NAMES)
        method = method_of(swarm, "a")
        before = method.saved().state.parameters.copy()
        place = method.place
        assert place is not None
        fragment = method.rounds._fragment(place.round)  # type: ignore[attr-defined]
        await swarm.round_done(place.round, "a")
        moved = np.flatnonzero(method.saved().state.parameters != before)
        ((start, stop),) = fragment.ranges
        # the nodes' axes are the first four of AXES, and one fragment has them all
        assert moved.size == (4 if start == 0 else 0) and all(start <= at < stop for at in moved)

    assert len(NAMES) == (AXES + 1) // FRAGMENTS
    simulate(body)


@pytest.mark.parametrize(("method", "computing"), [("streaming", 0.97), ("diloco", 0.6)])
def test_nobody_waits_for_an_exchange_that_takes_as_long_as_some_steps(method: str, computing: float) -> None:
    """Links so slow that ballots and parts of a few bytes take a second or two: `diloco` computes less of its time."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(6, *NAMES)
        for name in NAMES:
            events = [event for number, event in swarm.nodes[name].rounds.items() if 2 <= number <= 6]
            share = sum(e["compute_seconds"] for e in events) / sum(e["seconds"] for e in events)
            assert (share >= computing) == (method == "streaming"), (name, share)

    simulate(body, world=SimWorld(latency=0.4), method=method)


def test_steps_beside_an_exchange_are_bounded() -> None:
    """However long it lasts, a node takes no more steps beside it than a round has, beyond tau."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(3, *NAMES)
        for name in NAMES:
            events = [event for number, event in swarm.nodes[name].rounds.items() if number >= 1]
            assert all(STEPS <= event["steps"] <= 2 * STEPS for event in events), name
            assert any(event["steps"] == 2 * STEPS for event in events), name

    simulate(body, world=SimWorld(latency=0.4), step=0.05)


def test_local_work_that_is_not_finite_is_dropped_and_the_node_goes_on() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        model_of(swarm, "b").vector[0] = math.nan
        await swarm.until(lambda: swarm.all_agree(after=4), within=300)
        assert np.isfinite(model_of(swarm, "b").vector).all()
        assert np.isfinite(swarm.nodes["a"].method.saved().state.parameters).all()

    simulate(body)


def test_the_loss_that_is_told_is_that_of_the_shared_state() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(FRAGMENTS + 1, *NAMES)
        for number in range(FRAGMENTS + 1):
            assert len({swarm.nodes[name].rounds[number]["loss"] for name in NAMES}) == 1, number
        assert not np.array_equal(model_of(swarm, "a").vector, model_of(swarm, "b").vector)

    simulate(body)


def test_whoever_asks_a_node_is_answered_by_the_shared_state_and_its_training_goes_on() -> None:
    async def body(swarm: SimSwarm) -> None:
        method, model = method_of(swarm, "a"), model_of(swarm, "a")
        asked = 0
        while 2 * FRAGMENTS not in swarm.nodes["a"].rounds:
            await trio.sleep(1.3)
            began = trio.current_time()
            async with method.lent() as trainer:
                assert trio.current_time() - began < 2
                shared, work = method.saved().state.parameters, model.work
                assert np.array_equal(trainer.parameters(), shared)
                await trio.sleep(0.5)
                assert model.work == work and np.array_equal(method.saved().state.parameters, shared)
            asked += 1
        assert asked > 10
        assert model.vector[model.axis] == pytest.approx(model.work)  # with alpha = 1 nothing else moves them

    simulate(body, codec="fp32", eager=False, alpha=1.0)


def test_whoever_asks_during_an_exchange_costs_the_others_no_more_than_their_turn() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(4, *NAMES)
        while swarm.nodes["a"].method.phase != "exchanging":  # noqa: ASYNC110 (it has no event)
            await trio.sleep(0.01)
        async with method_of(swarm, "a").lent():
            await trio.sleep(3.0)  # the exchange is over by then
        await swarm.round_done(9, *NAMES)
        for name in NAMES:
            assert max(event["steps"] for number, event in swarm.nodes[name].rounds.items() if number > 4) < 2 * STEPS

    simulate(body, world=SimWorld(latency=0.2), tau=0)


def wide(name: str, peer: str) -> SignatureModel:
    model = signature(name, peer)
    model.layout, model.vector = Layout.of([("weight", (DIMENSION,))]), np.zeros(DIMENSION, np.float32)
    return model


def sent_in_a_round(method: str, **exchange: Any) -> float:
    """Bytes that a node sends in a round, with all that is said around them; the mean of rounds after the first."""
    found: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(FRAGMENTS, *NAMES)
        events = [event for name in NAMES for number, event in swarm.nodes[name].rounds.items() if number >= 1]
        found.append(sum(event["bytes_out"] for event in events) / len(events))

    simulate(body, method=method, model=wide, **exchange)
    return found[0]


def test_a_round_sends_a_fragment_in_four_bits() -> None:
    sent, whole = sent_in_a_round("streaming"), sent_in_a_round("diloco", codec="int8")
    expected = 2 * 3 / 4 * codec("e3m0").encoded_size(DIMENSION // FRAGMENTS)
    assert expected < sent < 1.25 * expected + 3000
    assert sent < whole / 6


def test_a_residual_is_kept_and_taken_back_by_fragments() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(0, *NAMES)
        reduction = method_of(swarm, "a").allreduce
        size = reduction.left_over().size
        given = np.arange(1, size + 1, dtype=np.float32)
        reduction.rollback()
        reduction.restore(given)
        assert np.array_equal(reduction.left_over(), given)
        assert not reduction.give_back(np.full(size, np.inf, np.float32)) and reduction.give_back(given)
        # no fragment's residual is longer than it was, or than what it was given
        assert np.allclose(reduction.left_over(), given)
        for wrong in (np.zeros(size + 1, np.float32), np.full(size, np.nan, np.float32)):
            with pytest.raises(ValueError, match="residual"):
                reduction.restore(wrong)

    simulate(body)


def test_who_asked_first_has_the_trainer_first_though_others_keep_it_for_longer_than_a_question_lasts() -> None:
    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    trainer: Any = SimpleNamespace(interrupt=nothing)
    order: list[int] = []

    async def look(turns: Turns, number: int) -> None:
        await trio.sleep(number * 0.5 * ASK_AGAIN)
        async with turns.lent():
            order.append(number)
            await trio.sleep(1.05 * ASK_AGAIN)

    async def main() -> None:
        turns = Turns(trainer)
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(look, turns, number)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert order == sorted(order)
