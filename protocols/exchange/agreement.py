"""How members agree on one result per round, though any of them may die or freeze at any moment.

Candidates of a round are the seats of the last roster (*voters*) and the joiners that it named. They are ordered by
sha-256(run ‖ round ‖ peer); ballot b is led by candidate b modulo their number. In each ballot

1. every member that has trained sends `round.ready` to the leader and waits;
2. the leader closes the roster when all candidates that it does not suspect are ready, or when an adaptive deadline
   for stragglers has passed, and answers every Ready with it;
3. members reduce (`allreduce.py`), compute the next state, *accept* it (keep it and its hash) and send `round.report`;
4. when a majority of the voters reports the same hash, and the others have reported or are suspected, the leader
   decides and answers every Report with the decision.

Who may fail when, and what is then true: a leader that dies or freezes is suspected by its followers (`liveness.py`),
who go to the next ballot and tell its leader what they accepted; a result that a majority accepted may have been
decided, so a new leader that hears of one lets everybody adopt it instead of making another (single-decree Paxos, one
instance a round). A member that dies while parts are exchanged makes the ballot fail at once (`missing` in a report);
the leader summons everybody to a new one without it. A member that comes late is told the decision and fetches the
state. So while a majority of voters is connected, all members go through the same states.

Where no majority can be reached for `deadline_floor` seconds, those who can reach one another go on (a swarm of two
must survive the loss of one); after a partition two histories may then exist, and `prefers` says which side gives way.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from statistics import median

import trio

from swarmnode.protocols.deadlines import AdaptiveDeadline
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
    Step,
    Summon,
    Verdict,
)
from swarmnode.protocols.exchange.roster import (
    Roster,
    Seat,
    capped_weights,
    leader_order,
    majority,
    shares_by_rate,
)
from swarmnode.protocols.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.rpc import CallError, Refuse, Rpc

logger = logging.getLogger(__name__)

HISTORY = 64  # rounds of state hashes kept, to recognise whether another node's history is ours
SHOWN_HISTORY = 16  # of them in a Head
JOIN_EXPIRES = 10.0  # seconds after which a joiner that asked no more is forgotten
PROBE_EVERY = 2.0  # seconds between looks at candidates that should be ready and are not
WINDOW_SLACK = 2.0  # members may train this multiple of the median member's time in the next round
LONGEST_WAIT = 500.0  # seconds of one call; below the limit that `rpc` puts on handlers
MAX_DESKS = 64  # ballots open at a time
MAX_JOINERS = 64  # joiners remembered at a time; a flood of them costs no more memory than this


class Behind(Exception):
    """The round was decided elsewhere, or others stand on another state: catch up with `head` before going on."""

    def __init__(self, head: Head, source: PeerId) -> None:
        super().__init__(f"{source} is at round {head.round}")
        self.head = head
        self.source = source


class PartsMissing(Exception):
    """A reduction could not be completed because of these peers."""

    def __init__(self, peers: tuple[PeerId, ...]) -> None:
        super().__init__("no parts from " + ", ".join(peers))
        self.peers = peers


@dataclass(frozen=True)
class Position:
    """Where a node stands: about to do `round` from the state `parent`, with the last roster's consequences."""

    round: int
    parent: str
    voters: tuple[PeerId, ...]
    joiners: tuple[PeerId, ...]
    window: float  # seconds


@dataclass(frozen=True)
class AgreementSettings:
    """From the RunSpec's `[exchange]`."""

    group_size: int
    weight_cap: float
    floor: float  # seconds
    ceiling: float  # seconds


