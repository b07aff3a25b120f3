"""What a node takes of others' rollout groups: offers are weighed before a byte moves, groups before they count.

What comes in is bounded in groups and in bytes a second: by author, by who brings them, and in all (`IntakeLimiter`).
What was not asked for, is forged, or is not what was offered is a violation by the peer that sent it: an honest one
checks a group before it passes it on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from swarmnode.crdt.envelope import Envelope
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.rollouts.messages import (
    LONGEST_WAIT,
    MAX_OFFERED,
    SLOWEST,
    GroupOffer,
    InvalidGroup,
    OfferAnswer,
    OfferedGroup,
    Sealed,
    SignedGroup,
    open_group,
)
from swarmnode.protocols.methods.rollouts.pool import ESTABLISHED, Rates, RolloutLimits, RolloutPool, SharingRules
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import TimedRunner
from swarmnode.training.rl.groups import RefusedGroup, score

log = logging.getLogger(__name__)

FLOOD = "flood"  # the word for groups beyond their author's allowance
LEAST_WAIT = 1.0  # seconds that a peer is asked to leave this node alone, where there is no room
HELD_FOR = 5.0  # seconds after which a group that a peer was asked for is had from the next who offers it as well
GRANTED_FOR = 5.0  # seconds that a peer may take to give what it was asked for, beside those that its bytes take
MAX_GRANTS = 2 * MAX_OFFERED  # of one peer: what it spreads, and what it was asked for as recent
WINDOW = 10.0  # seconds over which the shares of peers that bring groups are equal
ALL = ""  # the holder of what may come in at all
PROBATION = 0.125  # of what may come in at all, for all authors together that are on probation


def informative(signed: SignedGroup, *, judged: bool = False) -> str:
    """Empty where one can learn from the group; else uninformative, unknown-task, unknown-vocabulary or bad-token.

    So groups of which nobody could learn anything end at the first honest node: answers are verified here, with the
    question that the task's name and seed give, and a group whose answers are all equally right is a zero gradient
    (SAPO, 2509.08721, drops them after they have travelled). `judged`: rewards are multiplied by the question's judge.
    """
    try:
        return "" if score(signed.author, signed.group, judged=judged).informative else "uninformative"
    except RefusedGroup as refused:
        return refused.reason


class _RateBudget:
    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._groups, self._bytes = Budget[PeerId](rates.groups), Budget[PeerId](rates.bytes)

    def wait(self, holder: PeerId, groups: float, size: float) -> float:
        """Seconds until so much is there."""
        return max(self._groups.wait(holder, groups), self._bytes.wait(holder, size))

    def left(self, holder: PeerId) -> float:
        """The part of the burst that is there, 0 to 1."""
        groups, size = self.rates.groups, self.rates.bytes
        return 1.0 - max(
            self._groups.wait(holder, groups.burst) * groups.rate / groups.burst,
            self._bytes.wait(holder, size.burst) * size.rate / size.burst,
        )

    def take(self, holder: PeerId, groups: float, size: float) -> None:
        """Take what is there."""
        self._groups.take(holder, groups)
        self._bytes.take(holder, size)


class IntakeLimiter:
    """How much of others' groups may come in.

    A group counts against its author's allowance by 1 / standing, once it has the author's signature: nobody uses up
    another's. When less than half is left of what may come in at all, each peer that brings groups has an equal share
    of what refills, and less of it the less is left: so a few that send all they may do not crowd out those that send
    little. Authors on probation (pool.py) have a part of it all together, however many identities they are.
    """

    def __init__(self, limits: RolloutLimits) -> None:
        groups, size = limits.total.groups, limits.total.bytes
        probation = Rates(
            Allowance(PROBATION * groups.rate, max(1.0, PROBATION * groups.burst)),
            Allowance(PROBATION * size.rate, max(limits.author.bytes.burst, PROBATION * size.burst)),
        )
        self._author, self._sender = _RateBudget(limits.author), _RateBudget(limits.sender)
        self._most = limits.author.bytes.burst  # that an author ever has: so much takes one group at the most
        self._total, self._probation = _RateBudget(limits.total), _RateBudget(probation)
        self._window = -1
        self._asked_before: frozenset[PeerId] = frozenset()  # peers that asked for room in the last window
        self._taken: dict[PeerId, float] = {}  # by peer in this window, in seconds of what refills

    def wait_for_author(self, author: PeerId, sizes: Sequence[int], standing: float) -> float:
        """Seconds until groups of that author's, of so many bytes, may come; 0 where they may now."""
        cost = sum(min(size / standing, self._most) for size in sizes)
        wait = self._author.wait(author, len(sizes) / standing, cost)
        return wait if standing >= ESTABLISHED else max(wait, self._probation.wait(ALL, len(sizes), sum(sizes)))

    def wait(self, size: int) -> float:
        """Seconds until a group of anybody's may come."""
        return self._total.wait(ALL, 1.0, size)

    def take_from(self, sender: PeerId, size: int) -> bool:
        """Take a group's worth of its sender's allowance and of all; where one lacks it, False and nothing is taken."""
        rates = self._total.rates
        cost = max(1.0 / rates.groups.rate, size / rates.bytes.rate)  # seconds until it is refilled
        left = 2.0 * self._total.left(ALL)
        crowded_out = self._share_left(sender, left) < cost and left < 1.0
        if crowded_out or self._sender.wait(sender, 1.0, size) or self._total.wait(ALL, 1.0, size):
            return False
        self._taken[sender] += cost
        self._sender.take(sender, 1.0, size)
        self._total.take(ALL, 1.0, size)
        return True

    def take_of(self, author: PeerId, size: int, standing: float) -> bool:
        """Take a group's worth of its author's allowance, once it is known to be the author's."""
        if self.wait_for_author(author, [size], standing):
            return False
        self._author.take(author, 1.0 / standing, min(size / standing, self._most))
        if standing < ESTABLISHED:
            self._probation.take(ALL, 1.0, size)
        return True

    def _share_left(self, sender: PeerId, part: float) -> float:
        """Seconds of what refills that are left to the sender of that part of an equal share."""
        window = int(trio.current_time() / WINDOW)
        if window != self._window:
            self._asked_before = frozenset(self._taken) if window == self._window + 1 else frozenset()
            self._window, self._taken = window, {}
        taken = self._taken.setdefault(sender, 0.0)
        return part * WINDOW / len(self._asked_before | self._taken.keys()) - taken


