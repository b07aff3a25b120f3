"""TCP for libp2p that counts every byte at the socket and holds it to the volunteer's caps.

Reads are buffered and exact: py-libp2p's `read_exactly` gives up after 100 pieces (`io/utils.py:54`), which a slow link
reaches within one frame.
"""

from __future__ import annotations

from typing import Any

import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

PIECE = 64 * 1024  # bytes written or read at once, and so what a cap lets through in one go
BURST = 0.25  # seconds of traffic that an idle link may catch up on


class TokenBucket:
    """Lets `rate` bytes per second through on average; 0 means no cap."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = rate * BURST
        self._filled_at = -float("inf")

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may pass. Debts are allowed, so callers queue up in the order in which they came."""
        if not self._rate:
            return
        now = trio.current_time()
        self._tokens = min(self._rate * BURST, self._tokens + (now - self._filled_at) * self._rate) - size
        self._filled_at = now
        if self._tokens < 0:
            await trio.sleep(-self._tokens / self._rate)


class Meter:
    """Bytes at all sockets of a node since its start, and the caps on them (bytes per second, 0 = none)."""

    def __init__(self, *, up: float, down: float) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.up = TokenBucket(up)
        self.down = TokenBucket(down)


class MeteredStream(ReadWriteCloser):
    """One TCP connection."""

    def __init__(self, stream: trio.SocketStream, meter: Meter) -> None:
        self._stream = stream
        self._meter = meter
        self._received = bytearray()
        self._remote = _remote_of(stream)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                await self._meter.up.take(len(piece))
                await self._stream.send_all(piece)
                self._meter.bytes_out += len(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"TCP connection lost: {error}", transport="tcp") from error

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes, fewer only at the connection's end; without `n` whatever is there."""
        wanted = 1 if n is None else n
        while len(self._received) < wanted:
            try:
                chunk = await self._stream.receive_some(PIECE)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"TCP connection lost: {error}", transport="tcp") from error
            if not chunk:
                break
            self._meter.bytes_in += len(chunk)
            self._received += chunk
            await self._meter.down.take(len(chunk))  # what is not read backs up into the sender's TCP
        size = len(self._received) if n is None else n
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote


def _remote_of(stream: trio.SocketStream) -> tuple[str, int] | None:
    """IPv6 sockets name their peer with four values; upstream (`io/trio.py:103`) then says that it has no address."""
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:
        return None  # gone already
    return str(host), int(port)


class MeteredTCP(TCP):
    """The stock TCP transport with metered connections in both directions."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def create_listener(self, handler_function: THandler) -> TCPListener:
        async def metered(connection: Any) -> None:
            await handler_function(MeteredStream(connection.stream, self._meter))

        return super().create_listener(metered)

    async def _dial_resolved(self, maddr: Multiaddr, source: tuple[str, int] | None = None) -> IRawConnection:
        connection = await super()._dial_resolved(maddr, source)
        assert isinstance(connection, RawConnection) and isinstance(connection.stream, TrioTCPStream)
        connection.stream = MeteredStream(connection.stream.stream, self._meter)
        return connection
