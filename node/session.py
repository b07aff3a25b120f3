"""A node's life in one run: find a place, then round after round until told to stop.

`Session.run` is the whole of it. How a place is found and what a round does is the exchange method's
(`protocols/methods/method.py`); the session drives it, pauses and stops it, keeps checkpoints, and tells what a person
sees of a run: `status` and the events given to `emit`. Nobody else's failure ends it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median
from typing import Any, TypeVar

import trio

from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.guest import Hold
from swarmnode.node.process import Defects, reason_of
from swarmnode.node.storage.checkpoints import Checkpoints, CheckpointWriter
from swarmnode.node.storage.datadir import DataDirError
from swarmnode.node.storage.datasets import pace
from swarmnode.node.storage.history import History, PastRound
from swarmnode.protocols.methods.asynchronous import Async
from swarmnode.protocols.methods.btard.method import Btard
from swarmnode.protocols.methods.context import Context, Observer
from swarmnode.protocols.methods.demo import DeMo
from swarmnode.protocols.methods.gossip.method import Gossip
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.lowrank import DiLoCoX
from swarmnode.protocols.methods.method import Begin, Build, LostPlace, Method, Overtaken, Place, RoundResult
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.rollouts import sapo
from swarmnode.protocols.methods.seed import Seed
from swarmnode.protocols.methods.streaming import Streaming
from swarmnode.protocols.methods.trainer import TrainerDied, Vector
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId, Traffic
from swarmnode.training.options import number_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The exchange methods that a run may choose in `[exchange] method`, whose choices training/sections.py declares.
METHODS: dict[str, Build] = {
    each.name: each for each in (Async, Btard, DeMo, Diloco, DiLoCoX, Gossip, Open, sapo.Sapo, Seed, Streaming)
}
LEAVE_WITHIN = 5.0  # seconds for an exchange in hand to end when the node is told to stop or to pause
ALONE = 60.0  # seconds without another member, after which the owner is told
CUT_OFF = (
    "for {:.0f} min nobody else has taken part: the others left, or this node is cut off (swarmnode netcheck); then "
    "the side with fewer members gives up its rounds when they meet again"
)
LOSSES_SHOWN = 240  # rounds of the loss curve that `status` gives
ABANDONED = 4  # reasons why a round was tried again that its line in the history gives, the last ones
RECENT = 16  # rounds that averages shown to people go over

ROUND = Metric("swarmnode_round", GAUGE, "rounds of the run in this node's state")
ROUND_AGE = Metric("swarmnode_round_age_seconds", GAUGE, "seconds since a round brought a result; none after the last")
CHECKPOINT_AGE = Metric("swarmnode_checkpoint_age_seconds", GAUGE, "seconds since a checkpoint was written")
LOSS = Metric("swarmnode_loss", GAUGE, "held-out loss after the last round, in the unit that status names")
REWARD = Metric("swarmnode_reward", GAUGE, "mean reward of the last round of a run by rollouts, 0 to 1")
TOKENS = Metric("swarmnode_tokens_per_second", GAUGE, "tokens trained on a second, over the last 16 rounds")
MEMBERS = Metric("swarmnode_members", GAUGE, "members of the round in hand, this node included")
PAUSED = Metric("swarmnode_paused", GAUGE, "1 while training is paused, by the owner or by a cap, else 0")


OWNERS = Hold("owner", "paused by its owner until swarmnode resume")


class RunSession(Observer):
    """One node in one run. `run` owns its tasks; the other methods may be called while it runs.

    It is the observer of its exchange method: `caught_up`, `progress` and `warn` are for that.
    """

    def __init__(
        self,
        context: Context,
        begin: Begin,
        *,
        emit: Callable[[dict[str, Any]], None],
        samples: bool = False,
        checkpoints: Checkpoints | None = None,
        history: History | None = None,
        checkpoint_every: int = 5,
    ) -> None:
        """Builds the exchange method of the run, which answers its peers from then on. `emit` is told what happens.

        `samples`: it does nothing but sample answers for another node's policy. `checkpoint_every`: so many rounds.
        Raises ExpectedError where the run has nothing to sample for.
        """
        self._context = context
        self._begin = begin
        self._checkpoint_every = checkpoint_every
        self._emit, self._checkpoints, self._history = emit, checkpoints, history
        self.method = method_of(replace(context, observer=self), samples=samples)
        self._writer = CheckpointWriter(checkpoints, runner=context.runner, observer=self) if checkpoints else None
        self._saved_at = -1
        self._traffic = context.network.traffic()
        self._stopping, self._resumed = trio.Event(), trio.Event()
        self._resumed.set()
        self._search = trio.CancelScope()  # the search for a place at the start, which a stop cuts short
        self._training = trio.CancelScope()  # a round or a wait, which a stop or a pause may cut short
        self.holds: dict[str, Hold] = {}  # by cause; without any it trains
        self._override: str | None = None  # phase of the session, where it is not the method's
        self.finished = trio.Event()
        self.last: RoundResult | None = None
        self.outcome: str | None = None  # of the last round: Completed, Partial (work is missing) or Abandoned
        self.losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_SHOWN)
        self.rewards: deque[tuple[int, float]] = deque(maxlen=LOSSES_SHOWN)  # in a run by rollouts
        self.rewards_by_task: dict[str, deque[tuple[int, float]]] = {}  # of the same, by what was asked
        self._paces: deque[tuple[float, float, int]] = deque(maxlen=RECENT)  # seconds, those of computing, tokens
        self._together_at = math.inf  # trio's time at the end of the last round with another member
        self._last_at: float | None = None  # trio's time at the end of the last round
        self._moved_at = -math.inf  # likewise, when a pause ended, or more of a state came
        self.warnings: dict[str, str] = {}  # what the owner should know, by cause
        self.defects = Defects()  # its own, where no node has put its there
        self._abandoned: list[str] = []  # why there was no result since the last round
        self._arriving: tuple[int, int] | None = None
        self._arriving_since = 0.0  # trio's time
        self._updates_before = 0  # of the inner optimizer, as the round in hand began here
        self._began_training = 0.0  # trio's time, of the round in hand
        self._here: set[PeerId] = set()  # other members that were connected at the end of the last round

    def measure(self, metrics: Metrics) -> None:
        self.method.measure(metrics)
        metrics.show(ROUND, lambda: self.place.round if self.place is not None else None)
        metrics.show(ROUND_AGE, lambda: self.round_age)
        metrics.show(CHECKPOINT_AGE, lambda: _since(self._writer.written_at if self._writer else None))
        metrics.show(LOSS, lambda: self.losses[-1][1] if self.losses else None)
        metrics.show(REWARD, lambda: self.rewards[-1][1] if self.rewards else None)
        metrics.show(TOKENS, lambda: self.tokens_per_second)
        metrics.show(MEMBERS, lambda: len(self.place.members) if self.place is not None else 0)
        metrics.show(PAUSED, lambda: self.paused)

    # --- the life of a node in a run --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until `stop` or the last round."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hold_at_stop)
            if self._writer is not None:
                nursery.start_soon(self._writer.run)
            await self._borne(self._context.membership.announce())
            await self._find_place()
            if self._is_over():
                logger.warning("the run has its %s rounds (--rounds): nothing is left to train", self._begin.last_round)
            await self._take_part()
            self.method.paused = True  # it leads nobody any more, however long the process still lives
            if self._stopping.is_set() and self.place is not None:
                await self._leave()
            elif self.place is not None and self.place.round != self._saved_at:  # it paused as the run ended
                self._save()
            if self._writer is not None:
                await self._writer.settled()
            self._override = "finished"
            self.finished.set()
            nursery.cancel_scope.cancel()

    async def keep(self) -> None:
        """Have the rounds that were agreed on here on the disk, also where `run` failed or was cancelled."""
        if self._writer is not None and not self.finished.is_set():
            with trio.CancelScope(shield=True):
                self._save()
                await self._writer.settled()

    async def serve_forever(self) -> None:
        """After the last round: serve late comers the final state."""
        while True:
            await self._borne(self._context.membership.announce())
            await trio.sleep(30)

    def stop(self) -> None:
        """Leave the run: an exchange in hand may end, training is cut short and its work kept."""
        self._stopping.set()
        self._resumed.set()
        self._search.cancel()
        self._cut_short()

    def _cut_short(self) -> None:
        if self.method.phase != "exchanging":
            self._training.cancel()
        else:
            self._training.deadline = trio.current_time() + LEAVE_WITHIN

    async def _hold_at_stop(self) -> None:
        await self._stopping.wait()
        await self._hold()  # or a step of minutes would be waited for

    async def _hold(self) -> None:
        await self._context.trainer.hold()
        if self.paused or self._stopping.is_set():  # still
            await self._borne(self.method.say_away())

    async def pause(self, hold: Hold = OWNERS) -> None:
        """Stop training within two seconds, until `resume` for each cause; the others do not wait for this node."""
        told, self.holds = self.holds, {**self.holds, hold.cause: hold}
        if hold.cause not in told:
            logger.info("paused: %s", hold.why)
            self._emit({"event": "paused", **asdict(hold)})
        if told:
            return
        self.method.paused = True
        if self._resumed.is_set():
            self._resumed = trio.Event()
        self._cut_short()
        await self._hold()

    def resume(self, cause: str = OWNERS.cause) -> None:
        """Take part again, where no other cause is left."""
        if self.holds.pop(cause, None) is None or self.holds:
            return
        logger.info("training goes on")
        self._emit({"event": "resumed"})
        self.method.paused = False
        self._moved_at = trio.current_time()
        self._resumed.set()
        if not self._stopping.is_set() and self._context.trainer.go_on():
            self._training.deadline = math.inf  # of the exchange in hand

    @property
    def paused(self) -> bool:
        return bool(self.holds)

    @property
    def phase(self) -> str:
        """training, exchanging, waiting, catching-up, paused, finished or stopping."""
        return "stopping" if self._stopping.is_set() else self._override or self.method.phase

    @property
    def arriving(self) -> tuple[int, int] | None:
        """Bytes that are here of a state that this node fetches, and its size; None while it fetches none."""
        return self._arriving if self.phase == "catching-up" else None

    @property
    def unsaved(self) -> DataDirError | None:
        """Why the newest state is not on the disk; None where nothing went wrong."""
        return self._writer.failure if self._writer is not None else None

    @property
    def place(self) -> Place | None:
        """Where this node stands; None until it knows."""
        return self.method.place

    @property
    def round_age(self) -> float | None:
        """Seconds since a round brought a result here; None before the first and after the last."""
        return None if self.finished.is_set() else _since(self._last_at)

    @property
    def idle_for(self) -> float | None:
        """As `round_age`, but no longer than since a pause ended, or more of a state came that this node fetches."""
        return None if self.round_age is None else min(self.round_age, trio.current_time() - self._moved_at)

    @property
    def usual_seconds(self) -> float | None:
        """Of a round lately; None before there is one, as below."""
        return median(seconds for seconds, _, _ in self._paces) if self._paces else None

    @property
    def tokens_per_second(self) -> float | None:
        return self._share_of_time(2)

    @property
    def compute_share(self) -> float | None:
        return self._share_of_time(1)

    def _share_of_time(self, which: int) -> float | None:
        elapsed = sum(pace[0] for pace in self._paces)
        return sum(pace[which] for pace in self._paces) / elapsed if elapsed else None

    async def _find_place(self) -> None:
        newest = await self._context.runner(self._checkpoints.newest) if self._checkpoints is not None else None
        with self._search:
            if newest is not None and newest.moments is not None:
                await self._remember(newest.moments, newest.updates)
                newest = replace(newest, moments=None)
            while True:
                with suppress(LostPlace):  # by a defect
                    await self._kept(self.method.find_place(replace(self._begin, saved=newest)))
                    break
        if newest is None and self._checkpoints is not None and not any(self._checkpoints.folder.glob("round-*.json")):
            self._save()  # so that it goes on by itself, also where it is killed before its first rounds are done

    async def _remember(self, moments: Vector, updates: int) -> None:
        """Have the inner optimizer go on where it was.

        Also where the others are rounds ahead: what gradients are like changes more slowly than parameters, and first
        moments are gone after some tens of steps, while without any, the first steps are as long as if no gradient were
        noise.
        """
        try:
            await self._context.trainer.remember(moments, updates)
        except (TrainerDied, ValueError) as error:
            logger.warning("the inner optimizer begins with fresh moments, as those of the checkpoint fail: %s", error)

    async def _take_part(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while not self._stopping.is_set() and not self._is_over():
                if self._resumed.is_set():
                    if await self._context.trainer.release():  # else it is held again meanwhile
                        await self._one_round()
                else:
                    await self._pause()
            nursery.cancel_scope.cancel()

    async def _one_round(self) -> None:
        result: RoundResult | None = None
        lost: LostPlace | None = None
        self._updates_before = self._context.trainer.moments()[1]
        self._began_training = trio.current_time()
        with trio.CancelScope() as self._training:
            try:
                result = await self._kept(self.method.run_round())
            except LostPlace as error:
                lost = error
        if result is not None:
            await self._note(result, self._tell(result))
            place = self.place
            if place is not None and (abs(place.round - self._saved_at) >= self._checkpoint_every or self._is_over()):
                self._save()
        elif lost is not None:
            if not (isinstance(lost, Overtaken) or self._stopping.is_set()):
                self._abandon(str(lost))
            await self._regain_place()

    async def _regain_place(self) -> None:
        if not self._stopping.is_set() and self._resumed.is_set():
            with trio.CancelScope() as self._training:
                await self._borne(self.method.regain_place())

    async def _watch(self) -> None:
        while True:
            await self._borne(self.method.watch())

    async def _kept(self, doing: Awaitable[T]) -> T:
        """What this comes to. A defect of this program, which a peer may have found, ends a round, never the daemon."""
        try:
            return await doing
        except Exception as error:
            if isinstance(reason_of(error), LostPlace):
                raise
            raise LostPlace(await self.defects.bear(error)) from error

    async def _borne(self, doing: Awaitable[None]) -> None:
        with suppress(LostPlace):
            await self._kept(doing)

    async def _pause(self) -> None:
        self._override = "paused"
        await self._leave()
        await self._resumed.wait()  # `stop` sets it as well
        if not self._stopping.is_set():
            await self._context.trainer.release()
        self._saved_at = -self._checkpoint_every  # the next is saved: what this one has goes into it, and counts there
        self._override = None
        await self._regain_place()

    async def _leave(self) -> None:
        """Cleanly: what was trained goes into the checkpoint, and the others do not wait for this node."""
        await self._borne(self.method.leave())
        self._save()

    def _is_over(self) -> bool:
        rounds = self._begin.last_round
        return rounds is not None and self.place is not None and self.place.round >= rounds

    # --- what is kept and told --------------------------------------------------------------------------------------

    async def _note(self, result: RoundResult, spent: Traffic) -> None:
        """Write the round into the run's history, with the bytes `spent` since the last one."""
        figures = self._figures(result) | {"bytes_in": spent.bytes_in, "bytes_out": spent.bytes_out}
        self._abandoned = []
        if self._history is None:
            return
        history, at = self._history, round(time.time(), 2)
        entry = PastRound(result.round, result.state_hash, result.counted, result.roster, at, figures)
        try:
            await self._context.runner(lambda: history.append(entry))
        except DataDirError as error:
            self.warn("history", f"round {result.round} is missing in the run's history: {error}")
        else:
            self.warn("history", None)

    def _figures(self, result: RoundResult) -> dict[str, Any]:
        """What people look at, as docs/cli.md names it."""
        worked, learned, me = result.worked, result.learned, self._context.network.me
        answered = learned or result.sampled
        parts = {"trained": worked.seconds, **result.stages}
        why = {peer: self._why(peer, result) for peer in result.missing}
        own = why.pop(me, "none")
        numbers = {
            "loss": result.loss,
            "accuracy": self._accuracy(result),
            "trained_loss": worked.loss,
            "reward": answered.reward if answered is not None else math.nan,
            "heldout_reward": learned.heldout if learned is not None else math.nan,
            "seconds": result.seconds,
            **{f"{name}_s": seconds for name, seconds in parts.items()},
            "waited_s": max(0.0, result.seconds - sum(parts.values())),
            "share": result.share if result.share is not None else math.nan,
            "apart": result.apart if result.apart is not None else math.nan,
        }
        return {
            **{name: round(number, 4) for name, number in numbers.items() if math.isfinite(number)},
            "steps": worked.steps,
            "tokens": worked.tokens,
            "members": result.members,
            "outcome": self.outcome,
            "own": result.verdicts.get(me) or ("accepted" if me in result.counted else own),
            **({"steered": dict(result.steered)} if result.steered else {}),
            **({"missing": list(why), "why": why} if why else {}),
            **({"abandoned": self._abandoned} if self._abandoned else {}),
        }

    def _accuracy(self, result: RoundResult) -> float:
        """Measured with the loss, after rounds that the run's settings name; nan after others."""
        return self._context.trainer.accuracy if math.isfinite(result.loss) else math.nan

    def _why(self, peer: PeerId, result: RoundResult) -> str:
        if (verdict := result.verdicts.get(peer)) is not None:
            return verdict
        here = {self._context.network.me, *(view.peer for view in self._context.network.peers())}
        return "late" if peer in here else "not connected"

    def _save(self) -> None:
        """Have a checkpoint of this moment written, beside training."""
        if self._writer is not None and self.place is not None:
            moments, updates = self._context.trainer.moments()
            saved = replace(self.method.saved(), moments=moments if updates else None, updates=updates)
            self._writer.put(saved)
            self._saved_at = saved.round

    def caught_up(self, at: int, state_hash: str, seconds: float) -> None:
        self._arriving = None
        self._emit({"event": "caught_up", "round": at, "state_hash": state_hash, "seconds": round(seconds, 3)})

    def progress(self, done: int, size: int) -> None:
        if self._arriving is None or done < self._arriving[0]:  # it begins, or begins anew
            self._arriving_since = trio.current_time()
        self._arriving, self._moved_at = (done, size), trio.current_time()

    def warn(self, cause: str, text: str | None) -> None:
        if text is None:
            self.warnings.pop(cause, None)
        else:
            self.warnings[cause] = text

    def _abandon(self, reason: str) -> None:
        """The round brought no result to this node. No `round` event is told: its state hash is not that round's."""
        round = self.place.round if self.place is not None else 0
        self.outcome = "Abandoned"
        self._abandoned = [*self._abandoned, reason][-ABANDONED:]
        logger.warning("round %d brought no result here, its work is kept for a later one: %s", round, reason)
        self._emit({"event": "abandoned", "round": round, "reason": reason})

    def _tell(self, result: RoundResult) -> Traffic:
        """Say that the round is over; what it cost in traffic."""
        self.last, self._last_at = result, trio.current_time()
        self.outcome = "Partial" if result.missing else "Completed"
        self._paces.append((result.seconds, result.worked.seconds, result.worked.tokens))
        if math.isfinite(result.loss):
            self.losses.append((result.round, result.loss))
        before, self._traffic = self._traffic, self._context.network.traffic()
        spent = Traffic(self._traffic.bytes_in - before.bytes_in, self._traffic.bytes_out - before.bytes_out)
        here = result.learned is not None and self._context.membership.connected()  # of whom it may need nothing now
        if result.members > 1 or here:
            self._together_at = trio.current_time()
        alone = trio.current_time() - self._together_at
        cut_off = CUT_OFF.format(alone / 60) if alone > ALONE else None
        if cut_off and "cut off" not in self.warnings:
            logger.warning("%s", cut_off)
        self.warn("cut off", cut_off)
        if (answered := result.learned or result.sampled) is not None and math.isfinite(answered.reward):
            self.rewards.append((result.round, answered.reward))
        for task, reward in (result.learned.by_task if result.learned is not None else {}).items():
            self.rewards_by_task.setdefault(task, deque(maxlen=LOSSES_SHOWN)).append((result.round, reward))
        others = [peer for peer in result.missing if peer != self._context.network.me]
        logger.info(
            "round %d: %s, %s%s%s, %.2g s",
            result.round,
            _what_came(result, self._context.spec.loss_unit),
            "alone" if result.members == 1 else f"{result.members} members",
            f", {len(others)} missing" if others else "",
            ", own work not counted" if len(others) < len(result.missing) else "",
            result.seconds,
            extra={"ahead": self.doing},  # called where a terminal shows it
        )
        self._tell_of_members(result.counted)
        self._emit(
            {
                "event": "round",
                "time": round(time.time(), 2),
                "round": result.round,
                "loss": result.loss if math.isfinite(result.loss) else None,
                "state_hash": result.state_hash,
                "outcome": self.outcome,
                "seconds": round(result.seconds, 3),
                "bytes_in": spent.bytes_in,
                "bytes_out": spent.bytes_out,
                "compute_seconds": round(result.worked.seconds, 3),
                "steps": result.worked.steps,
                "tokens": result.worked.tokens,
                "members": result.members,
                "missing": list(result.missing),
                "counted": list(result.counted),
                **{f"{stage}_seconds": round(seconds, 3) for stage, seconds in result.stages.items()},
                **({"accuracy": round(accuracy, 4)} if math.isfinite(accuracy := self._accuracy(result)) else {}),
                **({"apart": round(result.apart, 6)} if result.apart is not None else {}),
                **({"verdicts": dict(result.verdicts)} if result.verdicts else {}),
                **({"learned": asdict(result.learned)} if result.learned is not None else {}),
                **({"sampled": asdict(result.sampled)} if result.sampled is not None else {}),
            }
        )
        return spent

    def doing(self) -> str:
        """What goes on now and when it ends, for people; empty where nothing does."""
        place, phase = self.place, self.phase
        if phase in ("paused", "finished", "stopping") or self._is_over():
            return ""
        if self.arriving is not None:
            done, size = self.arriving
            rate = done / max(1e-9, trio.current_time() - self._arriving_since)
            return f"catching up: the run's state, {pace(done, size, rate)}"
        if place is None or phase == "catching-up":
            return "looking for the run's other members" if place is None else "catching up with the others"
        last, usual, what = self._begin.last_round, self.usual_seconds, phase
        left = usual - place.elapsed if usual is not None else None
        steering = self.method.steering
        spec = steering.stage.spec if steering is not None else self._context.spec
        if phase == "training" and spec.needs_data and spec.exchange.method != "seed":  # whose steps update nothing
            steps = spec.inner.steps_in(place.round)
            done = min(steps, max(0, self._context.trainer.moments()[1] - self._updates_before))
            what = f"step {done} of {steps}"
            if usual is None and done > 1:  # the first of them are slow; who joined began in the middle of the round
                taken = trio.current_time() - self._began_training
                usual, left = taken * steps / done, taken * (steps - done) / done
        elif phase == "exchanging" and usual is not None and left is not None and left > usual / 2:
            what = "beginning"  # the phase is that of the round before until the first step
        elif phase == "exchanging" and len(place.members) <= 1:
            what = "ending"
        elif phase in ("exchanging", "waiting"):
            what = f"{phase} {'with' if phase == 'exchanging' else 'for'} the others"
        times = f", ends in {_clock(left)}" if left is not None else ""
        if last and usual and left is not None and last > place.round + 1:
            inner, after = spec.inner, place.round + 1
            rest = (inner.steps_before(last) - inner.steps_before(after)) / inner.steps_in(place.round)
            times += f", all {last} in {_clock(rest * usual + left)}"
        return f"round {place.round}: {what}{times}"

    def _tell_of_members(self, counted: tuple[PeerId, ...]) -> None:
        """Who came, with work that counted, or is connected no more."""
        here = {view.peer for view in self._context.network.peers()} & {*self._here, *counted}
        for peers, what in ((here - self._here, "came"), (self._here - here, "went")):
            if peers:
                names = ", ".join(f"…{peer[-6:]}" for peer in sorted(peers))
                logger.info("%s %s; other members connected: %d", names, what, len(here))
        self._here = here


def method_of(context: Context, *, samples: bool) -> Method:
    """The exchange method that the run names; or what a node that only `samples` does instead. Raises ExpectedError."""
    spec = context.spec
    if not samples:
        return METHODS[spec.exchange.method](context)
    if spec.exchange.method != "sapo":
        raise ExpectedError(
            f"the run {spec.run.name} shares no rollouts, so nobody can only sample for it; leave out "
            "--role rollout, or name a run such as --task digits-rl",
            exit_code=CONFIG,
        )
    return sapo.SapoSampler(context)


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=max(0, round(seconds)))


def _since(moment: float | None) -> float | None:
    return None if moment is None else trio.current_time() - moment


def _what_came(result: RoundResult, unit: str) -> str:
    if (sampled := result.sampled) is not None:
        return (
            f"{number_of(sampled.groups, 'group')} by version {sampled.version} for {sampled.trainer}, reward "
            f"{sampled.reward:.3f}; {sampled.given} given, {sampled.accepted} accepted"
        )
    if result.learned is not None:
        return result.learned.in_words()
    return f"held-out loss {result.loss:.4f} {unit}" if math.isfinite(result.loss) else "loss not measured"
