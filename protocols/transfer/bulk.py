"""Large buffers, pulled by name: a node offers bytes under a key, and peers that know the key fetch them.

Protocol `/swarmnode/bulk/3`. Nobody can push: bytes enter a node only where it asked for them and where it made room.

Messages on a stream, which the fetcher opened and uses again for one fetch after another:
- fetcher: `BulkWant(key, offset, wait)`, a frame of at most 4 KiB;
- server: `BulkHeader(found, size, name)`, a frame, as soon as the key is offered or after `wait` seconds;
  where found, then the `size - offset` raw bytes of the buffer from `offset` on; where `packed`, they are one deflate
  stream (RFC 1951) of Huffman codes, flushed after each chunk and finished after the last. The server packs what its
  owner says is worth it (`offer`), for a fetcher that `packs` and to whom streams are slow; an older one does not.

A buffer may be offered and fetched while it grows (`StreamingBuffer`): its bytes are sent as they become ready, and
handed on chunk by chunk. Nothing is hashed here: that the bytes are the peer's is what the link promises, and whether
they are what they should be, who fetches them looks at. What is offered whole has a name that nothing else has, and
what grows may have one: a fetch goes on behind what came of a buffer of that name before, and begins anew where the
peer states another.

Who may fail when, and what is then true:
- the key is not offered, or not to this peer: NotOffered, and the stream stays good;
- an offer that grows stops growing: its fetchers wait, `stall` seconds and no longer;
- the size is not what the fetcher permits, or the name another than before: Corrupt before a byte is taken;
- the stream breaks: the fetch opens another and goes on from the last whole chunk, until a bounded number in a row
  brought none, then StreamBroken. So a fetch outlives any number of relayed connections that end at their limit;
- the peer moves from a relayed path to a direct one: a fetch with much before it breaks off at the next whole chunk and
  goes on there, idle streams on the old path are closed, and those in use are not used again;
- the peer sends nothing for `stall` seconds: StreamBroken, and it is not asked again;
- the offer is withdrawn while it is served: the stream is closed; the fetcher asks again and gets NotOffered. Nobody is
  given a byte of the buffer that was read after `withdraw` returned, so its owner may use it again;
- the fetcher stops reading: its stream is dropped after `serve_stall`; nothing else waits for it.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from swarmnode.protocols.frames import FrameReader, close, frame
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.transfer.channels import MAX_MESSAGE, Channel, Channels
from swarmnode.protocols.wire import WireError, decode, encode

PROTOCOL = "/swarmnode/bulk/3"
CHUNK = 256 * 1024  # bytes between two looks at whether the offer still stands, and the grain of a resumed fetch
MAX_KEY = 16  # parts of a key
MAX_RATES = 1024  # peers of whom it is known how fast streams to them are
SLOW = 5e6  # bytes/s of a stream, of several at once; below, a tenth of the bytes is worth the time to pack them
SLACK = 1024  # bytes that zlib may have held back: of what comes, a code has a bit at least, so no more than eightfold
WINDOW = -9  # a raw deflate stream, which copies nothing from before: all that it gains is in the Huffman codes
NAME = 32  # bytes of a name at the most

log = logging.getLogger(__name__)

Key = tuple[str | int, ...]  # such as ("gossip", run id, round)


class NotOffered(NetworkError):
    """The peer does not offer the key, or not to this node."""


class Corrupt(NetworkError):
    """What the peer sends is not what it should be: too much, something else than before, or against the protocol."""


@dataclass(frozen=True)
class BulkLimits:
    """What fetching and serving may take of this node."""

    streams: int = 8  # fetches from one peer at once; more wait. One that waits for its key to be offered counts
    serves: int = 16  # streams of one peer served here: twice `streams`, for those given up there
    tries: int = 3  # streams in a row that may break without a chunk
    stall: float = 5.0  # seconds without a byte after which a fetch gives up
    serve_stall: float = 30.0  # seconds that a chunk may wait for a peer that does not read
    longest_wait: float = 120.0  # seconds that a request may wait for a key to be offered; who waits longer asks again


@dataclass(frozen=True)
class BulkWant:
    """Asks for the bytes under `key` from `offset` on, and allows `wait` seconds for them to be offered."""

    key: tuple[str | int, ...]
    offset: int = 0
    wait: float = 0.0
    packs: bool = False


@dataclass(frozen=True)
class BulkHeader:
    """What follows: `size` is that of the whole buffer in bytes."""

    found: bool
    size: int = 0
    name: bytes = b""
    packed: bool = False


class StreamingBuffer:
    """`ready` bytes at the head of `buffer` are good and stay as they are. One task makes it grow, any number wait.

    What is offered may have a `name` that nothing else has: whoever fetched a part of it can go on from there later,
    under another key too. The `kept` bytes at the head of a buffer to fetch into came so, from an offer of that `name`;
    they become good when the source says that it is the same.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview, *, name: bytes = b"", kept: int = 0) -> None:
        self.buffer = memoryview(buffer).cast("B")
        self.size = self.buffer.nbytes
        self.ready = 0
        self.name = name
        self.kept = kept
        self._ended = False
        self._awaited = math.inf  # the least that somebody waits for
        self._waiting = trio.lowlevel.ParkingLot()

    def grow(self, ready: int) -> None:
        """The first `ready` bytes are good now."""
        self.ready = max(self.ready, ready)
        if self.ready >= self._awaited:
            self._wake()

    def end(self) -> None:
        """No more comes: nobody waits any longer."""
        self._ended = True
        self._wake()

    async def reach(self, size: int) -> bool:
        """Wait until the first `size` bytes are good; False where they never will be."""
        while self.ready < size and not self._ended:
            self._awaited = min(self._awaited, size)
            await self._waiting.park()
        return self.ready >= size

    def _wake(self) -> None:
        self._awaited = math.inf
        self._waiting.unpark_all()


