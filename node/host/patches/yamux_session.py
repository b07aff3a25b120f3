"""A Yamux session in place of py-libp2p's, whose read and write paths hold five defects that cannot be mended apart.

What breaks upstream (py-libp2p 0.8.1, `stream_muxer/yamux/yamux.py`):

- :851 a cancelled `write()` leaves half a frame on the wire; Noise is out of step and the connection dies.
- :288 a reader that stalls for 5 s makes the *writer* fail; a frozen application costs more than its own streams.
- :1546 the receive window is only logged: a peer pushed 400 MiB into memory.
- :1368 the read loop itself waits to hand over a stream (10 unaccepted ones) and to write answers: two peers whose
  sockets are full wait for each other for ever.
- :827 every frame is described for a DEBUG log that nobody reads (half of the CPU time of small frames).

Here frames go through one bounded outbox that a task of its own writes, so cancelling a sender never cuts a frame, a
full socket delays only those who send, and a socket that takes nothing for `WRITE_STALL` seconds, ten times that
through a relay and under the owner's cap, ends the connection.
While nothing waits, a frame is written by whoever sends it, without waking that task; and what is answered to frames
that arrived together goes in one write.
A peer that sends more than its window ends its connection too. A silent connection is pinged, and given up when nothing
at all was heard. Wire format: https://github.com/hashicorp/yamux/blob/master/spec.md.

No longer needed when the `test_stock_yamux_still_…` tests in tests/node/host/test_libp2p_patches.py fail.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque

import trio
from libp2p.abc import ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer import muxer_multistream
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import IN, OUT
from swarmnode.node.host.muxed import (
    INITIAL_WINDOW,
    KEEPALIVE,
    MAX_WINDOW,
    SILENCE,
    MuxedSession,
    MuxedStream,
    StreamReset,
)
from swarmnode.node.host.patches.noise_transport import over
from swarmnode.node.host.tcp import WRITE_STALL, MeteredStream, Piece
from swarmnode.protocols.peers.scoring import Kind

log = logging.getLogger(__name__)

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream id, length or increment
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
MAX_BODY = 256 * 1024  # bytes of one frame: what a fresh window lets in
MAX_FRAME = MAX_BODY + HEADER.size  # bytes
SMALL = 16 * 1024  # bytes of a frame that may pass others
MAX_SMALL = 64 * 1024  # bytes of small frames before their senders wait
MAX_BULK = MAX_FRAME  # bytes of bulk before its senders wait
BATCH = MAX_FRAME + MAX_SMALL  # bytes written at once: frames that come now wait so long for the socket
TURN = 256  # frames taken, or messages opened, without a pause: a ms of work
PROTOCOL_ERROR = 1  # GO_AWAY code
MAX_ANSWERS = 1024  # window updates, pongs and acknowledgements queued for a peer that does not read
CLOSED_HERE = "closed here"
FLUSH = 0.5  # seconds that a polite close waits for the outbox


class YamuxSession(MuxedSession):
    """One connection's streams. `start()` is its lifetime: three tasks that end together."""

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, **_: object) -> None:
        """py-libp2p says besides who dialled, as `secured_conn` does, and names what nobody need call at the end."""
        self.secured_conn = secured_conn
        self._transport = over(secured_conn)
        self.raw = self._transport.raw  # below the encryption: a socket, or a stream to a relay
        super().__init__(peer_id, self.raw.host, is_initiator=secured_conn.is_initiator)
        self.outbox = FrameQueue()
        self._next_id = 1 if self.is_initiator else 2
        self._work = trio.Event()
        self._idle = False  # nothing waits to be written and nobody writes
        self._drained = trio.Event()
        self._messages: deque[bytes] = deque()  # that arrived, and wait
        self._received = b""  # the one at hand
        self._at = 0  # how far it is taken
        self._taking = False  # frames at hand are taken: answers to them gather, and go together
        self._unpaid = 0  # messages that came for which nobody waited yet
        self._heard_at = -float("inf")
        self._pinged_at: float | None = None

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
        if not self.is_closed:
            self.allowance.count(OUT, stream.protocol, len(frame) + len(body))
            self.outbox.put(stream, frame, body)
            self._write_now()

    def answer(self, frame: bytes) -> None:
        """A frame that goes before those of streams."""
        if not self.is_closed:
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

    def widen(self, by: int) -> bool:
        if self._pinged_at is not None or not self._has_room(by):
            return False
        self._widened += by
        self._ping()
        return True

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 == (0 if self.is_initiator else 1)

    def settle(self) -> None:
        if isinstance(self.raw, MeteredStream):
            self.raw.settle(self.allowance)

    async def abandon(self, why: str) -> None:
        """Break all streams and close the socket, without a word to the peer."""
        if not self._break(why):
            return
        self.outbox.room.unpark_all()
        self._drained.set()
        self._wake()
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
                if self.is_closed and not self.outbox:
                    return
            # TCP sees itself whether its socket stalls; what goes through a relay may wait for the owner's cap.
            own = math.inf if isinstance(self.raw, MeteredStream) else WRITE_STALL
            patience = own * (10 if self.host.up.rate else 1)
            try:
                with trio.move_on_after(patience) as scope:
                    await self._transport.write(self.outbox.batch())
            except Exception as error:
                await self.abandon(f"write failed: {error!r}")
                return
            if scope.cancelled_caught:
                await self.abandon(f"the socket took nothing for {patience:.0f} s")
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
                self._heard_at = trio.current_time()
                self._unpaid += len(self._messages)
                if self._unpaid >= TURN:  # opening one costs as much as taking a frame, and it may hold none
                    await self.allowance.wait_for_frames(self._unpaid)
                    self._unpaid = 0
                    if self.is_closed:
                        return False
                self._taking = True
            message = self._messages.popleft()
            self._received = self._received[self._at :] + message if self._at < len(self._received) else message
            self._at = 0
        return True

    async def _read_frames(self) -> None:
        why, taken = "closed by the peer", 0
        try:
            while await self._receive(HEADER.size):
                if (taken := taken + 1) % TURN == 0 and not await self._let_others_run():
                    break
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
        except _ProtocolViolation as violation:
            why = f"broke the protocol: {violation}"
            self.allowance.offended(why, Kind.BREACH)
            self.answer(HEADER.pack(0, GO_AWAY, 0, 0, PROTOCOL_ERROR))
            self._answered()
            await self._flush()
        except Exception as error:
            why = f"read failed: {error!r}"
        self._answered()
        await self.abandon(why)

    async def _let_others_run(self) -> bool:
        """After TURN frames, for which the peer waits; False where the connection ended meanwhile."""
        self._answered()
        if len(self.outbox.answers) > MAX_ANSWERS:
            raise _ProtocolViolation("asks for answers and does not read them")
        await self.allowance.wait_for_frames(TURN)
        self._taking = True
        return not self.is_closed

    async def _read_body(self, stream: YamuxStream | None, length: int) -> bool:
        if length > (MAX_WINDOW if stream is None else stream.receive_window):
            raise _ProtocolViolation(f"sent {length} bytes where its window allows fewer")
        if stream is not None:
            stream.receive_window -= length
            self.allowance.count(IN, stream.protocol, HEADER.size + length)
        while length:
            if self._at >= len(self._received) and not await self._receive(1):
                return False
            chunk = self._received  # whole where it can be: no copy
            if self._at or len(chunk) > length:
                chunk = chunk[self._at : self._at + length]
            self._at += len(chunk)
            length -= len(chunk)
            if stream is not None and not stream.broken:
                stream.feed(chunk)
        return True

    def _on_syn(self, stream_id: int) -> YamuxStream | None:
        if not self._is_theirs(stream_id) or stream_id in self._streams:
            raise _ProtocolViolation(f"opened stream {stream_id}, which is not its to open")
        if not self.allowance.open():
            self.answer(HEADER.pack(0, WINDOW_UPDATE, RST, stream_id, 0))
            return None
        stream = YamuxStream(self, stream_id)
        self.answer(HEADER.pack(0, WINDOW_UPDATE, ACK, stream_id, 0))
        self._let_in(stream)
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

    async def open_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        if self.is_closed:
            raise StreamReset(f"the connection to {self.peer} ended")
        stream = self._streams[self._next_id] = YamuxStream(self, self._next_id)
        self._next_id += 2
        self.outbox.put(stream, HEADER.pack(0, WINDOW_UPDATE, SYN, stream.stream_id, 0))
        self._wake()
        return stream

    async def close(self) -> None:
        """Wait up to FLUSH seconds until what was queued is sent, say goodbye after it, and close."""
        if not self.is_closed and self.event_started.is_set():
            self.ended = CLOSED_HERE  # whoever of the two is done first
            await self._flush()
            if self._idle:  # it went
                self.answer(HEADER.pack(0, GO_AWAY, 0, 0, 0))
                await self._flush()
        with trio.CancelScope(shield=True):
            await self.abandon(CLOSED_HERE)

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()


