"""Shards: content-addressed immutable bytes, served in chunks and fetched from whoever has them.

Calls (`calls.rpc`):
- `shards.have`: which of these shards, and which of their chunks as a bitmap, do you have?
- `shards.manifest`: size and leaf hashes of one shard (see `shard_manifest`).

Protocol `/swarmnode/shards/2` carries chunks. The fetcher opens a stream and keeps it; it sends `ShardWant(shard,
index)` for one chunk or up to RUN in a row, as many as it likes to have under way, and the server answers each in turn
with a `Piece` and, where it has chunks, the raw bytes. Chunks are read from disk when asked for, come from half-fetched
shards too, and have their hash in the tree: hence a protocol beside `bulk`.

Who may fail when, and what is then true:
- nobody can push: a node stores only what it was asked, by its owner or its run, to fetch or to put;
- a chunk is checked against its leaf before it is written;
- a chunk is checked against its leaf before it is served, where that was not done within the last minute: a rotten disk
  loses the shard, not this node's good name;
- a peer that asks on and on for what is not here uses up its `misses`; then calls are refused as "busy", streams are
  closed and it is counted. One that breaks the form loses its stream; one that does not read loses it after
  `serve_stall`;
- more peers come than are served at once: an idle stream ends, else that of the peer of the least standing, if whoever
  comes has `AHEAD` more.
- for the fetching side see `shard_fetch`.

A complete shard is announced by `Network.provide` under its id, as far as `announced` allows; all others are found by
asking connected peers.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import trio

from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.limits import Allowance, Budget, FairScheduler, Recent
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner, surely
from swarmnode.protocols.transfer.channels import MAX_MESSAGE, Channels
from swarmnode.protocols.transfer.shard_fetch import FetchContext, PromiseLog, ShardFetch, check_size
from swarmnode.protocols.transfer.shard_manifest import CHUNK, HASH, MAX_CHUNKS, ShardId, ShardManifest, chunk_count
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    LIMITS,
    MANIFEST,
    MOST_ASKERS,
    PROTOCOL,
    RUN,
    RUN_BYTES,
    Have,
    Holdings,
    Piece,
    ShardError,
    ShardLimits,
    ShardNotHeld,
    ShardWant,
    Store,
    Unavailable,
    WantManifest,
    parts_of,
)
from swarmnode.protocols.wire import WireError, decode, encode

SHARDS = Metric("swarmnode_shards_total", COUNTER, "what happened with chunks of shards, some of it in bytes", "what")

HEAD = MAX_MESSAGE + 8  # bytes before an answer's chunks: its message, with the length in front
AHEAD = 0.25  # of standing, by which a peer must be ahead to take the place of another that is being served
SERVED_AT_ONCE = 8  # answers from memory; a round's own exchange finds the line and the processor half free
SERVED_EACH = 4  # answers of those for one peer
TURN = 20.0  # seconds after which a peer that reads slowly keeps nobody else out
SPARE_ROOMS = 4  # answers' memory kept for the next ones: fresh memory costs more than reading into it


class Standings(Protocol):
    """Who weighs this node's peers against one another."""

    def standing(self, peer: PeerId) -> float:
        """0 to 1."""


