"""Streams to one peer: how both sides agree on a protocol, and protobuf messages behind a length, as libp2p sends them.

multistream-select in one round trip: greeting and protocol are sent together, where upstream waits for each answer.
Messages are read byte for byte: what follows one on the stream belongs to somebody else.

And the `Handlers` of the protocols that this node serves. One that waits for ever for something that another one holds
is wedged, and its peers hear nothing: `answering` finds that out, and has the protocol's handlers ended here. What ends
them gives back what they hold, locks and places.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.abc import INetStream
from libp2p.custom_types import StreamHandlerFn
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import MAX_TEXT
from swarmnode.node.host.muxed import MuxedStream
from swarmnode.protocols.frames import frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, ProtocolUnsupported, Stream, StreamBroken

GREETING = b"\x13/multistream/1.0.0\n"  # of both sides; behind it the protocols that one asks for
MAX_LINE = 512  # bytes of a multistream line
MAX_MESSAGE = 4096  # bytes; a reservation with a voucher and eight addresses takes some 700
ANSWER_WITHIN = 10.0  # seconds

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class BadMessage(NetworkError):
    """The peer sent what no honest implementation sends, or nothing."""


async def agree(stream: MuxedStream, protocol: str) -> None:
    """Ask for `protocol`. Raises ProtocolUnsupported, or StreamBroken where the stream ended; it is dropped then."""
    line = protocol.encode() + b"\n"
    if len(line) > 127:
        raise ValueError(f"a protocol id has at most 126 bytes: {protocol}")
    agreed = False
    try:
        stream.protocol = protocol
        await stream.send_all(GREETING + bytes([len(line)]) + line)
        agreed = await _delimited(stream, MAX_LINE) == GREETING[1:] and await _delimited(stream, MAX_LINE) == line
        if not agreed:
            raise ProtocolUnsupported(f"{stream.peer} does not speak {protocol}")
    except BadMessage as error:
        raise ProtocolUnsupported(f"{stream.peer} does not speak {protocol}: it {error}") from error
    finally:
        if not agreed:
            stream.abort()


async def send(stream: Stream, message: Message) -> None:
    """Raises StreamBroken."""
    await stream.send_all(frame(message.SerializeToString()))


async def receive(stream: Stream, kind: type[M], *, within: float = ANSWER_WITHIN, limit: int = MAX_MESSAGE) -> M:
    """Raises BadMessage, also where the stream ends before the message does."""
    with trio.move_on_after(within):
        message = kind()
        try:
            message.ParseFromString(await _delimited(stream, limit))
        except (DecodeError, StreamBroken) as error:
            raise BadMessage(f"{stream.peer} sent no {kind.__name__}: {error}") from error
        except BadMessage as error:
            raise BadMessage(f"{stream.peer} {error}") from None
        return message
    raise BadMessage(f"{stream.peer} sent no {kind.__name__} within {within:g} s")


async def ask(
    network: Network, peer: PeerId, protocol: str, message: Message, kind: type[M], *, within: float = ANSWER_WITHIN
) -> M:
    """The answer of `peer` to one message, on a stream of its own. Raises NetworkError."""
    stream = await network.open_stream(peer, protocol)
    try:
        await send(stream, message)
        return await receive(stream, kind, within=within)
    finally:
        await stream.aclose()


def peer_bytes(peer: PeerId) -> bytes:
    """A peer id as relays and AutoNAT encode it."""
    return ID.from_string(peer).to_bytes()


def peer_in(raw: bytes) -> PeerId:
    """The peer id that relays and AutoNAT encode so. Raises BadMessage for what is none."""
    if not 0 < len(raw) <= 64:
        raise BadMessage("a peer id is missing or too long")
    return str(ID(raw))


def places_in(packed: Iterable[bytes]) -> tuple[str, ...]:
    """Multiaddrs in a message, without a peer at their ends; those that this node cannot read are left out."""
    places = []
    for raw in packed:
        if len(raw) > MAX_TEXT:  # its text may take the square of that
            continue
        try:
            place = str(Multiaddr(bytes(raw))).partition("/p2p/")[0]
            Multiaddr(place)  # what is read from bytes may be no text, such as a host that is called tcp
            places.append(place)
        except Exception as error:  # multiaddr raises many kinds for what it cannot read
            log.debug("an unreadable address: %r", error)
    return tuple(dict.fromkeys(places))


def multiaddrs_of(addresses: Iterable[str]) -> list[Multiaddr]:
    """As py-libp2p has them; those that it cannot read are left out, such as names with an underscore."""
    found = []
    for address in addresses:
        with suppress(ValueError):
            found.append(Multiaddr(address))
    return found


async def _delimited(stream: Stream, limit: int) -> bytes:
    """Bytes behind their length. Raises BadMessage for a length over the limit, StreamBroken at an early end."""
    size = shift = 0
    while True:
        byte = (await _exactly(stream, 1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 14:
            raise BadMessage(f"states a length of more than {limit} bytes")
    if size > limit:
        raise BadMessage(f"states a length of {size} bytes; at most {limit}")
    return await _exactly(stream, size)


async def _exactly(stream: Stream, size: int) -> bytes:
    buffer = b""
    while len(buffer) < size:
        chunk = await stream.receive_some(size - len(buffer))
        if not chunk:
            raise StreamBroken("the stream ended early")
        buffer += chunk
    return buffer


@dataclass(eq=False)
class _Running:
    stream: MuxedStream
    since: float  # trio time
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Handlers:
    """The handlers that run now, by protocol."""

    def __init__(self) -> None:
        self._running: dict[str, set[_Running]] = {}

    @property
    def protocols(self) -> tuple[str, ...]:
        return tuple(self._running)

    def watched(self, protocol: str, handler: StreamHandlerFn) -> StreamHandlerFn:
        """`handler`, known here while it runs."""
        every = self._running.setdefault(protocol, set())

        async def handle(stream: INetStream) -> None:
            running = _Running(stream.muxed_stream, trio.current_time())  # type: ignore[attr-defined]
            every.add(running)
            try:
                with running.scope:
                    await handler(stream)
                if running.scope.cancelled_caught:
                    running.stream.abort()
            finally:
                every.discard(running)

        return handle

    def waits(self, protocol: str, peer: PeerId, since: float) -> bool:
        """Whether a stream waits that `peer` opened after `since` (trio time) and finished without a request."""
        recent = (each.stream for each in self._running.get(protocol, ()) if each.since >= since)
        asked_for = len(GREETING) + len(protocol) + 2  # bytes that `agree` sends
        return any(each.peer == peer and each.finished and each.received <= asked_for for each in recent)

    def cancel(self, protocol: str) -> None:
        """End all handlers of a protocol; their streams are reset."""
        for running in tuple(self._running.get(protocol, ())):
            running.scope.cancel()
