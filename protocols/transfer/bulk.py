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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio
from blake3 import blake3

from swarmnode.protocols.frames import FrameReader, close, frame
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk_client import (
    CHUNK,
    MAX_KEY,
    PROTOCOL,
    BulkFetch,
    BulkHeader,
    BulkLimits,
    BulkWant,
    Corrupt,
    Key,
    LeftBehind,
    NotOffered,
    OtherContents,
    Stalled,
    StreamingBuffer,
    WrongHash,
)
from swarmnode.protocols.transfer.channels import MAX_MESSAGE, Channels
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


@dataclass(eq=False)
class _Offer:
    """A buffer that peers may fetch."""

    buffer: memoryview
    to: frozenset[PeerId] | None  # None: any
    growing: StreamingBuffer | None = None  # whose `buffer` it is; what is not ready yet is waited for
    digest: bytes | None = None
    hashing: trio.Lock = field(default_factory=trio.Lock)
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
        async with self.hashing:
            if self.digest is None:
                self.digest = await runner(lambda: blake3(self.buffer).digest())
        return self.digest


class BulkConnection:
    """One stream of a peer: one request at a time."""

    def __init__(self, bulk: Bulk, stream: Stream) -> None:
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._bulk = bulk
        self._stream = stream
        self._busy = False

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, nursery)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Where the peer or the stream fails in the block, end the connection."""
        try:
            yield
        except WireError as error:
            self._bulk.violations.note(self.peer, str(error))
            self.scope.cancel()
        except NetworkError as error:
            log.debug("serving %s ended: %s", self.peer, error)
            self.scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Read on while serving, to notice a fetcher that goes away."""
        reader = FrameReader(self._stream, limit=MAX_MESSAGE)
        with self._ending():
            while (raw := await reader.frame()) is not None:
                want = decode(BulkWant, raw, limit=MAX_MESSAGE)
                if self._busy:
                    raise WireError("BulkWant: sent before the last was served")
                if want.offset < 0 or not 0 <= want.wait < math.inf or len(want.key) > MAX_KEY:
                    raise WireError(f"BulkWant: offset {want.offset}, wait {want.wait}, {len(want.key)} parts of a key")
                self._busy = True
                nursery.start_soon(self._serve, want)
        self.scope.cancel()

    async def _serve(self, want: BulkWant) -> None:
        with self._ending():
            offer = await self._bulk.offered(want.key, self.peer, want.wait)
            digest = b"" if offer is None else await offer.hash(self._bulk.runner)
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
        with trio.move_on_after(self._bulk.limits.serve_stall) as scope:
            await self._stream.send_all(piece)
        if scope.cancelled_caught:
            raise StreamBroken(f"it took nothing for {self._bulk.limits.serve_stall:g} s")


