"""How a judge measures contributions: held-out loss before and after each of them, on sequences that nobody could know.

The sequences are drawn by the judge's nonce, of which its cut had the hash before anybody revealed, and by the seed of
the round. What is measured of one contribution is φ − lr · x / 8, without the others; training waits meanwhile
(`open_work`). An eighth, as x is meant to be one of many: work on data of another kind than what is held out leads down
with the others' and, taken whole and alone, past the bottom. With sixteen peers, seven of them liars, and classes drawn
by Dirichlet(0.3), steps taken whole had over 90 % of the honest work refused. Of an x longer than any that a roster may
apply (`derive.longest_norm`), what it would be clipped to is tried.

How many sequences it takes is the judge's own business: as many as cost a twenty-fifth of what it trained in the round,
and how they are used is told in `training/judging.py`. Scores are one judge's statements, and differ between honest
ones anyway.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarmnode.protocols.chain.statements import FULL_STANDING, JUDGED, MALFORMED, MAX_GAIN, PREFIX, Score
from swarmnode.protocols.methods.open.contributions import Contribution
from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.trainer import Trainer, Vector
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.training.judging import SEQUENCES, Draw, draw_for, gain_of, quieting, trial
from swarmnode.training.outer import OuterState

MICRO = 1_000_000  # of gains

Standing = Callable[[PeerId], int]  # what this node thinks of an author, in thousandths: the seam for reputation


def full_standing(author: PeerId) -> int:
    """Everybody is believed alike; only what was measured counts."""
    return FULL_STANDING


def batch_seed(nonce: bytes, seed: bytes) -> int:
    """What draws the sequences that a judge measures on, 63 bits. `nonce`: the judge's; `seed`: of the round."""
    return int.from_bytes(hashlib.sha256(b"swarmnode/batch/1\0" + nonce + seed).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Ground:
    """What contributions of a round are measured against."""

    draw: Draw
    loss: float  # of the state, on the first `draw.each` sequences
    few: Vector | None  # (P,), gradient of that loss; None: so many sequences are enough
    correction: Vector | None  # (P,), what the gradient on `draw.slope` sequences is beyond that


class Bench:
    """Where one judge measures in one round."""

    def __init__(
        self,
        work: Work,
        runner: Runner,
        *,
        state: OuterState,
        before: OuterState | None,
        seed: int,
        lr: float,
        codec_name: str,
        samples: int,
        longest: float = math.inf,
        standing: Standing = full_standing,
    ) -> None:
        """`before`: the state before the last roster, where that can be undone; `longest`: norm that a roster applies.

        `samples`: sequences that a node trains on in a round, for one that trained nothing in this.
        """
        self._work, self._runner = work, runner
        self._state, self._before = state, before
        self._seed, self._lr, self._codec_name, self._standing = seed, lr, codec_name, standing
        self._samples, self._longest = samples, longest
        self._ground: Ground | None = None
        self.undo: int | None = None  # loss now minus before the last roster, micro-bits per byte

    async def measure(
        self, contributions: Mapping[bytes, Contribution], authors: Mapping[bytes, PeerId], *, among: int
    ) -> dict[bytes, Score]:
        """Score of each contribution, by the id of its commit; `among` so many in the round. Raises TrainerDied."""
        scores = {}
        async with self._work.lent() as trainer:
            if self._ground is None:
                self._ground = await self._survey(trainer, max(among, len(contributions)))
            for id in sorted(contributions):
                gain = await self._gain(trainer, self._ground, contributions[id])
                scores[id] = Score(id[:PREFIX], JUDGED, _micro(gain, -MAX_GAIN), self._standing(authors[id]))
        return scores

    def malformed(self, id: bytes) -> Score:
        """What is said of bytes that no encoder makes."""
        return Score(id[:PREFIX], MALFORMED, 0, FULL_STANDING)

    async def _survey(self, trainer: Trainer, contributions: int) -> Ground:
        """Measure the state, and what the last roster cost."""
        trained = self._work.offered_work.samples or self._samples
        draw = draw_for(contributions=contributions, trained=trained)
        trainer.load(self._state.parameters)
        few = await self._slope(trainer, 0, draw.each) if draw.slope else None
        rest = await self._slope(trainer, draw.each, draw.slope) if few is not None else None
        gradient: Vector | None = None
        correction: Vector | None = None
        if few is None or rest is None:
            draw = Draw(0, SEQUENCES) if draw.slope else draw
            loss = now = await self._loss(trainer, draw.each)
        else:
            gradient, others = few[1], rest[1]
            loss, now = few[0], (draw.each * few[0] + (draw.slope - draw.each) * rest[0]) / draw.slope
            correction = await self._runner(lambda: quieting(few[1], others, draw))
        if self._before is not None:
            trainer.load(self._before.parameters)
            was = await self._loss(trainer, draw.most)
            self.undo = _micro(now - was, MAX_GAIN if math.isfinite(was) else -MAX_GAIN)
        return Ground(draw, loss, gradient, correction)

    async def _slope(self, trainer: Trainer, first: int, last: int) -> tuple[float, Vector] | None:
        """Loss and gradient on these of the sequences; None where the trainer or its task gives no gradient."""
        if not trainer.capabilities.judges:
            return None
        return await trainer.slope(seed=self._seed, first=first, last=last)

    async def _gain(self, trainer: Trainer, ground: Ground, contribution: Contribution) -> float:
        """Held-out loss that an eighth of a contribution takes off, bits per byte."""
        elements, norm = self._state.parameters.size, contribution.norm
        shrink = min(1.0, self._longest / norm) if norm > 0 else 1.0

        def try_out() -> tuple[Vector, float, float]:
            step = trial(contribution.raw, elements, lr=self._lr, codec_name=self._codec_name, shrink=shrink)
            along = [0.0 if each is None else step.along(each) for each in (ground.few, ground.correction)]
            return step.taken_from(self._state.parameters), along[0], along[1]

        after, linear, corrected = await self._runner(try_out)
        trainer.load(after)
        measured = ground.loss - await self._loss(trainer, ground.draw.each)
        return measured if ground.correction is None else gain_of(measured, linear, corrected)

    async def _loss(self, trainer: Trainer, sequences: int) -> float:
        if trainer.capabilities.judges:
            return await trainer.heldout(seed=self._seed, sequences=sequences)
        return await trainer.evaluate(thorough=False, seed=self._seed)


def _micro(bits: float, unknown: int) -> int:
    """Micro-bits per byte; `unknown`, the worst that can be said, of what is not finite."""
    return max(-MAX_GAIN, min(MAX_GAIN, round(bits * MICRO))) if math.isfinite(bits) else unknown
