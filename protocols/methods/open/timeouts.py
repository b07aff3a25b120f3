"""How long this node waits in a round: for commits, cuts, reveals, scores, a roster, and heads behind it.

Each wait ends when nobody who is there is lacking, and at the latest after as long as this swarm was seen to need
(`liveness.AdaptiveDeadline`): nobody waits for who is dead, away or paused. Too few judges end the round empty, at
once where they are known to be gone. `Timers` tells `chain.duty` which waits are over.

Judges who began a round at different times, or learned different waits, would wait for one another in turn. So a node
believes more than a third of the judges that the wait for commits is over, by their cuts, a leader that the one for
scores is, by its roster, and more than a third of the validators that the round ended empty, by heads.

Where not all validators follow a block, nor most are locked on it, nobody moves to it before those who may come had
time to: who was frozen or cut off for seconds is behind, and two sides that go on alone have two histories.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import trio

from swarmnode.protocols.chain.duty import RoundView
from swarmnode.protocols.chain.rules import empty_id
from swarmnode.protocols.chain.state import volunteers
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import AdaptiveDeadline

logger = logging.getLogger(__name__)

QUIET = 0.3  # seconds in which what is waited for usually comes; only then are its authors pinged
AGREED = 0.5  # seconds in which all usually follow one roster; then those who see that most do are locked on it
SHORTEST_EMPTY = 1.0  # seconds of a round that ends empty as too few judges are there: they may come back
WAITS = 4  # of validators for judges, in a round; each takes the floor where one is silent: others give them that time
APART = 3.0  # times as long as usual, heads are waited for: others may have begun the round later
STANDSTILLS = 3  # of this node, after each of which it waits again for heads; more are no reason to wait for ever
LATE_BY = 30  # seconds beyond that for which nobody moves alone while others may come: they may be attempts behind
GONE_AFTER = 15  # seconds of suspicion after which no head of a validator is waited for
WATCHED = 16  # validators of whom one must be there for those who are none to wait


class Timeouts:
    """The waits of one node's rounds, with what they took so far."""

    def __init__(self, parts: Context, store: ChainStore) -> None:
        self._me, self._exchange, self._liveness, self._store = parts.me, parts.spec.exchange, parts.liveness, store
        self._members = parts.membership.members
        self._refused = parts.sync.neighbours.equivocators  # whom nobody hears any more
        self._deadlines = {
            phase: AdaptiveDeadline(floor=self._exchange.deadline_floor, ceiling=self._exchange.deadline_ceiling)
            for phase in ("commits", "cuts", "more cuts", "reveals", "scores", "roster", "heads", "validators")
        }
        self._liveness.on_suspicion(store.notify)

    async def keep_time(self, context: RoundView) -> None:
        """Say which waits of the round are over; see `duty.Timers`. Only validators need to know."""
        if self._me not in context.chain.validators:
            return
        log, chain = context.log, context.chain
        needed, order, floor = log.quorum, log.leaders, self._exchange.deadline_floor
        closes = context.began + chain.window / 1000 + floor
        expected, judges = self._expected(context), set(log.judges)

        def uncommitted() -> set[PeerId]:
            too_late = context.own.cut is not None or 3 * len(log.cut_by) > len(judges)
            return set() if too_late else expected - log.arrived.keys()

        await self._wait_for("commits", uncommitted, since=context.began, until=closes)
        self._set(context, commits=True)
        cut = trio.current_time()
        await self._wait_for("cuts", lambda: set() if len(log.cut_by) >= needed else judges - log.cut_by.keys())
        if len(log.cut_by) < needed:
            latest = self._due(context) + self._patience("cuts")
            await self._wait_for_late(context, judges, lambda: log.cut_by, latest)
        if len(log.cut_by) >= needed:
            await self._wait_for("more cuts", lambda: judges - log.cut_by.keys(), until=trio.current_time() + floor)
            await self._wait_for("reveals", lambda: self._not_here(context))
            self._set(context, contributions=True)
            await self._wait_for("scores", partial(self._unscored, context))
            if len(log.scores_by_judge()) < needed:  # others may have waited for contributions for longer than this
                latest = trio.current_time() + self._patience("reveals") + self._patience("scores")
                await self._wait_for_late(context, set(log.cut_by), log.scores_by_judge, latest)
            context.heard = frozenset(said.author for said in log.quotable(self._store.norms(log)).scores)
            self._set(context, scores=True)
        if len(log.scores_by_judge()) >= needed:
            for attempt, leader in enumerate(order):
                self._set(context, attempt=attempt)
                await self._wait_for("roster", partial(self._without_roster, context, leader))
                if not self._without_roster(context, leader):
                    await trio.sleep(self._patience("heads"))  # for heads; the round ends meanwhile
        else:
            logger.info("round %d: too few judges are there", chain.round)
            await trio.sleep_until(cut + SHORTEST_EMPTY)
        self._set(context, attempt=len(order))

    async def _wait_for_late(
        self, context: RoundView, judges: set[PeerId], received: Callable[[], Mapping[PeerId, object]], latest: float
    ) -> None:
        """Wait until a quorum is heard, while judges are there for that and in this round; `latest` in trio time.

        They may have begun the round, or a wait in it, later than this node.
        """
        needed, empty, validators = context.log.quorum, empty_id(context.chain), len(context.chain.validators)

        def settled() -> bool:
            there = received().keys() | {judge for judge in judges if self._is_there(judge)}
            gave_up = 3 * self._store.tree.support(empty, self._store.heads()) > validators
            return len(received()) >= needed or len(there) < needed or gave_up

        with self._liveness.watching(judges - {self._me}):
            await self._store.until(settled, deadline=latest)

    async def look_for_validators(self, context: RoundView) -> None:
        """Notice that nobody will end the round: validators are gone, or there and silent; for who is no validator."""
        validators = context.chain.validators[:WATCHED]
        if self._me in context.chain.validators:
            return
        due, latest = self._due(context), self._given_up(context)
        await trio.sleep_until(due)
        with self._liveness.watching(validators):
            gone = await self._store.until(lambda: not any(map(self._is_there, validators)), deadline=latest)
        why = "no validator is there" if gone else f"its validators have been silent for {latest - due:.0f} s"
        logger.warning("round %d: %s, so it ends empty", context.chain.round, why)
        self._set(context, attempt=len(context.log.leaders))

    def _due(self, context: RoundView) -> float:
        """When a round's roster may be expected, in trio time, by who is no validator."""
        floor = self._exchange.deadline_floor
        return context.began + (floor if context.follows_nothing else context.chain.window / 1000 + 2 * floor)

    def _given_up(self, context: RoundView) -> float:
        """From when on a round may end empty although validators are there who have not said so, in trio time."""
        return self._due(context) + max(self._patience("validators"), WAITS * self._exchange.deadline_floor)

    # --- heads ------------------------------------------------------------------------------------------------------

    def is_settled(self, context: RoundView, wanted: bytes, nursery: trio.Nursery) -> bool:
        """Whether the next block towards `wanted` is decided, or those who are lacking do not come, or had time to."""
        tree, tip = self._store.tree, context.chain.tip
        fork = tree.fork_point(tip, wanted)
        first = tree.path(wanted)[len(tree.path(fork))]
        at = tree[fork].chain
        heads, locked, now = self._store.heads(), self._store.locked(), trio.current_time()
        since, waiting = context.awaited
        if tree.is_decided(first.id, heads, locked):
            self._deadlines["heads"].observe(now - since if waiting == first.id else 0.0)
            if first.roster is not None:
                self._deadlines["validators"].observe(max(0.0, now - self._due(context)))
            return True
        for behind in heads, tree.held(first.id, heads, locked):
            here = (peer for peer, head in behind.items() if first.id in tree.ancestry(head))
            context.lacking = sorted({*at.validators}.difference(here, {self._me}))
            if not any(map(self._is_there, context.lacking)):
                context.lockable = first.id  # all who are there follow it
            if any(map(self._may_come, context.lacking)):
                break
            if behind is not heads or not tree.has_most(first.id, heads):  # or too few do for locks
                return True
        if waiting != first.id:
            until = now + APART * self._patience("heads")
            if self._me not in at.validators and first.roster is None and fork == tip:  # a few who gave up early
                until = max(until, self._given_up(context))
            context.awaited, context.had_time = (now, first.id), False
            nursery.start_soon(self._await_heads, context, first.id, at.validators, until)
        return context.had_time

    async def _await_heads(self, context: RoundView, block: bytes, of: Iterable[PeerId], until: float) -> None:
        """Notice when validators that are waited for are gone, or had time: until then, in trio time, to agree on one
        block, and LATE_BY more to follow this one."""
        with self._liveness.watching([peer for peer in of if peer != self._me]):
            if any(map(self._may_come, context.lacking)):  # of some it is known at once that they do not
                await self._sleep_awake(trio.current_time() + AGREED)
                context.lockable = block
                self._store.notify()
                await self._sleep_awake(until)
                self._set(context, heads=True)
            for second in range(LATE_BY):
                if any(map(self._may_come, context.lacking)):
                    await trio.sleep(1.0)
                if second == LATE_BY // 2:
                    self._set(context, locks=True)
        context.lockable = block
        context.had_time |= context.awaited[1] == block
        self._store.notify()

    async def _sleep_awake(self, until: float) -> None:
        """Sleep until then, in trio time, and on where this node stood still: what came meanwhile is yet to be read."""
        since = trio.current_time()
        await trio.sleep_until(until)
        await trio.sleep(QUIET)  # what notices a standstill goes on at the same moment
        for _ in range(STANDSTILLS):
            if self._liveness.stalled_since(since):
                since = trio.current_time()
                await trio.sleep(self._patience("heads"))

    # --- who is lacking ---------------------------------------------------------------------------------------------

    def _expected(self, context: RoundView) -> set[PeerId]:
        """Whose commits are worth waiting for: who had work accepted lately; where nobody had, who may begin."""
        lately = {worked.author for roster in context.chain.history[-2:] for worked in roster}
        if not lately:
            lately = {self._me, *context.chain.validators, *self._store.newcomers()}
        members = len(self._members()) + 1
        return {peer for peer in lately if volunteers(context.chain, self._store.rules, peer, members)}

    def _not_here(self, context: RoundView) -> set[PeerId]:
        """Authors of listed commits whose contribution this judge does not hold."""
        log = context.log
        here = {*self._store.norms(log), *context.judged}
        lacking = {log.commits[id].author for id in log.listed() if id not in here and id in log.commits}
        return lacking if self._me in log.judges else set()

    def _unscored(self, context: RoundView) -> set[PeerId]:
        """Who cut and did not open scores; nobody once a leader gave them up and all had the floor for each attempt."""
        log, now, scored = context.log, trio.current_time(), context.log.scores_by_judge().keys()
        if len(scored) >= log.quorum:
            context.scored_since = min(context.scored_since, now)
            valid = log.rosters.keys() & {*self._store.tree.children(context.chain.tip)}
            attempts = 1 + min((log.rosters[id].what.attempt for id in valid), default=math.inf)
            if now >= context.scored_since + attempts * self._exchange.deadline_floor:  # a liar may be the first
                return set()
        return log.cut_by.keys() - scored

    def _without_roster(self, context: RoundView, leader: PeerId) -> set[PeerId]:
        """The leader, while no roster of this round is here whose rules hold."""
        valid = self._store.tree.children(context.chain.tip)  # the empty one is among them once somebody follows it
        return {leader} if context.log.rosters.keys().isdisjoint(valid) else set()

    def _is_there(self, peer: PeerId) -> bool:
        gone = self._liveness.is_suspected(peer) or self._store.is_away(peer) or peer in self._refused
        return peer == self._me or not gone

    def _may_come(self, peer: PeerId) -> bool:
        """Whether a validator may yet follow what others do: it is there, or was lately, and is frozen or cut off."""
        missed = self._liveness.is_suspected(peer) and self._liveness.suspected_for(peer) < GONE_AFTER
        return self._is_there(peer) or (missed and not self._store.is_away(peer))

    # --- waiting ----------------------------------------------------------------------------------------------------

    async def _wait_for(
        self, phase: str, lacking: Callable[[], set[PeerId]], *, since: float | None = None, until: float = float("inf")
    ) -> None:
        """Wait until nobody is lacking who is there, or as long as the phase may take; learn how long it took.

        Where many who are there are lacking at its end, the network is slower than it was, and the whole wait is
        learned from. A few who keep silent, as who joins anew does, would so make every round longer than the last:
        then it is what the others took. A roster has one who is lacking.

        `since`: when it began, in trio time; `until`: it ends then in any case.
        """
        began = trio.current_time() if since is None else since
        deadline = min(began + self._patience(phase), until)
        left, came = lacking(), began  # who is lacking, and when the last of those who came did
        crowd, there = max(len(left), len(self._store.block.chain.validators)), len(left)

        def whole() -> bool:
            nonlocal left, came
            if len(now := lacking()) < len(left):
                came = trio.current_time()
            left = now
            return not left

        if not await self._store.until(whole, deadline=min(deadline, trio.current_time() + QUIET)):
            with self._liveness.watching(peer for peer in left if peer != self._me):
                await self._store.until(lambda: whole() or not any(map(self._is_there, left)), deadline=deadline)
                there = sum(map(self._is_there, left))
        few = phase != "roster" and 2 * there < crowd
        if not left or few:
            self._deadlines[phase].observe(came - began)
        elif trio.current_time() >= deadline:  # else who is gone made it short
            self._deadlines[phase].observe(trio.current_time() - began)

    def _patience(self, phase: str) -> float:
        """Seconds that a phase may take. Who has waited for none yet, as a new judge, allows the round's window."""
        return self._deadlines[phase].seconds(first=self._store.block.chain.window / 1000)

    def _set(self, context: RoundView, **timers: bool | int) -> None:
        context.timers = replace(context.timers, **timers)  # type: ignore[arg-type]
        self._store.notify()