class Bulk:
    """Offers buffers to peers and fetches theirs; offers may be made before `run`, all else happens during it."""

    def __init__(self, network: Network, *, runner: Runner, limits: BulkLimits | None = None) -> None:
        self._network = network
        self.runner = runner
        self.limits = limits or BulkLimits()
        self._offers: dict[Key, _Offer] = {}
        self._new_offer = trio.lowlevel.ParkingLot()
        self._channels = Channels(network, PROTOCOL, idle=self.limits.streams)
        self._slots: dict[PeerId, trio.Semaphore] = {}  # of peers that are fetched from
        self._connections: dict[BulkConnection, None] = {}
        self._running = False
        self.violations = Violations(PROTOCOL)
        network.serve(PROTOCOL, self._serve_stream)

    # -- offering

    def offer(
        self,
        key: Key,
        buffer: bytes | bytearray | memoryview | StreamingBuffer,
        *,
        to: frozenset[PeerId] | None = None,
    ) -> None:
        """Let peers (`to`, or any) fetch `buffer` under `key` until withdrawn, in place of what was offered there.

        The buffer is not copied: what is ready of it must not change before `withdraw`, which ends the growth of one
        that grows.
        """
        if not 0 < len(key) <= MAX_KEY:
            raise ValueError(f"a key has 1 to {MAX_KEY} parts, not {len(key)}")
        if key in self._offers:
            self._offers[key].withdraw()
        if isinstance(buffer, StreamingBuffer):
            self._offers[key] = _Offer(buffer.buffer, to, growing=buffer)
        else:
            self._offers[key] = _Offer(memoryview(buffer).cast("B"), to)
        self._new_offer.unpark_all()

    def withdraw(self, prefix: Key) -> None:
        """End all offers whose key starts with `prefix`."""
        for key in [key for key in self._offers if key[: len(prefix)] == prefix]:
            self._offers.pop(key).withdraw()

    async def offered(self, key: Key, peer: PeerId, wait: float) -> _Offer | None:
        """The offer of `key` to `peer`, as soon as there is one, for at most `wait` seconds and the longest allowed."""
        with trio.move_on_after(min(wait, self.limits.longest_wait)):
            while True:
                offer = self._offers.get(key)
                if offer is not None and (offer.to is None or peer in offer.to):
                    return offer
                await self._new_offer.park()
        return None

    # -- lifetime

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self._running = True
        try:
            await self._channels.run(task_status=task_status)
        finally:
            self._running = False
            for connection in list(self._connections):
                connection.scope.cancel()

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
        stall: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> memoryview:
        """The bytes that `peer` offers under `key`, at most `max_size`: `into[:size]` or memory of their own.

        The peer may take `wait` seconds to offer them, and send nothing for `stall` seconds in place of the usual ones.
        `progress(n)` gets the bytes in hand so far. Into a StreamingBuffer, a buffer of just its size is fetched, which
        may itself still grow, from what is `kept` on; whole chunks of it become ready, and no hash is checked. Raises
        NotOffered, Corrupt, Unreachable, ProtocolUnsupported or StreamBroken.
        """
        room = into.cast("B") if isinstance(into, memoryview) else into
        stall = self.limits.stall if stall is None else stall
        fetch = BulkFetch(key, room, max_size=max_size, wait=wait, stall=stall, progress=progress)
        slots = self._slots.setdefault(peer, trio.Semaphore(self.limits.streams))
        try:
            async with slots:
                return await self._fetch(peer, fetch)
        finally:
            if slots.value == self.limits.streams:
                self._slots.pop(peer, None)

    async def _fetch(self, peer: PeerId, fetch: BulkFetch) -> memoryview:
        tries = self.limits.tries
        while True:
            before = fetch.chunks
            async with self._channels.lent(peer) as channel:
                try:
                    whole = await fetch.receive(channel, self.runner)
                    channel.clean = True
                    return whole
                except NotOffered:
                    channel.clean = True
                    raise NotOffered(f"{peer} does not offer {fetch.key}") from None
                except WrongHash as error:
                    channel.clean = True
                    self.violations.note(peer, str(error), Kind.LIE)
                    raise
                except WireError as error:
                    self.violations.note(peer, str(error))
                    raise Corrupt(f"{peer} broke the rules of {PROTOCOL}: {error}") from None
                except Stalled:
                    raise
                except (LeftBehind, OtherContents) as error:
                    log.debug("a fetch from %s goes on with another stream: %s", peer, error)
                except StreamBroken:
                    if channel.used:  # it may have broken long ago, and so the other idle ones
                        await self._channels.drop_idle(peer)
                    if fetch.chunks > before:
                        tries = self.limits.tries
                    elif not channel.used:
                        tries -= 1
                        if not tries:
                            raise

    # -- serving

    async def _serve_stream(self, stream: Stream) -> None:
        held = sum(connection.peer == stream.peer for connection in self._connections)
        connection = BulkConnection(self, stream)
        try:
            if held >= self.limits.serves:
                self.violations.note(stream.peer, f"more than {self.limits.serves} streams", Kind.LOAD)
            elif self._running:
                self._connections[connection] = None
                await connection.run()
        finally:
            self._connections.pop(connection, None)
            await close(stream)
