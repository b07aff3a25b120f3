"""A node's way through NATs: find out whether it can be dialled, be a relay or use some, and replace circuits by direct
connections.

    public    announces its own addresses, relays for members of its runs, and says so in the DHT
    private   announces circuit addresses only (its own to the local network), holds places at two relays
    unknown   announces its own addresses until it is known

Who was dialled through a relay tries to punch a hole to the dialler. New streams prefer the direct connection; the
circuit is closed once nothing has used it for a while.
"""

from __future__ import annotations

import ipaddress
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarmnode.node.host import Libp2pNetwork
from swarmnode.node.nat.autonat import AUTONAT, AutoNat
from swarmnode.node.nat.holepunch import HolePuncher
from swarmnode.node.nat.observed import ObservedAddresses, seen_by
from swarmnode.node.nat.reachability import Reach, Reachability, Verdict
from swarmnode.node.nat.relay import HOP, RelayLimits, RelayServer
from swarmnode.node.nat.reservations import RELAY_KEY, Reservations
from swarmnode.protocols.network import NetworkError, PeerId

logger = logging.getLogger(__name__)

CHECK_AFTER = 1.0  # s after a change until peers are asked, so that several changes make one question
CHECK_EVERY = 300.0  # s between questions while the state is known
CHECK_AGAIN = 10.0  # s between questions while it is not
ASK = 3  # peers asked in one check
WATCH_ADDRESSES_EVERY = 10.0  # s between looks at this machine's interfaces


@dataclass(frozen=True)
class NatStatus:
    """What `status` and `netcheck` show."""

    reachability: str  # unknown, public, private or relayed (private with a place at a relay)
    reached_by: int  # hosts that got through to this node
    failed_for: int  # and that did not
    observed: tuple[str, ...]  # where the listening port is seen from outside, the most often seen first
    endpoint_independent: bool | None  # whether everybody sees it at one place
    relays: tuple[PeerId, ...]
    reservations: int  # places others hold here
    circuits: int  # of others through here
    bytes_relayed: int
    punched: int
    not_punched: int


