"""QUIC for libp2p (`/quic-v1`): one UDP socket at the port of TCP that listens, dials and punches holes.

Datagrams find their connection by the connection id in them. Those that find none and begin none are counted and
forgotten. Before its handshake is done an inbound connection has one of the places among `Handshakes`, with those of
TCP. Its address may be forged, so once a quarter of the places is taken a newcomer must show first that it
receives what is sent there (Retry, RFC 9000 section 8.1): that costs this node no memory.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
from collections import Counter
from contextlib import ExitStack

import trio
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.packet import QuicPacketType, QuicProtocolVersion, encode_quic_retry, pull_quic_header
from aioquic.quic.retry import QuicRetryTokenHandler
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IListener, ITransport
from libp2p.custom_types import THandler
from libp2p.network.swarm import Swarm
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.host.certificates import certificate_for
from swarmnode.node.host.congestion import ALGORITHM
from swarmnode.node.host.handshakes import Handshakes
from swarmnode.node.host.muxed import INITIAL_WINDOW, SILENCE, UdpAddress
from swarmnode.node.host.quic import FIRST_CREDIT, QuicLink, QuicSession, Windowed
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId, Unreachable

log = logging.getLogger(__name__)

PLACE = re.compile(r"/ip(4|6)/([0-9a-fA-F:.]+)/udp/([0-9]+)/quic-v1(?:/p2p/(\w+))?")
ID_SIZE = 8  # bytes of the connection ids of this side
AT_ONCE = 64  # datagrams taken off the socket before others have their turn
BUFFERS = 2 << 20  # bytes that the kernel keeps for the socket each way, where it grants so many

STRAYS = Metric("swarmnode_datagrams_dropped_total", COUNTER, "UDP datagrams that led to nothing", "why")
WHY = ("no QUIC", "no connection", "handshakes that failed", "asked to come again")


class QuicTransport(ITransport):
    """QUIC on the sockets that listen; it dials from them alone."""

    def __init__(self, key: Ed25519PrivateKey, host: HostAllowance, handshakes: Handshakes) -> None:
        self.host, self.handshakes = host, handshakes
        self._certificate, self._key = certificate_for(key)
        self.retry = QuicRetryTokenHandler()
        self.endpoints: list[UdpSocket] = []
        self.dropped: Counter[str] = Counter()

    def configuration(self, *, is_client: bool) -> QuicConfiguration:
        return QuicConfiguration(
            alpn_protocols=["libp2p"],
            is_client=is_client,
            certificate=self._certificate,
            private_key=self._key,
            verify_mode=ssl.CERT_NONE,  # `peer_in` looks at it instead
            congestion_control_algorithm=ALGORITHM,
            idle_timeout=SILENCE,
            max_data=FIRST_CREDIT,
            max_stream_data=INITIAL_WINDOW,
            supported_versions=[QuicProtocolVersion.VERSION_1],
            connection_id_length=ID_SIZE,
        )

    def protocols(self) -> list[str]:
        return ["quic-v1"]

    def can_dial(self, maddr: Multiaddr) -> bool:
        return PLACE.fullmatch(str(maddr)) is not None

    can_listen = can_dial

    def set_swarm(self, swarm: Swarm) -> None:
        """Upstream says here who registers connections."""
        self.swarm = swarm

    def create_listener(self, handler_function: THandler) -> QuicListener:
        return QuicListener(self)

    async def dial(self, maddr: Multiaddr) -> QuicSession:  # type: ignore[override]
        """A session with whoever answers, or with the peer that `maddr` names. Raises OpenConnectionError."""
        found = PLACE.fullmatch(str(maddr))
        endpoint = self.endpoint_for(found[2]) if found is not None else None
        if found is None or endpoint is None:
            raise OpenConnectionError(f"{maddr} cannot be dialled: this node listens on no UDP port of that family")
        return await self._session_of(endpoint.dial((found[2], int(found[3])), found[4]))

    async def dial_from(self, made: socket.socket, remote: tuple[str, int], peer: PeerId) -> None:
        """Connect to `peer` from a socket of its own, which is closed with the connection.

        Raises OpenConnectionError or SwarmException.
        """
        endpoint = self._beside(remote[0], made)
        session = await self._session_of(endpoint.dial(remote, peer))
        try:
            await self.swarm.add_conn(session, direction="outbound")
        except BaseException:
            session.link.abort()
            raise

    async def answer_from(self, made: socket.socket) -> None:
        """Wait to be dialled at a socket of its own, which is closed with that connection, or where nobody comes.

        Raises OpenConnectionError.
        """
        endpoint = self._beside(made.getsockname()[0], made)
        try:
            await trio.sleep(self.handshakes.patience)
        finally:
            endpoint.close_if_unused()

    async def _session_of(self, link: QuicLink) -> QuicSession:
        """The session once its peer is known. Raises OpenConnectionError."""
        try:
            with trio.move_on_after(self.handshakes.patience):
                await link.known.wait()
        except BaseException:  # also where the handshake has just ended: nobody would drive the connection
            link.abort()
            raise
        if not link.known.is_set():
            link.abort()
        if link.session is None:
            host, _ = link.get_remote_address()
            raise OpenConnectionError(f"no QUIC connection to {host}") from (link.error or Unreachable("no answer"))
        return link.session

    def _beside(self, host: str, made: socket.socket) -> UdpSocket:
        """Run one more socket, for one connection, beside that from which `host` can be dialled.

        Raises OpenConnectionError where there is none any more.
        """
        beside = self.endpoint_for(host)
        if beside is None:
            made.close()
            raise OpenConnectionError("the host listens no more")
        endpoint = UdpSocket(self, made, beside.nursery, for_one=True)
        beside.nursery.start_soon(endpoint.run)
        return endpoint

    def endpoint_for(self, host: str) -> UdpSocket | None:
        """The socket from which `host` can be dialled; None where there is none of its family."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        loopback = host == "::1" or host.startswith("127.")
        usable = (each for each in self.endpoints if each.socket.family == family and each.reaches(loopback))
        return next(usable, None)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(STRAYS, lambda: {why: self.dropped[why] for why in WHY})


