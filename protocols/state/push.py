"""News of the state goes from neighbour to neighbour: whole to a few, by rank to some more, who ask for what they lack.

To how many, and when: docs/architecture.md, "Push". Nobody is sent what it sent, offered or was sent before, but for
leases: authors are offered their own, by which two daemons with one key hear of one another. What came by repair goes
by rank only: others may long have it.

Who may fail when, and what is then true: a peer that does not answer holds up nobody; what comes while a push to it is
under way goes with the next one, and what it misses as it fails, or what is above the limits, repair brings. An
author's elements are passed on at `AUTHOR` a second at most, so who signs a thousand a second costs his neighbours.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

import trio

from swarmnode.crdt.record import Element
from swarmnode.protocols.calls.rpc import CallError, Refused, Rpc
from swarmnode.protocols.limits import Allowance, Budget, Recent
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import Network, PeerId, PeerView
from swarmnode.protocols.peers.diversity import sample
from swarmnode.protocols.peers.scoring import Violations
from swarmnode.protocols.state.backend import Change, Rank, StateBackend, StateError
from swarmnode.protocols.state.wire import MAX_RANKS, Push, Pushed, batches, split

logger = logging.getLogger(__name__)

COLLECT = 0.2  # seconds that news waits for more of it; with the way to the next node, the time of one hop
EAGER = 2  # peers that get the elements
FIRST = 6  # peers that get those of this node's own
LARGE = 1024  # bytes of an element that goes whole to one of them only
LAZY = 8  # further peers that get the ranks; of ten in all, chance leaves out one node in 22 000
EAGER_BYTES = 64 * 1024  # of elements in one push; the rest goes by rank
CALL_TIMEOUT = 5.0  # seconds
AUTHOR = Allowance(rate=10, burst=512)  # elements of one author passed on; a burst fills the slots of any kind
WAITING = 4096  # elements that wait to be passed on; beyond, repair brings them
KNOWN = 4096  # elements for which it is remembered who has them
HOLDERS = 64  # peers remembered for each
ASK_AGAIN_AFTER = 60.0  # seconds until a peer that is not of this run is tried again
LATER = 5.0  # seconds until one that is busy or did not answer is
DISTRUSTED_FOR = 600.0  # seconds that one which repairs falsely is not asked or told anything
STRANGERS = ("unknown-run", "unknown-method")
ECHOED = "member"  # kind of which each author is offered its own, by rank: see `membership.DuplicateIdentity`

_News: TypeAlias = tuple[Element, bool]  # and whether it is sent whole

PUSHES = Metric("swarmnode_state_pushes_total", COUNTER, "messages with news of the state sent to peers")
DROPPED = Metric("swarmnode_state_dropped_total", COUNTER, "elements not passed on at once; repair brings them")


class Neighbours:
    """Connected peers that take part in the state of this run, and what each of them has, as far as this node can tell.

    Those who refused, failed lately, or are not trusted are left out.
    """

    def __init__(self, network: Network, violations: Violations) -> None:
        self._network = network
        self.violations = violations
        self.equivocators: set[str] = set()  # evidence stands against them, or stood since this node started
        self._until: dict[PeerId, float] = {}  # peer -> trio time until which it is left alone
        self._distrusted: dict[PeerId, float] = {}  # the same, for what it said
        self._holders = Recent[Rank, set[PeerId]](KNOWN)
        self.by_repair = Recent[Rank, None](KNOWN)  # what came so: no news to many

    def here(self) -> list[PeerId]:
        """Peers to talk to now."""
        return [view.peer for view in self._views()]

    def connected(self, peer: PeerId) -> bool:
        return any(view.peer == peer for view in self._network.peers())

    def _views(self) -> list[PeerView]:
        now = trio.current_time()
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return [view for view in self._network.peers() if view.peer not in self._until and self.trusts(view.peer)]

    def some(self, rng: random.Random, count: int, *, but: Container[PeerId] = ()) -> list[PeerId]:
        """At most so many peers to talk to now, by chance; each network as likely as any other."""
        views = [view for view in self._views() if view.peer not in but]
        return [view.peer for view in sample(rng, views, count, lambda view: view.group)]

    def trusts(self, peer: PeerId) -> bool:
        """Whether the peer is told news and asked to repair, where it is here."""
        return (
            self._distrusted.get(peer, 0.0) <= trio.current_time()
            and peer not in self.equivocators
            and self.violations.refuses(peer) is None
        )

    def distrust(self, peer: PeerId) -> None:
        """It did not repair as an honest node does."""
        now = trio.current_time()
        self._distrusted = {each: until for each, until in self._distrusted.items() if until > now}
        self._distrusted[peer] = now + DISTRUSTED_FOR

    def leave_alone(self, peer: PeerId) -> None:
        """It is too slow to be asked again soon."""
        self._until[peer] = trio.current_time() + ASK_AGAIN_AFTER

    @contextmanager
    def talking_to(self, peer: PeerId) -> Iterator[None]:
        """A call that brings no answer, or a disk that keeps nothing, ends the block, and leaves the peer alone."""
        try:
            yield
        except CallError as error:
            stranger = isinstance(error, Refused) and error.code in STRANGERS
            self._until[peer] = trio.current_time() + (ASK_AGAIN_AFTER if stranger else LATER)
            logger.debug("%s is left alone for a while: %s", peer, error)
        except StateError as error:
            logger.warning("what %s sent, or asked for, could not be stored or read: %s", peer, error)

    def welcome(self, peer: PeerId) -> None:
        """It connected, or spoke of this run: whatever was before is no matter."""
        self._until.pop(peer, None)

    def holds(self, peer: PeerId, ranks: Iterable[Rank]) -> None:
        """`peer` sent, offered or was sent these."""
        for rank in ranks:
            self._holders[rank] = holders = self._holders.get(rank, set())
            if len(holders) < HOLDERS:
                holders.add(peer)

    def has(self, peer: PeerId, rank: Rank) -> bool:
        return peer in self._holders.get(rank, ())


class Pusher:
    def __init__(
        self, backend: StateBackend, rpc: Rpc, *, me: PeerId, neighbours: Neighbours, rng: random.Random
    ) -> None:
        self._me = me
        self._backend = backend
        self._rpc = rpc
        self._neighbours = neighbours
        self._rng = rng
        self._authors = Budget[str](AUTHOR)
        self._waiting: OrderedDict[Rank, Element] = OrderedDict()
        self._later: dict[PeerId, list[_News]] = {}  # peers to which a push is under way -> what goes with the next
        self._told = trio.lowlevel.ParkingLot()  # until a push ends
        self._hurry = trio.Event()
        self._changes: trio.MemoryReceiveChannel[Change] | None = None
        self.pushes = 0  # messages
        self.dropped = 0  # elements that were not passed on, for their author's budget or for want of room

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PUSHES, lambda: self.pushes)
        metrics.show(DROPPED, lambda: self.dropped)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pass on news until cancelled."""
        with self._backend.watch() as self._changes:
            task_status.started()
            try:
                async with trio.open_nursery() as nursery:
                    while True:
                        if not self._waiting:
                            self._collect(await self._changes.receive())
                        with trio.move_on_after(COLLECT):
                            await self._hurry.wait()
                        self._hurry = trio.Event()
                        self._spread(nursery)
            finally:
                self._changes = None

    def hurry(self) -> None:
        """Pass on what waits, and what comes next, without waiting for more."""
        self._hurry.set()

    async def flush(self) -> None:
        """Pass on now what waits, and return when that and what was under way is done, as before this node leaves."""
        for _ in range(2):  # `run` may have been handed a change that it has not looked at, and be behind this task
            await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            self._spread(nursery)
        busy = set(self._later)
        with trio.move_on_after(CALL_TIMEOUT):
            while busy & self._later.keys():
                await self._told.park()

    def _collect(self, change: Change) -> None:
        element = change.element
        if self._authors.take(element.author, 1):
            self._waiting[element.rank] = element
        else:
            self.dropped += 1
        self.dropped += change.lost

    def _spread(self, nursery: trio.Nursery) -> None:
        """Start the pushes of one batch; peers that are busy with the last get it with the next one."""
        with suppress(trio.WouldBlock):
            while self._changes is not None and len(self._waiting) < WAITING:
                self._collect(self._changes.receive_nowait())
        batch: list[Element] = []
        while self._waiting and len(batch) < MAX_RANKS:
            batch.append(self._waiting.popitem(last=False)[1])
        for number, peer in enumerate(self._neighbours.some(self._rng, EAGER + LAZY)):
            news = [
                (element, number < self._whole(element))
                for element in batch
                if not self._neighbours.has(peer, element.rank) or _is_echo(element, peer)
            ]
            if peer in self._later:
                self._later[peer] = [*self._later[peer], *news][:MAX_RANKS]
            elif news:
                self._later[peer] = []
                nursery.start_soon(self._tell, peer, news)

    def _whole(self, element: Element) -> int:
        if element.rank in self._neighbours.by_repair:
            return 0
        if element.author == self._me:
            return FIRST
        return 1 if len(element.sealed) > LARGE else EAGER

    async def _tell(self, peer: PeerId, batch: list[_News]) -> None:
        try:
            with self._neighbours.talking_to(peer):  # what it misses, repair brings
                while batch:
                    await self._tell_once(peer, batch)
                    batch, self._later[peer] = self._later[peer], []
        finally:
            del self._later[peer]
            self._told.unpark_all()

    async def _tell_once(self, peer: PeerId, batch: Sequence[_News]) -> None:
        whole: list[bytes] = []
        offered: list[Rank] = []
        room = EAGER_BYTES
        for element, entire in batch:
            sealed = element.sealed
            if entire and len(sealed) <= room and not _is_echo(element, peer):
                room -= len(sealed)
                whole.append(sealed)
            else:
                offered.append(element.rank)
        wanted = await self._push(peer, tuple(whole), offered)
        self._neighbours.holds(peer, [element.rank for element, _ in batch])
        asked = set(offered).intersection(wanted)
        for some in batches(await self._backend.sealed([rank for rank in offered if rank in asked])):
            await self._push(peer, some, ())

    async def _push(self, peer: PeerId, sealed: tuple[bytes, ...], ranks: Iterable[Rank]) -> tuple[Rank, ...]:
        push = Push(self._backend.run_id, sealed, b"".join(ranks))
        self.pushes += 1
        return split((await self._rpc.call(peer, "state.push", push, Pushed, timeout=CALL_TIMEOUT)).wanted)


def _is_echo(element: Element, peer: PeerId) -> bool:
    """Whether an element is offered to its own author, where another daemon with its key may read it."""
    return element.kind == ECHOED and element.author == peer
