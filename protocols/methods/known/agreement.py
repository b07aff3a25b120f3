"""How members agree on one result per round, though any of them may die or freeze at any moment.

Candidates of a round are the seats of the last roster (*voters*) and the joiners that it named. They are ordered by
sha-256(run ‖ round ‖ peer); ballot b is led by candidate b modulo their number. In each ballot

1. every member that has trained sends `round.ready` to the leader and waits;
2. the leader closes the roster when all candidates that it does not suspect are ready, or when an adaptive deadline
   for stragglers has passed, and answers every Ready with it;
3. members reduce (`allreduce.py`), compute the next state, *accept* it (keep it and its hash) and send `round.report`;
4. when a majority of the voters reports the same hash, and the others have reported or are suspected, the leader
   decides and answers every Report with the decision.

This file is a member's way through the ballots. What a leader does in one is in `leading.py`, what it concludes in
`ballots.py`, and what each node remembers and answers in `standing.py`.

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
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.methods.known.acceptor import Position, Standing, diverged, prefers
from swarmnode.protocols.methods.known.arrivals import silence_allowed
from swarmnode.protocols.methods.known.ballots import WINDOW_SLACK
from swarmnode.protocols.methods.known.messages import (
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
    Verdict,
)
from swarmnode.protocols.methods.known.proposer import AgreementSettings, Leader
from swarmnode.protocols.methods.known.roster import Roster
from swarmnode.protocols.methods.outcomes import Behind, LeftOut, PartsMissing
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness, PeerGoneSilent

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

LONGEST_WAIT = 500.0  # seconds of one call; below the limit that `rpc` puts on handlers

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
        relayed: Callable[[], tuple[PeerId, ...]] = tuple,
    ) -> None:
        """`admits` says who may join; `relayed()` whom this node reaches through relays only."""
        self._me = me
        self._relayed = relayed
        self._run_id = run_id
        self._rpc = rpc
        self._liveness = liveness
        self._settings = settings
        self._standing = Standing(me=me, run_id=run_id, rpc=rpc, liveness=liveness, admits=admits)
        self._leader = Leader(
            me=me, standing=self._standing, rpc=rpc, liveness=liveness, settings=settings, admits=admits
        )
        self._reducing = AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)

    # --- where this node stands -------------------------------------------------------------------------------------

    def advance(self, position: Position, *, elapsed: float = 0.0) -> None:
        """Go to a round. `elapsed` is how long ago the others began it, in seconds."""
        self._standing.advance(position, elapsed=elapsed)
        self._leader.new_round()

    @property
    def position(self) -> Position:
        """Raises RuntimeError before the first `advance`."""
        return self._standing.position

    @property
    def late_by(self) -> float:
        """Seconds that others were into the next round when `agree` learned the last decision."""
        return self._standing.late_by

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
        standing.late_by = 0.0
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
                tuple(peer for peer in self._relayed() if peer in candidates),
            )
            decision: Decision | None = None
            silence = silence_allowed(self._reducing.usual, attempts)
            try:
                with trio.CancelScope() as standing.attempt:
                    if leader == self._me:
                        take_part = partial(self._take_part, ready=ready, reduce=reduce, obtain=obtain)
                        decision = await self._leader.lead(
                            ready,
                            candidates,
                            within=self._reducing.seconds(),
                            silence=silence,
                            take_part=take_part,
                        )
                    else:
                        decision = await self._follow(leader, ready, reduce, obtain, silence)
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

    async def _follow(
        self, leader: PeerId, ready: Ready, reduce: Reduce, obtain: Obtain, silence: float | None
    ) -> Decision | None:
        """One ballot under another's lead, which may be silent for so many seconds. None: go to the next ballot."""
        standing = self._standing
        patience = ready_patience(self.position.window, self._settings.ceiling)
        try:
            verdict = await self._liveness.unless_gone(
                leader,
                lambda: self._rpc.call(leader, "round.ready", ready, Verdict, timeout=patience),
                within=silence,
            )
            match verdict:
                case Verdict(kind="ahead", decision=Decision() as decision) if standing.ends(decision):
                    standing.note_lateness(verdict.head)
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
                leader,
                lambda: self._rpc.call(leader, "round.report", report, Ruling, timeout=patience),
                within=silence,
            )
        except (PeerGoneSilent, CallError) as error:
            logger.info("round %d: the member that led it is gone, another leads now", ready.round)
            logger.debug("ballot %d of round %d failed with its leader: %s", ready.ballot, ready.round, error)
            return None
        if ruling.decision is not None and standing.ends(ruling.decision):
            return ruling.decision
        standing.raise_ballot(ruling.ballot)
        return None

    async def _take_part(self, verdict: Verdict, *, ready: Ready, reduce: Reduce, obtain: Obtain) -> Report:
        """What this node does as a member of a ballot that it leads itself."""
        if verdict.accepted is not None:
            return await self._adopt(verdict.accepted, verdict.holders, ready, obtain)
        if verdict.roster is not None:
            return await self._reduce(verdict.roster, ready, reduce)
        return self._report(ready)

    def _report(self, ready: Ready, state_hash: str | None = None, missing: tuple[PeerId, ...] = ()) -> Report:
        return Report(self._run_id, ready.round, ready.ballot, state_hash, missing)

    async def _reduce(self, roster: Roster, ready: Ready, reduce: Reduce) -> Report:
        self._standing.cut_by = roster.cutters
        if self._me not in roster.peers:
            return self._report(ready)
        began = trio.current_time()
        try:
            state_hash = await reduce(roster, self._reducing.seconds())
        except PartsMissing as error:
            return self._report(ready, missing=error.peers)
        if not roster.cut_by:  # what goes on from an earlier attempt takes less than is usual
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


def ready_patience(window: float, ceiling: float) -> float:
    """Seconds that a member waits for a leader that keeps answering pings: its window, its stragglers, and a margin."""
    return min(window + 2 * ceiling, LONGEST_WAIT)
