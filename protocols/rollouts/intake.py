"""What a node takes of others' rollout groups: offers are weighed before a byte moves, groups are checked before they
count.

Three allowances stand before each group: of its author, of who brings it, and of all together, in groups and in bytes a
second. A group counts against its author's by 1 / standing. So whoever floods uses up his own, and a swarm of many does
not cost more than `RolloutLimits.rate`. What was not asked for, is forged, or is not what was offered is an offence of
the peer that sent it: an honest one checks a group before it passes it on.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from swarmnode.protocols.budget import Allowance, Budget
from swarmnode.protocols.bulk import Bulk
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.offences import Kind, Offences
from swarmnode.protocols.rollouts.messages import LONGEST_WAIT, Answer, Offer, Offered, Sealed, content_key
from swarmnode.protocols.rollouts.pool import Pool
from swarmnode.protocols.rollouts.signed import (
    MAX_CONTENT,
    MAX_HEADER,
    SIGNATURE,
    InvalidGroup,
    SignedGroup,
    SignedHeader,
    Verify,
    open_header,
)
from swarmnode.protocols.runner import Runner

log = logging.getLogger(__name__)

GRANTED_FOR = 15.0  # seconds that a peer may take to give what it was asked for
MAX_GRANTS = 1024
FETCHES = 2  # contents on their way at once
FETCH_WITHIN = 60.0  # seconds
LARGEST = MAX_CONTENT + MAX_HEADER + SIGNATURE

Check = Callable[[SignedGroup], str]  # "" or the word for why a group is of no use, as from verifying its answers


@dataclass(frozen=True)
class Rates:
    """Groups and bytes; `burst` may come at once after a pause, and is at least the largest group."""

    groups: Allowance
    bytes: Allowance


class Gate:
    """How much of groups may come in, by author, by who brings them, and in all."""

    def __init__(self, *, author: Rates, sender: Rates, total: Rates) -> None:
        self._budgets = [
            (Budget[PeerId](rates.groups), Budget[PeerId](rates.bytes)) for rates in (author, sender, total)
        ]

    def take(self, author: PeerId, sender: PeerId, size: int, standing: float) -> str:
        """Take a group's worth; "" or who has no allowance left: author, sender or total. Then nothing is taken."""
        cost = 1.0 / standing
        amounts = ((author, cost, size * cost), (sender, 1.0, size), ("", 1.0, size))
        for (groups, of_bytes), (holder, count, weight), word in zip(
            self._budgets, amounts, ("author", "sender", "total"), strict=True
        ):
            if not (groups.has(holder, count) and of_bytes.has(holder, weight)):
                return word
        for (groups, of_bytes), (holder, count, weight) in zip(self._budgets, amounts, strict=True):
            groups.take(holder, count)
            of_bytes.take(holder, weight)
        return ""


@dataclass(frozen=True)
class Grant:
    """A peer was asked for a group."""

    peer: PeerId
    offered: Offered
    until: float  # trio time