class ShardServer:
    """Answers questions about what the store holds, and serves chunks of it while `serving`."""

    def __init__(self, context: FetchContext, standings: Standings | None, rng: random.Random) -> None:
        """`context.counts` gets chunks_served, bytes_served and misses; `rng` draws whom askers hear of.

        Where not all can be served, those of more standing are; without `standings` all are equal.
        """
        self._context, self._runner, self._limits = context, context.runner, context.limits
        self._violations, self._counts, self._random = context.violations, context.counts, rng
        self.turns = FairScheduler(SERVED_AT_ONCE, SERVED_EACH, longest=TURN)  # for what is served from memory
        self._askers = context.askers
        self._misses = Budget[PeerId](Allowance(self._limits.misses_refill, self._limits.misses))
        self.served: OrderedDict[_ServedStream, None] = OrderedDict()  # now, the one used longest ago first
        self._rooms: list[memoryview] = []  # for answers, not in use now
        self._open = False
        self._standings = standings
        context.rpc.serve(HAVE, Have, self._on_have)
        context.rpc.serve(MANIFEST, WantManifest, self._on_manifest)
        context.network.serve(PROTOCOL, self._serve_stream)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Take streams while the block runs; those that are left are ended with it."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for served in list(self.served):
                served.scope.cancel()

    async def _on_have(self, peer: PeerId, request: Have) -> Holdings:
        if len(request.shards) > self._limits.asked or any(len(shard) != HASH for shard in request.shards):
            self._violations.note(peer, f"asked for {len(request.shards)} shards, or for what is none")
            raise Refuse("malformed", f"at most {self._limits.asked} shard ids of {HASH} bytes")
        found = [self._context.store_of(shard).holding(shard) for shard in request.shards]
        missing = sum(not holding.size and not holding.complete for holding in found)
        if not self._may_miss(peer, missing):
            raise Refuse("busy", "asked too often for what is not here")
        if len(found) == 1:  # who asks for many looks around, who asks for one fetches it
            (shard,) = request.shards
            self._askers.note(shard, peer)
            if missing == 0:
                others = [asker for asker in self._askers.of(shard) if asker != peer]
                found[0] = replace(found[0], askers=tuple(self._random.sample(others, min(MOST_ASKERS, len(others)))))
        return Holdings(tuple(found))

    async def _on_manifest(self, peer: PeerId, request: WantManifest) -> ShardManifest:
        if len(request.shard) == HASH:
            with suppress(ShardNotHeld):
                return await self._runner(lambda: self._context.store_of(request.shard).manifest(request.shard))
        if not self._may_miss(peer, 1):
            raise Refuse("busy", "asked too often for what is not here")
        raise Refuse("not-held", "this node does not have that shard")

    def _may_miss(self, peer: PeerId, missing: int) -> bool:
        """Whether the peer may ask for that much more in vain."""
        self._counts["misses"] += missing
        if not missing or self._misses.take(peer, missing):
            return True
        self._violations.note(peer, "asks on and on for shards that are not here", Kind.LOAD)
        return False

    async def _serve_stream(self, stream: Stream) -> None:
        if not self._open:
            return
        if sum(served.stream.peer == stream.peer for served in self.served) >= self._limits.streams:
            self._violations.note(stream.peer, f"more than {self._limits.streams} streams", Kind.LOAD)
            return
        if len(self.served) >= self._limits.streams_in_all:
            leaves = self._who_leaves_for(stream.peer)
            if leaves is None:
                return
            leaves.scope.cancel()
            del self.served[leaves]
        mine = _ServedStream(stream)
        self.served[mine] = None
        try:
            with mine.scope, self._violations.serving(stream.peer, mine.scope):
                await self._serve(mine)
        finally:
            self.served.pop(mine, None)

    def _who_leaves_for(self, peer: PeerId) -> _ServedStream | None:
        """Whose stream ends so that `peer` has one: the longest idle, else of the least standing, if that is less."""
        idle = next((served for served in self.served if not served.busy), None)
        if idle is not None:
            return idle
        if self._standings is None:
            return None
        standings = {served: self._standings.standing(served.stream.peer) for served in self.served}
        least = min(standings, key=standings.__getitem__, default=None)
        ahead = least is not None and standings[least] + AHEAD <= self._standings.standing(peer)
        return least if ahead else None

    async def _serve(self, served: _ServedStream) -> None:
        reader = FrameReader(served.stream, limit=MAX_MESSAGE)
        while (raw := await reader.frame()) is not None:
            want = decode(ShardWant, raw, limit=MAX_MESSAGE)
            if len(want.shard) != HASH or not 0 <= want.index < MAX_CHUNKS:
                raise WireError(f"ShardWant: chunk {want.index} of an id of {len(want.shard)} bytes")
            if not 1 <= want.count <= RUN:
                raise WireError(f"ShardWant: {want.count} chunks at once")
            served.busy = True
            self.served.move_to_end(served)
            room = self._rooms.pop() if self._rooms else memoryview(bytearray(HEAD + RUN_BYTES))
            try:
                peer = served.stream.peer
                async with self.turns.turn(peer) if want.shard in self._context.memory else nullcontext():
                    answer = await self._answer(peer, want, room)
                    with trio.move_on_after(self._limits.serve_stall) as scope:
                        await served.stream.send_all(answer)
            finally:
                if len(self._rooms) < SPARE_ROOMS:
                    self._rooms.append(room)
            if scope.cancelled_caught:
                raise StreamBroken(f"its answer did not go within {self._limits.serve_stall:g} s")
            served.busy = False

    async def _answer(self, peer: PeerId, want: ShardWant, room: memoryview) -> memoryview | bytes:
        """The bytes to send: read into `room`, with the message right before them, so that nothing is moved again."""
        chunks = room[HEAD : HEAD + want.count * CHUNK]
        store = self._context.store_of(want.shard)
        try:
            size = store.read_now(want.shard, want.index, chunks)
            size = size or await self._runner(lambda: store.read(want.shard, want.index, chunks))
        except ShardNotHeld:
            if not self._may_miss(peer, 1):
                raise WireError("ShardWant: too many in vain") from None
            return frame(encode(Piece()))
        self._counts["chunks_served"] += chunk_count(size)
        self._counts["bytes_served"] += size
        head = frame(encode(Piece(size)))
        room[HEAD - len(head) : HEAD] = head
        return room[HEAD - len(head) : HEAD + size]


