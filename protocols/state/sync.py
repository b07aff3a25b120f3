"""The replicated state of a run, kept equal with that of the other nodes.

News is pushed from neighbour to neighbour within a second or so (`push`). What a push did not bring, a repair does
(`repair`): with each peer that connects, and every 30 s or so with a neighbour drawn at random. Elements from peers
come in through one door (`intake`). What this node signs itself goes out by `write`, which refuses while peers do not
confirm this node's clock. And a node that comes back from a backup may have signed things that it does not know: before
it signs what is write-once, it asks `ENOUGH` peers for its own records and so advances past them; its other records
replace one another, and an older stamp merely loses. `wire` has the messages.

Who may fail when, and what is then true:
- a peer that is slow, frozen or gone costs its own call, nothing else; others bring what it would have;
- pushes get lost: who offered the same, the next offer, or repair brings what they held. Two nodes that complete a
  repair hold the same afterwards, except for what came meanwhile;
- the swarm is cut in two and heals: whoever repairs across the cut first offers what it got to its neighbours, so all
  hold everything well before each has drawn a neighbour from the other side;
- a peer sends what is false: it is dropped at the first honest node and counted; `violations` lead to refusal;
- an author equivocates: all keep the same two records and the evidence. Peers refuse its calls while that stands, and
  go on merging what it signed, which others bring: else they would differ;
- the disk takes nothing: news is not acknowledged, not passed on, and comes again by repair.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import ENOUGH
from swarmnode.crdt.kinds import EVIDENCE, KINDS, kind_of
from swarmnode.crdt.record import Record
from swarmnode.protocols.calls.rpc import LifecycleGuard, Refuse, Rpc
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, PeerId
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import Change, Rank, StateBackend, StateError
from swarmnode.protocols.state.intake import ASKED_FOR, PROTOCOL, StateIntake
from swarmnode.protocols.state.push import Neighbours, Pusher
from swarmnode.protocols.state.repair import Repair
from swarmnode.protocols.state.wire import (
    Elements,
    OwnElements,
    Push,
    Pushed,
    RepairAnswer,
    RepairStep,
    StateFetch,
    batches,
    split,
)
from swarmnode.protocols.wire import RunQuery

logger = logging.getLogger(__name__)

REPAIR_EVERY = 30.0  # seconds, jittered by a fifth
TRIES = 3  # neighbours asked in turn until one repairs
GREETED_AFTER = 1.0  # seconds in which who dialled is expected to begin a repair; then the other does
RECOVER_WITHIN = 10.0  # seconds to hear from peers what this node signed before; then it signs without
AT_ONCE = 8  # repairs that this node begins because somebody connected; the one of every 30 s has a place of its own
REPAIR_WITHIN = 60.0  # seconds; what was got by then is kept, and the next repair goes on from there
OWN_TIMEOUT = 5.0  # seconds
OWN_SHOWN = 64  # records told to their author, the newest
OWN_QUERIES = Allowance(rate=0.1, burst=4)  # of one peer

REPAIRS = Metric("swarmnode_state_repairs_total", COUNTER, "repairs that this node began, and that ended", "what")
EQUIVOCATORS = Metric(
    "swarmnode_state_equivocators", GAUGE, "authors whose calls are refused for evidence against them"
)


class StateSync:
    """Keeps one state like that of others. `run` owns its tasks; the rest may be called while it runs."""

    def __init__(
        self, backend: StateBackend, *, network: Network, rpc: Rpc, runner: Runner, rng: random.Random | None = None
    ) -> None:
        """Signatures are verified where `runner` says."""
        self._backend = backend
        self._network = network
        self._rpc = rpc
        self._rng = rng or random.Random()
        self.violations = Violations(PROTOCOL)
        self.intake = StateIntake(backend, verify=network.verify, runner=runner, violations=self.violations)
        self.neighbours = Neighbours(network, self.violations)
        self.pusher = Pusher(backend, rpc, me=network.me, neighbours=self.neighbours, rng=self._rng)
        self._repair = Repair(backend, rpc, self.intake, self.neighbours, runner=runner, rng=self._rng)
        self._own_queries = Budget[PeerId](OWN_QUERIES)
        self._repairing: dict[PeerId, trio.Event] = {}
        self._repaired_at: dict[PeerId, float] = {}  # trio time of the last session with a connected peer
        self.hurry, self.flush = self.pusher.hurry, self.pusher.flush  # own records now; also returning when done
        self.remembered: set[PeerId] = set()  # who told this node what it signed before: a restored backup lacks it
        self._recovered = trio.Event()
        self._limit = trio.CapacityLimiter(AT_ONCE)
        self.begun = 0  # sessions that this node began …
        self.repairs = 0  # … and ended
        self._guard = LifecycleGuard("this node's state is not open")
        rpc.serve("state.push", Push, self._on_push, guard=self._guard)
        rpc.serve("state.fetch", StateFetch, self._on_fetch, guard=self._guard)
        rpc.serve("state.repair", RepairStep, self._on_step, guard=self._guard)
        rpc.serve("state.own", RunQuery, self._on_own, guard=self._guard)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(REPAIRS, lambda: {"begun": self.begun, "ended": self.repairs})
        metrics.show(EQUIVOCATORS, lambda: len(self.neighbours.equivocators))
        for part in (self.pusher, self.intake, self.violations):
            part.measure(metrics)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Push, repair and answer until cancelled. The backend must be running."""
        with self._backend.watch(EVIDENCE.name) as evidence, self._network.watch_peers() as events:
            await self._look_at_evidence()
            async with self._guard.open(), trio.open_nursery() as nursery:
                await nursery.start(self.pusher.run)
                nursery.start_soon(self._convict, evidence)
                nursery.start_soon(self._repair_now_and_then)
                nursery.start_soon(self._ask_others, nursery)
                nursery.start_soon(self._stop_waiting_for_memories)
                for view in self._network.peers():
                    nursery.start_soon(self._meet, view.peer)
                task_status.started()
                async for event in events:
                    if event.up and not event.moved:
                        nursery.start_soon(self._greet, event.peer)
                    elif not event.up:
                        self._repaired_at.pop(event.peer, None)
                        self._backend.clocks.forget(event.peer)

    async def write(self, key: str, value: Value) -> Record:
        """Sign a value of this node's own and pass it on; None deletes the key.

        What is write-once waits until peers have told what this node signed before. Raises as `StateBackend.write`.
        """
        kind = KINDS.get(kind_of(key))
        if kind is not None and kind.write_once:
            await self.until_recovered()
        return await self._backend.write(key, value)

    async def until_recovered(self) -> None:
        """Wait until peers told what this node signed before, as whoever writes in a shielded scope does first."""
        await self._recovered.wait()

    async def repair_with_all(self) -> None:
        """One repair with every neighbour, now."""
        async with trio.open_nursery() as nursery:
            for peer in self.neighbours.here():
                nursery.start_soon(self._repair_in_turn, peer)

    async def _repair_in_turn(self, peer: PeerId) -> None:
        async with self._limit:
            await self.repair_with(peer)

    async def repair_with(self, peer: PeerId) -> bool:
        """One repair with `peer`, or the end of the one under way; whether it came to an end here."""
        if peer in self._repairing:
            await self._repairing[peer].wait()
            return False
        done = self._repairing[peer] = trio.Event()
        self.begun += 1
        ended = False
        try:
            with self.neighbours.talking_to(peer), trio.fail_after(REPAIR_WITHIN):
                await self._repair.repair(peer)
                ended = True
        except trio.TooSlowError:
            self.violations.note(peer, f"a repair takes longer than {REPAIR_WITHIN:.0f} s", Kind.LOAD)
            self.neighbours.leave_alone(peer)
        finally:
            del self._repairing[peer]
            done.set()
        if ended:
            self.repairs += 1
            if self.neighbours.connected(peer):
                self._repaired_at[peer] = trio.current_time()
        return ended

    async def _ask_others(self, nursery: trio.Nursery) -> None:
        """Fetch what one peer offered, was asked for and did not send, from another that offered it."""
        while True:
            await trio.sleep(ASKED_FOR / 2)
            for peer, ranks in self.intake.overdue().items():
                nursery.start_soon(self._fetch, peer, ranks)

    async def _fetch(self, peer: PeerId, ranks: list[Rank]) -> None:
        with self.neighbours.talking_to(peer):
            await self._repair.fetch(peer, ranks)

    # --- occasions --------------------------------------------------------------------------------------------------

    async def _repair_now_and_then(self) -> None:
        while True:
            await trio.sleep(REPAIR_EVERY * self._rng.uniform(0.8, 1.2))
            for peer in self.neighbours.some(self._rng, TRIES, but=self._repairing):
                if await self.repair_with(peer):
                    break

    async def _greet(self, peer: PeerId) -> None:
        """A connection came up: who dialled repairs at once, the other where it did not."""
        self.neighbours.welcome(peer)
        since = trio.current_time()
        if any(view.peer == peer and view.inbound for view in self._network.peers()):
            await trio.sleep(GREETED_AFTER)
            if self._repaired_at.get(peer, -1.0) >= since and self._recovered.is_set():
                return
        if peer in self.neighbours.here():
            await self._meet(peer)

    async def _meet(self, peer: PeerId) -> None:
        if not self._recovered.is_set():
            await self._remember(peer)
        await self._repair_in_turn(peer)

    async def _look_at_evidence(self) -> None:
        try:
            self.neighbours.equivocators |= await self._backend.authors(EVIDENCE.name)
        except StateError as error:
            logger.warning("evidence against authors could not be read: %s", error)

    async def _convict(self, evidence: trio.MemoryReceiveChannel[Change]) -> None:
        async for change in evidence:
            offender = change.element.author
            if offender not in self.neighbours.equivocators:
                logger.warning("%s said two things under one key; its calls are refused from now on", offender)
                self.neighbours.equivocators.add(offender)
                self.violations.note(offender, "signed two records under one write-once key", Kind.LIE)
            if change.lost:
                await self._look_at_evidence()

    # --- this node's own past and clock -----------------------------------------------------------------------------

    async def _remember(self, peer: PeerId) -> None:
        """Ask `peer` what this node signed before, and advance past it."""
        with self.neighbours.talking_to(peer):
            asked = trio.current_time()
            query = RunQuery(self._backend.run_id)
            own = await self._rpc.call(peer, "state.own", query, OwnElements, timeout=OWN_TIMEOUT)
            self._repair.record_time(peer, own.time + int(500 * (trio.current_time() - asked)))
            await self.intake.insert(peer, own.sealed)
            self.remembered.add(peer)
            if len(self.remembered) >= ENOUGH:
                self._recovered.set()

    async def _stop_waiting_for_memories(self) -> None:
        await trio.sleep(RECOVER_WITHIN)
        if not self._recovered.is_set():
            logger.debug("%d peers told what this node signed before; signing on", len(self.remembered))
            self._recovered.set()

    # --- answers ----------------------------------------------------------------------------------------------------

    def _admit(self, peer: PeerId, run_id: str) -> None:
        """Raises Refuse for a peer that gets no answer."""
        if run_id != self._backend.run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if (why := self.violations.refuses(peer)) is not None:
            raise Refuse("refused", why)
        if peer in self.neighbours.equivocators:
            raise Refuse("refused", "the peer signed two records under one write-once key")
        self.neighbours.welcome(peer)

    async def _on_push(self, peer: PeerId, push: Push) -> Pushed:
        self._admit(peer, push.run_id)
        ranks = split(push.ranks)
        with _refusing():
            inserted = await self.intake.insert_pushed(peer, push.sealed, offered=len(ranks))
        self.neighbours.holds(peer, (*ranks, *(element.rank for element in inserted.new)))
        return Pushed(b"".join(rank for rank in ranks if self.intake.asks(peer, rank)))

    async def _on_fetch(self, peer: PeerId, fetch: StateFetch) -> Elements:
        self._admit(peer, fetch.run_id)
        with _refusing():
            return await self._repair.on_fetch(peer, fetch)

    async def _on_step(self, peer: PeerId, step: RepairStep) -> RepairAnswer:
        self._admit(peer, step.run_id)
        return await self._repair.on_step(peer, step)

    async def _on_own(self, peer: PeerId, query: RunQuery) -> OwnElements:
        """The newest elements of the caller; more than one message holds is not told."""
        if query.run_id != self._backend.run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if not self._own_queries.take(peer, 1):
            raise Refuse("busy", "the peer asks too often what it signed")
        with _refusing():
            newest = await self._backend.sealed(await self._backend.newest(peer, OWN_SHOWN))
        return OwnElements(next(batches(newest), ()), self._backend.clocks.shown())


@contextmanager
def _refusing() -> Iterator[None]:
    """Tell the caller where the disk does not answer."""
    try:
        yield
    except StateError as error:
        raise Refuse("unwritable", str(error)) from None
