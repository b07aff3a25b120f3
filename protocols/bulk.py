"""Large buffers, pulled by name: a node offers bytes under a key, and peers that know the key fetch them.

Protocol `/swarmnode/bulk/1`. Nobody can push: bytes enter a node only where it asked for them and where it made room.

Messages on a stream, which the fetcher opened and uses again for one fetch after another:
- fetcher: `Want(key, offset, wait)`, a frame of at most 4 KiB;
- server: `Header(found, size, digest, dtype)`, a frame, as soon as the key is offered or after `wait` seconds; where
  found, then the `size - offset` raw bytes of the buffer from `offset` on.

Who may fail when, and what is then true:
- the key is not offered, or not to this peer: NotOffered, and the stream stays good;
- size, dtype or digest are not what the fetcher permits: Corrupt before a byte is taken. The bytes do not hash to the
  digest: Corrupt after the last; `into` then holds rubbish;
- the stream breaks: the fetch opens another and goes on from the last whole chunk, until a bounded number in a row
  brought none, then StreamBroken. So a fetch outlives any number of relayed connections that end at their limit;
- the peer moves from a relayed path to a direct one: a fetch with much before it breaks off at the next whole chunk and
  goes on there, idle streams on the old path are closed, and those in use are not used again;
- the peer sends nothing for `stall` seconds: StreamBroken, and it is not asked again. An offer may make its fetchers
  wait for their turn (`protocols.turns`); they then allow for more;
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
from swarmnode.protocols.offences import Kind, Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.turns import Turns
from swarmnode.protocols.wire import WireError, decode, encode

PROTOCOL = "/swarmnode/bulk/1"
CHUNK = 256 * 1024  # bytes between two looks at whether the offer still stands, and the grain of a resumed fetch
MAX_MESSAGE = 4096  # bytes of a Want or a Header
MAX_KEY = 16  # parts of a key
WORTH_MOVING = 4 * CHUNK  # bytes yet to come for which a fetch leaves a stream on a worse path
HASHED = 16 * CHUNK  # bytes that are hashed at once while the next arrive: a thread is worth waking for 1 ms of work

Key = tuple[str | int, ...]  # ("part", run id, round, ballot, index)

STREAMS = Metric("swarmnode_bulk_streams", GAUGE, "streams on which peers fetch buffers from here")
OFFERS = Metric("swarmnode_bulk_offers", GAUGE, "buffers that peers may fetch")

log = logging.getLogger(__name__)


class NotOffered(NetworkError):
    """The peer does not offer the key, or not to this node."""


class Corrupt(NetworkError):
    """The peer's bytes are not what they should be: too many, of another kind, or with another hash."""


class _LeftBehind(StreamBroken):
    """The stream is whole, and on a path that another has replaced."""


class _Stalled(StreamBroken):
    """Nothing came for too long: asking again would wait as long."""


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
class Want:
    """Asks for the bytes under `key` from `offset` on, and allows `wait` seconds for them to be offered."""

    key: tuple[str | int, ...]
    offset: int = 0
    wait: float = 0.0


@dataclass(frozen=True)
class Header:
    """What follows: `size` is that of the whole buffer in bytes, `digest` its blake3."""

    found: bool
    size: int = 0
    digest: bytes = b""
    dtype: str = ""


@dataclass(eq=False)
class _Offer:
    buffer: memoryview
    dtype: str
    to: frozenset[PeerId] | None
    digest: bytes | None = None
    turns: Turns | None = None
    hashing: trio.Lock | None = None
    stands: bool = True


@dataclass(eq=False)
class _Channel:
    """An open stream to a peer that serves us, and its reader."""

    stream: Stream
    reader: FrameReader
    used: bool = False  # an earlier fetch went well on it
    left_behind: bool = False  # the peer has a better path now


