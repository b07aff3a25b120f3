"""Values of this node's own in the DHT, kept alive there, and those of others, read from many at once.

`put` looks the key up first: the walk finds the nodes to store at and what is there already, so a node that lost its
memory goes on above its last sequence number and never below its last expiry (`protocols.dht.records` on why).
`get` asks the network every time, takes the best of all genuine answers, and remembers it: a node does not go back to
an older value, even where everybody it asks is rolled back.

`run()` republishes what was put, every `REPUBLISH` seconds and whenever the nodes that should hold it may have changed,
until it is dropped; then it expires. What is kept for others is bounded and evicts nothing alive: `RecordStore` stands
in for py-libp2p's store, which has no bound on keys.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from time import time as wall_clock  # seconds since 1970

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.pb.kademlia_pb2 import Record as StoredRecord

from swarmnode.node.discovery.kademlia import ASKING, CLOSER, CheckedStore, Kademlia, Walk
from swarmnode.protocols.dht.records import (
    MAX_LIFETIME,
    NAMESPACE,
    BadRecord,
    DhtRecord,
    rank,
    record_key,
    seal,
    supersedes,
    unseal,
)
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind

log = logging.getLogger(__name__)

HOUR = 3600.0  # seconds
REPUBLISH = HOUR / 2  # seconds between renewals: a record of the default lifetime survives three that fail
LIFETIME = 2 * HOUR  # seconds for which a record outlives its author
REMEMBERED = 1024  # records of others that a rollback is checked against
MAX_OWN = 16  # records of one node: what storers admit
RECORDS = Metric("swarmnode_dht_records", GAUGE, "DHT values kept for others")
RECORD_BYTES = Metric("swarmnode_dht_record_bytes", GAUGE, "bytes of the DHT values kept for others")
REFUSED = Metric("swarmnode_dht_records_refused_total", COUNTER, "DHT values that were not kept or believed", "why")


@dataclass(frozen=True)
class Stored:
    """The result of a put: how many `nodes` of those `asked` keep the record now; it may be none."""

    record: DhtRecord
    nodes: int
    asked: int


class DhtRecords:
    """Use while the network runs; `run()` keeps records alive."""

    def __init__(self, kademlia: Kademlia) -> None:
        self._kademlia = kademlia
        self._network = kademlia.network
        self.store = RecordStore(kademlia)
        kademlia.serve_values(self.store, NAMESPACE)
        self._own: dict[str, tuple[bytes, float]] = {}  # name -> value, lifetime in seconds
        self._best = Recent[bytes, DhtRecord](REMEMBERED)  # newest seen of each key
        self._changed = trio.Event()
        self._putting = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew what was put and forget what expired, until cancelled."""
        task_status.started()
        while True:
            changed = self._changed = trio.Event()
            with trio.move_on_after(REPUBLISH):
                await changed.wait()
            self.store.cleanup_expired()
            for name in list(self._own):
                await self._renew(name)

    def peer_arrived(self) -> None:
        """A peer that speaks Kademlia came while there are few: it ought to hold our records too."""
        if self._own and len(self._kademlia.speakers()) <= CLOSER:
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
        seal(self._network.sign, DhtRecord(self._network.me, name, value, 0, 0))  # refuse before anything is sent
        record_key(self._network.me, name)
        async with self._putting:
            stored = await self._publish(name, value, lifetime)
            self._own[name] = (value, lifetime)
        return stored

    def drop(self, name: str) -> None:
        """Renew `name` no more; it expires within its lifetime."""
        self._own.pop(name, None)

    async def get(self, author: PeerId, name: str) -> DhtRecord | None:
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
        now = int(wall_clock() * 1000)
        record = DhtRecord(
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
            self.store.keep(key, raw)  # for those who ask this node
        except BadRecord as error:
            log.debug("%s is not kept here: %s", name, error)
        asked, kept = await self._kademlia.tell_closest(answered, put_message(key, raw))
        return Stored(record, kept, asked)

    async def _look_up(self, key: bytes) -> list[PeerId]:
        """Look `key` up and remember the best record; returns the peers that answered, closest first."""
        walk = Walk(self._kademlia, Message(type=Message.MessageType.GET_VALUE, key=key))
        answered = await self._kademlia.walk(walk)
        for peer, raw in walk.values:
            self._learn(key, raw, peer)
        return answered

    def _learn(self, key: bytes, raw: bytes, source: PeerId | None = None) -> None:
        try:
            record = self.store.read(key, raw)
        except BadRecord as error:
            log.debug("%s gave a bad record: %s", source, error)
            blame(self._kademlia, source, error)
            return
        best = self._best.get(key)
        self._best[key] = record if best is None or rank(record) > rank(best) else best

    def _known(self, key: bytes) -> DhtRecord | None:
        """The best live record of those seen and those kept for others."""
        now = wall_clock() * 1000
        candidates = [r for r in (self._best.get(key), self.store.held(key)) if r and r.expires > now]
        return max(candidates, key=rank, default=None)

    def measure(self, metrics: Metrics) -> None:
        self.store.measure(metrics)


def put_message(key: bytes, raw: bytes) -> Message:
    """What asks a peer to keep a record."""
    return Message(type=Message.MessageType.PUT_VALUE, key=key, record=StoredRecord(key=key, value=raw))


def blame(kademlia: Kademlia, peer: PeerId | None, error: BadRecord) -> None:
    """`peer` gave what is no valid record: a violation, where no honest node would have."""
    if peer is not None and error.why != "expired":
        kademlia.violations.note(peer, f"a record: {error}", Kind.LIE if error.why == "forged" else Kind.BREACH)


class RecordStore(CheckedStore):
    """Records kept for others. A store that is full refuses; it never gives up a live record for a new one."""

    def __init__(self, kademlia: Kademlia) -> None:
        super().__init__(host=kademlia.host, local_peer_id=kademlia.host.get_id())
        self._kademlia = kademlia
        self._limits = kademlia.limits
        self._records: dict[bytes, tuple[DhtRecord, bytes]] = {}  # with the bytes that hold them
        self._size = 0
        self._per_author: Counter[PeerId] = Counter()
        self._last: tuple[bytes, bytes, DhtRecord] | None = None  # key, bytes, what they hold: just verified
        self.refusals: Counter[str] = Counter()  # by reason

    def read(self, key: bytes, raw: bytes) -> DhtRecord:
        """As `unseal`; the last one read costs no second signature check."""
        if self._last is not None and self._last[:2] == (key, raw) and self._last[2].expires > wall_clock() * 1000:
            return self._last[2]
        try:
            record = unseal(key, raw, verify=self._kademlia.network.verify, now=wall_clock())
        except BadRecord as error:
            self.refusals[error.why] += 1
            blame(self._kademlia, ASKING.get(), error)
            raise
        self._last = (key, raw, record)
        return record

    def keep(self, key: bytes, raw: bytes) -> DhtRecord:
        """Keep a record. Raises BadRecord where it is none, is older than the one kept, or finds no room."""
        record = self.read(key, raw)
        old = self.held(key)
        if not supersedes(record, old):
            self.refusals["older"] += 1
            raise BadRecord("older", f"sequence {old.sequence if old else 0} is here already")
        if old is None:
            self.cleanup_expired()
        own, before = self._per_author[record.author], self._records.get(key)
        many = len(self._records) >= self._limits.records or own >= self._limits.records_per_author
        size = self._size + len(raw) - (len(before[1]) if before is not None else 0)
        if size > self._limits.record_bytes or (old is None and many):
            self.refusals["full"] += 1
            raise BadRecord("full", "there is no room for another record")
        self._per_author[record.author] += before is None
        self._records[key], self._size = (record, raw), size
        return record

    def held(self, key: bytes) -> DhtRecord | None:
        """The live record under `key`."""
        kept = self._records.get(key)
        return kept[0] if kept is not None and kept[0].expires > wall_clock() * 1000 else None

    def measure(self, metrics: Metrics) -> None:
        metrics.show(RECORDS, lambda: len(self._records))
        metrics.show(RECORD_BYTES, lambda: self._size)
        metrics.show(REFUSED, lambda: self.refusals)

    # What KadDHT's handler calls.

    def put_record(self, key: bytes, record: StoredRecord) -> None:
        self.keep(key, record.value)

    def get(self, key: bytes) -> StoredRecord | None:
        return StoredRecord(key=key, value=self._records[key][1]) if self.held(key) is not None else None

    def remove(self, key: bytes) -> bool:
        kept = self._records.pop(key, None)
        if kept is None:
            return False
        record, raw = kept
        self._size -= len(raw)
        self._per_author[record.author] -= 1
        if not self._per_author[record.author]:
            del self._per_author[record.author]
        return True

    def cleanup_expired(self) -> int:
        expired = [key for key in self._records if self.held(key) is None]
        for key in expired:
            self.remove(key)
        return len(expired)

    def validate(self, key: str, value: bytes) -> None:
        self.read(key.encode(), value)

    def select(self, key: str, values: list[bytes]) -> int:
        old, new = (self.read(key.encode(), value) for value in values)
        if supersedes(new, old):
            return 1
        self.refusals["older"] += 1
        return 0
