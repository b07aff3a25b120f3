"""What a judge reads is bounded by what it trains on, and what it says of contributions is what they are worth."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from openspec import judged_at, open_spec, parts_of
from trio.testing import MockClock

from swarmnode.protocols.chain.statements import MAX_GAIN
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import Contribution
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.open_step import BACKWARD, CLIP_AT, SEQUENCES, norm_of, sequences_for
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

    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        self.passes += SEQUENCES
        return await super().evaluate(thorough=thorough, wait=wait)


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
    norms: tuple[float, ...] = (),
    validators: int | None = None,
    last: Vector | None = None,
    undo: list[int | None] | None = None,
) -> list[int]:
    """Gains that one judge gives to these steps from where the trainer starts; the first so many are validators'.

    `last`: how far down the last roster went, (P,); what it cost is added to `undo`.
    """
    gains: list[int] = []

    async def main() -> None:
        parts = parts_of(open_spec(steps=80, samples=samples), trainer=trainer)
        work = LocalTrainer(parts)
        work.base = state = OuterState.start(trainer.parameters())
        evaluator = Evaluator(
            work,
            parts,
            *judged_at(
                state, OuterState.start(trainer.parameters() + (downhill(0.1) if last is None else last)), norms=norms
            ),
            b"5",
        )
        found = {number.to_bytes(32, "big"): contribution(offer) for number, offer in enumerate(offers)}
        authors = {id: str(number) for number, id in enumerate(found)}
        scores = await evaluator.measure(found, authors, list(authors.values())[:validators])
        gains.extend(score.gain for score in scores.values())
        if undo is not None:
            undo.append(evaluator.undo)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return gains


def trainer(kind: type[Counting] = Counting) -> Counting:
    return kind(ToyModel(seed=0, peer_id="me"), seconds_per_step=1.0)


def downhill(length: float = 1.0) -> Vector:
    slope = ToyModel(seed=0, peer_id="me").slope(1, 0, SEQUENCES)[1]
    return np.float32(length) * slope / np.linalg.norm(slope)


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("samples", [80, ROUND, 50 * ROUND])
def test_what_a_judge_reads_does_not_grow_with_contributions(count: int, samples: int) -> None:
    judge = trainer()
    judged(judge, [downhill()] * count, samples=samples)
    assert judge.passes == BACKWARD * sequences_for(samples)
    assert judge.passes <= 0.05 * BACKWARD * samples


def test_what_the_last_roster_cost_is_measured_only_where_the_loss_rises_along_it() -> None:
    helped, harmed = trainer(), trainer()
    undo: list[int | None] = []
    judged(helped, [downhill(0.1)], last=downhill(0.5), undo=undo)
    judged(harmed, [downhill(0.1)], last=-downhill(0.5), undo=undo)
    assert undo[0] is None and helped.passes == BACKWARD * sequences_for(ROUND)
    assert undo[1] is not None and undo[1] > 50_000
    assert harmed.passes == (BACKWARD + 2) * sequences_for(ROUND)


def test_harm_that_this_rounds_work_makes_good_is_measured_still() -> None:
    undo: list[int | None] = []
    judged(trainer(), [downhill(0.5)], last=-downhill(0.5), undo=undo)
    assert undo[0] is not None and undo[0] > 50_000


def test_a_task_without_gradients_is_judged_by_what_the_mean_gains_from_one_more() -> None:
    judge = trainer(Flat)
    undo: list[int | None] = []
    down, up = judged(judge, [downhill(0.1), -downhill(0.1)], undo=undo)
    assert down > 0 > up
    assert undo[0] is not None and undo[0] < 0


def test_what_strangers_offer_does_not_move_where_validators_are_measured() -> None:
    alone = judged(trainer(), [downhill(), downhill(0.5)])
    among = judged(trainer(), [downhill(), downhill(0.5), *[-downhill(100.0)] * 9], validators=2)
    assert among[:2] == alone and max(among[2:]) < 0


def test_what_leads_down_gains_and_what_leads_up_does_not() -> None:
    for samples in (80, ROUND, 50 * ROUND):
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
    long, clipped = (judged(trainer(), [downhill(length)], norms=(1.0,) * 4) for length in (2000.0, CLIP_AT * 2.0))
    assert long == pytest.approx(clipped, rel=1e-3)
