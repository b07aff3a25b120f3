"""Figures of judges that are measured again: other machines come to the same ones, and lies are found soon."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import numpy as np
import pytest
import trio
from chains import RULES, block, cut, hashed, quote, scores, start
from hypothesis import settings
from openspec import judged_at, open_spec, parts_of
from trio.testing import MockClock

from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import Score, Scores
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.recheck import CONFIRMED, drawn, furthest
from swarmnode.protocols.methods.open.store import Contribution
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.testing.toy import JUDGED_SAMPLES, ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.open_step import norm_of
from swarmnode.training.outer import OuterState

DIMENSION = 192
FIGURES = 20_000 if settings.default.max_examples < 1000 else 100_000  # of honest judges
OFFERS = 64


class OtherOrder(ToyModel):
    """Adds up the same samples in another order, in pieces, as other threads do."""

    def slope(self, seed: int, first: int, last: int) -> tuple[float, Vector]:
        x, y = (values[first * JUDGED_SAMPLES : last * JUDGED_SAMPLES] for values in self._judged(seed))
        order = np.random.default_rng(seed).permutation(len(x))
        loss, total = np.float32(0), np.zeros(x.shape[1], np.float32)
        for part in np.array_split(order, 7):
            error = (x[part] * self.vector).sum(axis=1, dtype=np.float32) - y[part]
            total += (x[part] * error[:, None]).sum(axis=0, dtype=np.float32)
            loss += np.square(error).sum()
        return float(loss / len(x)), np.asarray(2 / len(x) * total, np.float32)


class Exact(ToyModel):
    """Computes in 64 bits."""

    def slope(self, seed: int, first: int, last: int) -> tuple[float, Vector]:
        x, y = (
            values[first * JUDGED_SAMPLES : last * JUDGED_SAMPLES].astype(np.float64) for values in self._judged(seed)
        )
        error = x @ self.vector.astype(np.float64) - y
        return float(np.mean(error**2)), np.asarray(2 / len(x) * (x.T @ error), np.float32)


def offers(rng: np.random.Generator, slope: Vector) -> dict[bytes, Contribution]:
    """Work that leads down by a tenth of its length, as noisy work does, of lengths that differ; and one of no use."""
    found = {}
    for number in range(OFFERS):
        noise = rng.standard_normal(slope.size).astype(np.float32)
        values = 0.1 * slope / np.linalg.norm(slope) + noise / np.linalg.norm(noise)
        values = np.asarray(values * rng.uniform(0.3, 3), np.float32)
        found[hashed(number)] = Contribution(bytes(codec("fp32").encode(values)), norm_of(values), 0)
    return found


def judged(kind: type[ToyModel], nonce: bytes, work: dict[bytes, Contribution], at: Vector) -> tuple[Evaluator, Scores]:
    """What a machine of this kind measures with these sequences."""
    evaluator: Evaluator | None = None
    found: dict[bytes, Score] = {}

    async def main() -> None:
        nonlocal evaluator, found
        spec = open_spec(steps=80, samples=320)
        trainer = SimTrainer(kind(dimension=DIMENSION, seed=0, peer_id="me"))
        before = OuterState.start(at + np.float32(0.01))
        parts = parts_of(spec, trainer=trainer)
        local = LocalTrainer(parts)
        evaluator = Evaluator(local, parts, *judged_at(OuterState.start(at), before), nonce, suspect=-math.inf)
        found = await evaluator.measure(work, dict.fromkeys(work, "peer"), ("peer",))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert evaluator is not None
    rows = tuple(sorted(found.values(), key=lambda score: score.commit))
    return evaluator, Scores(0, bytes(32), bytes(32), bytes(16), evaluator.undo, rows)


def scene(number: int) -> tuple[bytes, dict[bytes, Contribution], Vector]:
    """A judge's draw, contributions and parameters, nearer and nearer to where nothing is left to learn."""
    rng, toy = np.random.default_rng(number), ToyModel(dimension=DIMENSION, seed=0)
    at = toy._truth + np.float32(10.0 ** -rng.uniform(0, 3)) * rng.standard_normal(toy.vector.size).astype(np.float32)
    toy.vector[:] = at
    return rng.bytes(32), offers(rng, toy.slope(number, 0, 8)[1]), at


