"""What the streams of every connection have in common, whichever transport carries them: Yamux over TCP, or QUIC.

A stream ends in one of three ways: both sides finished sending; one side reset it; or its connection ended. In the last
two it is `broken`: what had arrived can still be read, then everybody who uses it gets StreamReset.

A peer may only leave as many bytes unread as its `PeerAllowance` admits. The window of a stream begins at
`INITIAL_WINDOW` and grows to `MAX_WINDOW` where its reader takes more than that in two round trips.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import OTHER, HostAllowance
from swarmnode.protocols.network import PeerId, StreamBroken

log = logging.getLogger(__name__)

MAX_WIDENED = 8 * 1024 * 1024  # bytes by which the receive windows of one connection may grow, all streams together
RTTS = 16  # round-trip times kept
KEEPALIVE = 5.0  # seconds of silence before a ping
SILENCE = 8.0  # further seconds of silence before the connection is given up
INITIAL_WINDOW = 256 * 1024  # bytes; fixed by Yamux's specification
MAX_WINDOW = 4 * 1024 * 1024  # bytes a fast stream may grow to: 40 MiB/s at 100 ms
MEASURE = 0.02  # seconds, at least, over which a reader's rate is measured
UNFELT = 0.004  # seconds of a transfer that a call may wait behind, however short the way
BULK = 1 << 20  # bytes that tell how fast a connection is
PAUSE = 0.5  # seconds without a byte that end a transfer
LONGEST = 20.0  # seconds that so many bytes may take: a trickle of calls tells nothing
RATE_AGE = 120.0  # seconds for which a rate is believed


class UdpAddress(tuple[str, int]):
    """Host and port at the other end of a QUIC connection, told apart from those of a TCP connection."""

    @property
    def multiaddr(self) -> Multiaddr:
        host, port = self
        return Multiaddr(f"/ip{6 if ':' in host else 4}/{host}/udp/{port}/quic-v1")


class StreamReset(StreamBroken, MuxedStreamReset):
    """One side reset the stream, or its connection ended: under the names of our seam and of py-libp2p."""


class StreamClosed(StreamBroken, MuxedStreamClosed):
    """This side has finished sending, under both names."""


class BulkRate:
    """How fast a connection brings what is large, by the last `BULK` bytes that came without a pause."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._measured_at = self._since = self._last = -math.inf  # s
        self._bytes = 0  # since `_since`

    def came(self, size: int, now: float) -> None:
        if now - self._last > PAUSE or now - self._since > LONGEST:
            self._since, self._bytes = now, -size  # how long the first took is not known
        self._bytes += size
        self._last = now
        if self._bytes >= BULK and now > self._since:
            self._rate, self._measured_at = self._bytes / (now - self._since), now
            self._since, self._bytes = now, 0

    def rate(self, now: float) -> float | None:
        """Bytes a second; None where nothing large came lately."""
        return self._rate if now - self._measured_at <= RATE_AGE else None


