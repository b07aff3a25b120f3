"""A node's way through NATs: whether it can be dialled, be a relay or use some, and direct ways in place of circuits.

What a node announces in which state is in docs/nat.md. Who was dialled through a relay tries to punch a hole to the
dialler. Where there is a direct connection to a peer, its circuits are closed when nothing uses them. Protocols move by
themselves (`PeerEvent.moved`): new streams are direct, and those on a circuit end with what is under way on them. The
other end hears of the direct connection at another moment, so a circuit counts as unused only after a while without
streams. After `BOUND` seconds it is closed with what it carries: transfers go on over the direct connection from their
last whole chunk, and calls raise PeerGone, which every caller expects.
"""

from __future__ import annotations

import ipaddress
import logging
import random

import trio

from swarmnode.node.host.limits import RelayLimits
from swarmnode.node.host.muxed import MuxedSession
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.nat.holepunch import HolePuncher
from swarmnode.node.nat.portmap import PortMapping
from swarmnode.node.nat.reachability import (
    AUTONAT,
    ENOUGH,
    MAX_OBSERVERS,
    AutoNat,
    Reach,
    Reachability,
    is_local,
    seen_by,
)
from swarmnode.node.nat.relay import RELAY_KEY, RelayServer
from swarmnode.node.nat.udp import UdpPuncher
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.network import NetworkError, PeerId

logger = logging.getLogger(__name__)

CHECK_AFTER = 1.0  # s after a change until peers are asked, so that several changes make one question
CHECK_EVERY = 300.0  # s between questions while the state is known
CHECK_AGAIN = 10.0  # s between questions while it is not; twice as long each time while only the kind of NAT is not
ASK_AT_MOST = 2 * ENOUGH  # peers asked in one check: some decline, having dialled too often lately
WATCH_ADDRESSES_EVERY = 10.0  # s between looks at this machine's interfaces
PUNCH_AGAIN_EVERY = 60.0  # s between looks for circuits whose time to be tried again has come
BOUND = 60.0  # s that a circuit may outlive the coming of a direct connection; a relay's bytes are somebody's gift
UNUSED = 3.0  # s without a stream: many round trips through a relay
LOOK = 1.0  # s between looks: streams have no event


