"""Streams of the simulated network: two bounded pipes, whose pieces travel over the links of `node.simnet`.

A pipe holds at most WINDOW bytes between `send_all` here and `receive_some` there, in flight or waiting to be read, so
a sender feels a slow reader as it would with yamux. Room comes back the moment bytes are read, without a trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from swarmnode.protocols.network import PeerId, StreamBroken

WINDOW = 256 * 1024  # bytes of one direction of a stream between the two programs: yamux's window
PIECE = 64 * 1024  # bytes that travel as one event: yamux's largest frame in py-libp2p
OVERHEAD = 40  # bytes that each piece costs beside its content: yamux, Noise, TCP and IP, roughly

Send = Callable[[int, Callable[[], None]], None]  # (bytes, what happens on arrival): puts a piece on a link


class Pipe:
    """One direction of a stream."""

    def __init__(self) -> None:
        self.arrived: deque[bytes] = deque()
        self.room = WINDOW
        self.finished = False  # the end has arrived
        self.broken: str | None = None  # why nothing more will come or go
        self.changed = trio.lowlevel.ParkingLot()  # the reader or the writer has a reason to look again

    def put(self, piece: bytes) -> None:
        if self.broken is None:
            self.arrived.append(piece)
            self.changed.unpark_all()

    def finish(self) -> None:
        self.finished = True
        self.changed.unpark_all()

    def break_off(self, why: str, *, keep: bool = False) -> None:
        """Nothing more goes through; `keep` leaves to the reader what has arrived."""
        if self.broken is None:
            self.broken = why
            if not keep:
                self.arrived.clear()
        self.changed.unpark_all()


class SimStream:
    """One end of a stream; `Stream` of protocols.network."""

    def __init__(self, peer: PeerId, outgoing: Pipe, incoming: Pipe, send: Send) -> None:
        self._peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._send = send
        self._eof_sent = False
        self._closed = False
        self._sending = self._receiving = False

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            pipe, rest = self._outgoing, memoryview(data).cast("B")
            self._check_can_send()
            while rest:
                if not pipe.room:
                    await pipe.changed.park()
                    self._check_can_send()
                    continue
                piece = bytes(rest[: min(pipe.room, PIECE)])
                rest = rest[len(piece) :]
                pipe.room -= len(piece)
                self._send(len(piece) + OVERHEAD, lambda piece=piece: pipe.put(piece))  # type: ignore[misc]
        finally:
            self._sending = False

    def send_nowait(self, data: bytes) -> bool:
        """Send all of `data` where that needs no waiting, and say whether it did."""
        pipe = self._outgoing
        if self._sending or self._closed or self._eof_sent or pipe.broken is not None:
            return False
        if not 0 < len(data) <= min(pipe.room, PIECE):
            return False
        pipe.room -= len(data)
        self._send(len(data) + OVERHEAD, lambda: pipe.put(data))
        return True

    def _check_can_send(self) -> None:
        if self._closed or self._eof_sent:
            raise StreamBroken("this side has finished sending")
        if self._outgoing.broken is not None:
            raise StreamBroken(self._outgoing.broken)

    async def receive_some(self, max_bytes: int) -> bytes:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            pipe = self._incoming
            while True:
                if self._closed:
                    raise StreamBroken("this side has closed the stream")
                if pipe.arrived:
                    return self._take(max_bytes)
                if pipe.broken is not None:
                    raise StreamBroken(pipe.broken)
                if pipe.finished:
                    return b""
                await pipe.changed.park()
        finally:
            self._receiving = False

    def _take(self, max_bytes: int) -> bytes:
        pipe = self._incoming
        piece = pipe.arrived.popleft()
        if len(piece) > max_bytes:
            pipe.arrived.appendleft(piece[max_bytes:])
            piece = piece[:max_bytes]
        pipe.room += len(piece)
        pipe.changed.unpark_all()
        return piece

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._eof_sent:
            return
        self._check_can_send()
        self._eof_sent = True
        self._send(OVERHEAD, self._outgoing.finish)

    async def aclose(self) -> None:
        self.drop()

    def end(self) -> None:
        """Finish sending, where that is not done, and stop reading: what was sent still arrives, then its end."""
        if not self._eof_sent and not self._closed and self._outgoing.broken is None:
            self._eof_sent = True
            self._send(OVERHEAD, self._outgoing.finish)
        self.drop()

    def drop(self) -> None:
        """Close without waiting: what was sent still arrives, and then the other side finds the stream ended."""
        if self._closed:
            return
        self._closed = True
        outgoing, incoming, finished = self._outgoing, self._incoming, self._eof_sent

        def tell() -> None:
            if not finished:
                outgoing.break_off("the peer closed the stream", keep=True)
            incoming.break_off("the peer closed the stream")

        if outgoing.broken is None or incoming.broken is None:
            self._send(OVERHEAD, tell)
        incoming.arrived.clear()
        incoming.changed.unpark_all()
        outgoing.changed.unpark_all()

    def break_off(self, why: str) -> None:
        """The connection is gone, at both ends at once."""
        self._outgoing.break_off(why)
        self._incoming.break_off(why)

    @property
    def over(self) -> bool:
        """Closed here, or broken: its connection need not remember it."""
        return self._closed or (self._outgoing.broken is not None and self._incoming.broken is not None)
