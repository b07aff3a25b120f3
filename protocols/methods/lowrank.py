"""The exchange method `lowrank`: factors of low rank in four bits, while training goes on (training/lowrank.py).

A round is one of `streaming` with a single fragment, the whole model. Its exchange has two all-reduces in place of one:

    M <- g + residual                           this member's work
    P^ <- orthogonalize(all-reduce M Q)         Q is drawn by the round's number, and P^ is the same on all members
    Q <- all-reduce M^T P^                      and what is no matrix, as it is
    mean <- P^ Q^T
    residual <- M - P^ Q_i^T                    with Q_i as it was sent

So a member's residual has what its own factors leave out and round, and also what an owner rounds when it encodes the
mean of its part, divided by its own share of that mean, or by that of a member like others where its own is smaller:
who came late may have a hundredth, and a hundred times the rounding would be more than anybody's work. What rounding
does to a P is in no residual: it turns the basis a little, and Q is taken by the basis as all have it.

It goes on from the shared parameters less all of its own work that is not in them: residual, and steps beside the
exchange. With the shared ones alone, work would count for its author only once it has got through: the loss of a small
GPT was 3 % higher so, after 120 steps. A process that is killed loses the steps beside; the residual is in checkpoints.

Who may fail when is as in `diloco`: whatever is missing in either all-reduce fails the attempt, the next one makes both
anew, and until `commit` nothing has changed. With `tau` as long as a round it is DiLoCoX's one-step delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import RoundRoster
from swarmnode.protocols.methods.known.reduction import Reducer, shares_in
from swarmnode.protocols.methods.streaming import Streaming, StreamingRounds
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.transfer.bulk import Key
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.lowrank import Basis, LowRank


class FactorReduce(AllReduce):
    """One of the two all-reduces of an attempt. What it rounds is forgotten unless whoever owns it asks."""

    def __init__(self, parts: Context, parameters: int, name: str) -> None:
        super().__init__(parts, parameters)
        self._name, self.size = name, parameters  # of its offers, beside those of the other

    def _key(self, roster: RoundRoster, *name: str | int) -> Key:
        return super()._key(roster, self._name, *name)

    def commit(self, roster: RoundRoster) -> bool:
        counts = super().commit(roster)
        for residual in self._residuals:
            residual.keep_only()  # of an earlier round `rounded` tells nothing
        return counts

    def rounded(self, share: float) -> Vector:
        """What this attempt left out of this node's own values, whose `share` in the mean it is, (size,)."""
        own, *of_means = (residual.after() for residual in self._residuals)
        return own + sum(of_means) / share


@dataclass(frozen=True)
class Attempt:
    """What this node gives in one attempt, of whose two all-reduces the second has begun."""

    work: Vector  # (P,)
    bases: tuple[Basis, ...]
    given: Vector  # its factors, before they were rounded
    by: FactorReduce
    share: float | None  # of the mean, or that of one of so many like it where it is less; None: it gives nothing


class LowRankReduce(Reducer):
    """The mean of all work as factors; `sent` has what is left over in the parameters' own space."""

    def __init__(self, parts: Context) -> None:
        super().__init__(parts)
        self._factors = LowRank(parts.trainer.layout, parts.spec.exchange.rank)
        self._left = FactorReduce(parts, self._factors.left, "left")
        self._rights: list[FactorReduce] = []  # the last one made is in use; ranks, and so sizes, change by rounds
        self._attempt: Attempt | None = None
        self._after: Vector | None = None  # the residual, if the attempt counts

    async def reduce(
        self, roster: RoundRoster, values: Vector, *, within: float = inf, silence: float | None = None
    ) -> Vector:
        """As in `Reducer`; `within` and `silence` go for each of the two all-reduces."""
        runner, factors, round = self._parts.runner, self._factors, roster.round
        self._pending = self._attempt = self._after = None
        work = await runner(lambda: self.left_over() + values)
        bases: tuple[Basis, ...] = ()
        if factors.left:
            sketch = await runner(partial(factors.sketch, work, round))
            mean = await self._left.reduce(roster, sketch, within=within, silence=silence)
            bases = await runner(partial(factors.bases, mean))
        right = self._right_of(factors.right(bases))
        given = await runner(partial(factors.project, work, bases))
        shares = shares_in(roster)
        share = max(float(shares[self._me]), 1 / len(shares)) if self._me in shares else None
        self._attempt = attempt = Attempt(work, bases, given, right, share)
        self._pending = roster.roster_id
        mean = given  # of nothing
        if right.size:
            mean = await right.reduce(roster, given, within=within, silence=silence)
        self.rates = {**self._left.rates, **right.rates}
        whole = await runner(partial(factors.expand, mean, bases))
        self._after = await runner(partial(self._left_by, attempt))
        return whole

    def _right_of(self, size: int) -> FactorReduce:
        if not self._rights or self._rights[-1].size != size:
            right = FactorReduce(self._parts, size, "right")
            right.encode_by(self._codec.name)
            self._rights.append(right)
        return self._rights[-1]

    def _left_by(self, attempt: Attempt) -> Vector | None:
        """The residual after an attempt; zeros where it is beyond float32, None where this node gave nothing."""
        if attempt.share is None:
            return None
        sent = attempt.given - attempt.by.rounded(attempt.share)
        with np.errstate(over="ignore", invalid="ignore"):
            left = np.subtract(attempt.work, self._factors.expand(sent, attempt.bases))
        return left if is_finite(left) else np.zeros_like(left)

    def commit(self, roster: RoundRoster) -> bool:
        after = self._after
        if after is None and self._attempt is not None and self._pending == roster.roster_id:
            after = self._left_by(self._attempt)  # others have what it gave, though it has not what they did
        for one in (self._left, *self._rights):
            one.commit(roster)
        self._rights = [one for one in self._rights[:-1] if one._offered] + self._rights[-1:]
        counts = super().commit(roster)
        if counts and after is not None:
            self.sent.restore(after)
        return counts

    def rollback(self) -> None:
        super().rollback()
        self._attempt = self._after = None
        for one in (self._left, *self._rights):
            one.rollback()

    def encode_by(self, name: str) -> None:
        super().encode_by(name)
        for one in (self._left, *self._rights):
            one.encode_by(name)


class DiLoCoXRounds(StreamingRounds):
    """One node's rounds, between which its own parameters have all of its own work."""

    def _take_over(self, round: int) -> None:
        local = self._trainer.parameters()
        to = self.state.parameters - self._work.of(local) - self._allreduce.left_over()
        self._work.move(self._fragment(round), local, to)
        self._trainer.load(local)


class DiLoCoX(Streaming):
    """One node's part in a run by factors of low rank; all that is not about them is as in `Streaming`."""

    name = "lowrank"
    reducer_class = LowRankReduce
    rounds_class = DiLoCoXRounds
