"""A leader's work in one ballot: close a roster, collect the members' reports, decide or give the ballot up.

`Leader.lead` is the whole of it; `agreement.py` calls it for the ballots that are this node's. What members send lies
on the ballot's *desk* in `standing.py`, where their calls wait for the answers that are given here; what may be
concluded from it stands in `ballots.py`.

Who may fail when, and what is then true: a candidate that dies, says goodbye or lingers beyond the stragglers' deadline
is left out of the roster. A member that fails in the exchange is named by who missed it; the ballot is then given up,
and the next does without one end of each broken link. A leader that finds others beyond it, since it was frozen or cut
off, takes their decision or raises Behind. However `lead` ends, by an error or cancelled too, whoever waits at the desk
is answered. What this node learned of broken links and of its own failures holds until `new_round`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.methods.known.acceptor import Desk, Standing
from swarmnode.protocols.methods.known.ballots import (
    Link,
    is_safe,
    next_window,
    result_to_adopt,
    seats_of,
    without_broken_links,
)
from swarmnode.protocols.methods.known.bounds import MAX_SEATS
from swarmnode.protocols.methods.known.messages import Decision, Head, Ready, Report, Ruling, Summon, Verdict
from swarmnode.protocols.methods.known.repartition import cut_to_keep
from swarmnode.protocols.methods.known.roster import Roster, majority
from swarmnode.protocols.methods.outcomes import Behind
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness

logger = logging.getLogger(__name__)

PROBE_EVERY = 2.0  # seconds between looks at candidates that should be ready and are not
REPORT_MARGIN = 5.0  # seconds that a leader waits for reports beyond the time that a reduction may take
FAILURES_AS_LEADER = 3  # ballots in a row that one leader may fail before another candidate tries

MANY = 16  # others from which on a leader pings each of them less often, and notices silence later than its neighbours

TakePart = Callable[[Verdict], Awaitable[Report]]


@dataclass(frozen=True)
class AgreementSettings:
    """From the RunSpec's `[exchange]`."""

    weight_cap: float
    floor: float  # seconds
    ceiling: float  # seconds


