"""The exchange method `gossip`: nodes meet in pairs, drawn anew in each round, and none waits for more than its pair.

    pairing.py    who meets whom, by each node's view of the members
    meeting.py    one meeting: messages, bytes, and when it counts
    method.py     rounds; finding a place, and keeping up with the others

The arithmetic is NoLoCo's (training/gossip.py, arXiv 2506.10911). A node's round is its H inner steps and one meeting:

    offer phi, fetch the partner's            while the steps are taken
    take the steps                            until they are done, or somebody waits for this node
    offer g, fetch the partner's; settle      or go on alone, after a bounded wait
    phi, m <- gossip_step

*No two nodes have the same state*: `state_hash` is that of each node's own, and what is promised instead, of how far
apart they are, stands in docs/gossip.md. A round ends for each node by itself, whoever else dies, freezes, lies or
leaves.

Rounds are counted by each node, and who meets somebody further on counts from there, so schedules of learning rates run
alike everywhere. Whoever is more than BEHIND rounds behind, as after a long pause, would drag whom it meets back. It
takes a member's state in place of its own, and its unshared work to that. So does a late comer.

Behind the last round that a node was told to do, nodes meet MERGES times without steps in between, until each has about
the mean of all (2507.06542): training apart in one long round, by `--rounds 1`, is the `merge` of docs/results.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import trio

from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.limits import Allowance, Budget, Recent
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.gossip.meeting import (
    AWAY,
    PAST,
    Meeting,
    MeetReply,
    MeetRequest,
    SettleReply,
    SettleRequest,
    Stand,
)
from swarmnode.protocols.methods.gossip.pairing import partner
from swarmnode.protocols.methods.method import NOTICE_MEMBERS_FOR, Begin, Method, Overtaken, Place, RoundResult, Saved
from swarmnode.protocols.methods.trainer import NOTHING, TrainerDied, TrainStats, Vector, loss_of
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import AdaptiveDeadline
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.transfer.catchup import CatchUp, CatchUpFailed, most_rounds
from swarmnode.protocols.wire import RunQuery
from swarmnode.training.codecs import CodecError, codec
from swarmnode.training.codecs.feedback import ErrorFeedback, norm_in_float64
from swarmnode.training.gossip import gossip_step, weights_codec
from swarmnode.training.outer import OuterState, pseudo_gradient, state_hash
from swarmnode.training.sections import OuterSection

logger = logging.getLogger(__name__)

BEHIND = 4  # rounds by which a node may be behind whom it meets
ASK_EVERY = 1.0  # seconds between looks for members
ASK_AT_ONCE = 8  # members asked where they stand at the same time
STAND_TIMEOUT = 3.0  # seconds for a peer to say where it stands
MERGES = 8  # meetings without steps after the last round, each of which halves the variance over the nodes
MERGE = OuterSection(lr=1.0, momentum=0.0)  # in them both go to their mean
ABSENT_FOR = 20.0  # seconds for which one that did not come to a meeting is expected at none

APART = Metric("swarmnode_gossip_apart", GAUGE, "distance of this node's parameters from those it met, by their norm")


class Gossip(Method):
    name = "gossip"
    phase = "waiting"

    def __init__(self, parts: Context) -> None:
        self._parts, self._spec, self._trainer = parts, parts.spec, parts.trainer
        self._codec, self._weights = codec(parts.spec.exchange.codec), weights_codec(parts.spec.exchange.codec)
        self.feedback = ErrorFeedback(self._codec, parts.trainer.layout.parameters)
        self.catch_up = CatchUp(parts)
        self.lies = Violations("gossip")
        self.violations = (self.lies,)
        self.meeting: Meeting | None = None
        self.apart = 0.0  # |phi - the other's phi| / |phi|, in the last meeting
        self._past = Recent[tuple[PeerId, int], bool](PAST)  # whether they counted, for the one that did not hear it
        self._deadline = AdaptiveDeadline(
            floor=parts.spec.exchange.deadline_floor, ceiling=parts.spec.exchange.deadline_ceiling
        )
        self._absent = Recent[PeerId, float](1024)  # until when, trio time
        self._calls = Budget[PeerId](Allowance(1 / parts.spec.exchange.deadline_ceiling, 1.0))  # from far ahead
        self._size = sum(each.encoded_size(parts.trainer.layout.parameters) for each in (self._weights, self._codec))
        self._merging = False  # it is past its last round, and meets others without taking steps
        self._asked: set[PeerId] = set()  # who looked for a place here, while this node waits for such
        self._last_round: int | None = None
        self._round, self._hash = 0, ""
        self._state: OuterState | None = None
        self._settled: Vector | None = None  # of the trainer's work since phi, what the residual has already
        self._ended = trio.current_time()
        self._begun = trio.Event()  # the next meeting can be asked for
        parts.rpc.serve("gossip.stand", RunQuery, self._on_stand)
        parts.rpc.serve("gossip.meet", MeetRequest, self._on_meet)
        parts.rpc.serve("gossip.settle", SettleRequest, self._on_settle)

    # --- what others ask --------------------------------------------------------------------------------------------

    async def _on_stand(self, peer: PeerId, query: RunQuery) -> Stand:
        admit(self._parts, peer, query.run_id, stands=self._state is not None)
        if len(self._asked) < ASK_AT_ONCE * ASK_AT_ONCE:
            self._asked.add(peer)
            self._news()
        return Stand(self._round, self._hash)

    async def _on_meet(self, peer: PeerId, request: MeetRequest) -> MeetReply:
        """Whether this node comes; where it is about to begin that round, it says so then."""
        while True:
            admit(self._parts, peer, request.run_id, stands=self._state is not None)
            if self.paused:
                raise Refuse(AWAY, "this node takes no part for now")
            self._absent.pop(peer, None)
            if (self._merges_in(self._round) and not self._merging) or request.round < self._round:
                return MeetReply(self._round, False)
            if request.round > self._round + BEHIND and not self._merges_in(request.round):
                if self.meeting is not None and self._calls.take(peer, 1.0):
                    self.meeting.ahead, self.meeting.wanted = max(self.meeting.ahead, request.round), True
                    await self._trainer.interrupt()
                return MeetReply(self._round, False)
            meeting, begun = self.meeting, self._begun
            if meeting is not None and request.round > meeting.round and self._merges_in(request.round):
                if not meeting.wanted:  # none of those meetings is passed over, so that it first ends its round
                    meeting.wanted = True
                    await self._trainer.interrupt()
            elif meeting is not None and request.round >= meeting.round:
                comes = meeting.be_met(peer, request.round)
                if comes or request.round == meeting.round:
                    break
            await begun.wait()
        if comes:
            await self._trainer.interrupt()
        return MeetReply(meeting.round, comes)

    async def _on_settle(self, peer: PeerId, request: SettleRequest) -> SettleReply:
        admit(self._parts, peer, request.run_id, stands=self._state is not None)
        meeting = self.meeting
        if meeting is not None and (peer, request.round) == (meeting.peer, meeting.round):
            return SettleReply(await meeting.settle(waits=request.waits))
        return SettleReply(self._past.get((peer, request.round), False))

    # --- rounds -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> OuterState:
        """phi and m of this node."""
        if self._state is None:
            raise RuntimeError("this node stands nowhere yet")
        return self._state

    @property
    def place(self) -> Place | None:
        if self._state is None:
            return None
        members = (self._parts.me, *self._parts.membership.members())
        return Place(self._done, self._hash, members, elapsed=trio.current_time() - self._ended)

    @property
    def _done(self) -> int:
        """Rounds that this node is behind: its last one is not over before it has merged."""
        return min(self._round, (self._last_round or 0) - 1) if self._merging else self._round

    def _expected(self) -> PeerId | None:
        """Whom this node meets in this round, by what it knows."""
        now = trio.current_time()
        members = [p for p in self._parts.membership.members() if self._absent.get(p, 0.0) <= now]
        return partner(self._parts.run_id, self._round, self._parts.me, members)

    async def run_round(self) -> RoundResult:
        steps = 0 if self._merging else self._spec.inner.steps_in(self._round)
        meeting, worked, exchanged, met = await self._once(steps)
        if self._merging:
            await self._merge()
        elif meeting.ahead > meeting.round + BEHIND:
            raise Overtaken(f"others are at round {meeting.ahead}, and this node at {meeting.round}")
        if met is not None:
            self._deadline.observe(exchanged)
        round = min(meeting.round, self._round - 1)  # of a pause in the merge, the last
        loss = await loss_of(self._trainer) if self._spec.inner.measured_after(round) else math.nan
        seconds, self._ended = trio.current_time() - self._ended, trio.current_time()
        who = (self._parts.me,) if met is None else (self._parts.me, met)
        ended = round, self._hash, loss, worked, seconds, len(who)
        return RoundResult(*ended, counted=who, stages={"exchange": exchanged}, apart=self.apart)

    async def _merge(self) -> None:
        assert self._last_round is not None
        met = False
        while self._round < self._last_round + MERGES:
            met |= (await self._once(0))[-1] is not None
        if not met and (stands := await self._stands()) and stands[0][1].round == self._last_round:
            await self._stand_with(stands, 0, self.state)  # these have merged without this node, as in a pause of it
        await self._stand_on(self._last_round, self.state)
        self._merging = False

    async def _once(self, steps: int) -> tuple[Meeting, TrainStats, float, PeerId | None]:
        """Take so many steps, meet, and move on by what came of it: the meeting, its seconds, who was met."""
        before, size = self.state, self._trainer.layout.parameters
        split, whole = self._weights.encoded_size(size), self._size
        meeting = Meeting(self._parts, self._round, self._expected(), size=whole)
        offered = memoryview(meeting.offered)
        self.phase, ended = "training", False
        try:
            async with trio.open_nursery() as nursery:
                await self._parts.runner(lambda: self._weights.encode(before.parameters, offered[:split]))
                meeting.grow(split)
                meeting.open()
                self.meeting = meeting
                self._news()
                nursery.start_soon(meeting.run)
                worked = await self._train(meeting, steps)
                gradient = await self._unsettled()
                if not await self._parts.is_whole(gradient):
                    gradient, worked = np.zeros_like(gradient), NOTHING
                self.phase = "exchanging"
                began = trio.current_time()
                if meeting.peer is not None:
                    encode = partial(self.feedback.encode_range, 0, size, out=offered[split:])
                    try:
                        await self._parts.runner(partial(encode, gradient))
                    except CodecError as error:  # beyond float32, with what was left over
                        logger.warning("round %d: local work cannot be sent and is dropped: %s", meeting.round, error)
                        gradient, worked = np.zeros_like(gradient), NOTHING
                        await self._parts.runner(partial(encode, gradient))
                    meeting.grow(whole)
                    step = worked.seconds / max(1, worked.steps)  # the other may have to end one as well
                    await meeting.meet(within=self._deadline.seconds() + step)
                meeting.close()  # at once: who asks from now on would be told that this node comes, and wait in vain
                nursery.cancel_scope.cancel()
            ended = True
        finally:
            if not ended:  # cancelled: the other waits for nothing more
                await meeting.give_up()
            meeting.close()
            if meeting.peer is not None:
                self._past[meeting.peer, meeting.round] = meeting.counts
            self.meeting, self.phase = None, "waiting"
            if ended or meeting.counts:  # the other may count on it, so nothing may come between
                with trio.CancelScope(shield=True):
                    met = await self._take(meeting, gradient)
            else:
                self.feedback.rollback()
        if meeting.absent and meeting.peer is not None:
            self._absent[meeting.peer] = trio.current_time() + ABSENT_FOR
        return meeting, worked, trio.current_time() - began, met

    def _news(self) -> None:
        self._begun.set()
        self._begun = trio.Event()

    async def _train(self, meeting: Meeting, steps: int) -> TrainStats:
        """Inner steps until H, or until somebody waits. A trainer that dies costs its steps, not the round."""
        while steps and not meeting.wanted:
            with suppress(TrainerDied):
                return await self._trainer.train(round=meeting.round, steps=steps, seconds=math.inf)
        return NOTHING

    async def _unsettled(self) -> Vector:
        """The pseudo-gradient, (P,): what the trainer did since phi, but for what is in the residual already."""
        start, settled = self.state.parameters, self._settled
        return await self._parts.runner(lambda: pseudo_gradient(start, self._trainer.parameters(), settled))

    async def _take(self, meeting: Meeting, gradient: Vector) -> PeerId | None:
        """Take the step that the meeting led to, or the own one alone; who was met."""
        before, size = self.state, self._trainer.layout.parameters
        outer = MERGE if self._merging else self._spec.outer
        received, split = meeting.received, self._weights.encoded_size(size)
        round = max(meeting.round + 1, meeting.ahead if meeting.ahead <= meeting.round + BEHIND else 0)

        def pair() -> OuterState:
            assert received is not None
            weights = self._weights.decode(received[:split], size)
            own, other = (self._codec.decode(raw[split:], size) for raw in (memoryview(meeting.offered), received))
            after = gossip_step(before, own, other, weights, lr=outer.lr, momentum=outer.momentum)
            between = norm_in_float64(weights - before.parameters)
            self.apart = between / max(norm_in_float64(weights), 1e-30)
            return after

        def alone() -> OuterState:
            whole = np.add(gradient, self.feedback.export())
            return gossip_step(before, whole, None, None, lr=outer.lr, momentum=outer.momentum)

        async def step(taken: Any) -> OuterState | None:
            try:
                after: OuterState = await self._parts.runner(taken)
            except (CodecError, ValueError) as error:
                logger.error("round %d moves nothing: %s", meeting.round, error)
                if isinstance(error, CodecError) and meeting.peer is not None:
                    self.lies.note(meeting.peer, str(error), Kind.BREACH)
                return None
            return after

        met = meeting.peer if meeting.counts else None
        after = await step(pair) if met is not None else None
        if after is None:
            self.feedback.rollback()
            met, after = None, await step(alone)
            self.feedback.drop_range(0, size)
        self.feedback.commit()
        self._merging = self._merges_in(round)
        await self._stand_on(round, after or before)
        return met

    async def _stand_on(self, round: int, state: OuterState) -> None:
        layout = self._trainer.layout
        self._hash = await self._parts.runner(lambda: state_hash(round, layout, state))
        self._round, self._state, self._settled = round, state, None
        self._trainer.load(state.parameters)
        self.catch_up.serve_state(round, self._hash, state)
        self._news()

    def _merges_in(self, round: int) -> bool:
        return self._last_round is not None and round >= self._last_round

    # --- finding a place, and leaving -------------------------------------------------------------------------------

    async def find_place(self, begin: Begin) -> None:
        self.phase, self._last_round = "waiting", begin.last_round
        saved = begin.saved
        if saved is not None:
            self.feedback.restore(saved.residual)
        state = saved.state if saved is not None else OuterState.start(self._trainer.parameters())
        round = saved.round if saved is not None else 0
        if await self._join(round, state, within=begin.patience):
            return
        await self._stand_on(round, state)
        with trio.move_on_after(begin.wait_seconds):
            while len(self._asked) < begin.wait_peers:
                await self._begun.wait()
        self._ended = trio.current_time()

    async def _join(self, round: int, state: OuterState, *, within: float) -> bool:
        """Stand with members, with this state where it is near enough; False where none answers in so many seconds."""
        began = trio.current_time()
        try:
            while trio.current_time() < began + within:
                stands = await self._stands()
                while stands:  # who is furthest, or says so, and gives no state keeps nobody from the others
                    if await self._stand_with(stands, round, state):
                        self._ended = trio.current_time()
                        return True
                    furthest = stands[0][1].round
                    stands = [each for each in stands if each[1].round < furthest - 1]
                await self._parts.look_again(began, every=ASK_EVERY)
        finally:
            self._parts.observer.warn("alone", None)
        return False

    async def _stands(self) -> list[tuple[PeerId, Stand]]:
        """Where some members stand, who are furthest first."""
        asked, query = self._parts.nearby(ASK_AT_ONCE), RunQuery(self._parts.run_id)
        stands = await self._parts.rpc.call_all(asked, "gossip.stand", query, Stand, timeout=STAND_TIMEOUT)
        possible = [one for one in stands if one[1].round <= most_rounds()]
        return sorted(possible, key=lambda one: one[1].round, reverse=True)

    async def _stand_with(self, stands: list[tuple[PeerId, Stand]], round: int, state: OuterState) -> bool:
        """Go on from `state` of `round`, where members are near; else from the state of one of them."""
        furthest = stands[0][1].round
        layout = self._trainer.layout
        own = await self._parts.runner(lambda: state_hash(round, layout, state))
        if furthest - round <= BEHIND and (round > 0 or own in {stand.state_hash for _, stand in stands}):
            await self._stand_on(max(round, furthest), state)
            return True
        self.phase = "catching-up"
        began = trio.current_time()
        sources = [peer for peer, stand in stands if stand.round >= furthest - 1]
        try:  # no two have the same: one gives it whole, drawn by lot, so that not all joiners ask the same one
            source = self._parts.rng.choice(sources)
            at, hash, fetched = await self.catch_up.fetch([source], observer=self._parts.observer)
        except CatchUpFailed as error:
            logger.warning("the state of %s could not be fetched, trying again: %s", source, error)
            return False
        finally:
            self.phase = "waiting"
        if self._state is not None:
            await self._return_work()
        await self._stand_on(max(at, furthest), fetched)
        seconds = trio.current_time() - began
        logger.info("caught up with round %d in %.1f s", at, seconds)
        self._parts.observer.caught_up(at, hash, seconds)
        return True

    async def regain_place(self) -> None:
        if self._state is not None:
            await self._join(self._round, self._state, within=NOTICE_MEMBERS_FOR)

    async def watch(self) -> None:
        await trio.sleep_forever()

    async def leave(self) -> None:
        if self._state is not None:
            await self._return_work()
            self._trainer.load(self.state.parameters)
            self._settled = None

    async def _return_work(self) -> None:
        """Put what was trained since phi into the residual, for the next meeting."""
        gradient = await self._unsettled()

        def add() -> None:
            self.feedback.rollback()
            if self.feedback.give_back(gradient):
                self._settled = gradient if self._settled is None else self._settled + gradient

        await self._parts.runner(add)

    # --- what is shown and kept -------------------------------------------------------------------------------------

    def saved(self) -> Saved:
        members = (self._parts.me, *self._parts.membership.members())
        return Saved(self._done, self.state, self.feedback.export(), members, self.name)

    def status(self) -> Mapping[str, Any]:
        return {"apart": round(self.apart, 6)}

    def measure(self, metrics: Metrics) -> None:
        metrics.show(APART, lambda: self.apart)
        self.lies.measure(metrics)
