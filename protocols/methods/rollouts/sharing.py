"""One node's part in sharing rollouts: `Rollouts`. The package's first lines tell the protocol's story."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from swarmnode.protocols.calls.rpc import CallError, LifecycleGuard, Refuse, Rpc
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.rollouts.gate import Gate, Rates
from swarmnode.protocols.methods.rollouts.intake import LARGEST, Check, Intake
from swarmnode.protocols.methods.rollouts.messages import (
    GET,
    GIVE,
    LONGEST_WAIT,
    MAX_OFFERED,
    OFFER,
    RECENT,
    TIMEOUT,
    Answer,
    Get,
    Give,
    Got,
    Offer,
    Recent,
    RecentQuery,
    Sealed,
    Thanks,
    content_key,
)
from swarmnode.protocols.methods.rollouts.pool import Pool, PoolLimits, PoolStats, Standing, full_standing
from swarmnode.protocols.methods.rollouts.signed import Sign, SignedGroup, SignedHeader, Verify, seal
from swarmnode.protocols.methods.rollouts.spent import Spent
from swarmnode.protocols.methods.rollouts.spreading import Spreader
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.violations import Kind, Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.training.rl.groups import RolloutGroup

log = logging.getLogger(__name__)

PROTOCOL = "rollouts"
TICK = 1.0  # seconds between two looks at what to pass on, jittered by a fifth: the time of one hop
RECENT_GROUPS = MAX_OFFERED  # asked for by who was alone
ASK_EVERY = 10.0  # seconds between two questions for what is recent, while too little comes by itself
RECENT_BYTES = 128 * 1024  # of their headers
ENTRIES = Allowance(rate=64, burst=512)  # groups that one peer may offer here
IN_ALL = Rates(groups=Allowance(100, 1000), bytes=Allowance(40_000, 8 << 20))  # within 50 kB/s with all calls
EACH_AUTHOR = Rates(groups=Allowance(8, 256), bytes=Allowance(10_000, 3 << 20))  # of a fast tiny policy
EACH_SENDER = Rates(groups=Allowance(32, 512), bytes=Allowance(20_000, 4 << 20))
RECENT_QUERIES = Allowance(rate=0.3, burst=8)  # of one peer: two calls in ASK_EVERY, and some

HELD = Metric("swarmnode_rollouts", GAUGE, "rollout groups held", "whose")
HELD_BYTES = Metric("swarmnode_rollout_bytes", GAUGE, "bytes of rollout groups held", "whose")
EVENTS = Metric("swarmnode_rollouts_total", COUNTER, "what happened with rollout groups, some of it in bytes", "what")
SHARE_SECONDS = Metric(
    "swarmnode_rollout_share_seconds_total",
    COUNTER,
    "CPU seconds of signing, checking and choosing rollout groups; neither transport nor learning",
)
REFUSED = Metric("swarmnode_rollouts_refused_total", COUNTER, "rollout groups of others not learned from", "why")


@dataclass(frozen=True)
class RolloutLimits:
    """How far a group travels, and what others' groups may take of this node.

    A group is handed over `copies` − 1 times in all, so a node gets (groups a node makes in a round) × (copies − 1) of
    them, whatever the size of the swarm. With 8 groups a round of 10 s and 8 copies that is 5.6 a second.
    """

    copies: int = 8  # nodes that hold a group in the end, its author included
    total: Rates = IN_ALL  # groups and bytes a second that come in
    author: Rates = EACH_AUTHOR  # of one author's groups, whoever brings them
    sender: Rates = EACH_SENDER  # that one peer brings, whoever wrote them
    pool: PoolLimits = field(default_factory=PoolLimits)  # what is held, with the quotas of authors

    def __post_init__(self) -> None:
        if not 1 <= self.copies <= 64:
            raise ValueError(f"copies = {self.copies}: 1 (keep groups to oneself) to 64")
        if min(rates.bytes.burst for rates in (self.total, self.author, self.sender)) < 2 * LARGEST:
            raise ValueError(f"with a burst below {2 * LARGEST} bytes the largest group may never come in")


@dataclass(frozen=True)
class RolloutStats:
    """What sharing came to since this node started."""

    pool: PoolStats
    alone: bool  # no other member is connected now: this node learns from its own rollouts only
    waiting: int  # groups that are still to be handed on
    events: dict[str, int]


class Rollouts:
    """Publishes this node's groups, passes on those of others, and keeps a pool of them."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        rpc: Rpc,
        bulk: Bulk,
        peers: Callable[[], Sequence[PeerId]],
        sign: Sign,
        verify: Verify,
        runner: Runner,
        now: Callable[[], int],
        rng: random.Random,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        standing: Standing = full_standing,
        check: Check = lambda group: "",
        limits: RolloutLimits | None = None,
        sampled: Check = lambda group: "for-another",
        takes: bool = True,
    ) -> None:
        """`peers`: members that are connected now. `now`: ms since the epoch. `check`: see `intake.Check`; runs where
        `runner` says, before a group is kept or passed on. `sampled` takes groups that others wrote for this node's
        policy, or says why not. Without `takes` this node gives only."""
        self._me, self._run_id, self._rpc, self._bulk = me, run_id, rpc, bulk
        self.spent = Spent()
        runner = self.spent.running(runner)
        self._peers, self._sign, self._runner = peers, sign, runner
        self._now, self._rng, self._admits = now, rng, admits
        self.limits = limits or RolloutLimits()
        self._takes = takes
        self.offences = Offences(PROTOCOL)
        self.counts: Counter[str] = Counter()
        self.counter = now()  # of the next group: grows over restarts, too, as long as the clock does
        self.pool = Pool(me, now=now, limits=self.limits.pool, standing=standing, on_drop=self._gone)
        self._intake = Intake(
            self.pool,
            run_id=run_id,
            bulk=bulk,
            verify=verify,
            runner=runner,
            admits=admits,
            standing=standing,
            check=check,
            gate=Gate(author=self.limits.author, sender=self.limits.sender, total=self.limits.total),
            offences=self.offences,
            counts=self.counts,
            copies=max(1, self.limits.copies // 2),
            sampled=sampled,
        )
        self._spreader = Spreader(run_id=run_id, rpc=rpc, rng=rng, offences=self.offences, counts=self.counts)
        self._entries = Budget[PeerId](ENTRIES)
        self._queries = Budget[PeerId](RECENT_QUERIES)
        self._offered: set[bytes] = set()  # groups whose content peers may fetch
        self._nursery: trio.Nursery | None = None
        self._ask_at = 0.0  # trio time at which a neighbour is asked what is recent, where that is of use
        self._was_alone = True  # and nobody was asked since
        self._hurry = trio.Event()
        self._guard = LifecycleGuard("this node does not share rollouts now")
        rpc.serve(OFFER, Offer, self._guard.while_open(self._on_offer))
        rpc.serve(GIVE, Give, self._guard.while_open(self._on_give))
        rpc.serve(RECENT, RecentQuery, self._guard.while_open(self._on_recent))
        rpc.serve(GET, Get, self._guard.while_open(self._on_get))

    # -- what this node does

    async def publish(self, groups: Sequence[RolloutGroup], *, trainer: PeerId = "") -> tuple[SignedGroup, ...]:
        """Sign these groups, keep them apart as own ones, and let them spread while `watch` runs.

        `trainer`: for whose policy they are, where that is not this node's.

        Returns at once where nobody is there: a node alone learns alone. Raises InvalidGroup for one too large.
        """
        first, made_at = self.counter, self._now()
        self.counter += len(groups)

        def work() -> list[SignedGroup]:
            return [
                seal(
                    group,
                    run_id=self._run_id,
                    author=self._me,
                    counter=first + index,
                    made_at=made_at,
                    sign=self._sign,
                    trainer=trainer,
                )
                for index, group in enumerate(groups)
            ]

        sealed = await self._runner(work)
        for group in sealed:
            self.pool.keep(group)
            self._hand_on(group, self.limits.copies)
        self.counts["published"] += len(sealed)
        self._hurry.set()
        return tuple(sealed)

    def forget_before(self, version: int) -> None:
        """Hand on no more own groups that were written before that version: they came too late to be of use."""
        for group in self.pool.own():
            if group.version < version:
                self._spreader.forget(group.id)

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take, pass on and answer until cancelled. What is held stays here, for `watch` to go on later."""
        try:
            async with self._guard.open(), trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while True:
                    with trio.move_on_after(TICK * self._rng.uniform(0.8, 1.2)):
                        await self._hurry.wait()
                    self._hurry = trio.Event()
                    with self.spent.counted():
                        self._turn(nursery)
        finally:
            self._nursery = None
            self._was_alone = True

    @property
    def me(self) -> PeerId:
        return self._me

    @property
    def alone(self) -> bool:
        """Whether no other member is connected now."""
        return not self._peers()

    def stats(self) -> RolloutStats:
        return RolloutStats(self.pool.stats(), self.alone, len(self._spreader), dict(self.counts))

    def measure(self, metrics: Metrics) -> None:
        show(metrics, self.pool, self.counts, lambda: self.spent.seconds)
        self.offences.measure(metrics)

    # -- passing on

    def _turn(self, nursery: trio.Nursery) -> None:
        self.pool.expire()
        here = list(self._peers())
        if not here:
            self._was_alone, self._ask_at = True, 0.0
            return
        wanted = RECENT_GROUPS if self._was_alone else min(RECENT_GROUPS, 2 * self.pool.lacking)
        if wanted and self._takes and trio.current_time() >= self._ask_at:
            self._ask_at = trio.current_time() + ASK_EVERY
            nursery.start_soon(self._ask_recent, self._rng.choice(here), wanted)
        self._spreader.turn(here, nursery)

    def _hand_on(self, group: SignedGroup, copies: int, giver: PeerId | None = None) -> None:
        if group.signed.header.shard:
            self._bulk.offer(content_key(self._run_id, group.id), group.content)
            self._offered.add(group.id)
        self._spreader.add(group, copies, known=(group.author, *([giver] if giver else [])))

    def _gone(self, id: bytes) -> None:
        self._spreader.forget(id)
        if id in self._offered:
            self._offered.discard(id)
            self._bulk.withdraw(content_key(self._run_id, id))

    async def _ask_recent(self, peer: PeerId, count: int) -> None:
        try:
            recent = await self._rpc.call(peer, RECENT, RecentQuery(self._run_id, count), Recent, timeout=TIMEOUT)
            self._was_alone, self.pool.lacking = False, 0
            self.counts["asked_recent"] += 1
            new = tuple(id for id in recent.ids if not self.pool.saw(id))
            if not new:
                return
            got = await self._rpc.call(peer, GET, Get(self._run_id, new), Got, timeout=TIMEOUT)
        except CallError as error:
            log.debug("%s does not say what rollouts are recent: %s", peer, error)
            return
        for signed in await self._intake.solicited(peer, got.groups, frozenset(new)):
            await self._take_in(peer, signed, 1)

    async def _take_in(self, peer: PeerId, signed: SignedHeader, copies: int) -> None:
        group = await self._intake.keep(peer, signed)
        if group is not None and self.pool.get(group.id) is not None:
            self._hand_on(group, copies, peer)

    # -- answers

    def _admit(self, peer: PeerId, run_id: str) -> None:
        if run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if not self._admits(peer):
            raise Refuse("not-admitted", "this run does not admit you")

    async def _on_offer(self, peer: PeerId, offer: Offer) -> Answer:
        self._admit(peer, offer.run_id)
        if not self._takes:
            return Answer(wait=LONGEST_WAIT)
        if not self._entries.take(peer, len(offer.groups)):
            self.offences.note(peer, "offers too many rollout groups", Kind.LOAD)
            raise Refuse("busy", f"at most {ENTRIES.rate:g} groups a second may be offered here")
        with self.spent.counted():
            return self._intake.weigh(peer, offer)

    async def _on_give(self, peer: PeerId, give: Give) -> Thanks:
        self._admit(peer, give.run_id)
        for signed, copies in await self._intake.take(peer, give.groups):
            if signed.complete_here:
                await self._take_in(peer, signed, copies)
            elif self._nursery is not None:
                self._nursery.start_soon(self._take_in, peer, signed, copies)
        return Thanks()

    async def _on_recent(self, peer: PeerId, query: RecentQuery) -> Recent:
        self._admit(peer, query.run_id)
        if not self._takes:
            return Recent(())
        self._admit_query(peer)
        own = self.pool.own()[-max(1, query.count // 8) :]
        told = [*own, *self.pool.drawn(query.count, self._rng)]
        return Recent(tuple(group.id for group in told if group.author != peer)[: query.count])

    async def _on_get(self, peer: PeerId, get: Get) -> Got:
        self._admit(peer, get.run_id)
        self._admit_query(peer)
        got: list[Sealed] = []
        room = RECENT_BYTES
        for group in filter(None, map(self.pool.get, get.ids)):
            room -= len(group.signed.payload) + len(group.signed.signature)
            if room >= 0:
                got.append((group.signed.payload, group.signed.signature))
        return Got(tuple(got))

    def _admit_query(self, peer: PeerId) -> None:
        if not self._queries.take(peer, 1):
            raise Refuse("busy", "asked too often what is recent")


def show(metrics: Metrics, pool: Pool, counts: Counter[str], seconds: Callable[[], float]) -> None:
    """Show what is held, what happened, and the CPU seconds that it took."""

    def held() -> dict[str, float]:
        return {"own": len(pool.own()), "others": len(pool)}

    def held_bytes() -> dict[str, float]:
        stats = pool.stats()
        return {"own": stats.own_bytes, "others": stats.bytes}

    metrics.show(HELD, held)
    metrics.show(HELD_BYTES, held_bytes)
    metrics.show(EVENTS, lambda: counts)
    metrics.show(SHARE_SECONDS, seconds)
    metrics.show(REFUSED, lambda: pool.refused)
