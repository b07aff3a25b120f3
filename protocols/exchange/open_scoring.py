"""How a judge measures contributions: held-out loss before and after each of them, on sequences that nobody could know.

The sequences are drawn by the judge's nonce, of which its cut had the hash before anybody revealed, and by the seed of
the round. What is measured of one contribution is φ − lr · x / 8, without the others; training waits meanwhile
(`open_work`). An eighth, as x is meant to be one of many: work on data of another kind than what is held out leads down
with the others' and, taken whole and alone, past the bottom. With sixteen peers, seven of them liars, and classes drawn
by Dirichlet(0.3), steps taken whole had over 90 % of the honest work refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import numpy as np

from swarmnode.protocols.chain.statements import FULL_STANDING, JUDGED, MALFORMED, MAX_GAIN, PREFIX, Score
from swarmnode.protocols.exchange.open_work import Work
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.trainer import Vector
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.topk import TopK
from swarmnode.training.outer import OuterState

MICRO = 1_000_000  # of gains
TRIAL = np.float32(0.125)  # of a contribution is tried

Standing = Callable[[PeerId], int]  # what this node thinks of an author, in thousandths: the seam for reputation


def full_standing(author: PeerId) -> int:
    """Everybody is believed alike; only what was measured counts."""
    return FULL_STANDING


def batch_seed(nonce: bytes, seed: bytes) -> int:
    """What draws the sequences that a judge measures on, 63 bits. `nonce`: the judge's; `seed`: of the round."""
    return int.from_bytes(hashlib.sha256(b"swarmnode/batch/1\0" + nonce + seed).digest()[:8], "big") >> 1


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
        standing: Standing = full_standing,
    ) -> None:
        """`before`: the state before the last roster, where that can be undone."""
        self._work, self._runner = work, runner
        self._state, self._before = state, before
        self._seed, self._lr, self._codec_name, self._standing = seed, np.float32(lr), codec_name, standing
        self._now: float | None = None  # loss of the state
        self.undo: int | None = None  # loss now minus before the last roster, micro-bits per byte

    async def measure(
        self, contributions: Mapping[bytes, bytes], authors: Mapping[bytes, PeerId]
    ) -> dict[bytes, Score]:
        """Score of each contribution, given as its bytes by the id of its commit. Raises TrainerDied."""
        first = self._now is None
        ids = sorted(contributions)
        losses = await self._work.losses(self._vectors([contributions[id] for id in ids], first), seed=self._seed)
        if first:
            self._now = losses.pop(0)
            if self._before is not None:
                self.undo = _micro(self._now - losses.pop(0))
        assert self._now is not None
        return {
            id: Score(id[:PREFIX], JUDGED, _micro(self._now - loss), self._standing(authors[id]))
            for id, loss in zip(ids, losses, strict=True)
        }

    def malformed(self, id: bytes) -> Score:
        """What is said of bytes that no encoder makes."""
        return Score(id[:PREFIX], MALFORMED, 0, FULL_STANDING)

    async def _vectors(self, raws: Sequence[bytes], first: bool) -> AsyncIterator[Vector]:
        if first:
            yield self._state.parameters
            if self._before is not None:
                yield self._before.parameters
        for raw in raws:
            yield await self._runner(lambda raw=raw: self._after(raw))  # type: ignore[misc]

    def _after(self, raw: bytes) -> Vector:
        """φ − lr · x / 8."""
        lr = self._lr * TRIAL
        found = codec(self._codec_name)
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(found, TopK):
                places, values = found.decode_sparse(raw, self._state.parameters.size)
                after = self._state.parameters.copy()
                after[places] -= lr * values
                return after
            return self._state.parameters - lr * found.decode(raw, self._state.parameters.size)


def _micro(bits: float) -> int:
    """Micro-bits per byte; what is not finite did all the harm that can be said."""
    if not math.isfinite(bits):
        return MAX_GAIN if bits == math.inf else -MAX_GAIN
    return max(-MAX_GAIN, min(MAX_GAIN, round(bits * MICRO)))
