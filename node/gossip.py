"""Publish and subscribe by flooding: every subscriber passes a new message on to all its peers, once.

Stream `/swarmnode/gossip/1`, one long-lived in each direction: frames of a varint length and a msgpack list
[topic, author, nonce, payload, signature]. The signature is the author's over everything before it, so relays cannot
forge; a nonce that was seen is dropped; a peer that sends faster than `RATE` loses what is above it. A node passes on
only topics to which it subscribed. With the tens of peers a node has here, a flood reaches everybody in as few hops as
a mesh and has no heartbeat.

Why not py-libp2p's GossipSub: 7 ms of CPU per delivery, a queue of 32 that drops silently, 10 messages a second and
topic per forwarder, and a heartbeat that wakes an idle node every second.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict

import msgpack
import trio

from swarmnode.protocols.network import MessageHandler, Network, NetworkError, PeerId, Stream

log = logging.getLogger(__name__)

PROTOCOL = "/swarmnode/gossip/1"
DOMAIN = b"swarmnode gossip 1\n"
MAX_MESSAGE = 64 * 1024  # bytes of payload
MAX_FRAME = MAX_MESSAGE + 1024
MAX_TOPIC = 128  # bytes
SEEN = 8192  # nonces remembered
RATE = 200.0  # messages per second from one peer, sustained
BURST = 400.0  # messages that may come at once
QUEUE = 256  # messages waiting for one peer; the oldest go first when it is slow
OPEN_TIMEOUT = 5.0  # seconds


class Gossip:
    """Runs on any Network that opens and serves streams. `run()` owns a sender for each connected peer."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handlers: dict[str, list[MessageHandler]] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._senders: dict[PeerId, trio.MemorySendChannel[bytes]] = {}
        self._nursery: trio.Nursery | None = None
        network.serve(PROTOCOL, self._receive)

    def subscribe(self, topic: str, handler: MessageHandler) -> None:
        self._handlers.setdefault(topic, []).append(handler)

    async def publish(self, topic: str, message: bytes) -> None:
        """Send to all peers. Raises ValueError for a message or topic over the limits."""
        if len(message) > MAX_MESSAGE or len(topic.encode()) > MAX_TOPIC:
            raise ValueError(f"a message is at most {MAX_MESSAGE} bytes and a topic {MAX_TOPIC}")
        nonce = os.urandom(16)
        body = [topic, self._network.me, nonce, message]
        frame = msgpack.packb([*body, self._network.sign(DOMAIN + msgpack.packb(body))])
        self._remember(nonce)
        self._pass_on(frame, skip=())
        await trio.lowlevel.checkpoint()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self._network.watch_peers() as events:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                for view in self._network.peers():
                    self._add(view.peer)
                async for event in events:
                    if not event.up or event.moved:  # what waits is still sent where the peer moved
                        self._drop(event.peer)
                    if event.up:
                        self._add(event.peer)

    def _add(self, peer: PeerId) -> None:
        if peer not in self._senders and self._nursery is not None:
            self._senders[peer], queue = trio.open_memory_channel[bytes](QUEUE)
            self._nursery.start_soon(self._send, peer, queue)

    def _drop(self, peer: PeerId) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.close()

    async def _send(self, peer: PeerId, queue: trio.MemoryReceiveChannel[bytes]) -> None:
        stream: Stream | None = None
        async with queue:
            async for frame in queue:
                try:
                    if stream is None:
                        stream = await self._network.open_stream(peer, PROTOCOL, timeout=OPEN_TIMEOUT)
                    await stream.send_all(_varint(len(frame)) + frame)
                except NetworkError as error:
                    log.debug("no gossip to %s: %s", peer, error)
                    if stream is not None:
                        await stream.aclose()
                    stream = None
        if stream is not None:
            await stream.aclose()

    def _pass_on(self, frame: bytes, *, skip: tuple[PeerId, ...]) -> None:
        for peer, sender in self._senders.items():
            if peer not in skip:
                try:
                    sender.send_nowait(frame)
                except trio.WouldBlock:
                    log.debug("peer %s is slow: one message not passed on", peer)
                except trio.BrokenResourceError:  # all is being cancelled, and who sends to this peer ended first
                    log.debug("the node is ending: one message not passed on")

    async def _receive(self, stream: Stream) -> None:
        tokens, filled_at = BURST, trio.current_time()
        frames = _FrameReader(stream)
        while (frame := await frames.next()) is not None:
            now = trio.current_time()
            tokens = min(BURST, tokens + (now - filled_at) * RATE)
            filled_at = now
            if tokens < 1:
                continue
            tokens -= 1
            await self._deliver(stream.peer, frame)

    async def _deliver(self, sender: PeerId, frame: bytes) -> None:
        match msgpack.unpackb(frame, max_ext_len=0, max_map_len=0, max_array_len=5):
            case [str(topic), str(author), bytes(nonce), bytes(payload), bytes(signature)] if (
                len(nonce) == 16 and len(payload) <= MAX_MESSAGE
            ):
                pass
            case _:
                raise ValueError(f"gossip from {sender} has another shape")
        handlers = self._handlers.get(topic)
        if not handlers or nonce in self._seen or author == self._network.me:
            return
        if not self._network.verify(author, DOMAIN + msgpack.packb([topic, author, nonce, payload]), signature):
            raise ValueError(f"gossip from {sender} carries a signature that is not {author}'s")
        self._remember(nonce)
        self._pass_on(frame, skip=(sender, author))
        for handler in handlers:
            try:
                await handler(author, payload)
            except Exception:
                log.exception("the handler of topic %s failed on a message of %s", topic, author)

    def _remember(self, nonce: bytes) -> None:
        self._seen[nonce] = None
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)


class _FrameReader:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next frame, or None at the stream's end. Raises ValueError for one over the limit."""
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            chunk = await self._stream.receive_some(MAX_FRAME)
            if not chunk:
                return None
            self._buffer += chunk

    def _take(self) -> bytes | None:
        size = 0
        for index, byte in enumerate(self._buffer[:3]):
            size |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if size > MAX_FRAME:
                    raise ValueError(f"a gossip frame of {size} bytes")
                if len(self._buffer) < index + 1 + size:
                    return None
                frame = bytes(self._buffer[index + 1 : index + 1 + size])
                del self._buffer[: index + 1 + size]
                return frame
        if len(self._buffer) >= 3:
            raise ValueError("a gossip frame whose length does not end")
        return None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
