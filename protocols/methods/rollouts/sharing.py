"""One node's part in sharing rollouts: `Rollouts`. The package's first lines tell the protocol's story.

How groups travel: each has a budget of copies, of which whoever holds it hands half to a neighbour. This is spray and
wait in its binary form (Spyropoulos et al., WDTN 2005): a group with c copies is handed over c − 1 times in all and is
with its last holder after log2(c) hops, however large the swarm. What a node sends in a turn goes to at most FAN peers,
each group to one of them, so that calls do not grow with neighbours either. Neighbours have their turns in an order
drawn anew each time: pure chance would leave some with a third of what others hear.

A group is offered before it is given, so one that a peer has already costs a hundred bytes. A peer that says that it
has no room is left alone for as long as it says. A copy that peers with room declined TRIES times is let go.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from swarmnode.protocols.calls.rpc import CallError, LifecycleGuard, Refuse
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.rollouts.intake import GroupIntake
from swarmnode.protocols.methods.rollouts.messages import (
    GIVE,
    LONGEST_WAIT,
    MAX_GIVEN,
    MAX_OFFERED,
    OFFER,
    RECENT,
    SLOWEST,
    TIMEOUT,
    Give,
    GroupOffer,
    InvalidGroup,
    OfferAnswer,
    OfferedGroup,
    RecentQuery,
    SignedGroup,
    seal,
)
from swarmnode.protocols.methods.rollouts.pool import RolloutLimits, RolloutPool, SharingRules
from swarmnode.protocols.methods.trainer import TrainerDied, TrainerHeld
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind
from swarmnode.protocols.runner import TimedRunner
from swarmnode.protocols.wire import Empty
from swarmnode.training.rl.groups import RefusedGroup, RolloutGroup, score, told
from swarmnode.training.rl.tasks import checked_here

log = logging.getLogger(__name__)

TICK = 1.0  # seconds between two looks at what to pass on, jittered by a fifth: the time of one hop
RECENT_GROUPS = MAX_OFFERED  # asked for by who was alone
ASK_EVERY = 10.0  # seconds between two questions for what is recent, while too little comes by itself
ENTRIES = Allowance(rate=64, burst=512)  # groups that one peer may offer here
RECENT_QUERIES = Allowance(rate=0.2, burst=6)  # of one peer: one in ASK_EVERY, and some
FAN = 2  # peers that are offered groups in one turn
TRIES = 8  # offers of one copy that may be declined
WAITING = 1024  # groups to hand on; the oldest are let go
LATER = 5.0  # seconds that a peer which did not answer is left alone

HELD = Metric("swarmnode_rollouts_held", GAUGE, "rollout groups held", "whose")
HELD_BYTES = Metric("swarmnode_rollout_bytes", GAUGE, "bytes of rollout groups held", "whose")
EVENTS = Metric("swarmnode_rollouts_total", COUNTER, "what happened with rollout groups, some of it in bytes", "what")
SHARE_SECONDS = Metric(
    "swarmnode_rollout_share_seconds_total",
    COUNTER,
    "CPU seconds of signing, checking and choosing rollout groups; neither transport nor learning",
)
REFUSED = Metric("swarmnode_rollouts_refused_total", COUNTER, "rollout groups of others not learned from", "why")


@dataclass
class _Load:
    group: SignedGroup
    copies: int  # this node's own included
    known: set[PeerId]  # who has it, as far as is known
    tries: int = TRIES
    offered: bool = False  # to somebody just now: half of its copies are spoken for


class Rollouts:
    """Publishes this node's groups, passes on those of others, and keeps a pool of them."""

    def __init__(self, parts: Context, rules: SharingRules, *, limits: RolloutLimits, takes: bool = True) -> None:
        """Without `takes` this node gives only."""
        self._parts, self._rules, self._takes = parts, rules, takes
        self.limits = limits
        self.runner = TimedRunner(parts.runner)
        self.counter = parts.now()  # of the next group: grows over restarts, too, as long as the clock does
        self.pool = RolloutPool(parts.me, rules, now=parts.now, limits=self.limits.pool)
        self._intake = GroupIntake(parts, rules, self.pool, limits=self.limits, runner=self.runner)
        self.violations, self.counts = self._intake.violations, self._intake.counts
        self._entries = Budget[PeerId](ENTRIES)
        self._queries = Budget[PeerId](RECENT_QUERIES)
        self._loads: OrderedDict[bytes, _Load] = OrderedDict()  # what is to be handed on, the oldest first
        self._deck: list[PeerId] = []  # whose turn is still to come, before everybody's comes again
        self._unchecked: list[tuple[SignedGroup, int, PeerId]] = []  # with their copies, and who gave them
        self._checking: list[tuple[SignedGroup, int, PeerId]] = []  # likewise: in the trainer's hands
        self._busy: dict[PeerId, list[_Load]] = {}  # peers that are offered what spreads, and that
        self._left_until: dict[PeerId, float] = {}  # peer -> trio time until which it is left alone
        self._nursery: trio.Nursery | None = None
        self._ask_at = 0.0  # trio time at which a neighbour is asked what is recent, where that is of use
        self._was_alone = True  # and nobody was asked since
        self._hurry = trio.Event()
        self._open = LifecycleGuard("this node does not share rollouts now")
        parts.rpc.serve(OFFER, GroupOffer, self._on_offer, guard=self._open)
        parts.rpc.serve(GIVE, Give, self._on_give, guard=self._open)
        parts.rpc.serve(RECENT, RecentQuery, self._on_recent, guard=self._open)

    # -- what this node does

    async def publish(self, groups: Sequence[RolloutGroup], *, trainer: PeerId = "") -> tuple[SignedGroup, ...]:
        """Sign these groups, keep them apart as own ones, and let them spread while `watch` runs.

        `trainer`: for whose policy they are, where that is not this node's.

        Returns at once where nobody is there: a node alone learns alone. One too large to travel is left out.
        """
        parts = self._parts
        first, made_at = self.counter, parts.now()
        self.counter += len(groups)

        def work() -> list[SignedGroup]:
            sealing = partial(
                seal, run_id=parts.run_id, author=parts.me, made_at=made_at, sign=parts.network.sign, trainer=trainer
            )
            made = []
            for counter, group in enumerate(groups, first):
                try:
                    made.append(sealing(group, counter=counter))
                except InvalidGroup as error:
                    log.warning("%s", error)
            return made

        sealed = await self.runner(work)
        for group in sealed:
            self.pool.keep(group)
            self._hand_on(group, self.limits.copies)
        self._let_go()
        self.counts["published"] += len(sealed)
        self._hurry.set()
        return tuple(sealed)

    def forget_before(self, version: int) -> None:
        """Hand on no more own groups that were written before that version: they came too late to be of use."""
        for group in self.pool.own():
            if group.packed.version < version:
                self._loads.pop(group.id, None)

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take, pass on and answer until cancelled. What is held stays here, for `watch` to go on later."""
        async with self._open.open(), trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                while True:
                    with trio.move_on_after(TICK * self._parts.rng.uniform(0.8, 1.2)):
                        await self._hurry.wait()
                    self._hurry = trio.Event()
                    with self.runner.counted():
                        self._turn(nursery)
            finally:
                self._nursery = None  # before it closes: a call may be answered in the same turn
                self._was_alone = True

    def stats(self) -> dict[str, Any]:
        """What sharing came to since this node started, for the control API; `waiting` are groups to be handed on.

        `alone`: no other member is connected now, so that this node learns from its own rollouts only.
        """
        alone, events = not self._rules.peers(), dict(self.counts)
        return {"pool": self.pool.stats(), "alone": alone, "waiting": len(self._loads), "events": events}

    def measure(self, metrics: Metrics) -> None:
        metrics.show(HELD, lambda: {"own": len(self.pool.own()), "others": len(self.pool)})
        metrics.show(HELD_BYTES, lambda: {"own": self.pool.own_size, "others": self.pool.size})
        metrics.show(EVENTS, lambda: self.counts)
        metrics.show(SHARE_SECONDS, lambda: self.runner.seconds)
        metrics.show(REFUSED, lambda: self.pool.refused)
        self.violations.measure(metrics)

    # -- passing on

    def _turn(self, nursery: trio.Nursery) -> None:
        self.pool.expire()
        self._let_go()
        here = list(self._rules.peers())
        if not here:
            self._was_alone, self._ask_at = True, 0.0
            return
        wanted = RECENT_GROUPS if self._was_alone else min(RECENT_GROUPS, 2 * self.pool.lacking)
        if wanted and self._takes and trio.current_time() >= self._ask_at:
            self._ask_at = trio.current_time() + ASK_EVERY
            nursery.start_soon(self._ask_recent, self._parts.rng.choice(here), wanted)
        if self._unchecked and not self._checking:
            nursery.start_soon(self._check)
        self._offer_some(set(here), nursery)

    async def _check(self) -> None:
        """Have the trainer check what came, where the daemon cannot; hand on what teaches, and let go of the rest.

        One call at a time: while a trainer samples or is started again, groups wait, for as long as the pool has them.
        What it dies of is not given to it again.
        """
        came = self._checking = self._unchecked
        self._unchecked = []
        try:
            scores = await self._rules.score([group for group, _, _ in came])
        except (TrainerHeld, trio.Cancelled) as error:  # as by a pause
            self._unchecked = [*came, *self._unchecked]
            if isinstance(error, trio.Cancelled):
                raise
            log.debug("what came is not checked yet: %s", error)
        except TrainerDied:
            for group, _, _ in came:
                self.pool.refuse(group, "trainer-died")
        else:
            for (group, copies, giver), found in zip(came, scores, strict=True):
                if found["refused"]:
                    self.pool.refuse(group, found["refused"])
                else:
                    self._hand_on(group, copies, giver)
        finally:
            self._checking = []

    async def told(self, group: SignedGroup) -> dict[str, Any]:
        """A group as people are shown it: question, key, answers with what they earn. Raises RefusedGroup."""
        if checked_here(group.packed.task[0]):
            judged = self._parts.spec.rollouts.judge != "none"
            return await self.runner(lambda: told(score(group.author, group.group, judged=judged)))
        (found,) = await self._rules.score([group], texts=True)
        if found.get("answers") is None:
            raise RefusedGroup(found["refused"], found["why"])
        return found

    def _let_go(self) -> None:
        """Hand on no more, and have checked no more, what the pool has no more."""
        self._unchecked = [each for each in self._unchecked if self.pool.get(each[0].id) is not None]
        for id in [id for id in self._loads if self.pool.get(id) is None]:
            del self._loads[id]

    def _hand_on(self, group: SignedGroup, copies: int, giver: PeerId | None = None) -> None:
        """Hand on `copies` − 1 of a group, beside what is on its way already; not to those who know it."""
        known = {group.author, *([giver] if giver else [])}
        load = self._loads.get(group.id)
        if load is not None:
            load.copies += copies
            load.known |= known
        elif copies > 1:
            self._loads[group.id] = _Load(group, copies, known)
            while len(self._loads) > WAITING:
                self._loads.popitem(last=False)
                self.counts["not_handed_on"] += 1

    def _offer_some(self, here: set[PeerId], nursery: trio.Nursery) -> None:
        now = trio.current_time()
        self._left_until = {peer: until for peer, until in self._left_until.items() if until > now}
        for id in [id for id, load in self._loads.items() if here <= load.known]:
            del self._loads[id]  # in a small swarm, before its copies are used up
        batches: dict[PeerId, list[_Load]] = {peer: [] for peer in self._next(here)} if self._loads else {}
        for load in self._loads.values():
            if load.offered:
                continue
            open_to = [batch for peer, batch in batches.items() if peer not in load.known and len(batch) < MAX_OFFERED]
            if open_to:
                min(open_to, key=len).append(load)
        for peer, batch in batches.items():
            if batch:
                self._busy[peer] = batch
                for load in batch:
                    load.offered = True
                nursery.start_soon(self._offer, peer, batch)

    def _next(self, here: set[PeerId]) -> list[PeerId]:
        """The next peers in turn, at most FAN: everybody once, in an order drawn anew each time."""
        self._deck = [peer for peer in self._deck if peer in here]
        chosen: list[PeerId] = []
        for fresh in (False, True):
            if fresh and len(chosen) < FAN:
                self._deck = sorted(here.difference(chosen))
                self._parts.rng.shuffle(self._deck)
            free = [peer for peer in self._deck if peer not in self._busy and peer not in self._left_until]
            for peer in [peer for peer in free if self.violations.refuses(peer) is None][: FAN - len(chosen)]:
                self._deck.remove(peer)
                chosen.append(peer)
        return chosen

    async def _offer(self, peer: PeerId, batch: list[_Load]) -> None:
        if not batch:
            return
        try:
            halves = [(load.group, load.copies // 2) for load in batch]
            offered = tuple(OfferedGroup(group.id, group.author, group.size, copies) for group, copies in halves)
            offer = GroupOffer(self._parts.run_id, offered)
            self.counts["offered"] += len(batch)
            answer = await self._parts.rpc.call(peer, OFFER, offer, OfferAnswer, timeout=TIMEOUT)
            if answer.wait:
                self._left_until[peer] = trio.current_time() + answer.wait
            for index in answer.has:
                if index < len(batch):
                    batch[index].known.add(peer)
            wanted = [batch[index] for index in answer.wants if index < len(batch)]
            if not answer.wait:  # else it may take them later
                self._decline(batch[i] for i in set(range(len(batch))) - {*answer.wants, *answer.has})
            while wanted:
                wanted = await self._give(peer, wanted)
        except CallError as error:
            self._left_until[peer] = trio.current_time() + LATER
            log.debug("%s takes no rollouts for a while: %s", peer, error)
        finally:
            if self._busy.get(peer) is batch:  # and not what was offered as recent
                del self._busy[peer]
            for load in batch:
                load.offered = False

    async def _give(self, peer: PeerId, wanted: list[_Load]) -> list[_Load]:
        """Give as many as fit one message, one at the least; the rest."""
        size, given = 0, 0
        while given < len(wanted) and (not given or size + wanted[given].group.size <= MAX_GIVEN):
            size += wanted[given].group.size
            given += 1
        handed = [(load, load.copies // 2) for load in wanted[:given]]
        give = Give(self._parts.run_id, tuple(load.group.sealed for load, _ in handed))
        await self._parts.rpc.call(peer, GIVE, give, Empty, timeout=TIMEOUT + size / SLOWEST)
        for load, copies in handed:
            load.known.add(peer)
            load.copies -= copies
            if load.copies <= 1 and self._loads.get(load.group.id) is load:
                del self._loads[load.group.id]
            self.counts["given"] += 1
            self.counts["given_bytes"] += load.group.size
        return wanted[given:]

    def _decline(self, loads: Iterable[_Load]) -> None:
        for load in loads:
            load.tries -= 1
            if load.tries <= 0 and self._loads.pop(load.group.id, None) is not None:
                self.counts["not_handed_on"] += 1

    async def _ask_recent(self, peer: PeerId, count: int) -> None:
        query = RecentQuery(self._parts.run_id, count)
        if await self._parts.rpc.ask(peer, RECENT, query, Empty, timeout=TIMEOUT) is not None:
            self._was_alone, self.pool.lacking = False, 0
            self.counts["asked_recent"] += 1

    # -- answers

    async def _on_offer(self, peer: PeerId, offer: GroupOffer) -> OfferAnswer:
        admit(self._parts, peer, offer.run_id)
        if not self._takes:
            return OfferAnswer(wait=LONGEST_WAIT)
        if not self._entries.take(peer, len(offer.groups)):
            self.violations.note(peer, "offers too many rollout groups", Kind.LOAD)
            raise Refuse("busy", f"at most {ENTRIES.rate:g} groups a second may be offered here")
        with self.runner.counted():
            return self._intake.weigh(peer, offer)

    async def _on_give(self, peer: PeerId, give: Give) -> Empty:
        admit(self._parts, peer, give.run_id)
        for group, copies in await self._intake.take(peer, give.groups):
            if checked_here(group.packed.task[0]):
                self._hand_on(group, copies, peer)
            else:
                self._unchecked.append((group, copies, peer))
        return Empty()

    async def _on_recent(self, peer: PeerId, query: RecentQuery) -> Empty:
        """Offer one copy of each: whoever asks has them, and hands none on."""
        admit(self._parts, peer, query.run_id)
        if not self._queries.take(peer, 1):
            raise Refuse("busy", "asked too often what is recent")
        if self._takes and self._nursery is not None:
            recent = [*self.pool.own()[-max(1, query.count // 8) :], *self.pool.drawn(query.count, self._parts.rng)]
            hidden = {group.id for group, _, _ in (*self._unchecked, *self._checking)}
            loads = [_Load(each, 2, {each.author}) for each in recent if each.author != peer and each.id not in hidden]
            self._nursery.start_soon(self._offer, peer, loads[: query.count])
        return Empty()
