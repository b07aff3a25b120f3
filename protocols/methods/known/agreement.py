"""How members agree on one result per round, though any of them may die or freeze at any moment.

Candidates of a round are the seats of the last roster (*voters*) and the joiners that it named. They are ordered by
sha-256(run ‖ round ‖ peer); ballot b is led by candidate b modulo their number. In each ballot

1. every member that has trained sends `round.ready` to the leader and waits;
2. the leader closes the roster when all candidates that it does not suspect are ready, or when an adaptive deadline
   for stragglers has passed, and answers every Ready with it;
3. members reduce (`allreduce.py`), compute the next state, *accept* it (keep it and its hash) and send `round.report`;
4. when a majority of the voters reports the same hash, and the others have reported or are suspected, the leader
   decides and answers every Report with the decision.

The rules that keep one round from having two results are

- `result_to_adopt`: a result that a majority of the voters may have accepted is the only one that may be proposed;
- `is_safe`: a result is decided when a majority of the voters holds it, or all within reach where these are none;

and the one that keeps a round from failing for ever is `without_broken_links`.

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
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

import trio

from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.acceptor import Acceptor, BallotBox, Link
from swarmnode.protocols.methods.known.messages import (
    LONGEST_WINDOW,
    MAX_PEERS,
    MAX_SEATS,
    Accepted,
    Behind,
    Decision,
    Goodbye,
    LeaderReply,
    PartsMissing,
    Ready,
    Report,
    RoundHead,
    RoundRoster,
    Seat,
    Summon,
    capped_weights,
    majority,
    shares_by_rate,
)
from swarmnode.protocols.methods.known.partition import cut_to_keep
from swarmnode.protocols.methods.known.reduction import silence_allowed
from swarmnode.protocols.methods.method import LostPlace
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import AdaptiveDeadline, PeerGoneSilent
from swarmnode.protocols.wire import Empty

LONGEST_WAIT = 500.0  # seconds of one call; below the limit that `rpc` puts on handlers
WINDOW_SLACK = 2.0  # members may train this multiple of the median member's time in the next round


def result_to_adopt(
    readies: Mapping[PeerId, Ready], voters: Sequence[PeerId], *, distrusted: Collection[PeerId] = ()
) -> tuple[Accepted, tuple[PeerId, ...]] | None:
    """The result of an earlier ballot that may have been decided, and who holds it; None where there is none.

    A result may have been decided when the voters that say they accepted it last, and those that say nothing, make up
    a majority. Of several, the one of the latest ballot counts, as in Paxos. `distrusted` peers could not give the
    state that they claimed; theirs do not count.
    """
    claims = {p: r.accepted for p, r in readies.items() if r.accepted is not None and p not in distrusted}
    silent = sum(p not in readies for p in voters)
    found: tuple[Accepted, tuple[PeerId, ...]] | None = None
    for hash in dict.fromkeys(accepted.state_hash for accepted in claims.values()):
        holders = tuple(p for p, accepted in claims.items() if accepted.state_hash == hash)
        latest = max((claims[p] for p in holders), key=lambda accepted: accepted.ballot)
        possible = sum(p in voters for p in holders) + silent >= majority(voters)
        if possible and (found is None or latest.ballot > found[0].ballot):
            found = latest, holders
    return found


def is_safe(holders: Collection[PeerId], voters: Sequence[PeerId], reachable: Collection[PeerId]) -> bool:
    """Whether no later leader can decide otherwise: a majority of the voters holds the result.

    Where the `reachable` voters are no majority, all of them must hold it; a partition may then have two histories.
    """
    if sum(p in holders for p in voters) >= majority(voters):
        return True
    return len(reachable) < majority(voters) and all(p in holders for p in reachable)


def without_broken_links(members: Iterable[PeerId], broken: Iterable[Link]) -> tuple[PeerId, ...]:
    """`members`, in their order, less the few without whom no broken link remains.

    Whoever is at the end of most of them goes first, then whoever was missed rather than missing others: one that
    reports everybody as missing is the one to go.
    """
    remaining = tuple(members)
    links = set(broken)
    while links := {(a, b) for a, b in links if a in remaining and b in remaining and a != b}:
        ends = Counter(end for link in links for end in link)
        missed = Counter(b for _, b in links)
        out = max(ends, key=lambda p: (ends[p], missed[p], p))
        remaining = tuple(p for p in remaining if p != out)
    return remaining


def seats_of(members: Sequence[PeerId], readies: Mapping[PeerId, Ready], *, weight_cap: float) -> tuple[Seat, ...]:
    """Seats for `members`, in their order: weights by work done, parts by the rates that others measured.

    Relayed members own no part: they fetch and offer as clients of those who do. Where all are relayed, all own parts.
    """
    present = {p: readies[p] for p in members}
    weights = capped_weights({p: r.samples for p, r in present.items()}, weight_cap)
    clients = relayed_members(present)
    owners = [p for p in members if p not in clients] or members
    shares = shares_by_rate({p: _median_rate(p, present) for p in owners})
    return tuple(Seat(p, weights[p], shares.get(p, 0)) for p in members)


def relayed_members(readies: Mapping[PeerId, Ready]) -> frozenset[PeerId]:
    """Whom to leave without a part so that no two of the others reach each other through a relay.

    Whoever has the most relayed pairs goes first, equals together: behind a symmetric NAT that is every other private
    node, behind a better one only those. A pair is relayed where both say so: a claim takes nobody's part away.
    """
    pairs = {
        (a, b)
        for a, ready in readies.items()
        for b in ready.relayed
        if a < b and b in readies and a in readies[b].relayed
    }
    out: set[PeerId] = set()
    while pairs:
        count = Counter(end for pair in pairs for end in pair)
        most = max(count.values())
        out |= {peer for peer, n in count.items() if n == most}
        pairs = {(a, b) for a, b in pairs if a not in out and b not in out}
    return frozenset(out)


def _median_rate(peer: PeerId, readies: Mapping[PeerId, Ready]) -> float | None:
    """What the others measured when they fetched from `peer`; what it says of itself does not count."""
    measured = [r.rates[peer] for p, r in readies.items() if p != peer and r.rates.get(peer, 0.0) > 0]
    return median(measured) if measured else None


logger = logging.getLogger(__name__)

PROBE_EVERY = 2.0  # seconds between looks at candidates that should be ready and are not
REPORT_MARGIN = 5.0  # seconds that a leader waits for reports beyond the time that a reduction may take
PATIENCE_BACK = 0.05  # seconds in a second that a leader which answers pings alone is waited for again
FAILURES_AS_LEADER = 3  # ballots in a row that one leader may fail before another candidate tries

MANY = 16  # others from which on a leader pings each of them less often, and notices silence later than its neighbours


class Exchange(Protocol):
    """What a member does in a ballot beside agreeing."""

    async def reduce(self, roster: RoundRoster, within: float, silence: float | None) -> str:
        """Exchange parts with the seats of `roster`; the hash of the next state, which is kept.

        Raises PartsMissing after `within` seconds of waiting for somebody, or `silence` without a sign of life.
        """

    async def obtain(self, state_hash: str, holders: tuple[PeerId, ...]) -> None:
        """Hold that next state: computed already, or fetched from `holders`. Raises PartsMissing."""


class Agreement:
    """One node's part in the agreements of one run. `agree` once a round, after `acceptor.advance`.

    `acceptor` is what it remembers, and what others ask it.
    """

    def __init__(self, parts: Context) -> None:
        self._parts = parts
        self._me, self._run_id = parts.me, parts.run_id
        self._rpc, self._liveness = parts.rpc, parts.liveness
        self._settings = parts.spec.exchange
        self.acceptor = Acceptor(parts)
        floor, ceiling = self._settings.deadline_floor, self._settings.deadline_ceiling
        self._reducing = AdaptiveDeadline(floor=floor, ceiling=ceiling)
        self._straggling = AdaptiveDeadline(floor=floor, ceiling=ceiling)  # behind the median member
        self._patience = Budget[PeerId](Allowance(PATIENCE_BACK, 2 * ceiling))  # seconds that a leader may let wait
        self._exchange: Exchange  # of the round in hand
        self._silence: float | None = None  # seconds for which one may give no sign of life while others wait for it

    async def say_goodbye(self) -> None:
        """Tell the other candidates, in parallel and within a second, not to wait for this node in this round."""
        message = Goodbye(self._run_id, self.acceptor.position.round)
        others = [peer for peer in self.acceptor.candidates() if peer != self._me]
        await self._rpc.call_all(others, "round.goodbye", message, Empty, timeout=1.0)

    # --- one round --------------------------------------------------------------------------------------------------

    async def agree(
        self, *, samples: int, train_seconds: float, rates: dict[str, float], exchange: Exchange
    ) -> Decision:
        """Take part in the present round until it is decided.

        Raises Behind when this node has to catch up first, LostPlace when it is no candidate and nobody leads it. Ends
        with the window, deadlines and suspicions of its peers; alone, it decides alone.
        """
        acceptor, here = self.acceptor, self.acceptor.position
        self._exchange = exchange
        candidates, steering = acceptor.candidates(), acceptor.steering
        acceptor.late_by = 0.0
        attempts = 0
        while True:
            ballot = acceptor.ballot
            leader = candidates[ballot % len(candidates)]
            joiners = tuple(sorted(acceptor.waiting_to_join()))
            far = {view.peer for view in self._parts.network.peers() if view.path == "relayed"}
            relayed = tuple(peer for peer in candidates if peer in far)
            place, accepted = (self._run_id, here.round, ballot, here.parent), acceptor.accepted
            ready = Ready(*place, samples, train_seconds, rates, joiners, accepted, relayed, steering.newer())
            decision: Decision | None = None
            self._silence = silence_allowed(self._reducing.usual, attempts)
            least = self._settings.deadline_floor * (1 + attempts // len(candidates))  # at some time it is enough
            try:
                with trio.CancelScope() as acceptor.attempt:
                    if leader == self._me:
                        decision = await self._lead(ready, candidates)
                    elif self._parts.admits(leader):
                        decision = await self._follow(leader, ready, least)
                if decision is not None:
                    acceptor.decisions.append(decision)
                    return decision
            finally:
                acceptor.raise_ballot(ballot + 1)  # two proposals in one ballot could both be accepted
            attempts += 1
            if self._me not in candidates and attempts >= len(candidates):
                raise LostPlace(f"none of the {len(candidates)} candidates of round {here.round} answers")
            # one breath between attempts, so that a swarm that cannot agree does not spin
            await trio.sleep(min(0.02 * attempts, 0.5))

    async def _follow(self, leader: PeerId, ready: Ready, least: float) -> Decision | None:
        """One ballot under another's lead, who has `least` seconds in any case. None: go to the next ballot."""
        acceptor, most = self.acceptor, 2 * self._settings.deadline_ceiling
        left = max(0.0, acceptor.position.window - acceptor.elapsed())  # in which others may train
        credit = most - PATIENCE_BACK * self._patience.wait(leader, most)
        patience = min(left + max(credit, least), LONGEST_WAIT)
        try:
            trained = WINDOW_SLACK * ready.train_seconds  # for so long others may train as well
            reply = await self._ask(leader, "round.ready", ready, self._lead_within(patience), trained)
            match reply:
                case LeaderReply(decision=Decision() as decision) if acceptor.continues(decision.roster):
                    acceptor.note_lateness(reply.head)
                    return decision
                case LeaderReply(head=RoundHead() as head) if acceptor.should_follow(head):
                    raise Behind(head, leader)
            report = await self._carry_out(reply, ready)
            if report is None or not self._parts.admits(leader):
                acceptor.go_on_to(reply.ballot, leader)
                return None
            patience = max(credit, 2 * self._reducing.seconds()) + 2 * REPORT_MARGIN  # longer than a leader waits
            ruling = await self._ask(leader, "round.report", report, min(patience, LONGEST_WAIT), 0.0)
        except (PeerGoneSilent, CallError) as error:
            logger.info("round %d: the member that was to lead it is gone or not ready, another leads now", ready.round)
            logger.debug("ballot %d of round %d failed with its leader: %s", ready.ballot, ready.round, error)
            return None
        if ruling.decision is not None and acceptor.continues(ruling.decision.roster):
            return ruling.decision
        acceptor.go_on_to(ruling.ballot, leader)
        return None

    async def _ask(self, leader: PeerId, method: str, what: Ready | Report, within: float, free: float) -> LeaderReply:
        """Raises CallError or PeerGoneSilent. What was waited in vain, but for `free` seconds: see PATIENCE_BACK."""
        began, reply = trio.current_time(), None
        try:
            reply = await self._liveness.unless_gone(
                leader, lambda: self._rpc.call(leader, method, what, LeaderReply, timeout=within), within=self._silence
            )
            return reply
        finally:
            if reply is None:
                self._patience.overdraw(leader, max(0.0, trio.current_time() - began - free))

    def _report(self, ready: Ready, state_hash: str | None = None, missing: tuple[PeerId, ...] = ()) -> Report:
        return Report(self._run_id, ready.round, ready.ballot, state_hash, missing)

    async def _carry_out(self, reply: LeaderReply, ready: Ready) -> Report | None:
        """What a leader asks of a member, and what this one reports to it; None where there is nothing to do."""
        acceptor = self.acceptor
        try:
            match reply:
                case LeaderReply("adopt", accepted=Accepted() as found) if acceptor.continues(found.roster):
                    await self._exchange.obtain(found.state_hash, reply.holders)
                    acceptor.accepted = replace(found, ballot=ready.ballot)
                    return self._report(ready, found.state_hash)
                case LeaderReply("roster", roster=RoundRoster() as roster) if acceptor.is_for(roster, ready.ballot):
                    return await self._reduce(roster, ready)
                case LeaderReply("late"):
                    return self._report(ready)
        except PartsMissing as error:
            return self._report(ready, missing=error.peers)
        return None

    async def _reduce(self, roster: RoundRoster, ready: Ready) -> Report:
        """Raises PartsMissing."""
        self.acceptor.cut_by = roster.cutters
        if self._me not in roster.peers:
            return self._report(ready)
        began = trio.current_time()
        state_hash = await self._exchange.reduce(roster, self._reducing.seconds(), self._silence)
        if not roster.cut_by:  # what goes on from an earlier attempt takes less than is usual
            self._reducing.observe(trio.current_time() - began)
        self.acceptor.accepted = Accepted(ready.ballot, state_hash, roster)
        return self._report(ready, state_hash)

    # --- what decides for whom a round waits; other methods do otherwise ----------------------------------------------

    def _lead_within(self, patience: float) -> float:
        """Seconds for a leader that answers pings to close its roster, of `patience` that it has for anything else."""
        return patience

    def _grace(self, readies: Iterable[Ready]) -> float:
        """Seconds for which a roster stays open once half of its candidates, these, are ready."""
        return self._straggling.seconds()

    def _next_window(self, readies: Iterable[Ready], longer: float) -> float:
        """Seconds for the next round's training, of `longer` times as many steps, from what this one's took the median.

        Nobody trained longer than the round has lasted, whatever it says; where nobody did, the present window stays.
        """
        worked = [min(r.train_seconds, self.acceptor.elapsed()) for r in readies if r.samples > 0]
        if not worked:
            return self.acceptor.position.window
        return min(max(WINDOW_SLACK * longer * median(worked), self._settings.deadline_floor), LONGEST_WINDOW)

    def _passed_over(self, box: BallotBox, members: Sequence[PeerId]) -> Collection[PeerId]:
        """Candidates whom a roster without them names for the next round, though they did not ask for it."""
        return ()

    # --- leading a ballot -------------------------------------------------------------------------------------------

    async def _lead(self, ready: Ready, candidates: tuple[PeerId, ...]) -> Decision | None:
        """The ballot of `ready`, this node's own, among `candidates`. None: go to the next ballot.

        However this ends, by an error or cancelled too, whoever waits at the box is answered. Where others are beyond
        it, as it was frozen or cut off, this node takes their decision, or raises Behind.
        """
        silence = self._silence
        within = self._reducing.seconds()  # that a reduction may wait for somebody
        box = self.acceptor.box(ready.ballot)
        box.readies[self._me] = ready
        others = [peer for peer in candidates if peer != self._me]
        found: list[Decision | Behind] = []  # what others say that makes this ballot pointless
        decision: Decision | None = None
        try:
            with self._liveness.watching(others):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._probe, ready, others, box, found)
                    await self._gather(box, candidates, found)
                    if not found:
                        verdict = self._close_roster(box, candidates, ready.ballot)
                        box.proposal.give(verdict)
                        nursery.start_soon(self._take_part, box, verdict, ready)
                        with self._liveness.watching(others, within=silence and silence * max(1, len(others) / MANY)):
                            decision = await self._collect(box, verdict, within)
                    nursery.cancel_scope.cancel()
            match found:
                case [Behind() as behind, *_]:
                    raise behind
                case [Decision() as known, *_]:
                    decision = known
                    box.proposal.give(LeaderReply("decided", decision=decision, head=self.acceptor.head()))
            if decision is None:
                self.acceptor.raise_ballot(self._next_ballot(ready.ballot, candidates))
            else:
                box.ruling.give(LeaderReply("decided", decision=decision))
            return decision
        finally:
            box.end(max(self.acceptor.ballot, ready.ballot + 1))

    def _next_ballot(self, ballot: int, candidates: tuple[PeerId, ...]) -> int:
        """After a ballot that failed: the next that this node leads, or, where it is itself the trouble, the next."""
        self.acceptor.failures += 1
        remaining = without_broken_links(candidates, self.acceptor.broken)
        if self._me not in remaining or self.acceptor.failures % FAILURES_AS_LEADER == 0:
            return ballot + 1
        return ballot + len(candidates)

    async def _take_part(self, box: BallotBox, reply: LeaderReply, ready: Ready) -> None:
        """What this node does as a member of a ballot that it leads itself."""
        box.reports[self._me] = await self._carry_out(reply, ready) or self._report(ready)
        self.acceptor.notify()

    async def _gather(self, box: BallotBox, candidates: tuple[PeerId, ...], found: list[Decision | Behind]) -> None:
        """Wait until the roster can be closed: all are ready or absent, or the stragglers' deadline has passed.

        Once half are ready, silence makes one of the others absent. Nobody is waited for who would not be let in, such
        as a voter that was banned since.

        Without a majority of the voters it waits `floor` seconds for those that are gone to come back, and for those
        that answer and are not ready until their window and another `ceiling` have passed; then it goes on without.
        """
        acceptor, settings = self.acceptor, self._settings
        voters = acceptor.position.voters
        began = latest = trio.current_time()
        patience = max(0.0, acceptor.position.window - acceptor.elapsed()) + settings.deadline_ceiling
        half_at, present = math.inf, 0
        usable = without_broken_links(candidates, self.acceptor.broken)  # the others would have no place in the roster
        while not found:
            now = trio.current_time()
            ready = [box.readies[p] for p in candidates if p in box.readies]  # others may wait at the box as well
            if len(ready) > present:
                latest, present = now, len(ready)
            waited_for = [
                p
                for p in usable
                if p not in box.readies and p not in box.away and not acceptor.is_absent(p) and self._parts.admits(p)
            ]
            if half_at == math.inf and len(ready) >= len(waited_for):
                half_at = now
            if sum(p in box.readies for p in voters) >= majority(voters):
                enough = min(began + settings.deadline_ceiling, half_at + self._grace(ready))
                give_up = enough if waited_for else now
            elif waited_for:
                give_up = began + patience
            elif all(p in box.readies or p in acceptor.excused for p in voters):
                give_up = now  # nobody vanished: those who are missing left in order
            else:
                give_up = began + settings.deadline_floor
            if now >= give_up:
                if sum(p in box.readies for p in voters) < majority(voters):
                    box.away.update(waited_for)
                break
            with self._liveness.watching(waited_for if half_at < math.inf else (), within=self._silence):
                await acceptor.changed(until=give_up)
        if half_at < math.inf:
            self._straggling.observe(max(0.0, latest - half_at))

    async def _probe(self, ready: Ready, others: list[PeerId], box: BallotBox, found: list[Decision | Behind]) -> None:
        """Summon candidates to a later ballot, and look where those stand who should be ready and are not.

        A leader that was frozen, or cut off, learns in this way that the swarm went on without it.
        """
        message = Summon(ready.run_id, ready.round, ready.ballot)

        async def look(peer: PeerId) -> None:
            try:
                head = await self._rpc.call(peer, "round.summon", message, RoundHead, timeout=PROBE_EVERY)
                if self.acceptor.should_follow(head):
                    found.append(await self._decision_of(peer, ready) or Behind(head, peer))
                    self.acceptor.note_lateness(head)
            except CallError as error:
                logger.debug("summons to %s failed: %s", peer, error)
                return
            if head.paused or (head.round == ready.round and head.parent != ready.parent):
                box.away.add(peer)
            self.acceptor.notify()

        if ready.ballot == 0:
            await trio.sleep(PROBE_EVERY)
        while box.proposal.value is None:
            async with trio.open_nursery() as nursery:
                for peer in others:
                    if peer not in box.readies:
                        nursery.start_soon(look, peer)
            await trio.sleep(PROBE_EVERY)

    async def _decision_of(self, peer: PeerId, ready: Ready) -> Decision | None:
        """How the present round ended for a peer that is beyond it, where it still knows. Raises CallError."""
        ruling = await self._rpc.call(peer, "round.report", self._report(ready), LeaderReply, timeout=PROBE_EVERY)
        decision = ruling.decision
        return decision if decision is not None and self.acceptor.continues(decision.roster) else None

    def _close_roster(self, box: BallotBox, candidates: tuple[PeerId, ...], ballot: int) -> LeaderReply:
        """Who counts in this ballot; or the result of an earlier ballot that may have been decided."""
        acceptor, settings = self.acceptor, self._settings
        here = acceptor.position
        distrusted = [p for reporter, p in self.acceptor.broken if reporter == self._me]
        adopted = result_to_adopt(box.readies, here.voters, distrusted=distrusted)
        if adopted is not None:
            accepted, holders = adopted
            return LeaderReply("adopt", ballot=ballot, accepted=accepted, holders=holders)
        present = [p for p in candidates if p in box.readies and (p == self._me or self._parts.admits(p))]
        able = without_broken_links(present, self.acceptor.broken)
        if self._me not in able:
            able = (self._me,)
        box.away.update(set(present) - set(able))
        members = able[:MAX_SEATS]
        readies = {p: box.readies[p] for p in members}
        steering, next = acceptor.steering, here.round + 1
        coming = steering.newest(r.steering for r in readies.values() if r.steering)
        longer = coming.at(next).spec.inner.steps_in(next) / steering.stage.spec.inner.steps_in(here.round)
        window = self._next_window(readies.values(), longer)
        asked = {j for r in readies.values() for j in r.joiners} | set(acceptor.waiting_to_join())
        asked.update(self._passed_over(box, members))
        room = MAX_SEATS - len(members)
        joiners = tuple(sorted(j for j in asked - set(members) if self._parts.admits(j)))[:room]
        seats = seats_of(members, readies, weight_cap=settings.weight_cap)
        cut_by = cut_to_keep(acceptor.cut_by, seats)
        place = acceptor.run_id, here.round, ballot, here.parent
        return LeaderReply("roster", roster=RoundRoster(*place, seats, joiners, window, cut_by, coming.raw))

    async def _collect(self, box: BallotBox, verdict: LeaderReply, within: float) -> Decision | None:
        """Wait for reports; decide when it is safe and everybody had a chance to report, or give up (None)."""
        here, acceptor = self.acceptor.position, self.acceptor
        roster = verdict.roster or (verdict.accepted.roster if verdict.accepted else None)
        assert roster is not None, "a leader has a roster closed or adopted"
        expected = set(roster.peers if verdict.roster else box.readies)
        # whoever waits for parts gives up after `within` or twice that, and reports whose they were
        deadline = trio.current_time() + 2 * within + REPORT_MARGIN
        while True:
            reports = {p: r for p, r in box.reports.items() if p in expected}
            hashes = {p: r.state_hash for p, r in reports.items() if r.state_hash is not None}
            mine = hashes.get(self._me)
            holders = {p for p, hash in hashes.items() if hash == mine}
            outstanding = {p for p in expected if p not in reports and not acceptor.is_absent(p)}
            late = trio.current_time() >= deadline
            failed = any(r.missing for r in reports.values())
            if failed or late or not outstanding:
                reachable = [p for p in here.voters if p not in box.away and not acceptor.is_absent(p)]
                if mine is not None and is_safe(holders, here.voters, reachable):
                    absent = {*here.voters, *roster.peers} - holders
                    return Decision(mine, roster, tuple(sorted(absent)[:MAX_PEERS]))
                self._blame(reports, hashes, outstanding if late else set())
                return None
            await acceptor.changed(until=deadline)

    def _blame(self, reports: dict[PeerId, Report], hashes: dict[PeerId, str], silent: set[PeerId]) -> None:
        """Note between whom the exchange failed, so that the next ballot can do without some of them.

        `silent` did not report in time; who keeps the others waiting is named by them, if any of them reported. Who
        names itself, or somebody who has no part in the round, is the one to do without.
        """
        others = set(self.acceptor.candidates())
        broken = {
            (p, missed) if missed in others - {p} else (self._me, p) for p, r in reports.items() for missed in r.missing
        }
        mine = hashes.get(self._me)
        differing = {p for p, hash in hashes.items() if mine is not None and hash != mine}
        if differing:
            logger.error("round %d: members computed different states from one roster", self.acceptor.position.round)
        broken |= {(self._me, p) for p in differing}
        if not broken:
            broken = {(self._me, p) for p in silent if p != self._me}
        self.acceptor.broken |= {(a, b) for a, b in broken if a != b}
