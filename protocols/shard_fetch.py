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
- it does not have what it said: the chunk is looked for elsewhere, and after a few it is dropped;
- nobody is left: the scout goes on for `patience` seconds, then Unavailable; what has arrived stays in the store.

Memory: one chunk for each provider, whatever the shard's size.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.offences import Offences
from swarmnode.protocols.rpc import CallError, Rpc
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.shard_tree import CHUNK, Manifest, ShardId, chunk_length, proves
from swarmnode.protocols.shard_wire import (
    MANIFEST,
    MAX_MESSAGE,
    PROTOCOL,
    Holding,
    Leaves,
    NotHeld,
    Piece,
    ShardError,
    ShardLimits,
    Store,
    Unavailable,
    Want,
    WantManifest,
)
from swarmnode.protocols.wire import WireError, decode, encode

Chunks = npt.NDArray[np.bool_]  # one value for each chunk of the shard

log = logging.getLogger(__name__)

GUESS = 1.0  # seconds that a chunk is thought to take at a provider not yet measured
OVERDUE = 2.0  # times its usual time after which a provider's next chunk is thought never to come
COMPANIONS = 32  # peers remembered as fetching the same shard
EMPTY_PROMISES = 8  # chunks that a provider may lack although it said it had them
WORTH = 0.1  # seconds: what asking for a chunk twice must save, and by what a fast provider may be late
LOOK_AGAIN = (0.05, 1.0)  # seconds, at least and at most, between two looks at whose chunks have become overdue


class Job:
    """One fetch and those who wait for it."""

    def __init__(self, shard: ShardId) -> None:
        self.shard = shard
        self.hints: dict[PeerId, None] = {}  # named by the callers
        self.companions: OrderedDict[PeerId, None] = OrderedDict()  # who asked for the shard: they will have it soon
        self.listeners: list[Callable[[int, int], None]] = []
        self.callers = 0
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.error: ShardError | None = None

    def note_companion(self, peer: PeerId) -> None:
        self.companions[peer] = None
        if len(self.companions) > COMPANIONS:
            self.companions.popitem(last=False)


