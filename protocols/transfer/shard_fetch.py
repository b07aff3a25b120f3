"""One fetch of one shard: several providers in parallel, each at its own rate, until every chunk is here.

1. A scout asks the hinted and the connected peers what they have, and looks in the DHT; again and again, for providers
   come, and half-complete ones fill up. Whoever asks this node for the same shard will soon have some of it, and is
   asked as well.
2. The first manifest that hashes to the id is taken; the store says which chunks are here from an earlier attempt.
3. Each provider has a stream and a window of chunks under way: as many as it delivers in `ahead` seconds, by the median
   of its last. It is given the rarest chunk that it has and nobody was asked for, equals in an order that each fetch
   draws anew, so that nodes that fetch together have something to give one another.
4. Endgame: when every missing chunk was asked for, a provider with room is also asked for one that is due elsewhere,
   where it would have it in half the time. A provider that is overdue counts as never. No chunk is asked of more than
   two.

Who may fail when, and what is then true:
- a provider sends a chunk with a wrong hash, a wrong size or no message at all: it is out of this fetch and counted;
- it dies, or is silent for longer than its own rate explains: its chunks go to others at once, and it is tried
  again at a later search;
- it sends one byte a second: the endgame takes its chunks away, and the fetch does not wait for it;
- it moves from a relayed path to a direct one: what it was asked for still comes on the old one, and no more is;
- it does not have what it said: the chunk is looked for elsewhere, and after a few it is dropped;
- nobody is left: the scout goes on for `patience` seconds, then Unavailable; what has arrived stays in the store.

Memory: one answer for each provider and a few in the write buffer, whatever the shard's size.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.network import Network, NetworkError, PeerId, StreamBroken
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_plan import Plan, Run, Source
from swarmnode.protocols.transfer.shard_tree import ShardId, ShardManifest, chunk_count, run_length
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    MANIFEST,
    NO_ROOM,
    Have,
    Holding,
    Holdings,
    Leaves,
    ShardChannel,
    ShardChannels,
    ShardError,
    ShardLimits,
    ShardNotHeld,
    ShardWant,
    Store,
    Unavailable,
    WantManifest,
)
from swarmnode.protocols.wire import WireError

log = logging.getLogger(__name__)

Gave = Callable[[PeerId, ShardId, int, bool], None]  # a provider, its verified bytes, whether it had what it said

COMPANIONS = 32  # peers remembered that others named as fetching the same shard
ASKED_LATELY = 60.0  # seconds for which a peer that asked for a shard is taken for one that fetches it
ASKERS_KEPT = 1024
EMPTY_PROMISES = 8  # chunks that a provider may lack although it said it had them
LOOK_AGAIN = (0.05, 1.0)  # seconds, at least and at most, between two looks at whose chunks have become overdue
BATCH = 2  # answers written at once; four gain nothing that could be measured, and take twice the memory
ROOMS = 2 * BATCH  # answers that wait or are being written; who brings one more waits, so this bounds the memory
GATHER = 0.01  # seconds that a verified answer waits for others


class Askers:
    """Who asked this node for which shard of late: they will have some of it soon."""

    def __init__(self) -> None:
        self._when: OrderedDict[tuple[ShardId, PeerId], float] = OrderedDict()  # trio time, the latest last

    def note(self, shard: ShardId, peer: PeerId) -> None:
        self._when[shard, peer] = trio.current_time()
        self._when.move_to_end((shard, peer))
        if len(self._when) > ASKERS_KEPT:
            self._when.popitem(last=False)

    def of(self, shard: ShardId) -> tuple[PeerId, ...]:
        since = trio.current_time() - ASKED_LATELY
        return tuple(peer for (asked, peer), at in self._when.items() if asked == shard and at > since)


@dataclass(frozen=True)
class FetchContext:
    """What all fetches of a node share."""

    network: Network
    rpc: Rpc
    runner: Runner
    channels: ShardChannels
    violations: Violations
    counts: Counter[str]
    limits: ShardLimits
    gave: Gave
    askers: Askers

    async def ask_holding(self, peer: PeerId, shard: ShardId) -> Holding | None:
        """What `peer` says it has of `shard`; None where it does not answer or makes no sense."""
        try:
            answer = await self.rpc.call(peer, HAVE, Have((shard,)), Holdings, timeout=self.limits.call)
            if len(answer.shards) != 1:
                raise ValueError(f"{len(answer.shards)} holdings for one shard")
            answer.shards[0].bits()
        except CallError as error:
            log.debug("asking %s for a shard failed: %s", peer, error)
            return None
        except ValueError as error:
            self.violations.note(peer, str(error))
            return None
        return answer.shards[0]


class Job:
    """One fetch and those who wait for it."""

    def __init__(self, shard: ShardId, store: Store, limits: ShardLimits, *, brief: bool) -> None:
        """`brief`: the shard lives in memory for minutes, so that nobody announces it or is measured by it."""
        self.shard = shard
        self.store = store
        self.limits = limits
        self.brief = brief
        self.hints: dict[PeerId, None] = {}  # named by the callers
        self.companions: OrderedDict[PeerId, None] = OrderedDict()  # who asked others for it: they will have it soon
        self.listeners: list[Callable[[int, int], None]] = []
        self.callers = 0
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.error: ShardError | None = None

    def note_companion(self, peer: PeerId) -> None:
        self.companions[peer] = None
        if len(self.companions) > COMPANIONS:
            self.companions.popitem(last=False)


class ShardFetch:
    """Runs once; `run` returns when the shard is complete in the store. Raises NoRoom or Unavailable."""

    def __init__(self, job: Job, context: FetchContext, *, seed: int) -> None:
        self._job = job
        self._shard, self._store, self._limits = job.shard, job.store, job.limits
        self._context = context
        self._seed = seed
        self._plan: Plan | None = None
        self._begun = trio.Event()  # the manifest is known, and the store has made room
        self._beginning = trio.Lock()
        self._done = trio.Event()
        self._failure: ShardError | None = None
        self._tried: set[PeerId] = set()  # being asked, or drawn from
        self._asking = trio.Semaphore(job.limits.sources)
        self._banned: set[PeerId] = set()
        self._search_now = trio.Event()
        self._write_buffer = WriteBuffer(
            self._shard, store=job.store, runner=context.runner, written=self._written, failed=self._fail
        )
        self._moved_at = trio.current_time()  # when the last chunk came

    async def run(self) -> None:
        """Fetch until complete; in the end the store has finished the shard or suspended it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_buffer.run)
                nursery.start_soon(self._scout, nursery)
                with suppress(ShardNotHeld):  # the manifest is here where an earlier fetch began
                    await self._begin(await self._context.runner(lambda: self._store.manifest(self._shard)))
                await self._done.wait()
                nursery.cancel_scope.cancel()
            if self._failure is not None:
                raise self._failure
            await self._context.runner(lambda: self._store.finish(self._shard))
        except BaseException:
            if self._begun.is_set():
                with trio.CancelScope(shield=True):
                    await self._context.runner(lambda: self._store.suspend(self._shard))
            raise

    def _fail(self, error: ShardError) -> None:
        self._failure = self._failure or error
        self._done.set()

    # -- finding providers

    async def _scout(self, nursery: trio.Nursery) -> None:
        next_search, looks = -math.inf, 0
        while True:
            sources = self._sources()
            if trio.current_time() >= next_search or self._search_now.is_set():
                self._search_now = trio.Event()
                next_search = trio.current_time() + self._limits.search
                nursery.start_soon(self._search_known)
                if not self._job.brief:
                    nursery.start_soon(self._search_dht)
            else:
                looks += 1
                whole = [source for source in sources if source.complete]
                for source in sources:  # of those who have all, one after the other, for who else asked them
                    if not source.complete or source is whole[looks % len(whole)]:
                        nursery.start_soon(self._refresh, source)
                for peer in (*self._job.companions, *self._context.askers.of(self._shard)):
                    nursery.start_soon(self._try, peer)
                if not sources:
                    nursery.start_soon(self._search_known)
            with trio.move_on_after(self._limits.refresh):
                await self._search_now.wait()
            if not self._sources() and trio.current_time() - self._moved_at >= self._limits.patience:
                self._fail(Unavailable(self._what_is_missing()))

    def _sources(self) -> tuple[Source, ...]:
        return () if self._plan is None else tuple(self._plan.sources.values())

    def _what_is_missing(self) -> str:
        name = self._shard.hex()
        if self._plan is None:
            return f"shard {name}: nobody who can be reached has it"
        here = self._plan.here
        return (
            f"shard {name}: {int(here.sum())} of {len(here)} chunks are here, and nobody who can be reached has the "
            "rest; the next fetch goes on from there"
        )

    async def _search_known(self) -> None:
        known = dict.fromkeys((*self._job.hints, *(view.peer for view in self._context.network.peers())))
        async with trio.open_nursery() as nursery:
            for peer in known:
                nursery.start_soon(self._try, peer)

    async def _search_dht(self) -> None:
        found = await self._context.network.find_providers(self._shard)
        async with trio.open_nursery() as nursery:
            for peer in found:
                nursery.start_soon(self._try, peer)

    async def _try(self, peer: PeerId) -> None:
        """Draw from `peer` while it has something that is missing here."""
        if peer in self._tried or peer in self._banned:
            return
        self._tried.add(peer)
        try:
            async with self._asking:
                holding = await self._ask(peer)
                if holding is None or not (holding.complete or holding.bits()):
                    return
                if not self._begun.is_set() and not await self._learn_manifest(peer):
                    return
            assert self._plan is not None
            size = self._plan.manifest.size
            if holding.size != size:
                self._lied(peer, f"says that a shard of {size} bytes has {holding.size}")
            elif len(self._plan.sources) < self._limits.sources:
                source = Source(peer, self._plan.chunks_of(holding), self._limits)
                await self._draw_from(self._plan, source)
                if (
                    source.broken_promises >= EMPTY_PROMISES
                    and not self._job.brief
                    and await self._still_promises(peer)
                ):
                    self._context.gave(peer, self._shard, 0, False)
        except WireError as error:
            self._lied(peer, str(error))
        except NetworkError as error:
            self._context.counts["sources_lost"] += 1
            log.debug("a fetch goes on without %s: %s", peer, error)
        finally:
            self._tried.discard(peer)

    async def _ask(self, peer: PeerId) -> Holding | None:
        """What `peer` says it has, and whom it names as fetching the same."""
        holding = await self._context.ask_holding(peer, self._shard)
        for asker in holding.askers if holding is not None else ():
            if asker != self._context.network.me:
                self._job.note_companion(asker)
        return holding

    async def _still_promises(self, peer: PeerId) -> bool:
        """Whether a provider that sends nothing says even now that it has the whole shard: it may have dropped it."""
        holding = await self._ask(peer)
        return holding is not None and holding.complete

    def _lied(self, peer: PeerId, what: str) -> None:
        self._banned.add(peer)
        self._context.counts["lies"] += 1
        self._context.violations.note(peer, what, Kind.LIE)

    async def _refresh(self, source: Source) -> None:
        """Learn which chunks a half-complete provider has by now."""
        holding = await self._ask(source.peer)
        plan = self._plan
        if plan is None or holding is None or plan.sources.get(source.peer) is not source:
            return
        if holding.size == plan.manifest.size:
            plan.refresh(source, holding)

    # -- the manifest

    async def _learn_manifest(self, peer: PeerId) -> bool:
        """Whether the shard's manifest is known, from this peer or meanwhile from another."""
        manifest: ShardManifest | None = None
        async with trio.open_nursery() as nursery:

            async def stop_when_known() -> None:
                await self._begun.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop_when_known)
            manifest = await self._manifest_of(peer)
            nursery.cancel_scope.cancel()
        if manifest is not None:
            await self._begin(manifest)
        return self._begun.is_set()

    async def _manifest_of(self, peer: PeerId) -> ShardManifest | None:
        try:
            answer = await self._context.rpc.call(
                peer, MANIFEST, WantManifest(self._shard), Leaves, timeout=self._limits.call
            )
            manifest = ShardManifest(answer.size, answer.leaves)
            if await self._context.runner(lambda: manifest.id) == self._shard:
                return manifest
            self._lied(peer, "sent a manifest of another shard")
        except CallError:
            self._context.counts["sources_lost"] += 1
        except ValueError as error:
            self._lied(peer, str(error))
        return None

    async def _begin(self, manifest: ShardManifest) -> None:
        async with self._beginning:
            if self._begun.is_set() or self._failure is not None:
                return
            try:
                with trio.CancelScope(shield=True):  # else the store might have begun, and nobody would suspend it
                    here = await self._context.runner(lambda: self._store.begin(manifest))
                    self._begun.set()
            except ShardError as error:
                self._fail(error)
                return
            self._plan = Plan(manifest, here, self._seed, spare=self._job.brief)
            self._tell(self._plan)
            if self._plan.complete:
                self._done.set()

    def _tell(self, plan: Plan) -> None:
        for listener in tuple(self._job.listeners):
            listener(plan.in_hand, plan.manifest.size)

    # -- drawing from one provider

    async def _draw_from(self, plan: Plan, source: Source) -> None:
        """Ask and receive until the provider fails; raises WireError or NetworkError then."""
        plan.add(source)
        moved = True
        try:
            while moved:
                channel = await self._context.channels.take(source.peer)
                try:
                    async with trio.open_nursery() as nursery:
                        for job in (self._request, self._receive):
                            nursery.start_soon(self._until_over, job, plan, source, channel, nursery.cancel_scope)
                finally:
                    await self._context.channels.give_back(channel, good=not source.asked and source.failure is None)
                moved = channel.left_behind and source.failure is None
        finally:
            plan.remove(source)
            if not self._job.brief:
                self._context.gave(source.peer, self._shard, source.delivered, True)
            if not plan.sources:
                self._search_now.set()
        if source.failure is not None:
            raise source.failure

    async def _until_over(
        self,
        job: Callable[[Plan, Source, ShardChannel], Awaitable[None]],
        plan: Plan,
        source: Source,
        channel: ShardChannel,
        scope: trio.CancelScope,
    ) -> None:
        try:
            await job(plan, source, channel)
        except (WireError, NetworkError) as error:
            source.failure = source.failure or error
        finally:
            scope.cancel()

    async def _request(self, plan: Plan, source: Source, channel: ShardChannel) -> None:
        """Keep the provider's window full, on a stream whose path is the best there is."""
        while source.asked or not channel.left_behind:
            source.look = trio.Event()
            chosen = [] if channel.left_behind else plan.next_for(source, trio.current_time())
            if chosen:
                source.work.set()
                await channel.ask([ShardWant(self._shard, run.first, count=run.count) for run in chosen])
            least, most = LOOK_AGAIN
            with trio.move_on_after(min(most, max(least, source.pace.usual or least))):
                await source.look.wait()

    async def _receive(self, plan: Plan, source: Source, channel: ShardChannel) -> None:
        """Take what the provider sends, answer by answer, until it has broken too many promises."""
        while source.broken_promises < EMPTY_PROMISES:
            if not source.asked:
                source.work = trio.Event()
                await source.work.wait()
                continue
            run, allowed = source.asked[0], source.pace.seconds()
            given = 0
            with trio.move_on_after(allowed) as scope:
                piece = await channel.piece()
                if piece.size >= 0:
                    given = chunk_count(piece.size)
                    if not 1 <= given <= run.count or piece.size != run_length(plan.manifest.size, run.first, given):
                        raise WireError(f"Piece: {piece.size} bytes for {run.count} chunks from {run.first} on")
                    chunks = await channel.raw(piece.size)
            if scope.cancelled_caught:
                raise StreamBroken(f"no chunk within {allowed:.1f} s")
            if given:
                source.pace.observe((trio.current_time() - source.moved_at) / given)
                await self._keep(plan, Run(run.first, given), chunks, channel)
                source.delivered += piece.size
            if given < run.count:
                source.broken_promises += 1
            source.moved_at = trio.current_time()
            plan.answered(source, given)

    async def _keep(self, plan: Plan, run: Run, chunks: memoryview, channel: ShardChannel) -> None:
        """Verify chunks and have them written. Raises WireError where one is wrong."""
        missing = not plan.here[run.first : run.first + run.count].all()
        if missing and not plan.manifest.fit(run.first, chunks):
            raise WireError(f"of {run.count} chunks from {run.first} on, not all have their hashes")
        before = plan.in_hand
        new = plan.arrived(run)
        self._context.counts["duplicates"] += run.count - new
        if new:
            self._moved_at = trio.current_time()
            self._context.counts["chunks_fetched"] += new
            self._context.counts["bytes_fetched"] += plan.in_hand - before
            if self._job.brief:  # memory takes it at once
                self._store.write(self._shard, [(run.first, chunks)])
                self._written(0)
            else:
                channel.room = await self._write_buffer.put(run.first, chunks, channel.room, last=plan.complete)
            self._tell(plan)

    def _written(self, unwritten: int) -> None:
        if self._plan is not None and self._plan.complete and not unwritten:
            self._done.set()