class QuicListener(IListener):
    background_nursery: trio.Nursery  # py-libp2p sets it

    def __init__(self, transport: QuicTransport) -> None:
        self._transport = transport
        self.endpoint: UdpSocket | None = None

    async def listen(self, maddr: Multiaddr) -> None:
        """Raises OpenConnectionError."""
        found = PLACE.fullmatch(str(maddr))
        assert found is not None
        made = socket.socket(socket.AF_INET if found[1] == "4" else socket.AF_INET6, socket.SOCK_DGRAM)
        try:
            made.setblocking(False)
            if found[1] == "6":
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                made.setsockopt(socket.SOL_SOCKET, option, BUFFERS)
            made.bind((found[2], int(found[3])))
        except OSError as error:
            made.close()
            raise OpenConnectionError(f"cannot listen on {maddr}: {error.strerror}") from error
        self.endpoint = UdpSocket(self._transport, made, self.background_nursery)
        self._transport.endpoints.append(self.endpoint)
        self.background_nursery.start_soon(self.endpoint.run)
        await trio.lowlevel.checkpoint()

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        if self.endpoint is None or self.endpoint.socket.fileno() < 0:
            return ()
        return (UdpAddress(self.endpoint.socket.getsockname()[:2]).multiaddr,)

    async def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        await trio.lowlevel.checkpoint()


