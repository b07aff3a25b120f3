"""What a node takes of others' rollout groups: offers are weighed before a byte moves, groups are checked before they
count.

What comes in is bounded by the `gate`, in groups and in bytes a second. What was not asked for, is forged, or is not
what was offered is an offence of the peer that sent it: an honest one checks a group before it passes it on.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from swarmnode.protocols.methods.rollouts.gate import Gate
from swarmnode.protocols.methods.rollouts.messages import LONGEST_WAIT, Answer, Offer, Offered, Sealed, content_key
from swarmnode.protocols.methods.rollouts.pool import Pool
from swarmnode.protocols.methods.rollouts.signed import (
    MAX_CONTENT,
    MAX_HEADER,
    SIGNATURE,
    InvalidGroup,
    SignedGroup,
    SignedHeader,
    Verify,
    open_header,
)
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.violations import Kind, Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk import Bulk

log = logging.getLogger(__name__)

FLOOD = "flood"  # the word for groups beyond their author's allowance
LEAST_WAIT = 1.0  # seconds that a peer is asked to leave this node alone, where there is no room
GRANTED_FOR = 5.0  # seconds that a peer may take to give what it was asked for
MAX_GRANTS = 1024
FETCHES = 2  # contents on their way at once
FETCH_WITHIN = 60.0  # seconds
LARGEST = MAX_CONTENT + MAX_HEADER + SIGNATURE

Check = Callable[[SignedGroup], str]  # "" or the word for why a group is of no use, as from verifying its answers


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
        sampled: Check,
    ) -> None:
        """`copies`: what this node hands on of a group at the most, whatever it is told. `sampled` takes those that are
        for a policy that others train, or says why not; they go no further."""
        self._pool, self._run_id, self._bulk = pool, run_id, bulk
        self._verify, self._runner = verify, runner
        self._admits, self._standing, self._check, self._gate = admits, standing, check, gate
        self._offences, self._counts, self._copies = offences, counts, copies
        self._sampled = sampled
        self._grants: OrderedDict[bytes, Grant] = OrderedDict()
        self._limit = trio.CapacityLimiter(FETCHES)

    # -- offers

    def weigh(self, peer: PeerId, offer: Offer) -> Answer:
        """Which of these groups to have from `peer`."""
        now = trio.current_time()
        self._forget_grants(now)
        wants: list[int] = []
        has: list[int] = []
        wait = 0.0
        asked: dict[PeerId, list[int]] = {}  # sizes of what is wanted of this offer, by author
        for index, offered in enumerate(offer.groups):
            if self._pool.saw(offered.id):
                has.append(index)
            elif offered.id in self._grants or len(self._grants) >= MAX_GRANTS:
                continue  # another peer may be about to bring it; if it does not, this one offers it again
            elif self._declines(offered, asked.get(offered.author, [])):
                # Whose it is, only its signature tells: nobody's count suffers from what another says.
                self._counts["declined"] += 1
                if offered.author == peer:
                    self._pool.note(peer, FLOOD)
            elif self._gate.take_from(peer, offered.size):
                wants.append(index)
                asked.setdefault(offered.author, []).append(offered.size)
                self._grants[offered.id] = Grant(peer, offered, now + GRANTED_FOR)
            else:
                self._counts["no_room"] += 1
                wait = max(wait, self._gate.wait(offered.size), LEAST_WAIT)
        self._counts["had"] += len(has)
        return Answer(tuple(wants), tuple(has), min(LONGEST_WAIT, wait))

    def _declines(self, offered: Offered, before: Sequence[int]) -> bool:
        """Whether a group is not to come at all; `before`: sizes of those of its author that are to come before it."""
        if offered.author == self._pool.me or not self._admits(offered.author):
            return True
        standing = self._standing_of(offered.author)
        if standing <= 0:
            return True
        size = sum(before) + offered.size
        return self._gate.wait_for_author(offered.author, len(before) + 1, size, standing) > 0

    def _standing_of(self, author: PeerId) -> float:
        return min(1.0, self._standing(author))

    def _forget_grants(self, now: float) -> None:
        while self._grants:
            id, grant = next(iter(self._grants.items()))
            if grant.until > now:
                return
            del self._grants[id]
            self._counts["not_given"] += 1
            self._offences.note(grant.peer, "does not give the rollout groups that it offered", Kind.LOAD)

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
            elif self._affords(signed):
                taken.append((signed, min(grant.offered.copies, self._copies)))
        return taken

    async def solicited(self, peer: PeerId, sealed: Sequence[Sealed], ids: frozenset[bytes]) -> list[SignedHeader]:
        """Headers that `peer` sent when it was asked for these."""
        return [
            signed
            for signed in await self._opened(peer, sealed)
            if signed.id in ids
            and not self._pool.saw(signed.id)
            and self._admits(signed.author)
            and self._gate.take_from(peer, size_of(signed))
            and self._affords(signed)
        ]

    def _affords(self, signed: SignedHeader) -> bool:
        """Take a group's worth of its author's allowance; noted where that is used up."""
        standing = self._standing_of(signed.author)
        if standing > 0 and self._gate.take_of(signed.author, size_of(signed), standing):
            return True
        self._pool.note(signed.author, FLOOD if standing > 0 else "no-standing")
        return False

    async def keep(self, peer: PeerId, signed: SignedHeader) -> SignedGroup | None:
        """Put a group into the pool, its content fetched from `peer` where the header has none; None if it is not kept.

        One that came from elsewhere meanwhile is returned as well: the copies that came with it are still to be spread.
        """
        header = signed.header
        reason = self._pool.unfit(signed.author, header.made_at, header.version)
        if reason:
            self._pool.refuse(signed, reason)
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
        if not reason and signed.header.trainer and not self._pool.saw(signed.id):
            reason = self._sampled(group)
        if reason:
            self._pool.refuse(signed, reason)
            return None
        if signed.header.trainer:
            self._pool.remember(signed.id)
            self._counts["sampled"] += 1
            return None
        refused = self._pool.add(group)
        if not refused:
            self._counts["received"] += 1
            self._counts["received_bytes"] += group.size
        elif refused == "duplicate":
            self._counts["duplicate"] += 1
        return self._pool.get(group.id)

    def _completed(self, signed: SignedHeader, content: bytes) -> tuple[SignedGroup, str]:
        group = signed.complete(content)
        try:
            return group, "" if group.signed.header.trainer else self._check(group)
        except Exception:  # a stranger chose what is checked: a fault there costs the group, not the node
            log.exception("a rollout group of %s could not be checked", signed.author)
            return group, "check-failed"

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
