"""What a Yamux session puts on the wire, and in which order: answers first, then what is small, then what is bulk.

A frame passes those of other streams where it is small and its own stream has nothing waiting in bulk: so a ping, a
window update or a call overtakes a transfer, and no stream's frames change their order. What passes is bounded, and
each batch has room for one frame of bulk, so bulk goes on whatever the others send.
Wire format: https://github.com/hashicorp/yamux/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

import trio

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream id, length or increment
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
MAX_BODY = 256 * 1024  # bytes of one frame: what a fresh window lets in
MAX_FRAME = MAX_BODY + HEADER.size  # bytes
SMALL = 16 * 1024  # bytes of a frame that may pass others
MAX_SMALL = 64 * 1024  # bytes of small frames before their senders wait
MAX_BULK = MAX_FRAME  # bytes of bulk before its senders wait
BATCH = MAX_FRAME + MAX_SMALL  # bytes written at once: frames that come now wait so long for the socket

Piece = bytes | memoryview


class Sender(Protocol):
    """A stream, as far as its frames are concerned."""

    in_bulk: int  # of its frames that wait in bulk


class FrameQueue:
    """Who puts frames here keeps to `room`; who writes takes `batch` after `batch`."""

    def __init__(self) -> None:
        self.room = trio.lowlevel.ParkingLot()  # for those who wait until `has_room`
        self._answers: deque[bytes] = deque()
        self._small: deque[bytes] = deque()
        self._small_size = 0
        self._bulk: deque[tuple[Sender, bytes, Piece]] = deque()
        self._bulk_size = 0

    def __bool__(self) -> bool:
        return bool(self._answers or self._small or self._bulk)

    @property
    def answers(self) -> int:
        """How many frames of `answer` wait."""
        return len(self._answers)

    def has_room(self, stream: Sender, size: int) -> bool:
        """Whether the next frame of `stream`, with a body of `size` bytes, need not wait."""
        if size + HEADER.size <= SMALL and not stream.in_bulk:
            return self._small_size < MAX_SMALL
        return self._bulk_size < MAX_BULK

    def answer(self, frame: bytes) -> None:
        """A frame that goes before all others: a full outbox must not look like a dead connection."""
        self._answers.append(frame)

    def put(self, stream: Sender, frame: bytes, body: Piece = b"") -> None:
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
        for queue in (self._answers, self._small):
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