@dataclass(eq=False)
class _ServedStream:
    """One peer's stream, on which chunks are served one after the other."""

    stream: Stream
    busy: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass(frozen=True)
class Provider:
    peer: PeerId
    chunks: int
    complete: bool


class Shards:
    """Serves what the store holds and fetches what it lacks."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        store: Store,
        *,
        runner: Runner,
        limits: ShardLimits = LIMITS,
        seed: int | None = None,
        promises: PromiseLog | None = None,
        standings: Standings | None = None,
    ) -> None:
        """`promises` hears which providers had what they said; `standings` decides who is served where not all are."""
        self.network = network
        self._store = store
        self._runner = runner
        self._limits = limits
        self._random = random.Random(seed)
        self._channels = Channels(network, PROTOCOL, idle=limits.idle_streams)
        self._fetches: dict[ShardId, ShardFetch] = {}
        self._slots = trio.Semaphore(limits.fetches)
        self._nursery: trio.Nursery | None = None
        self._to_announce = Recent[ShardId, None](limits.announced)
        self._announced: set[ShardId] = set()
        self._changed = trio.lowlevel.ParkingLot()  # what is to be announced
        self.violations = Violations(PROTOCOL)
        self.counts = Counter[str]()  # chunks_served, bytes_served, misses, lies, chunks_fetched, duplicates, …
        self._context = FetchContext(
            network, rpc, runner, self._channels, self.violations, self.counts, limits, promises, store
        )
        self.memory = self._context.memory  # for those whose owner brings the memory
        self.ask_holdings = self._context.ask_holdings
        self.server = ShardServer(self._context, standings, self._random)

    # -- lifetime

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, fetch and announce until cancelled."""
        with self.server.serving():
            async with trio.open_nursery() as nursery:
                await nursery.start(self._channels.run)
                self._nursery = nursery
                try:
                    for shard in reversed(self._store.recent(self._limits.announced)):
                        self._announce_soon(shard)
                    task_status.started()
                    await self._announce()
                finally:
                    self._nursery = None  # before it closes: another task may ask in the same turn

    # -- having

    async def fetch(
        self,
        shard: ShardId,
        *,
        providers: Iterable[PeerId] = (),
        sizes: range | None = None,
        progress: Callable[[int, int], None] | None = None,
        announce: bool = True,
    ) -> None:
        """Have `shard` in the store, complete and verified; several callers share one fetch.

        Where it has none of these `sizes`, in bytes, it is unavailable, and no room is made for it.
        `providers` are asked beside those who are connected or found; `progress(bytes in hand, size)` is told of each
        chunk. When the last caller is cancelled, what has arrived is kept for the next fetch. What `memory` expects
        goes there, and is not announced. Raises NoRoom or Unavailable.
        """
        store = self._context.store_of(shard)
        if store.holding(shard).complete:
            await trio.lowlevel.checkpoint()
            check_size(shard, store.holding(shard).size, sizes)
            return
        fetch = self._fetches.get(shard)
        if fetch is None:
            if self._nursery is None:
                raise Unavailable("this node fetches nothing before it has started or after it has stopped")
            fetch = ShardFetch(shard, self._context, sizes=sizes, seed=self._random.getrandbits(32))
            self._fetches[shard] = fetch
            self._nursery.start_soon(self._carry_out, fetch, announce and not fetch.brief)
        elif fetch.sizes != sizes:
            fetch.sizes = None  # one caller may have been told wrongly: each looks by itself, below
        fetch.hints.update(dict.fromkeys(providers))
        if progress is not None:
            fetch.listeners.append(progress)
        fetch.callers += 1
        try:
            await fetch.ended.wait()
        finally:
            fetch.callers -= 1
            if progress is not None:
                fetch.listeners.remove(progress)
            if not fetch.callers:
                fetch.scope.cancel()
                if self._fetches.get(shard) is fetch:
                    del self._fetches[shard]  # whoever comes now begins anew
        if fetch.error is not None:
            raise fetch.error
        check_size(shard, store.holding(shard).size, sizes)

    async def put(self, source: Path | memoryview, *, announce: bool = True) -> ShardId:
        """Take a file, or bytes, into the store, and announce it. Raises NoRoom, or ShardError where it cannot be read.

        Without `announce`, which is for what lives seconds only, connected peers alone find it.
        """
        steps, shard = self._store.put(source), None
        try:
            while shard is None:
                shard = await self._runner(lambda: next(steps))
        finally:
            await surely(self._runner(steps.close))
        if announce:
            self._announce_soon(shard)
        return shard

    async def content(self, shard: ShardId) -> bytes:
        """All bytes of a complete shard that is here. Raises ShardNotHeld."""
        return await self._runner(lambda: b"".join(map(bytes, parts_of(self._store, shard))))

    async def drop(self, shard: ShardId) -> None:
        """Have a shard no more that nobody needs, and announce it no more, unless it is pinned or being fetched."""
        await self._runner(lambda: self._store.drop(shard))
        self.withdraw_lost()

    def withdraw_lost(self) -> None:
        """Announce no more what is not here any more."""
        named = (*self._announced, *self._to_announce)
        for shard in [each for each in named if not self._store.holding(each).complete]:
            self._to_announce.pop(shard, None)
            if shard in self._announced:
                self._announced.remove(shard)
                self.network.withdraw(shard)

    async def providers(self, shard: ShardId) -> tuple[Provider, ...]:
        """Who says it has chunks of `shard` now: connected peers and those found in the DHT, the fullest first."""
        found: dict[PeerId, Provider] = {}
        asked: set[PeerId] = set()

        async def ask(peer: PeerId) -> None:
            (holding,) = await self._context.ask_holdings(peer, shard)
            if bits := holding.bits():
                found[peer] = Provider(peer, bits.bit_count(), holding.complete)

        async def look_up(nursery: trio.Nursery) -> None:
            for peer in await self.network.find_providers(shard):
                if peer not in asked:
                    asked.add(peer)
                    nursery.start_soon(ask, peer)

        async with trio.open_nursery() as nursery:
            for view in self.network.peers():
                asked.add(view.peer)
                nursery.start_soon(ask, view.peer)
            nursery.start_soon(look_up, nursery)
        return tuple(sorted(found.values(), key=lambda p: (-p.complete, -p.chunks, p.peer)))

    async def read(self, peer: PeerId, shard: ShardId, index: int, count: int = 1) -> bytes:
        """Chunks from `peer`, at most RUN in a row, verified against the id and not stored. Raises Unavailable.

        The list of their hashes is the own one where the shard is here and can be read, and else the peer's.
        """
        try:
            try:
                manifest = await self._runner(lambda: self._context.store_of(shard).manifest(shard))
            except ShardError:
                manifest = await self._context.ask_manifest(peer, shard)
            if not 0 <= index <= index + count <= manifest.chunks:
                raise Unavailable(f"shard {shard.hex()} has {manifest.chunks} chunks")
            return await self._context.read(peer, manifest, range(index, index + count))
        except WireError as error:
            self._context.lied(peer, str(error))
            raise Unavailable(f"{peer} sent chunks that are not those asked for: {error}") from None
        except (NetworkError, CallError) as error:
            raise Unavailable(f"{peer} does not send the chunk: {error}") from error

    async def _carry_out(self, fetch: ShardFetch, announce: bool) -> None:
        try:
            with fetch.scope:
                async with nullcontext() if fetch.brief else self._slots:
                    await fetch.run()
                if announce:
                    self._announce_soon(fetch.shard)
        except ShardError as error:
            fetch.error = error
        finally:
            if fetch.error is None and not fetch.store.holding(fetch.shard).complete:
                fetch.error = Unavailable("the fetch was ended; what has arrived is kept")
            fetch.ended.set()
            if self._fetches.get(fetch.shard) is fetch:
                del self._fetches[fetch.shard]

    def measure(self, metrics: Metrics) -> None:
        metrics.show(SHARDS, lambda: self.counts)
        self.violations.measure(metrics)

    # -- announcing

    def _announce_soon(self, shard: ShardId) -> None:
        if shard not in self._announced:
            self._to_announce[shard] = None
            self._changed.unpark_all()

    async def _announce(self) -> None:
        """Announce one shard after the other, the newest first; of many, what is pinned and most recent stays so."""
        while True:
            while not self._to_announce:
                await self._changed.park()
            self.withdraw_lost()
            if not self._to_announce:
                continue
            shard, _ = self._to_announce.popitem()
            if len(self._announced) >= self._limits.announced:
                gone = self._announced.difference(self._store.recent(self._limits.announced - 1)).pop()
                self._announced.remove(gone)
                self.network.withdraw(gone)
            self._announced.add(shard)
            await self.network.provide(shard)