class NatTraversal:
    """Runs beside the network for as long as the node does."""

    def __init__(
        self,
        network: Libp2pNetwork,
        *,
        admits: Callable[[PeerId], bool],
        limits: RelayLimits,
        rng: random.Random | None = None,
    ) -> None:
        """`admits` says whom this node relays for while it is public."""
        self._network = network
        self._rng = rng or random.Random()
        self._reachability = Reachability()
        self._autonat = AutoNat(network, network.swarm)
        self._puncher = HolePuncher(
            network,
            network.swarm,
            mine=lambda: (*self.observed.mappings(), *network.own_addresses),
            source=network.dial_source,
            is_direct=network.is_direct,
        )
        self._relay = RelayServer(network, admits=lambda p: self._state is Reach.PUBLIC and admits(p), limits=limits)
        self._reservations = Reservations(
            network,
            network.circuits,
            speaks_hop=lambda peer: network.speaks(peer, HOP),
            rtt=network.rtt,
            changed=self._announce,
        )
        self._changed = trio.Event()
        self._private: trio.CancelScope | None = None
        self._offering = False
        self.observed = ObservedAddresses()

    @property
    def _state(self) -> Reach:
        return self._reachability.state

    def status(self) -> NatStatus:
        reached, failed = self._reachability.counts()
        relays = self._reservations.relays
        return NatStatus(
            reachability="relayed" if self._state is Reach.PRIVATE and relays else self._state.value,
            reached_by=reached,
            failed_for=failed,
            observed=self.observed.mappings(),
            endpoint_independent=self.observed.endpoint_independent(),
            relays=relays,
            reservations=len(self._relay.reservations),
            circuits=self._relay.open_circuits,
            bytes_relayed=self._relay.bytes_relayed,
            punched=self._puncher.succeeded,
            not_punched=self._puncher.failed,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; never raises for what peers do."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_connections, nursery)
            nursery.start_soon(self._watch_interfaces)
            task_status.started()
            while True:
                await self._check(nursery)
                self._changed = trio.Event()
                with trio.move_on_after(CHECK_AGAIN if self._state is Reach.UNKNOWN else CHECK_EVERY):
                    await self._changed.wait()
                    await trio.sleep(CHECK_AFTER)

    # --- reachability -----------------------------------------------------------------------------------------------

    async def _check(self, nursery: trio.Nursery) -> None:
        """Ask a few peers at different hosts to dial this node, one after another."""
        before = self._state
        helpers = [
            v.peer for v in self._network.peers() if v.path == "direct" and self._network.speaks(v.peer, AUTONAT)
        ]
        by_host = {host: peer for peer in helpers if (host := self._network.host_of(peer)) is not None}
        asked = self._rng.sample(sorted(by_host), min(ASK, len(by_host)))
        for number, host in enumerate(asked):
            try:
                await self._look_from_outside(host, by_host[host])
                places = (*self.observed.mappings(), *self._network.own_addresses)
                reached = await self._autonat.ask(by_host[host], places)
            except NetworkError as error:
                logger.debug("%s does not help to find out about NATs: %s", by_host[host], error)
                continue
            if reached is not None:
                left = len(asked) - number - 1
                self._reachability.heard(Verdict(host, reached, trio.current_time()), others=left)
        if self._state is not before:
            logger.info("this node is %s", _TELL[self._state])
            self._enter(nursery)

    async def _look_from_outside(self, host: str, peer: PeerId) -> None:
        """Learn where `peer` sees the listening port, by a connection that leaves from there. It stays: NATs forget."""
        if host not in self.observed.observers and not ipaddress.ip_address(host).is_loopback:
            session = await self._network.connect_from_listening_port(peer)
            place = await seen_by(session) if session is not None else None
            if place is not None:
                self.observed.record(host, place)

    def _enter(self, nursery: trio.Nursery) -> None:
        """Start and stop what the new state needs."""
        if self._private is not None:
            self._private.cancel()
            self._private = None
        if self._state is Reach.PRIVATE:
            self._private = trio.CancelScope()
            nursery.start_soon(self._be_private, self._private)
        elif self._state is Reach.PUBLIC and not self._offering:
            self._offering = True
            nursery.start_soon(self._offer)
        self._announce()

    async def _be_private(self, scope: trio.CancelScope) -> None:
        with scope:
            await self._reservations.run()

    async def _offer(self) -> None:
        """Relay, and say so in the DHT; `RelayServer` admits nobody while the state is another."""
        await self._network.provide(RELAY_KEY)
        await self._relay.run()

    def _announce(self) -> None:
        self._network.announce_through(self._reservations.addresses if self._state is Reach.PRIVATE else None)

    async def _watch_interfaces(self) -> None:
        known = self._network.own_addresses
        while True:
            await trio.sleep(WATCH_ADDRESSES_EVERY)
            if self._network.own_addresses != known:
                known = self._network.own_addresses
                logger.info("this machine's addresses changed; finding out again how it can be reached")
                self._reachability.forget()
                self.observed.forget()
                self._puncher.forget_failures()
                self._changed.set()

    # --- circuits ---------------------------------------------------------------------------------------------------

    async def _watch_connections(self, nursery: trio.Nursery) -> None:
        with self._network.watch_peers() as events:
            async for event in events:
                if event.up and self._state is Reach.UNKNOWN:
                    self._changed.set()
                if event.up and self._network.dialled_through_relay(event.peer):
                    nursery.start_soon(self._get_direct, event.peer)

    async def _get_direct(self, peer: PeerId) -> None:
        if self._puncher.worth_trying(peer):
            await self._puncher.punch(peer)


_TELL = {
    Reach.UNKNOWN: "of unknown reachability",
    Reach.PUBLIC: "public: others can dial it, and it relays for members of its runs",
    Reach.PRIVATE: "private: nobody outside can dial it, so it asks relays",
}