WORTH_MOVING = 4 * CHUNK  # bytes yet to come for which a fetch leaves a stream on a worse path


class OtherStream(StreamBroken):
    """Go on with another: this one's path was replaced, or it would go on in the middle of what is not kept."""


class Stalled(StreamBroken):
    """Nothing came for too long: asking again would wait as long."""


class BulkFetch:
    """One buffer on its way here, over as many streams as it takes."""

    def __init__(
        self,
        key: Key,
        into: memoryview | StreamingBuffer | None,
        *,
        max_size: int,
        wait: float,
        limits: BulkLimits,
        stall: float | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        """As `Bulk.fetch` says."""
        self.key = key
        self.stall = limits.stall if stall is None else stall  # seconds without a byte
        self._wait_until = trio.current_time() + wait
        self._longest_wait = limits.longest_wait
        self._progress = progress
        self._room = into if isinstance(into, memoryview) else None
        self._buffer = into if isinstance(into, StreamingBuffer) else None  # else None until the size is known
        self._max_size = max_size if self._room is None else min(max_size, self._room.nbytes)
        self._header: BulkHeader | None = None
        self._received = 0
        self._unpacks: zlib._Decompress | None = None  # what the stream brings, where it is packed
        self._moved_at = 0.0  # trio time

    @property
    def chunks(self) -> int:
        return self._received // CHUNK

    async def receive(self, channel: Channel) -> memoryview:
        """Receive what is missing over one stream; all of it. Raises WireError or NetworkError."""
        into = await self._answer(channel)
        size = into.size
        self._moved_at = trio.current_time()
        while self._received < size or (self._unpacks is not None and not self._unpacks.eof):
            came = None
            with trio.move_on_at(self._moved_at + self.stall):
                came = await channel.reader.raw_each(lambda piece: self._insert(piece, into, channel))
            if came is None and trio.current_time() >= self._moved_at + self.stall:
                raise Stalled(f"nothing of {self.key} came for {self.stall:g} s, {self._received} bytes in")
            if came is False:
                raise StreamBroken("the peer ended the stream in the middle of a buffer")
            if came and self._leaves(channel, size):
                raise OtherStream(f"{self._received} bytes of {self.key} came on a path that was replaced")
        channel.clean = True
        return into.buffer

    async def _answer(self, channel: Channel) -> StreamingBuffer:
        """Ask for what is missing, until it is offered or is waited for no longer; what its bytes go into."""
        self._received = max(self._buffer.ready, self._buffer.kept) if self._buffer is not None else 0
        while True:
            asked = trio.current_time()
            wait = min(max(0.0, self._wait_until - asked), self._longest_wait)
            with trio.move_on_after(wait + self.stall) as scope:
                await channel.ask(BulkWant(self.key, self._received, wait, packs=True))
                header = await channel.answer(BulkHeader)
            if scope.cancelled_caught:
                raise Stalled(f"no answer to the request for {self.key} within {wait + self.stall:g} s")
            if header.found:
                break
            if trio.current_time() < asked + wait or trio.current_time() >= self._wait_until:
                channel.clean = True
                raise NotOffered(f"{channel.stream.peer} does not offer {self.key}")
        if header.size < 0 or len(header.name) > NAME:
            raise WireError(f"BulkHeader: {header.size} bytes with a name of {len(header.name)}")
        if header.size > self._max_size:
            raise Corrupt(f"{self.key} has {header.size} bytes, at most {self._max_size} are allowed")
        self._unpacks, header = zlib.decompressobj(WINDOW) if header.packed else None, replace(header, packed=False)
        if self._header is not None and header != self._header:
            raise Corrupt(f"{self.key} changed while it was fetched")
        if self._buffer is None:  # a bytearray takes memory where it is written to
            room = bytearray(header.size) if self._room is None else self._room[: header.size]
            self._buffer = StreamingBuffer(room, name=header.name)
        self._continue(self._buffer, header)
        self._header = header
        return self._buffer

    def _continue(self, into: StreamingBuffer, header: BulkHeader) -> None:
        """What is kept of a buffer of that name becomes good; of another, it is let go of."""
        if header.size != into.size:
            raise Corrupt(f"{self.key} has {header.size} bytes, not {into.size}")
        if self._header is None and (header.name != into.name or not header.name):
            kept, into.kept, into.name = into.kept, 0, header.name
            if kept:
                raise OtherStream(f"{self.key} is not what {kept} bytes were kept of")
        into.grow(self._received)

    def _insert(self, piece: bytes, into: StreamingBuffer, channel: Channel) -> bool:
        """Keep what came, and say whether to go on reading at once."""
        start, size = self._received, into.size
        if self._unpacks is not None:
            try:
                piece = self._unpacks.decompress(piece, min(size - start + 1, 8 * len(piece) + SLACK))
            except zlib.error as error:
                raise WireError(f"what is packed cannot be unpacked: {error}") from None
            if self._unpacks.unconsumed_tail or self._unpacks.unused_data:
                raise WireError("more than was asked for, or than Huffman codes alone could pack")
            if not piece:
                return not self._unpacks.eof
        stop = start + len(piece)
        if stop > size:
            raise WireError(f"{stop} bytes of a buffer of {size}")
        into.buffer[start:stop] = piece
        self._received = stop
        self._moved_at = trio.current_time()
        if self._progress is not None:
            self._progress(stop)
        # A chunk that breaks off is fetched again, and what was handed on stays as it is.
        into.grow(stop if stop == size else stop - stop % CHUNK)
        if stop == size:
            return self._unpacks is not None and not self._unpacks.eof
        return not (stop // CHUNK > start // CHUNK and self._leaves(channel, size))

    def _leaves(self, channel: Channel, size: int) -> bool:
        return channel.left_behind and size - self._received >= WORTH_MOVING


@dataclass(eq=False)
class _Offer:
    buffer: StreamingBuffer  # what is not ready yet is waited for
    to: frozenset[PeerId] | None  # None: any
    packs: bool = False
    stands: bool = True

    def withdraw(self) -> None:
        """Not one byte is read from now on."""
        self.stands = False
        self.buffer.end()


class BulkConnection:
    """One stream of a peer: one request at a time."""

    def __init__(self, bulk: Bulk, stream: Stream) -> None:
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._bulk = bulk
        self._stream = stream
        self._busy = False
        self._sending = trio.Lock()

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, nursery)

    async def _read(self, nursery: trio.Nursery) -> None:
        """Read on while serving, to notice a fetcher that goes away."""
        reader = FrameReader(self._stream, limit=MAX_MESSAGE)
        with self._bulk.violations.serving(self.peer, self.scope):
            while (raw := await reader.frame()) is not None:
                want = decode(BulkWant, raw, limit=MAX_MESSAGE)
                if self._busy:
                    raise WireError("BulkWant: sent before the last was served")
                async with self._sending:  # the last piece too is with the transport, or a peer could have many wait
                    pass
                if want.offset < 0 or not 0 <= want.wait < math.inf or len(want.key) > MAX_KEY:
                    raise WireError(f"BulkWant: offset {want.offset}, wait {want.wait}, {len(want.key)} parts of a key")
                self._busy = True
                nursery.start_soon(self._serve, want)
        self.scope.cancel()

    async def _serve(self, want: BulkWant) -> None:
        with self._bulk.violations.serving(self.peer, self.scope):
            offer = await self._bulk.offered(want.key, self.peer, want.wait)
            if offer is None:
                await self._send(frame(encode(BulkHeader(found=False))), last=True)
                return
            buffer, size = offer.buffer, offer.buffer.size
            if want.offset > size:
                raise WireError(f"BulkWant: offset {want.offset} in {size} bytes")
            slow = self._bulk.rates.get(self.peer, math.inf) < SLOW
            packed = slow and offer.packs and want.packs and want.offset < size
            header = frame(encode(BulkHeader(True, size, buffer.name, packed)))
            await self._send(header, last=want.offset == size)
            packs = zlib.compressobj(1, zlib.DEFLATED, WINDOW, strategy=zlib.Z_HUFFMAN_ONLY) if packed else None
            sent, took = 0, 0.0
            for start in range(want.offset, size, CHUNK):
                stop = min(start + CHUNK, size)
                await buffer.reach(stop)
                if not offer.stands:
                    raise StreamBroken("the offer was withdrawn")
                piece = bytes(buffer.buffer[start:stop])
                if packs is not None:
                    piece = packs.compress(piece) + packs.flush(zlib.Z_FINISH if stop == size else zlib.Z_SYNC_FLUSH)
                began = trio.current_time()
                await self._send(piece, last=stop == size)
                sent, took = sent + len(piece), took + trio.current_time() - began
            if sent >= CHUNK:
                self._bulk.rates[self.peer] = sent / max(took, 1e-9)

    async def _send(self, piece: bytes, *, last: bool) -> None:
        async with self._sending:
            self._busy = not last  # the fetcher may ask again as soon as it has the last byte
            with trio.move_on_after(self._bulk.limits.serve_stall) as scope:
                await self._stream.send_all(piece)
        if scope.cancelled_caught:
            raise StreamBroken(f"it took nothing for {self._bulk.limits.serve_stall:g} s")


class Bulk:
    """Offers buffers to peers and fetches theirs; offers may be made before `run`, all else happens during it."""

    def __init__(self, network: Network, *, limits: BulkLimits | None = None) -> None:
        self.limits = limits or BulkLimits()
        self._offers: dict[Key, _Offer] = {}
        self._new_offer = trio.lowlevel.ParkingLot()
        self._channels = Channels(network, PROTOCOL, idle=self.limits.streams)
        self._slots: dict[PeerId, trio.Semaphore] = {}  # of peers that are fetched from
        self.rates: Recent[PeerId, float] = Recent(MAX_RATES)  # bytes/s that a stream to a peer last carried
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
        packs: bool = False,
    ) -> None:
        """Let peers (`to`, or any) fetch `buffer` under `key` until withdrawn, in place of what was offered there.

        `packs`: whether a Huffman code makes it smaller, which then is done on slow links.

        The buffer is not copied: what is ready of it must not change before `withdraw`, which also ends its growth.
        """
        if not 0 < len(key) <= MAX_KEY:
            raise ValueError(f"a key has 1 to {MAX_KEY} parts, not {len(key)}")
        if key in self._offers:
            self._offers[key].withdraw()
        if not isinstance(buffer, StreamingBuffer):
            buffer = StreamingBuffer(buffer, name=os.urandom(16))
            buffer.grow(buffer.size)
        self._offers[key] = _Offer(buffer, to, packs)
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
        may itself still grow, from what is `kept` on; whole chunks of it become ready. Whoever calls looks whether it
        is what it should be. Raises NotOffered, Corrupt, Unreachable, ProtocolUnsupported or StreamBroken.
        """
        room = into.cast("B") if isinstance(into, memoryview) else into
        fetch = BulkFetch(key, room, max_size=max_size, wait=wait, limits=self.limits, stall=stall, progress=progress)
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
                    return await fetch.receive(channel)
                except WireError as error:
                    self.violations.note(peer, str(error))
                    raise Corrupt(f"{peer} broke the rules of {PROTOCOL}: {error}") from None
                except Stalled:
                    raise
                except OtherStream as error:
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
