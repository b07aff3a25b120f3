"""The libp2p host: `protocols.network.Network` over TCP, Noise and Yamux, faced to strangers.

py-libp2p gives sockets, handshakes, identify, ping, limits and Kademlia's tables; its defects are mended in
`libp2p_patches`. Dialling, choosing among connections, opening streams, peers' comings and goings are here, because
upstream's versions wait where nobody need wait (0.25 s a dial, 60 s before a failed peer is tried again).

All tasks live in `run()`. A peer's failure ends that peer's stream or connection; a failure of the host itself is
logged and leaves `run()` as an exception.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio
from cryptography.exceptions import InvalidSignature
from libp2p import new_host
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.identity.identify import identify
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarmnode.node import addresses as multiaddrs
from swarmnode.node import lan, libp2p_patches
from swarmnode.node.gossip import Gossip
from swarmnode.node.libp2p_patches.agent_versions import KEY as AGENT
from swarmnode.node.libp2p_patches.yamux_session import Session, SessionStream
from swarmnode.node.metered_tcp import Meter, MeteredTCP
from swarmnode.node.providers import Providers
from swarmnode.protocols.network import (
    Address,
    MessageHandler,
    NetworkError,
    PeerEvent,
    PeerId,
    PeerView,
    ProtocolUnsupported,
    StreamBroken,
    StreamHandler,
    Traffic,
    Unreachable,
)

if TYPE_CHECKING:
    from swarmnode.node.identity import Identity

log = logging.getLogger(__name__)

STAGGER = 0.2  # seconds before the next address of a peer is tried beside the first
MAX_ADDRESSES = 16  # remembered per peer
MAX_KNOWN = 2048  # peers whose addresses are remembered
MAX_TEXT = 256  # characters of an address
CONNECTIONS_PER_PEER = 4  # both sides may dial at once, and dial again when one side lost its end
STREAMS_PER_PEER = 256
UPGRADE = 5.0  # seconds for the handshakes of a connection
EVENTS = 256  # peer events kept for a reader that is behind
CLOSING = 1.5  # seconds to say goodbye to everybody
HANDSHAKE = b"\x13/multistream/1.0.0\n"
MAX_LINE = 512  # bytes of a multistream line


class PortTaken(NetworkError):
    """Another program listens on the port. The text says what to do."""


@dataclass(frozen=True)
class HostSettings:
    """How a host faces the network."""

    listen: tuple[str, ...]  # multiaddrs, "/ip4/0.0.0.0/tcp/4077"; port 0 takes any free one
    announce: tuple[str, ...] = ()  # multiaddrs told to others instead of those of the interfaces
    mdns: bool = False  # find peers on the local network
    up: float = 0.0  # bytes per second at the sockets, all peers together; 0 = no cap
    down: float = 0.0
    max_peers: int = 64
    agent: str = "swarmnode"


class Libp2pStream:
    """A `protocols.network.Stream` on a Yamux stream."""

    def __init__(self, stream: SessionStream, peer: PeerId) -> None:
        self._stream = stream
        self._peer = peer

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._stream.send_all(data)
        except MuxedStreamError as error:
            raise StreamBroken(f"stream to {self._peer}: {error}") from error

    async def receive_some(self, max_bytes: int) -> bytes:
        try:
            return await self._stream.receive_some(max_bytes)
        except MuxedStreamError as error:
            raise StreamBroken(f"stream from {self._peer}: {error}") from error

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._stream.broken:
            raise StreamBroken(f"stream to {self._peer} is broken")
        self._stream.send_eof_nowait()

    async def aclose(self) -> None:
        self._stream.abort()


class Libp2pNetwork:
    """A node's place in the libp2p network. Use after `run()` has called `started()`."""

    def __init__(self, identity: Identity, settings: HostSettings) -> None:
        libp2p_patches.apply()
        _quiet_libp2p()
        self._identity = identity
        self._settings = settings
        self._meter = Meter(up=settings.up, down=settings.down)
        identify.AGENT_VERSION = settings.agent
        self._host: Any = None  # py-libp2p asks for the addresses while it is being made
        self._host = _make_host(identity, settings, self._meter, self._announced)
        network = self._host.get_network()
        assert isinstance(network, Swarm)
        self._swarm = network
        _tame(self._swarm)
        self._swarm.register_notifee(_Watcher(self))
        self._connected: dict[PeerId, dict[int, _Connection]] = {}
        self._known: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()
        self._dialling: dict[PeerId, _Dial] = {}
        self._feeds: set[_Feed] = set()
        self._failures: dict[str, int] = {}
        self._nursery: trio.Nursery | None = None
        self._gossip = Gossip(self)
        self._providers = Providers(self._host)

    @property
    def me(self) -> PeerId:
        return self._identity.peer_id

    @property
    def addresses(self) -> tuple[Address, ...]:
        if self._settings.announce:
            told = self._settings.announce
        elif self._host is None:
            told = ()
        else:
            told = multiaddrs.announced(str(address) for address in self._host.get_transport_addrs())
        return tuple(multiaddrs.with_peer(address, self.me) for address in told)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Raises PortTaken, or NetworkError where an address cannot be listened on."""
        listen = [Multiaddr(address) for address in self._settings.listen]
        for address in listen:
            _check_free(address)
        try:
            async with background_trio_service(self._swarm):
                try:
                    if not await self._swarm.listen(*listen):
                        raise NetworkError(f"cannot listen on {', '.join(self._settings.listen)}: check `listen`")
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        nursery.start_soon(self._providers.run)
                        await nursery.start(self._run_gossip)
                        if self._settings.mdns:
                            nursery.start_soon(lan.advertise_and_listen, self._swarm, self.addresses, self._found)
                        task_status.started()
                finally:
                    self._nursery = None
                    with trio.move_on_after(CLOSING) as closing:
                        closing.shield = True
                        await self._host.close()
        except* (trio.Cancelled, NetworkError):
            raise
        except* Exception:
            log.exception("the libp2p host failed")
            raise

    def peers(self) -> tuple[PeerView, ...]:
        return tuple(
            PeerView(
                peer=peer,
                addresses=self._addresses_of(peer, first),
                path="direct" if first.direct else "relayed",
                connected_at=first.since,
                inbound=first.inbound,
                agent=self._agent_of(peer),
            )
            for peer, connections in self._connected.items()
            for first in list(connections.values())[:1]
        )

    def rtt(self, peer: PeerId) -> float | None:
        """Round-trip time in seconds from the connection's own pings; None until the first came back."""
        for connection in self._connected.get(peer, {}).values():
            if connection.session.rtt():
                return connection.session.rtt()
        return None

    def traffic(self) -> Traffic:
        return Traffic(bytes_in=self._meter.bytes_in, bytes_out=self._meter.bytes_out)

    def handler_failures(self) -> Mapping[str, int]:
        """Exceptions that escaped stream handlers since the start, per protocol."""
        return dict(self._failures)

    def sign(self, message: bytes) -> bytes:
        return self._identity.private_key.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        try:
            multiaddrs.public_key(peer).verify(signature, message)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def learn(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        if peer == self.me:
            return
        fresh = [multiaddrs.with_peer(address, peer) for address in addresses if _dialable(address)]
        known = tuple(dict.fromkeys(fresh + list(self._known.pop(peer, ()))))[:MAX_ADDRESSES]
        if known:
            self._known[peer] = known
            self._host.get_peerstore().add_addrs(_id(peer), [Multiaddr(a.partition("/p2p/")[0]) for a in known], 3600)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        told = list(self._known.get(peer, ()))
        store = self._host.get_peerstore()
        try:
            if store.has_peer(_id(peer)):
                told += [multiaddrs.with_peer(str(address), peer) for address in store.addrs(_id(peer))]
        except Exception as error:  # PeerStoreError: all its addresses expired
            log.debug("no stored addresses of %s: %s", peer, error)
        return tuple(address for address in dict.fromkeys(told) if _dialable(address))[:MAX_ADDRESSES]

    async def connect(self, target: PeerId | Address, *, timeout: float = 10.0) -> PeerId:
        await trio.lowlevel.checkpoint()
        try:
            peer = multiaddrs.peer_of(target) if target.startswith("/") else target
            multiaddrs.public_key(peer)
        except ValueError as error:
            raise Unreachable(str(error)) from error
        if peer == self.me:
            raise Unreachable(f"{target} is this node itself")
        if self._open_connection(peer) is not None:
            return peer
        if target.startswith("/") and _dialable(target):
            self.learn(peer, (target,))
        with trio.move_on_after(timeout):
            await self._dial_together(peer)
            return peer
        raise Unreachable(f"{target} did not answer within {timeout:g} s")

    async def disconnect(self, peer: PeerId) -> None:
        connections = list(self._connected.get(peer, {}).values())
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    nursery.start_soon(connection.conn.close)
        await trio.lowlevel.checkpoint()

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout: float = 10.0) -> Libp2pStream:
        with trio.move_on_after(timeout):
            await self.connect(peer, timeout=timeout)
            connection = self._open_connection(peer)
            if connection is None:
                raise Unreachable(f"{peer} closed the connection")
            try:
                stream = await connection.session.open_stream()
            except MuxedStreamError as error:
                raise Unreachable(f"{peer} closed the connection") from error
            try:
                await _agree(stream, protocol)
            except MuxedStreamError as error:
                raise Unreachable(f"{peer} ended the stream before agreeing on {protocol}") from error
            except _Refused as error:
                raise ProtocolUnsupported(f"{peer} does not speak {protocol}") from error
            except BaseException:
                stream.abort()
                raise
            return Libp2pStream(stream, peer)
        raise Unreachable(f"{peer} did not answer for {protocol} within {timeout:g} s")

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def handle(incoming: INetStream) -> None:
            muxed = incoming.muxed_stream  # type: ignore[attr-defined]
            stream = Libp2pStream(muxed, str(muxed.muxed_conn.peer_id))
            try:
                await handler(stream)
            except NetworkError as error:
                log.debug("%s with %s ended: %s", protocol, stream.peer, error)
                muxed.abort()
            except Exception:
                self._failures[protocol] = self._failures.get(protocol, 0) + 1
                log.exception("the handler of %s failed with %s", protocol, stream.peer)
                muxed.abort()
            except BaseException:
                muxed.abort()
                raise
            else:
                muxed.end()

        self._host.set_stream_handler(TProtocol(protocol), handle)

    async def publish(self, topic: str, message: bytes) -> None:
        await self._gossip.publish(topic, message)

    def subscribe(self, topic: str, handler: MessageHandler) -> None:
        self._gossip.subscribe(topic, handler)

    async def provide(self, key: bytes) -> None:
        await self._providers.provide(key)

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        found = await self._providers.find(key, limit)
        for peer, addresses in found.items():
            self.learn(peer, addresses)
        return tuple(found)

    @contextmanager
    def watch_peers(self) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        feed = _Feed()
        self._feeds.add(feed)
        try:
            with feed.reader:
                yield feed.reader
        finally:
            self._feeds.discard(feed)
            feed.close()

    def connection_opened(self, conn: INetConn) -> None:
        """py-libp2p registered a connection."""
        session = conn.muxed_conn
        assert isinstance(session, Session)
        peer = str(session.peer_id)
        if peer not in self._connected and len(self._connected) >= self._settings.max_peers and self._nursery:
            log.info("refused %s: %d peers are enough", peer, self._settings.max_peers)
            self._nursery.start_soon(conn.close)
            return
        inbound = getattr(conn, "direction", None) == Direction.INBOUND
        direct = conn.get_connection_type() != ConnectionType.RELAYED
        connection = _Connection(conn, session, trio.current_time(), inbound, direct)
        connections = self._connected.setdefault(peer, {})
        connections[id(conn)] = connection
        if len(connections) == 1:
            self._tell(PeerEvent(peer, up=True))
            if self._nursery is not None:
                self._nursery.start_soon(self._notice_identified, peer)

    def connection_closed(self, conn: INetConn) -> None:
        """py-libp2p let go of a connection."""
        peer = str(conn.muxed_conn.peer_id)
        connections = self._connected.get(peer, {})
        if connections.pop(id(conn), None) is not None and not connections:
            del self._connected[peer]
            self._tell(PeerEvent(peer, up=False))

    def _tell(self, event: PeerEvent) -> None:
        for feed in self._feeds:
            feed.put(event)

    async def _notice_identified(self, peer: PeerId) -> None:
        """Wait until identify told what the peer speaks; it may then keep provider records."""
        with trio.move_on_after(UPGRADE):
            while peer in self._connected and not self._agent_of(peer):  # noqa: ASYNC110 (upstream has no event)
                await trio.sleep(0.25)
        if peer in self._connected:
            self._providers.peer_arrived()

    def _open_connection(self, peer: PeerId) -> _Connection | None:
        usable = [c for c in self._connected.get(peer, {}).values() if not c.session.is_closed]
        return min(usable, key=lambda c: (not c.direct, c.since), default=None)

    async def _dial_together(self, peer: PeerId) -> None:
        """Connect to `peer`; callers that come while a dial is under way share its result."""
        dial = self._dialling.get(peer)
        if dial is None:
            if self._nursery is None:
                raise Unreachable("the network is not running")
            dial = self._dialling[peer] = _Dial()
            self._nursery.start_soon(self._dial, peer, dial)
        dial.waiting += 1
        try:
            await dial.done.wait()
        finally:
            dial.waiting -= 1
            if not dial.waiting:
                dial.scope.cancel()  # nobody wants it any more
                if self._dialling.get(peer) is dial:
                    del self._dialling[peer]
        if dial.error is not None and self._open_connection(peer) is None:
            raise Unreachable(dial.error)

    async def _dial(self, peer: PeerId, dial: _Dial) -> None:
        dial.error = f"nobody dialled {peer}"
        try:
            with dial.scope:
                dial.error = await self._race(peer)
        finally:
            if self._dialling.get(peer) is dial:
                del self._dialling[peer]
            dial.done.set()

    async def _race(self, peer: PeerId) -> str | None:
        """Try the known addresses, a little apart; None once connected, else why none worked."""
        mine = {address.partition("/p2p/")[0] for address in self.addresses}
        candidates = [address for address in self.known_addresses(peer) if address.partition("/p2p/")[0] not in mine]
        if not candidates:
            return f"no address of {peer} is known"
        reasons: list[str] = []
        connected = False
        async with trio.open_nursery() as nursery:

            async def attempt(address: Address, failed: trio.Event) -> None:
                nonlocal connected
                try:
                    with trio.fail_after(2 * UPGRADE):
                        await self._swarm.dial_addr(Multiaddr(address), _id(peer))
                except Exception as error:
                    reasons.append(f"{address.partition('/p2p/')[0]}: {_reason(error)}")
                    failed.set()
                else:
                    connected = True
                    nursery.cancel_scope.cancel()

            for address in candidates:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(STAGGER):
                    await failed.wait()
        if connected or self._open_connection(peer) is not None:
            return None
        return f"{peer} could not be reached ({'; '.join(reasons)})"

    async def _run_gossip(self, *, task_status: trio.TaskStatus[None]) -> None:
        await self._gossip.run(task_status=task_status)

    def _found(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """mDNS heard of `peer`."""
        if peer == self.me or self._nursery is None:
            return
        self.learn(peer, addresses)
        if peer not in self._connected and len(self._connected) < self._settings.max_peers:
            self._nursery.start_soon(self._connect_quietly, peer)

    async def _connect_quietly(self, peer: PeerId) -> None:
        try:
            await self.connect(peer)
        except Unreachable as error:
            log.debug("heard of %s on the local network: %s", peer, error)

    def _announced(self, _: list[Multiaddr]) -> list[Multiaddr]:
        return [Multiaddr(address.partition("/p2p/")[0]) for address in self.addresses]

    def _addresses_of(self, peer: PeerId, connection: _Connection) -> tuple[Address, ...]:
        told = self.known_addresses(peer)
        if connection.inbound:
            return told
        dialled = (multiaddrs.with_peer(str(address), peer) for address in connection.conn.get_transport_addresses())
        return tuple(dict.fromkeys([*dialled, *told]))

    def _agent_of(self, peer: PeerId) -> str:
        store = self._host.get_peerstore()
        with contextlib.suppress(Exception):  # PeerStoreError: nothing stored yet
            return str(store.get(_id(peer), AGENT))
        return ""


@dataclass(frozen=True)
class _Connection:
    conn: INetConn
    session: Session
    since: float  # trio.current_time()
    inbound: bool
    direct: bool


class _Dial:
    """A dial under way: who waits for it, and why it failed."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.waiting = 0
        self.error: str | None = None


class _Feed:
    """A bounded channel that forgets its oldest event rather than stop the host."""

    def __init__(self) -> None:
        self._sender, self.reader = trio.open_memory_channel[PeerEvent](EVENTS)
        self._drain = self.reader.clone()

    def put(self, event: PeerEvent) -> None:
        try:
            self._sender.send_nowait(event)
        except trio.WouldBlock:
            self._drain.receive_nowait()
            self._sender.send_nowait(event)

    def close(self) -> None:
        self._sender.close()
        self._drain.close()


class _Watcher(INotifee):
    """Hears from py-libp2p which connections open and close."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._network.connection_opened(conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._network.connection_closed(conn)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


class _NoAutoConnector:
    """Stands where py-libp2p re-dials known peers by itself; `node.discovery` decides that here."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def maybe_connect(self) -> None: ...

    async def run_background_task(self, nursery: trio.Nursery) -> None: ...

    def record_disconnect(self, peer: ID) -> None: ...


class _Refused(Exception):
    """The other side answered "na"."""


def _make_host(identity: Identity, settings: HostSettings, meter: Meter, announced: Any) -> Any:
    keys = create_new_key_pair(identity.private_key.private_bytes_raw())
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    most = 2 * settings.max_peers  # two sides that dial at once hold two connections for a while
    return new_host(
        key_pair=keys,
        transports=[MeteredTCP(meter)],
        sec_opt={NOISE: noise},  # nothing weaker is offered or accepted
        muxer_preference="YAMUX",
        addrs_factory=announced,
        negotiate_timeout=int(UPGRADE),
        connection_config=ConnectionConfig(
            max_connections=most,
            min_connections=0,
            low_watermark=0,
            high_watermark=most,
            max_connections_per_peer=CONNECTIONS_PER_PEER,
            inbound_upgrade_timeout=UPGRADE,
            outbound_upgrade_timeout=UPGRADE,
        ),
        resource_manager=ResourceManager(
            limits=ResourceLimits(max_connections=2 * most, max_streams=most * STREAMS_PER_PEER),
            connection_limits=ConnectionLimits(
                max_established_per_peer=CONNECTIONS_PER_PEER, max_established_total=most
            ),
            enable_metrics=False,
            enable_memory_limits=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
        ),
    )


def _tame(swarm: Swarm) -> None:
    """One attempt a dial, and no dialling on its own."""
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm.auto_connector = _NoAutoConnector()  # type: ignore[assignment]


def _quiet_libp2p() -> None:
    """What peers do wrong is logged here, with the peer; upstream logs it as errors, a traceback each."""
    if not log.isEnabledFor(logging.DEBUG):
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)


async def _agree(stream: SessionStream, protocol: str) -> None:
    """multistream-select in one round trip: greeting and protocol are sent together."""
    line = protocol.encode() + b"\n"
    if len(line) > 127:
        raise ValueError(f"a protocol id has at most 126 bytes: {protocol}")
    await stream.send_all(HANDSHAKE + bytes([len(line)]) + line)
    if await _line(stream) != HANDSHAKE[1:] or await _line(stream) != line:
        stream.abort()
        raise _Refused


async def _line(stream: SessionStream) -> bytes:
    size = shift = 0
    while True:
        byte = (await _exactly(stream, 1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > MAX_LINE or shift > 14:
        raise _Refused
    return await _exactly(stream, size)


async def _exactly(stream: SessionStream, size: int) -> bytes:
    buffer = b""
    while len(buffer) < size:
        chunk = await stream.receive_some(size - len(buffer))
        if not chunk:
            raise MuxedStreamError("the stream ended early")
        buffer += chunk
    return buffer


def _check_free(address: Multiaddr) -> None:
    """Raise PortTaken where someone listens: upstream binds with SO_REUSEPORT and would share the port in silence."""
    _, family, host, _, port = str(address).split("/")[:5]
    if port == "0":
        return
    with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise NetworkError(f"cannot listen on {host} port {port}: {error.strerror}") from error
            raise PortTaken(
                f"port {port} is in use by another program, perhaps another swarmnode; "
                f"choose another with --port, or --port 0 for any free one "
                f"(`ss -ltnp 'sport = :{port}'` shows who has it)"
            ) from error


def _id(peer: PeerId) -> ID:
    return ID.from_string(peer)


def _dialable(address: Address) -> bool:
    parts = address.split("/")
    return (
        len(address) <= MAX_TEXT
        and len(parts) >= 5
        and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6")
        and parts[3] == "tcp"
        and parts[2] not in ("0.0.0.0", "::")
        and (len(parts) == 5 or parts[5] == "p2p")
    )


def _reason(error: BaseException) -> str:
    """The innermost cause in few words."""
    while True:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None:
            break
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if "does not correspond" in str(error):  # the Noise handshake's words
        return "another peer answers there"
    return "no answer" if isinstance(error, trio.TooSlowError) else str(error) or type(error).__name__
