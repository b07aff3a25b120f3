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

from swarmnode.protocols.network import NetworkError, StreamBroken
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.channels import Channel
from swarmnode.protocols.wire import WireError

PROTOCOL = "/swarmnode/bulk/1"
CHUNK = 256 * 1024  # bytes between two looks at whether the offer still stands, and the grain of a resumed fetch
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
HASHED = 16 * CHUNK  # bytes that are hashed at once: a thread is worth waking for 1 ms of work


class LeftBehind(StreamBroken):
    """The stream is whole, and on a path that another has replaced."""


class OtherContents(StreamBroken):
    """What is offered does not continue what is kept: the stream would go on in the middle of it."""


class Stalled(StreamBroken):
    """Nothing came for too long: asking again would wait as long."""


class WrongHash(Corrupt):
    """All bytes came, and do not have the stated hash."""


class BulkFetch:
    """One buffer on its way here, over as many streams as it takes."""

    def __init__(
        self,
        key: Key,
        into: memoryview | StreamingBuffer | None,
        *,
        max_size: int,
        wait: float,
        stall: float,
        progress: Callable[[int], None] | None,
    ) -> None:
        """As `Bulk.fetch` says."""
        self.key = key
        self.stall = stall  # seconds without a byte
        self._wait_until = trio.current_time() + wait
        self._progress = progress
        self._growing = into if isinstance(into, StreamingBuffer) else None
        self._buffer = into.buffer if isinstance(into, StreamingBuffer) else into  # None until the size is known
        self._max_size = max_size if self._buffer is None else min(max_size, self._buffer.nbytes)
        self._header: BulkHeader | None = None
        self._received = self._growing.kept if self._growing is not None else 0
        self._moved_at = 0.0  # trio time
        self._hashed = 0  # bytes; of what grows nothing is hashed
        self._hasher = blake3()

    @property
    def chunks(self) -> int:
        """Whole chunks in hand."""
        return self._received // CHUNK

    async def receive(self, channel: Channel, runner: Runner) -> memoryview:
        """Receive what is missing over one stream; all of it. Raises WireError or NetworkError."""
        header = await self._answer(channel)
        if self._buffer is None:
            self._buffer = memoryview(bytearray(header.size))  # takes memory where it is written to
        buffer, size = self._buffer[: header.size], header.size
        self._moved_at = trio.current_time()
        while self._received < size:
            came = None
            with trio.move_on_at(self._moved_at + self.stall):
                came = await channel.reader.raw_each(lambda piece: self._insert(piece, buffer, channel))
            if came is None and trio.current_time() >= self._moved_at + self.stall:
                raise Stalled(f"nothing of {self.key} came for {self.stall:g} s, {self._received} bytes in")
            if came is False:
                raise StreamBroken("the peer ended the stream in the middle of a buffer")
            await self._hash(buffer, runner)
            if came and self._leaves(channel, size):
                raise LeftBehind(f"{self._received} bytes of {self.key} came on a path that was replaced")
        if self._growing is None and header.digest != self._hasher.digest():
            raise WrongHash(f"the bytes of {self.key} do not have the stated hash")
        return buffer

    async def _answer(self, channel: Channel) -> BulkHeader:
        """Ask for what is missing; what the peer says of it."""
        growing = self._growing
        self._received = max(growing.ready, growing.kept) if growing is not None else self.chunks * CHUNK
        wait = max(0.0, self._wait_until - trio.current_time())
        with trio.move_on_after(wait + self.stall) as scope:
            await channel.ask(BulkWant(self.key, self._received, wait))
            header = await channel.answer(BulkHeader)
        if scope.cancelled_caught:
            raise Stalled(f"no answer to the request for {self.key} within {wait + self.stall:g} s")
        if not header.found:
            raise NotOffered
        if header.size < 0 or (len(header.digest) != DIGEST if growing is None else len(header.digest) > DIGEST):
            raise WireError(f"BulkHeader: {header.size} bytes with a hash or a name of {len(header.digest)}")
        if header.size > self._max_size:
            raise Corrupt(f"{self.key} has {header.size} bytes, at most {self._max_size} are allowed")
        if growing is not None:
            self._continue(growing, header)
        if self._header is not None and header != self._header:
            raise Corrupt(f"{self.key} changed while it was fetched")
        self._header = header
        return header

    def _continue(self, growing: StreamingBuffer, header: BulkHeader) -> None:
        """What is kept of a buffer of that name becomes good; of another, it is let go of."""
        if header.size != growing.size:
            raise Corrupt(f"{self.key} has {header.size} bytes, not {growing.size}")
        if self._header is None and (header.digest != growing.name or not header.digest):
            kept, growing.kept, growing.name = growing.kept, 0, header.digest
            if kept:
                raise OtherContents(f"{self.key} is not what {kept} bytes were kept of")
        growing.grow(self._received)

    def _insert(self, piece: bytes, buffer: memoryview, channel: Channel) -> bool:
        """Keep what came, and say whether to go on reading at once."""
        start, size = self._received, len(buffer)
        stop = start + len(piece)
        if stop > size:
            raise WireError(f"{stop} bytes of a buffer of {size}")
        buffer[start:stop] = piece
        self._received = stop
        self._moved_at = trio.current_time()
        if self._progress is not None:
            self._progress(stop)
        if self._growing is not None:
            # a chunk that breaks off is fetched again, and what was handed on stays as it is
            self._growing.grow(stop if stop == size else stop - stop % CHUNK)
        elif stop - self._hashed >= HASHED:
            return False
        return stop < size and not (stop // CHUNK > start // CHUNK and self._leaves(channel, size))

    def _leaves(self, channel: Channel, size: int) -> bool:
        return channel.left_behind and size - self._received >= WORTH_MOVING

    async def _hash(self, buffer: memoryview, runner: Runner) -> None:
        """Hash what came, whole chunks and in the end the rest, off the event loop: meanwhile more arrives."""
        stop = self._received if self._received == len(buffer) else self.chunks * CHUNK
        if self._growing is None and (stop - self._hashed >= HASHED or stop == len(buffer)):
            view = buffer[self._hashed : stop]
            await runner(lambda: self._hasher.update(view))
            self._hashed = stop
