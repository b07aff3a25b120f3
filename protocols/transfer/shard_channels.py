"""Streams on which chunks are asked for and come: opened once, kept between fetches."""

from __future__ import annotations

import mmap

import trio

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.transfer.shard_buffer import NO_ROOM
from swarmnode.protocols.transfer.shard_tree import ShardId, chunk_length, proves
from swarmnode.protocols.transfer.shard_wire import MAX_MESSAGE, PROTOCOL, Piece, ShardLimits, Want
from swarmnode.protocols.wire import WireError, decode, encode


class Channel:
    """A stream to a provider, used for one fetch after another."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._reader = FrameReader(stream, limit=MAX_MESSAGE)
        self.room = NO_ROOM  # where answers are received, one after the other
        self.left_behind = False  # the provider has a better path now

    async def ask(self, wants: list[Want]) -> None:
        await self.stream.send_all(b"".join(frame(encode(want)) for want in wants))

    async def piece(self) -> Piece:
        raw = await self._reader.frame()
        if raw is None:
            raise StreamBroken("the provider ended the stream")
        return decode(Piece, raw, limit=MAX_MESSAGE)

    async def raw(self, size: int) -> memoryview:
        """The next `size` bytes, at most RUN_BYTES, at the beginning of `room`."""
        if len(self.room) < size:
            self.room = memoryview(mmap.mmap(-1, size))  # whole pages: a disk can take chunks from there directly
        filled = 0
        while filled < size:
            part = await self._reader.raw(size - filled)
            if not part:
                raise StreamBroken("the provider ended the stream in the middle of a chunk")
            self.room[filled : filled + len(part)] = part
            filled += len(part)
        return self.room[:size]


class Channels:
    """Open streams to providers, kept between fetches."""

    def __init__(self, network: Network, limits: ShardLimits) -> None:
        self._network = network
        self._limits = limits
        self._idle: dict[PeerId, list[Channel]] = {}
        self._in_use: set[Channel] = set()
        self._moves = 0

    async def take(self, peer: PeerId) -> Channel:
        """An idle stream, or a new one. Raises Unreachable or ProtocolUnsupported."""
        idle = self._idle.get(peer)
        if idle:
            channel = idle.pop()
            if not idle:
                del self._idle[peer]
        else:
            moves = self._moves
            channel = Channel(await self._network.open_stream(peer, PROTOCOL, timeout=self._limits.open))
            channel.left_behind = self._moves > moves  # perhaps another peer moved: then a stream is opened in vain
        self._in_use.add(channel)
        return channel

    async def give_back(self, channel: Channel, *, good: bool) -> None:
        """Keep a stream on which nothing is under way; close any other."""
        self._in_use.discard(channel)
        idle = self._idle.setdefault(channel.stream.peer, [])
        if good and not channel.left_behind and len(idle) < self._limits.idle_streams:
            channel.room = NO_ROOM  # no memory while nothing is asked for
            idle.append(channel)
            return
        if not idle:
            del self._idle[channel.stream.peer]
        with trio.CancelScope(shield=True):  # a cancelled task still closes; aclose never waits long
            await channel.stream.aclose()

    async def leave_behind(self, peer: PeerId) -> None:
        """There is a better path to `peer`: close the idle streams, and use none again that is open now."""
        self._moves += 1
        for channel in self._in_use:
            channel.left_behind |= channel.stream.peer == peer
        await self.drop(peer)

    async def drop(self, peer: PeerId) -> None:
        for channel in self._idle.pop(peer, []):
            with trio.CancelScope(shield=True):
                await channel.stream.aclose()

    async def drop_all(self) -> None:
        for peer in list(self._idle):
            await self.drop(peer)

    async def read_one(self, peer: PeerId, shard: ShardId, index: int) -> bytes:
        """One chunk with its proof. Raises NetworkError, or WireError where it is not the chunk asked for."""
        channel = await self.take(peer)
        good = False
        try:
            with trio.move_on_after(self._limits.first_chunk) as scope:
                await channel.ask([Want(shard, index, prove=True)])
                piece = await channel.piece()
                if piece.size >= 0 and not 0 < piece.size == chunk_length(piece.of, index):
                    raise WireError(f"Piece: {piece.size} bytes for chunk {index} of {piece.of} bytes")
                chunk = bytes(await channel.raw(max(piece.size, 0)))
                good = True
            if scope.cancelled_caught:
                raise StreamBroken(f"no chunk within {self._limits.first_chunk:g} s")
        finally:
            await self.give_back(channel, good=good)
        if piece.size < 0:
            raise NetworkError("it does not have the chunk")
        if not proves(shard, piece.of, index, chunk, piece.proof):
            raise WireError("Piece: the proof does not lead to the id")
        return chunk
