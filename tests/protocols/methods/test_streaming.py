"""What `streaming` promises beside what every method does: it trains while it exchanges, a fragment at a time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from signature import AXES, STRIDE, SignatureModel
from simswarm import SimSwarm

from swarmnode.protocols.methods.streaming import Streaming
from swarmnode.testing.simnet import SimWorld, run_simulation
from swarmnode.testing.toytrainer import SimTrainer

NAMES = ("a", "b", "c", "d")
STEPS = 10
FRAGMENTS = 4
Body = Callable[[SimSwarm], Awaitable[None]]


def simulate(
    body: Body, *, world: SimWorld | None = None, method: str = "streaming", step: float = 0.4, **exchange: Any
) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            given = {"fragments": FRAGMENTS, "tau": 3, **exchange} if method == "streaming" else exchange
            swarm = SimSwarm(
                nursery,
                method=method,
                world=world,
                steps=STEPS,
                seconds_per_step=step,
                model=lambda name, peer: SignatureModel(axis=NAMES.index(name), peer_id=peer),
                exchange=given,
            )
            first, *others = NAMES
            await swarm.start(first, wait_peers=len(others))
            for name in others:
                await swarm.start(name, join=first)
            await body(swarm)
            nursery.cancel_scope.cancel()

    run_simulation(main)


def method_of(swarm: SimSwarm, name: str) -> Streaming:
    found = swarm.nodes[name].method
    assert isinstance(found, Streaming)
    return found


def model_of(swarm: SimSwarm, name: str) -> SignatureModel:
    trainer = swarm.nodes[name].trainer
    assert isinstance(trainer, SimTrainer) and isinstance(trainer.toy, SignatureModel)
    return trainer.toy


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_all_work_counts_once_however_results_are_taken_over(alpha: float, eager: bool) -> None:
    rounds = 3 * FRAGMENTS

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(rounds - 1, *NAMES)
        for name in NAMES:
            model, saved = model_of(swarm, name), swarm.nodes[name].method.saved()
            shared = saved.state.parameters[model.axis]
            left = model.vector[model.axis] - shared - saved.residual[model.axis]
            assert len(NAMES) * shared + left == pytest.approx(model.work, abs=3 * STRIDE), name

    simulate(body, alpha=alpha, eager=eager, codec="fp32")


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
