"""A round of DiLoCo (arXiv 2311.08105): train apart for H inner steps, then move together.

`DilocoRounds.run_round` reads like the algorithm:

    θ ← inner steps from φ           until H steps are done or the window closes
    Δ ← φ − θ                        the pseudo-gradient
    agree on a roster, all-reduce Δ  `agreement.py`, `allreduce.py`
    φ ← φ − Nesterov(mean Δ)         `training.outer`, bit-identical on all members
    θ ← φ

What is then true: members that apply a decision hold the state whose hash it names. Work that is not in a decided
result (its node came late, was cut off, or fell behind) goes to the sender's residual, at most one norm of it, and is
sent with a later round: no failed exchange throws it away. Each step's work goes to one of the two, once (`_settled`);
only where a node never learns how its round ended may work be sent again that did count. All of this holds wherever a
call is cancelled: work is settled in steps that nothing interrupts.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from math import nan
from typing import Any

import numpy as np
import trio

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.agreement import WINDOW_SLACK, Agreement
from swarmnode.protocols.methods.known.messages import Decision, PartsMissing, Position, RoundHead, RoundRoster
from swarmnode.protocols.methods.known.population import Population
from swarmnode.protocols.methods.known.reduction import Reducer
from swarmnode.protocols.methods.method import FIRST_WINDOW, RoundResult
from swarmnode.protocols.methods.trainer import NOTHING, TrainerDied, TrainStats, Vector, loss_of
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.catchup import CatchUp, CatchUpFailed, most_rounds
from swarmnode.training.outer import OuterState, outer_step, pseudo_gradient, state_hash
from swarmnode.training.sections import InnerSection

logger = logging.getLogger(__name__)

LATE_START = 0.5  # seconds into a round from which a node counts as late and must not make the others wait


class DilocoRounds:
    """One node's rounds in a DiLoCo run, and what it does in the ballots of each (`agreement.Exchange`).

    `begin` or `catch_up` first, then `run_round` again and again.
    """

    def __init__(self, parts: Context, agreement: Agreement, allreduce: Reducer) -> None:
        self._parts = parts
        self._me, self._spec = parts.me, parts.spec  # the spec is as its owner steered it
        self._trainer, self._runner = parts.trainer, parts.runner
        self.population = Population(parts) if parts.spec.inner.population else None
        self._agreement, self._acceptor = agreement, agreement.acceptor
        self._allreduce = allreduce
        self._catch_up = CatchUp(parts)
        self._proposed: tuple[str, OuterState] | None = None  # with its hash, until the round is decided
        self._gradient: Vector = np.zeros(0, np.float32)  # (P,), this call's work, which `reduce` offers
        self._offered: Vector | None = None  # the work that the others were given in this round
        self._settled: Vector | None = None  # what of the trainer's work since `state` is in a result or the residual
        self._ended = trio.current_time()
        self._late_by = 0.0  # seconds into the round at which this node came into it
        self._state: OuterState | None = None
        self._stages: dict[str, float] = {}  # of this round, as in RoundResult
        self.phase = "waiting"

    @property
    def state(self) -> OuterState:
        """The shared state that this node stands on."""
        if self._state is None:
            raise RuntimeError("DilocoRounds.begin or catch_up was never called")
        return self._state

    @property
    def stands(self) -> bool:
        return self._state is not None

    async def begin(
        self, round: int, state: OuterState, voters: tuple[PeerId, ...], joiners: tuple[PeerId, ...]
    ) -> None:
        """Stand on `state` after `round` rounds: a new run, an uncontested checkpoint, or alone."""
        if self._state is not None:
            await self._return_work(await self._unsettled())
        hash = await self._runner(lambda: state_hash(round, self._trainer.layout, state))
        self._stand_on(round, hash, state)
        self._begin_anew()
        first_window = FIRST_WINDOW * self._spec.exchange.deadline_ceiling
        steering = self._acceptor.steering.now.raw
        self._advance(Position(round, hash, voters, joiners, first_window, steering=steering), elapsed=0.0)
        self._ended = trio.current_time()

    async def catch_up(self, head: RoundHead, sources: tuple[PeerId, ...]) -> None:
        """Fetch the state at `head` from `sources` and go on from there. Raises CatchUpFailed; nothing is then changed.

        What this node trained since it last stood with others goes to its residual.
        """
        if self._acceptor.steering.read(head.steering) is None:
            raise CatchUpFailed("what is said to be its owner's word on the run's values is not")
        if not head.voters or head.round > most_rounds():  # nobody could decide the round there
            raise CatchUpFailed("nobody made that state")
        self.phase = "catching-up"
        began = trio.current_time()
        state = await self._state_at(head, sources)
        if self._state is not None:
            await self._return_work(await self._unsettled())
        self._allreduce.rollback()
        self._stand_on(head.round, head.parent, state)
        self._begin_anew()
        self._ended = trio.current_time()
        self._late_by = max(head.elapsed, 0.0) + self._ended - began
        self._advance(head, elapsed=self._late_by)

    def _advance(self, position: Position, elapsed: float) -> None:
        """Go to a round that the others began `elapsed` seconds ago, by the values that are in force in it."""
        self._acceptor.advance(position, elapsed=elapsed)
        spec = self._acceptor.steering.stage.spec
        if spec != self._spec:
            self._spec = spec
            self._trainer.steer(self._inner)
            self._allreduce.encode_by(spec.exchange.codec)

    @property
    def _inner(self) -> InnerSection:
        """The values that this node's own steps go by."""
        return self._spec.inner if self.population is None else self.population.applied(self._spec.inner)

    async def _state_at(self, head: RoundHead, sources: tuple[PeerId, ...]) -> OuterState:
        """The state at `head`: the one held already, the common initial one, or fetched. Raises CatchUpFailed."""
        layout = self._trainer.layout
        held = self._state or OuterState.start(self._trainer.parameters())
        if await self._runner(lambda: state_hash(head.round, layout, held)) == head.parent:
            return held
        round, _, state = await self._catch_up.fetch(sources, state_hash=head.parent, observer=self._parts.observer)
        if round != head.round:
            raise CatchUpFailed(f"members stand at round {round}, and {head.round} was announced")
        return state

    def _stand_on(self, round: int, hash: str, state: OuterState) -> None:
        self._propose(round, hash, state)
        self._proposed, self._state = None, state

    def _begin_anew(self) -> None:
        """Train from the shared parameters, with nothing that is not settled."""
        self._trainer.load(self.state.parameters)
        self._offered = self._settled = None

    async def run_round(self) -> RoundResult:
        """Take part in one round. Raises Behind, CatchUpFailed or LostPlace where this node has lost its place."""
        here, self._stages = self._acceptor.position, {}
        steered = dict(self._acceptor.steering.stage.values)
        if self.population is not None:
            await self.population.begin(here.round, (*here.voters, *here.joiners))
            self._trainer.steer(self._inner)
            steered |= self.population.told(self._spec.inner)
        self.phase = "training"
        gradient, worked = await self._work_in(here)
        self._gradient, self.phase = gradient, "exchanging"
        with self._catch_up.eased():  # those who wait for this round go before those who join
            decision, worked = await self._exchange(here, worked)
        missing = await self._apply(decision, gradient, worked)
        self._gradient = gradient = np.zeros(0, np.float32)  # its memory is free while the next round trains
        loss = await self._loss() if self._spec.inner.measured_after(here.round) else nan
        return self._told(decision, missing, loss, worked, steered)

    async def _work_in(self, here: Position) -> tuple[Vector, TrainStats]:
        """Train, as far as that comes before the exchange: what this node offers to the round, and what it took."""
        worked = await self._train(here, self._spec.inner.steps_in(here.round))
        if self.population is not None:
            await self.population.measure(here.round)
        gradient = await self._unsettled()
        return (gradient, worked) if await self._parts.is_whole(gradient) else (np.zeros_like(gradient), NOTHING)

    async def _exchange(self, here: Position, worked: TrainStats) -> tuple[Decision, TrainStats]:
        """Have the round decided: how, and all that this node did until then. Raises as `Agreement.agree`."""
        return await self._agree(worked), worked

    async def _loss(self) -> float:
        return await loss_of(self._trainer)

    async def _agree(self, worked: TrainStats) -> Decision:
        return await self._agreement.agree(
            samples=worked.samples, train_seconds=worked.seconds, rates=dict(self._allreduce.rates), exchange=self
        )

    def _told(
        self, decision: Decision, missing: tuple[PeerId, ...], loss: float, worked: TrainStats, steered: dict[str, Any]
    ) -> RoundResult:
        """What is said of the round, which ends now."""
        seconds, self._ended = trio.current_time() - self._ended, trio.current_time()
        peers = decision.roster.peers
        counted = tuple(p for p in peers if p not in missing)
        ended = decision.roster.round, decision.state_hash, loss, worked, seconds
        return RoundResult(*ended, len(peers), missing, counted, stages=self._stages, steered=steered)

    async def return_local_work(self) -> None:
        """Put what was trained since the last round into the residual: before leaving, or before a pause."""
        await self._return_work(await self._unsettled())
        self._begin_anew()

    async def _train(self, here: Position, steps: int) -> TrainStats:
        """Inner steps until so many are done, or the window ends; none where a trainer that died is not back by then.

        Who comes into a round late stops when the median member does, so that nobody waits for a newcomer.
        """
        seconds, self._late_by = self._seconds_to_train(here), 0.0
        started = trio.current_time()
        while (left := seconds - (trio.current_time() - started)) > 0:
            with suppress(TrainerDied):
                return await self._take_steps(here.round, steps, left)
        return NOTHING

    async def _take_steps(self, round: int, steps: int, seconds: float) -> TrainStats:
        return await self._trainer.train(round=round, steps=steps, seconds=seconds)

    def _seconds_to_train(self, here: Position) -> float:
        """Before this node offers its work of a round that it has just come into."""
        return here.window if self._late_by <= LATE_START else here.window / WINDOW_SLACK - self._late_by

    async def _unsettled(self) -> Vector:
        """The pseudo-gradient, (P,): what the trainer did since the shared state, but for what is settled already."""
        start, settled = self.state.parameters, self._settled
        return await self._runner(lambda: pseudo_gradient(start, self._trainer.parameters(), settled))

    async def reduce(self, roster: RoundRoster, within: float, silence: float | None) -> str:
        """As in `Exchange`: the state that follows from this roster; kept until the round is decided."""
        self._offered = self._gradient
        began = trio.current_time()
        mean = await self._allreduce.reduce(roster, self._gradient, within=within, silence=silence)
        self._stages = {"exchange": trio.current_time() - began}
        before = self.state

        def step() -> tuple[str, OuterState]:
            after = before
            try:
                if any(seat.weight for seat in roster.seats):
                    after = self._outer_step(roster.round, before, mean)
            except ValueError as error:
                # every member holds the same mean and comes to the same conclusion
                logger.error("round %d moves nothing: %s", roster.round, error)
            return state_hash(roster.round + 1, self._trainer.layout, after), after

        hash, after = await self._runner(step)
        self._propose(roster.round + 1, hash, after)
        return hash

    def _outer_step(self, round: int, before: OuterState, mean: Vector) -> OuterState:
        """Raises ValueError where it leads to no finite state."""
        return outer_step(before, mean, lr=self._spec.outer.lr, momentum=self._spec.outer.momentum)

    def _propose(self, round: int, hash: str, state: OuterState) -> None:
        """Hold and serve a state that may be decided, in place of an earlier one of the round."""
        if self._proposed is not None and self._proposed[0] != hash:
            self._catch_up.withdraw(self._proposed[0])
        self._proposed = hash, state
        self._catch_up.serve_state(round, hash, state)

    async def obtain(self, state_hash: str, holders: tuple[PeerId, ...]) -> None:
        if self._proposed is not None and self._proposed[0] == state_hash:
            return
        others = tuple(p for p in holders if p != self._me)
        try:
            round, _, state = await self._catch_up.fetch(others, state_hash=state_hash)
        except CatchUpFailed as error:
            raise PartsMissing(others) from error
        if round != self._acceptor.position.round + 1:
            raise PartsMissing(others)
        self._propose(round, state_hash, state)

    async def _apply(self, decision: Decision, gradient: Vector, worked: TrainStats) -> tuple[PeerId, ...]:
        """Move to the decided state; keep this node's work for later where it is not in it."""
        # whether the work counted is settled before the state is here: fetching it may fail
        counted = self._allreduce.commit(decision.roster)
        await self._account(gradient, counted)
        try:
            await self.obtain(decision.state_hash, decision.roster.peers)
        except PartsMissing as error:
            raise CatchUpFailed(f"the result of round {decision.roster.round} could not be fetched: {error}") from error
        assert self._proposed is not None, "what was obtained is held"
        round, roster = decision.roster.round + 1, decision.roster
        self._stand_on(round, *self._proposed)
        self._take_over(roster.round)
        self._late_by = self._acceptor.late_by
        place = round, decision.state_hash, roster.peers, roster.joiners, roster.window
        self._advance(Position(*place, missing=decision.missing, steering=roster.steering), elapsed=self._late_by)
        without = {self._me} if not counted and worked.samples > 0 else ()
        return tuple(sorted({*decision.missing, *without}))

    async def _account(self, gradient: Vector, counted: bool) -> None:
        """Settle this node's work of a round that is decided: it counted, or it waits for a later one."""
        if counted and self._offered is not None:
            self._settle(self._offered)
            if self._offered is not gradient:  # a call that was cancelled had offered less
                await self._return_work(await self._unsettled())
        else:
            await self._return_work(gradient)

    def _take_over(self, round: int) -> None:
        """Go on from the state that a round led to, which is this node's now."""
        self._begin_anew()

    async def _return_work(self, gradient: Vector) -> None:
        """Add unsettled work to the residual, which settles it; work that is not finite is worth nothing."""

        def add() -> None:
            self._allreduce.rollback()
            if self._allreduce.give_back(gradient):
                self._settle(gradient)

        await self._runner(add)

    def _settle(self, work: Vector) -> None:
        self._settled = work if self._settled is None else self._settled + work
