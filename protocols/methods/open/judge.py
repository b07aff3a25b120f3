"""How a judge measures contributions: held-out loss before and after each of them, on sequences that nobody could know.

The sequences are drawn by the judge's nonce, of which its cut had the hash before anybody revealed, and by the seed of
the round. What is measured of one contribution is φ − lr · x / 8, without the others; training waits meanwhile
(`local.py`). An eighth, as x is meant to be one of many: work on data of another kind than what is held out leads down
with the others' and, taken whole and alone, past the bottom. With sixteen peers, seven of them liars, and classes drawn
by Dirichlet(0.3), steps taken whole had over 90 % of the honest work refused. Of an x longer than any that a roster may
apply (`derive.longest_norm`), what it would be clipped to is tried.

How many sequences it takes is the judge's own business: as many as cost a twenty-fifth of what it trained in the round,
and how they are used is told in `training/open_step.py`. Scores are one judge's statements, and differ between honest
ones anyway.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.protocols.chain.statements import FULL_STANDING, JUDGED, MALFORMED, MAX_GAIN, PREFIX, Score
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import Contribution
from swarmnode.protocols.methods.trainer import Trainer, Vector
from swarmnode.protocols.network import PeerId
from swarmnode.training.open_step import SEQUENCES, SamplePlan, TrialStep, control_variate, gain_of, plan_for, trial
from swarmnode.training.outer import OuterState
from swarmnode.training.runspec import RunSpec

MICRO = 1_000_000  # of gains


def batch_seed(nonce: bytes, seed: bytes) -> int:
    """What draws the sequences that a judge measures on, 63 bits. `nonce`: the judge's; `seed`: of the round."""
    return int.from_bytes(hashlib.sha256(b"swarmnode/batch/1\0" + nonce + seed).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Baseline:
    """What contributions of a round are measured against."""

    plan: SamplePlan
    loss: float  # of the state, on the first `plan.each` sequences
    few: Vector | None  # (P,), gradient of that loss; None: so many sequences are enough
    correction: Vector | None  # (P,), what the gradient on `plan.gradient` sequences is beyond that


class Evaluator:
    """Where one judge measures in one round."""

    def __init__(
        self,
        local: LocalTrainer,
        parts: Context,
        *,
        state: OuterState,
        before: OuterState | None,
        seed: int,
        longest: float = math.inf,
    ) -> None:
        """`before`: the state before the last roster, where it can be undone; `longest`: norm that a roster applies."""
        self._local, self._parts, self._state, self._before = local, parts, state, before
        self._seed, self._longest = seed, longest
        self._baseline: Baseline | None = None
        self.undo: int | None = None  # loss now minus before the last roster, micro-bits per byte

    async def measure(
        self, contributions: Mapping[bytes, Contribution], authors: Mapping[bytes, PeerId], *, among: int
    ) -> dict[bytes, Score]:
        """Score of each contribution, by the id of its commit; `among` so many in the round. Raises TrainerDied."""
        scores = {}
        async with self._local.lent() as trainer:
            if self._baseline is None:
                self._baseline = await self._measure_baseline(trainer, max(among, len(contributions)))
            for id in sorted(contributions):
                gain = await self._gain(trainer, self._baseline, contributions[id])
                scores[id] = Score(id[:PREFIX], JUDGED, _micro(gain, -MAX_GAIN), self._standing(authors[id]))
        return scores

    def _standing(self, author: PeerId) -> int:
        """What this node thinks of an author, in thousandths: the seam for reputation. Without it all are alike."""
        ledger = self._parts.ledger
        return ledger.roster_standing(author) if ledger is not None else FULL_STANDING

    def malformed(self, id: bytes) -> Score:
        """What is said of bytes that no encoder makes."""
        return Score(id[:PREFIX], MALFORMED, 0, FULL_STANDING)

    async def _measure_baseline(self, trainer: Trainer, contributions: int) -> Baseline:
        """Measure the state, and what the last roster cost."""
        inner = self._parts.spec.inner
        trained = self._local.offered_work.samples or inner.steps * inner.batch
        plan = plan_for(contributions=contributions, trained=trained)
        trainer.load(self._state.parameters)
        few = await self._gradient(trainer, 0, plan.each) if plan.gradient else None
        rest = await self._gradient(trainer, plan.each, plan.gradient) if few is not None else None
        gradient: Vector | None = None
        correction: Vector | None = None
        if few is None or rest is None:
            plan = SamplePlan(0, SEQUENCES) if plan.gradient else plan
            loss = now = await self._loss(trainer, plan.each)
        else:
            gradient, others = few[1], rest[1]
            loss, now = few[0], (plan.each * few[0] + (plan.gradient - plan.each) * rest[0]) / plan.gradient
            correction = await self._parts.runner(lambda: control_variate(few[1], others, plan))
        if self._before is not None:
            trainer.load(self._before.parameters)
            was = await self._loss(trainer, plan.most)
            self.undo = _micro(now - was, MAX_GAIN if math.isfinite(was) else -MAX_GAIN)
        return Baseline(plan, loss, gradient, correction)

    async def _gradient(self, trainer: Trainer, first: int, last: int) -> tuple[float, Vector] | None:
        """Loss and gradient on these of the sequences; None where the trainer or its task gives no gradient."""
        if not trainer.capabilities.judges:
            return None
        return await trainer.gradient(seed=self._seed, first=first, last=last)

    async def _gain(self, trainer: Trainer, baseline: Baseline, contribution: Contribution) -> float:
        """Held-out loss that an eighth of a contribution takes off, bits per byte."""

        def try_out() -> tuple[Vector, float, float]:
            step = trial_of(contribution, self._state.parameters.size, self._parts.spec, self._longest)
            slopes = [0.0 if each is None else step.derivative(each) for each in (baseline.few, baseline.correction)]
            return step.taken_from(self._state.parameters), slopes[0], slopes[1]

        after, linear, corrected = await self._parts.runner(try_out)
        trainer.load(after)
        measured = baseline.loss - await self._loss(trainer, baseline.plan.each)
        return measured if baseline.correction is None else gain_of(measured, linear, corrected)

    async def _loss(self, trainer: Trainer, sequences: int) -> float:
        if trainer.capabilities.judges:
            return await trainer.heldout(seed=self._seed, sequences=sequences)
        return await trainer.evaluate(thorough=False, seed=self._seed)


def trial_of(contribution: Contribution, elements: int, spec: RunSpec, longest: float) -> TrialStep:
    """The step by which a contribution is tried, clipped to the longest norm that a roster applies."""
    shrink = min(1.0, longest / contribution.norm) if contribution.norm > 0 else 1.0
    return trial(contribution.raw, elements, lr=spec.outer.lr, codec_name=spec.exchange.codec, shrink=shrink)


def _micro(bits: float, unknown: int) -> int:
    """Micro-bits per byte; `unknown`, the worst that can be said, of what is not finite."""
    return max(-MAX_GAIN, min(MAX_GAIN, round(bits * MICRO))) if math.isfinite(bits) else unknown
