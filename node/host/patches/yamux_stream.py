"""One stream of a `yamux_session.Session`: its windows, what has arrived and is not read yet, and how it ends.

A stream ends in one of three ways: both sides finished sending; one side reset it; or its connection ended. In the last
two it is `broken`: what had arrived can still be read, then everybody who uses it gets MuxedStreamReset.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

if TYPE_CHECKING:
    from swarmnode.node.host.patches.yamux_session import Session

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream id, length or increment
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
INITIAL_WINDOW = 256 * 1024  # bytes, fixed by the specification
MAX_WINDOW = 4 * 1024 * 1024  # bytes a fast stream may grow to: 40 MiB/s at 100 ms
MEASURE = 0.02  # seconds, at least, over which a reader's rate is measured
UNFELT = 0.004  # seconds of a transfer that a call may wait behind, however short the way
MAX_BODY = 256 * 1024  # bytes of one frame: what a fresh window lets in


class SessionStream(IMuxedStream):
    """One stream. `send_all`, `receive_some` and `send_eof` follow trio; the libp2p names call them."""

    def __init__(self, session: Session, stream_id: int) -> None:
        self.muxed_conn = session
        self._session = session
        self.stream_id = stream_id
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
        """Queue all of `data`; waits for window and outbox. Raises MuxedStreamReset or MuxedStreamClosed."""
        view = memoryview(data).cast("B")
        session, outbox = self._session, self._session.outbox
        offset = 0
        while offset < len(view):
            size = min(self.send_window, MAX_BODY, len(view) - offset)
            while not self.broken and not (size and outbox.has_room(self, size)):
                await (outbox.room if size else self._writable).park()
                size = min(self.send_window, MAX_BODY, len(view) - offset)
            if self.broken:
                raise MuxedStreamReset("the stream was reset or its connection ended")
            if self._finished_sending:
                raise MuxedStreamClosed("the stream is closed for sending")
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
        """At least one byte, or b"" after the other side's end. Raises MuxedStreamReset."""
        if self._chunks or self._finished_receiving or self.broken:
            await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self._finished_receiving:
                return b""
            if self.broken:
                raise MuxedStreamReset("the stream was reset or its connection ended")
            await self._readable.park()
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
            self._took(len(chunk), len(chunk))
        else:
            self._took(len(chunk), len(chunk) + self._session.share.piece)
        return chunk

    async def push_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand what arrives to `sink`, in the task that reads the connection, until `sink` returns False.

        Returns True then; False after the other side's end. Raises MuxedStreamReset, and what `sink` raises.
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
            self._took(len(chunk), len(chunk) + self._session.share.piece)
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
            raise MuxedStreamReset("the stream was reset or its connection ended")
        return not more

    def send_eof_nowait(self) -> None:
        """Finish sending: FIN follows what was queued."""
        if not self._finished_sending and not self.broken:
            self._finished_sending = True
            self._session.send(self, HEADER.pack(0, WINDOW_UPDATE, FIN, self.stream_id, 0))
            self._forget_if_done()

    def abort(self) -> None:
        """Drop the stream in both directions, at once and without waiting."""
        self.queue_reset()
        self.break_off()
        self._chunks.clear()

    def queue_reset(self) -> None:
        if not self.broken and not (self._finished_sending and self._finished_receiving):
            self._session.send(self, HEADER.pack(0, WINDOW_UPDATE, RST, self.stream_id, 0))

    def end(self) -> None:
        """Finish sending and stop reading: what was queued still arrives."""
        self.send_eof_nowait()
        if not self._finished_receiving:
            self.abort()

    def break_off(self) -> None:
        """Nothing more comes or goes: what has arrived can be read, then everyone gets MuxedStreamReset."""
        if self.broken:
            return
        self.broken = True
        self._session.share.give_back(self._unread)
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
        cost = len(chunk) + self._session.share.piece
        if not self._session.share.keep(cost):
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
        self._session.share.give_back(cost)
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

    async def __aenter__(self) -> SessionStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.send_eof_nowait()
