"""The fetcher's side of the bulk protocol (`bulk.py`): one fetch, over as many streams as it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio
from blake3 import blake3

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import Stream, StreamBroken
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk_wire import CHUNK, DIGEST, MAX_MESSAGE, Corrupt, Header, Key, NotOffered, Want
from swarmnode.protocols.transfer.streaming import Growing
from swarmnode.protocols.wire import WireError, decode, encode

WORTH_MOVING = 4 * CHUNK  # bytes yet to come for which a fetch leaves a stream on a worse path
HASHED = 16 * CHUNK  # bytes that are hashed at once while the next arrive: a thread is worth waking for 1 ms of work


class LeftBehind(StreamBroken):
    """The stream is whole, and on a path that another has replaced."""


class OtherContents(StreamBroken):
    """What is offered does not continue what is kept: the stream would go on in the middle of it."""


class Stalled(StreamBroken):
    """Nothing came for too long: asking again would wait as long."""


@dataclass(eq=False)
class Channel:
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
    growing: Growing | None  # whose memory `into` is, and who is told of each whole chunk
    max_size: int
    digest: bytes | None
    dtype: str | None
    progress: Callable[[int], None] | None
    stall: float  # seconds without a byte
    wait_until: float  # trio time


class Fetch:
    """A request under way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.target = bytearray()  # what arrived, where the caller gave no memory; grows with what arrives
        self.header: Header | None = None
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

    async def attempt(self, channel: Channel) -> None:
        """Fetch what is missing over one stream."""
        request = self.request
        if request.growing is None:
            self._received -= self._received % CHUNK
            del self.target[self._received :]
        else:
            self._received = max(request.growing.ready, request.growing.kept)
        wait = max(0.0, request.wait_until - trio.current_time())
        with trio.move_on_after(wait + request.stall) as scope:
            await channel.stream.send_all(frame(encode(Want(request.key, self._received, wait))))
            raw = await channel.reader.frame()
        if scope.cancelled_caught:
            raise Stalled(f"no answer to the request for {request.key} within {wait + request.stall:g} s")
        if raw is None:
            raise StreamBroken("the peer ended the stream")
        self.header = self._checked(decode(Header, raw, limit=MAX_MESSAGE))
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

    def _checked(self, header: Header) -> Header:
        request = self.request
        if not header.found:
            raise NotOffered
        if header.size < 0 or (len(header.digest) != DIGEST and request.growing is None):
            raise WireError(f"Header: {header.size} bytes with a hash of {len(header.digest)}")
        if header.size > request.max_size:
            raise Corrupt(f"{request.key} has {header.size} bytes, at most {request.max_size} are allowed")
        if request.growing is not None:
            if header.size != request.growing.size:
                raise Corrupt(f"{request.key} has {header.size} bytes, not {request.growing.size}")
            if len(header.digest) > DIGEST:
                raise WireError(f"Header: a name of {len(header.digest)} bytes")
            if self.header is None and (header.digest != request.growing.name or not header.digest):
                kept, request.growing.kept, request.growing.name = request.growing.kept, 0, header.digest
                if kept:
                    raise OtherContents(f"{request.key} is not what {kept} bytes were kept of")
        if request.digest is not None and header.digest != request.digest:
            raise Corrupt(f"{request.key} is offered with another hash than the one asked for")
        if request.dtype is not None and header.dtype != request.dtype:
            raise Corrupt(f"{request.key} holds {header.dtype[:32]!r}, not {request.dtype!r}")
        if self.header is not None and header != self.header:
            raise Corrupt(f"{request.key} changed while it was fetched")
        return header

    def _take(self, piece: bytes, size: int, channel: Channel) -> bool:
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
