"""Protobuf messages behind a length, as relays, hole punching and AutoNAT exchange them.

A message is read byte for byte: what follows it on the stream belongs to somebody else.
"""

from __future__ import annotations

from typing import TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.peer.id import ID

from swarmnode.protocols.network import NetworkError, PeerId, Stream

MAX_MESSAGE = 4096  # bytes; a reservation with a voucher and eight addresses takes some 700
ANSWER_WITHIN = 10.0  # seconds

M = TypeVar("M", bound=Message)


class BadMessage(NetworkError):
    """The peer sent what no honest implementation sends, or nothing."""


async def send(stream: Stream, message: Message) -> None:
    """Raises StreamBroken."""
    body = message.SerializeToString()
    size, head = len(body), bytearray()
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    await stream.send_all(bytes(head) + body)


async def receive(stream: Stream, kind: type[M], *, within: float = ANSWER_WITHIN, limit: int = MAX_MESSAGE) -> M:
    """Raises BadMessage or StreamBroken."""
    with trio.move_on_after(within):
        size = shift = 0
        while True:
            byte = (await _exactly(stream, 1))[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 14:
                raise BadMessage(f"{stream.peer} states a length of more than {limit} bytes")
        if size > limit:
            raise BadMessage(f"{stream.peer} states a length of {size} bytes; at most {limit}")
        message = kind()
        try:
            message.ParseFromString(await _exactly(stream, size))
        except DecodeError as error:
            raise BadMessage(f"{stream.peer} sent no {kind.__name__}: {error}") from error
        return message
    raise BadMessage(f"{stream.peer} sent no {kind.__name__} within {within:g} s")


def peer_bytes(peer: PeerId) -> bytes:
    """As relays and AutoNAT name a peer."""
    raw: bytes = ID.from_string(peer).to_bytes()
    return raw


def peer_in(raw: bytes) -> PeerId:
    """Raises BadMessage for what is no peer id."""
    if not 0 < len(raw) <= 64:
        raise BadMessage("a peer id is missing or too long")
    return str(ID(raw))


async def _exactly(stream: Stream, size: int) -> bytes:
    buffer = b""
    while len(buffer) < size:
        chunk = await stream.receive_some(size - len(buffer))
        if not chunk:
            raise BadMessage(f"{stream.peer} ended the stream within a message")
        buffer += chunk
    return buffer
