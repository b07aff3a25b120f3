"""How members agree on one result per round, though any of them may die or freeze at any moment.

Candidates of a round are the seats of the last roster (*voters*) and the joiners that it named. They are ordered by
sha-256(run ‖ round ‖ peer); ballot b is led by candidate b modulo their number. In each ballot

1. every member that has trained sends `round.ready` to the leader and waits;
2. the leader closes the roster when all candidates that it does not suspect are ready, or when an adaptive deadline
   for stragglers has passed, and answers every Ready with it;
3. members reduce (`allreduce.py`), compute the next state, *accept* it (keep it and its hash) and send `round.report`;
4. when a majority of the voters reports the same hash, and the others have reported or are suspected, the leader
   decides and answers every Report with the decision.

What each node remembers and answers is in `standing.py`, what a leader concludes in `ballots.py`.

Who may fail when, and what is then true: a leader that dies or freezes is suspected by its followers (`liveness.py`),
who go to the next ballot and tell its leader what they accepted; a result that a majority accepted may have been
decided, so a new leader that hears of one lets everybody adopt it instead of making another (single-decree Paxos, one
instance a round, its acceptors the voters). A member that dies while parts are exchanged makes the ballot fail at once
(`missing` in a report); the leader summons everybody to a new one without it, or without one end of a link over which
two living members cannot exchange. A member that comes late is told the decision and fetches the state. So while a
majority of voters is connected, all members go through the same states. A voter that answers pings and does not become
ready long after its window counts as gone; a restarted process has forgotten what it accepted in the round at hand.

Where no majority can be reached for `deadline_floor` seconds, those who can reach one another go on (a swarm of two
must survive the loss of one); after a partition two histories may then exist, and `prefers` says which side gives way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import trio

from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.exchange.ballots import (
    WINDOW_SLACK,
    Link,
    is_safe,
    next_window,
    result_to_adopt,
    seats_of,
    without_broken_links,
)
from swarmnode.protocols.exchange.messages import (
    Accepted,
    Decision,
    Goodbye,
    Head,
    HeadQuery,
    Join,
    Noted,
    Ready,
    Report,
    Ruling,
    Summon,
    Verdict,
)
from swarmnode.protocols.exchange.roster import Roster, majority
from swarmnode.protocols.exchange.standing import Desk, Position, Standing, diverged, prefers
from swarmnode.protocols.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.rpc import CallError, Rpc

__all__ = [
    "WINDOW_SLACK",
    "Agreement",
    "AgreementSettings",
    "Behind",
    "LeftOut",
    "PartsMissing",
    "Position",
    "diverged",
    "prefers",
    "ready_patience",
]

logger = logging.getLogger(__name__)

PROBE_EVERY = 2.0  # seconds between looks at candidates that should be ready and are not
LONGEST_WAIT = 500.0  # seconds of one call; below the limit that `rpc` puts on handlers
REPORT_MARGIN = 5.0  # seconds that a leader waits for reports beyond the time that a reduction may take
FAILURES_AS_LEADER = 3  # ballots in a row that one leader may fail before another candidate tries


class Behind(Exception):
    """The round was decided elsewhere, or others stand on another state: catch up with `head` before going on."""

    def __init__(self, head: Head, source: PeerId) -> None:
        super().__init__(f"{source} is at round {head.round}")
        self.head = head
        self.source = source


class LeftOut(Exception):
    """This node is no candidate of the round, and none of the candidates answers it."""


class PartsMissing(Exception):
    """A reduction could not be completed because of these peers."""

    def __init__(self, peers: tuple[PeerId, ...]) -> None:
        super().__init__("no parts from " + ", ".join(peers))
        self.peers = peers


@dataclass(frozen=True)
class AgreementSettings:
    """From the RunSpec's `[exchange]`."""

    group_size: int
    weight_cap: float
    floor: float  # seconds
    ceiling: float  # seconds


Reduce = Callable[[Roster, float], Awaitable[str]]
Obtain = Callable[[str, tuple[PeerId, ...]], Awaitable[None]]


