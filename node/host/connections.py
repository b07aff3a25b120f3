"""Who is connected: py-libp2p's connections, grouped by peer, and the feed of peers that come and go."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.connection_types import ConnectionType
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from swarmnode.node.host.allowances import HostPool, Pacer, PeerShare
from swarmnode.node.host.limits import ConnectionLimits
from swarmnode.node.host.patches.yamux_session import YamuxSession
from swarmnode.node.host.tcp import metered_stream_of
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerEvent, PeerId
from swarmnode.protocols.peers.diversity import Group, crowd, group_of_host, through
from swarmnode.protocols.peers.scoring import PeerScoring, Standing, Violations

log = logging.getLogger(__name__)

CROWD = 8  # part of all peers above which those from one group make room for others
EVENTS = 256  # peer events kept for a reader that is behind

PEERS = Metric("swarmnode_peers", GAUGE, "peers connected")
CONNECTIONS = Metric("swarmnode_connections", GAUGE, "connections of all peers")
STREAMS = Metric("swarmnode_streams", GAUGE, "streams that peers have open here")
UNREAD = Metric("swarmnode_unread_bytes", GAUGE, "bytes that arrived and were not read yet, with what pieces cost")
TURNED_AWAY = Metric("swarmnode_turned_away_total", COUNTER, "connections closed once their peer was known", "why")
TURNED = ("banned", "enough peers", "crowded out")


@dataclass(frozen=True)
class Connection:
    """One connection of a peer; it may have several for a while."""

    conn: INetConn
    session: YamuxSession
    since: float  # trio.current_time()
    inbound: bool
    direct: bool
    group: Group = None


class Connections(INotifee):
    """Kept up to date by py-libp2p's notifications."""

    def __init__(
        self,
        limits: ConnectionLimits,
        scoring: PeerScoring,
        pacer: Pacer,
    ) -> None:
        self._limits = limits
        self._scoring = scoring
        self._pacer = pacer
        self._nursery: trio.Nursery | None = None  # where connections are closed
        self._of: dict[PeerId, dict[int, Connection]] = {}
        self._shares: dict[PeerId, PeerShare] = {}  # of those connected
        self._pool = HostPool(limits)
        self._feeds: set[_Feed] = set()
        self._turned_away: Counter[str] = Counter()
        self._leaving: set[PeerId] = set()  # who makes room for another and is not gone yet
        self.violations = Violations("connections")
        scoring.watch(self.violations)
        scoring.on_ban(self._hang_up)

    def run_in(self, nursery: trio.Nursery | None) -> None:
        self._nursery = nursery

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._of

    def __len__(self) -> int:
        """Connected peers."""
        return len(self._of)

    def peers(self) -> Iterator[tuple[PeerId, Connection]]:
        """Each peer with its oldest connection."""
        for peer, connections in self._of.items():
            yield peer, next(iter(connections.values()))

    def of(self, peer: PeerId) -> tuple[Connection, ...]:
        """The peer's connections, the oldest first."""
        return tuple(self._of.get(peer, {}).values())

    def best(self, peer: PeerId) -> Connection | None:
        """The one to open streams on: direct before relayed, then the oldest."""
        usable = [c for c in self.of(peer) if not c.session.is_closed]
        return min(usable, key=lambda c: (not c.direct, c.since), default=None)

    @contextmanager
    def watch(self) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        feed = _Feed()
        self._feeds.add(feed)
        try:
            with feed.reader:
                yield feed.reader
        finally:
            self._feeds.discard(feed)
            feed.close()

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """py-libp2p registered a connection."""
        session = conn.muxed_conn
        assert isinstance(session, YamuxSession)
        peer = str(session.peer_id)
        if self._scoring.standing(peer) is Standing.BANNED:
            log.debug("turned %s away: it is banned for a while", peer)
            self._turned_away["banned"] += 1
            self._drop(conn)
            return
        direct = conn.get_connection_type() != ConnectionType.RELAYED
        group = _group_of(conn, session, direct=direct)
        if peer not in self._of and len(self._of) - len(self._leaving) >= self._limits.peers:
            other = self._to_displace(group)
            if other is None:
                log.info("turned %s away: %d peers are enough", peer, self._limits.peers)
                self._turned_away["enough peers"] += 1
                self._drop(conn)
                return
            self._displace(other)
        self._settle(peer, session)
        inbound = getattr(conn, "direction", None) == Direction.INBOUND
        connection = Connection(conn, session, trio.current_time(), inbound, direct, group)
        connections = self._of.setdefault(peer, {})
        before = self.best(peer)
        connections[id(conn)] = connection
        if direct and before is not None and not before.direct:
            self._tell(PeerEvent(peer, up=True, moved=True))
        if len(connections) == 1:
            self._tell(PeerEvent(peer, up=True))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """py-libp2p let go of a connection."""
        peer = str(conn.muxed_conn.peer_id)
        connections = self._of.get(peer, {})
        if connections.pop(id(conn), None) is not None and not connections:
            del self._of[peer], self._shares[peer]
            self._leaving.discard(peer)
            self._tell(PeerEvent(peer, up=False))

    def group_of(self, peer: PeerId) -> Group:
        """Where a connected peer connects from, directly rather than through a relay."""
        best = self.best(peer)
        return best.group if best is not None else None

    def _to_displace(self, newcomer: Group) -> PeerId | None:
        """The peer that makes room for one more: the newest that dialled in from the group that crowds the others.

        None where no group has more than its share, or the newcomer's has as many: then there is no room for it.
        """
        groups = {peer: self.group_of(peer) for peer in self._of if peer not in self._leaving}
        counted = Counter(groups.values())
        crowding = crowd(groups.values(), least=max(2, self._limits.peers // CROWD))
        if crowding is None or (newcomer is not None and counted[newcomer] + 1 >= counted[crowding]):
            return None
        came = [(first.since, peer) for peer, first in self.peers() if first.inbound and groups.get(peer) == crowding]
        return max(came)[1] if came else None

    def _hang_up(self, peer: PeerId) -> None:
        for connection in self.of(peer):
            self._drop(connection.conn)

    def _drop(self, conn: INetConn) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(conn.close)

    def _displace(self, peer: PeerId) -> None:
        log.info("let go of %s, one of many from %s, for one from elsewhere", peer, self.group_of(peer))
        self._turned_away["crowded out"] += 1
        self._leaving.add(peer)
        self._hang_up(peer)

    def _settle(self, peer: PeerId, session: YamuxSession) -> None:
        """From now on the connection counts as its peer's."""
        session.move_to(self._shares.setdefault(peer, PeerShare(self._pool)))
        session.complain = partial(self.violations.note, peer)
        stream = metered_stream_of(session.secured_conn)
        if stream is not None:
            stream.settled(self._pacer.of(peer))

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PEERS, lambda: len(self._of))
        metrics.show(CONNECTIONS, lambda: sum(map(len, self._of.values())))
        metrics.show(STREAMS, lambda: self._pool.streams)
        metrics.show(UNREAD, lambda: self._pool.unread)
        metrics.show(TURNED_AWAY, lambda: {why: self._turned_away[why] for why in TURNED})
        self.violations.measure(metrics)

    def _tell(self, event: PeerEvent) -> None:
        for feed in self._feeds:
            feed.put(event)


def relay_in(conn: INetConn) -> PeerId | None:
    """The relay that carries a relayed connection."""
    parts = [str(address).split("/") for address in conn.get_transport_addresses()]
    return next((part[part.index("p2p") + 1] for part in parts if "p2p-circuit" in part and "p2p" in part), None)


def _group_of(conn: INetConn, session: YamuxSession, *, direct: bool) -> Group:
    if not direct:
        relay = relay_in(conn)
        return through(relay) if relay is not None else None
    remote = session.get_remote_address()
    return group_of_host(remote[0]) if remote is not None else None


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
