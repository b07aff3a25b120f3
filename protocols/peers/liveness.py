"""Which peers answer, asked only while somebody waits for them; and how long a phase may take, by what it took before.

A killed peer closes its connections within milliseconds; a frozen one keeps them open and says nothing. While a task
waits for a peer inside `watching`, that peer is pinged; one that leaves several pings in a row unanswered, or cannot be
reached at all, becomes *suspected*, and everything that waits for it in `unless_gone` ends with `PeerGoneSilent`.
Suspicion is an opinion of this node at this time: it costs the peer a place in one round and ends with its next answer.

Two unanswered pings take seconds, so that they are not mistaken on any link. Who waits in something that lasts not
much longer says so (`within`): a peer is then pinged more often, and suspected after that long without any sign of
life, be it an answer or bytes. Before that, the silence must be unlike the peer, UNLIKE times as long as the longest
that it was seen to keep in such waits, and another peer must be heard just then: it is not this node that is cut off.
Where too little is known of a peer, and where there is nobody else to ask, unanswered pings decide as always.

A node that was itself stopped (SIGSTOP, a suspended laptop) would find that everybody missed a ping. `run` notices such
gaps in its own time and forgets the failures counted across them; and silences are measured on a clock that stands
still while this node does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import trio

from swarmnode.protocols.calls.rpc import CallError, PeerGone, Rpc
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.network import PeerId

T = TypeVar("T")

PEERS_REMEMBERED = 1024  # round trips and suspicions kept; the oldest go
UNLIKE = 3.0  # times the longest silence, before one is unlike a peer
KNOWN_FROM = 2.0  # times the silence allowed: for how long a peer was listened to before it is known
FORGOTTEN_BY_HALF = 60.0  # seconds in which the longest silence comes to count half
ANEW = 60.0  # seconds without a look at a suspected peer, after which it may have been well in between
NEVER = -math.inf, -math.inf  # when a peer was suspected that was not, first and last
TICK = 0.05  # seconds between looks at who is silent
PINGS_WITHIN = 4  # pings in the silence that a hurried watcher allows
WITNESSES = 3  # peers asked at once whether this node hears anybody
HISTORY = 16  # durations kept: long enough for a median, short enough to follow a changed link
SPREAD = 5.0  # deviations allowed above the median; 5 MAD is about 3.4 standard deviations of normal noise
SLACK = 2.0  # a phase may also take this multiple of its median, for durations that hardly vary


class PeerGoneSilent(Exception):
    """A peer that this node waited for is suspected to be dead, frozen or cut off."""


@dataclass(frozen=True)
class LivenessSettings:
    """All in seconds. `interval · failures` is about the time in which a frozen peer is noticed."""

    interval: float = 0.75  # between pings of a watched peer
    timeout: float = 1.5  # for one ping
    failures: int = 2  # unanswered pings in a row that make a peer suspected
    stall: float = 1.5  # a gap in this node's own time that makes it distrust its own impressions
    memory: float = 10.0  # a peer suspected this recently is suspected at once when it is watched again


@dataclass(frozen=True)
class _Silences:
    """Those of a peer while somebody who hurried waited for it."""

    listened: float = 0.0  # seconds in all
    longest: float = 0.0  # seconds, half forgotten every FORGOTTEN_BY_HALF
    at: float = 0.0  # trio time of the last

    def faded(self) -> float:
        """The longest, as it counts now."""
        return float(self.longest * 0.5 ** ((trio.current_time() - self.at) / FORGOTTEN_BY_HALF))


@dataclass
class _Watched:
    watchers: int
    failures: int
    scope: trio.CancelScope
    heard: float  # listening time of the last sign of life, or at which somebody began to hurry
    suspected: bool
    waiting: set[trio.CancelScope] = field(default_factory=set)  # around what is given up where it is suspected
    doubted: bool = False  # others are asked just now whether they are heard
    hurried: list[float] = field(default_factory=list)  # the silence that each of the hurried watchers allows, seconds
    hurry: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)  # until one more hurries

    @property
    def within(self) -> float:
        """The shortest silence that a watcher allows, in seconds."""
        return min(self.hurried, default=math.inf)


class Liveness:
    """Pings watched peers; see the module's docstring. Tasks live in `run`."""

    def __init__(self, rpc: Rpc, settings: LivenessSettings = LivenessSettings()) -> None:
        self._rpc = rpc
        self._settings = settings
        self._watched: dict[PeerId, _Watched] = {}
        self._nursery: trio.Nursery | None = None
        self._ended = False
        self._suspicions = Recent[PeerId, tuple[float, float]](PEERS_REMEMBERED)  # first and last, until an answer
        self._stalled_at = -math.inf  # trio time of the last gap in this node's own time
        self._listeners: list[Callable[[], None]] = []
        self._silences = Recent[PeerId, _Silences](PEERS_REMEMBERED)
        self._listened = 0.0  # seconds of hurry in which this node was awake: the clock of silences
        self._hurried = trio.Event()  # set while somebody hurries
        self.rtts = Recent[PeerId, float](PEERS_REMEMBERED)  # seconds of the last round trip; the latest measured last

    def on_suspicion(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever a watched peer becomes suspected."""
        self._listeners.append(listener)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the pinging tasks until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery, self._ended = nursery, False
            nursery.start_soon(self._listen, nursery)
            task_status.started()
            before = trio.current_time()
            try:
                while True:
                    await trio.sleep(self._settings.interval)
                    now = trio.current_time()
                    if now - before > self._settings.interval + self._settings.stall:
                        self._stalled_at = now
                        for watched in self._watched.values():
                            watched.failures = 0
                    before = now
            finally:
                self._ended = True

    def stalled_since(self, time: float) -> bool:
        """Whether this node itself stood still at some moment after `time` (trio time)."""
        return self._stalled_at > time

    @contextmanager
    def watching(self, peers: Iterable[PeerId], *, within: float | None = None) -> Iterator[None]:
        """Ping `peers` while the block runs; `within`: seconds of silence after which to suspect one, see above."""
        if self._nursery is None:
            raise RuntimeError("Liveness.watching needs Liveness.run")
        mine = set(peers)
        for peer in sorted(mine):
            if watched := self._watched.get(peer):
                watched.watchers += 1
            else:
                lately = trio.current_time() - self._suspicions.get(peer, NEVER)[1] < self._settings.memory
                watched = self._watched[peer] = _Watched(1, 0, trio.CancelScope(), self._listened, lately)
                if not self._ended:  # else the node is about to end, and whoever waits here with it
                    self._nursery.start_soon(self._ping_until_unwatched, peer, watched)
            if within is not None:
                if not watched.hurried:
                    watched.heard = self._listened  # until now pings were rare
                watched.hurried.append(within)
                watched.hurry.unpark_all()
                self._hurried.set()
        try:
            yield
        finally:
            for peer in mine:
                watched = self._watched[peer]
                watched.watchers -= 1
                if within is not None:
                    watched.hurried.remove(within)
                if watched.watchers == 0:
                    watched.scope.cancel()
                    del self._watched[peer]

    def is_suspected(self, peer: PeerId) -> bool:
        """Whether a watched peer is suspected now; False for one that is not watched."""
        watched = self._watched.get(peer)
        return watched is not None and watched.suspected

    def suspected_for(self, peer: PeerId) -> float:
        """Seconds since a peer became suspected that was not seen to answer since then; 0 for any other."""
        now = trio.current_time()
        return now - self._suspicions.get(peer, (now, now))[0]

    def suspect(self, peer: PeerId) -> None:
        """Suspect a watched peer at once: it said that it leaves, or whoever waits for it saw a reason.

        Its next answer ends it, as always.
        """
        if peer in self._watched:
            self._suspect(peer, self._watched[peer])

    def heard_from(self, peer: PeerId) -> None:
        """A sign of life, be it no answer to a ping: the peer is not suspected any more."""
        self._suspicions.pop(peer, None)
        watched = self._watched.get(peer)
        if watched is not None:
            if watched.hurried:
                self._note_silence(peer, watched)
            watched.heard = self._listened
            watched.failures, watched.suspected = 0, False

    def _suspect(self, peer: PeerId, watched: _Watched) -> None:
        now = trio.current_time()
        first, last = self._suspicions.get(peer, (now, now))
        self._suspicions[peer] = first if now - last < ANEW else now, now
        if not watched.suspected:
            watched.suspected = True
            for scope in watched.waiting:
                scope.cancel()
            for listener in self._listeners:
                listener()

    async def unless_gone(self, peer: PeerId, work: Callable[[], Awaitable[T]], *, within: float | None = None) -> T:
        """The result of `work()`, or PeerGoneSilent as soon as `peer` is suspected; watches the peer meanwhile."""
        with self.watching([peer], within=within), trio.CancelScope() as scope:
            watched = self._watched[peer]
            watched.waiting.add(scope)
            if watched.suspected:
                scope.cancel()
            try:
                return await work()
            finally:
                watched.waiting.discard(scope)
        raise PeerGoneSilent(f"peer {peer} stopped answering")

    async def _ping_until_unwatched(self, peer: PeerId, watched: _Watched) -> None:
        settings = self._settings
        with watched.scope:
            while True:
                asked = trio.current_time()
                try:
                    self.rtts[peer] = await self._rpc.ping(peer, timeout=settings.timeout)
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
                with trio.move_on_after(min(settings.interval, watched.within / PINGS_WITHIN)):
                    await watched.hurry.park()

    # --- silences ---------------------------------------------------------------------------------------------------

    async def _listen(self, nursery: trio.Nursery) -> None:
        """Count the time of silences, and suspect who is silent for too long; see the module's docstring."""
        while True:
            await self._hurried.wait()
            before = trio.current_time()
            await trio.sleep(TICK)
            self._listened += min(trio.current_time() - before, 2 * TICK)
            hurried = {peer: watched for peer, watched in self._watched.items() if watched.hurried}
            if not hurried:
                self._hurried = trio.Event()
            for peer, watched in hurried.items():
                allowed = self._allowed(peer, watched)
                if self._listened - watched.heard < allowed or watched.suspected or watched.doubted:
                    continue
                others = [w for p, w in hurried.items() if p != peer]
                if any(self._listened - w.heard < allowed / UNLIKE for w in others):
                    self._give_up(peer, watched)
                else:
                    nursery.start_soon(self._doubt, peer, watched, allowed / UNLIKE)

    async def _doubt(self, peer: PeerId, watched: _Watched, within: float) -> None:
        """Give a silent peer up if one of those who answered last does so now, within so many seconds."""
        heard, watched.doubted = watched.heard, True
        witnesses = [p for p in reversed(self.rtts) if p != peer and not self.is_suspected(p)][:WITNESSES]

        async def ask(witness: PeerId) -> None:
            try:
                await self._rpc.ping(witness, timeout=within)
            except CallError:
                return
            if self._watched.get(peer) is watched and watched.hurried and watched.heard == heard:
                self._give_up(peer, watched)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for witness in witnesses:
                nursery.start_soon(ask, witness)
        watched.doubted = False

    def _give_up(self, peer: PeerId, watched: _Watched) -> None:
        self._note_silence(peer, watched)  # where it lives, it is given more time when it is back
        self._suspect(peer, watched)

    def _allowed(self, peer: PeerId, watched: _Watched) -> float:
        """Seconds for which a watched peer may be silent; infinite where too little is known of it."""
        known = self._silences.get(peer, _Silences())
        return max(watched.within, UNLIKE * known.faded()) if known.listened > KNOWN_FROM * watched.within else math.inf

    def _note_silence(self, peer: PeerId, watched: _Watched) -> None:
        before, silence = self._silences.get(peer, _Silences()), self._listened - watched.heard
        longest = max(silence, before.faded())
        self._silences[peer] = _Silences(before.listened + silence, longest, trio.current_time())


class AdaptiveDeadline:
    """Seconds to allow for a phase, from the durations observed so far."""

    def __init__(self, *, floor: float, ceiling: float) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._seen: deque[float] = deque(maxlen=HISTORY)

    def observe(self, seconds: float) -> None:
        """Record how long the phase took when it succeeded."""
        self._seen.append(seconds)

    @property
    def usual(self) -> float | None:
        """Median duration in seconds; None before the first observation."""
        return median(self._seen) if self._seen else None

    def seconds(self, *, first: float = float("inf")) -> float:
        """What to allow now: `median + SPREAD · MAD`, at least `SLACK · median`, within floor and ceiling.

        Before anything was observed it is `first`, seconds, within the same bounds: the ceiling where nothing else is
        known, as a first round may be slow and must not be cut.
        """
        if not self._seen:
            return min(max(first, self._floor), self._ceiling)
        middle = median(self._seen)
        deviation = median(abs(s - middle) for s in self._seen)
        return min(max(middle + SPREAD * deviation, SLACK * middle, self._floor), self._ceiling)