class Leader:
    """This node as the leader of its ballots in one run. `lead` one ballot at a time; `new_round` between rounds."""

    def __init__(
        self,
        *,
        me: PeerId,
        standing: Standing,
        rpc: Rpc,
        liveness: Liveness,
        settings: AgreementSettings,
        admits: Callable[[PeerId], bool],
    ) -> None:
        self._me = me
        self._standing = standing
        self._rpc = rpc
        self._liveness = liveness
        self._settings = settings
        self._admits = admits
        self._straggling = AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
        self._broken: set[Link] = set()  # reported to this node in this round
        self._failures = 0  # ballots that this node led in this round, in vain

    def new_round(self) -> None:
        """Forget what went wrong in the round before; how long stragglers take is remembered."""
        self._broken.clear()
        self._failures = 0

    async def lead(
        self,
        ready: Ready,
        candidates: tuple[PeerId, ...],
        *,
        within: float,
        silence: float | None,
        take_part: TakePart,
    ) -> Decision | None:
        """The ballot of `ready`, this node's own, among `candidates`. None: go to the next ballot.

        `take_part(verdict)` does this node's part as a member and returns its report; `within` is how many seconds a
        reduction may wait for somebody, `silence` for how many one may give no sign of life while others wait for it.
        Raises Behind when the others are elsewhere.
        """
        desk = self._standing.desk(ready.ballot)
        desk.readies[self._me] = ready
        others = [peer for peer in candidates if peer != self._me]
        found: list[Decision | Behind] = []  # what others say that makes this ballot pointless
        decision: Decision | None = None
        try:
            with self._liveness.watching(others):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._probe, ready, others, desk, found)
                    await self._gather(desk, candidates, found, silence)
                    if not found:
                        verdict = self._close_roster(desk, candidates, ready.ballot)
                        desk.close(verdict)
                        nursery.start_soon(self._report_own, desk, verdict, take_part)
                        with self._liveness.watching(others, within=silence and silence * max(1, len(others) / MANY)):
                            decision = await self._collect(desk, verdict, within)
                    nursery.cancel_scope.cancel()
            match found:
                case [Behind() as behind, *_]:
                    raise behind
                case [Decision() as known, *_]:
                    decision = known
                    desk.close(Verdict("ahead", decision=decision, head=self._standing.head()))
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

    async def _report_own(self, desk: Desk, verdict: Verdict, take_part: TakePart) -> None:
        """The leader is a member too."""
        desk.reports[self._me] = await take_part(verdict)
        self._standing.ring()

    async def _gather(
        self,
        desk: Desk,
        candidates: tuple[PeerId, ...],
        found: list[Decision | Behind],
        silence: float | None,
    ) -> None:
        """Wait until the roster can be closed: all are ready or absent, or the stragglers' deadline has passed.

        Once half are ready, `silence` seconds without a sign of life make one of the others absent. Nobody is waited
        for who would not be let in, such as a voter that was banned since.

        Without a majority of the voters it waits `floor` seconds for those that are gone to come back, and for those
        that answer and are not ready until their window and another `ceiling` have passed; then it goes on without.
        """
        standing, settings = self._standing, self._settings
        voters = standing.position.voters
        began = latest = trio.current_time()
        patience = max(0.0, standing.position.window - standing.elapsed()) + settings.ceiling
        half_at, present = math.inf, len(desk.readies)
        usable = without_broken_links(candidates, self._broken)  # the others would have no place in the roster
        while not found:
            now = trio.current_time()
            if len(desk.readies) > present:
                latest, present = now, len(desk.readies)
            waited_for = [
                p
                for p in usable
                if p not in desk.readies and p not in desk.away and not standing.is_absent(p) and self._admits(p)
            ]
            if half_at == math.inf and len(desk.readies) >= len(waited_for):
                half_at = now
            if sum(p in desk.readies for p in voters) >= majority(voters):
                give_up = min(began + settings.ceiling, half_at + self._straggling.seconds()) if waited_for else now
            elif waited_for:
                give_up = began + patience
            elif all(p in desk.readies or standing.said_goodbye(p) for p in voters):
                give_up = now  # nobody vanished: those who are missing left in order
            else:
                give_up = began + settings.floor
            if now >= give_up:
                if sum(p in desk.readies for p in voters) < majority(voters):
                    desk.away.update(waited_for)
                break
            with self._liveness.watching(waited_for if half_at < math.inf else (), within=silence):
                await standing.changed(until=give_up)
        if half_at < math.inf:
            self._straggling.observe(max(0.0, latest - half_at))

    async def _probe(self, ready: Ready, others: list[PeerId], desk: Desk, found: list[Decision | Behind]) -> None:
        """Summon candidates to a later ballot, and look where those stand who should be ready and are not.

        A leader that was frozen, or cut off, learns in this way that the swarm went on without it.
        """
        message = Summon(ready.run_id, ready.round, ready.ballot)

        async def look(peer: PeerId) -> None:
            try:
                head = await self._rpc.call(peer, "round.summon", message, Head, timeout=PROBE_EVERY)
                if self._standing.should_follow(head):
                    found.append(await self._decision_of(peer, ready) or Behind(head, peer))
                    self._standing.note_lateness(head)
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
        nothing = Report(ready.run_id, ready.round, ready.ballot, None, ())
        ruling = await self._rpc.call(peer, "round.report", nothing, Ruling, timeout=PROBE_EVERY)
        decision = ruling.decision
        return decision if decision is not None and self._standing.ends(decision) else None

    def _close_roster(self, desk: Desk, candidates: tuple[PeerId, ...], ballot: int) -> Verdict:
        """Who counts in this ballot; or the result of an earlier ballot that may have been decided."""
        standing, settings = self._standing, self._settings
        here = standing.position
        distrusted = [p for reporter, p in self._broken if reporter == self._me]
        adopted = result_to_adopt(desk.readies, here.voters, distrusted=distrusted)
        if adopted is not None:
            accepted, holders = adopted
            return Verdict("adopt", ballot=ballot, accepted=accepted, holders=holders)
        present = [p for p in candidates if p in desk.readies and (p == self._me or self._admits(p))]
        able = without_broken_links(present, self._broken)
        if self._me not in able:
            able = (self._me,)
        desk.away.update(set(present) - set(able))
        members = able[:MAX_SEATS]
        readies = {p: desk.readies[p] for p in members}
        window = next_window(readies.values(), floor=settings.floor, present=here.window, elapsed=standing.elapsed())
        asked = {j for r in readies.values() for j in r.joiners} | set(standing.waiting_to_join())
        room = MAX_SEATS - len(members)
        joiners = tuple(sorted(j for j in asked - set(members) if self._admits(j)))[:room]
        seats = seats_of(members, readies, weight_cap=settings.weight_cap)
        cut_by = cut_to_keep(standing.cut_by, seats)
        return Verdict(
            "roster", roster=Roster(standing.run_id, here.round, ballot, here.parent, seats, joiners, window, cut_by)
        )

    async def _collect(self, desk: Desk, verdict: Verdict, within: float) -> Decision | None:
        """Wait for reports; decide when it is safe and everybody had a chance to report, or give up (None)."""
        here, standing = self._standing.position, self._standing
        roster = verdict.roster or (verdict.accepted.roster if verdict.accepted else None)
        if roster is None:
            raise ValueError(f"a leader closed its roster with the verdict {verdict.kind!r}")
        expected = set(roster.peers if verdict.roster else desk.readies)
        # whoever waits for parts gives up after `within` or twice that, and reports whose they were
        deadline = trio.current_time() + 2 * within + REPORT_MARGIN
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
                    return Decision(standing.run_id, here.round, mine, roster, tuple(sorted(absent)))
                self._blame(reports, hashes, outstanding if late else set())
                return None
            await standing.changed(until=deadline)

    def _blame(self, reports: dict[PeerId, Report], hashes: dict[PeerId, str], silent: set[PeerId]) -> None:
        """Note between whom the exchange failed, so that the next ballot can do without some of them.

        `silent` did not report in time; who keeps the others waiting is named by them, if any of them reported. Who
        names itself, or somebody who has no part in the round, is the one to do without.
        """
        others = set(self._standing.candidates())
        broken = {
            (p, missed) if missed in others - {p} else (self._me, p) for p, r in reports.items() for missed in r.missing
        }
        mine = hashes.get(self._me)
        differing = {p for p, hash in hashes.items() if mine is not None and hash != mine}
        if differing:
            logger.error("round %d: members computed different states from one roster", self._standing.position.round)
        broken |= {(self._me, p) for p in differing}
        if not broken:
            broken = {(self._me, p) for p in silent if p != self._me}
        self._broken |= {(a, b) for a, b in broken if a != b}
