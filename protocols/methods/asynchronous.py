"""The exchange method `async`: `diloco` among learners on their own clocks.

A round waits for nobody who is slow:

    theta <- inner steps from theta                for as long as the fastest learner takes for H of them
    g <- what they and earlier steps did, as far as no result has it
    agree on a roster, all-reduce g                beside: further steps, until the result is here
    phi <- one outer step along the weighted mean, bit-identical on all members
    theta <- phi less what this learner did that is in no result

How long a round lasts (*dynamic local updates*, arXiv 2401.09135), when its roster is closed (*quorum and grace*,
2604.21428), and what becomes of who is *passed over* stands in docs/architecture.md, "On their own clocks". Besides:

- Work *weighs* its tokens (2604.21428 has tokens times tokens per step; learners here have one batch size), less a
  penalty for staleness. CO2 (2401.16265) divides an outer step by its staleness gap, measured in parameters; here that
  gap is counted in rounds, which every learner knows: w = sum_a n_a / (1 + a), of n_a samples drawn a rounds ago.
- *Delayed Nesterov* (2401.09135, algorithm 3) renews momentum once in N pushes of single learners. A round here has a
  push of everybody who is ready, so that N of them are one round, and the outer step is that of `diloco`. With momentum
  once in two or four rounds, a small GPT's loss was 1.1 and 1.7 % higher (seed 7, 240 steps, momentum 0.5, rate 0.7).

Agreement, all-reduce and finding a place are those of `diloco` (known/), what is local and not shared is as in
`streaming`, with the model as its one fragment. Where the papers' learners push each for itself, here all who are
ready move together, so members that end a round with one hash hold the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median

import trio

from swarmnode.protocols.methods.known.acceptor import BallotBox
from swarmnode.protocols.methods.known.agreement import WINDOW_SLACK, Agreement
from swarmnode.protocols.methods.known.messages import (
    LONGEST_WINDOW,
    Decision,
    PartsMissing,
    Position,
    Ready,
    RoundRoster,
)
from swarmnode.protocols.methods.streaming import Streaming, StreamingRounds
from swarmnode.protocols.methods.trainer import NOTHING, TrainStats, Vector
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

GRACE = 0.5  # of the time in which the fastest takes its steps; all that are ready have as many to take beside
FASTEST = 16.0  # times as fast as the median is who sets the pace at the most


class AsyncAgreement(Agreement):
    """As `Agreement`, but for whom a round waits. In a Ready `train_seconds` are what H steps take its sender."""

    def _lead_within(self, patience: float) -> float:
        """From when it should be ready on, as long as a follower has steps to take beside."""
        pace = self.acceptor.position.window / WINDOW_SLACK
        return min(patience, max(0.0, pace - self.acceptor.elapsed()) + max(pace, self._settings.deadline_floor))

    def _grace(self, readies: Iterable[Ready]) -> float:
        return GRACE * min(_paces(readies), default=0.0)

    def _next_window(self, readies: Iterable[Ready], longer: float) -> float:
        """WINDOW_SLACK times what the fastest needs for its steps; the present one where nobody took any."""
        paces = _paces(readies)
        if not paces:
            return self.acceptor.position.window
        return min(WINDOW_SLACK * longer * max(min(paces), median(paces) / FASTEST), LONGEST_WINDOW)

    def _passed_over(self, box: BallotBox, members: Sequence[PeerId]) -> Collection[PeerId]:
        """Voters that are not ready and not gone. Who is passed over twice has to ask, as it does when it is ready."""
        acceptor, ready = self.acceptor, {*members, *box.readies, *box.away}
        return [p for p in acceptor.position.voters if p not in ready and not acceptor.is_absent(p)]


def _paces(readies: Iterable[Ready]) -> list[float]:
    return [ready.train_seconds for ready in readies if ready.train_seconds > 0]


class Aged:
    """Samples of one learner's work that is in no result yet, by how many rounds ago they were drawn."""

    def __init__(self) -> None:
        self._by_age = [0]
        self._told: list[int] = []
        self._offered: list[int] = []

    def add(self, samples: int) -> None:
        """Drawn since the last round was decided."""
        self._by_age[0] += samples

    def weigh(self) -> int:
        """The weight of all of them in the present round; at least 1 if there are any."""
        self._told = list(self._by_age)
        weight = sum(samples / (1 + age) for age, samples in enumerate(self._by_age))
        return max(round(weight), 1) if any(self._by_age) else 0

    def offer(self) -> None:
        """Others were given the work of those that were weighed last."""
        self._offered = self._told

    def decided(self, counted: bool) -> None:
        """A round is over, and what was offered to it counted or did not; what is left is older by one."""
        gone = self._offered if counted else []
        left = [have - taken for have, taken in zip_longest(self._by_age, gone, fillvalue=0)]
        while left and not left[-1]:
            left.pop()
        self._by_age, self._offered = [0, *left], []