@pytest.mark.slow
def test_honest_figures_of_other_machines_are_found_right() -> None:
    figures, worst = 0, 0.0
    for number in range(FIGURES // (2 * OFFERS) + 1):
        nonce, work, at = scene(number)
        _, said = judged(ToyModel, nonce, work, at)
        for kind in (OtherOrder, Exact):
            evaluator, again = judged(kind, nonce, work, at)
            error = furthest(said, again.scores, evaluator)
            assert error is not None
            worst, figures = max(worst, error), figures + len(again.scores)
    assert figures >= FIGURES
    assert worst < CONFIRMED / 2


@pytest.mark.parametrize("number", range(5))
def test_a_lie_of_a_part_of_what_judges_differ_by_is_found(number: int) -> None:
    nonce, work, at = scene(number)
    evaluator, said = judged(ToyModel, nonce, work, at)
    others = [judged(ToyModel, bytes([judge]), work, at)[1] for judge in range(16)]
    for place in (0, OFFERS // 2, OFFERS - 1):
        spread = stdev(one.scores[place].gain for one in others)
        row = said.scores[place]
        lie = replace(row, gain=row.gain + round(spread / 4))
        told = replace(said, scores=(*said.scores[:place], lie, *said.scores[place + 1 :]))
        error = furthest(told, said.scores, evaluator)
        assert error is not None and error > 1
    assert furthest(replace(said, undo=(said.undo or 0) + 5_000), said.scores, evaluator) > 1  # type: ignore[operator]


# --- how soon ---------------------------------------------------------------------------------------------------------

PEERS, LIARS, ROUNDS = 16, 5, 20
NAMES = tuple(f"validator-{number:02d}" for number in range(PEERS))


def removed(seed: int) -> dict[str, int]:
    """By liar, the round after which it is no validator any more. Each lies in one figure of ten."""
    rng, chain, liars = np.random.default_rng(seed), start(NAMES), NAMES[-LIARS:]
    named: dict[str, set[str]] = {name: set() for name in NAMES[:-LIARS]}  # whom each honest judge disproved
    gone: dict[str, int] = {}
    for number in range(ROUNDS):
        told = set().union(*named.values())  # in the cuts of the round before
        chain = next_round(chain, named)
        gone |= {liar: number for liar in liars if liar not in chain.validators and liar not in gone}
        lying = {liar for liar in liars if (rng.random(PEERS) < 0.1).any()}
        for judge, found in named.items():
            found |= told
            others = tuple(one for one in chain.validators if one != judge)
            found |= {drawn(hashed(seed, judge, number), others)} & lying  # type: ignore[arg-type]
    return gone


def next_round(chain: ChainState, named: dict[str, set[str]]) -> ChainState:
    cuts = [cut(chain, judge, (), disproved=named.get(judge, ())) for judge in chain.validators]
    return block(chain, RULES, quote(cuts, [scores(chain, judge, ()) for judge in chain.validators], ())).chain


def test_of_sixteen_judges_five_that_lie_in_one_figure_of_ten_are_removed_within_twenty_rounds() -> None:
    runs = [removed(seed) for seed in range(80)]
    found = sum(len(gone) for gone in runs) / (len(runs) * LIARS)
    assert found > 0.995
    assert all(set(gone) <= set(NAMES[-LIARS:]) for gone in runs)


def test_nobody_can_tell_who_is_drawn_and_all_are_drawn_alike() -> None:
    found = [drawn(hashed(number), NAMES) for number in range(8000)]
    times = [found.count(name) for name in NAMES]
    assert 0.47 * 8000 < sum(times) < 0.53 * 8000 and min(times) > 0.6 * max(times)
    assert drawn(hashed(0), ()) is None
