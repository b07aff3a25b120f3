"""One QUIC connection (RFC 9000) as a libp2p session: aioquic's state machine, driven here, and its streams.

py-libp2p has a QUIC transport of its own (0.8.1, `transport/quic`, 9 000 lines). It is not used, because it dials from
another port than it listens on, so that no hole can be punched; tells no observed address; widens its windows whether
or not anybody reads; and carries 3 MiB/s. One task a connection drives this, over `quic_transport`'s one socket.

- A window opens as the reader takes, as with Yamux; aioquic alone would double it as bytes come in.
- Bytes that wait for a gap before them count as unread by the peer, like those that no reader took.
- Beyond its rate a peer is given no more credit for the connection, so that it waits; what it is sent waits here.
- A peer that breaks the protocol ends its connection, and nothing else.
- A silent connection is pinged after `KEEPALIVE`, and given up after `SILENCE` more without an answer.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Any, Protocol

import trio
from aioquic.quic import events
from aioquic.quic.connection import CONNECTION_LIMIT_FRAME_CAPACITY, MAX_STREAM_DATA_FRAME_CAPACITY, QuicConnection
from aioquic.quic.packet import QuicFrameType
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import IN, OUT, WIDE_PIECE, HostAllowance
from swarmnode.node.host.certificates import peer_in
from swarmnode.node.host.handshakes import Handshake
from swarmnode.node.host.muxed import KEEPALIVE, MAX_WINDOW, MuxedSession, MuxedStream, StreamReset, UdpAddress
from swarmnode.protocols.network import PeerId, Unreachable
from swarmnode.protocols.peers.scoring import Kind

log = logging.getLogger(__name__)

FIRST_CREDIT = 512 * 1024  # bytes that a connection may bring before its peer is known, and where there is a cap
MAX_INBOX = 512  # datagrams that wait for their connection's turn, as a socket's buffer would keep them
AT_ONCE = 64  # of them, taken before other connections have their turn
LEAST_BUFFER = 128 * 1024  # bytes of one stream that wait to be sent or acknowledged, at least
PAY_FROM = 16 * 1024  # bytes that came, from which on their peer's rate is asked
FLUSH = 0.5  # seconds that a polite close waits for what was queued
RESET = 0  # the error code of streams
REFUSED = 0x12A  # the error code of a connection whose peer shows no sound certificate (TLS: bad certificate)


class Windowed(QuicConnection):
    """aioquic's connection with the windows that its user sets. Ours are peers: each side asks for a certificate."""

    def __init__(self, *, streams: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.complaint = ""  # what the other side did, for which this one closed the connection
        for limit, value in ((self._local_max_streams_bidi, streams), (self._local_max_streams_uni, 0)):
            limit.value = limit.sent = value

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = not self._is_client

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        for limit in (self._local_max_data, self._local_max_streams_bidi):
            if limit is self._local_max_streams_bidi and limit.sent - limit.used >= limit.value - limit.sent:
                continue  # as upstream: several streams at once
            if limit.value != limit.sent:
                buffer = builder.start_frame(
                    limit.frame_type,
                    capacity=CONNECTION_LIMIT_FRAME_CAPACITY,
                    handler=self._on_connection_limit_delivery,
                    handler_args=(limit,),
                )
                buffer.push_uint_var(limit.value)
                limit.sent = limit.value

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        if stream.max_stream_data_local_sent != stream.max_stream_data_local and not stream.receiver.is_finished:
            buffer = builder.start_frame(
                QuicFrameType.MAX_STREAM_DATA,
                capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
                handler=self._on_max_stream_data_delivery,
                handler_args=(stream,),
            )
            buffer.push_uint_var(stream.stream_id)
            buffer.push_uint_var(stream.max_stream_data_local)
            stream.max_stream_data_local_sent = stream.max_stream_data_local

    # What aioquic does not tell in public.

    @property
    def certificate(self) -> Any:
        """The other side's, None where it showed none; its key signed the handshake."""
        return self.tls._peer_certificate

    def close(self, error_code: int = 0, frame_type: int | None = None, reason_phrase: str = "") -> None:
        super().close(error_code, frame_type, reason_phrase)
        if error_code not in (0, REFUSED):  # aioquic found fault
            self.complaint = reason_phrase or f"error {error_code:#x}"

    def may_open(self) -> bool:
        """Whether the peer lets one more stream be opened; aioquic would open it, and reset it against the rules."""
        return self.get_next_available_stream_id() // 4 < self._remote_max_streams_bidi

    @property
    def round_trips(self) -> tuple[float, float]:
        """Smoothed and shortest round trip, seconds; 0.0 and inf before the first."""
        return self._loss._rtt_smoothed, self._loss._rtt_min

    @property
    def credit(self) -> Any:
        """How far the peer may send on all streams together: `value`, and `used` of it, in bytes."""
        return self._local_max_data

    def stream(self, stream_id: int) -> Any:
        """aioquic's own stream; None once both its sides are finished."""
        return self._streams.get(stream_id)

    def open(self) -> int:
        stream_id = self.get_next_available_stream_id()
        self._get_or_create_stream_for_send(stream_id)
        return stream_id

    def out_of_order(self) -> int:
        """Bytes up to the furthest that arrived on each stream which wait for others before them."""
        return sum(s.receiver.highest_offset - s.receiver.starting_offset() for s in self._streams.values())

    def unsent(self, stream_id: int) -> int:
        """Bytes of a stream that wait to be sent or acknowledged."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender._buffer_start

    def is_delivered(self) -> bool:
        """Whether all that was written arrived."""
        return all(self.unsent(each) == 0 for each in self._streams)

    @property
    def window(self) -> int:
        return self._loss.congestion_window


class Carrier(Protocol):
    """The socket that a connection uses with others, `quic_transport.UdpSocket`."""

    host: HostAllowance

    def add(self, known_as: bytes, link: QuicLink) -> None: ...

    def remove(self, known_as: bytes, link: QuicLink) -> None: ...

    def forget(self, link: QuicLink) -> None: ...

    def count(self, why: str) -> None: ...

    def send(self, datagram: bytes, remote: tuple[str, int]) -> None: ...

    async def has_room(self) -> None: ...


class QuicLink:
    """A connection below its streams: what comes and goes on the socket, timers, the handshake, the end."""

    def __init__(self, endpoint: Carrier, quic: Windowed, remote: tuple[str, int], expected: PeerId | None) -> None:
        self.endpoint = endpoint
        self.quic = quic
        self.session: QuicSession | None = None  # once the peer is known
        self.known = trio.Event()  # the peer is, or the link ended before
        self.ended = trio.Event()
        self.error: Exception | None = None  # why it ended before
        self.handshake: Handshake | None = None  # of an inbound connection
        self._remote = remote
        self._expected = expected
        self._inbox: deque[tuple[bytes, tuple[str, int]]] = deque()
        self._work = trio.Event()

    def arrived(self, datagram: bytes, remote: tuple[str, int]) -> None:
        if len(self._inbox) < MAX_INBOX:
            self._inbox.append((datagram, remote))
            self._work.set()

    def wake(self) -> None:
        """There is something to send."""
        self._work.set()

    async def run(self) -> None:
        """Drive the connection to its end. Never raises for what the peer does."""
        try:
            while not self.ended.is_set():
                self._work = trio.Event()
                now = trio.current_time()
                self._take(now)
                if self.session is not None:
                    self.session.look()
                for datagram, remote in self.quic.datagrams_to_send(now):
                    await self._send(datagram, remote)
                if self.quic.complaint:
                    self._complain(self.quic.complaint)
                due = self.quic.get_timer()
                with trio.CancelScope(deadline=math.inf if due is None else due):
                    await self._work.wait()
        except Exception as error:  # aioquic met what it did not expect
            log.debug("the QUIC connection with %s ended: %r", self._remote[0], error)
            self.error = self.error or error
        finally:
            self.say_goodbye()
            self.abort()

    def _take(self, now: float) -> None:
        for _ in range(min(len(self._inbox), AT_ONCE)):
            datagram, remote = self._inbox.popleft()
            if self.session is not None:
                self.session.arrived += len(datagram)
            self.quic.receive_datagram(datagram, remote, now)
        if self._inbox:
            self._work.set()
        due = self.quic.get_timer()
        if due is not None and due <= now:
            self.quic.handle_timer(now)
        while (event := self.quic.next_event()) is not None:
            self._on(event)

    def _on(self, event: events.QuicEvent) -> None:
        match event:
            case events.ConnectionIdIssued(connection_id=issued):
                self.endpoint.add(issued, self)
            case events.ConnectionIdRetired(connection_id=retired):
                self.endpoint.remove(retired, self)
            case events.HandshakeCompleted():
                self._meet()
            case events.ConnectionTerminated(reason_phrase=reason):
                self.error = self.error or Unreachable(f"no answer ({reason})" if reason else "the connection ended")
                self.abort()
            case events.StreamDataReceived(stream_id=stream_id, data=data, end_stream=end) if self.session:
                self.session.received(stream_id, data, end)
            case events.StreamReset(stream_id=stream_id) if self.session:
                self.session.was_reset(stream_id)
            case events.StopSendingReceived(stream_id=stream_id) if self.session:
                self.session.was_stopped(stream_id)

    def _complain(self, of: str) -> None:
        """The peer broke the protocol, and was told so."""
        if self.session is not None:
            self.session.allowance.offended(f"broke the protocol: {of}", Kind.BREACH)
        self.error = self.error or Unreachable(f"broke the protocol: {of}")
        self.abort()

    def _meet(self) -> None:
        """The handshake is done: find out who is there."""
        try:
            peer = peer_in(self.quic.certificate)
            if self._expected is not None and peer != self._expected:
                raise Unreachable(f"answers as another peer, {peer}")
        except (ValueError, Unreachable) as error:
            self.error = error if isinstance(error, Unreachable) else Unreachable(f"shows no certificate: {error}")
            self.endpoint.count("handshakes that failed")
            self.quic.close(REFUSED, reason_phrase="no sound certificate")
        else:
            self.session = QuicSession(self, peer)
        self.known.set()

    async def _send(self, datagram: bytes, remote: tuple[str, int]) -> None:
        while True:
            try:
                self.endpoint.send(datagram, remote)
            except BlockingIOError:
                await self.endpoint.has_room()
                continue
            except OSError as error:  # no way there, now or at all: the timers find out which
                self.error = self.error or error
                if self.session is None and self.quic.configuration.is_client:
                    self.abort()
                return
            if self.session is not None:
                self.session.sent += len(datagram)
            return

    def say_goodbye(self) -> None:
        """Tell the other side that this one closes, without waiting."""
        if not self.ended.is_set():
            self.quic.close()
            try:
                for datagram, remote in self.quic.datagrams_to_send(trio.current_time()):
                    self.endpoint.send(datagram, remote)
            except Exception as error:  # the socket has no room or is closed, or aioquic is in a state of its own
                log.debug("no goodbye to %s: %r", self._remote[0], error)

    def abort(self) -> None:
        """End at once, without a word."""
        if not self.ended.is_set():
            self.ended.set()
            self.endpoint.forget(self)
            self._inbox.clear()
            self.known.set()
            self._work.set()
            if self.session is not None:
                self.session.abandon(str(self.error) if self.error is not None else "closed by the peer")

    def get_remote_address(self) -> UdpAddress:
        """Where the other side is now: it may move."""
        return UdpAddress(self.quic.get_peer_address() or self._remote)


class QuicSession(MuxedSession):
    def __init__(self, link: QuicLink, peer: PeerId) -> None:
        self.link = link
        self._quic = link.quic
        super().__init__(ID.from_string(peer), link.endpoint.host, is_initiator=link.quic.configuration.is_client)
        self.arrived = self.sent = 0  # bytes at the socket
        self._paid_in = self._paid_out = 0  # of them, those for which somebody waited
        self._waits = 0  # bytes that wait for others before them, as they count as the peer's
        self._widened_at = -math.inf
        self._to_pay = trio.Event()
        self.waiting: set[QuicStream] = set()  # for room
        self._to_open = trio.lowlevel.ParkingLot()

    async def start(self) -> None:
        """Run until either side ends the connection; every stream is broken by then."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_alive)
                nursery.start_soon(self._pay)
                self.event_started.set()
                self._credit()
                await self.link.ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.link.abort()

    def settle(self) -> None:
        if self.link.handshake is not None:
            self.link.handshake.leave("known")

    async def _keep_alive(self) -> None:
        heard = -1
        while True:
            if self.arrived == heard:
                self._quic.send_ping(0)
                self.link.wake()
            heard = self.arrived
            await trio.sleep(KEEPALIVE / 2)  # so that a ping goes before KEEPALIVE has passed in silence

    # --- what comes -------------------------------------------------------------------------------------------------

    def received(self, stream_id: int, data: bytes, end: bool) -> None:
        stream = self._streams.get(stream_id) or self._opened_by_peer(stream_id)
        if stream is None or stream.broken:
            return
        if data:
            self.allowance.count(IN, stream.protocol, len(data))
            stream.feed(data)
        if end and not stream.broken:
            stream.feed_eof()

    def _opened_by_peer(self, stream_id: int) -> QuicStream | None:
        inner = self._quic.stream(stream_id)
        if inner is None or not self._is_theirs(stream_id) or hasattr(inner, "was_opened"):
            return None  # one that is done with here
        inner.was_opened = True
        if not self.allowance.open():
            self.drop(stream_id, sending=True, receiving=True)
            return None
        stream = QuicStream(self, stream_id)
        self._let_in(stream)
        return stream

    def was_reset(self, stream_id: int) -> None:
        self.drop(stream_id, sending=True, receiving=False)
        if stream := self._streams.get(stream_id):
            stream.break_off()

    def was_stopped(self, stream_id: int) -> None:
        if stream := self._streams.get(stream_id):
            stream.stop()

    def look(self) -> None:
        """Something came or was acknowledged, perhaps."""
        if self.is_closed:
            return
        smoothed, shortest = self._quic.round_trips
        if shortest < math.inf:
            self._rtts.append(smoothed)
        if self._waits or self._quic.credit.used:
            self._count_waiting()
        if self.arrived - self._paid_in >= PAY_FROM:
            self._to_pay.set()
        if self._to_open and self._quic.may_open():
            self._to_open.unpark_all()
        for stream in [each for each in self.waiting if each.room() >= LEAST_BUFFER // 4]:
            stream.go_on()

    def _count_waiting(self) -> None:
        waits = self._quic.out_of_order()
        more = waits - self._waits
        if more > 0 and not self.allowance.keep(more):
            self.abandon("it left too much unread")
            return
        self._waits = waits
        if more < 0:
            self.allowance.give_back(-more)
            self._credit()  # who has none left sends nothing that `_pay` would wake up for

    async def _pay(self) -> None:
        """Let the peer send on as fast as the volunteer's caps and the peer's own rate admit."""
        while True:
            await self._to_pay.wait()
            self._to_pay = trio.Event()
            size = self.arrived - self._paid_in
            await self.host.down.take(size)
            await self.allowance.wait(IN, size)
            self._paid_in += size
            self._credit()

    def _credit(self) -> None:
        free = self.allowance.piece(self.host.down) == WIDE_PIECE
        width = self.host.limits.unread if free else FIRST_CREDIT
        credit = self._quic.credit
        value = credit.used - self._quic.out_of_order() + width - max(0, self.arrived - self._paid_in)
        if value - credit.value >= width // 4:
            credit.value = value
            self.link.wake()

    # --- what goes --------------------------------------------------------------------------------------------------

    def write(self, stream: QuicStream, data: bytes | memoryview, *, end: bool = False) -> None:
        if not self.is_closed:
            self.allowance.count(OUT, stream.protocol, len(data))
            self._quic.send_stream_data(stream.stream_id, data, end_stream=end)  # type: ignore[arg-type]
            self.link.wake()

    def goes_freely(self, size: int) -> bool:
        """Whether `size` bytes may be written without waiting for a rate; then they are paid for."""
        if self.host.up.rate or not self.allowance.send_now(size):
            return False
        self._paid_out += size
        return True

    async def pay_for(self, size: int) -> None:
        """Wait until `size` bytes may be written, with what datagrams cost beside them."""
        size += max(0, self.sent - self._paid_out)
        self._paid_out += size
        await self.allowance.wait(OUT, size)
        await self.host.up.take(size)

    def drop(self, stream_id: int, *, sending: bool, receiving: bool) -> None:
        """Reset a stream on the wire: what this side sends, and what it receives."""
        if self._quic.stream(stream_id) is None or self.is_closed:
            return
        if sending:
            self._quic.reset_stream(stream_id, RESET)
        if receiving:
            self._quic.stop_stream(stream_id, RESET)
        self.link.wake()

    def widen(self, by: int) -> bool:
        now = trio.current_time()
        if now - self._widened_at < self.shortest_rtt() or not self._has_room(by):
            return False
        self._widened += by
        self._widened_at = now
        return True

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 == (1 if self.is_initiator else 0)

    def shortest_rtt(self) -> float:
        shortest = self._quic.round_trips[1]
        return shortest if shortest < math.inf else 0.0

    def abandon(self, why: str) -> None:
        """Break all streams, without a word to the peer."""
        if self._break(why):
            self.allowance.give_back(self._waits)
            self._waits = 0
            self._to_open.unpark_all()
            self.link.abort()

    # The names that py-libp2p calls.

    async def open_stream(self) -> QuicStream:
        await trio.lowlevel.checkpoint()
        while not self.is_closed and not self._quic.may_open():
            await self._to_open.park()
        if self.is_closed:
            raise StreamReset(f"the connection to {self.peer} ended")
        stream = QuicStream(self, self._quic.open())
        self._streams[stream.stream_id] = stream
        return stream

    async def close(self) -> None:
        """Wait up to FLUSH seconds until what was queued arrived, say goodbye, and close."""
        if not self.is_closed:
            with trio.move_on_after(FLUSH):
                while not self._quic.is_delivered():  # noqa: ASYNC110 (aioquic has no event)
                    await trio.sleep(FLUSH / 50)
        if not self.is_closed:
            self.link.say_goodbye()
            self.abandon("closed here")
        await trio.lowlevel.checkpoint()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [self.link.get_remote_address().multiaddr]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.link.get_remote_address()


class QuicStream(MuxedStream):
    """One stream of a QUIC connection, both directions."""

    def __init__(self, session: QuicSession, stream_id: int) -> None:
        super().__init__(session, stream_id)
        self._session, self._quic = session, session.link.quic

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        offset = 0
        while offset < len(view):
            self._check()
            while (room := self.room()) <= 0:
                self._session.waiting.add(self)
                await self._writable.park()
                self._check()
            size = min(room, self._allowance.piece(self._session.host.up), len(view) - offset)
            if not self._session.goes_freely(size):
                await self._session.pay_for(size)
                self._check()
            self._session.write(self, view[offset : offset + size])
            offset += size
        await trio.lowlevel.checkpoint()

    def send_nowait(self, data: bytes) -> bool:
        ended = self.broken or self._stopped or self._finished_sending
        if ended or not 0 < len(data) <= self.room() or not self._session.goes_freely(len(data)):
            return False
        self._session.write(self, data)
        return True

    def room(self) -> int:
        """Bytes that may still be queued: as many as are on the way twice."""
        return max(LEAST_BUFFER, min(MAX_WINDOW, 2 * self._quic.window)) - self._quic.unsent(self.stream_id)

    def go_on(self) -> None:
        self._session.waiting.discard(self)
        super().go_on()

    def stop(self) -> None:
        """The other side reads no more."""
        self._stopped = self._finished_sending = True
        self.go_on()
        self._forget_if_done()

    def _send_end(self) -> None:
        self._session.write(self, b"", end=True)

    def _send_reset(self, *, sending: bool, receiving: bool) -> None:
        self._session.drop(self.stream_id, sending=sending, receiving=receiving)

    def _open_window(self, increment: int) -> None:
        inner = self._quic.stream(self.stream_id)
        if inner is not None and not self._session.is_closed:
            inner.max_stream_data_local += increment
            self._session.link.wake()
