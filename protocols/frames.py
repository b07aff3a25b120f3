"""Frames on a stream: an unsigned varint length, then that many bytes.

The stated length is checked before anything is kept, and memory grows only with bytes that arrived, so a peer that
lies about a length costs what it really sent.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.protocols.network import Stream, StreamBroken
from swarmnode.protocols.wire import MAX_BYTES, WireError

READ_SIZE = 1 << 16  # what one read asks for: larger reads gain nothing on yamux's 64 KiB frames
MAX_VARINT = 5  # bytes: 35 bits, more than any limit here
CUT = "the peer finished in the middle of a frame"


def frame(payload: bytes) -> bytes:
    """`payload` behind its length."""
    size = len(payload)
    if size < 0x80:
        return size.to_bytes(1, "big") + payload
    if size < 0x4000:
        return (size >> 7 | (size & 0x7F | 0x80) << 8).to_bytes(2, "big") + payload
    header = bytearray()
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header) + payload


class FrameReader:
    """Reads frames, or after them raw bytes, from one stream; one reader a stream, for it reads ahead."""

    def __init__(self, stream: Stream, *, limit: int = MAX_BYTES) -> None:
        self._stream = stream
        self._limit = limit  # the most bytes in one frame
        self._ahead = bytearray()
        self._whole = 0  # bytes in `_ahead` below which it holds no whole frame

    async def frame(self) -> bytes | None:
        """The next frame, or None where the peer finished between frames.

        Raises WireError for a length over the limit, StreamBroken where the stream ends inside a frame.
        """
        found = None

        def take(payload: bytes) -> bool:
            nonlocal found
            found = payload
            return False

        await self.each(take)
        return found

    async def each(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take(frame)` for each frame that comes, until it returns False.

        Returns True then, and may be called again for what follows; False where the peer finished between frames.
        Where the stream has `push_to`, `take` is called as the bytes arrive, and no task is woken for it. Raises as
        `frame` does, and what `take` raises.
        """

        def insert(piece: bytes) -> bool:
            self._ahead += piece
            while (payload := self._next()) is not None:
                if not take(payload):
                    return False
            return True

        if not insert(b"") or await self._each_piece(insert):
            return True
        self._check_end()
        return False

    async def fill(self, room: memoryview) -> bool:
        """Fill `room` with the bytes that follow the last frame; False where the stream ends before it is full.

        Where the stream has `push_to`, no task is woken for a piece. Raises StreamBroken.
        """
        size, filled = len(room), 0

        def insert(piece: bytes) -> bool:
            nonlocal filled
            stop = filled + len(piece)
            if stop <= size:
                room[filled:stop] = piece
            else:  # the next frame begins in it
                room[filled:] = memoryview(piece)[: size - filled]
                self._ahead += piece[size - filled :]
            filled = stop
            return stop < size

        return not size or await self.raw_each(insert)

    async def raw_each(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take(piece)` for the bytes that follow the last frame, as they come, until it returns False.

        Returns True then; False at the end. May be cancelled and called again. Where the stream has `push_to`, no task
        is woken for a piece. Raises StreamBroken, and what `take` raises.
        """
        if self._ahead:
            ahead = bytes(self._ahead)
            self._ahead.clear()
            if not take(ahead):
                return True
        return await self._each_piece(take)

    async def _each_piece(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take(piece)` for what the stream brings, until it returns False: True then, and False at the end."""
        push_to = getattr(self._stream, "push_to", None)
        if push_to is not None:
            stopped: bool = await push_to(take)
            return stopped
        while piece := await self._stream.receive_some(READ_SIZE):
            if not take(piece):
                return True
        return False

    def _next(self) -> bytes | None:
        """The frame at the head of `_ahead`, where it is whole."""
        ahead = self._ahead
        if len(ahead) <= self._whole:
            return None
        length = at = 0
        while True:
            if at == len(ahead):
                return None
            byte = ahead[at]
            length |= (byte & 0x7F) << 7 * at
            at += 1
            if byte < 0x80:
                break
            if at >= MAX_VARINT:
                raise WireError(f"a frame's length has more than {MAX_VARINT} bytes")
        if length > self._limit:
            raise WireError(f"a frame of {length} bytes, at most {self._limit} allowed")
        end = at + length
        if len(ahead) < end:
            self._whole = end - 1
            return None
        self._whole = 0
        with memoryview(ahead) as view:
            payload = bytes(view[at:end])
        del ahead[:end]
        return payload

    def _check_end(self) -> None:
        if self._ahead:
            raise StreamBroken(CUT)


async def close(stream: Stream) -> None:
    """Close a stream even where the task was cancelled: `aclose` never waits long."""
    with trio.CancelScope(shield=True):
        await stream.aclose()