class _ProtocolViolation(Exception):
    """The peer sent what no honest implementation sends."""


def apply() -> None:
    """Let py-libp2p's upgrader make this session where Yamux is agreed on."""
    muxer_multistream.Yamux = YamuxSession  # type: ignore[misc,assignment]


class YamuxStream(MuxedStream):
    def __init__(self, session: YamuxSession, stream_id: int) -> None:
        super().__init__(session, stream_id)
        self._session = session
        self.send_window = INITIAL_WINDOW
        self.receive_window = INITIAL_WINDOW  # bytes that the peer may still send
        self.in_bulk = 0  # frames that wait in the bulk of the session's outbox

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        session, outbox = self._session, self._session.outbox
        offset = 0
        while offset < len(view):
            size = min(self.send_window, MAX_BODY, len(view) - offset)
            while not self.broken and not (size and outbox.has_room(self, size)):
                await (outbox.room if size else self._writable).park()
                size = min(self.send_window, MAX_BODY, len(view) - offset)
            self._check()
            self.send_window -= size
            session.send(self, HEADER.pack(0, DATA, 0, self.stream_id, size), view[offset : offset + size])
            offset += size
        await trio.lowlevel.checkpoint()  # after queueing, so that the session's writer runs meanwhile

    def send_nowait(self, data: bytes) -> bool:
        session = self._session
        if self.broken or self._finished_sending or not session.outbox.has_room(self, len(data)):
            return False
        if not 0 < len(data) <= min(self.send_window, MAX_BODY):
            return False
        self.send_window -= len(data)
        session.send(self, HEADER.pack(0, DATA, 0, self.stream_id, len(data)) + data)
        return True

    def _send_end(self) -> None:
        self._session.send(self, HEADER.pack(0, WINDOW_UPDATE, FIN, self.stream_id, 0))

    def _send_reset(self, *, sending: bool, receiving: bool) -> None:
        self._session.send(self, HEADER.pack(0, WINDOW_UPDATE, RST, self.stream_id, 0))

    def go_on(self) -> None:
        super().go_on()
        self._session.outbox.room.unpark_all()

    def widen(self, increment: int) -> None:
        self.send_window += increment
        self._writable.unpark_all()

    def _open_window(self, increment: int) -> None:
        self.receive_window += increment
        self._session.answer(HEADER.pack(0, WINDOW_UPDATE, 0, self.stream_id, increment))


