"""Punching holes over UDP, from the socket on which this node listens for QUIC, beside `holepunch`'s TCP.

As https://github.com/libp2p/specs/blob/master/relay/DCUtR.md says: at the agreed moment A dials, and B sends packets of
random bytes to where A will come from, 10 to 200 ms apart, until A's packets get in. Where a router shows the socket is
known from identify over QUIC connections to a few peers.

A router that shows the socket to each of them at another port ("symmetric", RFC 4787 section 4.1) will show it to the
other side at a port that nobody knows. Such a node names all the ports at which it was seen; more than one at one
address says what kind of router it is. How two sides then meet by `SOCKETS` and `PROBES`: docs/nat.md.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import socket
from collections import Counter, defaultdict
from functools import partial

import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import parse
from swarmnode.node.host.muxed import MuxedSession
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.nat.reachability import AGE, MAX_OBSERVERS, is_local, seen_by
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import Address, NetworkError, PeerId

log = logging.getLogger(__name__)

PACKETS = Metric("swarmnode_punch_packets_total", COUNTER, "UDP packets sent to make holes in routers", "kind")
KINDS = ("opening", "probing", "further sockets")
OPENINGS = 40  # packets sent to each place of the other side, at most
PAUSE = (0.01, 0.2)  # s between them, as the specification says
SOCKETS = 256  # opened where this node's port is not known, at most: a quarter of the files that it may open
OPENED_AT_ONCE = 2  # times SOCKETS, or probed hosts, whoever asks for holes and whatever places they name
PROBES = 512  # packets sent where the other's port is not known, at most, in one attempt
STEP = 16  # between the ports after those that were seen that are tried, up to SOCKETS after: those are open in a row
BATCH, EVERY = 8, 0.02  # packets sent at once, and s between: PROBES in 1.3 s
AFTER = 0.1  # s until the first, in which the other side opens its sockets
WITHIN = 4.0  # s for an attempt with probing
PORTS = range(1024, 65536)  # that routers give


class UdpPuncher:
    """What the UDP socket needs to get through routers."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network
        self._seen = Recent[str, Address](MAX_OBSERVERS)  # where the socket is seen, by host of the observer …
        self._sessions = Recent[str, tuple[MuxedSession, float]](MAX_OBSERVERS)  # … by this connection, since then (s)
        self._random = random.Random(network.me)
        self.packets: Counter[str] = Counter()
        self._opening = trio.Semaphore(OPENED_AT_ONCE)

    async def look(self, host: str, peer: PeerId) -> None:
        """Learn where `peer`, at `host`, sees the socket, by a QUIC connection. It stays: NATs forget.

        After AGE it is asked anew: such a connection outlives a change of the router's address (RFC 9000, section 9).
        Raises NetworkError where the peer does not say.
        """
        old = trio.current_time() - AGE
        for gone in [at for at, (session, since) in self._sessions.items() if session.is_closed or since < old]:
            del self._sessions[gone]
            self._seen.pop(gone, None)
        if host in self._seen or not self._network.quic.endpoints:
            return
        session = await self._network.connect_over_quic(peer, host)
        place = await seen_by(session) if session is not None else None
        if session is not None and place is not None and "/quic-v1" in place:
            self._seen[host], self._sessions[host] = place, (session, trio.current_time())

    async def look_around(self) -> None:
        """Ask the connected peers outside of the local network, until two have told over IPv4, where NATs are."""
        for view in self._network.peers():
            for host in self._hosts_of(view.peer):
                if sum(":" not in each for each in self._seen) > 1 or not self._network.quic.endpoints:
                    return
                try:
                    await self.look(host, view.peer)
                except NetworkError as error:
                    log.debug("%s does not say where it sees the UDP port: %s", view.peer, error)

    def _hosts_of(self, peer: PeerId) -> tuple[str, ...]:
        """Where a directly connected peer may speak QUIC: at its end of the connection, and at one address of IPv4."""
        host = self._network.host_of(peer)
        places = (parse(address) for address in self._network.known_addresses(peer))
        over_ipv4 = (at.host for at in places if at and (at.kind, at.over, at.relay) == ("ip4", "quic", None))
        hosts = dict.fromkeys((host, next(over_ipv4, host))) if host is not None else {}
        return tuple(each for each in hosts if each is not None and not is_local(each))

    def forget(self) -> None:
        """This node's own network changed."""
        self._seen.clear()

    def seen(self) -> tuple[Address, ...]:
        """Where the socket is seen, the most often seen first."""
        return tuple(place for place, _ in Counter(self._seen.values()).most_common())

    @property
    def is_symmetric(self) -> bool:
        """Whether the router shows the socket to most at a port of their own."""
        ipv4 = [place for host, place in self._seen.items() if ":" not in host]
        return len(ipv4) > 1 and Counter(ipv4).most_common(1)[0][1] <= len(ipv4) / 2

    def places(self, mapped: tuple[Address, ...] = ()) -> tuple[Address, ...]:
        """Where the other side may meet the socket; several ports of one address say that there will be another.

        A port that the router opened for it (`mapped`) is there whatever router that is.
        """
        own = [address.partition("/p2p/")[0] for address in self._network.own_addresses if "/quic-v1" in address]
        seen = mapped or (self.seen() if self.is_symmetric else self.seen()[:1])
        return tuple(dict.fromkeys((*seen, *own)))

    def probes(self, theirs: tuple[Address, ...]) -> bool:
        """Whether one side's port is not known to the other, so that an attempt takes long."""
        return any(len(ports) > 1 or self.is_symmetric for ports in _public(theirs).values())

    async def punch(self, peer: PeerId, theirs: tuple[Address, ...], *, dials: bool, speaks: bool) -> None:
        """Try until cancelled; a connection comes in, or is made here. `dials`: as A; `speaks`: even if as B."""
        async with trio.open_nursery() as nursery:
            for place in theirs:
                if "/quic-v1" in place:
                    nursery.start_soon(self._dial, place, peer) if speaks else nursery.start_soon(self._open, place)
            for host, ports in _public(theirs).items():
                if len(ports) > 1 and not self.is_symmetric:
                    nursery.start_soon(self._probe, host, ports)
                elif self.is_symmetric:
                    port = ports[0] if len(ports) == 1 else min(max(ports) + SOCKETS // 2, PORTS[-1])
                    nursery.start_soon(partial(self._open_many, peer, (host, port), dials=dials or len(ports) == 1))

    async def _dial(self, place: Address, peer: PeerId) -> None:
        try:
            await self._network.swarm.dial_addr(Multiaddr(place), ID.from_string(peer))
        except Exception as error:  # whatever answers there may say anything
            log.debug("dial of %s at %s failed: %s", peer, place, error)

    async def _open(self, place: Address) -> None:
        endpoint = parse(place)
        assert endpoint is not None
        for _ in range(OPENINGS):
            self._send((endpoint.host, endpoint.port), "opening")
            await trio.sleep(self._random.uniform(*PAUSE))

    async def _probe(self, host: str, seen: list[int]) -> None:
        async with self._opening:
            await trio.sleep(AFTER)
            for number, port in enumerate(self._likely(seen)):
                self._send((host, port), "probing")
                if number % BATCH == BATCH - 1:
                    await trio.sleep(EVERY)

    def _likely(self, seen: list[int]) -> list[int]:
        """PROBES ports, each once: by turns some that follow the highest that was seen, and others by chance."""
        following = [port for port in range(max(seen) + STEP, max(seen) + SOCKETS + 1, STEP) if port in PORTS]
        by_chance = self._random.sample(PORTS, PROBES)
        mixed = [port for pair in zip(following, by_chance, strict=False) for port in pair]
        return list(dict.fromkeys([*mixed, *by_chance]))[:PROBES]

    def _send(self, target: tuple[str, int], kind: str) -> None:
        endpoint = self._network.quic.endpoint_for(target[0])
        if endpoint is not None:
            endpoint.try_to_send(_noise(self._random), target)
            self.packets[kind] += 1

    async def _open_many(self, peer: PeerId, target: tuple[str, int], *, dials: bool) -> None:
        """Open sockets, each with a packet to `target`, and dial from the first at which the other side's arrives.

        Not `dials`: answer there, and wait to be dialled.
        """
        sockets: list[socket.socket] = []
        found: list[tuple[socket.socket, tuple[str, int]]] = []
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = SOCKETS if allowed == resource.RLIM_INFINITY else min(SOCKETS, allowed // 4)

        async def listen(made: socket.socket, done: trio.CancelScope) -> None:
            await trio.lowlevel.wait_readable(made)
            try:
                _, remote = made.recvfrom(1, socket.MSG_PEEK)  # it may be the dial of the other side
            except OSError:
                return
            if remote[0] == target[0] and not found:
                found.append((made, (remote[0], remote[1])))
                done.cancel()

        async with self._opening:
            try:
                for _ in range(most):
                    try:
                        made = socket.socket(family, socket.SOCK_DGRAM)
                        sockets.append(made)
                        made.setblocking(False)
                        made.sendto(_noise(self._random), target)
                    except OSError as error:
                        log.debug("no further socket: %s", error)
                        break
                    self.packets["further sockets"] += 1
                    if len(sockets) % BATCH == 0:
                        await trio.lowlevel.checkpoint()
                async with trio.open_nursery() as nursery:
                    for made in sockets:
                        nursery.start_soon(listen, made, nursery.cancel_scope)
                if not found:  # no socket could be opened
                    return
                made, remote = found[0]
                sockets.remove(made)
                if dials:
                    await self._network.quic.dial_from(made, remote, peer)
                else:
                    made.sendto(_noise(self._random), remote)
                    await self._network.quic.answer_from(made)
            except Exception as error:  # whatever answers there may say anything
                log.debug("no connection to %s through the hole: %r", peer, error)
            finally:
                for made in sockets:
                    made.close()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PACKETS, lambda: {kind: self.packets[kind] for kind in KINDS})


def _noise(rng: random.Random) -> bytes:
    return os.urandom(rng.randrange(24, 64))


def _public(places: tuple[Address, ...]) -> dict[str, list[int]]:
    """The UDP ports among `places`, by their IPv4 address, where that is not of a local network."""
    ports: defaultdict[str, list[int]] = defaultdict(list)
    for place in places:
        endpoint = parse(place)
        if endpoint is not None and endpoint.over == "quic" and endpoint.kind == "ip4" and not is_local(endpoint.host):
            ports[endpoint.host].append(endpoint.port)
    return dict(ports)