class Agreement:
    """One node's part in the agreements of one run. `advance` first, then `agree` once a round."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        rpc: Rpc,
        liveness: Liveness,
        settings: AgreementSettings,
        admits: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        self._me = me
        self._run_id = run_id
        self._rpc = rpc
        self._liveness = liveness
        self._settings = settings
        self._admits = admits
        self._standing = Standing(
            me=me, run_id=run_id, rpc=rpc, liveness=liveness, group_size=settings.group_size, admits=admits
        )
        self._straggling = AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
        self._reducing = AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
        self._broken: set[Link] = set()  # reported to this node as leader, in this round
        self._failures = 0  # ballots that this node led in this round, in vain
        self.late_by = 0.0  # seconds that others were into the next round when `agree` learned the last decision

    # --- where this node stands -------------------------------------------------------------------------------------

    def advance(self, position: Position, *, elapsed: float = 0.0) -> None:
        """Go to a round. `elapsed` is how long ago the others began it, in seconds."""
        self._standing.advance(position, elapsed=elapsed)
        self._broken.clear()
        self._failures = 0

    @property
    def position(self) -> Position:
        """Raises RuntimeError before the first `advance`."""
        return self._standing.position

    @property
    def paused(self) -> bool:
        """Whether this node leads nobody for now, and says so."""
        return self._standing.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._standing.paused = paused

    def head(self) -> Head:
        """What this node tells others about where it stands."""
        return self._standing.head()

    def waiting_to_join(self) -> tuple[PeerId, ...]:
        """Who asked to be named, in the order in which they asked first."""
        return self._standing.waiting_to_join()

    async def ask_head(self, peer: PeerId, *, timeout: float) -> Head:
        """Where `peer` stands in this run. Raises CallError."""
        return await self._rpc.call(peer, "round.head", HeadQuery(self._run_id), Head, timeout=timeout)

    async def ask_to_join(self, peer: PeerId, *, timeout: float) -> Head:
        """Ask `peer` to have this node named in the next roster. Raises CallError."""
        return await self._rpc.call(peer, "round.join", Join(self._run_id), Head, timeout=timeout)

    async def say_goodbye(self) -> None:
        """Tell the other candidates, in parallel and within a second, not to wait for this node in this round."""
        message = Goodbye(self._run_id, self.position.round)

        async def tell(peer: PeerId) -> None:
            try:
                await self._rpc.call(peer, "round.goodbye", message, Noted, timeout=1.0)
            except CallError as error:
                logger.debug("goodbye to %s did not arrive: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in self._standing.candidates():
                if peer != self._me:
                    nursery.start_soon(tell, peer)

    # --- one round --------------------------------------------------------------------------------------------------

    async def agree(
        self, *, samples: int, train_seconds: float, rates: dict[str, float], reduce: Reduce, obtain: Obtain
    ) -> Decision:
        """Take part in the present round until it is decided.

        `reduce(roster, within)` exchanges parts and returns the hash of the next state, which it keeps; it raises
        PartsMissing when it has waited `within` seconds for somebody.
        `obtain(state_hash, holders)` fetches that next state; it returns at once when it is held already.
        Raises Behind when this node has to catch up first, LeftOut when it is no candidate and nobody leads it. Ends
        with the window, deadlines and suspicions of its peers; alone, it decides alone.
        """
        standing, here = self._standing, self.position
        candidates = standing.candidates()
        self.late_by = 0.0
        attempts = 0
        while True:
            ballot = standing.ballot
            leader = candidates[ballot % len(candidates)]
            joiners = tuple(sorted(standing.waiting_to_join()))
            ready = Ready(
                self._run_id,
                here.round,
                ballot,
                here.parent,
                samples,
                train_seconds,
                rates,
                joiners,
                standing.accepted,
            )
            decision: Decision | None = None
            try:
                with trio.CancelScope() as standing.attempt:
                    if leader == self._me:
                        decision = await self._lead(ready, candidates, reduce, obtain)
                    else:
                        decision = await self._follow(leader, ready, reduce, obtain)
                if decision is not None:
                    standing.decided(decision)
                    return decision
            finally:
                standing.raise_ballot(ballot + 1)  # two proposals in one ballot could both be accepted
            attempts += 1
            if self._me not in candidates and attempts >= len(candidates):
                raise LeftOut(f"none of the {len(candidates)} candidates of round {here.round} answers")
            # one breath between attempts, so that a swarm that cannot agree does not spin
            await trio.sleep(min(0.02 * attempts, 0.5))

    async def _follow(self, leader: PeerId, ready: Ready, reduce: Reduce, obtain: Obtain) -> Decision | None:
        """One ballot under another's lead. None: go to the next ballot."""
        standing = self._standing
        patience = ready_patience(self.position.window, self._settings.ceiling)
        try:
            verdict = await self._liveness.unless_gone(
                leader, lambda: self._rpc.call(leader, "round.ready", ready, Verdict, timeout=patience)
            )
            match verdict:
                case Verdict(kind="ahead", decision=Decision() as decision) if standing.ends(decision):
                    self._note_lateness(verdict.head)
                    return decision
                case Verdict(kind="ahead" | "elsewhere", head=Head() as head) if standing.should_follow(head):
                    raise Behind(head, leader)
                case Verdict(kind="adopt", accepted=Accepted() as accepted) if standing.continues(accepted.roster):
                    report = await self._adopt(accepted, verdict.holders, ready, obtain)
                case Verdict(kind="roster", roster=Roster() as roster) if standing.is_for(roster, ready.ballot):
                    report = await self._reduce(roster, ready, reduce)
                case Verdict(kind="late"):
                    report = self._report(ready)
                case _:
                    standing.raise_ballot(verdict.ballot)
                    return None
            ruling = await self._liveness.unless_gone(
                leader, lambda: self._rpc.call(leader, "round.report", report, Ruling, timeout=patience)
            )
        except (PeerGoneSilent, CallError) as error:
            logger.info("round %d: the member that led it does not answer, another leads now", ready.round)
            logger.debug("ballot %d of round %d failed with its leader: %s", ready.ballot, ready.round, error)
            return None
        if ruling.decision is not None and standing.ends(ruling.decision):
            return ruling.decision
        standing.raise_ballot(ruling.ballot)
        return None

    def _note_lateness(self, head: Head | None) -> None:
        """A decision that was known to a peer at `head` already: how far into the round after it that peer is."""
        here = self.position
        if head is not None and head.round > here.round:
            self.late_by = head.elapsed if head.round == here.round + 1 else max(here.window, head.elapsed)

    def _report(self, ready: Ready, state_hash: str | None = None, missing: tuple[PeerId, ...] = ()) -> Report:
        return Report(self._run_id, ready.round, ready.ballot, state_hash, missing)

    async def _reduce(self, roster: Roster, ready: Ready, reduce: Reduce) -> Report:
        if self._me not in roster.peers:
            return self._report(ready)
        began = trio.current_time()
        try:
            state_hash = await reduce(roster, self._reducing.seconds())
        except PartsMissing as error:
            return self._report(ready, missing=error.peers)
        self._reducing.observe(trio.current_time() - began)
        self._standing.accepted = Accepted(ready.ballot, state_hash, roster)
        return self._report(ready, state_hash)

    async def _adopt(self, accepted: Accepted, holders: tuple[PeerId, ...], ready: Ready, obtain: Obtain) -> Report:
        try:
            await obtain(accepted.state_hash, holders)
        except PartsMissing as error:
            return self._report(ready, missing=error.peers)
        self._standing.accepted = replace(accepted, ballot=ready.ballot)
        return self._report(ready, accepted.state_hash)

    # --- leading ----------------------------------------------------------------------------------------------------

    async def _lead(
        self, ready: Ready, candidates: tuple[PeerId, ...], reduce: Reduce, obtain: Obtain
    ) -> Decision | None:
        """One ballot under this node's lead. None: go to the next ballot."""
        desk = self._standing.desk(ready.ballot)
        desk.readies[self._me] = ready
        others = [peer for peer in candidates if peer != self._me]
        found: list[Decision | Behind] = []  # what others say that makes this ballot pointless
        decision: Decision | None = None
        try:
            with self._liveness.watching(others):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._probe, ready, others, desk, found)
                    await self._gather(desk, candidates, found)
                    if not found:
                        verdict = self._close_roster(desk, candidates, ready.ballot)
                        desk.close(verdict)
                        nursery.start_soon(self._report_own, desk, verdict, ready, reduce, obtain)
                        decision = await self._collect(desk, verdict)
                    nursery.cancel_scope.cancel()
            match found:
                case [Behind() as behind, *_]:
                    raise behind
                case [Decision() as known, *_]:
                    decision = known
                    desk.close(Verdict("ahead", decision=decision, head=self.head()))
            if decision is None:
                self._standing.raise_ballot(self._next_ballot(ready.ballot, candidates))
            else:
                desk.rule(Ruling("decided", decision=decision))
            return decision
        finally:
            following = max(self._standing.ballot, ready.ballot + 1)
            desk.close(Verdict("again", ballot=following))
            desk.rule(Ruling("again", ballot=following))

    def _next_ballot(self, ballot: int, candidates: tuple[PeerId, ...]) -> int:
        """After a ballot that failed: the next that this node leads, or, where it is itself the trouble, the next."""
        self._failures += 1
        remaining = without_broken_links(candidates, self._broken)
        if self._me not in remaining or self._failures % FAILURES_AS_LEADER == 0:
            return ballot + 1
        return ballot + len(candidates)

    async def _report_own(self, desk: Desk, verdict: Verdict, ready: Ready, reduce: Reduce, obtain: Obtain) -> None:
        """The leader is a member too."""
        if verdict.accepted is not None:
            desk.reports[self._me] = await self._adopt(verdict.accepted, verdict.holders, ready, obtain)
        elif verdict.roster is not None:
            desk.reports[self._me] = await self._reduce(verdict.roster, ready, reduce)
        self._standing.ring()

    async def _gather(self, desk: Desk, candidates: tuple[PeerId, ...], found: list[Decision | Behind]) -> None:
        """Wait until the roster can be closed: all are ready or absent, or the stragglers' deadline has passed.

        Without a majority of the voters it waits `floor` seconds for those that are gone to come back, and for those
        that answer and are not ready until their window and another `ceiling` have passed; then it goes on without.
        """
        standing, settings, voters = self._standing, self._settings, self.position.voters
        began = latest = trio.current_time()
        patience = max(0.0, self.position.window - standing.elapsed()) + settings.ceiling
        half_at, present = math.inf, len(desk.readies)
        while not found:
            now = trio.current_time()
            if len(desk.readies) > present:
                latest, present = now, len(desk.readies)
            waited_for = [
                p for p in candidates if p not in desk.readies and p not in desk.away and not standing.is_absent(p)
            ]
            if half_at == math.inf and len(desk.readies) >= len(waited_for):
                half_at = now
            if sum(p in desk.readies for p in voters) >= majority(voters):
                give_up = min(began + settings.ceiling, half_at + self._straggling.seconds()) if waited_for else now
            elif waited_for:
                give_up = began + patience
            else:
                give_up = began + settings.floor
            if now >= give_up:
                if sum(p in desk.readies for p in voters) < majority(voters):
                    desk.away.update(waited_for)
                break
            await standing.changed(until=give_up)
        if half_at < math.inf:
            self._straggling.observe(max(0.0, latest - half_at))

    async def _probe(self, ready: Ready, others: list[PeerId], desk: Desk, found: list[Decision | Behind]) -> None:
        """Summon candidates to a later ballot, and look where those stand who should be ready and are not.

        A leader that was frozen, or cut off, learns in this way that the swarm went on without it.
        """
        message = Summon(self._run_id, ready.round, ready.ballot)

        async def look(peer: PeerId) -> None:
            try:
                head = await self._rpc.call(peer, "round.summon", message, Head, timeout=PROBE_EVERY)
                if self._standing.should_follow(head):
                    found.append(await self._decision_of(peer, ready) or Behind(head, peer))
                    self._note_lateness(head)
            except CallError as error:
                logger.debug("summons to %s failed: %s", peer, error)
                return
            if head.paused or (head.round == ready.round and head.state_hash != ready.parent):
                desk.away.add(peer)
            self._standing.ring()

        if ready.ballot == 0:
            await trio.sleep(PROBE_EVERY)
        while desk.verdict is None:
            async with trio.open_nursery() as nursery:
                for peer in others:
                    if peer not in desk.readies:
                        nursery.start_soon(look, peer)
            await trio.sleep(PROBE_EVERY)

    async def _decision_of(self, peer: PeerId, ready: Ready) -> Decision | None:
        """How the present round ended for a peer that is beyond it, where it still knows. Raises CallError."""
        ruling = await self._rpc.call(peer, "round.report", self._report(ready), Ruling, timeout=PROBE_EVERY)
        decision = ruling.decision
        return decision if decision is not None and self._standing.ends(decision) else None

    def _close_roster(self, desk: Desk, candidates: tuple[PeerId, ...], ballot: int) -> Verdict:
        """Who counts in this ballot; or the result of an earlier ballot that may have been decided."""
        here, settings = self.position, self._settings
        distrusted = [p for reporter, p in self._broken if reporter == self._me]
        adopted = result_to_adopt(desk.readies, here.voters, distrusted=distrusted)
        if adopted is not None:
            accepted, holders = adopted
            return Verdict("adopt", ballot=ballot, accepted=accepted, holders=holders)
        present = [p for p in candidates if p in desk.readies]
        able = without_broken_links(present, self._broken)
        if self._me not in able:
            able = (self._me,)
        desk.away.update(set(present) - set(able))
        members = able[: settings.group_size]
        readies = {p: desk.readies[p] for p in members}
        window = next_window(
            readies.values(), floor=settings.floor, present=here.window, elapsed=self._standing.elapsed()
        )
        asked = {j for r in readies.values() for j in r.joiners} | set(self._standing.waiting_to_join())
        room = max(0, settings.group_size - len(members))
        joiners = tuple(sorted(j for j in asked - set(members) if self._admits(j)))[:room]
        seats = seats_of(members, readies, weight_cap=settings.weight_cap)
        return Verdict("roster", roster=Roster(self._run_id, here.round, ballot, here.parent, seats, joiners, window))

    async def _collect(self, desk: Desk, verdict: Verdict) -> Decision | None:
        """Wait for reports; decide when it is safe and everybody had a chance to report, or give up (None)."""
        here, standing = self.position, self._standing
        roster = verdict.roster or (verdict.accepted.roster if verdict.accepted else None)
        if roster is None:
            raise ValueError(f"a leader closed its roster with the verdict {verdict.kind!r}")
        expected = set(roster.peers if verdict.roster else desk.readies)
        # whoever waits for parts gives up after `within` or twice that, and reports whose they were
        deadline = trio.current_time() + 2 * self._reducing.seconds() + REPORT_MARGIN
        while True:
            reports = {p: r for p, r in desk.reports.items() if p in expected}
            hashes = {p: r.state_hash for p, r in reports.items() if r.state_hash is not None}
            mine = hashes.get(self._me)
            holders = {p for p, hash in hashes.items() if hash == mine}
            outstanding = {p for p in expected if p not in reports and not standing.is_absent(p)}
            late = trio.current_time() >= deadline
            failed = any(r.missing for r in reports.values())
            if failed or late or not outstanding:
                reachable = [p for p in here.voters if p not in desk.away and not standing.is_absent(p)]
                if mine is not None and is_safe(holders, here.voters, reachable):
                    absent = (set(here.voters) | expected) - holders
                    return Decision(self._run_id, here.round, mine, roster, tuple(sorted(absent)))
                self._blame(reports, hashes, outstanding if late else set())
                return None
            await standing.changed(until=deadline)

    def _blame(self, reports: dict[PeerId, Report], hashes: dict[PeerId, str], silent: set[PeerId]) -> None:
        """Note between whom the exchange failed, so that the next ballot can do without some of them.

        `silent` did not report in time; who keeps the others waiting is named by them, if any of them reported.
        """
        broken = {(p, missed) for p, r in reports.items() for missed in r.missing}
        mine = hashes.get(self._me)
        differing = {p for p, hash in hashes.items() if mine is not None and hash != mine}
        if differing:
            logger.error("round %d: members computed different states from one roster", self.position.round)
        broken |= {(self._me, p) for p in differing}
        if not broken:
            broken = {(self._me, p) for p in silent if p != self._me}
        self._broken |= {(a, b) for a, b in broken if a != b}


def ready_patience(window: float, ceiling: float) -> float:
    """Seconds that a member waits for a leader that keeps answering pings: its window, its stragglers, and a margin."""
    return min(window + 2 * ceiling, LONGEST_WAIT)