@dataclass(frozen=True)
class _Grant:
    offered: OfferedGroup
    since: float  # trio time
    until: float  # likewise


class GroupIntake:
    """Weighs offers, opens and checks what is given, and puts it into the pool.

    `violations` by peers and `counts` of what happened are public, for who shares groups to add to and to show.
    """

    def __init__(
        self, parts: Context, rules: SharingRules, pool: RolloutPool, *, limits: RolloutLimits, runner: TimedRunner
    ) -> None:
        self._parts, self._rules, self._pool, self._runner = parts, rules, pool, runner
        self._copies = max(1, limits.copies // 2)  # handed on of a group at the most, whatever a peer says
        self._limiter = IntakeLimiter(limits)
        self.violations = Violations("rollouts")
        self.counts: Counter[str] = Counter()
        self._grants: dict[tuple[bytes, PeerId], _Grant] = {}  # by group, and who was asked for it

    # -- offers

    def weigh(self, peer: PeerId, offer: GroupOffer) -> OfferAnswer:
        """Which of these groups to have from `peer`."""
        now = trio.current_time()
        self._forget_grants(now)
        room = MAX_GRANTS - self._granted(peer)
        awaited = {id for (id, who), grant in self._grants.items() if who == peer or now < grant.since + HELD_FOR}
        wants: list[int] = []
        has: list[int] = []
        wait = 0.0
        coming = 0  # bytes of what is wanted of this offer
        asked: dict[PeerId, list[int]] = {}  # their sizes, by author
        for index, offered in enumerate(offer.groups):
            if self._pool.saw(offered.id):
                has.append(index)
            elif offered.id in awaited:
                continue  # another peer may be about to bring it; if it does not, this one offers it again
            elif self._declines(offered, asked.get(offered.author, [])):
                # Whose it is, only its signature tells: nobody's count suffers from what another says.
                self.counts["declined"] += 1
                if offered.author == peer:
                    self._pool.note(peer, FLOOD)
            elif len(wants) < room and self._limiter.take_from(peer, offered.size):
                wants.append(index)
                asked.setdefault(offered.author, []).append(offered.size)
                coming += offered.size
                awaited.add(offered.id)
                self._grants[offered.id, peer] = _Grant(offered, now, now + GRANTED_FOR + coming / SLOWEST)
            else:
                self.counts["no_room"] += 1
                wait = max(wait, self._limiter.wait(offered.size), LEAST_WAIT)
        self.counts["had"] += len(has)
        return OfferAnswer(tuple(wants), tuple(has), min(LONGEST_WAIT, wait))

    def _declines(self, offered: OfferedGroup, before: Sequence[int]) -> bool:
        """Whether a group is not to come at all; `before`: sizes of those of its author that are to come before it."""
        if offered.author == self._parts.me or not self._parts.admits(offered.author):
            return True
        standing = self._rules.standing(offered.author)
        if standing <= 0:
            return True
        return self._limiter.wait_for_author(offered.author, [*before, offered.size], standing) > 0

    def _granted(self, peer: PeerId) -> int:
        return sum(who == peer for _, who in self._grants)

    def _forget_grants(self, now: float) -> None:
        for (id, peer), grant in list(self._grants.items()):
            if grant.until <= now:
                del self._grants[id, peer]
                self.counts["not_given"] += 1
                self.violations.note(peer, "does not give the rollout groups that it offered", Kind.LOAD)

    # -- groups

    async def take(self, peer: PeerId, sealed: Sequence[Sealed]) -> list[tuple[SignedGroup, int]]:
        """Keep the groups that `peer` gives and was asked for; those that are here now, each with its copies.

        One that came from elsewhere meanwhile is among them: the copies that came with it are still to be spread.
        """
        granted = self._granted(peer)
        if len(sealed) > granted:  # nobody can have this node verify more than it asked for
            self.counts["unasked"] += len(sealed) - granted
            self.violations.note(peer, "gave more rollout groups than it was asked for", Kind.LOAD)
        taken: list[tuple[SignedGroup, int]] = []
        for group in await self._opened(peer, sealed[:granted]):
            grant = self._grants.pop((group.id, peer), None)
            if grant is None:
                self.counts["unasked"] += 1
                if not self._pool.saw(group.id):
                    self.violations.note(peer, "gave a rollout group that it was not asked for", Kind.LOAD)
                continue
            if grant.offered.author != group.author or grant.offered.size != group.size:
                self._refuse_from(peer, "an offer does not say what was given")
            elif group.id in self._pool or (self._affords(group) and await self._keep(group)):
                taken.append((group, min(grant.offered.copies, self._copies)))
        return taken

    def _affords(self, group: SignedGroup) -> bool:
        """Take a group's worth of its author's allowance; noted where that is used up."""
        standing = self._rules.standing(group.author)
        if standing > 0 and self._limiter.take_of(group.author, group.size, standing):
            return True
        self._pool.note(group.author, FLOOD if standing > 0 else "no-standing")
        return False

    async def _keep(self, group: SignedGroup) -> bool:
        """Put a group into the pool, or where it is for this node's policy, with its samplers'; is it in the pool?"""
        reason = self._pool.unfit(group)
        if not reason and group.packed.trainer:
            if self._pool.saw(group.id):
                return False
            reason = self._rules.insert_sampled(group)
        elif not reason:
            reason = await self._runner(lambda: self._checked(group))
        if reason:
            self._pool.refuse(group, reason)
        elif group.packed.trainer:
            self._pool.remember(group.id)
            self.counts["sampled"] += 1
        else:
            refused = self._pool.add(group)
            if not refused:
                self.counts["received"] += 1
                self.counts["received_bytes"] += group.size
            elif refused == "duplicate":
                self.counts["duplicate"] += 1
        return group.id in self._pool

    def _checked(self, group: SignedGroup) -> str:
        try:
            return self._rules.check(group)
        except Exception:  # a stranger chose what is checked: a fault there costs the group, not the node
            log.exception("a rollout group of %s could not be checked", group.author)
            return "check-failed"

    async def _opened(self, peer: PeerId, sealed: Sequence[Sealed]) -> list[SignedGroup]:
        run_id, verify = self._parts.run_id, self._parts.network.verify

        def work() -> tuple[list[SignedGroup], InvalidGroup | None]:
            opened: list[SignedGroup] = []
            for pair in sealed:
                try:
                    opened.append(open_group(Envelope(*pair), run_id=run_id, verify=verify))
                except InvalidGroup as error:
                    return opened, error
            return opened, None

        opened, wrong = await self._runner(work)
        if wrong is not None:  # whoever sends one is not asked to explain the rest
            self._refuse_from(peer, str(wrong), forged=wrong.forged)
        return opened

    def _refuse_from(self, peer: PeerId, what: str, *, forged: bool = False) -> None:
        self.counts["invalid"] += 1
        self.violations.note(peer, what, Kind.LIE if forged else Kind.BREACH)