class WriteBuffer:
    """Calls `written(answers put and not yet written)` after each trip, or `failed(error)` where that is impossible."""

    def __init__(
        self,
        shard: ShardId,
        *,
        store: Store,
        runner: Runner,
        written: Callable[[int], None],
        failed: Callable[[ShardError], None],
    ) -> None:
        self._shard = shard
        self._store = store
        self._runner = runner
        self._written = written
        self._failed = failed
        self._waiting: list[tuple[int, memoryview, memoryview]] = []  # first chunk, chunks, the room that they lie in
        self._unwritten = 0
        self._rooms = [NO_ROOM] * ROOMS
        self._returned = trio.lowlevel.ParkingLot()
        self._some, self._enough = trio.Event(), trio.Event()

    async def put(self, first: int, chunks: memoryview, room: memoryview, *, last: bool) -> memoryview:
        """Write verified `chunks`, which lie in `room`; `last`: no more will come. Returns an empty room for it."""
        self._unwritten += 1
        while not self._rooms:
            await self._returned.park()
        self._waiting.append((first, chunks, room))
        self._some.set()
        if last or len(self._waiting) >= BATCH:
            self._enough.set()
        return self._rooms.pop()

    async def run(self) -> None:
        """Write what is put, until cancelled."""
        while True:
            await self._some.wait()
            with trio.move_on_after(GATHER):
                await self._enough.wait()
            batch, self._waiting = self._waiting, []
            self._some, self._enough = trio.Event(), trio.Event()
            answers = [(first, chunks) for first, chunks, _ in batch]
            try:
                await self._runner(lambda answers=answers: self._store.write(self._shard, answers))  # type: ignore[misc]
            except ShardError as error:
                self._failed(error)
                return
            self._rooms.extend(room for _, _, room in batch)
            self._returned.unpark_all()
            self._unwritten -= len(batch)
            self._written(self._unwritten)
