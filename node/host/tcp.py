"""TCP for libp2p that counts every byte at the socket and holds it to the volunteer's caps and the peer's pace.

Where the kernel lets us, what we send is paced by BBR (draft-ietf-ccwg-bbr): it goes by the
rate and round trip that it measures, so that a lost packet is no reason to send half as fast. One such connection fills
a long link that loses a packet in a thousand, of which one by CUBIC uses a tenth (docs/nat.md).

Reads are buffered and exact: py-libp2p's `read_exactly` gives up after 100 pieces (`io/utils.py:54`), which a slow link
reaches within one frame.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import IN, OUT, WIDE_PIECE, HostAllowance, PeerAllowance, TokenBucket
from swarmnode.node.host.handshakes import Handshake, Handshakes

CONGESTION = b"bbr"  # how fast to send, where the kernel has that and lets us choose it
WRITE_STALL = 12.0  # seconds in which the socket must take something, whatever caps have a write wait for
UNSENT = 128 * 1024  # bytes that the kernel keeps unsent: what is written after them waits behind them

Piece = bytes | memoryview


class ExactReader(ReadWriteCloser):
    """A connection that is read exactly, whatever the pieces in which it arrives.

    The last three methods are for Noise; where they can do with fewer copies, a subclass does.
    """

    def __init__(self, host: HostAllowance) -> None:
        self.host = host
        self._received = bytearray()

    async def _some(self) -> bytes | memoryview:
        """What arrives next; nothing at the end."""
        raise NotImplementedError

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes, fewer only at the connection's end; without `n` whatever is there."""
        wanted = 1 if n is None else n
        while len(self._received) < wanted:
            chunk = await self._some()
            if not chunk:
                break
            if n is None and not self._received:
                return bytes(chunk)
            self._received += chunk
        size = len(self._received) if n is None else n
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    async def read_after(self, head: bytes) -> memoryview:
        """Whatever is there, behind `head`; nothing but `head` at the end. It is good until the next `await`."""
        return memoryview(head + await self.read())

    async def write_each(self, pieces: Sequence[Piece]) -> None:
        """All the pieces, in order."""
        await self.write(b"".join(pieces))

    def write_now_each(self, pieces: Sequence[Piece]) -> list[Piece]:
        """What is left of the pieces once as much has gone as goes without waiting."""
        return list(pieces)