class MuxedSession(IMuxedConn):
    """One connection's streams. `start()` is its lifetime."""

    is_initiator = is_closed = False

    def __init__(self, peer_id: ID, host: HostAllowance, *, is_initiator: bool) -> None:
        self.peer_id = peer_id
        self.peer: PeerId = str(peer_id)
        self.event_started = trio.Event()
        self.host = host
        self.allowance = host.of(self.peer)  # the same for all connections of the peer
        self.used_at = trio.current_time()  # when a stream last ended
        self.pace = BulkRate()
        self.is_initiator = is_initiator
        self._streams: dict[int, Any] = {}  # of the transport's own kind
        self._opened, self._to_accept = trio.open_memory_channel[Any](math.inf)  # by the peer
        self._unaccepted: set[MuxedStream] = set()  # of these; each keeps its place, even where it was reset
        self._rtts: deque[float] = deque(maxlen=RTTS)
        self._widened = 0  # bytes of all streams' windows beyond their first
        self.ended = ""  # why, once it has

    def settle(self) -> None:
        """The peer is known and registered."""

    def _break(self, why: str) -> bool:
        """Break all streams and let no more be opened; False where the connection had ended before."""
        if self.is_closed:
            return False
        log.debug("connection to %s: %s", self.peer, why)
        self.is_closed, self.ended = True, self.ended or why
        for stream in tuple(self._streams.values()):
            stream.break_off()
        for stream in tuple(self._unaccepted):
            self._count_accepted(stream)
        self._opened.close()
        return True

    @abstractmethod
    def widen(self, by: int) -> bool:
        """Whether a receive window may grow by `by` bytes: once a round trip, if all that it lets in has room."""

    def _let_in(self, stream: MuxedStream) -> None:
        """The peer opened a stream and has a place for it: until it is accepted at least, even where it is reset."""
        self._streams[stream.stream_id] = stream
        self._unaccepted.add(stream)
        self._opened.send_nowait(stream)

    def _count_accepted(self, stream: MuxedStream) -> None:
        if stream in self._unaccepted:
            self._unaccepted.remove(stream)
            if self._streams.get(stream.stream_id) is not stream:  # it is over
                self.allowance.close()

    def forget(self, stream: MuxedStream) -> None:
        if self._streams.get(stream.stream_id) is stream:  # and not another that came after it
            del self._streams[stream.stream_id]
            if self._is_theirs(stream.stream_id) and stream not in self._unaccepted:
                self.allowance.close()
        self.used_at = trio.current_time()
        self._widened -= stream.widened
        stream.widened = 0

    @abstractmethod
    def _is_theirs(self, stream_id: int) -> bool:
        """Whether the peer opened the stream."""

    def rtt(self) -> float:
        """The median of the last round-trip times in seconds, 0.0 until the first is known."""
        return median(self._rtts) if self._rtts else 0.0

    def shortest_rtt(self) -> float:
        """The shortest of the last round trips in seconds: what the way takes without the queues on it."""
        return min(self._rtts, default=0.0)

    def _has_room(self, by: int) -> bool:
        return self._widened + by <= min(MAX_WIDENED, self.allowance.room() // 2)

    # The names that py-libp2p calls.

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self.is_closed

    @property
    def open_streams(self) -> int:
        """Streams of both sides; ours, not called by py-libp2p."""
        return len(self._streams)

    async def accept_stream(self) -> Any:
        try:
            stream = await self._to_accept.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection ended") from None
        self._count_accepted(stream)
        return stream


class MuxedStream(IMuxedStream):
    """One stream, a `protocols.network.Stream`; py-libp2p's names call the same."""

    def __init__(self, session: MuxedSession, stream_id: int) -> None:
        self.muxed_conn = session
        self.peer = session.peer
        self._allowance = session.allowance
        self.stream_id = stream_id
        self.protocol = OTHER  # until the two sides agree on one
        self.received = 0  # bytes that came, with those by which they agreed
        self._target = INITIAL_WINDOW
        self.widened = 0  # bytes by which the window has grown
        self._unannounced = 0  # bytes read and not yet given back to the peer as window
        self._measured_at = trio.current_time()
        self._taken = 0  # bytes read since then
        self._chunks: deque[bytes] = deque()
        self._unread = 0  # bytes that wait in `_chunks`, as the peer's share counts them
        self._sink: Callable[[bytes], bool] | None = None
        self._readable = trio.lowlevel.ParkingLot()
        self._writable = trio.lowlevel.ParkingLot()
        self._finished_sending = False
        self._stopped = False  # the other side reads no more, as QUIC tells
        self.finished = False  # the other side has finished sending
        self.broken = False

    # --- what a transport does in its own way -----------------------------------------------------------------------

    @abstractmethod
    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Queue all of `data`; waits for window and room. Raises StreamReset or StreamClosed."""

    @abstractmethod
    def send_nowait(self, data: bytes) -> bool:
        """Queue all of `data` where that needs no waiting; False where it does, or where `send_all` would fail."""

    @abstractmethod
    def _send_end(self) -> None:
        """Tell the peer that nothing follows what was queued."""

    @abstractmethod
    def _send_reset(self, *, sending: bool, receiving: bool) -> None:
        """Tell the peer that it gets no more of this side, and is to send none."""

    @abstractmethod
    def _open_window(self, increment: int) -> None:
        """Let the peer send so many bytes more."""

    # --- receiving --------------------------------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one byte, or b"" after the other side's end. Raises StreamReset."""
        if self._chunks or self.finished or self.broken:
            await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self.finished:
                return b""
            if self.broken:
                raise self._reset()
            await self._readable.park()
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
            self._took(len(chunk), len(chunk))
        else:
            self._took(len(chunk), len(chunk) + self._allowance.chunk_cost)
        return chunk

    async def push_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand what arrives to `sink`, in the task that reads the connection, until `sink` returns False.

        Returns True then; False after the other side's end. Raises StreamReset, and what `sink` raises.
        """
        await trio.lowlevel.checkpoint()
        failure: Exception | None = None
        more = True

        def guarded(chunk: bytes) -> bool:
            nonlocal failure, more
            try:
                more = sink(chunk)
            except Exception as error:
                failure, more = error, False
            return more

        while self._chunks and more:
            chunk = self._chunks.popleft()
            self._took(len(chunk), len(chunk) + self._allowance.chunk_cost)
            guarded(chunk)
        if more and not self.finished and not self.broken:
            self._sink = guarded
            try:
                await self._readable.park()
            finally:
                self._sink = None
        if failure is not None:
            raise failure
        if more and self.broken:
            raise self._reset()
        return not more

    def feed(self, chunk: bytes) -> None:
        """Keep what arrived for the reader; where the peer left too much unread for that, the stream is reset."""
        self.muxed_conn.pace.came(len(chunk), trio.current_time())
        self.received += len(chunk)
        if self._sink is not None:
            self._took(len(chunk), 0)
            if not self._sink(chunk):
                self._sink = None
                self._readable.unpark_all()
            return
        cost = len(chunk) + self._allowance.chunk_cost
        if not self._allowance.keep(cost):
            self.abort()
            return
        self._chunks.append(chunk)
        self._unread += cost
        self._readable.unpark_all()

    def feed_eof(self) -> None:
        self.finished = True
        self._readable.unpark_all()
        self._forget_if_done()

    def _took(self, size: int, cost: int) -> None:
        if self.broken:
            return
        self._unread -= cost
        self._allowance.give_back(cost)
        self._forget_if_done()
        self._unannounced += size
        self._taken += size
        if self.finished or self._unannounced < self._target // 2:
            return
        increment = self._unannounced
        if self._is_limited() and self.muxed_conn.widen(self._target):
            increment += self._target
            self.widened += self._target
            self._target *= 2
        self._unannounced = 0
        self._open_window(increment)

    def _is_limited(self) -> bool:
        """Whether the window is less than the reader takes in two round trips, by its rate since the last answer.

        The shortest round trip counts, and a rate over some time: a window that follows its own queue, or the burst
        after a pause, grows without end, and calls wait behind what it lets in.
        """
        now, rtt = trio.current_time(), self.muxed_conn.shortest_rtt()
        elapsed = now - self._measured_at
        if elapsed < max(MEASURE, rtt):
            return False
        rate = self._taken / elapsed
        self._measured_at, self._taken = now, 0
        return self._target < min(MAX_WINDOW, 2 * rate * max(rtt, UNFELT))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def send_eof(self) -> None:
        """As `send_eof_nowait`; raises StreamReset where the stream is broken."""
        await trio.lowlevel.checkpoint()
        if self.broken:
            raise self._reset()
        self.send_eof_nowait()

    def send_eof_nowait(self) -> None:
        """Finish sending: the end follows what was queued."""
        if not self._finished_sending and not self.broken:
            self._finished_sending = True
            self._send_end()
            self._forget_if_done()

    def abort(self) -> None:
        """Drop the stream in both directions, at once; after `send_eof` what was queued still arrives."""
        sending, receiving = not self._finished_sending, not self.finished
        if not self.broken and (sending or receiving):
            self._send_reset(sending=sending, receiving=receiving)
        self.break_off()
        self._chunks.clear()

    async def aclose(self) -> None:
        self.abort()

    def break_off(self) -> None:
        """Nothing more comes or goes: what has arrived can be read, then everyone gets StreamReset."""
        if self.broken:
            return
        self.broken = True
        self._allowance.give_back(self._unread)
        self._readable.unpark_all()
        self.go_on()
        self.muxed_conn.forget(self)

    def go_on(self) -> None:
        """There is room to send again, or no more sense in waiting for it."""
        self._writable.unpark_all()

    def _reset(self) -> StreamReset:
        return StreamReset(f"stream to {self.peer}: it was reset or its connection ended")

    def _check(self) -> None:
        """Raises StreamReset or StreamClosed where nothing can be sent any more."""
        if self.broken or self._stopped:
            raise self._reset()
        if self._finished_sending:
            raise StreamClosed(f"stream to {self.peer}: it is closed for sending")

    def _forget_if_done(self) -> None:
        if self._finished_sending and self.finished and not self._chunks:
            self.muxed_conn.forget(self)

    # The names that py-libp2p calls.

    async def read(self, n: int | None = None) -> bytes:
        if n == 0:
            return b""
        chunk = await self.receive_some(n if n is not None and n > 0 else MAX_WINDOW)
        if not chunk:
            raise MuxedStreamEOF("the other side has finished sending")
        return chunk

    async def write(self, data: bytes) -> None:
        await self.send_all(data)

    async def close(self) -> None:
        self.send_eof_nowait()

    reset = aclose

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use trio's cancel scopes")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> MuxedStream:
        return self