class FrameQueue:
    """What waits to be written, in its order: answers first, then what is small, then what is bulk.

    A frame passes those of other streams where it is small and its own stream has nothing waiting in bulk: so a ping, a
    window update or a call overtakes a transfer, and no stream's frames change their order. What passes is bounded, and
    each batch has room for one frame of bulk, so bulk goes on whatever the others send.

    Who puts frames here keeps to `room`; who writes takes `batch` after `batch`.
    """

    def __init__(self) -> None:
        self.room = trio.lowlevel.ParkingLot()  # for those who wait until `has_room`
        self.answers: deque[bytes] = deque()  # that wait
        self._small: deque[bytes] = deque()
        self._small_size = 0
        self._bulk: deque[tuple[YamuxStream, bytes, Piece]] = deque()
        self._bulk_size = 0

    def __bool__(self) -> bool:
        return bool(self.answers or self._small or self._bulk)

    def has_room(self, stream: YamuxStream, size: int) -> bool:
        """Whether the next frame of `stream`, with a body of `size` bytes, need not wait."""
        if size + HEADER.size <= SMALL and not stream.in_bulk:
            return self._small_size < MAX_SMALL
        return self._bulk_size < MAX_BULK

    def answer(self, frame: bytes) -> None:
        """A frame that goes before all others: a full outbox must not look like a dead connection."""
        self.answers.append(frame)

    def put(self, stream: YamuxStream, frame: bytes, body: Piece = b"") -> None:
        """A frame of `stream`, after those before it; a long body is copied only where it may change."""
        size = len(frame) + len(body)
        if size <= SMALL and not stream.in_bulk:
            self._small.append(frame + body if body else frame)
            self._small_size += size
        else:
            if isinstance(body, memoryview) and not isinstance(body.obj, bytes):
                body = bytes(body)
            stream.in_bulk += 1
            self._bulk.append((stream, frame, body))
            self._bulk_size += size

    def batch(self) -> list[Piece]:
        """The next frames to write, at least one where there is any; each in one piece, or in two."""
        taken: list[Piece] = []
        size, most = 0, BATCH - MAX_FRAME if self._bulk else BATCH
        for queue in (self.answers, self._small):
            while queue and (not taken or size + len(queue[0]) <= most):
                taken.append(queue.popleft())
                size += len(taken[-1])
                if queue is self._small:
                    self._small_size -= len(taken[-1])
        while self._bulk:
            stream, frame, body = self._bulk[0]
            whole = len(frame) + len(body)
            if taken and size + whole > BATCH:
                break
            self._bulk.popleft()
            stream.in_bulk -= 1
            taken.append(frame)
            if body:
                taken.append(body)
            size += whole
            self._bulk_size -= whole
        self.room.unpark_all()
        return taken