class NatTraversal:
    """Runs beside the network for as long as the node does."""

    def __init__(self, network: Libp2pNetwork, *, limits: RelayLimits, upnp: bool = True) -> None:
        """`upnp`: whether the router is asked for a port."""
        self._network = network
        self._random = random.Random(network.me)
        self.reachability = Reachability()
        self.udp = UdpPuncher(network)
        self.puncher = HolePuncher(network, self.reachability, self.udp)
        self.relay = RelayServer(network, network.policy, limits)
        self.ports = {family: PortMapping(family, network, self.reachability) for family in ("ip4", "ip6")}
        self.asks_router = upnp
        self._autonat = AutoNat(network)
        self._entered = Reach.UNKNOWN  # the last state that was not unknown: what this node does
        self._doing = trio.CancelScope()  # what runs because of it
        self._nursery: trio.Nursery | None = None
        self._lookouts = Recent[str, MuxedSession](MAX_OBSERVERS)  # by which a host sees where the listening port is

    @property
    def how_reached(self) -> str:
        """For people: unknown, public, private or relayed (private with a place at a relay)."""
        return "relayed" if self._network.relay_client.relays else self.reachability.state.value

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; never raises for what peers do."""
        async with trio.open_nursery() as nursery:
            self._nursery, self._entered = nursery, Reach.UNKNOWN
            nursery.start_soon(self._watch_connections, nursery)
            nursery.start_soon(self._watch_interfaces)
            nursery.start_soon(let_go_of_circuits, self._network)
            nursery.start_soon(self._punch_again, nursery)
            for port in self.ports.values() if self.asks_router else ():
                nursery.start_soon(port.run)
            task_status.started()
            pause = CHECK_AGAIN
            while True:
                self.reachability.changed = changed = trio.Event()  # before asking: a change meanwhile is not missed
                await self._check(nursery)
                kind_known = self.reachability.endpoint_independent() is not None
                pause = CHECK_EVERY if kind_known else min(2 * pause, CHECK_EVERY)
                if self.reachability.state is Reach.UNKNOWN:
                    pause = CHECK_AGAIN
                with trio.move_on_after(pause):
                    await changed.wait()
                    await trio.sleep(CHECK_AFTER)

    # --- reachability -----------------------------------------------------------------------------------------------

    async def _check(self, nursery: trio.Nursery) -> None:
        """Ask a few peers at different hosts to dial this node, over each family."""
        before, by_host = self.reachability.state, self._helpers()
        over_ipv4 = {host: peer for host, peer in by_host.items() if ":" not in host}
        left = await self._ask_some(over_ipv4)
        left_of_ipv6 = await self._ask_some({host: by_host[host] for host in by_host.keys() - over_ipv4.keys()})
        others = left if over_ipv4 else left_of_ipv6
        self.reachability.decide(trio.current_time(), others=others, own=self._network.own_addresses)
        if self.reachability.state is not before:
            logger.info("this node is %s", _TELL[self.reachability.state])
        if self.reachability.state not in (Reach.UNKNOWN, self._entered):
            self._doing.cancel()  # what the old state did
            self._doing = trio.CancelScope()
            self._entered = self.reachability.state
            nursery.start_soon(self._act, self._doing)
        self._announce()

    async def _ask_some(self, by_host: dict[str, PeerId]) -> int:
        """Ask until enough hosts gave a verdict; how many are left to be asked."""
        hosts = self._random.sample(sorted(by_host), len(by_host))
        told: list[str] = []  # hosts that did
        asked = 0
        while hosts and len(told) < ENOUGH and asked < ASK_AT_MOST:
            batch = [hosts.pop() for _ in range(min(ENOUGH - len(told), len(hosts)))]
            async with trio.open_nursery() as asking:
                for host in batch:
                    asking.start_soon(self._ask, host, by_host[host], told)
            asked += len(batch)
        return len(hosts)

    async def _ask(self, host: str, helper: PeerId, told: list[str]) -> None:
        try:
            await self._look_from_outside(host, helper)
            places = self.reachability.places(self._network.own_addresses)
            of_family = tuple(place for place in places if place.startswith("/ip6/") == (":" in host))
            verdict = await self._autonat.ask(helper, host, of_family)
        except NetworkError as error:
            logger.debug("%s does not help to find out about NATs: %s", helper, error)
            return
        if verdict is not None:
            told.append(host)
            self.reachability.record(verdict)

    def _helpers(self) -> dict[str, PeerId]:
        """The peers to ask, by host: those of the local network only where there are no others."""
        direct = (v.peer for v in self._network.peers() if v.path == "direct")
        by_host = {
            host: peer
            for peer in direct
            if self._network.speaks(peer, AUTONAT) and (host := self._network.host_of(peer)) is not None
        }
        outside = {host: peer for host, peer in by_host.items() if not is_local(host)}
        if outside:
            self.reachability.disregard_local()
        return outside or by_host

    async def _look_from_outside(self, host: str, peer: PeerId) -> None:
        """Learn where `peer` sees the listening port, by a connection that leaves from there. It stays: NATs forget."""
        if ipaddress.ip_address(host).is_loopback:
            return
        for gone in [at for at, session in self._lookouts.items() if session.is_closed]:  # NATs map anew
            del self._lookouts[gone]
            self.reachability.seen.pop(gone, None)
        if host not in self.reachability.seen:
            self.reachability.contacted(host)
            session = await self._network.connect_from_listening_port(peer)
            place = await seen_by(session) if session is not None else None
            if session is not None and place is not None:
                self.reachability.seen[host], self._lookouts[host] = place, session
        await self.udp.look(host, peer)

    async def _act(self, scope: trio.CancelScope) -> None:
        """Do what the state that was entered asks for."""
        with scope:
            await (self._network.relay_client.run() if self._entered is Reach.PRIVATE else self._offer())

    async def _offer(self) -> None:
        """Relay, and say so in the DHT; `RelayServer` admits nobody once the state is another."""
        try:
            await self._network.provide(RELAY_KEY)
            await self.relay.run()
        finally:
            self._network.withdraw(RELAY_KEY)

    def _announce(self) -> None:
        """Tell others where to dial this node."""
        me, own = self._network.me, self._network.own_addresses
        if self._entered is Reach.PRIVATE:
            relays = self._network.relay_client
            now = trio.current_time()
            beside = (*self.reachability.open_at(now, "ip6"), *self.reachability.open_at(now, "ip4"))
            relays.beside = tuple(f"{at}/p2p/{me}" for at in beside)
            self._network.announce_instead(relays.addresses)
            return
        further = [f"{place}/p2p/{me}" for place in self.reachability.reached_at(trio.current_time())]
        found_out = self._entered is Reach.PUBLIC and not set(further) <= set(own)
        self._network.announce_instead(tuple(dict.fromkeys((*further, *own))) if found_out else None)

    async def _watch_interfaces(self) -> None:
        known = self._network.own_addresses
        while True:
            await trio.sleep(WATCH_ADDRESSES_EVERY)
            if self._network.own_addresses != known:
                known = self._network.own_addresses
                logger.info("this machine's addresses changed; finding out again how it can be reached")
                self.reachability.forget()
                for port in self.ports.values():
                    port.ask_anew()
                self.puncher.forget_failures()
                self.udp.forget()

    # --- circuits ---------------------------------------------------------------------------------------------------

    async def _watch_connections(self, nursery: trio.Nursery) -> None:
        with self._network.watch_peers() as events:
            async for event in events:
                for connection in self._network.connections.of(event.peer):
                    if connection.host is not None:
                        come = self.reachability.came_in if connection.inbound else self.reachability.contacted
                        come(connection.host)
                if event.up and self._is_worth_asking(event.peer):
                    self.reachability.changed.set()
                if event.up:
                    self._get_direct(nursery, event.peer)

    def _is_worth_asking(self, peer: PeerId) -> bool:
        """Nothing is known yet, or only from the local network or over IPv4 while this peer is elsewhere."""
        host, reach = self._network.host_of(peer), self.reachability
        if reach.state is Reach.UNKNOWN or host is None or is_local(host):
            return reach.state is Reach.UNKNOWN
        return reach.only_local or (":" in host and not reach.tried_over_ipv6)

    async def _punch_again(self, nursery: trio.Nursery) -> None:
        """Circuits that outlived a failure are tried again when its time is over."""
        while True:
            await trio.sleep(PUNCH_AGAIN_EVERY)
            for view in self._network.peers():
                self._get_direct(nursery, view.peer)

    def _get_direct(self, nursery: trio.Nursery, peer: PeerId) -> None:
        if self._network.dialled_through_relay(peer) and self.puncher.worth_trying(peer):
            nursery.start_soon(self.puncher.punch, peer)

    def try_direct(self, peer: PeerId) -> None:
        """Begin to replace a circuit to `peer`, whatever failed before."""
        if self._nursery is not None:
            self._nursery.start_soon(self.puncher.punch, peer)


_TELL = {
    Reach.UNKNOWN: "of unknown reachability",
    Reach.PUBLIC: "public: others can dial it, and it relays for members of its runs",
    Reach.PRIVATE: "private: nobody outside can dial it, so it asks relays",
}


async def let_go_of_circuits(network: Libp2pNetwork) -> None:
    """Until cancelled: close circuits beside a direct connection after `UNUSED` s without a stream, or `BOUND` s."""
    while True:
        now = trio.current_time()
        for peer in [view.peer for view in network.peers() if view.path == "direct"]:
            connections = network.connections.of(peer)
            direct_since = min((connection.since for connection in connections if connection.direct), default=now)
            for circuit in connections:
                if circuit.direct or circuit.session.is_closed:
                    continue
                replaced = max(direct_since, circuit.since)
                used = now if circuit.session.open_streams else max(replaced, circuit.session.used_at)
                if now - used >= UNUSED or now - replaced >= BOUND:
                    logger.info("a direct connection to %s takes the place of a relayed one", peer)
                    await circuit.conn.close()
        await trio.sleep(LOOK)