class UdpSocket:
    def __init__(
        self, transport: QuicTransport, made: socket.socket, nursery: trio.Nursery, *, for_one: bool = False
    ) -> None:
        """`for_one`: the socket ends with its connection."""
        self.transport = transport
        self.socket = made
        self.host = transport.host
        self.nursery = nursery
        self._for_one = for_one
        self._links: dict[bytes, QuicLink] = {}  # by connection id
        self._waits = trio.Lock()  # for room, as one task may
        self._is_everywhere = made.getsockname()[0] in ("0.0.0.0", "::")
        self._is_loopback = made.getsockname()[0].startswith(("127.", "::1"))

    def reaches(self, loopback: bool) -> bool:
        return self._is_everywhere or self._is_loopback == loopback

    async def run(self) -> None:
        """Read until closed. Nothing that arrives ends it."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self.socket)
                self._read()
                await trio.lowlevel.checkpoint()
        except (trio.ClosedResourceError, OSError) as error:
            log.debug("the UDP socket is closed: %s", error)
        finally:
            self.close()

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                datagram, remote = self.socket.recvfrom(65536)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # an ICMP message about something sent before
                continue
            self.host.bytes_in += len(datagram)
            self._route(datagram, (remote[0], remote[1]))

    def _route(self, datagram: bytes, remote: tuple[str, int]) -> None:
        if len(datagram) > ID_SIZE and not datagram[0] & 0x80:
            link = self._links.get(datagram[1 : 1 + ID_SIZE])
            if link is not None:
                link.arrived(datagram, remote)
            else:
                self.count("no connection")
            return
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=ID_SIZE)
        except ValueError:
            self.count("no QUIC")
            return
        link = self._links.get(header.destination_cid)
        if link is not None:
            link.arrived(datagram, remote)
            return
        begins = header.packet_type == QuicPacketType.INITIAL and header.version == QuicProtocolVersion.VERSION_1
        if not begins or len(datagram) < SMALLEST_MAX_DATAGRAM_SIZE or not 8 <= len(header.destination_cid) <= 20:
            self.count("no connection")
            return
        original, proven = header.destination_cid, False
        now = trio.current_time()
        if header.token:
            try:
                original = self.transport.retry.validate_token(
                    address=remote, destination_cid=original, token=header.token, now=now
                )
                proven = True
            except ValueError:
                log.debug("a token that this node did not make, from %s", remote[0])
        if not proven and self.transport.handshakes.is_busy():
            self.count("asked to come again")
            source = os.urandom(ID_SIZE)
            token = self.transport.retry.create_token(
                address=remote, original_destination_connection_id=original, retry_source_connection_id=source, now=now
            )
            retry = encode_quic_retry(
                version=header.version or 0,
                source_cid=source,
                destination_cid=header.source_cid,
                original_destination_cid=original,
                retry_token=token,
            )
            self.try_to_send(retry, remote)
            return
        quic = Windowed(
            streams=self.host.limits.streams,
            configuration=self.transport.configuration(is_client=False),
            original_destination_connection_id=original,
            retry_source_connection_id=header.destination_cid if proven else None,
        )
        link = QuicLink(self, quic, remote, None)
        for known_as in (quic.host_cid, header.destination_cid):
            self.add(known_as, link)
        link.arrived(datagram, remote)
        place = ExitStack()
        place.enter_context(self.transport.handshakes.place(link)).spoke = proven
        self.nursery.start_soon(self._accept, link, place)

    async def _accept(self, link: QuicLink, place: ExitStack) -> None:
        try:
            with place:
                await self.transport.handshakes.turn()
                if not link.ended.is_set():
                    self.nursery.start_soon(link.run)
                with trio.move_on_after(self.transport.handshakes.patience):
                    await link.known.wait()
                if link.session is not None:
                    await self.transport.swarm.add_conn(link.session, direction="inbound")
                    await link.ended.wait()
        except Exception as error:
            log.debug("the QUIC connection from %s failed: %r", link.get_remote_address()[0], error)
        finally:
            link.abort()

    def dial(self, remote: tuple[str, int], expected: PeerId | None) -> QuicLink:
        """Begin a connection; `known` of the link tells how it went."""
        quic = Windowed(streams=self.host.limits.streams, configuration=self.transport.configuration(is_client=True))
        link = QuicLink(self, quic, remote, expected)
        self.add(quic.host_cid, link)
        quic.connect(remote, trio.current_time())
        self.nursery.start_soon(link.run)
        return link

    # --- what links call --------------------------------------------------------------------------------------------

    def add(self, known_as: bytes, link: QuicLink) -> None:
        self._links[known_as] = link

    def remove(self, known_as: bytes, link: QuicLink) -> None:
        if self._links.get(known_as) is link:
            del self._links[known_as]

    def forget(self, link: QuicLink) -> None:
        self._links = {known_as: other for known_as, other in self._links.items() if other is not link}
        if self._for_one:
            self.close()

    def count(self, why: str) -> None:
        self.transport.dropped[why] += 1

    def send(self, datagram: bytes, remote: tuple[str, int]) -> None:
        """Raises BlockingIOError where the socket has no room, OSError where there is no way."""
        self.socket.sendto(datagram, remote)
        self.host.bytes_out += len(datagram)

    async def has_room(self) -> None:
        async with self._waits:
            await trio.lowlevel.wait_writable(self.socket)

    def try_to_send(self, datagram: bytes, remote: tuple[str, int]) -> None:
        try:
            self.send(datagram, remote)
        except OSError as error:
            log.debug("nothing sent to %s: %s", remote[0], error)

    def close_if_unused(self) -> None:
        if not self._links:
            self.close()

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            for link in set(self._links.values()):
                link.say_goodbye()
                link.abort()
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()
        if self in self.transport.endpoints:
            self.transport.endpoints.remove(self)
