"""Values of this node's own in the DHT, kept alive there, and those of others, read from many at once.

`put` looks the key up first: the walk finds the nodes to store at and what is there already, so a node that lost its
memory goes on above its last sequence number and never below its last expiry (`protocols.dht_records` on why).
`get` asks the network every time, takes the best of all genuine answers, and remembers it: a node does not go back to
an older value, even where everybody it asks is rolled back.

`run()` republishes what was put, every `REPUBLISH` seconds and whenever the nodes that should hold it may have changed,
until it is dropped; then it expires.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarmnode.node.discovery.kademlia import CLOSER, Kademlia
from swarmnode.protocols.dht.lookup import LookupLimits, lookup
from swarmnode.protocols.dht.records import MAX_LIFETIME, BadRecord, Record, rank, record_key, seal
from swarmnode.protocols.network import Network, NetworkError, PeerId

log = logging.getLogger(__name__)

HOUR = 3600.0  # seconds
REPUBLISH = HOUR / 2  # seconds between renewals: a record of the default lifetime survives three that fail
LIFETIME = 2 * HOUR  # seconds for which a record outlives its author
REACH = CLOSER  # nodes that hold a record
REMEMBERED = 1024  # records of others that a rollback is checked against
LIMITS = LookupLimits()
MAX_OWN = 16  # records of one node: what storers admit


@dataclass(frozen=True)
class Stored:
    """What became of a put: `nodes` of the `asked` keep the record now; none may."""

    record: Record
    nodes: int
    asked: int


class DhtRecords:
    """Use while the network runs; `run()` keeps records alive."""

    def __init__(
        self,
        network: Network,
        kademlia: Kademlia,
        *,
        limits: LookupLimits = LIMITS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._network = network
        self._kademlia = kademlia
        self._limits = limits
        self._now = now
        self._own: dict[str, tuple[bytes, float]] = {}  # name -> value, lifetime in seconds
        self._best: OrderedDict[bytes, Record] = OrderedDict()  # newest seen of each key, last used last
        self._changed = trio.Event()
        self._putting = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew what was put and forget what expired, until cancelled."""
        task_status.started()
        while True:
            changed = self._changed = trio.Event()
            with trio.move_on_after(REPUBLISH):
                await changed.wait()
            self._kademlia.records.cleanup_expired()
            for name in list(self._own):
                await self._renew(name)

    def peer_arrived(self) -> None:
        """A peer that speaks Kademlia came while there are few: it ought to hold our records too."""
        if self._own and len(self._kademlia.speakers()) <= REACH:
            self._changed.set()

    async def put(self, name: str, value: bytes, *, lifetime: float = LIFETIME) -> Stored:
        """Publish `value` under this node's id and `name`, and keep it alive until `drop(name)`.

        `lifetime` is in seconds, at most MAX_LIFETIME: how long it outlives this node. Raises BadRecord("oversize")
        above MAX_VALUE and ValueError for a bad name or lifetime, or more than MAX_OWN names; stores nothing then.
        """
        if not 0 < lifetime <= MAX_LIFETIME:
            raise ValueError(f"a record lives for more than 0 and at most {MAX_LIFETIME:.0f} s, not {lifetime}")
        if name not in self._own and len(self._own) >= MAX_OWN:
            raise ValueError(f"a node keeps at most {MAX_OWN} records in the DHT")
        seal(self._network.sign, Record(self._network.me, name, value, 0, 0))  # refuse before anything is sent
        record_key(self._network.me, name)
        async with self._putting:
            stored = await self._publish(name, value, lifetime)
            self._own[name] = (value, lifetime)
        return stored

    def drop(self, name: str) -> None:
        """Renew `name` no more; it expires within its lifetime."""
        self._own.pop(name, None)

    async def get(self, author: PeerId, name: str) -> Record | None:
        """The newest live value that the nodes near the key, or this one, know of; None where there is none."""
        key = record_key(author, name)
        await self._look_up(key)
        return self._known(key)

    async def _renew(self, name: str) -> None:
        async with self._putting:
            if name in self._own:
                stored = await self._publish(name, *self._own[name])
                log.debug("renewed %s in the DHT: %d of %d nodes keep it", name, stored.nodes, stored.asked)

    async def _publish(self, name: str, value: bytes, lifetime: float) -> Stored:
        me = self._network.me
        key = record_key(me, name)
        answered = await self._look_up(key)
        last = self._known(key)
        now = int(self._now() * 1000)
        record = Record(
            author=me,
            name=name,
            value=value,
            # A clock is a sequence that survives the loss of all memory; the last one seen, one that survives a clock.
            sequence=max(now, last.sequence + 1 if last else 0),
            expires=max(now + int(lifetime * 1000), last.expires if last else 0),
        )
        raw = seal(self._network.sign, record)
        self._learn(key, raw)
        try:
            self._kademlia.records.keep(key, raw)  # for those who ask this node
        except BadRecord as error:
            log.debug("%s is not kept here: %s", name, error)
        anchors = [peer for peer in self._kademlia.anchors() if peer in answered]
        targets = list(dict.fromkeys((*answered[: REACH - len(anchors)], *anchors, *answered)))[:REACH]
        nodes = 0

        async def store(peer: PeerId) -> None:
            nonlocal nodes
            with trio.move_on_after(self._limits.patience):
                try:
                    kept = await self._kademlia.put(peer, key, raw)
                    nodes += kept
                except NetworkError as error:
                    log.debug("%s does not keep %s: %s", peer, name, error)

        async with trio.open_nursery() as nursery:
            for peer in targets:
                nursery.start_soon(store, peer)
        return Stored(record, nodes, len(targets))

    async def _look_up(self, key: bytes) -> list[PeerId]:
        """Ask around for `key`, remembering the best; returns who answered, closest first."""

        async def ask(peer: PeerId) -> list[PeerId] | None:
            try:
                raw, closer = await self._kademlia.get(peer, key)
            except NetworkError as error:
                log.debug("Kademlia: %s: %s", peer, error)
                return None
            if raw is not None:
                self._learn(key, raw, peer)
            return closer

        return await lookup(key, await self._kademlia.first_hand(key), ask, me=self._network.me, limits=self._limits)

    def _learn(self, key: bytes, raw: bytes, source: PeerId | None = None) -> None:
        try:
            record = self._kademlia.records.read(key, raw)
        except BadRecord as error:
            log.debug("%s gave a bad record: %s", source, error)
            if source is not None:
                self._kademlia.blame(source, error)
            return
        best = self._best.pop(key, None)
        self._best[key] = record if best is None or rank(record) > rank(best) else best
        if len(self._best) > REMEMBERED:
            self._best.popitem(last=False)

    def _known(self, key: bytes) -> Record | None:
        """The best of what was seen and what is kept for others, if it still lives."""
        now = self._now() * 1000
        candidates = [r for r in (self._best.get(key), self._kademlia.records.held(key)) if r and r.expires > now]
        return max(candidates, key=rank, default=None)
