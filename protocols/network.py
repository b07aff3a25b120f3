"""The one seam between protocols and a network.

Two implementations: `node.host.network.Libp2pNetwork` (py-libp2p) and `testing.simnet.SimNetwork` (in memory, under
trio's MockClock). Both pass the same conformance suite in `tests/node/host/test_network_conformance.py`.

Errors: opening raises `Unreachable`; a stream that the other side or the network ended raises `StreamBroken` from
`send_all` and `receive_some`. Every method is cancellable, and a cancelled `send_all` may have sent a part: the
stream is then good for nothing but `aclose`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import trio

PeerId = str  # base58 libp2p peer id, "12D3KooW…"
Address = str  # multiaddr that ends in /p2p/<peer id>; `connect` also takes one without, and learns who answers there


class NetworkError(Exception):
    """Something between this node and a peer failed; never a reason to end the daemon."""


class Unreachable(NetworkError):
    """No connection to the peer exists and none could be made."""


class ProtocolUnsupported(NetworkError):
    """The peer is reachable and does not speak the protocol."""


class StreamBroken(NetworkError):
    """The stream ended before its time: reset, connection lost, or peer gone."""


class Stream(Protocol):
    """A duplex byte stream to one authenticated peer. One task may read while another writes; not two of a kind."""

    @property
    def peer(self) -> PeerId: ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; returns when it is handed to the transport, not when it has arrived."""

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one and at most `max_bytes` bytes; b"" when the other side has finished sending."""

    async def send_eof(self) -> None:
        """Finish sending; the other side reads b"" after what was sent. Receiving goes on."""

    async def aclose(self) -> None:
        """Drop the stream in both directions. Never raises, never waits long."""


StreamHandler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True)
class PeerView:
    """A connected peer as this node sees it now."""

    peer: PeerId
    path: str  # "direct" or "relayed"
    connected_at: float  # trio.current_time() when the connection was made
    inbound: bool
    agent: str  # what identify said, "" until then
    group: str | None = None  # where it connects from, see `protocols/peers/diversity.py`


@dataclass(frozen=True)
class PeerEvent:
    """A peer became connected (`up`) or lost its last connection; or, with `moved` too, has a better path now.

    After a move new streams are direct. Those of before go on through the relay until they end, or until it is let go
    of a minute later: whoever keeps streams opens new ones and ends the old when nothing is under way on them.
    """

    peer: PeerId
    up: bool
    moved: bool = False  # connected directly in the place of through a relay, or over TCP in that of over QUIC


@dataclass(frozen=True)
class Traffic:
    """Bytes at the sockets since the start, all protocols and overheads included."""

    bytes_in: int
    bytes_out: int


class Network(Protocol):
    @property
    def me(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where this node can be dialled, each ending in /p2p/<me>."""

    def peers(self) -> tuple[PeerView, ...]:
        """Connected peers, in no particular order."""

    def traffic(self) -> Traffic: ...

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature of `message` by this node's identity; callers prefix their own domain."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is `peer`'s over `message`; False for anything malformed."""

    def learn(self, peer: PeerId, addresses: tuple[Address, ...], *, hearsay: bool = False) -> None:
        """Remember where `peer` may be dialled; bounded per peer and in all. Hearsay leaves half of the known."""

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Where `peer` may be dialled; first where it was, if this node dialled it."""

    async def connect(self, target: PeerId | Address, *, timeout: float = 10.0) -> PeerId:
        """Make sure there is a connection to a known peer, or to whoever answers at an address.

        Raises Unreachable. Returns the peer's authenticated id.
        """

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout: float = 10.0) -> Stream:
        """Open a stream, connecting first where needed. Raises Unreachable or ProtocolUnsupported."""

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` in a task of its own for each stream that a peer opens; the stream is closed when it returns.

        An exception from a handler ends that stream only: it is logged with the peer and counted.
        """

    async def provide(self, key: bytes) -> None:
        """Announce, and keep announced while this node runs, that this node has something under `key` (32 bytes)."""

    def withdraw(self, key: bytes) -> None:
        """Announce `key` no more. Those who were told forget it in their own time."""

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        """Peers that announced `key`; their addresses are learned. Empty where nobody did or nobody answered."""

    def watch_peers(self) -> AbstractContextManager[trio.MemoryReceiveChannel[PeerEvent]]:
        """A bounded feed of peers that come, move and go, from now on; the oldest is dropped when nobody reads."""