class Bulk:
    """Offers buffers to peers and fetches theirs; offers may be made before `run`, all else happens during it."""

    def __init__(self, network: Network, *, runner: Runner, limits: BulkLimits = BulkLimits()) -> None:
        self._network = network
        self._runner = runner
        self._limits = limits
        self._offers: dict[Key, _Offer] = {}
        self._new_offer = trio.lowlevel.ParkingLot()
        self._idle: dict[PeerId, list[_Channel]] = {}
        self._in_use: set[_Channel] = set()
        self._moves = 0
        self._slots: dict[PeerId, tuple[trio.Semaphore, int]] = {}  # and the fetches that hold or await one
        self._desks: dict[_Desk, None] = {}
        self._running = False
        self.offences = Offences(PROTOCOL)
        network.serve(PROTOCOL, self._serve_stream)

    @property
    def me(self) -> PeerId:
        return self._network.me

    # -- offering

    def offer(
        self,
        key: Key,
        buffer: bytes | bytearray | memoryview,
        *,
        dtype: str = "bytes",
        to: frozenset[PeerId] | None = None,
        digest: bytes | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Let peers (`to`, or any) fetch `buffer` under `key` until withdrawn, in place of what was offered there.

        The buffer is not copied: it must not change before `withdraw`. `digest` is its blake3 where that is known.
        With `turns` a peer waits for its turn before it is served, which its fetch must allow for (`stall`).
        """
        if not 0 < len(key) <= MAX_KEY:
            raise ValueError(f"a key has 1 to {MAX_KEY} parts, not {len(key)}")
        replaced = self._offers.get(key)
        if replaced is not None:
            replaced.stands = False
        self._offers[key] = _Offer(memoryview(buffer).cast("B"), dtype, to, digest, turns)
        self._new_offer.unpark_all()

    def withdraw(self, prefix: Key) -> None:
        """End all offers whose key starts with `prefix`."""
        for key in [key for key in self._offers if key[: len(prefix)] == prefix]:
            self._offers.pop(key).stands = False

    async def offered(self, key: Key, peer: PeerId, wait: float) -> _Offer | None:
        """The offer of `key` to `peer`, as soon as there is one and for at most `wait` seconds."""
        with trio.move_on_after(wait):
            while True:
                offer = self._offers.get(key)
                if offer is not None and (offer.to is None or peer in offer.to):
                    return offer
                await self._new_offer.park()
        return None

    async def digest_of(self, offer: _Offer) -> bytes:
        """The offer's blake3, computed once."""
        offer.hashing = offer.hashing or trio.Lock()
        async with offer.hashing:
            if offer.digest is None:
                offer.digest = await self._runner(lambda: blake3(offer.buffer).digest())
        return offer.digest

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
            for desk in list(self._desks):
                desk.scope.cancel()
            for peer in list(self._idle):
                await self._drop_idle(peer)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(STREAMS, lambda: len(self._desks))
        metrics.show(OFFERS, lambda: len(self._offers))
        self.offences.measure(metrics)

    # -- fetching

    async def fetch(
        self,
        peer: PeerId,
        key: Key,
        *,
        into: memoryview | None = None,
        max_size: int,
        wait: float = 0.0,
        digest: bytes | None = None,
        dtype: str | None = None,
        stall: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> bytes | memoryview:
        """The bytes that `peer` offers under `key`, at most `max_size`; `into[:size]` where `into` is given.

        The peer may take `wait` seconds to offer them, and send nothing for `stall` seconds in place of the usual ones,
        where many wait for their turn there. `digest` (blake3, 32 bytes) and `dtype`, where given, must be
        what the peer states. `progress(n)` is told the bytes in hand so far. Raises NotOffered, Corrupt, Unreachable,
        ProtocolUnsupported or StreamBroken.
        """
        stall = self._limits.stall if stall is None else stall
        fetch = _Fetch(key, into, max_size, digest, dtype, progress, stall, trio.current_time() + wait)
        slots, users = self._slots.get(peer, (trio.Semaphore(self._limits.streams), 0))
        self._slots[peer] = (slots, users + 1)
        try:
            async with slots:
                return await self._fetch_and_hash(peer, fetch)
        finally:
            slots, users = self._slots.pop(peer)
            if users > 1:
                self._slots[peer] = (slots, users - 1)

    async def _fetch_and_hash(self, peer: PeerId, fetch: _Fetch) -> bytes | memoryview:
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
        assert fetch.header is not None
        if fetch.digest() != fetch.header.digest:
            self.offences.note(peer, f"the bytes of {fetch.key} do not have the stated hash", Kind.LIE)
            raise Corrupt(f"{peer} sent bytes for {fetch.key} that do not have the stated hash")
        if fetch.into is not None:
            return fetch.into[: fetch.header.size]
        return await self._runner(lambda: bytes(fetch.target))

    async def _fetch(self, peer: PeerId, fetch: _Fetch) -> None:
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
                raise NotOffered(f"{peer} does not offer {fetch.key}") from None
            except WireError as error:
                self.offences.note(peer, str(error))
                raise Corrupt(f"{peer} broke the rules of {PROTOCOL}: {error}") from None
            except _Stalled:
                raise
            except _LeftBehind:
                log.debug("fetching %s from %s goes on over a better path", fetch.key, peer)
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

    async def _checked_out(self, peer: PeerId) -> _Channel:
        idle = self._idle.get(peer)
        if idle:
            channel = idle.pop()
            if not idle:
                del self._idle[peer]
            return channel
        moves = self._moves
        stream = await self._network.open_stream(peer, PROTOCOL, timeout=self._limits.open)
        left_behind = self._moves > moves  # perhaps another peer moved: then a stream is opened in vain
        return _Channel(stream, FrameReader(stream, limit=MAX_MESSAGE), left_behind=left_behind)

    async def _drop_idle(self, peer: PeerId) -> None:
        for channel in self._idle.pop(peer, []):
            await _close(channel.stream)

    # -- serving

    async def _serve_stream(self, stream: Stream) -> None:
        held = sum(desk.peer == stream.peer for desk in self._desks)
        desk = _Desk(self, stream, self._limits)
        try:
            if held >= self._limits.serves:
                self.offences.note(stream.peer, f"more than {self._limits.serves} streams", Kind.LOAD)
            elif self._running:
                self._desks[desk] = None
                await desk.run()
        finally:
            self._desks.pop(desk, None)
            await _close(stream)


class _Fetch:
    """One fetch, over as many streams as it takes."""

    def __init__(
        self,
        key: Key,
        into: memoryview | None,
        max_size: int,
        digest: bytes | None,
        dtype: str | None,
        progress: Callable[[int], None] | None,
        stall: float,
        wait_until: float,
    ) -> None:
        self.key = key
        self.into = None if into is None else into.cast("B")
        self.target = bytearray()  # what arrived, where the caller gave no memory; grows with what arrives
        self.header: Header | None = None
        self._limit = max_size if into is None else min(max_size, into.nbytes)
        self._digest, self._dtype = digest, dtype
        self._progress = progress
        self._stall = stall
        self._wait_until = wait_until
        self._received = 0
        self._hashed = 0  # bytes, whole chunks until the fetch is finished
        self._hasher = blake3()
        self._finished = False
        self._more = trio.lowlevel.ParkingLot()

    async def hash(self, runner: Runner) -> None:
        """Hash what arrives, off the event loop, until the fetch is finished."""
        while True:
            ready = self._received - self._hashed
            if ready < HASHED and not self._finished:
                await self._more.park()
                continue
            if not ready:
                return
            stop = self._received if self._finished else self._received - self._received % CHUNK
            if self.into is None:
                view = memoryview(bytes(memoryview(self.target)[self._hashed : stop]))  # a view of what grows stops it
            else:
                view = self.into[self._hashed : stop]
            await runner(lambda view=view: self._hasher.update(view))  # type: ignore[misc]
            self._hashed = stop

    @property
    def chunks(self) -> int:
        """Whole chunks in hand."""
        return self._received // CHUNK

    def finish(self) -> None:
        """The last byte has come."""
        self._finished = True
        self._more.unpark_all()

    def digest(self) -> bytes:
        """The blake3 of what came, once `hash` is through."""
        return self._hasher.digest()

    async def attempt(self, channel: _Channel) -> None:
        """Fetch what is missing over one stream."""
        stall = self._stall
        self._received -= self._received % CHUNK
        del self.target[self._received :]
        wait = max(0.0, self._wait_until - trio.current_time())
        with trio.move_on_after(wait + stall) as scope:
            await channel.stream.send_all(frame(encode(Want(self.key, self._received, wait))))
            raw = await channel.reader.frame()
        if scope.cancelled_caught:
            raise _Stalled(f"no answer to the request for {self.key} within {wait + stall:g} s")
        if raw is None:
            raise StreamBroken("the peer ended the stream")
        self._check(decode(Header, raw, limit=MAX_MESSAGE))
        assert self.header is not None
        while (left := self.header.size - self._received) > 0:
            if channel.left_behind and left >= WORTH_MOVING:
                if self._received % CHUNK == 0:
                    raise _LeftBehind(f"{self._received} bytes of {self.key} came on a path that was replaced")
                left = CHUNK - self._received % CHUNK
            piece = b""
            with trio.move_on_after(stall) as scope:
                piece = await channel.reader.raw(left)
            if scope.cancelled_caught:
                raise _Stalled(f"nothing of {self.key} came for {stall:g} s, {self._received} bytes in")
            if not piece:
                raise StreamBroken("the peer ended the stream in the middle of a buffer")
            self._take(piece)

    def _check(self, header: Header) -> None:
        if not header.found:
            raise NotOffered
        if header.size < 0 or len(header.digest) != 32:
            raise WireError(f"Header: {header.size} bytes with a hash of {len(header.digest)}")
        if header.size > self._limit:
            raise Corrupt(f"{self.key} has {header.size} bytes, at most {self._limit} are allowed")
        if self._digest is not None and header.digest != self._digest:
            raise Corrupt(f"{self.key} is offered with another hash than the one asked for")
        if self._dtype is not None and header.dtype != self._dtype:
            raise Corrupt(f"{self.key} holds {header.dtype[:32]!r}, not {self._dtype!r}")
        if self.header is not None and header != self.header:
            raise Corrupt(f"{self.key} changed while it was fetched")
        self.header = header

    def _take(self, piece: bytes) -> None:
        if self.into is None:
            self.target += piece
        else:
            self.into[self._received : self._received + len(piece)] = piece
        self._received += len(piece)
        if self._received - self._hashed >= HASHED:
            self._more.unpark_all()
        if self._progress is not None:
            self._progress(self._received)


class _Desk:
    """The server's side of one stream: one request at a time."""

    def __init__(self, bulk: Bulk, stream: Stream, limits: BulkLimits) -> None:
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._bulk = bulk
        self._stream = stream
        self._limits = limits
        self._busy = False

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._or_end, self._read, nursery)

    async def _or_end(self, job: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run `job`; where the peer or the stream fails in it, end the desk."""
        try:
            await job(*args)
        except WireError as error:
            self._bulk.offences.note(self.peer, str(error))
            self.scope.cancel()
        except NetworkError as error:
            log.debug("serving %s ended: %s", self.peer, error)
            self.scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Read on while serving, to notice a fetcher that goes away."""
        reader = FrameReader(self._stream, limit=MAX_MESSAGE)
        while (raw := await reader.frame()) is not None:
            want = decode(Want, raw, limit=MAX_MESSAGE)
            if self._busy:
                raise WireError("Want: sent before the last was served")
            if want.offset < 0 or not 0 <= want.wait < math.inf or len(want.key) > MAX_KEY:
                raise WireError(f"Want: offset {want.offset}, wait {want.wait}, {len(want.key)} parts of a key")
            self._busy = True
            nursery.start_soon(self._or_end, self._serve, want)
        self.scope.cancel()

    async def _serve(self, want: Want) -> None:
        offer = await self._bulk.offered(want.key, self.peer, min(want.wait, self._limits.longest_wait))
        if offer is None or offer.turns is None:
            await self._answer(want, offer)
            return
        async with offer.turns.turn(self.peer):
            await self._answer(want, offer)

    async def _answer(self, want: Want, offer: _Offer | None) -> None:
        digest = b"" if offer is None else await self._bulk.digest_of(offer)
        if offer is None or not offer.stands:
            await self._send(frame(encode(Header(found=False))), last=True)
            return
        size = offer.buffer.nbytes
        if want.offset > size:
            raise WireError(f"Want: offset {want.offset} in {size} bytes")
        header = frame(encode(Header(True, size, digest, offer.dtype)))
        await self._send(header, last=want.offset == size)
        for start in range(want.offset, size, CHUNK):
            if not offer.stands:
                raise StreamBroken("the offer was withdrawn")
            piece = bytes(offer.buffer[start : start + CHUNK])
            await self._send(piece, last=start + CHUNK >= size)

    async def _send(self, piece: bytes, *, last: bool) -> None:
        self._busy = not last  # the fetcher may ask again as soon as it has the last byte
        with trio.move_on_after(self._limits.serve_stall) as scope:
            await self._stream.send_all(piece)
        if scope.cancelled_caught:
            raise StreamBroken(f"it took nothing for {self._limits.serve_stall:g} s")


async def _close(stream: Stream) -> None:
    with trio.CancelScope(shield=True):  # a cancelled task still closes; aclose never waits long
        await stream.aclose()
