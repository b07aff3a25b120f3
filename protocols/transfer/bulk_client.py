"""The fetcher's side of the bulk protocol (`bulk.py`): its messages, the buffer that grows, and one fetch.

One fetch goes over as many streams as it takes. What is encoded, fetched or reduced piece by piece goes on through a
`StreamingBuffer` before it is whole: `bulk.Bulk` serves what is ready of it to peers, and fetches into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import trio
from blake3 import blake3

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import NetworkError, Stream, StreamBroken
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.wire import WireError, decode, encode

PROTOCOL = "/swarmnode/bulk/1"
CHUNK = 256 * 1024  # bytes between two looks at whether the offer still stands, and the grain of a resumed fetch
MAX_MESSAGE = 4096  # bytes of a BulkWant or a BulkHeader
MAX_KEY = 16  # parts of a key
DIGEST = 32  # bytes of a blake3

Key = tuple[str | int, ...]  # ("part", run id, round, ballot, index)


class NotOffered(NetworkError):
    """The peer does not offer the key, or not to this node."""


class Corrupt(NetworkError):
    """The peer's bytes are not what they should be: too many, of another kind, or with another hash."""


@dataclass(frozen=True)
class BulkLimits:
    """What fetching and serving may take of this node."""

    streams: int = 8  # fetches from one peer at once; more wait. One that waits for its key to be offered counts
    serves: int = 16  # streams of one peer served here: twice `streams`, for those given up there
    tries: int = 3  # streams in a row that may break without a chunk
    stall: float = 5.0  # seconds without a byte after which a fetch gives up
    serve_stall: float = 30.0  # seconds that a chunk may wait for a peer that does not read
    longest_wait: float = 120.0  # seconds that a peer may wait here for a key to be offered
    open: float = 10.0  # seconds to open a stream


@dataclass(frozen=True)
class BulkWant:
    """Asks for the bytes under `key` from `offset` on, and allows `wait` seconds for them to be offered."""

    key: tuple[str | int, ...]
    offset: int = 0
    wait: float = 0.0


@dataclass(frozen=True)
class BulkHeader:
    """What follows: `size` is that of the whole buffer in bytes, `digest` its blake3, or its name while it grows."""

    found: bool
    size: int = 0
    digest: bytes = b""


class StreamingBuffer:
    """`ready` bytes at the head of `buffer` are good and stay as they are. One task makes it grow, any number wait.

    What is offered may have a `name` that nothing else has: whoever fetched a part of it can go on from there later,
    under another key too. The `kept` bytes at the head of a buffer to fetch into came so, from an offer of that `name`;
    they become good when the source says that it is the same.
    """

    def __init__(self, buffer: bytearray | memoryview, *, name: bytes = b"", kept: int = 0) -> None:
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
HASHED = 16 * CHUNK  # bytes that are hashed at once while the next arrive: a thread is worth waking for 1 ms of work


class LeftBehind(StreamBroken):
    """The stream is whole, and on a path that another has replaced."""


class OtherContents(StreamBroken):
    """What is offered does not continue what is kept: the stream would go on in the middle of it."""


class Stalled(StreamBroken):
    """Nothing came for too long: asking again would wait as long."""


@dataclass(eq=False)
class BulkChannel:
    """An open stream to a peer that serves us, and its reader."""

    stream: Stream
    reader: FrameReader
    used: bool = False  # an earlier fetch went well on it
    left_behind: bool = False  # the peer has a better path now


@dataclass(frozen=True)
class Request:
    """What is asked for, and what the peer may answer."""

    key: Key
    into: memoryview | None  # where it goes; new memory, where there is none
    growing: StreamingBuffer | None  # whose memory `into` is, and who is told of each whole chunk
    max_size: int
    digest: bytes | None
    progress: Callable[[int], None] | None
    stall: float  # seconds without a byte
    wait_until: float  # trio time


