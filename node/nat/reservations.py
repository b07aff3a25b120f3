"""Places at relays: a private node keeps `WANTED` of them, renews them in time, and moves on when a relay goes.

Relays are not listed anywhere. Any public node of the swarm is one: found among the connected peers that speak the hop
protocol, and as providers of `RELAY_KEY` in the DHT. The nearest few are preferred, with a draw among them, so that the
private nodes of a swarm spread over its relays; one that refused or failed is left alone for a while.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable

import trio

from swarmnode.node.nat.circuit import Circuits, Refused, Reservation
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId

logger = logging.getLogger(__name__)

RELAY_KEY = hashlib.sha256(b"swarmnode/relays/1").digest()  # public nodes provide it in the DHT
WANTED = 2  # places kept: the loss of one relay leaves the node reachable
RENEW_BEFORE = 600.0  # s before a place expires
LOOK_EVERY = 5.0  # s while places are lacking
REST = 60.0  # s for which a relay that refused or failed is not asked
DRAW_FROM = 4  # nearest candidates among which one is drawn
ASK_DHT_EVERY = 30.0  # s, while the connected peers do not suffice
ASK_DHT_WITHIN = 5.0  # s
RESERVE_WITHIN = 5.0  # s for connecting to a relay and its answer: one that fails still leaves places within 10 s


class Reservations:
    """Runs while this node is private. `speaks_hop(peer)` tells from identify whether a peer offers to relay."""

    def __init__(
        self,
        network: Network,
        circuits: Circuits,
        *,
        speaks_hop: Callable[[PeerId], bool],
        rtt: Callable[[PeerId], float | None],
        changed: Callable[[], None],
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """`changed()` is called whenever the addresses through relays are other ones; `now` is s since the epoch."""
        self._network = network
        self._circuits = circuits
        self._speaks_hop = speaks_hop
        self._rtt = rtt
        self._changed = changed
        self._now = now
        self._rng = rng or random.Random()
        self._held: dict[PeerId, Reservation] = {}
        self._rests: dict[PeerId, float] = {}  # relays left alone, until when, trio time
        self._asked_dht = -ASK_DHT_EVERY
        self._wake = trio.Event()

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Where this node holds a place now."""
        return tuple(self._held)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where this node can be dialled through relays."""
        return tuple(address for reservation in self._held.values() for address in reservation.addresses)

    def lose(self, relay: PeerId) -> None:
        """There is no place at `relay` any more: leave it alone for a while, and look for another."""
        if self._held.pop(relay, None) is not None:
            logger.info("lost the relay %s; looking for another", relay)
            self._rests[relay] = trio.current_time() + REST
            self._changed()
            self._wake.set()

    async def run(self) -> None:
        """Keep places until cancelled; then they are simply no longer announced."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._notice_losses)
                while True:
                    self._wake = trio.Event()  # before looking: a relay lost meanwhile is noticed as well
                    await self._renew()
                    if len(self._held) < WANTED:
                        await self._find()
                    with trio.move_on_after(LOOK_EVERY if len(self._held) < WANTED else 10 * LOOK_EVERY):
                        await self._wake.wait()
        finally:
            if self._held:
                self._held.clear()
                self._changed()

    async def _notice_losses(self) -> None:
        with self._network.watch_peers() as events:
            async for event in events:
                if not event.up:
                    self.lose(event.peer)
                elif len(self._held) < WANTED:
                    self._wake.set()

    async def _renew(self) -> None:
        for relay, reservation in list(self._held.items()):
            if reservation.expires - self._now() < RENEW_BEFORE:
                await self._reserve(relay)

    async def _find(self) -> None:
        await self._draw(self._nearest(self._offered()))
        if len(self._held) < WANTED and trio.current_time() >= self._asked_dht + ASK_DHT_EVERY:
            self._asked_dht = trio.current_time()
            found: tuple[PeerId, ...] = ()
            with trio.move_on_after(ASK_DHT_WITHIN):
                found = await self._network.find_providers(RELAY_KEY)
            await self._draw(self._nearest(found))

    async def _draw(self, candidates: list[PeerId]) -> None:
        """Ask candidates, the nearest first and by draw, until there are places enough."""
        while candidates and len(self._held) < WANTED:
            relay = self._rng.choice(candidates[:DRAW_FROM])
            candidates.remove(relay)
            await self._reserve(relay)

    def _offered(self) -> Iterable[PeerId]:
        """Directly connected peers that offer to relay."""
        return (v.peer for v in self._network.peers() if v.path == "direct" and self._speaks_hop(v.peer))

    def _nearest(self, peers: Iterable[PeerId]) -> list[PeerId]:
        usable = [peer for peer in peers if self._may_ask(peer)]
        return sorted(usable, key=lambda peer: self._rtt(peer) or 1.0)

    def _may_ask(self, peer: PeerId) -> bool:
        rested = self._rests.get(peer, 0.0) <= trio.current_time()
        return rested and peer not in self._held and peer != self._network.me

    async def _reserve(self, relay: PeerId) -> None:
        before = self._held.get(relay)
        try:
            with trio.fail_after(RESERVE_WITHIN):
                reservation = await self._circuits.reserve(relay)
        except (NetworkError, trio.TooSlowError) as error:
            level = logging.DEBUG if isinstance(error, Refused) else logging.INFO
            logger.log(level, "no place at the relay %s: %s", relay, error or "no answer")
            self._rests[relay] = trio.current_time() + REST
            self._held.pop(relay, None)
        else:
            self._held[relay] = reservation
            if before is None:
                logger.info("reachable through the relay %s", relay)
        after = self._held.get(relay)
        if (before.addresses if before else ()) != (after.addresses if after else ()):
            self._changed()
