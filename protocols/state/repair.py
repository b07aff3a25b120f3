"""Repair: two nodes find out what differs between their states, and each gets what it lacks.

    initiator                                    responder
    state.repair: fingerprint of everything  →
                                             ←   that all is equal, or the parts of what differs
    … until the initiator knows what it lacks (`need`) and what the other lacks (`have`); then
    state.fetch: ranks needed                →
                                             ←   elements, as many as fit; again for the rest
    state.push: elements the other lacks     →

Both leave out what expires before the session's cut-off, the later one of what both propose, so that elements at the
end of their life do not differ where clocks do.

Who may fail when, and what is then true: whoever stops answering, the session ends with what was got so far, and the
next one begins where that leaves off. A peer that lies about what it holds makes work until the session's budget is
spent (`crdt.reconcile`); one that names elements it does not give, or never comes to an end, is counted as an offender.
A responder keeps one session for each peer and `SESSIONS` in all; the one that rests longest makes room.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import trio

from swarmnode.crdt.reconcile import CutoffRefused, Exhausted, Initiator, Responder, SessionLimits
from swarmnode.crdt.reconcile_frames import HELLO, NONCE_SIZE, Malformed
from swarmnode.protocols.calls.rpc import Refuse, Rpc
from swarmnode.protocols.limits import Allowance, Budget, Recent
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import Rank, StateBackend
from swarmnode.protocols.state.intake import StateIntake
from swarmnode.protocols.state.push import Neighbours
from swarmnode.protocols.state.wire import (
    MAX_BATCH,
    MAX_RANKS,
    Elements,
    Push,
    Pushed,
    RepairAnswer,
    RepairStep,
    StateFetch,
    batches,
    split,
)

logger = logging.getLogger(__name__)

STEP_TIMEOUT = 5.0  # seconds for a half round
BATCH_TIMEOUT = 20.0  # seconds for a batch of elements, which may wait for a budget
CUTOFF_AHEAD = 2_000  # ms; what expires within that time is not worth sending
SESSION = SessionLimits(work=1_000_000)  # a second of a core; all else as reconciliation proposes
SESSIONS = 32  # that a responder holds at a time, each with a snapshot
OPENINGS = Allowance(rate=0.1, burst=8)  # sessions that one peer may begin
DISPLACED = 32  # elements that newer ones may displace while a repair goes on; of more, once
OWING = 4096  # peers remembered for that
SERVED = Allowance(rate=2 << 20, burst=32 << 20)  # bytes of elements fetched by one peer


class Repair:
    def __init__(
        self,
        backend: StateBackend,
        rpc: Rpc,
        intake: StateIntake,
        neighbours: Neighbours,
        *,
        runner: Runner,
        rng: random.Random,
    ) -> None:
        self._backend = backend
        self._rpc = rpc
        self._intake = intake
        self._neighbours = neighbours
        self._violations = neighbours.violations
        self._runner = runner
        self._rng = rng
        self._sessions: OrderedDict[PeerId, tuple[int, Responder]] = OrderedDict()  # that rest, the longest first
        self._stepping = 0  # those of which a frame is worked on
        self._owing = Recent[PeerId, None](OWING)  # who gave nothing of what it named in the last repair with it
        self._openings = Budget[PeerId](OPENINGS)
        self._served = Budget[PeerId](SERVED)

    # --- the initiator ----------------------------------------------------------------------------------------------

    async def repair(self, peer: PeerId) -> None:
        """One session with `peer`, to its end; who does not repair as an honest node does is not trusted for a while.

        Raises CallError, Unwritable.
        """
        cutoff, nonce = self._backend.now() + CUTOFF_AHEAD, self._rng.randbytes(NONCE_SIZE)
        initiator = Initiator(self._backend.snapshot(0), cutoff=cutoff, nonce=nonce, limits=SESSION)
        complaint = await self._compare(peer, initiator)
        needed = [rank for rank in sorted(initiator.need) if self._intake.lacks(rank)]
        got, given = await self.fetch(peer, needed)
        await self._give(peer, sorted(initiator.have))
        if complaint and got:
            complaint = ""  # where much differed, the session's budget may be spent for a good purpose
        if given or len(needed) <= DISPLACED:
            self._owing.pop(peer, None)
        elif peer in self._owing:
            complaint = f"twice it gave none of the elements that it named, {len(needed)} of them now"
        else:
            self._owing[peer] = None  # newer ones may have displaced a whole round's while one of both stood still
        if complaint:
            self._violations.note(peer, f"a repair does not end as it must: {complaint}", Kind.LIE)
            self._neighbours.distrust(peer)
        logger.debug("repaired with %s: got %d elements; %s", peer, got, complaint or "all well")

    async def _compare(self, peer: PeerId, initiator: Initiator) -> str:
        """Exchange frames until the initiator knows what differs; what is to be said against the peer, or ""."""
        session = self._rng.getrandbits(63)
        frame: bytes | None = await self._runner(initiator.open)
        first = True
        while frame is not None:
            asked = trio.current_time()
            step = RepairStep(self._backend.run_id, session, frame, self._backend.clocks.shown())
            answer = await self._rpc.call(peer, "state.repair", step, RepairAnswer, timeout=STEP_TIMEOUT)
            if first:
                self.record_time(peer, answer.time + int(500 * (trio.current_time() - asked)))
                first = False
            try:
                frame = await self._runner(partial(initiator.receive, answer.frame))
            except CutoffRefused:
                return ""
            except (Exhausted, Malformed) as error:
                return str(error)
        return "" if initiator.agreed else "what the peer says contradicts its fingerprint"

    async def fetch(self, peer: PeerId, ranks: list[Rank]) -> tuple[int, int]:
        """Get elements that the peer said it has; how many were stored, and how many were sent.

        Raises CallError, Unwritable.
        """
        got = given = 0
        while ranks:
            asked, ranks = ranks[:MAX_RANKS], ranks[MAX_RANKS:]
            fetch = StateFetch(self._backend.run_id, b"".join(asked))
            answer = await self._rpc.call(peer, "state.fetch", fetch, Elements, timeout=BATCH_TIMEOUT)
            if not answer.sealed:
                if len(asked) > DISPLACED:
                    break  # it never had them
                continue
            self._neighbours.by_repair.update(dict.fromkeys(asked))
            self._neighbours.holds(peer, asked)
            inserted = await self._intake.insert(peer, answer.sealed)
            got += len(inserted.new)
            given += len(answer.sealed)
            if inserted.false:
                break
            if len(answer.sealed) < len(asked) and sum(map(len, answer.sealed)) > MAX_BATCH // 2:
                ranks = [rank for rank in asked[len(answer.sealed) :] if self._intake.lacks(rank)] + ranks
        return got, given

    async def _give(self, peer: PeerId, ranks: Sequence[Rank]) -> None:
        """Send elements that the peer lacks."""
        for at in range(0, len(ranks), MAX_RANKS):
            some = ranks[at : at + MAX_RANKS]
            for sealed in batches(await self._backend.sealed(some)):
                push = Push(self._backend.run_id, sealed)
                await self._rpc.call(peer, "state.push", push, Pushed, timeout=BATCH_TIMEOUT)
            self._neighbours.holds(peer, some)

    def record_time(self, peer: PeerId, time: int) -> None:
        """`peer`'s clock shows `time` ms; that counts for as long as it is connected."""
        if self._neighbours.connected(peer):
            self._backend.clocks.record(peer, time)

    # --- the responder ----------------------------------------------------------------------------------------------

    async def on_step(self, peer: PeerId, step: RepairStep) -> RepairAnswer:
        """Answer one frame of a session, which a first frame begins. Raises Refuse, as for a clock far from this."""
        session, responder = self._sessions.pop(peer, (step.session, None))
        if responder is None or session != step.session:
            if step.frame[:1] != bytes([HELLO]):  # it idled too long, on a busy machine perhaps: nobody's fault
                raise Refuse("over", "this repair has ended here; begin another")
            if not self._openings.take(peer, 1):
                self._violations.note(peer, "begins too many repairs", Kind.LOAD)
                raise Refuse("busy", "the peer begins too many repairs")
            if self._stepping >= SESSIONS:
                raise Refuse("busy", f"this node works on {SESSIONS} repairs already")
            if len(self._sessions) + self._stepping >= SESSIONS:  # initiators do not say when they end
                self._sessions.popitem(last=False)
            cutoff, nonce = self._backend.now() + CUTOFF_AHEAD, self._rng.randbytes(NONCE_SIZE)
            responder = Responder(self._backend.snapshot(0), cutoff=cutoff, nonce=nonce, limits=SESSION)
            if step.time:
                self.record_time(peer, step.time)
        self._stepping += 1
        try:
            frame = await self._runner(partial(responder.receive, step.frame))
        except CutoffRefused as error:
            raise Refuse("clock", str(error)) from None
        except Exhausted as error:
            self._violations.note(peer, f"wants more of a repair than it may cost: {error}", Kind.LOAD)
            raise Refuse("busy", str(error)) from None
        except Malformed as error:
            self._violations.note(peer, f"a repair does not go as it must: {error}", Kind.BREACH)
            raise Refuse("malformed", str(error)) from None
        finally:
            self._stepping -= 1
        if not responder.done:
            self._sessions[peer] = step.session, responder
        return RepairAnswer(frame, self._backend.clocks.shown())

    async def on_fetch(self, peer: PeerId, fetch: StateFetch) -> Elements:
        """Give elements by rank, as many as fit into a message. Raises Refuse, StateError."""
        if self._served.overdraw(peer, 0) > BATCH_TIMEOUT / 2:  # before anything is read from the disk
            raise Refuse("busy", "the peer fetches more than its share")
        sealed = next(batches(await self._backend.sealed(split(fetch.ranks))), ())
        wait = self._served.overdraw(peer, sum(len(raw) for raw in sealed))
        if wait > BATCH_TIMEOUT / 2:
            raise Refuse("busy", "the peer fetches more than its share")
        await trio.sleep(wait)
        return Elements(sealed)
