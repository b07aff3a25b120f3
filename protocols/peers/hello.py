"""The first word between two nodes: which protocol version each speaks, so that a mismatch says who should upgrade.

Protocol `/swarmnode/hello`, the one without a version, and so frozen: messages may only gain fields with defaults.

Messages: the greeter opens a stream and sends its `Hello(major, agent)` as a frame; the other answers with its own,
and both close. Either may stop at any moment; nothing depends on it but the text of an error, and of a warning to the
owner of who was greeted. A peer that does not serve the protocol, or answers something else, is no swarmnode.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio

from swarmnode.protocols.frames import FrameReader, close, frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.wire import WireError, decode, encode

PROTOCOL = "/swarmnode/hello"
PROTOCOL_MAJOR = 2  # the number at the end of the other protocols' ids
MAX_HELLO = 1024  # bytes
MAX_AGENT = 80  # characters of an agent that are shown
MOST_TOLD = 4  # versions, this node's among them: strangers can greet with any number
ANSWER_WITHIN = 10.0  # seconds that a greeter may take to send its Hello


logger = logging.getLogger(__name__)


class Incompatible(NetworkError):
    """The peer speaks another version of the protocols, or none; the text says which side to upgrade."""


@dataclass(frozen=True)
class Hello:
    """Which protocols a node speaks and what it calls itself ("swarmnode/0.1.0")."""

    major: int
    agent: str


async def greet(network: Network, peer: PeerId, *, timeout: float) -> Hello:
    """The peer's Hello, where it speaks our version.

    Raises Incompatible where it does not, Unreachable, ProtocolUnsupported, or StreamBroken, also for silence.
    """
    with trio.move_on_after(timeout):
        stream = await network.open_stream(peer, PROTOCOL, timeout=timeout)
        try:
            with suppress(StreamBroken):  # a peer that speaks first and hangs up has still said who it is
                await stream.send_all(frame(encode(Hello(PROTOCOL_MAJOR, "swarmnode"))))
                await stream.send_eof()
            with _understood(peer):
                raw = await FrameReader(stream, limit=MAX_HELLO).frame()
                if raw is None:
                    raise StreamBroken(f"peer {peer} hung up instead of saying hello")
                theirs = decode(Hello, raw, limit=MAX_HELLO)
        finally:
            await close(stream)
        _check_major(peer, theirs)
        return theirs
    raise StreamBroken(f"peer {peer} did not say hello within {timeout:g} s")


def serve_hello(network: Network, agent: str) -> None:
    """Answer greetings as `agent`; the first of each other version is told to the owner."""
    told: set[int] = set()

    async def answer(stream: Stream) -> None:
        with _understood(stream.peer), trio.move_on_after(ANSWER_WITHIN):
            reader = FrameReader(stream, limit=MAX_HELLO)
            raw = await reader.frame()  # before we answer: whoever has our answer hangs up
            theirs = decode(Hello, raw, limit=MAX_HELLO) if raw else None
            if theirs is not None and theirs.major not in told and len(told) < MOST_TOLD:
                told.add(theirs.major)
                try:
                    _check_major(stream.peer, theirs)
                except Incompatible as why:
                    logger.warning("%s", why)
            await stream.send_all(frame(encode(Hello(PROTOCOL_MAJOR, agent))))
            await stream.send_eof()
            await reader.frame()  # so that closing does not overtake our answer

    network.serve(PROTOCOL, answer)


@contextmanager
def _understood(peer: PeerId) -> Iterator[None]:
    """In the block the peer is to greet. Raises Incompatible, a NetworkError, where it says something else."""
    try:
        yield
    except WireError as error:
        raise Incompatible(f"peer {peer} does not say hello as swarmnode does: {error}") from None


def _check_major(peer: PeerId, theirs: Hello) -> None:
    if theirs.major == PROTOCOL_MAJOR:
        return
    agent = "".join(letter if letter.isprintable() else "?" for letter in theirs.agent[:MAX_AGENT])
    side = "this node" if theirs.major > PROTOCOL_MAJOR else "that peer"
    raise Incompatible(
        f"peer {peer} speaks protocol {theirs.major} ({agent}), this node speaks {PROTOCOL_MAJOR}: upgrade {side}"
    )
