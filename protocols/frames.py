"""Frames on a stream: an unsigned varint length, then that many bytes.

The stated length is checked before anything is kept, and memory grows only with bytes that arrived, so a peer that
lies about a length costs what it really sent.
"""

from __future__ import annotations

from swarmnode.protocols.network import Stream, StreamBroken
from swarmnode.protocols.wire import MAX_BYTES, WireError

READ_SIZE = 1 << 16  # what one read asks for: larger reads gain nothing on yamux's 64 KiB frames
MAX_VARINT = 5  # bytes: 35 bits, more than any limit here


def frame(payload: bytes) -> bytes:
    """`payload` behind its length."""
    header, rest = bytearray(), len(payload)
    while rest > 0x7F:
        header.append(rest & 0x7F | 0x80)
        rest >>= 7
    header.append(rest)
    return bytes(header) + payload


class FrameReader:
    """Reads frames, or after them raw bytes, from one stream; one reader a stream, for it reads ahead."""

    def __init__(self, stream: Stream, *, limit: int = MAX_BYTES) -> None:
        self._stream = stream
        self._limit = limit  # the most bytes in one frame
        self._ahead = bytearray()

    async def frame(self) -> bytes | None:
        """The next frame, or None where the peer finished between frames.

        Raises WireError for a length over the limit, StreamBroken where the stream ends inside a frame.
        """
        length = shift = 0
        while True:
            byte = await self._byte()
            if byte is None:
                if shift:
                    raise StreamBroken("the peer finished in the middle of a frame")
                return None
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= 7 * MAX_VARINT:
                raise WireError(f"a frame's length has more than {MAX_VARINT} bytes")
        if length > self._limit:
            raise WireError(f"a frame of {length} bytes, at most {self._limit} allowed")
        while len(self._ahead) < length:
            if not await self._more():
                raise StreamBroken("the peer finished in the middle of a frame")
        with memoryview(self._ahead) as view:
            payload = bytes(view[:length])
        del self._ahead[:length]
        return payload

    async def raw(self, max_bytes: int) -> bytes:
        """At least one and at most `max_bytes` bytes that follow the last frame; b"" at the end."""
        if self._ahead:
            with memoryview(self._ahead) as view:
                piece = bytes(view[:max_bytes])
            del self._ahead[: len(piece)]
            return piece
        return await self._stream.receive_some(min(max_bytes, READ_SIZE))

    async def _byte(self) -> int | None:
        if not self._ahead and not await self._more():
            return None
        byte = self._ahead[0]
        del self._ahead[:1]
        return byte

    async def _more(self) -> bool:
        piece = await self._stream.receive_some(READ_SIZE)
        self._ahead += piece
        return bool(piece)
