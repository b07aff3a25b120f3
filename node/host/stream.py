"""A stream of `protocols.network` on a Yamux stream, and how the two sides agree on its protocol.

multistream-select in one round trip: greeting and protocol are sent together, where upstream waits for each answer.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamError

from swarmnode.node.host.patches.yamux_session import YamuxStream
from swarmnode.protocols.network import PeerId, StreamBroken

HANDSHAKE = b"\x13/multistream/1.0.0\n"
MAX_LINE = 512  # bytes of a multistream line


class Libp2pStream:
    """A `protocols.network.Stream` on a Yamux stream."""

    def __init__(self, stream: YamuxStream, peer: PeerId) -> None:
        self._stream = stream
        self._peer = peer

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._stream.send_all(data)
        except MuxedStreamError as error:
            raise StreamBroken(f"stream to {self._peer}: {error}") from error

    def send_nowait(self, data: bytes) -> bool:
        """Send all of `data` where that needs no waiting, and say whether it did."""
        return self._stream.send_nowait(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        try:
            return await self._stream.receive_some(max_bytes)
        except MuxedStreamError as error:
            raise StreamBroken(f"stream from {self._peer}: {error}") from error

    async def push_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand what arrives to `sink` without waking a task for it; True once `sink` returned False, False at the end.

        Raises StreamBroken, and what `sink` raises.
        """
        try:
            return await self._stream.push_to(sink)
        except MuxedStreamError as error:
            raise StreamBroken(f"stream from {self._peer}: {error}") from error

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._stream.broken:
            raise StreamBroken(f"stream to {self._peer} is broken")
        self._stream.send_eof_nowait()

    async def aclose(self) -> None:
        self._stream.abort()


class Refused(Exception):
    """The other side answered "na"."""


async def agree(stream: YamuxStream, protocol: str) -> None:
    """Ask for `protocol`. Raises Refused, or MuxedStreamError where the stream ended."""
    line = protocol.encode() + b"\n"
    if len(line) > 127:
        raise ValueError(f"a protocol id has at most 126 bytes: {protocol}")
    await stream.send_all(HANDSHAKE + bytes([len(line)]) + line)
    if await _line(stream) != HANDSHAKE[1:] or await _line(stream) != line:
        stream.abort()
        raise Refused


async def _line(stream: YamuxStream) -> bytes:
    size = shift = 0
    while True:
        byte = (await _exactly(stream, 1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > MAX_LINE or shift > 14:
        raise Refused
    return await _exactly(stream, size)


async def _exactly(stream: YamuxStream, size: int) -> bytes:
    buffer = b""
    while len(buffer) < size:
        chunk = await stream.receive_some(size - len(buffer))
        if not chunk:
            raise MuxedStreamError("the stream ended early")
        buffer += chunk
    return buffer