class Channel:
    """A stream to a provider, used for one fetch after another."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._reader = FrameReader(stream, limit=MAX_MESSAGE)
        self._room = memoryview(bytearray(CHUNK))  # used again for each chunk: fresh memory costs more than the copy

    async def ask(self, wants: list[Want]) -> None:
        await self.stream.send_all(b"".join(frame(encode(want)) for want in wants))

    async def piece(self) -> Piece:
        raw = await self._reader.frame()
        if raw is None:
            raise StreamBroken("the provider ended the stream")
        return decode(Piece, raw, limit=MAX_MESSAGE)

    async def raw(self, size: int) -> memoryview:
        """The next `size` bytes, at most CHUNK; they are good until the next call."""
        filled = 0
        while filled < size:
            part = await self._reader.raw(size - filled)
            if not part:
                raise StreamBroken("the provider ended the stream in the middle of a chunk")
            self._room[filled : filled + len(part)] = part
            filled += len(part)
        return self._room[:size]


class Channels:
    """Open streams to providers, kept between fetches."""

    def __init__(self, network: Network, limits: ShardLimits) -> None:
        self._network = network
        self._limits = limits
        self._idle: dict[PeerId, list[Channel]] = {}

    async def take(self, peer: PeerId) -> Channel:
        """An idle stream, or a new one. Raises Unreachable or ProtocolUnsupported."""
        idle = self._idle.get(peer)
        if idle:
            channel = idle.pop()
            if not idle:
                del self._idle[peer]
            return channel
        return Channel(await self._network.open_stream(peer, PROTOCOL, timeout=self._limits.open))

    async def give_back(self, channel: Channel, *, good: bool) -> None:
        """Keep a stream on which nothing is under way; close any other."""
        idle = self._idle.setdefault(channel.stream.peer, [])
        if good and len(idle) < self._limits.idle_streams:
            idle.append(channel)
            return
        if not idle:
            del self._idle[channel.stream.peer]
        with trio.CancelScope(shield=True):  # a cancelled task still closes; aclose never waits long
            await channel.stream.aclose()

    async def drop(self, peer: PeerId) -> None:
        for channel in self._idle.pop(peer, []):
            with trio.CancelScope(shield=True):
                await channel.stream.aclose()

    async def drop_all(self) -> None:
        for peer in list(self._idle):
            await self.drop(peer)

    async def read_one(self, peer: PeerId, shard: ShardId, index: int) -> bytes:
        """One chunk with its proof. Raises NetworkError, or WireError where it is not the chunk asked for."""
        channel = await self.take(peer)
        good = False
        try:
            with trio.move_on_after(self._limits.first_chunk) as scope:
                await channel.ask([Want(shard, index, prove=True)])
                piece = await channel.piece()
                if piece.size >= 0 and not 0 < piece.size == chunk_length(piece.of, index):
                    raise WireError(f"Piece: {piece.size} bytes for chunk {index} of {piece.of} bytes")
                chunk = bytes(await channel.raw(max(piece.size, 0)))
                good = True
            if scope.cancelled_caught:
                raise StreamBroken(f"no chunk within {self._limits.first_chunk:g} s")
        finally:
            await self.give_back(channel, good=good)
        if piece.size < 0:
            raise NetworkError("it does not have the chunk")
        if not proves(shard, piece.of, index, chunk, piece.proof):
            raise WireError("Piece: the proof does not lead to the id")
        return chunk


class _Source:
    """One provider in one fetch."""

    def __init__(self, peer: PeerId, has: Chunks, limits: ShardLimits) -> None:
        self.peer = peer
        self.has = has  # bool for each chunk
        self.complete = bool(has.all())
        self.asked: deque[int] = deque()  # chunks under way, in the order in which they will come
        self.pace = AdaptiveDeadline(floor=limits.least_wait, ceiling=limits.first_chunk)
        self.moved_at = trio.current_time()  # when it last delivered, or was asked while it had nothing to do
        self.broken_promises = 0
        self.work = trio.Event()  # something was asked of it
        self.look = trio.Event()  # there is a reason to ask it for more
        self.failure: WireError | NetworkError | None = None  # why it was given up
        self._limits = limits

    def window(self) -> int:
        """Chunks to have under way: what it delivers in `ahead` seconds."""
        least, most = self._limits.window
        usual = self.pace.usual
        return least if usual is None else min(most, max(least, math.ceil(self._limits.ahead / max(usual, 1e-6))))

    def expected(self, position: int, now: float) -> float:
        """Seconds until the chunk at `position` in its queue comes; infinite where it is overdue."""
        usual = self.pace.usual or GUESS
        if self.asked and now - self.moved_at > OVERDUE * usual + WORTH:
            return math.inf
        return usual * (position + 1)


class Fetch:
    """Runs once; `run` returns when the shard is complete in the store. Raises NoRoom or Unavailable."""

    def __init__(
        self,
        job: Job,
        *,
        network: Network,
        rpc: Rpc,
        store: Store,
        runner: Runner,
        channels: Channels,
        ask_holding: Callable[[PeerId, ShardId], Awaitable[Holding | None]],
        offences: Offences,
        counts: Counter[str],
        limits: ShardLimits,
        seed: int,
    ) -> None:
        self._job = job
        self._shard = job.shard
        self._network, self._rpc, self._store, self._runner = network, rpc, store, runner
        self._channels, self._ask_holding = channels, ask_holding
        self._offences, self._counts, self._limits = offences, counts, limits
        self._draw = np.random.default_rng(seed)
        self._manifest: Manifest | None = None
        self._begun = trio.Event()  # the manifest is known, and the store has made room
        self._beginning = trio.Lock()
        self._done = trio.Event()
        self._failure: ShardError | None = None
        self._sources: dict[PeerId, _Source] = {}
        self._tried: set[PeerId] = set()  # being asked, or drawn from
        self._asking = trio.Semaphore(limits.sources)
        self._banned: set[PeerId] = set()
        self._search_now = trio.Event()
        self._in_hand = 0  # bytes
        self._moved_at = trio.current_time()  # when the last chunk came

    async def run(self) -> None:
        """Fetch until complete; in the end the store has finished the shard or suspended it."""
        try:
            async with trio.open_nursery() as nursery:
                with suppress(NotHeld):  # the manifest is here where an earlier fetch began
                    await self._begin(await self._runner(lambda: self._store.manifest(self._shard)))
                nursery.start_soon(self._scout, nursery)
                await self._done.wait()
                nursery.cancel_scope.cancel()
            if self._failure is not None:
                raise self._failure
            await self._runner(lambda: self._store.finish(self._shard))
        except BaseException:
            if self._begun.is_set():
                with trio.CancelScope(shield=True):
                    await self._runner(lambda: self._store.suspend(self._shard))
            raise

    def _fail(self, error: ShardError) -> None:
        self._failure = self._failure or error
        self._done.set()

    # -- finding providers

    async def _scout(self, nursery: trio.Nursery) -> None:
        next_search = -math.inf
        while True:
            now = trio.current_time()
            if now >= next_search or self._search_now.is_set():
                self._search_now = trio.Event()
                next_search = now + self._limits.search
                nursery.start_soon(self._search_known)
                nursery.start_soon(self._search_dht)
            else:
                for source in list(self._sources.values()):
                    if not source.complete:
                        nursery.start_soon(self._refresh, source)
                for peer in self._job.companions:
                    nursery.start_soon(self._try, peer)
                if not self._sources:
                    nursery.start_soon(self._search_known)
            with trio.move_on_after(self._limits.refresh):
                await self._search_now.wait()
            if not self._sources and trio.current_time() - self._moved_at >= self._limits.patience:
                self._fail(Unavailable(self._what_is_missing()))

    def _what_is_missing(self) -> str:
        name = self._shard.hex()
        if self._manifest is None:
            return f"shard {name}: nobody who can be reached has it"
        return (
            f"shard {name}: {int(self._here.sum())} of {self._manifest.chunks} chunks are here, and nobody who can be "
            "reached has the rest; the next fetch goes on from there"
        )

    async def _search_known(self) -> None:
        known = dict.fromkeys((*self._job.hints, *(view.peer for view in self._network.peers())))
        async with trio.open_nursery() as nursery:
            for peer in known:
                nursery.start_soon(self._try, peer)

    async def _search_dht(self) -> None:
        found = await self._network.find_providers(self._shard)
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
                holding = await self._ask_holding(peer, self._shard)
                if holding is None or not (holding.complete or holding.bits()):
                    return
                if not self._begun.is_set() and not await self._learn_manifest(peer):
                    return
            assert self._manifest is not None
            if holding.size != self._manifest.size:
                self._lied(peer, f"says that a shard of {self._manifest.size} bytes has {holding.size}")
            elif len(self._sources) < self._limits.sources:
                await self._draw_from(_Source(peer, self._as_array(holding), self._limits))
        except WireError as error:
            self._lied(peer, str(error))
        except NetworkError as error:
            self._counts["sources_lost"] += 1
            log.debug("a fetch goes on without %s: %s", peer, error)
        finally:
            self._tried.discard(peer)

    def _lied(self, peer: PeerId, what: str) -> None:
        self._banned.add(peer)
        self._counts["lies"] += 1
        self._offences.note(peer, what)

    async def _refresh(self, source: _Source) -> None:
        """Learn which chunks a half-complete provider has by now."""
        holding = await self._ask_holding(source.peer, self._shard)
        if holding is None or self._sources.get(source.peer) is not source or self._manifest is None:
            return
        if holding.size == self._manifest.size:
            has = self._as_array(holding)
            self._rarity += has.astype(np.int32) - source.has
            source.has, source.complete = has, holding.complete
            self._wake()

    # -- the manifest

    async def _learn_manifest(self, peer: PeerId) -> bool:
        """Whether the shard's manifest is known, from this peer or meanwhile from another."""
        manifest: Manifest | None = None
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

    async def _manifest_of(self, peer: PeerId) -> Manifest | None:
        try:
            answer = await self._rpc.call(peer, MANIFEST, WantManifest(self._shard), Leaves, timeout=self._limits.call)
            manifest = Manifest(answer.size, answer.leaves)
            if await self._runner(lambda: manifest.id) == self._shard:
                return manifest
            self._lied(peer, "sent a manifest of another shard")
        except CallError:
            self._counts["sources_lost"] += 1
        except ValueError as error:
            self._lied(peer, str(error))
        return None

    async def _begin(self, manifest: Manifest) -> None:
        async with self._beginning:
            if self._begun.is_set() or self._failure is not None:
                return
            try:
                with trio.CancelScope(shield=True):  # else the store might have begun, and nobody would suspend it
                    here = await self._runner(lambda: self._store.begin(manifest))
                    self._begun.set()
            except ShardError as error:
                self._fail(error)
                return
            self._manifest = manifest
            self._here = _unpacked(here, manifest.chunks)
            self._asked = np.zeros(manifest.chunks, np.int8)  # how many providers were asked for each chunk
            self._rarity = np.zeros(manifest.chunks, np.int32)  # how many providers have it
            self._order = self._draw.random(manifest.chunks)  # in [0, 1): decides between equally rare ones
            self._in_hand = sum(chunk_length(manifest.size, int(i)) for i in np.flatnonzero(self._here))
            self._tell()

    def _as_array(self, holding: Holding) -> Chunks:
        assert self._manifest is not None
        return _unpacked(holding.bits(), self._manifest.chunks)

    def _tell(self) -> None:
        assert self._manifest is not None
        for listener in tuple(self._job.listeners):
            listener(self._in_hand, self._manifest.size)
        if self._here.all():
            self._done.set()

    # -- drawing from one provider

    async def _draw_from(self, source: _Source) -> None:
        """Ask and receive until the provider fails; raises WireError or NetworkError then."""
        self._sources[source.peer] = source
        self._rarity += source.has
        try:
            channel = await self._channels.take(source.peer)
            await self._drain(source, channel)
        finally:
            del self._sources[source.peer]
            for index in source.asked:
                self._asked[index] -= 1
            self._rarity -= source.has
            self._wake()
            if not self._sources:
                self._search_now.set()
        if source.failure is not None:
            raise source.failure

    async def _drain(self, source: _Source, channel: Channel) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for job in (self._ask, self._receive):
                    nursery.start_soon(self._until_over, job, source, channel, nursery.cancel_scope)
        finally:
            await self._channels.give_back(channel, good=not source.asked and source.failure is None)

    async def _until_over(
        self,
        job: Callable[[_Source, Channel], Awaitable[None]],
        source: _Source,
        channel: Channel,
        scope: trio.CancelScope,
    ) -> None:
        try:
            await job(source, channel)
        except (WireError, NetworkError) as error:
            source.failure = source.failure or error
        finally:
            scope.cancel()

    async def _ask(self, source: _Source, channel: Channel) -> None:
        """Keep the provider's window full, refilling it when half is used: a request less costs a write less."""
        while True:
            source.look = trio.Event()
            window = source.window()
            wants = []
            if len(source.asked) <= window // 2:
                while len(source.asked) < window and (index := self._pick(source)) is not None:
                    if not source.asked:
                        source.moved_at = trio.current_time()
                    source.asked.append(index)
                    self._asked[index] += 1
                    wants.append(Want(self._shard, index))
            if wants:
                source.work.set()
                await channel.ask(wants)
            least, most = LOOK_AGAIN
            with trio.move_on_after(min(most, max(least, source.pace.usual or least))):
                await source.look.wait()

    async def _receive(self, source: _Source, channel: Channel) -> None:
        """Take what the provider sends, chunk by chunk, until it has broken too many promises."""
        assert self._manifest is not None
        while source.broken_promises < EMPTY_PROMISES:
            if not source.asked:
                source.work = trio.Event()
                await source.work.wait()
                continue
            index, allowed = source.asked[0], source.pace.seconds()
            chunk: memoryview | None = None
            with trio.move_on_after(allowed) as scope:
                piece = await channel.piece()
                if piece.size >= 0:
                    if piece.size != chunk_length(self._manifest.size, index):
                        raise WireError(f"Piece: {piece.size} bytes for chunk {index}")
                    chunk = await channel.raw(piece.size)
            if scope.cancelled_caught:
                raise StreamBroken(f"no chunk within {allowed:.1f} s")
            await self._settle(source, index, chunk)

    async def _settle(self, source: _Source, index: int, chunk: memoryview | None) -> None:
        """A provider answered for the chunk at the head of its queue; `chunk` is None where it does not have it."""
        now = trio.current_time()
        if chunk is None:
            source.broken_promises += 1
            source.has[index] = False
            source.complete = False
            self._rarity[index] -= 1
        else:
            source.pace.observe(now - source.moved_at)
            if self._here[index]:
                self._counts["duplicates"] += 1
            elif await self._kept(source.peer, index, chunk):
                self._arrived(index, len(chunk))
        source.moved_at = trio.current_time()
        source.asked.popleft()
        self._asked[index] -= 1
        if chunk is None:
            self._wake()
        elif len(source.asked) <= source.window() // 2:
            source.look.set()

    async def _kept(self, peer: PeerId, index: int, chunk: memoryview) -> bool:
        """Verify a chunk and write it. Raises WireError where it is wrong."""
        try:
            if await self._runner(lambda: self._store.write(self._shard, index, chunk)):
                return True
        except ShardError as error:
            self._fail(error)
            return False
        raise WireError(f"chunk {index} does not have its hash")

    def _arrived(self, index: int, size: int) -> None:
        if self._here[index]:  # another provider's copy was written in the same moment
            return
        self._here[index] = True
        self._moved_at = trio.current_time()
        self._in_hand += size
        self._counts["chunks_fetched"] += 1
        self._counts["bytes_fetched"] += size
        self._tell()

    def _wake(self) -> None:
        """Chunks became free, or someone has more of them."""
        for source in self._sources.values():
            source.look.set()

    # -- which chunk next

    def _pick(self, source: _Source) -> int | None:
        """The rarest chunk that the provider has and nobody was asked for; else one to take from a slower provider."""
        free = source.has & ~self._here & (self._asked == 0)
        if free.any():
            return int(np.where(free, self._rarity + self._order, np.inf).argmin())
        return self._pick_late(source)

    def _pick_late(self, source: _Source) -> int | None:
        now = trio.current_time()
        latest, chosen = 2 * source.expected(len(source.asked), now) + WORTH, None
        for other in self._sources.values():
            if other is source:
                continue
            for position, index in enumerate(other.asked):
                due = other.expected(position, now)
                if due > latest and source.has[index] and self._asked[index] == 1 and not self._here[index]:
                    latest, chosen = due, index
        return chosen


def _unpacked(bits: int, count: int) -> Chunks:
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)