class Intake:
    """Weighs offers, opens what is given, fetches what is large, and puts it into the pool."""

    def __init__(
        self,
        pool: Pool,
        *,
        run_id: str,
        bulk: Bulk,
        verify: Verify,
        runner: Runner,
        admits: Callable[[PeerId], bool],
        standing: Callable[[PeerId], float],
        check: Check,
        gate: Gate,
        offences: Offences,
        counts: Counter[str],
        copies: int,
    ) -> None:
        """`copies`: what this node hands on of a group at the most, whatever it is told."""
        self._pool, self._run_id, self._bulk = pool, run_id, bulk
        self._verify, self._runner = verify, runner
        self._admits, self._standing, self._check, self._gate = admits, standing, check, gate
        self._offences, self._counts, self._copies = offences, counts, copies
        self._grants: OrderedDict[bytes, Grant] = OrderedDict()
        self._limit = trio.CapacityLimiter(FETCHES)

    # -- offers

    def weigh(self, peer: PeerId, offer: Offer) -> Answer:
        """Which of these groups to have from `peer`."""
        now = trio.current_time()
        self._forget_grants(now)
        wants: list[int] = []
        has: list[int] = []
        full = False
        for index, offered in enumerate(offer.groups):
            if self._pool.saw(offered.id) or offered.id in self._grants:
                has.append(index)
                continue
            reason = "full" if full else self._refusal(peer, offered)
            if reason:
                full = full or reason == "full"
                self._counts["declined"] += 1
                if reason != "full":
                    self._pool.note(offered.author, reason)
            else:
                wants.append(index)
                self._grants[offered.id] = Grant(peer, offered, now + GRANTED_FOR)
        while len(self._grants) > MAX_GRANTS:
            self._grants.popitem(last=False)
        self._counts["had"] += len(has)
        return Answer(tuple(wants), tuple(has), min(LONGEST_WAIT, self._wait()) if full else 0.0)

    def _refusal(self, peer: PeerId, offered: Offered) -> str:
        if not self._admits(offered.author):
            return "not-admitted"
        standing = min(1.0, self._standing(offered.author))
        if standing <= 0 or not math.isfinite(standing):
            return "no-standing"
        lacking = self._gate.take(offered.author, peer, offered.size, standing)
        return {"": "", "author": "author-flood", "sender": "sender-flood", "total": "full"}[lacking]

    def _wait(self) -> float:
        return 1.0

    def _forget_grants(self, now: float) -> None:
        while self._grants:
            id, grant = next(iter(self._grants.items()))
            if grant.until > now:
                return
            del self._grants[id]
            self._counts["not_given"] += 1

    # -- groups

    async def take(self, peer: PeerId, sealed: Sequence[Sealed]) -> list[tuple[SignedHeader, int]]:
        """Headers that `peer` gives and was asked for, opened, each with the copies that come with it."""
        opened = await self._opened(peer, sealed)
        taken: list[tuple[SignedHeader, int]] = []
        for signed in opened:
            grant = self._grants.get(signed.id)
            if grant is None or grant.peer != peer:
                self._counts["unasked"] += 1
                if not self._pool.saw(signed.id):
                    self._offences.note(peer, "gave a rollout group that it was not asked for", Kind.LOAD)
                continue
            del self._grants[signed.id]
            if grant.offered.author != signed.author or grant.offered.size != size_of(signed):
                self._refuse_from(peer, "an offer does not say what was given")
                continue
            taken.append((signed, min(grant.offered.copies, self._copies)))
        return taken

    async def solicited(self, peer: PeerId, sealed: Sequence[Sealed]) -> list[SignedHeader]:
        """Headers that `peer` told when it was asked what is recent, those that are new."""
        opened = await self._opened(peer, sealed)
        return [each for each in opened if not self._pool.saw(each.id) and self._admits(each.author)]

    async def keep(self, peer: PeerId, signed: SignedHeader) -> SignedGroup | None:
        """Put a group into the pool, its content fetched from `peer` where it is not in the header; None where not."""
        header = signed.header
        reason = self._pool.unfit(signed.author, header.made_at, header.version)
        if reason:
            self._pool.note(signed.author, reason)
            return None
        try:
            content = b"" if signed.complete_here else await self._fetched(peer, signed)
            group, reason = await self._runner(lambda: self._completed(signed, content))
        except NetworkError as error:
            self._counts["not_fetched"] += 1
            log.debug("the content of a rollout group does not come from %s: %s", peer, error)
            return None
        except InvalidGroup as error:
            self._refuse_from(peer, str(error), forged=error.forged)
            return None
        if reason:
            self._pool.note(signed.author, reason)
            return None
        if self._pool.add(group):
            return None
        self._counts["received"] += 1
        self._counts["received_bytes"] += group.size
        return group

    def _completed(self, signed: SignedHeader, content: bytes) -> tuple[SignedGroup, str]:
        group = signed.complete(content)
        return group, self._check(group)

    async def _fetched(self, peer: PeerId, signed: SignedHeader) -> bytes:
        raw: bytes | memoryview | None = None
        async with self._limit:
            with trio.move_on_after(FETCH_WITHIN):
                key = content_key(self._run_id, signed.id)
                raw = await self._bulk.fetch(peer, key, max_size=signed.header.size, wait=1.0)
        if raw is None:
            raise NetworkError(f"{peer} took more than {FETCH_WITHIN:.0f} s")
        return bytes(raw)

    async def _opened(self, peer: PeerId, sealed: Sequence[Sealed]) -> list[SignedHeader]:
        def work() -> tuple[list[SignedHeader], InvalidGroup | None]:
            opened: list[SignedHeader] = []
            for payload, signature in sealed:
                try:
                    opened.append(open_header(payload, signature, run_id=self._run_id, verify=self._verify))
                except InvalidGroup as error:
                    return opened, error
            return opened, None

        opened, wrong = await self._runner(work)
        if wrong is not None:  # whoever sends one is not asked to explain the rest
            self._refuse_from(peer, str(wrong), forged=wrong.forged)
        return opened

    def _refuse_from(self, peer: PeerId, what: str, *, forged: bool = False) -> None:
        self._counts["invalid"] += 1
        self._offences.note(peer, what, Kind.LIE if forged else Kind.BREACH)


def size_of(signed: SignedHeader) -> int:
    """Bytes of header, signature and content."""
    return len(signed.payload) + SIGNATURE + (signed.header.size if signed.header.shard else 0)