class AsyncRounds(StreamingRounds):
    """One node's rounds: each ends with or without this node's work, which waits where it is until it counts."""

    _last = NOTHING  # steps that this node took, when it did last
    _returned: Aged | None = None  # the samples of work that went to the residual, until this node begins anew

    def _steps_of(self, round: int) -> tuple[int, int]:
        return 0 if self._waits else self._spec.inner.steps_in(round), 0

    def _seconds_to_train(self, here: Position) -> float:
        """Until the fastest has taken its steps, however late this node came into the round."""
        return here.window / WINDOW_SLACK - self._acceptor.elapsed()

    async def _take_steps(self, round: int, steps: int, seconds: float) -> TrainStats:
        began, last = trio.current_time(), self._last
        try:
            taken = await super()._take_steps(round, steps, seconds)
        except trio.Cancelled:  # as by a pause: nobody tells what was done until then
            if last.seconds:
                self._aged.add(int(last.samples / last.seconds * (trio.current_time() - began)))
            raise
        if taken.steps:
            self._last = taken
        self._aged.add(taken.samples)
        return taken

    async def _agree(self, worked: TrainStats) -> Decision:
        steps = self._spec.inner.steps_in(self._acceptor.position.round)
        pace = worked.seconds * steps / worked.steps if worked.steps else 0.0
        decision = await super()._agree(replace(worked, seconds=pace))
        self._decided_at = trio.current_time()
        try:  # now, as the others do not keep it until a long step in hand is done
            await self.obtain(decision.state_hash, decision.roster.peers)
        except PartsMissing as error:
            logger.debug("the result of round %d is not here yet: %s", decision.roster.round, error)
        return decision

    async def _exchange(self, here: Position, worked: TrainStats) -> tuple[Decision, TrainStats]:
        """As there; for as long as the step in hand took after the decision, others are in the next round."""
        found = await super()._exchange(here, worked)
        self._acceptor.late_by += trio.current_time() - self._decided_at
        return found

    def _weight_in(self, round: int) -> int:
        return self._aged.weigh()

    async def reduce(self, roster: RoundRoster, within: float, silence: float | None) -> str:
        self._aged.offer()
        return await super().reduce(roster, within, silence)

    async def _account(self, gradient: Vector, counted: bool) -> None:
        await super()._account(gradient, counted)
        self._aged.decided(counted)
        self._waits = not counted

    def _take_over(self, round: int) -> None:
        local = self._trainer.parameters()
        self._work.move(self._fragment(round), local, self.state.parameters - self._work.of(local))
        self._trainer.load(local)

    async def _return_work(self, gradient: Vector) -> None:
        await super()._return_work(gradient)
        self._aged.decided(counted=False)
        self._returned = self._aged

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._aged, self._returned = self._returned or Aged(), None  # a residual weighs what its work would
        self._waits = self._aged.weigh() > 0  # whether there is work that a round passed over


class Async(Streaming):
    """One node's part in a run whose rounds wait for nobody; all that is not about that is as in `Streaming`."""

    name = "async"
    agreement_class = AsyncAgreement
    rounds_class = AsyncRounds