def sends_by(tcp: socket.socket) -> str:
    """Have a connection send by CONGESTION; by which control it does then, empty where nobody says (not Linux)."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    used = b""
    with suppress(OSError):  # the kernel does not have it, or keeps it for root
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
    with suppress(OSError):  # nor does it say what it has
        used = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return used.rstrip(b"\0").decode()


class MeteredStream(ExactReader):
    """One TCP connection, on a socket of its own: trio's streams cost each small message three more system calls."""

    def __init__(self, stream: trio.SocketStream, host: HostAllowance) -> None:
        super().__init__(host)
        self._remote: tuple[str, int] | None = None
        with suppress(OSError):  # it is gone already
            self._remote = stream.socket.getpeername()[:2]  # of IPv6 four values, where upstream finds no address
        self._unpaid = 0  # bytes read for which nobody waited yet
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._allowance: PeerAllowance | None = None  # of the peer, once it is known
        self.handshake: Handshake | None = None  # of an inbound connection
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        sends_by(self._socket)

    def settle(self, allowance: PeerAllowance) -> None:
        """The peer is known: from now on its rates hold, and its place among the handshakes is free."""
        self._allowance = allowance
        if self.handshake is not None:
            self.handshake.leave("known")

    async def write(self, data: bytes) -> None:
        await self.write_each([data])

    async def write_each(self, pieces: Sequence[Piece]) -> None:
        """In as few system calls as there is room for, without putting the pieces together unless there is a cap."""
        step = self._piece(self.host.up)
        if step < WIDE_PIECE:
            whole = memoryview(b"".join(pieces))
            for start in range(0, len(whole), step):
                await self._write([whole[start : start + step]])
        else:
            await self._write(list(pieces))
        await trio.lowlevel.checkpoint()

    async def _write(self, pieces: list[Piece]) -> None:
        size = sum(map(len, pieces))
        if self._allowance is not None:
            await self._allowance.wait(OUT, size)
        await self.host.up.take(size)
        while pieces := _after(pieces, self._sent(pieces)):
            with trio.move_on_after(WRITE_STALL) as scope:
                await self._wait(writable=True)
            if scope.cancelled_caught:
                raise ConnectionClosedError(f"the socket took nothing for {WRITE_STALL:.0f} s", transport="tcp")

    def write_now_each(self, pieces: Sequence[Piece]) -> list[Piece]:
        """What is left of the pieces once as much has gone as goes without waiting; all where there is a cap."""
        left = list(pieces)
        if self.host.up.rate or (self._allowance is not None and not self._allowance.send_now(sum(map(len, left)))):
            return left
        return _after(left, self._sent(left))

    def _sent(self, pieces: Sequence[Piece]) -> int:
        try:
            size = self._socket.sendmsg(pieces) if len(pieces) > 1 else self._socket.send(pieces[0])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ConnectionClosedError(f"TCP connection lost: {error}", transport="tcp") from error
        self.host.bytes_out += size
        return size

    async def _some(self) -> memoryview:
        return await self._arrived(b"")

    async def read_after(self, head: bytes) -> memoryview:
        if self._received:
            received = memoryview(head + self._received)
            self._received.clear()
            return received
        return await self._arrived(head)

    async def _arrived(self, head: bytes) -> memoryview:
        if self._unpaid:
            size, self._unpaid = self._unpaid, 0
            await self.host.down.take(size)  # what is not read backs up into the sender's TCP
            if self._allowance is not None:
                await self._allowance.wait(IN, size)
        while True:
            await self._wait()
            piece = self._piece(self.host.down)
            scratch = self.host.scratch
            if len(scratch) < len(head) + piece:
                scratch = self.host.scratch = bytearray(len(head) + WIDE_PIECE)
            view = memoryview(scratch)[: len(head) + piece]
            try:
                size = self._socket.recv_into(view[len(head) :])
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise ConnectionClosedError(f"TCP connection lost: {error}", transport="tcp") from error
            self.host.bytes_in += size
            self._unpaid = size
            view[: len(head)] = head
            return view[: len(head) + size]

    def _piece(self, cap: TokenBucket) -> int:
        """How many bytes to read or write at once."""
        return cap.piece if self._allowance is None else self._allowance.piece(cap)

    async def speaks(self) -> bool:
        """Whether there is something to read, as soon as there is; False where the connection was closed here."""
        try:
            await self._wait()
        except ConnectionClosedError:
            return False
        return True

    def waiting(self) -> int:
        """How many bytes there are to read, of the first 64."""
        try:
            return len(self._socket.recv(64, socket.MSG_PEEK))
        except OSError:
            return 0

    async def _wait(self, *, writable: bool = False) -> None:
        """Until there is something to read, or room to write."""
        if self._socket.fileno() < 0:
            raise ConnectionClosedError("TCP connection closed here", transport="tcp")
        try:
            await (trio.lowlevel.wait_writable if writable else trio.lowlevel.wait_readable)(self._socket)
        except trio.ClosedResourceError as error:
            raise ConnectionClosedError("TCP connection closed here", transport="tcp") from error

    def abort(self) -> None:
        """Close at once: whoever reads or writes finds the connection lost."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    async def close(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote


def _after(pieces: list[Piece], size: int) -> list[Piece]:
    """The pieces without their first `size` bytes."""
    for index, piece in enumerate(pieces):
        if size < len(piece):
            return [memoryview(piece)[size:], *pieces[index + 1 :]]
        size -= len(piece)
    return []


class MeteredTCP(TCP):
    """The stock TCP transport with metered connections in both directions."""

    def __init__(self, host: HostAllowance, handshakes: Handshakes) -> None:
        super().__init__()
        self._host = host
        self._handshakes = handshakes

    def set_swarm(self, swarm: Swarm) -> None:
        """Upstream says here who registers connections."""
        self._swarm = swarm

    def create_listener(self, handler_function: THandler) -> TCPListener:
        """`handler_function`, upstream's way to register a connection, keeps a task and a slot of each for good."""

        async def metered(connection: Any) -> None:
            stream = MeteredStream(connection.stream, self._host)
            try:
                with self._handshakes.place(stream) as handshake:
                    with trio.move_on_after(self._handshakes.patience):
                        handshake.spoke = await stream.speaks()
                    if not handshake.spoke:
                        return stream.abort()
                    await self._handshakes.turn()
                    await self._swarm.upgrade_inbound_raw_conn(RawConnection(stream, False), None)  # type: ignore[arg-type]
            except BaseException:
                stream.abort()
                raise

        return super().create_listener(metered)

    async def _dial_resolved(self, maddr: Multiaddr, source: tuple[str, int] | None = None) -> IRawConnection:
        connection = await super()._dial_resolved(maddr, source)
        assert isinstance(connection, RawConnection) and isinstance(connection.stream, TrioTCPStream)
        connection.stream = MeteredStream(connection.stream.stream, self._host)
        return connection
