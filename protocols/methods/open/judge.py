"""How a judge measures contributions: what share of the gain of the whole step is each one's, on held-out text.

The sequences are drawn by the judge's nonce, of which its cut had the hash before anybody revealed, and by the seed of
the round: nobody could know them. All contributions are measured together, by one gradient (training/open_step.py):
halfway from the shared parameters φ to where the mean of the validators' contributions, clipped as a roster clips,
would take them. They are as many as cost JUDGE_SHARE of a round's training: so anybody can measure the same again. A
task that gives no gradient is judged by what the mean gains from one more of each contribution, at the cost of one
evaluation for each. Training waits meanwhile (`local.py`).

What the last roster cost is measured where the same gradient says that the loss rises along it, by SUSPECT of what
undoes a roster: the loss now, on the same sequences, less the loss before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import partial

from swarmnode.protocols.chain.rules import longest_norm
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import FULL_STANDING, JUDGED, MAX_GAIN, PREFIX, Score
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import ChainStore, Contribution
from swarmnode.protocols.methods.trainer import Trainer, Vector
from swarmnode.protocols.network import PeerId
from swarmnode.training.codecs.feedback import norm_in_float64
from swarmnode.training.open_step import (
    CLIP_AT,
    CLIP_UNIT,
    Factor,
    apply_contributions,
    clip_units,
    inner_product,
    median_norm,
    rise,
    sequences_for,
)

MICRO = 1_000_000  # of gains
SUSPECT = 0.5  # of `revert_above`: so steep a rise along the last roster, or a steeper one, is looked into


def batch_seed(nonce: bytes, seed: bytes) -> int:
    """What draws the sequences that a judge measures on, 63 bits. `nonce`: the judge's; `seed`: of the round."""
    return int.from_bytes(hashlib.sha256(b"swarmnode/batch/1\0" + nonce + seed).digest()[:8], "big") >> 1


class Evaluator:
    def __init__(
        self,
        local: LocalTrainer,
        parts: Context,
        store: ChainStore,
        chain: ChainState,
        nonce: bytes,
        *,
        suspect: float = SUSPECT,
    ) -> None:
        """`chain`: that on whose tip the round is, where this node has the state; `nonce`: the judge's."""
        state = store.state(chain.tip)
        assert state is not None, "it is judged where the state is kept"
        undoable = chain.undoable and chain.tip in store.tree
        self._local, self._parts, self._state = local, parts, state
        self._suspect = suspect * parts.spec.trust.revert_above
        self._before = store.state(store.tree[chain.tip].parent) if undoable else None
        self._seed, self._longest = batch_seed(nonce, chain.seed), longest_norm(chain)
        self._sequences = sequences_for(parts.spec.inner.steps_in(chain.round) * parts.spec.inner.batch)
        self.undo: int | None = None  # loss now minus before the last roster, micro-bits per byte; None: not suspect
        self.reach: float | None = None  # the most that a gain may be, micro-bits per byte; None: not by gradients

    async def measure(
        self, contributions: Mapping[bytes, Contribution], authors: Mapping[bytes, PeerId], validators: Sequence[PeerId]
    ) -> dict[bytes, Score]:
        """Score of each contribution, by the id of its commit. Raises TrainerDied."""
        async with self._local.lent() as trainer:
            solid = {id for id in authors if authors[id] in validators}
            gains = await self._gains(trainer, contributions, solid)
        return {
            id: Score(id[:PREFIX], JUDGED, _micro(gain, -MAX_GAIN), self._standing(authors[id]))
            for id, gain in gains.items()
        }

    def _standing(self, author: PeerId) -> int:
        """What this node thinks of an author, in thousandths: the seam for reputation. Without it all are alike."""
        ledger = self._parts.ledger
        return ledger.roster_standing(author) if ledger is not None else FULL_STANDING

    async def _measure_last(self, trainer: Trainer, gradient: Vector | None) -> None:
        """Measure what the last roster cost, where it is suspect by this gradient (P,), or where there is none."""
        if self._before is None or self.undo is not None:
            return
        before, now = self._before.parameters, self._state.parameters
        if gradient is not None and await self._parts.runner(lambda: rise(gradient, before, now)) < self._suspect:
            return
        loss, was = await self._loss(trainer, now), await self._loss(trainer, before)
        self.undo = _micro(loss - was, MAX_GAIN if math.isfinite(was) else -MAX_GAIN)

    async def _gains(
        self, trainer: Trainer, contributions: Mapping[bytes, Contribution], solid: set[bytes]
    ) -> dict[bytes, float]:
        """What share of the gain of the step is each contribution's, bits per byte; `solid`: those of validators."""
        spec, phi, run = self._parts.spec, self._state.parameters, self._parts.runner
        ids = sorted(contributions)
        among = [id for id in ids if id in solid] or ids
        norm = min(median_norm([contributions[id].norm for id in among]), self._longest)
        clips = dict(zip(ids, clip_units([contributions[id].norm for id in ids], norm), strict=True))
        lr, codec_name = spec.outer.lr, spec.exchange.codec

        def step(far: float, *more: bytes) -> Vector:
            work = [contributions[id].content for id in (*among, *more)]
            factors = [Factor(1, clips[id], len(among)) for id in (*among, *more)]
            try:
                return apply_contributions(self._state, work, factors, lr=far * lr, codec_name=codec_name).parameters
            except ValueError:  # not finite
                return phi

        gradient = await self._gradient(trainer, await run(partial(step, 0.5)))
        await self._measure_last(trainer, gradient)
        if gradient is not None:
            self.reach = MICRO * lr * CLIP_AT * norm * norm_in_float64(gradient)

            def shares() -> dict[bytes, float]:
                products = {id: inner_product(contributions[id].content, gradient, codec_name=codec_name) for id in ids}
                return {id: lr * clips[id] / CLIP_UNIT * product for id, product in products.items()}

            return await run(shares)
        whole = await self._loss(trainer, await run(partial(step, 1.0)))
        return {id: len(among) * (whole - await self._loss(trainer, await run(partial(step, 1.0, id)))) for id in ids}

    async def _gradient(self, trainer: Trainer, parameters: Vector) -> Vector | None:
        """That of the loss on the judge's sequences (P,); None where the trainer's task gives none."""
        trainer.load(parameters)
        found = await trainer.gradient(seed=self._seed, first=0, last=self._sequences)
        return None if found is None else found[1]

    async def _loss(self, trainer: Trainer, parameters: Vector) -> float:
        trainer.load(parameters)
        return await trainer.heldout(seed=self._seed, sequences=self._sequences)


def _micro(bits: float, unknown: int) -> int:
    """Micro-bits per byte; `unknown`, the worst that can be said, of what is not finite."""
    return max(-MAX_GAIN, min(MAX_GAIN, round(bits * MICRO))) if math.isfinite(bits) else unknown
