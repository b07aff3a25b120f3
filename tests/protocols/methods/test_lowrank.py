"""What `lowrank` promises beside what every method does: few bytes, exact accounts of matrices, one basis for all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from reducing import RUN, a_roster, peers, reduce_all
from signature import STRIDE, SignatureModel, origin_of
from simswarm import Body, SimSwarm

from swarmnode.protocols.methods.lowrank import LowRankReduce
from swarmnode.testing.parts import context_of
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.outer import Layout
from swarmnode.training.sections import ExchangeSection

NAMES = ("a", "b", "c", "d")
STEPS = 5
SIDE = 400
RANK = 4
Simulated = Callable[..., None]


class Square(SignatureModel):
    """A signature whose coordinates are the first of a matrix, two in a row, and of a bias."""

    def __init__(self, *, axis: int, peer_id: str, side: int = 4) -> None:
        super().__init__(axis=axis, peer_id=peer_id)
        self.layout = Layout.of([("weight", (side, side)), ("bias", (1,))])
        self.vector = np.zeros(self.layout.parameters, np.float32)
        self.axis = axis // 2 * side + axis % 2


def simulate(body: Body, *, side: int = 4, method: str = "lowrank", **exchange: Any) -> None:
    def model(name: str, peer: str) -> Square:
        return Square(axis=NAMES.index(name), peer_id=peer, side=side)

    simswarm.simulate(body, *NAMES, method=method, steps=STEPS, model=model, exchange=exchange)


def model_of(swarm: SimSwarm, name: str) -> Square:
    trainer = swarm.nodes[name].trainer
    assert isinstance(trainer, SimTrainer) and isinstance(trainer.toy, Square)
    return trainer.toy


@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_what_factors_leave_out_or_round_stays_with_who_did_it(name: str) -> None:
    """Work of rank two by factors of rank one: the shared state and all that is left over add up to it."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(11, *NAMES)
        saved = [swarm.nodes[name].method.saved() for name in NAMES]
        shared = saved[0].state.parameters
        origins = [origin_of(swarm.nodes[name].method) for name in NAMES]
        left = np.sum(
            [
                swarm.nodes[name].trainer.parameters() - origin - s.residual
                for name, origin, s in zip(NAMES, origins, saved, strict=True)
            ],
            0,
        )
        for name in NAMES:
            model = model_of(swarm, name)
            assert len(NAMES) * shared[model.axis] + left[model.axis] == pytest.approx(model.work, abs=0.2 * STRIDE)
            assert shared[model.axis] > 0.5 * model.work / len(NAMES)
        for one, origin in zip(saved, origins, strict=True):  # a checkpoint has what is left over
            assert one.residual.any()
            np.testing.assert_allclose(origin, shared - one.residual, atol=1e-5)

    simulate(body, rank=1, tau=2, codec=name)


def test_a_round_sends_two_factors_in_four_bits() -> None:
    sent: dict[str, float] = {}

    def measure(method: str, **exchange: Any) -> None:
        async def body(swarm: SimSwarm) -> None:
            await swarm.round_done(4, *NAMES)
            events = [event for name in NAMES for number, event in swarm.nodes[name].rounds.items() if number >= 1]
            sent[method] = sum(event["bytes_out"] for event in events) / len(events)

        simulate(body, side=SIDE, method=method, **exchange)

    measure("lowrank", rank=RANK)
    measure("diloco", codec="int8")
    of_left, of_right = (codec("int4").encoded_size(size) for size in (RANK * SIDE, 2 * SIDE + 1))  # its rank is two
    expected = 2 * 3 / 4 * (of_left + of_right)
    assert expected < sent["lowrank"] < 1.25 * expected + 6000
    assert sent["lowrank"] < sent["diloco"] / 15


def test_a_basis_that_changes_its_size_leaves_nothing_offered() -> None:
    """Ranks, and so the second all-reduce, change by rounds; those of decided rounds are forgotten."""

    async def body(swarm: SimSwarm) -> None:
        reducer = swarm.nodes["a"].method.allreduce  # type: ignore[attr-defined]
        assert isinstance(reducer, LowRankReduce)
        sizes, most = set(), 0
        for round in range(8):
            await swarm.round_done(round, *NAMES)
            sizes.add(reducer._rights[-1].size)
            most = max(most, len(reducer._rights))
            if round == 3:
                for name in NAMES[1:]:
                    model_of(swarm, name).axis = 0  # from now on all work is in one column
        assert len(sizes) > 1 and most <= 2
        for part in (reducer._left, *reducer._rights):  # what was rounded is told once, and not in later rounds
            assert all(residual.is_zero() for residual in part._residuals if not residual.pending)
        assert swarm.held().offers <= 8 * len(NAMES)

    simulate(body, side=12, rank=4)


def test_who_is_a_hundredth_of_a_mean_is_not_charged_a_hundred_times_its_rounding(simulated: Simulated) -> None:
    """What an owner rounds of the mean of its part goes to its own work, by its share in that."""
    layout = Layout.of([("weight", (64, 1024))])  # factors of which everybody owns a part

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4, "int4", layout.parameters)
        for member in members:
            exchange = ExchangeSection(codec="int4", rank=8, deadline_ceiling=30.0)
            parts = context_of(
                RUN, member.network, member.rpc, member.liveness, exchange, bulk=member.bulk, parameters=1
            )
            vars(parts)["trainer"] = SimpleNamespace(layout=layout)
            member.allreduce = LowRankReduce(parts)  # type: ignore[assignment]
        roster = a_roster(members, weights=(1, 240, 240, 240))
        await reduce_all(members, roster)
        for member in members:
            assert member.allreduce.commit(roster)
            assert np.linalg.norm(member.allreduce.left_over()) < 1.3 * np.linalg.norm(member.values)

    simulated(main)


def test_another_codec_of_the_owner_goes_for_both_factors() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *NAMES)
        reducer = swarm.nodes["a"].method.allreduce  # type: ignore[attr-defined]
        reducer.encode_by("int8")
        assert {one._codec.name for one in (reducer._left, *reducer._rights)} == {"int8"}
        assert reducer._right_of(3)._codec.name == "int8"

    simulate(body, rank=1)
