"""Large buffers, pulled by name: a node offers bytes under a key, and peers that know the key fetch them.

Protocol `/swarmnode/bulk/1`. Nobody can push: bytes enter a node only where it asked for them and where it made room.

Messages on a stream, which the fetcher opened and uses again for one fetch after another:
- fetcher: `BulkWant(key, offset, wait)`, a frame of at most 4 KiB;
- server: `BulkHeader(found, size, digest)`, a frame, as soon as the key is offered or after `wait` seconds;
  where found, then the `size - offset` raw bytes of the buffer from `offset` on.

A buffer may be offered and fetched while it grows (`StreamingBuffer`): its bytes are sent as they become ready, and
handed on chunk by chunk. It has no hash, since nobody knows its end; that the bytes are the peer's is what the link
promises. It may have a name in place of one: a fetch goes on behind what came of a buffer of that name before, and
begins anew where the peer states another.

Who may fail when, and what is then true:
- the key is not offered, or not to this peer: NotOffered, and the stream stays good;
- an offer that grows stops growing: its fetchers wait, `stall` seconds and no longer;
- size or digest are not what the fetcher permits: Corrupt before a byte is taken. The bytes do not hash to the
  digest: Corrupt after the last; `into` then holds rubbish;
- the stream breaks: the fetch opens another and goes on from the last whole chunk, until a bounded number in a row
  brought none, then StreamBroken. So a fetch outlives any number of relayed connections that end at their limit;
- the peer moves from a relayed path to a direct one: a fetch with much before it breaks off at the next whole chunk and
  goes on there, idle streams on the old path are closed, and those in use are not used again;
- the peer sends nothing for `stall` seconds: StreamBroken, and it is not asked again;
- the offer is withdrawn while it is served: the stream is closed; the fetcher asks again and gets NotOffered. Not one
  byte of the buffer is read after `withdraw` returned, so its owner may use it again (a digest begun before may still
  read it; nobody sees that digest);
- the fetcher stops reading: its stream is dropped after `serve_stall`; nothing else waits for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio
from blake3 import blake3

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk_client import (
    CHUNK,
    MAX_KEY,
    MAX_MESSAGE,
    PROTOCOL,
    BulkChannel,
    BulkFetch,
    BulkHeader,
    BulkLimits,
    BulkWant,
    Corrupt,
    Key,
    LeftBehind,
    NotOffered,
    OtherContents,
    Request,
    Stalled,
    StreamingBuffer,
)
from swarmnode.protocols.wire import WireError, decode, encode

__all__ = [
    "CHUNK",
    "PROTOCOL",
    "Bulk",
    "BulkHeader",
    "BulkLimits",
    "BulkWant",
    "Corrupt",
    "Key",
    "NotOffered",
    "StreamingBuffer",
]

STREAMS = Metric("swarmnode_bulk_streams", GAUGE, "streams on which peers fetch buffers from here")
OFFERS = Metric("swarmnode_bulk_offers", GAUGE, "buffers that peers may fetch")

log = logging.getLogger(__name__)


Find = Callable[[Key, PeerId, float], Awaitable["_Offer | None"]]


@dataclass(eq=False)
class _Offer:
    """A buffer that peers may fetch."""

    buffer: memoryview
    to: frozenset[PeerId] | None  # None: any
    growing: StreamingBuffer | None = None  # whose `buffer` it is; what is not ready yet is waited for
    digest: bytes | None = None
    hashing: trio.Lock | None = None
    stands: bool = True

    def withdraw(self) -> None:
        """Not one byte is read from now on."""
        self.stands = False
        if self.growing is not None:
            self.growing.end()

    async def hash(self, runner: Runner) -> bytes:
        """The blake3, computed once; of what grows, its name."""
        if self.growing is not None:
            return self.growing.name
        self.hashing = self.hashing or trio.Lock()
        async with self.hashing:
            if self.digest is None:
                self.digest = await runner(lambda: blake3(self.buffer).digest())
        return self.digest


class BulkConnection:
    """One stream of a peer: one request at a time."""

    def __init__(
        self, stream: Stream, *, find: Find, runner: Runner, limits: BulkLimits, violations: Violations
    ) -> None:
        """`find(key, peer, wait)` is the offer of a key to a peer, as soon as there is one within `wait` seconds."""
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._stream = stream
        self._find = find
        self._runner = runner
        self._limits = limits
        self._violations = violations
        self._busy = False

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._or_end, self._read, nursery)

    async def _or_end(self, job: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run `job`; where the peer or the stream fails in it, end the connection."""
        try:
            await job(*args)
        except WireError as error:
            self._violations.note(self.peer, str(error))
            self.scope.cancel()
        except NetworkError as error:
            log.debug("serving %s ended: %s", self.peer, error)
            self.scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Read on while serving, to notice a fetcher that goes away."""
        reader = FrameReader(self._stream, limit=MAX_MESSAGE)
        while (raw := await reader.frame()) is not None:
            want = decode(BulkWant, raw, limit=MAX_MESSAGE)
            if self._busy:
                raise WireError("BulkWant: sent before the last was served")
            if want.offset < 0 or not 0 <= want.wait < math.inf or len(want.key) > MAX_KEY:
                raise WireError(f"BulkWant: offset {want.offset}, wait {want.wait}, {len(want.key)} parts of a key")
            self._busy = True
            nursery.start_soon(self._or_end, self._serve, want)
        self.scope.cancel()

    async def _serve(self, want: BulkWant) -> None:
        offer = await self._find(want.key, self.peer, min(want.wait, self._limits.longest_wait))
        digest = b"" if offer is None else await offer.hash(self._runner)
        if offer is None or not offer.stands:
            await self._send(frame(encode(BulkHeader(found=False))), last=True)
            return
        size = offer.buffer.nbytes
        if want.offset > size:
            raise WireError(f"BulkWant: offset {want.offset} in {size} bytes")
        header = frame(encode(BulkHeader(True, size, digest)))
        await self._send(header, last=want.offset == size)
        for start in range(want.offset, size, CHUNK):
            stop = min(start + CHUNK, size)
            if offer.growing is not None:
                await offer.growing.reach(stop)
            if not offer.stands:
                raise StreamBroken("the offer was withdrawn")
            await self._send(bytes(offer.buffer[start:stop]), last=stop == size)

    async def _send(self, piece: bytes, *, last: bool) -> None:
        self._busy = not last  # the fetcher may ask again as soon as it has the last byte
        with trio.move_on_after(self._limits.serve_stall) as scope:
            await self._stream.send_all(piece)
        if scope.cancelled_caught:
            raise StreamBroken(f"it took nothing for {self._limits.serve_stall:g} s")


class Bulk:
    """Offers buffers to peers and fetches theirs; offers may be made before `run`, all else happens during it."""

    def __init__(self, network: Network, *, runner: Runner, limits: BulkLimits | None = None) -> None:
        self._network = network
        self._runner = runner
        self._limits = limits or BulkLimits()
        self._offers: dict[Key, _Offer] = {}
        self._new_offer = trio.lowlevel.ParkingLot()
        self._idle: dict[PeerId, list[BulkChannel]] = {}
        self._in_use: set[BulkChannel] = set()
        self._moves = 0
        self._slots: dict[PeerId, tuple[trio.Semaphore, int]] = {}  # and the fetches that hold or await one
        self._connections: dict[BulkConnection, None] = {}
        self._running = False
        self.violations = Violations(PROTOCOL)
        network.serve(PROTOCOL, self._serve_stream)

    @property
    def me(self) -> PeerId:
        return self._network.me

    # -- offering

    def offer(
        self,
        key: Key,
        buffer: bytes | bytearray | memoryview | StreamingBuffer,
        *,
        to: frozenset[PeerId] | None = None,
        digest: bytes | None = None,
    ) -> None:
        """Let peers (`to`, or any) fetch `buffer` under `key` until withdrawn, in place of what was offered there.

        The buffer is not copied: what is ready of it must not change before `withdraw`, which ends the growth of one
        that grows. `digest` is its blake3 where that is known.
        """
        if not 0 < len(key) <= MAX_KEY:
            raise ValueError(f"a key has 1 to {MAX_KEY} parts, not {len(key)}")
        if key in self._offers:
            self._offers[key].withdraw()
        if isinstance(buffer, StreamingBuffer):
            self._offers[key] = _Offer(buffer.buffer, to, growing=buffer)
        else:
            self._offers[key] = _Offer(memoryview(buffer).cast("B"), to, digest=digest)
        self._new_offer.unpark_all()

    def withdraw(self, prefix: Key) -> None:
        """End all offers whose key starts with `prefix`."""
        for key in [key for key in self._offers if key[: len(prefix)] == prefix]:
            self._offers.pop(key).withdraw()

    async def _offered(self, key: Key, peer: PeerId, wait: float) -> _Offer | None:
        """The offer of `key` to `peer`, as soon as there is one and for at most `wait` seconds."""
        with trio.move_on_after(wait):
            while True:
                offer = self._offers.get(key)
                if offer is not None and (offer.to is None or peer in offer.to):
                    return offer
                await self._new_offer.park()
        return None

    # -- lifetime

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; drops the idle streams of peers that went away or moved."""
        self._running = True
        try:
            with self._network.watch_peers() as events:
                task_status.started()
                async for event in events:
                    if event.moved:
                        self._moves += 1
                        for channel in self._in_use:
                            channel.left_behind |= channel.stream.peer == event.peer
                    if event.moved or not event.up:
                        await self._drop_idle(event.peer)
        finally:
            self._running = False
            for connection in list(self._connections):
                connection.scope.cancel()
            for peer in list(self._idle):
                await self._drop_idle(peer)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(STREAMS, lambda: len(self._connections))
        metrics.show(OFFERS, lambda: len(self._offers))
        self.violations.measure(metrics)

    # -- fetching

    async def fetch(
        self,
        peer: PeerId,
        key: Key,
        *,
        into: memoryview | StreamingBuffer | None = None,
        max_size: int,
        wait: float = 0.0,
        digest: bytes | None = None,
        stall: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> bytes | memoryview:
        """The bytes that `peer` offers under `key`, at most `max_size`; `into[:size]` where `into` is given.

        The peer may take `wait` seconds to offer them, and send nothing for `stall` seconds in place of the usual ones.
        `digest` (blake3, 32 bytes), where given, must be what the peer states. `progress(n)` gets the bytes in hand so
        far. Into a StreamingBuffer, a buffer of just its size is fetched, which may itself still grow, from what is
        `kept` on; whole chunks of it become ready, and no hash is checked. Raises NotOffered, Corrupt, Unreachable,
        ProtocolUnsupported or StreamBroken.
        """
        growing = into if isinstance(into, StreamingBuffer) else None
        room = growing.buffer if growing is not None else into.cast("B") if isinstance(into, memoryview) else None
        request = Request(
            key=key,
            into=room,
            growing=growing,
            max_size=max_size if room is None else min(max_size, room.nbytes),
            digest=digest,
            progress=progress,
            stall=self._limits.stall if stall is None else stall,
            wait_until=trio.current_time() + wait,
        )
        slots, users = self._slots.get(peer, (trio.Semaphore(self._limits.streams), 0))
        self._slots[peer] = (slots, users + 1)
        try:
            async with slots:
                return await self._fetch_and_hash(peer, BulkFetch(request))
        finally:
            slots, users = self._slots.pop(peer)
            if users > 1:
                self._slots[peer] = (slots, users - 1)

    async def _fetch_and_hash(self, peer: PeerId, fetch: BulkFetch) -> bytes | memoryview:
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch.hash, self._runner)
            try:
                await self._fetch(peer, fetch)
                fetch.finish()
            except Exception as error:  # as it is, in no group
                failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not fetch.is_as_stated():
            self.violations.note(peer, f"the bytes of {fetch.request.key} do not have the stated hash", Kind.LIE)
            raise Corrupt(f"{peer} sent bytes for {fetch.request.key} that do not have the stated hash")
        return fetch.result() if fetch.request.into is not None else await self._runner(fetch.result)

    async def _fetch(self, peer: PeerId, fetch: BulkFetch) -> None:
        tries = self._limits.tries
        while True:
            channel = await self._checked_out(peer)
            self._in_use.add(channel)
            good, before = False, fetch.chunks
            try:
                await fetch.attempt(channel)
                good = True
                return
            except NotOffered:
                good = True
                raise NotOffered(f"{peer} does not offer {fetch.request.key}") from None
            except WireError as error:
                self.violations.note(peer, str(error))
                raise Corrupt(f"{peer} broke the rules of {PROTOCOL}: {error}") from None
            except Stalled:
                raise
            except OtherContents:
                log.debug("what was kept of %s is not what %s offers now", fetch.request.key, peer)
            except LeftBehind:
                log.debug("fetching %s from %s goes on over a better path", fetch.request.key, peer)
            except StreamBroken:
                if channel.used:  # it may have broken long ago, and so the other idle ones
                    await self._drop_idle(peer)
                if fetch.chunks > before:
                    tries = self._limits.tries
                elif not channel.used:
                    tries -= 1
                    if not tries:
                        raise
            finally:
                self._in_use.discard(channel)
                if good and self._running and not channel.left_behind:
                    channel.used = True
                    self._idle.setdefault(peer, []).append(channel)
                else:
                    await _close(channel.stream)

    async def _checked_out(self, peer: PeerId) -> BulkChannel:
        idle = self._idle.get(peer)
        if idle:
            channel = idle.pop()
            if not idle:
                del self._idle[peer]
            return channel
        moves = self._moves
        stream = await self._network.open_stream(peer, PROTOCOL, timeout=self._limits.open)
        left_behind = self._moves > moves  # perhaps another peer moved: then a stream is opened in vain
        return BulkChannel(stream, FrameReader(stream, limit=MAX_MESSAGE), left_behind=left_behind)

    async def _drop_idle(self, peer: PeerId) -> None:
        for channel in self._idle.pop(peer, []):
            await _close(channel.stream)

    # -- serving

    async def _serve_stream(self, stream: Stream) -> None:
        held = sum(connection.peer == stream.peer for connection in self._connections)
        connection = BulkConnection(
            stream, find=self._offered, runner=self._runner, limits=self._limits, violations=self.violations
        )
        try:
            if held >= self._limits.serves:
                self.violations.note(stream.peer, f"more than {self._limits.serves} streams", Kind.LOAD)
            elif self._running:
                self._connections[connection] = None
                await connection.run()
        finally:
            self._connections.pop(connection, None)
            await _close(stream)


async def _close(stream: Stream) -> None:
    with trio.CancelScope(shield=True):  # a cancelled task still closes; aclose never waits long
        await stream.aclose()
