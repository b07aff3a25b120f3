"""What a node remembers of the round at hand (the acceptor of Paxos), and what it answers to others who ask.

`Acceptor` is the one place that remembers: the position, the ballot, what was accepted, recent decisions and hashes,
who asked to join, who said goodbye, and the open *boxes*, one for each ballot that others want this node to lead. Its
request handlers only note and answer; `agreement.py` acts on what they noted, woken by `changed`.

What a peer can make a node remember is bounded: it waits at one box at a time, and joiners are counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import trio

from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.known.messages import (
    LONGEST_WINDOW,
    MAX_SEATS,
    Accepted,
    Decision,
    Goodbye,
    HeadQuery,
    LeaderReply,
    Owner,
    Position,
    Ready,
    Report,
    RoundHead,
    RoundRoster,
    RoundStep,
    Summon,
    leader_order,
)
from swarmnode.protocols.methods.steering import SteeringWatch
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.wire import Empty

HISTORY = 16  # rounds of state hashes told, to recognise whether another node's history is ours
JOIN_EXPIRES = 10.0  # seconds after which a joiner that asked no more is forgotten
MAX_JOINERS = 64  # joiners remembered at a time; a flood of them costs no more memory than this
LAG = 30.0  # seconds that a Ready for the next round waits for this node to come into that round
SUMMONS = 4  # of a candidate that end attempts of others at once; then one in the time that an attempt may take
MAX_JUMP = 4096  # ballots that a peer may move this node forward at once; honest ones differ by a few

Link = tuple[PeerId, PeerId]  # who missed something, and from whom


class Answer:
    """What a leader tells all who wait at a box, once it knows: the first that is given."""

    def __init__(self) -> None:
        self.value: LeaderReply | None = None
        self._given = trio.Event()

    def give(self, reply: LeaderReply) -> None:
        if self.value is None:
            self.value = reply
            self._given.set()

    async def wait(self) -> LeaderReply:
        await self._given.wait()
        assert self.value is not None
        return self.value


@dataclass
class BallotBox:
    """What the leader of one ballot collects, and what it answers."""

    readies: dict[PeerId, Ready] = field(default_factory=dict)
    proposal: Answer = field(default_factory=Answer)  # to each Ready
    reports: dict[PeerId, Report] = field(default_factory=dict)
    ruling: Answer = field(default_factory=Answer)  # to each Report
    away: set[PeerId] = field(default_factory=set)  # candidates without whom this ballot goes on

    def end(self, ballot: int) -> None:
        """Send all who still wait to a later ballot."""
        self.proposal.give(LeaderReply("again", ballot=ballot))
        self.ruling.give(LeaderReply("again", ballot=ballot))


def rank(head: RoundHead) -> tuple[int, int, int]:
    """Of several histories, the one of highest rank is to be followed: a total order, so that all nodes agree.

    More voters who held the state when it was decided win, then the later round, then the lower hash.
    """
    return len({*head.voters} - {*head.missing}), head.round, -int(head.parent, 16)


def prefers(mine: RoundHead, theirs: RoundHead) -> bool:
    """Whether a node at `mine` should give way to a node at `theirs` whose history differs."""
    return rank(theirs) > rank(mine)


def diverged(mine: RoundHead, theirs: RoundHead) -> bool:
    """Whether the two histories contradict one another in some round that both remember."""
    known = {step.round: step.state_hash for step in mine.history}
    return any(known.get(step.round, step.state_hash) != step.state_hash for step in theirs.history)


class Acceptor:
    """One node's memory of the round at hand in one run; serves the `round.*` calls."""

    def __init__(self, parts: Context) -> None:
        self._parts = parts
        self.run_id = parts.run_id
        self.steering = SteeringWatch(parts)
        self._position: Position | None = None
        self._began = 0.0  # trio time at which this round began here
        self._news = trio.lowlevel.ParkingLot()  # of those who wait for any
        self.ballot = 0  # grows within a round; what was promised for it holds
        self.accepted: Accepted | None = None
        self.cut_by: tuple[Owner, ...] = ()  # owners in the last attempt at the round that this node was told of
        self.attempt = trio.CancelScope()  # of the ballot in hand
        self._summons = Budget[PeerId](Allowance(0.5 / parts.spec.exchange.deadline_ceiling, SUMMONS))  # that end it
        self.broken: set[Link] = set()  # links over which an exchange failed, as was reported to this node
        self.failures = 0  # ballots of the round that this node led in vain
        self.boxes: dict[int, BallotBox] = {}  # by ballot, of this round
        self._joining: dict[PeerId, float] = {}  # and when each asked last, trio time
        self.excused: dict[PeerId, int] = {}  # the round in which a peer itself told that it takes no part
        self.decisions: deque[Decision] = deque(maxlen=4)  # how the last rounds ended, for those who ask later
        self._history: deque[RoundStep] = deque(maxlen=HISTORY)
        self.paused = False
        self.late_by = 0.0  # seconds that others were into the next round when this node learned how its own ended
        parts.liveness.on_suspicion(self.notify)
        parts.rpc.serve("round.head", HeadQuery, self._on_head)
        parts.rpc.serve("round.ready", Ready, self._on_ready)
        parts.rpc.serve("round.report", Report, self._on_report)
        parts.rpc.serve("round.summon", Summon, self._on_summon)
        parts.rpc.serve("round.goodbye", Goodbye, self._on_goodbye)

    # --- where this node stands -------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Raises RuntimeError before the first `advance`."""
        if self._position is None:
            raise RuntimeError("Acceptor.advance was never called")
        return self._position

    def advance(self, position: Position, *, elapsed: float = 0.0) -> None:
        """Go to a round that the others began `elapsed` seconds ago. What was promised and accepted in it before still
        holds; what went wrong is forgotten."""
        before = self._position
        self.steering.take(position.steering, position.round)
        self._position = replace(position, window=min(position.window, LONGEST_WINDOW), steering=self.steering.now.raw)
        self._began = trio.current_time() - min(elapsed, LONGEST_WINDOW)
        if before is None or before.instance != position.instance:
            for ballot, box in self.boxes.items():
                if before is not None and before.round < position.round:
                    box.proposal.give(self._verdict_for_past(before.round))
                box.end(ballot + 1)
            self.boxes.clear()
            self.ballot = 0
            self.accepted = None
            self.cut_by = ()
            if before is not None and position.round != before.round + 1:
                self._history.clear()  # rounds are missing in between, or another history was adopted
            self._history.append(RoundStep(position.round - 1, position.parent))
        self.broken.clear()
        self.failures = 0
        self.excused = {p: r for p, r in self.excused.items() if r >= position.round}
        self.notify()

    def head(self) -> RoundHead:
        """What this node tells others about where it stands."""
        here = self.position
        place = here.round, here.parent, here.voters, here.joiners, here.window
        history, since = tuple(self._history), self.elapsed()
        return RoundHead(*place, self.run_id, history, since, self.paused, missing=here.missing, steering=here.steering)

    def elapsed(self) -> float:
        """Seconds since this round began."""
        return trio.current_time() - self._began

    def candidates(self) -> tuple[PeerId, ...]:
        """Who may have a seat in this round, in the order in which they lead."""
        here = self.position
        return leader_order(self.run_id, here.round, here.voters, here.joiners)

    def leader(self, ballot: int) -> PeerId:
        """Whose ballot this is."""
        candidates = self.candidates()
        return candidates[ballot % len(candidates)]

    def shut_out(self, peer: PeerId) -> None:
        """Somebody is not admitted any more: do not go on under its lead."""
        if self._position is not None and self.leader(self.ballot) == peer:
            self.attempt.cancel()

    def raise_ballot(self, ballot: int) -> None:
        """Go to a later ballot of this round; boxes of earlier ones are of no use any more."""
        self.ballot = max(self.ballot, min(ballot, self.ballot + MAX_JUMP))
        for old in [b for b in self.boxes if b < self.ballot]:
            self.boxes.pop(old).end(self.ballot)

    def go_on_to(self, ballot: int, leader: PeerId) -> None:
        """Go to a later ballot that `leader` names, unless it ended as many attempts as it may."""
        if ballot > self.ballot + 1 and self._summons.take(leader, 1.0):
            self.raise_ballot(ballot)

    def box(self, ballot: int) -> BallotBox:
        return self.boxes.setdefault(ballot, BallotBox())

    def is_absent(self, peer: PeerId) -> bool:
        """Whether a candidate need not be waited for: suspected, or it said goodbye."""
        return peer in self.excused or self._parts.liveness.is_suspected(peer)

    def note_lateness(self, head: RoundHead | None) -> None:
        """A decision that was known to a peer at `head` already: how far into the round after it that peer is."""
        here = self.position
        if head is not None and head.round > here.round:
            self.late_by = head.elapsed if head.round == here.round + 1 else max(here.window, head.elapsed)

    def waiting_to_join(self) -> tuple[PeerId, ...]:
        """Who asked to be named, in the order in which they asked first."""
        now = trio.current_time()
        named = {*self.position.voters, *self.position.joiners}
        self._joining = {p: t for p, t in self._joining.items() if now - t < JOIN_EXPIRES}
        return tuple(p for p in self._joining if p not in named)

    def notify(self) -> None:
        self._news.unpark_all()

    async def changed(self, *, until: float) -> None:
        """Wait for any news, at most until `until` (trio time)."""
        with trio.move_on_at(until):
            await self._news.park()

    # --- what of others' messages fits here -------------------------------------------------------------------------

    def should_follow(self, head: RoundHead) -> bool:
        """Whether a member at `head` is where this node ought to be: further, or on a better history."""
        here = self.position
        if head.run_id != self.run_id or head.round < here.round:
            return False
        return head.round > here.round or (head.parent != here.parent and prefers(self.head(), head))

    def continues(self, roster: RoundRoster) -> bool:
        """Whether a roster starts from where this node stands."""
        here = self.position
        return (roster.run_id, roster.round, roster.parent) == (self.run_id, here.round, here.parent)

    def is_for(self, roster: RoundRoster, ballot: int) -> bool:
        """Whether a roster is one that the leader of this ballot may have made."""
        known = set(self.candidates())
        return (
            self.continues(roster)
            and roster.ballot == ballot
            and len(roster.seats) <= MAX_SEATS
            and all(p in known for p in (*roster.peers, *(owner.peer for owner in roster.cut_by)))
            and (roster.steering == self.steering.now.raw or self.steering.allows(roster.steering))
        )

    # --- requests of others -----------------------------------------------------------------------------------------

    def _check(self, run_id: str, peer: PeerId) -> None:
        admit(self._parts, peer, run_id, stands=self._position is not None)

    async def _on_head(self, peer: PeerId, query: HeadQuery) -> RoundHead:
        self._check(query.run_id, peer)
        if query.join:
            self._wishes_to_join(peer)
        return self.head()

    def _wishes_to_join(self, peer: PeerId) -> None:
        self.waiting_to_join()  # forgets those who asked long ago
        if peer in self._joining or len(self._joining) < MAX_JOINERS:
            self._joining[peer] = trio.current_time()
        self.notify()

    async def _on_goodbye(self, peer: PeerId, goodbye: Goodbye) -> Empty:
        self._check(goodbye.run_id, peer)
        self._joining.pop(peer, None)
        # its round may have ended there a moment before it ends here
        known = peer in self.candidates()
        if known and goodbye.round in (self.position.round, self.position.round + 1):
            self.excused[peer] = goodbye.round
            self._parts.liveness.suspect(peer)
            self.notify()
        return Empty()

    async def _on_summon(self, peer: PeerId, summon: Summon) -> RoundHead:
        self._check(summon.run_id, peer)
        later = summon.round == self.position.round and summon.ballot > self.ballot
        if later and self.leader(summon.ballot) == peer and self._summons.take(peer, 1.0):
            self.raise_ballot(summon.ballot)
            self.attempt.cancel()
        return self.head()

    async def _on_ready(self, peer: PeerId, ready: Ready) -> LeaderReply:
        self._check(ready.run_id, peer)
        with trio.move_on_after(LAG):
            while ready.round == self.position.round + 1:
                await self._news.park()  # this node is about to get there as well
        here = self.position
        if peer not in self.candidates():
            self._wishes_to_join(peer)
        if ready.round < here.round:
            return self._verdict_for_past(ready.round)
        if ready.round > here.round or ready.parent != here.parent:
            return LeaderReply("elsewhere", head=self.head())
        if self.leader(ready.ballot) != self._parts.me:
            raise Refuse("not-leader", "this ballot belongs to another candidate")
        if self.paused and ready.ballot not in self.boxes:
            raise Refuse("paused", "this node is paused and leads nobody")
        if ready.ballot < self.ballot:
            return LeaderReply("again", ballot=self.ballot)
        if ready.ballot > self.ballot + MAX_JUMP:
            raise Refuse("far-ahead", "no member is at such a ballot")
        if ready.accepted is not None and not self.continues(ready.accepted.roster):
            ready = replace(ready, accepted=None)
        return await self._wait_at_box(peer, ready)

    async def _wait_at_box(self, peer: PeerId, ready: Ready) -> LeaderReply:
        self._leave_other_boxes(peer, ready.ballot)
        box = self.box(ready.ballot)
        if (reply := box.proposal.value) is not None:
            return LeaderReply("late") if reply.kind in ("roster", "adopt") else reply
        self.excused.pop(peer, None)
        box.readies[peer] = ready
        self.notify()
        self._take_over(ready.ballot, peer)
        try:
            return await box.proposal.wait()
        finally:
            if box.proposal.value is None and box.readies.get(peer) is ready:
                del box.readies[peer]

    def _leave_other_boxes(self, peer: PeerId, ballot: int) -> None:
        """Who comes to one box waits at no other: a peer has one place in a node's memory."""
        for other, box in list(self.boxes.items()):
            if other != ballot and box.proposal.value is None:
                box.readies.pop(peer, None)
                if not box.readies:
                    box.end(ballot)
                    del self.boxes[other]

    def _take_over(self, ballot: int, peer: PeerId) -> None:
        """Leave the present ballot for a later one that most others, `peer` the last of them, want it to lead."""
        if ballot <= self.ballot:
            return
        candidates = self.candidates()
        waiting = [p for p in candidates if p in self.box(ballot).readies]
        present = len([p for p in candidates if not self.is_absent(p)])
        if 2 * len(waiting) >= present - 1 and self._summons.take(peer, 1.0):
            self.raise_ballot(ballot)
            self.attempt.cancel()

    async def _on_report(self, peer: PeerId, report: Report) -> LeaderReply:
        self._check(report.run_id, peer)
        if (decision := self.decision_of(report.round)) is not None:
            return LeaderReply("decided", decision=decision)
        box = self.boxes.get(report.ballot) if report.round == self.position.round else None
        if box is None or box.proposal.value is None:
            return LeaderReply("again", ballot=self.ballot)
        if peer in box.readies:
            box.reports[peer] = report
            self.notify()
        return await box.ruling.wait()

    def _verdict_for_past(self, round: int) -> LeaderReply:
        return LeaderReply("decided", decision=self.decision_of(round), head=self.head())

    def decision_of(self, round: int) -> Decision | None:
        """How a round ended, where that is remembered: the last time that it was done."""
        return next((d for d in reversed(self.decisions) if d.roster.round == round), None)
