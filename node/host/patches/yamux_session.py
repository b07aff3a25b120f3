"""A Yamux session in place of py-libp2p's, whose read and write paths hold five defects that cannot be mended apart.

What breaks upstream (py-libp2p 0.8.1, `stream_muxer/yamux/yamux.py`):

- :851 a cancelled `write()` leaves half a frame on the wire; Noise is out of step and the connection dies.
- :288 a reader that stalls for 5 s makes the *writer* fail; a frozen application costs more than its own streams.
- :1546 the receive window is only logged: a peer pushed 400 MiB into memory.
- :1368 the read loop itself waits to hand over a stream (10 unaccepted ones) and to write answers: two peers whose
  sockets are full wait for each other for ever.
- :827 every frame is described for a DEBUG log that nobody reads (half of the CPU time of small frames).

A stream ends in one of three ways: both sides finished sending; one side reset it; or its connection ended. In the last
two it is `broken`: what had arrived can still be read, then everybody who uses it gets StreamReset.

Here frames go through one bounded outbox that a task of its own writes, so cancelling a sender never cuts a frame, a
full socket delays only those who send, and a socket that takes nothing for `WRITE_STALL` seconds ends the connection.
While nothing waits, a frame is written by whoever sends it, without waking that task; and what is answered to frames
that arrived together goes in one write.
A peer that sends more than its window ends its connection too. A silent connection is pinged, and given up when nothing
at all was heard. Wire format: https://github.com/hashicorp/yamux/blob/master/spec.md.

No longer needed when the `test_stock_yamux_still_…` tests in tests/node/host/test_libp2p_patches.py fail.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer import muxer_multistream
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import OTHER
from swarmnode.node.host.patches.noise_transport import over
from swarmnode.node.host.patches.yamux_frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    MAX_BODY,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    FrameQueue,
    Piece,
)
from swarmnode.protocols.network import PeerId, StreamBroken
from swarmnode.protocols.peers.scoring import Kind

log = logging.getLogger(__name__)

PROTOCOL_ERROR = 1  # GO_AWAY code
MAX_ANSWERS = 1024  # window updates, pongs and acknowledgements queued for a peer that does not read
MAX_WIDENED = 8 * 1024 * 1024  # bytes by which the receive windows of one connection may grow, all streams together
RTTS = 16  # round-trip times kept
KEEPALIVE = 5.0  # seconds of silence before a ping
SILENCE = 8.0  # further seconds of silence before the connection is given up
WRITE_STALL = 12.0  # seconds in which the socket must take one frame
FLUSH = 0.5  # seconds that a polite close waits for the outbox
INITIAL_WINDOW = 256 * 1024  # bytes, fixed by the specification
MAX_WINDOW = 4 * 1024 * 1024  # bytes a fast stream may grow to: 40 MiB/s at 100 ms
MEASURE = 0.02  # seconds, at least, over which a reader's rate is measured
UNFELT = 0.004  # seconds of a transfer that a call may wait behind, however short the way


class YamuxSession(IMuxedConn):
    """One connection's streams. `start()` is its lifetime: three tasks that end together."""

    def __init__(
        self,
        secured_conn: ISecureConn,
        peer_id: ID,
        is_initiator: bool | None = None,
        on_close: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.on_close = on_close  # py-libp2p sets it; its SwarmConn learns of the end from accept_stream
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.peer: PeerId = str(peer_id)
        self.outbox = FrameQueue()
        self._initiator = secured_conn.is_initiator if is_initiator is None else is_initiator
        self._next_id = 1 if self._initiator else 2
        self._streams: dict[int, YamuxStream] = {}
        self._opened, self._to_accept = trio.open_memory_channel[YamuxStream](math.inf)  # by the peer
        self._work = trio.Event()
        self._idle = False  # nothing waits to be written and nobody writes
        self._drained = trio.Event()
        self._transport = over(secured_conn)
        self.raw = self._transport.raw  # below the encryption: a socket, or a stream to a relay
        self.allowance = self.raw.host.of(self.peer)  # the same for all connections of the peer
        self._received_of, self._sent_of = self.raw.host.received_of, self.raw.host.sent_of
        self._received_here, self._sent_here = self.allowance.received_of, self.allowance.sent_of
        self._messages: deque[bytes] = deque()  # that arrived, and wait
        self._received = b""  # the one at hand
        self._at = 0  # how far it is taken
        self._taking = False  # frames at hand are taken: answers to them gather, and go together
        self._heard_at = -float("inf")
        self._pinged_at: float | None = None
        self.used_at = trio.current_time()  # when a stream last ended
        self._rtts: deque[float] = deque(maxlen=RTTS)
        self._widened = 0  # bytes of all streams' windows beyond their first
        self._closing = False
        self.ended = ""  # why, once it has

    async def start(self) -> None:
        """Run until either side ends the connection; every stream is broken by then."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_frames)
                nursery.start_soon(self._keep_alive)
                self.event_started.set()
                await self._read_frames()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self.abandon("the connection ended")

    def send(self, stream: YamuxStream, frame: bytes, body: Piece = b"") -> None:
        """A frame of `stream`, a long body by itself."""
        if not self._closing:
            size = len(frame) + len(body)
            self._sent_of[stream.protocol] += size
            self._sent_here[stream.protocol] += size
            self.outbox.put(stream, frame, body)
            self._write_now()

    def answer(self, frame: bytes) -> None:
        """A frame that goes before those of streams."""
        if not self._closing:
            self.outbox.answer(frame)
            self._write_now()

    def _write_now(self) -> None:
        """Write what waits without waking the writer, where nobody writes; while frames are taken, answers gather."""
        if self._idle and not self._taking:
            try:
                gone = self._transport.write_now(self.outbox.batch())
            except Exception:  # the writer meets it again
                gone = False
            if self.outbox or not gone:
                self._wake()

    def _wake(self) -> None:
        self._idle = False
        self._work.set()

    def _answered(self) -> None:
        """The frames at hand are taken: write what they gave rise to."""
        self._taking = False
        if self.outbox:
            self._write_now()

    def forget(self, stream: YamuxStream) -> None:
        if self._streams.pop(stream.stream_id, None) is not None and self._is_theirs(stream.stream_id):
            self.allowance.close()
        self.used_at = trio.current_time()
        self._widened -= stream.widened
        stream.widened = 0

    def widen(self, by: int) -> bool:
        """Whether a receive window may grow by `by` bytes: once a round trip, if all that it lets in has room."""
        if self._pinged_at is not None or self._widened + by > min(MAX_WIDENED, self.allowance.room() // 2):
            return False
        self._widened += by
        self._ping()
        return True

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 == (0 if self._initiator else 1)

    def rtt(self) -> float:
        """The median of the last round-trip times in seconds, 0.0 until the first ping came back."""
        return median(self._rtts) if self._rtts else 0.0

    def shortest_rtt(self) -> float:
        """The shortest of the last round trips in seconds: what the way takes without the queues on it."""
        return min(self._rtts, default=0.0)

    async def abandon(self, why: str) -> None:
        """Break all streams and close the socket, without a word to the peer."""
        if self._closing:
            return
        log.debug("connection to %s: %s", self.peer_id, why)
        self._closing, self.ended = True, why
        for stream in tuple(self._streams.values()):
            stream.break_off()
        self._opened.close()
        self.outbox.room.unpark_all()
        self._drained.set()
        self._wake()
        self.event_closed.set()
        try:
            await self.secured_conn.close()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            log.debug("closing the socket to %s: %s", self.peer_id, error)

    async def _write_frames(self) -> None:
        while True:
            if not self.outbox:
                self._drained.set()
                self._work = trio.Event()
                self._idle = True
                await self._work.wait()
                if self._closing and not self.outbox:
                    return
            try:
                with trio.CancelScope(deadline=trio.current_time() + WRITE_STALL) as scope:
                    await self._transport.write(self.outbox.batch())
            except Exception as error:
                await self.abandon(f"write failed: {error!r}")
                return
            if scope.cancelled_caught:
                await self.abandon(f"the socket took nothing for {WRITE_STALL:.0f} s")
                return

    async def _keep_alive(self) -> None:
        while True:
            asked_at = self._ping()
            await trio.sleep(SILENCE)
            if self._heard_at < asked_at:
                await self.abandon(f"no answer to a ping within {SILENCE:.0f} s")
                return
            while self._heard_at + KEEPALIVE > trio.current_time():  # noqa: ASYNC110
                await trio.sleep_until(self._heard_at + KEEPALIVE)

    def _ping(self) -> float:
        self._pinged_at = now = trio.current_time()
        self.answer(HEADER.pack(0, PING, SYN, 0, int(now * 1000) & 0xFFFFFFFF))
        return now

    async def _receive(self, size: int) -> bool:
        """Have at least `size` bytes in hand; False at the connection's end."""
        while len(self._received) - self._at < size:
            if not self._messages:
                self._answered()
                self._messages.extend(await self._transport.read())
                if not self._messages:
                    return False
                self._taking = True
                self._heard_at = trio.current_time()
            message = self._messages.popleft()
            self._received = self._received[self._at :] + message if self._at < len(self._received) else message
            self._at = 0
        return True

    async def _read_frames(self) -> None:
        why = "closed by the peer"
        try:
            while await self._receive(HEADER.size):
                version, kind, flags, stream_id, length = HEADER.unpack_from(self._received, self._at)
                self._at += HEADER.size
                if version != 0 or kind > GO_AWAY:
                    raise _ProtocolViolation(f"version {version}, frame type {kind}")
                if kind == GO_AWAY:
                    break
                if kind == PING:
                    self._on_ping(flags, length)
                    continue
                stream = self._on_syn(stream_id) if flags & SYN else self._streams.get(stream_id)
                if kind == DATA and not await self._read_body(stream, length):
                    break
                if stream is not None:
                    if kind == WINDOW_UPDATE and length:
                        stream.widen(length)
                    if flags & RST:
                        stream.break_off()
                    elif flags & FIN:
                        stream.feed_eof()
                if self.outbox.answers > MAX_ANSWERS:
                    self._answered()
                    self._taking = True
                if self.outbox.answers > MAX_ANSWERS:
                    raise _ProtocolViolation("asks for answers and does not read them")
        except _ProtocolViolation as violation:
            why = f"broke the protocol: {violation}"
            log.info("peer %s %s; its connection is closed", self.peer_id, why)
            self.allowance.offended(why, Kind.BREACH)
            self.answer(HEADER.pack(0, GO_AWAY, 0, 0, PROTOCOL_ERROR))
            self._answered()
            await self._flush()
        except Exception as error:
            why = f"read failed: {error!r}"
        self._answered()
        await self.abandon(why)

    async def _read_body(self, stream: YamuxStream | None, length: int) -> bool:
        if length > (MAX_WINDOW if stream is None else stream.receive_window):
            raise _ProtocolViolation(f"sent {length} bytes where its window allows fewer")
        if stream is not None:
            stream.receive_window -= length
            self._received_of[stream.protocol] += HEADER.size + length
            self._received_here[stream.protocol] += HEADER.size + length
        while length:
            if self._at >= len(self._received) and not await self._receive(1):
                return False
            chunk = self._received  # whole where it can be: no copy
            if self._at or len(chunk) > length:
                chunk = chunk[self._at : self._at + length]
            self._at += len(chunk)
            length -= len(chunk)
            if stream is not None and not stream.broken and not stream.feed(chunk):
                self.allowance.offended(
                    f"{self.allowance.unread} bytes that nobody read: a stream was reset", Kind.LOAD
                )
                stream.abort()
        return True

    def _on_syn(self, stream_id: int) -> YamuxStream | None:
        if not self._is_theirs(stream_id) or stream_id in self._streams:
            raise _ProtocolViolation(f"opened stream {stream_id}, which is not its to open")
        if not self.allowance.open():
            self.allowance.offended(f"more than {self.allowance.streams} streams", Kind.LOAD)
            self.answer(HEADER.pack(0, WINDOW_UPDATE, RST, stream_id, 0))
            return None
        stream = self._streams[stream_id] = YamuxStream(self, stream_id)
        self.answer(HEADER.pack(0, WINDOW_UPDATE, ACK, stream_id, 0))
        self._opened.send_nowait(stream)
        return stream

    def _on_ping(self, flags: int, nonce: int) -> None:
        if flags & SYN:
            self.answer(HEADER.pack(0, PING, ACK, 0, nonce))
        elif self._pinged_at is not None:
            sample, self._pinged_at = trio.current_time() - self._pinged_at, None
            self._rtts.append(sample)

    async def _flush(self) -> None:
        self._drained = trio.Event()
        self._wake()
        with trio.move_on_after(FLUSH):
            await self._drained.wait()

    # The names that py-libp2p calls.

    @property
    def is_initiator(self) -> bool:
        return self._initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closing

    @property
    def is_closed(self) -> bool:
        return self._closing

    @property
    def open_streams(self) -> int:
        """Streams of both sides; ours, not called by py-libp2p."""
        return len(self._streams)

    async def open_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        if self._closing:
            raise StreamReset(f"the connection to {self.peer} ended")
        stream = self._streams[self._next_id] = YamuxStream(self, self._next_id)
        self._next_id += 2
        self.outbox.put(stream, HEADER.pack(0, WINDOW_UPDATE, SYN, stream.stream_id, 0))
        self._wake()
        return stream

    async def accept_stream(self) -> YamuxStream:
        try:
            return await self._to_accept.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection ended") from None

    async def close(self) -> None:
        """Wait up to FLUSH seconds until what was queued is sent, say goodbye after it, and close."""
        if not self._closing and self.event_started.is_set():
            await self._flush()
            if self._idle:  # it went
                self.answer(HEADER.pack(0, GO_AWAY, 0, 0, 0))
                await self._flush()
        with trio.CancelScope(shield=True):
            await self.abandon("closed here")

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()


class _ProtocolViolation(Exception):
    """The peer sent what no honest implementation sends."""


class StreamReset(StreamBroken, MuxedStreamReset):
    """One side reset the stream, or its connection ended: under the names of our seam and of py-libp2p."""


class StreamClosed(StreamBroken, MuxedStreamClosed):
    """This side has finished sending, under both names."""


def apply() -> None:
    """Let py-libp2p's upgrader make this session where Yamux is agreed on."""
    muxer_multistream.Yamux = YamuxSession  # type: ignore[misc,assignment]


class YamuxStream(IMuxedStream):
    """One stream, a `protocols.network.Stream`; py-libp2p's names call the same."""

    def __init__(self, session: YamuxSession, stream_id: int) -> None:
        self.muxed_conn = session
        self.peer = session.peer
        self._session = session
        self.stream_id = stream_id
        self.protocol = OTHER  # until the two sides agree on one
        self.send_window = INITIAL_WINDOW
        self.receive_window = INITIAL_WINDOW  # bytes that the peer may still send
        self._target = INITIAL_WINDOW
        self.widened = 0  # bytes by which the window has grown
        self._unannounced = 0  # bytes read and not yet given back to the peer as window
        self._measured_at = trio.current_time()
        self._taken = 0  # bytes read since then
        self._chunks: deque[bytes] = deque()
        self._unread = 0  # bytes that wait in `_chunks`, as the peer's share counts them
        self.in_bulk = 0  # frames that wait in the bulk of the session's outbox
        self._sink: Callable[[bytes], bool] | None = None
        self._readable = trio.lowlevel.ParkingLot()
        self._writable = trio.lowlevel.ParkingLot()
        self._finished_sending = False
        self._finished_receiving = False
        self.broken = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Queue all of `data`; waits for window and outbox. Raises StreamReset or StreamClosed."""
        view = memoryview(data).cast("B")
        session, outbox = self._session, self._session.outbox
        offset = 0
        while offset < len(view):
            size = min(self.send_window, MAX_BODY, len(view) - offset)
            while not self.broken and not (size and outbox.has_room(self, size)):
                await (outbox.room if size else self._writable).park()
                size = min(self.send_window, MAX_BODY, len(view) - offset)
            if self.broken:
                raise self._reset()
            if self._finished_sending:
                raise StreamClosed(f"stream to {self.peer}: it is closed for sending")
            self.send_window -= size
            session.send(self, HEADER.pack(0, DATA, 0, self.stream_id, size), view[offset : offset + size])
            offset += size
        await trio.lowlevel.checkpoint()  # after queueing, so that the session's writer runs meanwhile

    def send_nowait(self, data: bytes) -> bool:
        """Queue all of `data` where that needs no waiting; False where it does, or where `send_all` would fail."""
        session = self._session
        if self.broken or self._finished_sending or not session.outbox.has_room(self, len(data)):
            return False
        if not 0 < len(data) <= min(self.send_window, MAX_BODY):
            return False
        self.send_window -= len(data)
        session.send(self, HEADER.pack(0, DATA, 0, self.stream_id, len(data)) + data)
        return True

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one byte, or b"" after the other side's end. Raises StreamReset."""
        if self._chunks or self._finished_receiving or self.broken:
            await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self._finished_receiving:
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
            self._took(len(chunk), len(chunk) + self._session.allowance.chunk_cost)
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
            self._took(len(chunk), len(chunk) + self._session.allowance.chunk_cost)
            guarded(chunk)
        if more and not self._finished_receiving and not self.broken:
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

    @property
    def finished(self) -> bool:
        """Whether the other side has finished sending."""
        return self._finished_receiving

    async def send_eof(self) -> None:
        """As `send_eof_nowait`; raises StreamReset where the stream is broken."""
        await trio.lowlevel.checkpoint()
        if self.broken:
            raise self._reset()
        self.send_eof_nowait()

    def send_eof_nowait(self) -> None:
        """Finish sending: FIN follows what was queued."""
        if not self._finished_sending and not self.broken:
            self._finished_sending = True
            self._session.send(self, HEADER.pack(0, WINDOW_UPDATE, FIN, self.stream_id, 0))
            self._forget_if_done()

    def abort(self) -> None:
        """Drop the stream in both directions, at once and without waiting."""
        if not self.broken and not (self._finished_sending and self._finished_receiving):
            self._session.send(self, HEADER.pack(0, WINDOW_UPDATE, RST, self.stream_id, 0))
        self.break_off()
        self._chunks.clear()

    async def aclose(self) -> None:
        self.abort()

    def end(self) -> None:
        """Finish sending and stop reading: what was queued still arrives."""
        self.send_eof_nowait()
        if not self._finished_receiving:
            self.abort()

    def break_off(self) -> None:
        """Nothing more comes or goes: what has arrived can be read, then everyone gets StreamReset."""
        if self.broken:
            return
        self.broken = True
        self._session.allowance.give_back(self._unread)
        self._readable.unpark_all()
        self._writable.unpark_all()
        self._session.outbox.room.unpark_all()
        self._session.forget(self)

    def feed(self, chunk: bytes) -> bool:
        """Keep what arrived for the reader; False where the peer left too much unread for that."""
        if self._sink is not None:
            self._took(len(chunk), 0)
            if not self._sink(chunk):
                self._sink = None
                self._readable.unpark_all()
            return True
        cost = len(chunk) + self._session.allowance.chunk_cost
        if not self._session.allowance.keep(cost):
            return False
        self._chunks.append(chunk)
        self._unread += cost
        self._readable.unpark_all()
        return True

    def feed_eof(self) -> None:
        self._finished_receiving = True
        self._readable.unpark_all()
        self._forget_if_done()

    def widen(self, increment: int) -> None:
        self.send_window += increment
        self._writable.unpark_all()

    def _took(self, size: int, cost: int) -> None:
        if self.broken:
            return
        self._unread -= cost
        self._session.allowance.give_back(cost)
        self._unannounced += size
        self._taken += size
        if self._finished_receiving or self._unannounced < self._target // 2:
            return
        increment = self._unannounced
        if self._is_limited() and self._session.widen(self._target):
            increment += self._target
            self.widened += self._target
            self._target *= 2
        self._unannounced = 0
        self.receive_window += increment
        self._session.answer(HEADER.pack(0, WINDOW_UPDATE, 0, self.stream_id, increment))

    def _is_limited(self) -> bool:
        """Whether the window is less than the reader takes in two round trips, by its rate since the last answer.

        The shortest round trip counts, and a rate over some time: a window that follows its own queue, or the burst
        after a pause, grows without end, and calls wait behind what it lets in.
        """
        now, rtt = trio.current_time(), self._session.shortest_rtt()
        elapsed = now - self._measured_at
        if elapsed < max(MEASURE, rtt):
            return False
        rate = self._taken / elapsed
        self._measured_at, self._taken = now, 0
        return self._target < min(MAX_WINDOW, 2 * rate * max(rtt, UNFELT))

    def _reset(self) -> StreamReset:
        return StreamReset(f"stream to {self.peer}: it was reset or its connection ended")

    def _forget_if_done(self) -> None:
        if self._finished_sending and self._finished_receiving:
            self._session.forget(self)

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

    async def reset(self) -> None:
        self.abort()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use trio's cancel scopes")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._session.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.send_eof_nowait()