@dataclass
class _Desk:
    """What the leader of one ballot collects."""

    readies: dict[PeerId, Ready] = field(default_factory=dict)
    verdict: Verdict | None = None
    closed: trio.Event = field(default_factory=trio.Event)
    reports: dict[PeerId, Report] = field(default_factory=dict)
    ruling: Ruling | None = None
    ruled: trio.Event = field(default_factory=trio.Event)

    def close(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.closed.set()

    def rule(self, ruling: Ruling) -> None:
        if self.ruling is None:
            self.ruling = ruling
            self.ruled.set()


def prefers(mine: Head, theirs: Head) -> bool:
    """Whether a node at `mine` should give way to a node at `theirs` whose history differs.

    More seats in the last roster win, then the later round, then the lower hash: a total order, so both sides agree.
    """

    def rank(head: Head) -> tuple[int, int, int]:
        return len(head.voters), head.round, -int(head.state_hash, 16)

    return rank(theirs) > rank(mine)


def diverged(mine: Head, theirs: Head) -> bool:
    """Whether the two histories contradict one another in some round that both remember."""
    known = {step.round: step.state_hash for step in mine.history}
    return any(known.get(step.round, step.state_hash) != step.state_hash for step in theirs.history)


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
        self._straggling = AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
        self._reducing = AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
        self._position: Position | None = None
        self._began = 0.0  # trio time at which this round began here
        self._ballot = 0
        self._accepted: Accepted | None = None
        self._attempt = trio.CancelScope()  # of the ballot in hand
        self._desks: dict[tuple[int, int], _Desk] = {}
        self._joining: dict[PeerId, float] = {}
        self._excused: set[PeerId] = set()  # said goodbye in this round
        self._decisions: deque[Decision] = deque(maxlen=4)
        self._history: deque[Step] = deque(maxlen=HISTORY)
        self._bell = trio.Event()
        self.paused = False
        liveness.on_suspicion(self._ring)
        rpc.serve("round.head", HeadQuery, self._on_head)
        rpc.serve("round.join", Join, self._on_join)
        rpc.serve("round.ready", Ready, self._on_ready)
        rpc.serve("round.report", Report, self._on_report)
        rpc.serve("round.summon", Summon, self._on_summon)
        rpc.serve("round.goodbye", Goodbye, self._on_goodbye)

    # --- where this node stands -------------------------------------------------------------------------------------

    def advance(self, position: Position, *, elapsed: float = 0.0) -> None:
        """Go to a round. `elapsed` is how long ago the others began it, in seconds."""
        before = self._position
        self._position = position
        self._began = trio.current_time() - elapsed
        self._ballot = 0
        self._accepted = None
        self._excused.clear()
        if before is not None and (before.round >= position.round):
            self._history.clear()  # another history than ours was adopted
        self._history.append(Step(position.round - 1, position.parent))
        for (round, ballot), desk in list(self._desks.items()):
            if round < position.round:
                desk.close(self._verdict_for_past(round))
                desk.rule(Ruling("again", ballot=ballot + 1))
                del self._desks[round, ballot]
        self._ring()

    @property
    def position(self) -> Position:
        if self._position is None:
            raise RuntimeError("Agreement.advance was never called")
        return self._position

    def head(self) -> Head:
        """What this node tells others about where it stands."""
        here = self.position
        return Head(
            self._run_id,
            here.round,
            here.parent,
            here.voters,
            here.joiners,
            tuple(self._history)[-SHOWN_HISTORY:],
            trio.current_time() - self._began,
            here.window,
            self.paused,
        )

    def waiting_to_join(self) -> tuple[PeerId, ...]:
        """Who asked to be named, in the order in which they asked first."""
        self._forget_old_joiners()
        return tuple(self._joining)

    def window_left(self) -> float:
        """Seconds until this round's training window closes."""
        return max(0.0, self.position.window - (trio.current_time() - self._began))

    async def ask_head(self, peer: PeerId, *, timeout: float) -> Head:
        """Where `peer` stands in this run. Raises CallError."""
        return await self._rpc.call(peer, "round.head", HeadQuery(self._run_id), Head, timeout=timeout)

    async def ask_to_join(self, peer: PeerId, *, timeout: float) -> Head:
        """Ask `peer` to have this node named in the next roster. Raises CallError."""
        return await self._rpc.call(peer, "round.join", Join(self._run_id), Head, timeout=timeout)

    async def say_goodbye(self) -> None:
        """Tell the other candidates, in parallel and within a second, not to wait for this node in this round."""
        here = self.position
        message = Goodbye(self._run_id, here.round)

        async def tell(peer: PeerId) -> None:
            try:
                await self._rpc.call(peer, "round.goodbye", message, Noted, timeout=1.0)
            except CallError as error:
                logger.debug("goodbye to %s did not arrive: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in set(here.voters) | set(here.joiners):
                if peer != self._me:
                    nursery.start_soon(tell, peer)

    # --- one round --------------------------------------------------------------------------------------------------

    async def agree(
        self,
        *,
        samples: int,
        train_seconds: float,
        rates: dict[str, float],
        reduce: Callable[[Roster], Awaitable[str]],
        obtain: Callable[[str, tuple[PeerId, ...]], Awaitable[None]],
    ) -> Decision:
        """Take part in the present round until it is decided.

        `reduce(roster)` exchanges parts and returns the hash of the next state, which it keeps; it raises PartsMissing.
        `obtain(state_hash, holders)` fetches that next state; it returns at once when it is held already.
        Raises Behind when this node has to catch up first. Ends with the window, deadlines and suspicions of its peers;
        alone, it decides alone.
        """
        here = self.position
        candidates = self._candidates()
        while True:
            ballot = self._ballot
            leader = candidates[ballot % len(candidates)]
            ready = Ready(
                self._run_id,
                here.round,
                ballot,
                here.parent,
                samples,
                train_seconds,
                rates,
                self._current_joiners(),
                self._accepted,
            )
            decision: Decision | None = None
            with trio.CancelScope() as self._attempt:
                if leader == self._me:
                    decision = await self._lead(ready, candidates, reduce, obtain)
                else:
                    decision = await self._follow(leader, ready, reduce, obtain)
            if decision is not None:
                self._decisions.append(decision)
                return decision
            if self._ballot == ballot:
                self._ballot = ballot + 1
            # one breath between attempts, so that a swarm that cannot agree does not spin
            await trio.sleep(min(0.02 * (self._ballot - ballot), 0.5))

    async def _follow(
        self,
        leader: PeerId,
        ready: Ready,
        reduce: Callable[[Roster], Awaitable[str]],
        obtain: Callable[[str, tuple[PeerId, ...]], Awaitable[None]],
    ) -> Decision | None:
        """One ballot under another's lead. None: go to the next ballot."""
        patience = ready_patience(self.position.window, self._settings.ceiling)
        try:
            verdict = await self._liveness.unless_gone(
                leader, lambda: self._rpc.call(leader, "round.ready", ready, Verdict, timeout=patience)
            )
            match verdict:
                case Verdict(kind="ahead", decision=Decision() as decision) if decision.round == ready.round:
                    return decision
                case Verdict(kind="ahead" | "elsewhere", head=Head() as head):
                    raise Behind(head, leader)
                case Verdict(kind="adopt", accepted=Accepted() as accepted) if accepted.roster.parent == ready.parent:
                    report = await self._adopt(accepted, verdict.holders, ready, obtain)
                case Verdict(kind="roster", roster=Roster() as roster) if self._is_for(roster, ready):
                    report = await self._reduce(roster, ready, reduce)
                case _:
                    self._ballot = max(self._ballot, verdict.ballot)
                    return None
            ruling = await self._liveness.unless_gone(
                leader, lambda: self._rpc.call(leader, "round.report", report, Ruling, timeout=patience)
            )
        except (PeerGoneSilent, CallError) as error:
            logger.info("round %d: ballot %d failed with its leader: %s", ready.round, ready.ballot, error)
            return None
        if ruling.decision is None or ruling.decision.round != ready.round:
            self._ballot = max(self._ballot, ruling.ballot)
        return ruling.decision

    async def _lead(
        self,
        ready: Ready,
        candidates: tuple[PeerId, ...],
        reduce: Callable[[Roster], Awaitable[str]],
        obtain: Callable[[str, tuple[PeerId, ...]], Awaitable[None]],
    ) -> Decision | None:
        """One ballot under this node's lead. None: go to the next ballot."""
        desk = self._desk(ready.round, ready.ballot)
        desk.readies[self._me] = ready
        others = [peer for peer in candidates if peer != self._me]
        again = ready.ballot + len(candidates)  # the next ballot that this node leads
        elsewhere: list[Behind] = []
        decision: Decision | None = None
        try:
            with self._liveness.watching(others):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._probe, ready, others, desk, elsewhere)
                    await self._gather(desk, candidates, elsewhere)
                    if not elsewhere:
                        verdict = self._close_roster(desk, candidates)
                        desk.close(verdict)
                        nursery.start_soon(self._report_own, desk, verdict, ready, reduce, obtain)
                        decision = await self._collect(desk, verdict)
                    nursery.cancel_scope.cancel()
            if elsewhere:
                raise elsewhere[0]
            if decision is None:
                self._ballot = max(self._ballot, again)
                desk.rule(Ruling("again", ballot=again))
            else:
                desk.rule(Ruling("decided", decision=decision))
            return decision
        finally:
            desk.close(Verdict("again", ballot=max(self._ballot, ready.ballot + 1)))
            desk.rule(Ruling("again", ballot=max(self._ballot, ready.ballot + 1)))

    async def _report_own(
        self,
        desk: _Desk,
        verdict: Verdict,
        ready: Ready,
        reduce: Callable[[Roster], Awaitable[str]],
        obtain: Callable[[str, tuple[PeerId, ...]], Awaitable[None]],
    ) -> None:
        """The leader is a member too."""
        if verdict.accepted is not None:
            desk.reports[self._me] = await self._adopt(verdict.accepted, verdict.holders, ready, obtain)
        elif verdict.roster is not None:
            desk.reports[self._me] = await self._reduce(verdict.roster, ready, reduce)
        self._ring()

    async def _reduce(self, roster: Roster, ready: Ready, reduce: Callable[[Roster], Awaitable[str]]) -> Report:
        if self._me not in roster.peers:
            return Report(self._run_id, ready.round, ready.ballot, None, ())
        began = trio.current_time()
        try:
            state_hash = await reduce(roster)
        except PartsMissing as error:
            return Report(self._run_id, ready.round, ready.ballot, None, error.peers)
        self._reducing.observe(trio.current_time() - began)
        self._accepted = Accepted(ready.ballot, state_hash, roster)
        return Report(self._run_id, ready.round, ready.ballot, state_hash, ())

    async def _adopt(
        self,
        accepted: Accepted,
        holders: tuple[PeerId, ...],
        ready: Ready,
        obtain: Callable[[str, tuple[PeerId, ...]], Awaitable[None]],
    ) -> Report:
        try:
            await obtain(accepted.state_hash, holders)
        except PartsMissing as error:
            return Report(self._run_id, ready.round, ready.ballot, None, error.peers)
        self._accepted = replace(accepted, ballot=ready.ballot)
        return Report(self._run_id, ready.round, ready.ballot, accepted.state_hash, ())

    def _is_for(self, roster: Roster, ready: Ready) -> bool:
        """Whether a roster from a leader belongs to this round, ballot and state."""
        return (roster.run_id, roster.round, roster.ballot, roster.parent) == (
            self._run_id,
            ready.round,
            ready.ballot,
            ready.parent,
        )

    # --- leading ----------------------------------------------------------------------------------------------------

    def _absent(self, peer: PeerId) -> bool:
        return peer in self._excused or self._liveness.is_suspected(peer)

    async def _gather(self, desk: _Desk, candidates: tuple[PeerId, ...], elsewhere: list[Behind]) -> None:
        """Wait until the roster can be closed: all are ready or absent, or the stragglers' deadline has passed.

        Without a majority of the voters it waits `floor` seconds more for them to come back.
        """
        here = self.position
        began = trio.current_time()
        half_at = math.inf
        while not elsewhere:
            now = trio.current_time()
            waited_for = [p for p in candidates if p not in desk.readies and not self._absent(p)]
            if half_at == math.inf and len(desk.readies) >= len(waited_for):
                half_at = now
            lacks_majority = sum(p in desk.readies for p in here.voters) < majority(here.voters)
            if not waited_for and not (lacks_majority and now < began + self._settings.floor):
                break
            give_up = min(began + self._settings.ceiling, half_at + self._straggling.seconds())
            if waited_for and now >= give_up:
                break
            await self._next_change(until=give_up if waited_for else began + self._settings.floor)
        if half_at < math.inf:
            self._straggling.observe(trio.current_time() - half_at)

    async def _probe(self, ready: Ready, others: list[PeerId], desk: _Desk, elsewhere: list[Behind]) -> None:
        """Summon candidates to a later ballot, and look where those stand who should be ready and are not.

        A leader that was frozen, or cut off, learns in this way that the swarm went on without it.
        """
        message = Summon(self._run_id, ready.round, ready.ballot)

        async def look(peer: PeerId) -> None:
            try:
                head = await self._rpc.call(peer, "round.summon", message, Head, timeout=PROBE_EVERY)
            except CallError as error:
                logger.debug("summons to %s failed: %s", peer, error)
                return
            apart = head.round == ready.round and head.state_hash != ready.parent and prefers(self.head(), head)
            if head.round > ready.round or apart:
                elsewhere.append(Behind(head, peer))
                self._ring()

        if ready.ballot == 0:
            await trio.sleep(PROBE_EVERY)
        while desk.verdict is None:
            async with trio.open_nursery() as nursery:
                for peer in others:
                    if peer not in desk.readies:
                        nursery.start_soon(look, peer)
            await trio.sleep(PROBE_EVERY)

    def _close_roster(self, desk: _Desk, candidates: tuple[PeerId, ...]) -> Verdict:
        """Who counts in this ballot; or the result of an earlier ballot that may have been decided."""
        here = self.position
        accepted = [r.accepted for r in desk.readies.values() if r.accepted is not None]
        if accepted:
            latest = max(accepted, key=lambda a: a.ballot)
            holders = tuple(
                p for p, r in desk.readies.items() if r.accepted and r.accepted.state_hash == latest.state_hash
            )
            return Verdict("adopt", ballot=self._ballot, accepted=latest, holders=holders)
        members = [p for p in candidates if p in desk.readies][: self._settings.group_size]
        readies = {p: desk.readies[p] for p in members}
        weights = capped_weights({p: r.samples for p, r in readies.items()}, self._settings.weight_cap)
        shares = shares_by_rate({p: _median_rate(p, readies) for p in members})
        seats = tuple(Seat(p, weights[p], shares[p]) for p in members)
        asked = {j for r in readies.values() for j in r.joiners} - set(members)
        room = max(0, self._settings.group_size - len(members))
        joiners = tuple(sorted(j for j in asked if self._admits(j)))[:room]
        roster = Roster(self._run_id, here.round, self._ballot, here.parent, seats, joiners, self._next_window(readies))
        return Verdict("roster", roster=roster)

    def _next_window(self, readies: dict[PeerId, Ready]) -> float:
        """Seconds for the next round's training, from how long this one's took the median member."""
        worked = [r.train_seconds for r in readies.values() if r.samples > 0]
        if not worked:
            return self.position.window
        return max(WINDOW_SLACK * median(worked), self._settings.floor)

    async def _collect(self, desk: _Desk, verdict: Verdict) -> Decision | None:
        """Wait for reports; decide when it is safe and everybody had a chance to report, or give up (None)."""
        here = self.position
        roster = verdict.roster or (verdict.accepted.roster if verdict.accepted else None)
        if roster is None:
            raise ValueError(f"a leader closed its roster with the verdict {verdict.kind!r}")
        expected = set(roster.peers) if verdict.roster else set(desk.readies)
        deadline = trio.current_time() + self._reducing.seconds()
        while True:
            holders = {p: r.state_hash for p, r in desk.reports.items() if r.state_hash is not None}
            if len(set(holders.values())) > 1:
                logger.error("round %d: members computed different states from one roster; trying again", here.round)
                return None
            failed = any(r.missing for r in desk.reports.values())
            late = trio.current_time() >= deadline
            outstanding = {p for p in expected if p not in desk.reports and not self._absent(p)}
            if failed or late or not outstanding:
                if self._me not in holders or not self._is_safe(desk, set(holders)):
                    return None
                absent = (set(here.voters) | expected) - set(holders)
                return Decision(self._run_id, here.round, holders[self._me], roster, tuple(sorted(absent)))
            await self._next_change(until=deadline)

    def _is_safe(self, desk: _Desk, holders: set[PeerId]) -> bool:
        """Whether no later leader can decide otherwise: a majority of the voters holds the result.

        Where most voters cannot be reached, all that can be must hold it; a partition may then have two histories.
        """
        voters = self.position.voters
        if sum(p in holders for p in voters) >= majority(voters):
            return True
        reachable = {p for p in voters if p in desk.readies and not self._absent(p)}
        return len(reachable) < majority(voters) and holders >= reachable

    # --- requests of others -----------------------------------------------------------------------------------------

    def _check(self, run_id: str, peer: PeerId) -> None:
        if run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if not self._admits(peer):
            raise Refuse("not-a-member", "the run lists its members, and this peer is not among them")
        if self._position is None:
            raise Refuse("starting", "this node does not know the state of the run yet; ask again later")

    async def _on_head(self, peer: PeerId, query: HeadQuery) -> Head:
        self._check(query.run_id, peer)
        return self.head()

    async def _on_join(self, peer: PeerId, join: Join) -> Head:
        self._check(join.run_id, peer)
        if peer in self._joining or len(self._joining) < MAX_JOINERS:
            self._joining[peer] = trio.current_time()
        self._ring()
        return self.head()

    async def _on_goodbye(self, peer: PeerId, goodbye: Goodbye) -> Noted:
        self._check(goodbye.run_id, peer)
        if goodbye.round == self.position.round:
            self._excused.add(peer)
            self._joining.pop(peer, None)
            self._liveness.said_goodbye(peer)
            self._ring()
        return Noted()

    async def _on_summon(self, peer: PeerId, summon: Summon) -> Head:
        self._check(summon.run_id, peer)
        here = self.position
        candidates = self._candidates()
        rightful = candidates[summon.ballot % len(candidates)] == peer
        if summon.round == here.round and summon.ballot > self._ballot and rightful:
            self._ballot = summon.ballot
            self._attempt.cancel()
        return self.head()

    async def _on_ready(self, peer: PeerId, ready: Ready) -> Verdict:
        self._check(ready.run_id, peer)
        here = self.position
        if ready.round < here.round:
            return self._verdict_for_past(ready.round)
        if ready.round > here.round + 1 or (ready.round == here.round and ready.parent != here.parent):
            return Verdict("elsewhere", head=self.head())
        if self.paused:
            raise Refuse("paused", "this node is paused and leads nobody")
        if ready.round == here.round and self._candidates()[ready.ballot % len(self._candidates())] != self._me:
            raise Refuse("not-leader", "this ballot belongs to another candidate")
        if len(self._desks) >= MAX_DESKS and (ready.round, ready.ballot) not in self._desks:
            raise Refuse("busy", "too many ballots are open")
        desk = self._desk(ready.round, ready.ballot)
        if desk.verdict is None:
            desk.readies[peer] = ready
            self._ring()
            self._take_over(ready)
            try:
                await desk.closed.wait()
            finally:
                if desk.verdict is None and desk.readies.get(peer) is ready:
                    del desk.readies[peer]
        assert desk.verdict is not None
        return desk.verdict

    def _take_over(self, ready: Ready) -> None:
        """Leave the present ballot for a later one that others want this node to lead, when most of them do."""
        here = self.position
        if ready.round != here.round or ready.ballot <= self._ballot:
            return
        candidates = self._candidates()
        waiting = self._desk(ready.round, ready.ballot).readies
        if 2 * len(waiting) >= len([p for p in candidates if not self._absent(p)]) - 1:
            self._ballot = ready.ballot
            self._attempt.cancel()

    async def _on_report(self, peer: PeerId, report: Report) -> Ruling:
        self._check(report.run_id, peer)
        for decision in self._decisions:
            if decision.round == report.round:
                return Ruling("decided", decision=decision)
        desk = self._desks.get((report.round, report.ballot))
        if desk is None or (desk.verdict is None):
            return Ruling("again", ballot=self._ballot)
        desk.reports[peer] = report
        self._ring()
        await desk.ruled.wait()
        assert desk.ruling is not None
        return desk.ruling

    # --- small things -----------------------------------------------------------------------------------------------

    def _verdict_for_past(self, round: int) -> Verdict:
        decided = next((d for d in self._decisions if d.round == round), None)
        return Verdict("ahead", decision=decided, head=self.head())

    def _candidates(self) -> tuple[PeerId, ...]:
        here = self.position
        return leader_order(self._run_id, here.round, here.voters, here.joiners)

    def _desk(self, round: int, ballot: int) -> _Desk:
        return self._desks.setdefault((round, ballot), _Desk())

    def _current_joiners(self) -> tuple[PeerId, ...]:
        self._forget_old_joiners()
        return tuple(sorted(p for p in self._joining if p not in self.position.joiners))

    def _forget_old_joiners(self) -> None:
        now, voters = trio.current_time(), self.position.voters
        self._joining = {p: t for p, t in self._joining.items() if now - t < JOIN_EXPIRES and p not in voters}

    def _ring(self) -> None:
        self._bell.set()
        self._bell = trio.Event()

    async def _next_change(self, *, until: float) -> None:
        """Wait for any news, at most until `until` (trio time)."""
        with trio.move_on_at(until):
            await self._bell.wait()


def ready_patience(window: float, ceiling: float) -> float:
    """Seconds that a member waits for a leader that keeps answering pings: its window, its stragglers, and a margin."""
    return min(window + 2 * ceiling, LONGEST_WAIT)


def _median_rate(peer: PeerId, readies: dict[PeerId, Ready]) -> float | None:
    """What the others measured when they fetched from `peer`; what it says of itself does not count."""
    measured = [r.rates[peer] for p, r in readies.items() if p != peer and r.rates.get(peer, 0.0) > 0]
    return median(measured) if measured else None
