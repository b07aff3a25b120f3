"""Who is connected: py-libp2p's connections, grouped by peer, and the feed of peers that come and go."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import time as wall_clock  # seconds since 1970

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.network.swarm import Swarm
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import CIRCUIT
from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.host.muxed import MuxedSession
from swarmnode.node.host.quic import QuicSession
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import Address, PeerEvent, PeerId
from swarmnode.protocols.peers.diversity import Group, crowd, group_of_host, through
from swarmnode.protocols.peers.scoring import Standing

log = logging.getLogger(__name__)

CROWD = 8  # part of all peers above which those from one group make room for others
EVENTS = 256  # peer events kept for a reader that is behind
MAX_HISTORIES, MAX_CHANGES = 256, 16  # peers whose paths are remembered, and the newest changes of each
NO_PATH = "none"
SLOW = 256 * 1024  # bytes/s over TCP, below which QUIC is tried
FASTER = 1.25  # times the rate of TCP that QUIC must have brought

PEERS = Metric("swarmnode_peers", GAUGE, "peers connected")
CONNECTIONS = Metric("swarmnode_connections", GAUGE, "connections of all peers")
TURNED_AWAY = Metric("swarmnode_turned_away_total", COUNTER, "connections closed once their peer was known", "why")
TURNED = ("banned", "blocked", "enough connections", "enough peers", "crowded out")


@dataclass(frozen=True)
class Connection:
    """One connection of a peer; it may have several for a while."""

    conn: INetConn
    session: MuxedSession
    since: float  # trio.current_time()
    inbound: bool
    relay: PeerId | None  # who carries it, where it is not direct
    host: str | None  # the IP address at the other end, where it is direct
    address: Address  # multiaddr of the other end
    carried_from: Group = None  # where the relay connects from

    @property
    def direct(self) -> bool:
        return self.relay is None

    @property
    def is_quic(self) -> bool:
        return isinstance(self.session, QuicSession)

    @cached_property
    def group(self) -> Group:
        """Where the peer connects from: all whom relays of one network carry, through that."""
        if self.relay is not None:
            return through(self.carried_from or self.relay)
        return group_of_host(self.host) if self.host is not None else None


@dataclass(frozen=True)
class PathChange:
    """How a peer was reached from a time on, or what was tried to change that."""

    at: float  # s since 1970
    path: str  # "direct", "relayed" or NO_PATH
    why: str


@dataclass
class _Peer:
    connections: dict[int, Connection] = field(default_factory=dict)  # by the id of py-libp2p's, the oldest first
    leaving: bool = False  # it makes room for another and is not gone yet


class Connections(INotifee):
    """Kept up to date by py-libp2p's notifications. `nursery` is where connections are closed, while the host runs."""

    def __init__(self, allowance: HostAllowance) -> None:
        self._limits, self._scoring = allowance.limits, allowance.scoring
        self.nursery: trio.Nursery | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._watchers: dict[trio.MemorySendChannel[PeerEvent], trio.MemoryReceiveChannel[PeerEvent]] = {}
        self._turned_away: Counter[str] = Counter()
        self._histories: OrderedDict[PeerId, deque[PathChange]] = OrderedDict()  # who changed longest ago goes first
        self._scoring.on_ban = self.hang_up

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def peers(self) -> Iterator[tuple[PeerId, Connection]]:
        """Each peer with its oldest connection."""
        for peer, known in self._peers.items():
            yield peer, next(iter(known.connections.values()))

    def of(self, peer: PeerId) -> tuple[Connection, ...]:
        """The peer's connections, the oldest first."""
        known = self._peers.get(peer)
        return tuple(known.connections.values()) if known is not None else ()

    def best(self, peer: PeerId) -> Connection | None:
        """The one to open streams on: direct before relayed, TCP before QUIC unless faster, then the oldest."""
        usable = [c for c in self.of(peer) if not c.session.is_closed]
        best = min(usable, key=lambda c: (not c.direct, c.is_quic, c.since), default=None)
        over_quic = next((c for c in usable if c.direct and c.is_quic), None)
        if best is None or best.is_quic or not best.direct or over_quic is None:
            return best
        return over_quic if is_faster(over_quic, best) else best

    def slow(self, peer: PeerId) -> Connection | None:
        """A direct connection over TCP that brings little, where there is none over QUIC beside it."""
        best, now = self.best(peer), trio.current_time()
        if best is None or not best.direct or any(each.is_quic for each in self.of(peer)):
            return None
        rate = best.session.pace.rate(now)
        return best if rate is not None and rate < SLOW else None

    def group_of(self, peer: PeerId) -> Group:
        """Where a connected peer connects from, directly rather than through a relay."""
        best = self.best(peer)
        return best.group if best is not None else None

    def path(self, peer: PeerId) -> str:
        """How new streams to `peer` go: "direct", "relayed" or NO_PATH."""
        best = self.best(peer)
        return NO_PATH if best is None else "direct" if best.direct else "relayed"

    def history(self, peer: PeerId) -> tuple[PathChange, ...]:
        """The newest changes of the path to `peer`, the oldest first; also of one that is gone."""
        return tuple(self._histories.get(peer, ()))

    def note(self, peer: PeerId, why: str) -> None:
        """Remember how `peer` is reached now, and why that is so."""
        changes = self._histories.setdefault(peer, deque(maxlen=MAX_CHANGES))
        change = PathChange(wall_clock(), self.path(peer), why[:200])
        if changes and (changes[-1].path, changes[-1].why) == (change.path, change.why):
            changes.pop()  # who is turned away comes again each second
        changes.append(change)
        self._histories.move_to_end(peer)
        if len(self._histories) > MAX_HISTORIES:
            gone = (other for other in self._histories if other not in self._peers)
            del self._histories[next(gone, next(iter(self._histories)))]

    @contextmanager
    def watch(self) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        sender, reader = trio.open_memory_channel[PeerEvent](EVENTS)
        with sender, reader:
            self._watchers[sender] = reader.clone()  # stays open if the reader closes its own
            try:
                yield reader
            finally:
                self._watchers.pop(sender).close()

    def _notify(self, event: PeerEvent) -> None:
        """Tell all who watch; who is behind loses its oldest event rather than stop the host."""
        for sender, reader in self._watchers.items():
            try:
                sender.send_nowait(event)
            except trio.WouldBlock:
                reader.receive_nowait()
                sender.send_nowait(event)

    # --- what py-libp2p calls ---------------------------------------------------------------------------------------

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        session = conn.muxed_conn
        assert isinstance(session, MuxedSession) and isinstance(network, Swarm)
        if conn.is_closed:  # upstream would keep one that ended as it was added (`network/swarm.py:2667`)
            network.remove_conn(conn)
            return
        peer = session.peer
        connection = _connection(conn, session)
        if connection.relay is not None:
            connection = replace(connection, carried_from=self.group_of(connection.relay))
        why = self._why_not(peer, connection)
        if why is not None:
            log.debug("turned %s away: %s", peer, why)
            self._turned_away[why] += 1
            if peer in self._histories and peer not in self._peers:
                self.note(peer, f"turned away: {why}")
            self._close(conn)
            return
        before = self.best(peer)
        known = self._peers.setdefault(peer, _Peer())
        known.connections[id(conn)] = connection
        session.settle()
        if before is None or (connection.direct and not before.direct):
            through = "" if connection.direct else f" through the relay {connection.relay}"
            replaced = ", in the place of a relayed connection" if before is not None else ""
            who = "it dialled this node" if connection.inbound else "this node dialled it"
            self.note(peer, f"{who}{through}{replaced}")
        if before is not None and connection.direct and (not before.direct or before.is_quic > connection.is_quic):
            self._notify(PeerEvent(peer, up=True, moved=True))
        if len(known.connections) == 1:
            self._notify(PeerEvent(peer, up=True))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        peer = str(conn.muxed_conn.peer_id)
        known = self._peers.get(peer)
        ended = known.connections.pop(id(conn), None) if known is not None else None
        if known is None or ended is None:
            return
        left = list(known.connections.values())
        if not left or (ended.direct and not any(other.direct for other in left)):
            self.note(peer, f"the {'direct' if ended.direct else 'relayed'} connection ended: {ended.session.ended}")
        if not left:
            del self._peers[peer]
            self._notify(PeerEvent(peer, up=False))

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    # --- who may stay -----------------------------------------------------------------------------------------------

    def _why_not(self, peer: PeerId, new: Connection) -> str | None:
        """Why the peer's new connection is closed, one of TURNED; None where there is room, or another makes some."""
        if self._scoring.standing(peer) is Standing.BANNED:
            return "blocked" if peer in self._scoring.blocked else "banned"
        if (known := self._peers.get(peer)) is not None:
            if known.leaving:
                return "enough peers"
            more = sum(len(each.connections) - 1 for each in self._peers.values())  # than one each
            is_full = len(known.connections) >= self._limits.per_peer or more >= self._limits.peers
            return "enough connections" if is_full and (not new.direct or self.path(peer) == "direct") else None
        if sum(not other.leaving for other in self._peers.values()) < self._limits.peers:
            return None
        other = self._to_displace(new.group)
        if other is None:
            return "enough peers"
        log.info("let go of %s, one of many from %s, for one from elsewhere", other, self.group_of(other))
        self._turned_away["crowded out"] += 1
        self._peers[other].leaving = True
        self.hang_up(other)
        return None

    def _to_displace(self, newcomer: Group) -> PeerId | None:
        """The peer that makes room for one more: the newest that dialled in from the group that crowds the others.

        None where no group has more than its share, or the newcomer's has as many: then there is no room for it.
        """
        groups = {peer: self.group_of(peer) for peer, known in self._peers.items() if not known.leaving}
        counted = Counter(groups.values())
        crowding = crowd(groups.values(), least=max(2, self._limits.peers // CROWD))
        if crowding is None or (newcomer is not None and counted[newcomer] + 1 >= counted[crowding]):
            return None
        came = [(first.since, peer) for peer, first in self.peers() if first.inbound and groups.get(peer) == crowding]
        return max(came)[1] if came else None

    def hang_up(self, peer: PeerId) -> None:
        for connection in self.of(peer):
            self._close(connection.conn)

    def _close(self, conn: INetConn) -> None:
        if self.nursery is not None:
            self.nursery.start_soon(conn.close)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PEERS, lambda: len(self._peers))
        metrics.show(CONNECTIONS, lambda: sum(len(known.connections) for known in self._peers.values()))
        metrics.show(TURNED_AWAY, lambda: {why: self._turned_away[why] for why in TURNED})


def is_faster(over_quic: Connection, over_tcp: Connection) -> bool:
    """Whether new streams go over QUIC though there is TCP: QUIC costs more CPU, so it must have brought clearly more.

    It is tried where TCP was slow; a rate is forgotten after a while, so that TCP is tried again.
    """
    now = trio.current_time()
    tcp, quic = over_tcp.session.pace.rate(now), over_quic.session.pace.rate(now)
    if tcp is None:
        return False
    return tcp < SLOW if quic is None else quic > FASTER * tcp


def _connection(conn: INetConn, session: MuxedSession) -> Connection:
    address = next(map(str, session.get_transport_addresses()), "")
    way, circuit, _ = address.partition(CIRCUIT)
    remote = session.get_remote_address()
    return Connection(
        conn,
        session,
        since=trio.current_time(),
        inbound=getattr(conn, "direction", None) == Direction.INBOUND,
        relay=way.rpartition("/p2p/")[2] if circuit else None,
        host=remote[0] if remote is not None else None,
        address=address,
    )