class BulkFetch:
    """A request under way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.target = bytearray()  # what arrived, where the caller gave no memory; grows with what arrives
        self.header: BulkHeader | None = None
        self._received = request.growing.kept if request.growing is not None else 0
        self._heard_at = 0.0  # trio time
        self._hashed = 0  # bytes, whole chunks until the fetch is finished
        self._hasher = blake3()
        self._finished = False
        self._more = trio.lowlevel.ParkingLot()

    @property
    def chunks(self) -> int:
        """Whole chunks in hand."""
        return self._received // CHUNK

    def result(self) -> bytes | memoryview:
        """What came, once all of it did."""
        if self.request.into is not None:
            return self.request.into[: self._received]
        return bytes(self.target)

    # -- hashing

    async def hash(self, runner: Runner) -> None:
        """Hash what arrives, off the event loop, until the fetch is finished; nothing of what grows."""
        into = self.request.into
        while self.request.growing is None:
            ready = self._received - self._hashed
            if ready < HASHED and not self._finished:
                await self._more.park()
                continue
            if not ready:
                return
            stop = self._received if self._finished else self._received - self._received % CHUNK
            if into is None:
                view = memoryview(bytes(memoryview(self.target)[self._hashed : stop]))  # a view of what grows stops it
            else:
                view = into[self._hashed : stop]
            await runner(lambda view=view: self._hasher.update(view))  # type: ignore[misc]
            self._hashed = stop

    def finish(self) -> None:
        """The last byte has come."""
        self._finished = True
        self._more.unpark_all()

    def is_as_stated(self) -> bool:
        """Whether what came has the stated hash, once `hash` is through; what grows is not hashed."""
        if self.request.growing is not None:
            return True
        return self.header is not None and self.header.digest == self._hasher.digest()

    # -- receiving

    async def attempt(self, channel: BulkChannel) -> None:
        """BulkFetch what is missing over one stream."""
        request = self.request
        if request.growing is None:
            self._received -= self._received % CHUNK
            del self.target[self._received :]
        else:
            self._received = max(request.growing.ready, request.growing.kept)
        wait = max(0.0, request.wait_until - trio.current_time())
        with trio.move_on_after(wait + request.stall) as scope:
            await channel.stream.send_all(frame(encode(BulkWant(request.key, self._received, wait))))
            raw = await channel.reader.frame()
        if scope.cancelled_caught:
            raise Stalled(f"no answer to the request for {request.key} within {wait + request.stall:g} s")
        if raw is None:
            raise StreamBroken("the peer ended the stream")
        self.header = self._checked(decode(BulkHeader, raw, limit=MAX_MESSAGE))
        if request.growing is not None:
            request.growing.grow(self._received)
        self._heard_at = trio.current_time()
        size = self.header.size
        while self._received < size:
            came = None
            with trio.move_on_at(self._heard_at + request.stall):
                came = await channel.reader.raw_each(lambda piece: self._take(piece, size, channel))
            if came is None and trio.current_time() >= self._heard_at + request.stall:
                raise Stalled(f"nothing of {request.key} came for {request.stall:g} s, {self._received} bytes in")
            if came is False:
                raise StreamBroken("the peer ended the stream in the middle of a buffer")
            if came and self._received < size:
                raise LeftBehind(f"{self._received} bytes of {request.key} came on a path that was replaced")

    def _checked(self, header: BulkHeader) -> BulkHeader:
        request = self.request
        if not header.found:
            raise NotOffered
        if header.size < 0 or (len(header.digest) != DIGEST and request.growing is None):
            raise WireError(f"BulkHeader: {header.size} bytes with a hash of {len(header.digest)}")
        if header.size > request.max_size:
            raise Corrupt(f"{request.key} has {header.size} bytes, at most {request.max_size} are allowed")
        if request.growing is not None:
            if header.size != request.growing.size:
                raise Corrupt(f"{request.key} has {header.size} bytes, not {request.growing.size}")
            if len(header.digest) > DIGEST:
                raise WireError(f"BulkHeader: a name of {len(header.digest)} bytes")
            if self.header is None and (header.digest != request.growing.name or not header.digest):
                kept, request.growing.kept, request.growing.name = request.growing.kept, 0, header.digest
                if kept:
                    raise OtherContents(f"{request.key} is not what {kept} bytes were kept of")
        if request.digest is not None and header.digest != request.digest:
            raise Corrupt(f"{request.key} is offered with another hash than the one asked for")
        if self.header is not None and header != self.header:
            raise Corrupt(f"{request.key} changed while it was fetched")
        return header

    def _take(self, piece: bytes, size: int, channel: BulkChannel) -> bool:
        """Keep what came, and say whether more is to come on this stream."""
        request, start = self.request, self._received
        stop = start + len(piece)
        if stop > size:
            raise WireError(f"{stop} bytes of a buffer of {size}")
        if request.into is None:
            self.target += piece
        else:
            request.into[start:stop] = piece
        self._received = stop
        self._heard_at = trio.current_time()
        if request.growing is not None:
            # a chunk that breaks off is fetched again, and what was handed on stays as it is
            request.growing.grow(stop if stop == size else stop - stop % CHUNK)
        elif stop - self._hashed >= HASHED:
            self._more.unpark_all()
        if request.progress is not None:
            request.progress(stop)
        crossed = stop // CHUNK > start // CHUNK
        return stop < size and not (channel.left_behind and crossed and size - stop >= WORTH_MOVING)
