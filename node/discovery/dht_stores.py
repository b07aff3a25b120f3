"""What this node keeps in the DHT for others: values, and who provides what. Both are bounded, and evict nothing alive.

The classes stand in for py-libp2p's stores, whose names and signatures they keep; those have no bound on keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from libp2p.abc import IHost
from libp2p.kad_dht.pb.kademlia_pb2 import Record as StoredRecord
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.kad_dht.value_store import ValueStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import Validator

from swarmnode.node.host.limits import DhtLimits
from swarmnode.protocols.dht.records import BadRecord, Record, Verify, supersedes, unseal
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId

RECORDS = Metric("swarmnode_dht_records", GAUGE, "DHT values kept for others")
RECORD_BYTES = Metric("swarmnode_dht_record_bytes", GAUGE, "bytes of the DHT values kept for others")
REFUSED = Metric("swarmnode_dht_records_refused_total", COUNTER, "DHT values that were not kept or believed", "why")
PROVIDERS = Metric("swarmnode_dht_provider_keys", GAUGE, "keys for which this node remembers who provides them")


class RecordStore(ValueStore):
    """Records kept for others. A store that is full refuses; it never gives up a live record for a new one."""

    def __init__(
        self,
        host: IHost,
        verify: Verify,
        now: Callable[[], float],
        *,
        limits: DhtLimits,
        refused: Callable[[BadRecord], None],
    ) -> None:
        super().__init__(host=host, local_peer_id=host.get_id())
        self._limits = limits
        self._refused = refused  # told of what is no valid record
        self._verify = verify
        self._now = now
        self._records: dict[bytes, Record] = {}
        self._raw: dict[bytes, bytes] = {}
        self._size = 0
        self._per_author: Counter[PeerId] = Counter()
        self._last: tuple[bytes, bytes, Record] | None = None  # key, bytes, what they hold: just verified
        self.refusals: Counter[str] = Counter()  # by reason

    def read(self, key: bytes, raw: bytes) -> Record:
        """As `unseal`; the last one read costs no second signature check."""
        if self._last is not None and self._last[:2] == (key, raw) and self._last[2].expires > self._now() * 1000:
            return self._last[2]
        try:
            record = unseal(key, raw, verify=self._verify, now=self._now())
        except BadRecord as error:
            self.refusals[error.why] += 1
            self._refused(error)
            raise
        self._last = (key, raw, record)
        return record

    def keep(self, key: bytes, raw: bytes) -> Record:
        """Keep a record. Raises BadRecord where it is none, is older than the one kept, or finds no room."""
        record = self.read(key, raw)
        old = self.held(key)
        if not supersedes(record, old):
            self.refusals["older"] += 1
            raise BadRecord("older", f"sequence {old.sequence if old else 0} is here already")
        if old is None:
            self.cleanup_expired()
            own = self._per_author[record.author]
            if len(self._records) >= self._limits.records or own >= self._limits.records_per_author:
                self.refusals["full"] += 1
                raise BadRecord("full", "there is no room for another record")
        size = self._size + len(raw) - len(self._raw.get(key, b""))
        if size > self._limits.record_bytes:
            self.refusals["full"] += 1
            raise BadRecord("full", "there is no room for another record")
        self._per_author[record.author] += key not in self._records
        self._records[key], self._raw[key], self._size = record, raw, size
        return record

    def held(self, key: bytes) -> Record | None:
        """The live record under `key`."""
        record = self._records.get(key)
        return record if record is not None and record.expires > self._now() * 1000 else None

    def measure(self, metrics: Metrics) -> None:
        metrics.show(RECORDS, lambda: len(self._records))
        metrics.show(RECORD_BYTES, lambda: self._size)
        metrics.show(REFUSED, lambda: self.refusals)

    # What KadDHT's handler calls.

    def put_record(self, key: bytes, record: StoredRecord) -> None:
        self.keep(key, record.value)

    def get(self, key: bytes) -> StoredRecord | None:
        return StoredRecord(key=key, value=self._raw[key]) if self.held(key) is not None else None

    def remove(self, key: bytes) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._size -= len(self._raw.pop(key))
        self._per_author[record.author] -= 1
        if not self._per_author[record.author]:
            del self._per_author[record.author]
        return True

    def cleanup_expired(self) -> int:
        expired = [key for key in self._records if self.held(key) is None]
        for key in expired:
            self.remove(key)
        return len(expired)


class RecordValidator(Validator):
    """Answers KadDHT's handler for the namespace of our records."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store

    def validate(self, key: str, value: bytes) -> None:
        self._store.read(key.encode(), value)

    def select(self, key: str, values: list[bytes]) -> int:
        old, new = (self._store.read(key.encode(), value) for value in values)
        if supersedes(new, old):
            return 1
        self._store.refusals["older"] += 1
        return 0


class Providers(ProviderStore):
    """Who provides what, as others announced it. Whatever is new is left out where there is no room."""

    def __init__(self, host: IHost, limits: DhtLimits) -> None:
        super().__init__(host)
        self._limits = limits
        self._keys_of: Counter[str] = Counter()

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        name = str(provider.peer_id)
        known = name in self.providers.get(key, {})
        if not known and name != str(self.local_peer_id):
            full = key not in self.providers and len(self.providers) >= self._limits.provider_keys
            if full or self._keys_of[name] >= self._limits.keys_per_provider:
                return
        super().add_provider(key, provider)
        if not known and name in self.providers.get(key, {}):
            self._keys_of[name] += 1

    def withdraw(self, key: bytes, peer: ID) -> None:
        """Forget that `peer` provides `key`."""
        providers = self.providers.get(key, {})
        if providers.pop(str(peer), None) is not None:
            self._recount()
        if not providers:
            self.providers.pop(key, None)

    def cleanup_expired(self) -> None:
        super().cleanup_expired()
        self._recount()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PROVIDERS, lambda: len(self.providers))

    def _recount(self) -> None:
        """The store's own methods drop what expired."""
        self._keys_of = Counter(name for providers in self.providers.values() for name in providers)
