"""What a judge reads is bounded by what it trains on, and what it says of contributions is what they are worth."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from openspec import open_spec, parts_of
from trio.testing import MockClock

from swarmnode.protocols.chain.statements import MAX_GAIN
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import Contribution
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.runner import inline
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.open_step import BACKWARD, JUDGE_SHARE, SEQUENCES, norm_of
from swarmnode.training.outer import OuterState

ROUND = 320  # sequences that a node trains on


class Counting(SimTrainer):
    """Counts forward passes of one sequence; a gradient is three."""

    passes = 0

    async def heldout(self, *, seed: int, sequences: int) -> float:
        self.passes += sequences
        return await super().heldout(seed=seed, sequences=sequences)

    async def gradient(self, *, seed: int, first: int, last: int) -> tuple[float, Vector] | None:
        self.passes += BACKWARD * (last - first)
        return await super().gradient(seed=seed, first=first, last=last)

    async def evaluate(self, *, thorough: bool, seed: int | None = None, wait: bool = True) -> float:
        self.passes += SEQUENCES
        return await super().evaluate(thorough=thorough, seed=seed, wait=wait)


class Flat(Counting):
    """Of a task that gives no gradient."""

    async def gradient(self, *, seed: int, first: int, last: int) -> tuple[float, Vector] | None:
        return None


def contribution(values: Vector) -> Contribution:
    return Contribution(bytes(codec("fp32").encode(values)), norm_of(values), 0)


def judged(
    trainer: Counting,
    offers: list[Vector],
    *,
    samples: int = ROUND,
    longest: float = np.inf,
) -> list[int]:
    """Gains that one judge gives to these steps from where the trainer starts."""
    gains: list[int] = []

    async def main() -> None:
        spec = open_spec(steps=80, samples=samples)
        work = LocalTrainer(trainer, inline, spec)
        work.base = state = OuterState.start(trainer.parameters())
        bench = Evaluator(
            work,
            parts_of(spec),
            state=state,
            before=OuterState.start(trainer.parameters() + np.float32(0.1)),
            seed=5,
            longest=longest,
        )
        found = {number.to_bytes(32, "big"): contribution(offer) for number, offer in enumerate(offers)}
        for id, one in found.items():  # they come one by one
            scores = await bench.measure({id: one}, {id: "peer"}, among=len(found))
            gains.append(scores[id].gain)
        assert bench.undo is not None

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return gains


def trainer(kind: type[Counting] = Counting) -> Counting:
    return kind(ToyModel(seed=0, peer_id="me"), seconds_per_step=1.0)


def downhill(length: float = 1.0) -> Vector:
    slope = ToyModel(seed=0, peer_id="me").slope(1, 0, SEQUENCES)[1]
    return np.float32(length) * slope / np.linalg.norm(slope)


@pytest.mark.parametrize(("count", "share"), [(4, JUDGE_SHARE), (16, JUDGE_SHARE), (32, 0.05), (64, 0.1)])
def test_a_judge_reads_little_beside_what_it_trains_on_and_never_a_tenth(count: int, share: float) -> None:
    judge = trainer()
    judged(judge, [downhill()] * count)
    assert count <= judge.passes <= share * BACKWARD * ROUND


def test_long_rounds_are_judged_on_all_sequences() -> None:
    judge = trainer()
    judged(judge, [downhill()] * 16, samples=50 * ROUND)
    assert judge.passes == SEQUENCES * (16 + 2)


def test_a_task_without_gradients_is_judged_all_the_same() -> None:
    judge = trainer(Flat)
    (gain,) = judged(judge, [downhill()])
    assert gain > 0
    assert judge.passes == 11 * (1 + 2)


def test_what_leads_down_gains_and_what_leads_up_does_not() -> None:
    for samples in (ROUND, 50 * ROUND):
        down, up = judged(trainer(), [downhill(), -downhill()], samples=samples)
        assert down > 0 > up


def test_judging_leaves_the_local_parameters_as_they_were() -> None:
    judge = trainer()
    before = judge.parameters()
    judged(judge, [downhill()])
    assert np.array_equal(judge.parameters(), before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_cannot_be_measured_gains_nothing() -> None:
    assert judged(trainer(), [np.full(33, 3e38, np.float32)]) == [-MAX_GAIN]
    assert judged(trainer(), [-np.full(33, 3e38, np.float32)]) == [-MAX_GAIN]


def test_what_is_longer_than_a_roster_applies_is_judged_as_it_would_be_applied() -> None:
    long, clipped = (judged(trainer(), [downhill(length)], longest=2.0) for length in (2000.0, 2.0))
    assert long == pytest.approx(clipped, rel=1e-3)
