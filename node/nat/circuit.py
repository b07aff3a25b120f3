"""Circuits: connections to a peer through a relay, as the one who dials and as the one who is dialled.

A circuit is a stream to a relay that carries a connection of its own: Noise, then Yamux, as over TCP. So the relay can
neither read nor change it. To the rest of the node it is a connection whose `direct` is False. Source: circuit relay
v2, the client and stop side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio
from libp2p.abc import ConnectionType
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.node.nat.messages import BadMessage, peer_bytes, peer_in, receive, send
from swarmnode.node.nat.relay import HOP, STOP
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId, Stream, Unreachable

logger = logging.getLogger(__name__)

MAX_INBOUND = 64  # circuits to this node at a time

Carried = Callable[[PeerId, int], None]
Lost = Callable[[PeerId], None]


class Refused(NetworkError):
    """The relay does not do what it was asked. `status` is its word for it."""

    def __init__(self, relay: PeerId, status: str) -> None:
        super().__init__(f"relay {relay} refuses: {status.lower().replace('_', ' ')}")
        self.status = status


@dataclass(frozen=True)
class Reservation:
    """A place at a relay, good while the connection to it lasts."""

    relay: PeerId
    expires: float  # s since the epoch
    addresses: tuple[Address, ...]  # where this node can be dialled through the relay, each ending in /p2p/<this node>


class Circuits:
    """Makes and takes circuits of one node."""

    def __init__(self, network: Network, swarm: Swarm) -> None:
        self._network = network
        self._swarm = swarm
        self._inbound = 0
        self._carried: Carried = lambda relay, size: None
        self._lost: Lost = lambda relay: None
        network.serve(STOP, self._on_stop)

    def tell_carried(self, carried: Carried) -> None:
        """Call `carried(relay, bytes)` for what goes through each circuit that is made from now on, either way."""
        self._carried = carried

    def tell_lost(self, lost: Lost) -> None:
        """Call `lost(relay)` when a relay says that it keeps no place for this node any more."""
        self._lost = lost

    async def reserve(self, relay: PeerId) -> Reservation:
        """Ask `relay` for a place, or renew it. Raises Refused, or another NetworkError where it does not answer."""
        stream = await self._network.open_stream(relay, HOP)
        try:
            await send(stream, pb.HopMessage(type=pb.HopMessage.RESERVE))
            answer = await receive(stream, pb.HopMessage)
        finally:
            await stream.aclose()
        if answer.type != pb.HopMessage.STATUS or answer.status != pb.OK:
            raise Refused(relay, _name(answer.status))
        me, told = self._network.me, []
        for raw in answer.reservation.addrs[:8]:
            try:
                place = str(Multiaddr(raw)).partition("/p2p/")[0]
            except ValueError as error:
                raise BadMessage(f"relay {relay} told an address that is none: {error}") from error
            told.append(f"{place}/p2p/{relay}/p2p-circuit/p2p/{me}")
        return Reservation(relay, float(answer.reservation.expire), tuple(told))

    async def dial(self, relay: PeerId, target: PeerId) -> None:
        """Connect to `target` through `relay`. Raises Refused, or another NetworkError."""
        stream = await self._network.open_stream(relay, HOP)
        try:
            await send(stream, pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer_bytes(target))))
            answer = await receive(stream, pb.HopMessage)
            if answer.type != pb.HopMessage.STATUS or answer.status != pb.OK:
                raise Refused(relay, _name(answer.status))
            raw = _raw(stream, self._carried, initiator=True)
            await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(target))
        except SwarmException as error:
            await stream.aclose()
            raise Unreachable(f"{target} cannot be reached through {relay}: {error}") from error
        except BaseException:
            await stream.aclose()
            raise

    async def _on_stop(self, stream: Stream) -> None:
        """A relay says that somebody dials this node, or that its place there is gone."""
        request = await receive(stream, pb.StopMessage)
        if request.type == pb.StopMessage.STATUS and request.status == pb.NO_RESERVATION:
            self._lost(stream.peer)
            await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK))
            return
        if request.type != pb.StopMessage.CONNECT or self._inbound >= MAX_INBOUND:
            status = pb.UNEXPECTED_MESSAGE if request.type != pb.StopMessage.CONNECT else pb.RESOURCE_LIMIT_EXCEEDED
            await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=status))
            return
        source = peer_in(request.peer.id)
        await send(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK))
        raw = _raw(stream, self._carried, initiator=False)
        self._inbound += 1
        try:
            await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(f"/p2p/{stream.peer}/p2p-circuit"))
            await raw.stream.ended.wait()
        except SwarmException as error:
            logger.debug("a circuit from %s through %s came to nothing: %s", source, stream.peer, error)
        finally:
            self._inbound -= 1
            await stream.aclose()


class CircuitStream(ReadWriteCloser):
    """What py-libp2p reads and writes as if it were a socket: a stream to the relay."""

    def __init__(self, stream: Stream, carried: Carried) -> None:
        self._stream = stream
        self._carried = carried
        self._received = bytearray()
        self.ended = trio.Event()

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except NetworkError as error:
            self.ended.set()
            raise ConnectionClosedError(f"circuit lost: {error}", transport="p2p-circuit") from error
        self._carried(self._stream.peer, len(data))

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes, fewer only at the circuit's end; without `n` whatever is there."""
        wanted = 1 if n is None else n
        while len(self._received) < wanted:
            try:
                chunk = await self._stream.receive_some(64 << 10)
            except NetworkError as error:
                self.ended.set()
                raise ConnectionClosedError(f"circuit lost: {error}", transport="p2p-circuit") from error
            if not chunk:
                self.ended.set()
                break
            self._carried(self._stream.peer, len(chunk))
            self._received += chunk
        size = len(self._received) if n is None else n
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    async def close(self) -> None:
        self.ended.set()
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class _Raw(RawConnection):
    stream: CircuitStream


def _raw(stream: Stream, carried: Carried, *, initiator: bool) -> _Raw:
    address = Multiaddr(f"/p2p/{stream.peer}/p2p-circuit")
    return _Raw(CircuitStream(stream, carried), initiator, ConnectionType.RELAYED, [address])


def _name(status: pb.Status.ValueType) -> str:
    try:
        return str(pb.Status.Name(status))
    except ValueError:
        return f"status {status}"
