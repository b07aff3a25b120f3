"""The libp2p host: `protocols.network.Network` over TCP, Noise and Yamux, faced to strangers.

py-libp2p gives sockets, handshakes, identify, limits and Kademlia's tables; its defects are mended in `patches`.
Dialling (`dialling`), peers that come and go (`connections`) and opening streams (`stream`) are our own, because
upstream waits where nobody needs to wait: 0.25 s a dial, 60 s before it tries a failed peer again.

All tasks live in `run()`. A peer's failure ends that peer's stream or connection. A defect met by what this node
does by itself is borne (`Defects`); one of libp2p's host is logged and leaves `run()` as an exception.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Mapping

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarmnode.node.discovery.kademlia import ContentRouting, Kademlia
from swarmnode.node.discovery.mdns import advertise_and_listen
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.host.addresses import (
    EVERYWHERE,
    EXPECTED,
    announced,
    parse,
    peer_of,
    public_key,
    source_towards,
    verify,
    with_peer,
)
from swarmnode.node.host.allowances import IN, OUT, HostAllowance, PeerPolicy
from swarmnode.node.host.connections import Connections
from swarmnode.node.host.dialling import Dialler, peer_id
from swarmnode.node.host.handshakes import Handshakes
from swarmnode.node.host.libp2p_host import UPGRADE, HostSettings, check_free, make_host
from swarmnode.node.host.muxed import MuxedSession, MuxedStream
from swarmnode.node.host.patches import mend_libp2p
from swarmnode.node.host.patches.basic_host import AGENT
from swarmnode.node.host.stream import Handlers, agree, multiaddrs_of
from swarmnode.node.identity import Identity
from swarmnode.node.nat.relay import RelayClient
from swarmnode.node.process import Defects
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import (
    Address,
    NetworkError,
    PeerId,
    PeerView,
    StreamBroken,
    StreamHandler,
    Traffic,
    Unreachable,
)
from swarmnode.protocols.peers.scoring import PeerScoring

log = logging.getLogger(__name__)

CLOSING = 1.5  # seconds to say goodbye to everybody

HANDLER_FAILURES = Metric("swarmnode_handler_failures_total", COUNTER, "faults of stream handlers", "protocol")


class Libp2pNetwork:
    """A node's place in the libp2p network. Use after `run()` has called `started()`."""

    def __init__(self, identity: Identity, settings: HostSettings, policy: PeerPolicy | None = None) -> None:
        mend_libp2p()
        self.me: PeerId = identity.peer_id
        self._settings = settings
        self._handshakes = Handshakes(settings.limits.connections.handshakes, settings.limits.connections.handshake)
        self.scoring = PeerScoring(settings.limits.conduct)
        self.policy = policy or PeerPolicy()
        self.defects = Defects()  # of the whole node
        limits = settings.limits
        self._allowance = HostAllowance(
            limits.connections, limits.rates, self.scoring, self.policy, settings.up, settings.down
        )
        self._found_out: tuple[Address, ...] | None = None  # announced instead of where this node listens
        # The swarm is for what works below streams: circuits, hole punching.
        self._host, self.swarm, self.quic = make_host(identity, settings, self._allowance, self._handshakes)
        # Upstream's (`host/basic_host.py:536`) cuts an address at a relay's /p2p/, and tells the relay's place as ours.
        self._host.get_addrs = lambda: multiaddrs_of(self.addresses)  # type: ignore[method-assign]
        self.connections = Connections(self._allowance)
        self.swarm.register_notifee(self.connections)
        self.handlers = Handlers()
        self._listening: list[Multiaddr] = []  # once it is known: closed sockets cannot tell where they were
        self.relay_client = RelayClient(self, self.swarm, self._allowance)
        self._dialler = Dialler(self, self.swarm, self.connections, self.scoring, self.relay_client)
        self._failures: Counter[str] = Counter()
        self.kademlia = Kademlia(self._host, self, self.connections, settings.limits.dht)
        kad = str(PROTOCOL_ID)
        self._host.set_stream_handler(TProtocol(kad), self.handlers.watched(kad, self.kademlia.handle_stream))
        self.scoring.watch(self.kademlia.violations)
        self._routing = ContentRouting(self.kademlia)
        # What a part of the network does by itself.
        self.sign, self.verify = identity.private_key.sign, verify
        self.watch_peers = self.connections.watch
        self.learn, self.known_addresses = self._dialler.learn, self._dialler.known
        self.dial_each = self._dialler.dial_each
        self.provide, self.withdraw = self._routing.provide, self._routing.withdraw
        self.find_providers = self._routing.find_providers

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.own_addresses if self._found_out is None or self._settings.announce else self._found_out

    @property
    def own_addresses(self) -> tuple[Address, ...]:
        """Where this node listens, or what its owner announces instead, each ending in /p2p/<me>."""
        places = self._settings.announce or announced(map(str, self._listening or self._host.get_transport_addrs()))
        return tuple(with_peer(place, self.me) for place in places)

    def announce_instead(self, found: tuple[Address, ...] | None) -> None:
        """Announce these addresses instead of the node's own, unless its owner says what to announce; None ends it."""
        if found != self._found_out:
            self._found_out = found
            self._routing.addresses_changed()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Raises ExpectedError where an address cannot be listened on."""
        for place in self._settings.listen:
            check_free(place)
        try:
            async with background_trio_service(self.swarm):
                try:
                    listens = await self._listen(*self._settings.listen)
                    if listens:
                        await self._listen_on_udp()
                        self._listening = self._host.get_transport_addrs()
                        await self.defects.keep(self._serve, task_status=task_status)
                finally:
                    with trio.move_on_after(CLOSING, shield=True):
                        await self._host.close()
        except* Exception:
            log.exception("the libp2p host failed")
            raise
        if not listens:
            raise ExpectedError(
                f"cannot listen on {', '.join(self._settings.listen)}; name another address with --listen",
                exit_code=CONFIG,
            )

    async def _listen(self, *places: str) -> bool:
        """Whether this node listens anywhere. Where any port will do, both families take the same."""
        first = await self.swarm.listen(*map(Multiaddr, places[:1]))
        taken = re.search(r"/tcp/[0-9]+", str(next(iter(self._host.get_transport_addrs()), "")))
        rest = [place.replace("/tcp/0", taken[0]) if taken else place for place in places[1:]]
        return await self.swarm.listen(*map(Multiaddr, rest)) or first

    async def _listen_on_udp(self) -> None:
        """QUIC at the same addresses and port numbers as TCP."""
        places = [str(address) for address in self._host.get_transport_addrs()] if self._settings.quic else []
        for place in places:
            found = re.match(r"(/ip[46]/[^/]+)/tcp/([0-9]+)", place)
            if found and not await self.swarm.listen(Multiaddr(f"{found[1]}/udp/{found[2]}/quic-v1")):
                log.warning("UDP port %s is in use by another program, so this node does without QUIC there", found[2])

    def peers(self) -> tuple[PeerView, ...]:
        return tuple(
            PeerView(
                peer=peer,
                path="direct" if self.is_direct(peer) else "relayed",
                connected_at=first.since,
                inbound=first.inbound,
                agent=self._agent_of(peer),
                group=self.connections.group_of(peer),
            )
            for peer, first in self.connections.peers()
        )

    def is_direct(self, peer: PeerId) -> bool:
        """Whether there is a connection to `peer` without a relay."""
        return any(connection.direct for connection in self.connections.of(peer))

    def dialled_through_relay(self, peer: PeerId) -> bool:
        """Whether all that connects `peer` are circuits that it made."""
        connections = self.connections.of(peer)
        return bool(connections) and all(c.inbound and not c.direct for c in connections)

    def host_of(self, peer: PeerId) -> str | None:
        """The IP address at the other end of a direct connection; None where there is none."""
        return next((connection.host for connection in self.connections.of(peer) if connection.direct), None)

    def speaks(self, peer: PeerId, protocol: str) -> bool:
        """Whether `peer` said in identify that it serves `protocol`."""
        return protocol in self.protocols_of(peer)

    def protocols_of(self, peer: PeerId) -> tuple[str, ...]:
        """What `peer` said in identify that it serves, sorted."""
        with contextlib.suppress(PeerStoreError):  # nothing stored yet
            return tuple(sorted(map(str, self.swarm.peerstore.get_protocols(peer_id(peer)))))
        return ()

    def dial_source(self, host: str) -> tuple[str, int] | None:
        """From where to dial an IP address so that a NAT maps, or a firewall opens, the listening port.

        None where this node does not listen on an address of that family, or has no way there.
        """
        family = "ip6" if ":" in host else "ip4"
        for address in self._listening:
            _, kind, listens, _, port, *_ = str(address).split("/")
            if kind == family:
                if listens == EVERYWHERE["ip6"]:  # not from an address that is gone tomorrow
                    listens = source_towards(host) or ""
                return (listens, int(port)) if listens else None
        return None

    async def connect_from_listening_port(self, peer: PeerId) -> MuxedSession | None:
        """One more connection to a directly connected peer, from the listening port; None where it failed."""
        host = self.host_of(peer)
        if host is None or (source := self.dial_source(host)) is None:
            return None
        return await self._dialler.dial_beside(peer, host, "tcp", source)

    async def connect_over_quic(self, peer: PeerId, host: str) -> MuxedSession | None:
        """The connection to a peer over QUIC at an IP address, or one more; None where it failed."""
        there = (c.session for c in self.connections.of(peer) if c.is_quic and c.host == host)
        session = next(there, None)
        return session or await self._dialler.dial_beside(peer, host, "quic")

    def rtt(self, peer: PeerId) -> float | None:
        """Round-trip time in seconds from the connection's own pings; None until the first came back."""
        rtts = (connection.session.rtt() for connection in self.connections.of(peer))
        return next(filter(None, rtts), None)

    def cap_rates(self, *, up: float, down: float) -> None:
        """From now on send and receive no more than so many bytes a second, of all peers; 0: no cap."""
        self._allowance.up.rate, self._allowance.down.rate = up, down

    def traffic(self) -> Traffic:
        return Traffic(bytes_in=self._allowance.bytes_in, bytes_out=self._allowance.bytes_out)

    def traffic_of(self, peer: PeerId | None) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Bytes of streams received and sent, by protocol: of a peer while it is connected, of all since the start."""
        of = self._allowance if peer is None else self._allowance.of(peer)
        return of.bytes_of[IN], of.bytes_of[OUT]

    async def connect(self, target: PeerId | Address, *, timeout: float = 10.0) -> PeerId:
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(timeout):
            endpoint = parse(target)
            if endpoint is not None and endpoint.peer is None:
                return await self._dialler.dial(endpoint.place + endpoint.who)
            peer = self._peer_of(target)
            if self.connections.best(peer) is not None:
                return peer
            if endpoint is not None:
                self.learn(peer, (target,))
            return await self._dialler.dial(peer)
        raise Unreachable(f"{target} did not answer within {timeout:g} s")

    def _peer_of(self, target: PeerId | Address) -> PeerId:
        try:
            peer = peer_of(target) if target.startswith("/") else target
            public_key(peer)
        except ValueError as error:
            nobody = target.startswith("/") and "/p2p/" not in target
            raise Unreachable(f"{target} cannot be dialled: {EXPECTED}" if nobody else str(error)) from error
        if peer == self.me:
            raise Unreachable(f"{target} is this node itself")
        return peer

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout: float = 10.0) -> MuxedStream:
        with trio.move_on_after(timeout):
            await self.connect(peer, timeout=timeout)
            connection = self.connections.best(peer)
            if connection is None:
                raise Unreachable(f"{peer} closed the connection")
            self._dialler.look_for_faster(peer)
            try:
                stream = await connection.session.open_stream()
                await agree(stream, protocol)
            except StreamBroken as error:
                raise Unreachable(f"{peer} ended the stream before agreeing on {protocol}") from error
            return stream
        raise Unreachable(f"{peer} did not answer for {protocol} within {timeout:g} s")

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def handle(incoming: INetStream) -> None:
            stream: MuxedStream = incoming.muxed_stream  # type: ignore[attr-defined]
            if self.scoring.refusal(stream.peer) is not None:
                stream.abort()
                return
            try:
                await handler(stream)
                stream.send_eof_nowait()
            except NetworkError as error:
                log.debug("%s with %s ended: %s", protocol, stream.peer, error)
            except Exception:
                level = logging.DEBUG if protocol in self._failures else logging.ERROR
                self._failures[protocol] += 1
                log.log(level, "the handler of %s failed with %s", protocol, stream.peer, exc_info=True)
            finally:
                stream.abort()

        self._host.set_stream_handler(TProtocol(protocol), self.handlers.watched(protocol, handle))

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            with self.connections.watch() as events:
                async with trio.open_nursery() as nursery:
                    self.connections.nursery = nursery
                    nursery.start_soon(self._routing.run)
                    if self._settings.mdns:
                        nursery.start_soon(advertise_and_listen, self, self._settings.limits.connections.peers)
                    task_status.started()
                    async for event in events:
                        if event.up and not event.moved:
                            nursery.start_soon(self._notice_identified, event.peer)
        finally:
            self.connections.nursery = None

    def measure(self, metrics: Metrics) -> None:
        metrics.show(HANDLER_FAILURES, lambda: self._failures)
        of_connections = (self._handshakes, self.quic, self.connections, self.scoring, self._allowance)
        for part in (*of_connections, self.kademlia, self._routing):
            part.measure(metrics)

    async def _notice_identified(self, peer: PeerId) -> None:
        """Wait until identify told what the peer speaks; it may then keep provider records."""
        with trio.move_on_after(UPGRADE):
            while peer in self.connections and not self._agent_of(peer):  # noqa: ASYNC110 (upstream has no event)
                await trio.sleep(0.25)
        if peer in self.connections:
            self._routing.peer_arrived()

    def _agent_of(self, peer: PeerId) -> str:
        with contextlib.suppress(PeerStoreError):  # nothing stored yet
            return str(self.swarm.peerstore.get(peer_id(peer), AGENT))
        return ""
