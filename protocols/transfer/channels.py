"""Streams to peers that serve us, opened once and used for one request after another.

`Bulk` and `Shards` each keep their own: what differs is what they ask for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from swarmnode.protocols.frames import FrameReader, close, frame
from swarmnode.protocols.network import Network, PeerId, Stream, StreamBroken
from swarmnode.protocols.wire import decode, encode

MAX_MESSAGE = 4096  # bytes of a request, or of what comes before the raw bytes of an answer
OPEN_WITHIN = 10.0  # seconds to open a stream

M = TypeVar("M")


class Channel:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reader = FrameReader(stream, limit=MAX_MESSAGE)
        self.used = False  # something went well on it before: it may have broken since
        self.clean = False  # nothing is under way on it, so that it may be used again
        self.left_behind = False  # the peer has a better path now

    async def ask(self, *requests: Any) -> None:
        await self.stream.send_all(b"".join(frame(encode(request)) for request in requests))

    async def answer(self, kind: type[M]) -> M:
        """The next message. Raises WireError or StreamBroken."""
        raw = await self.reader.frame()
        if raw is None:
            raise StreamBroken("the peer ended the stream")
        return decode(kind, raw, limit=MAX_MESSAGE)

    async def fill(self, room: memoryview) -> None:
        """Fill `room` with the raw bytes that follow. Raises StreamBroken."""
        if not await self.reader.fill(room):
            raise StreamBroken("the peer ended the stream in the middle of its answer")


class Channels:
    """The channels of one protocol. `run` follows the peers; before and after it nothing is kept."""

    def __init__(self, network: Network, protocol: str, *, idle: int) -> None:
        """`idle`: the most channels to one peer that are kept while nobody uses them."""
        self._network = network
        self._protocol = protocol
        self._most = idle
        self._idle: dict[PeerId, list[Channel]] = {}
        self._in_use: set[Channel] = set()
        self._moves = 0
        self._running = False

    @asynccontextmanager
    async def lent(self, peer: PeerId) -> AsyncIterator[Channel]:
        """A channel for the block alone, kept afterwards where the block left it `clean`.

        Raises Unreachable or ProtocolUnsupported.
        """
        channel = self._idle[peer].pop() if self._idle.get(peer) else await self._opened(peer)
        channel.clean = False
        self._in_use.add(channel)
        try:
            yield channel
        finally:
            self._in_use.discard(channel)
            idle = self._idle.setdefault(peer, [])
            if channel.clean and self._running and not channel.left_behind and len(idle) < self._most:
                channel.used = True
                idle.append(channel)
            else:
                await close(channel.stream)
            if not self._idle.get(peer):
                self._idle.pop(peer, None)

    async def _opened(self, peer: PeerId) -> Channel:
        moves = self._moves
        channel = Channel(await self._network.open_stream(peer, self._protocol, timeout=OPEN_WITHIN))
        channel.left_behind = self._moves > moves  # perhaps another peer moved: then a stream is opened in vain
        return channel

    async def drop_idle(self, peer: PeerId) -> None:
        for channel in self._idle.pop(peer, []):
            await close(channel.stream)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Close the idle channels of peers that go away or move, until cancelled, and then all.

        Those in use when a peer moves are used to the end of what is under way, and not again.
        """
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
                        await self.drop_idle(event.peer)
        finally:
            self._running = False
            for peer in list(self._idle):
                await self.drop_idle(peer)
