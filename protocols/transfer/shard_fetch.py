"""One fetch of one shard: several providers in parallel, each at its own rate, until every chunk is here.

1. A scout asks the hinted and the connected peers what they have, and looks in the DHT; again and again, for providers
   come, and half-complete ones fill up. Whoever asks this node for the same shard will soon have some of it, and is
   asked as well.
2. The first manifest that hashes to the id is taken; the store says which chunks are here from an earlier attempt.
3. Each provider has a stream and a window of chunks under way: as many as it delivers in `ahead` seconds, by the median
   of its last. It is given the rarest chunk that it has and nobody was asked for, equals in an order that each fetch
   draws anew, so that nodes that fetch together have something to give one another.
4. Endgame: when every missing chunk was asked for, a provider with room is also asked for one that is due elsewhere,
   where it would have it in half the time. A provider that is overdue counts as never. None is asked of more than two.

Who may fail when, and what is then true:
- a provider sends a chunk with a wrong hash, a wrong size or no message at all: it is out of this fetch and counted;
- it dies, or is silent for longer than its own rate explains: its chunks go to others at once, and it is tried
  again at a later search;
- it sends one byte a second: the endgame takes its chunks away, and the fetch does not wait for it;
- it moves from a relayed path to a direct one: what it was asked for still comes on the old one, and no more is;
- it does not have what it said: the chunk is looked for elsewhere, and after a few it is dropped;
- nobody is left: the scout goes on for `patience` seconds, then Unavailable; what has arrived stays in the store.

Memory: one answer for each provider and a few that wait to be written, whatever the shard's size.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.limits import EASED_FOR, Recent
from swarmnode.protocols.network import Network, NetworkError, PeerId, StreamBroken
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner, surely
from swarmnode.protocols.transfer.channels import Channel, Channels
from swarmnode.protocols.transfer.shard_manifest import ShardId, ShardManifest, chunk_count, run_length
from swarmnode.protocols.transfer.shard_memory import MemoryShards
from swarmnode.protocols.transfer.shard_plan import Plan, Source
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    MANIFEST,
    Have,
    Holding,
    Holdings,
    Piece,
    ShardError,
    ShardLimits,
    ShardWant,
    Store,
    Unavailable,
    WantManifest,
)
from swarmnode.protocols.wire import WireError

log = logging.getLogger(__name__)

COMPANIONS = 32  # peers remembered that others named as fetching the same shard
ASKED_LATELY = 60.0  # seconds for which a peer that asked for a shard is taken for one that fetches it
ASKERS_KEPT, ASKED_KEPT = 1024, 8  # peers, and shards of each: more than it fetches at once
EMPTY_PROMISES = 8  # chunks that a provider may lack although it said it had them
LOOK_AGAIN = (0.05, 1.0)  # seconds, at least and at most, between two looks at whose chunks have become overdue
BATCH = 2  # answers written at once; four gain nothing that could be measured, and take twice the memory
ROOMS = 2 * BATCH  # answers that wait or are being written; who brings one more waits, so this bounds the memory
NO_ROOM = memoryview(bytearray())
BRIEF_REFRESH = 0.5  # seconds between looks at what others have, in a fetch into memory: many begin it together
BRIEF_WAIT = 2 * EASED_FOR  # seconds that a provider of such may be silent: others have their turn there


class PromiseLog(Protocol):
    def note(self, peer: PeerId, shard: ShardId, kept: bool) -> None:
        """A provider had what it said it had of a shard, or had not."""


class Askers:
    """Who asked this node for which shard of late: they will have some of it soon."""

    def __init__(self) -> None:
        self._asked = Recent[PeerId, Recent[ShardId, float]](ASKERS_KEPT)  # when, trio time

    def note(self, shard: ShardId, peer: PeerId) -> None:
        self._asked[peer] = asked = self._asked.get(peer, Recent[ShardId, float](ASKED_KEPT))
        asked[shard] = trio.current_time()

    def of(self, shard: ShardId) -> tuple[PeerId, ...]:
        since = trio.current_time() - ASKED_LATELY
        return tuple(peer for peer, asked in self._asked.items() if asked.get(shard, since) > since)


@dataclass(frozen=True)
class FetchContext:
    """What all fetches of a node share, and its server."""

    network: Network
    rpc: Rpc
    runner: Runner
    channels: Channels
    violations: Violations
    counts: Counter[str]
    limits: ShardLimits
    promises: PromiseLog | None
    disk: Store
    memory: MemoryShards = field(default_factory=MemoryShards)
    askers: Askers = field(default_factory=Askers)

    def store_of(self, shard: ShardId) -> Store:
        """The store that has the shard, or is to have it."""
        return self.memory if shard in self.memory else self.disk

    async def ask_holdings(self, peer: PeerId, *shards: ShardId) -> tuple[Holding, ...]:
        """What `peer` says it has of each, `limits.asked` at most; nothing where it is silent or makes no sense."""
        nothing = (Holding(),) * len(shards)
        answer = await self.rpc.ask(peer, HAVE, Have(shards), Holdings, timeout=self.limits.call)
        if answer is None:
            return nothing
        try:
            if len(answer.shards) != len(shards):
                raise ValueError(f"{len(answer.shards)} holdings for {len(shards)} shards")
            for holding in answer.shards:
                holding.bits()
        except ValueError as error:
            self.violations.note(peer, str(error))
            return nothing
        return answer.shards

    async def ask_manifest(self, peer: PeerId, shard: ShardId) -> ShardManifest:
        """The manifest of `shard`, from `peer`. Raises CallError, or WireError for a false one."""
        manifest = await self.rpc.call(peer, MANIFEST, WantManifest(shard), ShardManifest, timeout=self.limits.call)
        if await self.runner(lambda: manifest.id) != shard:
            raise WireError("sent a manifest of another shard")
        return manifest

    async def read(self, peer: PeerId, manifest: ShardManifest, run: range) -> bytes:
        """Chunks from `peer`, verified. Raises NetworkError, or WireError for others than those asked for."""
        with trio.move_on_after(self.limits.first_chunk):
            async with self.channels.lent(peer) as channel:
                await channel.ask(ShardWant(manifest.id, run.start, len(run)))
                size = (await channel.answer(Piece)).size
                if size < 0:
                    channel.clean = True
                    raise NetworkError("it does not have the chunk")
                if size != run_length(manifest.size, run.start, len(run)):
                    raise WireError(f"Piece: {size} bytes for {len(run)} chunks from {run.start} on")
                chunks = memoryview(bytearray(size))
                await channel.fill(chunks)
                channel.clean = True
                if not manifest.fit(run.start, chunks):
                    raise WireError(f"of {len(run)} chunks from {run.start} on, not all have their hashes")
                return bytes(chunks)
        raise StreamBroken(f"no chunk within {self.limits.first_chunk:g} s")

    def lied(self, peer: PeerId, what: str) -> None:
        self.counts["lies"] += 1
        self.violations.note(peer, what, Kind.LIE)


Answer = tuple[int, memoryview, memoryview]  # first chunk, chunks, and the room that they lie in


class ShardFetch:
    """One fetch and those who wait for it, until `ended`: then the shard is complete, or `error` says why not."""

    def __init__(self, shard: ShardId, context: FetchContext, *, sizes: range | None, seed: int) -> None:
        """`sizes` that it may have, where not any."""
        self.shard = shard
        self.store = context.store_of(shard)
        self.brief = brief = shard in context.memory  # it lives for minutes: nobody announces it or is measured by it
        self.sizes = sizes
        self.hints: dict[PeerId, None] = {}  # named by the callers
        self.listeners: list[Callable[[int, int], None]] = []
        self.callers = 0
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: ShardError | None = None
        self._context = context
        self._limits = limits = context.limits
        if brief:  # fewer and larger answers: a machine that makes a state ready is busy, and answers late
            ahead, answer = 4 * limits.ahead, 4 * limits.answer
            self._limits = replace(limits, refresh=BRIEF_REFRESH, least_wait=BRIEF_WAIT, ahead=ahead, answer=answer)
        self._seed = seed
        self._plan: Plan | None = None
        self._begun = trio.Event()  # the manifest is known, and the store has made room
        self._beginning = trio.Lock()
        self._asked_for_manifest: list[trio.CancelScope] = []
        self._done = trio.Event()  # all is written, or the store failed, or nobody is left
        self._tried: set[PeerId] = set()  # being asked, or drawn from
        self._asking = trio.Semaphore(self._limits.sources)
        self._banned: set[PeerId] = set()
        self._companions = Recent[PeerId, None](COMPANIONS)  # who asked others for it: they will have it soon
        self._to_write, self._answers = trio.open_memory_channel[Answer](math.inf)
        self._empty, self._rooms = trio.open_memory_channel[memoryview](ROOMS)
        for _ in range(ROOMS):
            self._empty.send_nowait(NO_ROOM)
        self._unwritten = 0  # answers that came and are not written yet
        self._moved_at = 0.0  # trio time: when the last chunk came

    async def run(self) -> None:
        """Fetch until complete; in the end the store has finished the shard or suspended it. Raises ShardError."""
        self._moved_at = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._scout, nursery)
                with suppress(ShardError):  # the manifest is here where an earlier fetch began, and can be read
                    await self._begin(await self._context.runner(lambda: self.store.manifest(self.shard)))
                await self._done.wait()
                nursery.cancel_scope.cancel()
            if self.error is not None:
                raise self.error
            await self._context.runner(lambda: self.store.finish(self.shard))
        except BaseException:
            if self._begun.is_set():
                await surely(self._context.runner(lambda: self.store.suspend(self.shard)))
            raise

    def _fail(self, error: ShardError) -> None:
        self.error = self.error or error
        self._done.set()

    # -- finding providers

    async def _scout(self, nursery: trio.Nursery) -> None:
        next_search, looks = -math.inf, 0
        while True:
            sources = () if self._plan is None else tuple(self._plan.sources.values())
            if trio.current_time() >= next_search:
                next_search = trio.current_time() + self._limits.search
                for dht in (False,) if self.brief else (False, True):
                    nursery.start_soon(self._search, dht)
            else:
                looks += 1
                whole = [source for source in sources if source.complete]
                for source in sources:  # of those who have all, one after the other, for who else asked them
                    if not source.complete or source is whole[looks % len(whole)]:
                        nursery.start_soon(self._refresh, source)
                for peer in (*self._companions, *self._context.askers.of(self.shard)):
                    nursery.start_soon(self._try, peer)
                if self._nobody_is_left():
                    nursery.start_soon(self._search, False)
            await trio.sleep(self._limits.refresh)
            if self._nobody_is_left() and trio.current_time() - self._moved_at >= self._limits.patience:
                self._fail(Unavailable(self._what_is_missing()))

    def _nobody_is_left(self) -> bool:
        """Whether nothing is under way, and nobody has what is missing."""
        if (plan := self._plan) is None or plan.complete:
            return plan is None and not self._beginning.locked()  # what is here of a large one takes long to look at
        return not any(source.asked or (source.has & ~plan.here).any() for source in plan.sources.values())

    def _what_is_missing(self) -> str:
        name = self.shard.hex()
        if self._plan is None:
            return f"shard {name}: nobody who can be reached has it"
        here = self._plan.here
        return (
            f"shard {name}: {int(here.sum())} of {len(here)} chunks are here, and nobody who can be reached has the "
            "rest; the next fetch goes on from there"
        )

    async def _search(self, dht: bool) -> None:
        known = (*self.hints, *(view.peer for view in self._context.network.peers()))
        found = await self._context.network.find_providers(self.shard) if dht else known
        async with trio.open_nursery() as nursery:
            for peer in dict.fromkeys(found):
                nursery.start_soon(self._try, peer)

    async def _try(self, peer: PeerId) -> None:
        """Draw from `peer` while it has something that is missing here."""
        if peer in self._tried or peer in self._banned:
            return
        self._tried.add(peer)
        try:
            async with self._asking:
                holding = await self._ask(peer)
                if not (holding.complete or holding.bits()):
                    return
                if not self._begun.is_set():
                    with trio.CancelScope() as asking:  # until another peer was faster
                        self._asked_for_manifest.append(asking)
                        await self._begin(await self._context.ask_manifest(peer, self.shard))
            if self._plan is None:
                return
            size = self._plan.manifest.size
            if holding.size != size:
                raise WireError(f"says that a shard of {size} bytes has {holding.size}")
            if len(self._plan.sources) < self._limits.sources:
                source = Source(peer, self._plan.chunks_of(holding), self._limits)
                await self._draw_from(self._plan, source)
                broken = source.broken_promises >= EMPTY_PROMISES and not self.brief
                if broken and (await self._ask(peer)).complete:  # it did not drop the shard, and sends nothing
                    self._note(peer, kept=False)
        except WireError as error:
            self._banned.add(peer)
            self._context.lied(peer, str(error))
        except (NetworkError, CallError) as error:
            self._context.counts["sources_lost"] += 1
            log.debug("a fetch goes on without %s: %s", peer, error)
        finally:
            self._tried.discard(peer)

    async def _ask(self, peer: PeerId) -> Holding:
        """What `peer` says it has, and whom it names as fetching the same."""
        (holding,) = await self._context.ask_holdings(peer, self.shard)
        for asker in holding.askers:
            if asker != self._context.network.me:
                self._companions[asker] = None
        return holding

    async def _refresh(self, source: Source) -> None:
        """Learn which chunks a half-complete provider has by now."""
        holding = await self._ask(source.peer)
        plan = self._plan
        if plan is None or plan.sources.get(source.peer) is not source:
            return
        if holding.size == plan.manifest.size:
            plan.refresh(source, holding)

    # -- the manifest

    async def _begin(self, manifest: ShardManifest) -> None:
        async with self._beginning:
            if self._begun.is_set() or self.error is not None:
                return
            try:
                check_size(self.shard, manifest.size, self.sizes)
                with trio.CancelScope(shield=True):  # else the store might have begun, and nobody would suspend it
                    here = await self._context.runner(lambda: self.store.begin(manifest))
                    self._begun.set()
            except ShardError as error:
                self._fail(error)
                return
            self._plan, self._moved_at = Plan(manifest, here, self._seed, spare=self.brief), trio.current_time()
            for asking in self._asked_for_manifest:
                asking.cancel()
            self._report(self._plan)
            self._look_whether_done()

    def _report(self, plan: Plan) -> None:
        for listener in tuple(self.listeners):
            listener(plan.in_hand, plan.manifest.size)

    # -- drawing from one provider

    async def _draw_from(self, plan: Plan, source: Source) -> None:
        """Ask and receive until the provider fails; raises WireError or NetworkError then."""
        plan.add(source)
        moved = True
        try:
            while moved:
                async with self._context.channels.lent(source.peer) as channel:
                    try:
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(self._request, plan, source, channel, nursery.cancel_scope)
                            nursery.start_soon(self._receive, plan, source, channel, nursery.cancel_scope)
                    finally:
                        channel.clean = not source.asked and source.failure is None
                moved = channel.left_behind and source.failure is None
        finally:
            plan.remove(source)
            if source.delivered:
                self._note(source.peer, kept=True)
        if source.failure is not None:
            raise source.failure

    def _note(self, peer: PeerId, *, kept: bool) -> None:
        if self._context.promises is not None and not self.brief:
            self._context.promises.note(peer, self.shard, kept)

    async def _request(self, plan: Plan, source: Source, channel: Channel, scope: trio.CancelScope) -> None:
        """Keep the provider's window full, on a stream whose path is the best there is."""
        with _until_over(source, scope):
            while source.asked or not channel.left_behind:
                source.look = trio.Event()
                chosen = [] if channel.left_behind else plan.next_for(source, trio.current_time())
                if chosen:
                    source.work.set()
                    await channel.ask(*(ShardWant(self.shard, run.start, len(run)) for run in chosen))
                least, most = LOOK_AGAIN
                with trio.move_on_after(min(most, max(least, source.pace.usual or least))):
                    await source.look.wait()

    async def _receive(self, plan: Plan, source: Source, channel: Channel, scope: trio.CancelScope) -> None:
        """Take what the provider sends, answer by answer, until it has broken too many promises."""
        room = NO_ROOM  # where answers are received, one after the other
        with _until_over(source, scope):
            while source.broken_promises < EMPTY_PROMISES:
                if not source.asked:
                    source.work = trio.Event()
                    await source.work.wait()
                    continue
                run, allowed = source.asked[0], source.pace.seconds()
                given = 0
                with trio.move_on_after(allowed) as silence:
                    size = (await channel.answer(Piece)).size
                    if size >= 0:
                        given = chunk_count(size)
                        if not 1 <= given <= len(run) or size != run_length(plan.manifest.size, run.start, given):
                            raise WireError(f"Piece: {size} bytes for {len(run)} chunks from {run.start} on")
                        if len(room) < size:
                            room = memoryview(mmap.mmap(-1, size))  # whole pages: a disk can take chunks from there
                        await channel.fill(room[:size])
                if silence.cancelled_caught:
                    raise StreamBroken(f"no chunk within {allowed:.1f} s")
                if given:
                    source.pace.observe((trio.current_time() - source.moved_at) / given)
                    room = await self._keep(plan, run[:given], room[:size], room)
                    source.delivered = True
                if given < len(run):
                    source.broken_promises += 1
                source.moved_at = trio.current_time()
                plan.answered(source, given)

    async def _keep(self, plan: Plan, run: range, chunks: memoryview, room: memoryview) -> memoryview:
        """Verify chunks, which lie in `room`, and have them written; a room for the next ones.

        Raises WireError where one is wrong.
        """
        missing = not plan.here[run.start : run.stop].all()
        if missing and not plan.manifest.fit(run.start, chunks):
            raise WireError(f"of {len(run)} chunks from {run.start} on, not all have their hashes")
        before = plan.in_hand
        new = plan.arrived(run)
        self._context.counts["duplicates"] += len(run) - new
        if not new:
            return room
        self._moved_at = trio.current_time()
        self._context.counts["chunks_fetched"] += new
        self._context.counts["bytes_fetched"] += plan.in_hand - before
        if self.brief:  # memory takes it at once
            self.store.write(self.shard, [(run.start, chunks)])
            self._look_whether_done()
        else:
            self._unwritten += 1
            self._to_write.send_nowait((run.start, chunks, room))  # first: nobody else brings what this plan has now
            room = await self._rooms.receive()
        self._report(plan)
        return room

    async def _write(self) -> None:
        """Write what was verified, as many answers at once as wait, until cancelled."""
        async for answer in self._answers:
            batch = [answer]
            with suppress(trio.WouldBlock):
                while len(batch) < BATCH:
                    batch.append(self._answers.receive_nowait())
            verified = [(first, chunks) for first, chunks, _ in batch]
            try:
                await self._context.runner(lambda verified=verified: self.store.write(self.shard, verified))  # type: ignore[misc]
            except ShardError as error:
                self._fail(error)
                return
            for _, _, room in batch:
                with suppress(trio.WouldBlock):  # full: a provider was given up while it waited for a room
                    self._empty.send_nowait(room)
            self._unwritten -= len(batch)
            self._look_whether_done()

    def _look_whether_done(self) -> None:
        if self._plan is not None and self._plan.complete and not self._unwritten:
            self._done.set()


def check_size(shard: ShardId, size: int, sizes: range | None) -> None:
    """Raises Unavailable for a shard of another size than a caller wants."""
    if sizes is not None and size not in sizes:
        raise Unavailable(f"shard {shard.hex()} has {size} bytes, which is none of the sizes that it should have")


@contextmanager
def _until_over(source: Source, scope: trio.CancelScope) -> Iterator[None]:
    """What a provider does wrong in the block is its failure; with the block, all work with it ends."""
    try:
        yield
    except (WireError, NetworkError) as error:
        source.failure = source.failure or error
    finally:
        scope.cancel()
