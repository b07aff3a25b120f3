"""Shards: content-addressed immutable bytes, served in chunks and fetched from whoever has them.

Calls (`protocols.rpc`):
- `shards.have`: which of these shards, and which of their chunks as a bitmap, do you have?
- `shards.manifest`: size and leaf hashes of one shard (see `protocols.shard_tree`).

Protocol `/swarmnode/shards/1` carries chunks. The fetcher opens a stream and keeps it; it sends `Want(shard, index)`
for one chunk or up to RUN in a row, as many as it likes to have under way, and the server answers each in turn with a
`Piece` and, where it has chunks, the raw bytes. Bulk offers whole buffers from memory under a key, with a hash over all
of it; chunks are read from disk when asked for, come from half-fetched shards too, and have their hash in the tree:
hence a protocol of its own.

Who may fail when, and what is then true:
- nobody can push: a node stores only what it was asked, by its owner or its run, to fetch or to put;
- a chunk is checked against its leaf before it is written;
- for the serving side see `protocols.shard_desk`, for the fetching side `protocols.shard_fetch`.

A complete shard is announced by `Network.provide` under its id, as far as `announced` allows; all others are found by
asking connected peers.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, NetworkError, PeerId
from swarmnode.protocols.peers.violations import Kind, Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_channels import Channels
from swarmnode.protocols.transfer.shard_fetch import Fetch, Gave, Job
from swarmnode.protocols.transfer.shard_server import ShardDesk
from swarmnode.protocols.transfer.shard_tree import CHUNK, ShardId
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    LIMITS,
    PROTOCOL,
    RUN_BYTES,
    Have,
    Holding,
    Holdings,
    ShardError,
    ShardLimits,
    Store,
    Unavailable,
)
from swarmnode.protocols.wire import WireError

SHARDS = Metric("swarmnode_shards_total", COUNTER, "what happened with chunks of shards, some of it in bytes", "what")
STREAMS = Metric("swarmnode_shard_streams", GAUGE, "streams on which peers fetch chunks from here")
ANNOUNCED = Metric("swarmnode_shards_announced", GAUGE, "shards that this node announces in the DHT")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Provider:
    """A peer that says it has chunks of a shard."""

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
        gave: Gave = lambda peer, shard, size, kept: None,
    ) -> None:
        """`gave` is told what each provider of a fetch gave."""
        self._network = network
        self._rpc = rpc
        self._store = store
        self._runner = runner
        self._limits = limits
        self._random = random.Random(seed)
        self._gave = gave
        self._channels = Channels(network, limits)
        self._fetches: dict[ShardId, Job] = {}
        self._slots = trio.Semaphore(limits.fetches)
        self._nursery: trio.Nursery | None = None
        self._to_announce: OrderedDict[ShardId, None] = OrderedDict()
        self._announced: set[ShardId] = set()
        self._quiet: set[ShardId] = set()  # not to be announced
        self._news = trio.Event()
        self.offences = Offences(PROTOCOL)
        self.counts = Counter[str]()  # chunks_served, bytes_served, misses, lies, chunks_fetched, duplicates, …
        self.desk = ShardDesk(
            network,
            rpc,
            store,
            runner=runner,
            limits=limits,
            offences=self.offences,
            counts=self.counts,
            asked=self._note_companion,
        )

    # -- lifetime

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, fetch and announce until cancelled."""
        try:
            with self.desk.serving(), self._network.watch_peers() as events:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    for shard in reversed(self._store.recent(self._limits.announced)):
                        self._announce_soon(shard)
                    nursery.start_soon(self._announce)
                    task_status.started()
                    async for event in events:
                        if event.moved:
                            await self._channels.leave_behind(event.peer)
                        elif not event.up:
                            await self._channels.drop(event.peer)
        finally:
            self._nursery = None
            await self._channels.drop_all()

    # -- having

    async def fetch(
        self,
        shard: ShardId,
        *,
        providers: Iterable[PeerId] = (),
        progress: Callable[[int, int], None] | None = None,
        announce: bool = True,
    ) -> None:
        """Have `shard` in the store, complete and verified; several callers share one fetch.

        `providers` are asked beside those who are connected or found; `progress(bytes in hand, size)` is told of each
        chunk. When the last caller is cancelled, what has arrived is kept for the next fetch. Raises NoRoom or
        Unavailable.
        """
        if self._store.holding(shard).complete:
            await trio.lowlevel.checkpoint()
            return
        job = self._fetches.get(shard)
        if job is None:
            if self._nursery is None:
                raise Unavailable("this node fetches nothing before it has started or after it has stopped")
            if not announce:
                self._quiet.add(shard)
            job = self._fetches[shard] = Job(shard)
            self._nursery.start_soon(self._carry_out, job)
        job.hints.update(dict.fromkeys(providers))
        if progress is not None:
            job.listeners.append(progress)
        job.callers += 1
        try:
            await job.done.wait()
        finally:
            job.callers -= 1
            if progress is not None:
                job.listeners.remove(progress)
            if not job.callers:
                job.scope.cancel()
                if self._fetches.get(shard) is job:
                    del self._fetches[shard]  # whoever comes now begins anew
        if job.error is not None:
            raise job.error

    async def put(self, source: Path, *, announce: bool = True) -> ShardId:
        """Take a file into the store, and announce it. Raises NoRoom, or ShardError where it cannot be read.

        Without `announce`, which is for what lives seconds only, connected peers alone find it.
        """
        intake = await self._runner(lambda: self._store.intake(source))
        try:
            while await self._runner(intake.take):
                pass
            shard = await self._runner(intake.finish)
        finally:
            with trio.CancelScope(shield=True):
                await self._runner(intake.abandon)
        if not announce:
            self._quiet.add(shard)
        self._announce_soon(shard)
        return shard

    async def content(self, shard: ShardId) -> bytes:
        """All bytes of a complete shard that is here. Raises NotHeld."""

        def read() -> bytes:
            size = self._store.manifest(shard).size
            room, content = memoryview(bytearray(RUN_BYTES)), bytearray()
            while len(content) < size:
                content += room[: self._store.read(shard, len(content) // CHUNK, room)]
            return bytes(content)

        return await self._runner(read)

    async def drop(self, shard: ShardId) -> None:
        """Have a shard no more that nobody needs, unless it is pinned or being fetched."""
        await self._runner(lambda: self._store.drop(shard))
        self._quiet.discard(shard)

    async def providers(self, shard: ShardId) -> tuple[Provider, ...]:
        """Who says it has chunks of `shard` now: connected peers and those found in the DHT, the fullest first."""
        found: dict[PeerId, Provider] = {}
        asked: set[PeerId] = set()

        async def ask(peer: PeerId) -> None:
            holding = await self.ask_holding(peer, shard)
            if holding is not None and (bits := holding.bits()):
                found[peer] = Provider(peer, bits.bit_count(), holding.complete)

        async def look_up(nursery: trio.Nursery) -> None:
            for peer in await self._network.find_providers(shard):
                if peer not in asked:
                    asked.add(peer)
                    nursery.start_soon(ask, peer)

        async with trio.open_nursery() as nursery:
            for view in self._network.peers():
                asked.add(view.peer)
                nursery.start_soon(ask, view.peer)
            nursery.start_soon(look_up, nursery)
        return tuple(sorted(found.values(), key=lambda p: (-p.complete, -p.chunks, p.peer)))

    async def read(self, peer: PeerId, shard: ShardId, index: int) -> bytes:
        """One chunk from `peer`, verified alone against the id and not stored. Raises Unavailable."""
        try:
            return await self._channels.read_one(peer, shard, index)
        except WireError as error:
            self.counts["lies"] += 1
            self.offences.note(peer, str(error), Kind.LIE)
            raise Unavailable(f"{peer} sent a chunk that is not the one asked for: {error}") from None
        except NetworkError as error:
            raise Unavailable(f"{peer} does not send the chunk: {error}") from error

    async def ask_holding(self, peer: PeerId, shard: ShardId) -> Holding | None:
        """What `peer` says it has of `shard`; None where it does not answer or makes no sense."""
        try:
            answer = await self._rpc.call(peer, HAVE, Have((shard,)), Holdings, timeout=self._limits.call)
            if len(answer.shards) != 1:
                raise ValueError(f"{len(answer.shards)} holdings for one shard")
            answer.shards[0].bits()
        except CallError as error:
            log.debug("asking %s for a shard failed: %s", peer, error)
            return None
        except ValueError as error:
            self.offences.note(peer, str(error))
            return None
        return answer.shards[0]

    def _new_fetch(self, job: Job) -> Fetch:
        return Fetch(
            job,
            network=self._network,
            rpc=self._rpc,
            store=self._store,
            runner=self._runner,
            channels=self._channels,
            ask_holding=self.ask_holding,
            offences=self.offences,
            counts=self.counts,
            limits=self._limits,
            seed=self._random.getrandbits(32),
            gave=self._gave,
        )

    async def _carry_out(self, job: Job) -> None:
        try:
            with job.scope:
                async with self._slots:
                    await self._new_fetch(job).run()
                self._announce_soon(job.shard)
        except ShardError as error:
            job.error = error
        finally:
            if not job.done.is_set() and job.error is None and not self._store.holding(job.shard).complete:
                job.error = Unavailable("the fetch was ended; what has arrived is kept")
            job.done.set()
            if self._fetches.get(job.shard) is job:
                del self._fetches[job.shard]

    def _note_companion(self, shard: ShardId, peer: PeerId) -> None:
        """A peer asks about a shard: if it is being fetched here, the peer may get chunks that this node lacks."""
        if shard in self._fetches:
            self._fetches[shard].note_companion(peer)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(SHARDS, lambda: self.counts)
        metrics.show(STREAMS, lambda: self.desk.streams)
        metrics.show(ANNOUNCED, lambda: len(self._announced))
        self.offences.measure(metrics)

    # -- announcing

    def _announce_soon(self, shard: ShardId) -> None:
        if shard not in self._announced and shard not in self._quiet:
            self._to_announce[shard] = None
            self._to_announce.move_to_end(shard)
            while len(self._to_announce) > self._limits.announced:
                self._to_announce.popitem(last=False)
            self._news.set()

    async def _announce(self) -> None:
        """Announce one shard after the other, the newest first, until the allowance is used up."""
        while len(self._announced) < self._limits.announced:
            if not self._to_announce:
                self._news = trio.Event()
                await self._news.wait()
            shard, _ = self._to_announce.popitem()
            try:
                await self._network.provide(shard)
                self._announced.add(shard)
            except (NetworkError, ValueError) as error:  # ValueError: the network announces no more keys
                self.counts["unannounced"] += 1
                log.info("a shard is found only by connected peers: %s", error)
