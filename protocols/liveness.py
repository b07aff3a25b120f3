"""Which peers answer, asked only while somebody waits for them.

A killed peer closes its connections within milliseconds; a frozen one keeps them open and says nothing. While a task
waits for a peer inside `watching`, that peer is pinged; one that leaves several pings in a row unanswered, or cannot be
reached at all, becomes *suspected*, and everything that waits for it in `unless_gone` ends with `PeerGoneSilent`.
Suspicion is an opinion of this node at this time: it costs the peer a place in one round and ends with its next answer.

A node that was itself stopped (SIGSTOP, a suspended laptop) would find that everybody missed a ping. `run` notices such
gaps in its own time and forgets the failures counted across them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import trio

from swarmnode.protocols.network import PeerId
from swarmnode.protocols.rpc import CallError, PeerGone, Rpc

T = TypeVar("T")

PEERS_REMEMBERED = 1024  # round trips and suspicions kept; the oldest go


class PeerGoneSilent(Exception):
    """A peer that this node waited for is suspected to be dead, frozen or cut off."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(f"peer {peer} stopped answering")
        self.peer = peer


@dataclass(frozen=True)
class LivenessSettings:
    """All in seconds. `interval · failures` is about the time in which a frozen peer is noticed."""

    interval: float = 0.75  # between pings of a watched peer
    timeout: float = 1.5  # for one ping
    failures: int = 2  # unanswered pings in a row that make a peer suspected
    stall: float = 1.5  # a gap in this node's own time that makes it distrust its own impressions
    memory: float = 10.0  # a peer suspected this recently is suspected at once when it is watched again


@dataclass
class _Watched:
    watchers: int
    failures: int
    suspected: trio.Event
    scope: trio.CancelScope


class Liveness:
    """Pings watched peers; see the module's docstring. Tasks live in `run`."""

    def __init__(self, rpc: Rpc, settings: LivenessSettings = LivenessSettings()) -> None:
        self._rpc = rpc
        self._settings = settings
        self._watched: dict[PeerId, _Watched] = {}
        self._nursery: trio.Nursery | None = None
        self._suspected_at: dict[PeerId, float] = {}  # trio time, until the peer answers again
        self._stalled_at = -math.inf  # trio time of the last gap in this node's own time
        self._listeners: list[Callable[[], None]] = []
        self.rtts: dict[PeerId, float] = {}  # last measured round trip, seconds

    def on_suspicion(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever a watched peer becomes suspected."""
        self._listeners.append(listener)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the pinging tasks until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            before = trio.current_time()
            while True:
                await trio.sleep(self._settings.interval)
                now = trio.current_time()
                if now - before > self._settings.interval + self._settings.stall:
                    self._stalled_at = now
                    for watched in self._watched.values():
                        watched.failures = 0
                before = now

    def stalled_since(self, time: float) -> bool:
        """Whether this node itself stood still at some moment after `time` (trio time)."""
        return self._stalled_at > time

    @contextmanager
    def watching(self, peers: Iterable[PeerId]) -> Iterator[None]:
        """Ping `peers` while the block runs."""
        if self._nursery is None:
            raise RuntimeError("Liveness.watching needs Liveness.run")
        mine = set(peers)
        for peer in sorted(mine):
            if peer in self._watched:
                self._watched[peer].watchers += 1
            else:
                watched = _Watched(1, 0, trio.Event(), trio.CancelScope())
                self._watched[peer] = watched
                if trio.current_time() - self._suspected_at.get(peer, -math.inf) < self._settings.memory:
                    watched.suspected.set()
                self._nursery.start_soon(self._ping_until_unwatched, peer, watched)
        try:
            yield
        finally:
            for peer in mine:
                watched = self._watched[peer]
                watched.watchers -= 1
                if watched.watchers == 0:
                    watched.scope.cancel()
                    del self._watched[peer]

    def is_suspected(self, peer: PeerId) -> bool:
        """Whether a watched peer is suspected now; False for one that is not watched."""
        watched = self._watched.get(peer)
        return watched is not None and watched.suspected.is_set()

    def said_goodbye(self, peer: PeerId) -> None:
        """The peer itself says that it leaves: suspect it at once."""
        self.suspect(peer)

    def suspect(self, peer: PeerId) -> None:
        """Suspect a watched peer at once: whoever waits for it saw a reason. Its next answer ends it, as always."""
        if peer in self._watched:
            self._suspect(peer, self._watched[peer])

    def heard_from(self, peer: PeerId) -> None:
        """The peer answered something else than a ping: it is not suspected any more."""
        self._suspected_at.pop(peer, None)
        watched = self._watched.get(peer)
        if watched is not None:
            watched.failures = 0
            if watched.suspected.is_set():
                watched.suspected = trio.Event()

    def _suspect(self, peer: PeerId, watched: _Watched) -> None:
        _remember(self._suspected_at, peer, trio.current_time())
        if not watched.suspected.is_set():
            watched.suspected.set()
            for listener in self._listeners:
                listener()

    async def unless_gone(self, peer: PeerId, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`, or PeerGoneSilent as soon as `peer` is suspected; watches the peer meanwhile."""
        with self.watching([peer]), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_suspected, peer, scope)
                try:
                    result = await work()
                except Exception as error:
                    failure: Exception | None = error
                else:
                    failure = None
                nursery.cancel_scope.cancel()
            # outside the nursery, so that the caller sees the error itself and not a group around it
            if failure is not None:
                raise failure
            return result
        raise PeerGoneSilent(peer)

    async def _cancel_when_suspected(self, peer: PeerId, scope: trio.CancelScope) -> None:
        await self._watched[peer].suspected.wait()
        scope.cancel()

    async def _ping_until_unwatched(self, peer: PeerId, watched: _Watched) -> None:
        settings = self._settings
        with watched.scope:
            while True:
                asked = trio.current_time()
                try:
                    _remember(self.rtts, peer, await self._rpc.ping(peer, timeout=settings.timeout))
                except CallError as error:
                    overdue = trio.current_time() - asked > settings.timeout + settings.stall
                    if not overdue and not self.stalled_since(asked):
                        watched.failures += 1
                    if watched.failures >= settings.failures:
                        self._suspect(peer, watched)
                    elif isinstance(error, PeerGone):
                        continue  # a broken stream may only be an old one: a new connection tells at once
                else:
                    self.heard_from(peer)
                await trio.sleep(settings.interval)


def _remember(known: dict[PeerId, float], peer: PeerId, value: float) -> None:
    """Set a peer's value; of more than PEERS_REMEMBERED peers, those set longest ago are forgotten."""
    known.pop(peer, None)
    known[peer] = value
    while len(known) > PEERS_REMEMBERED:
        del known[next(iter(known))]
