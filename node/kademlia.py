"""This node's part in the Kademlia DHT: py-libp2p's `KadDHT` answers others, in server mode, within limits of ours.

Upstream's routing table, provider store and handlers are used as they are, but for
- values: only records of `protocols.dht_records` are kept, in `RecordStore`, which evicts nothing that is alive;
- streams: upstream admits 12 at once and waits for ever for what they say, so 12 silent streams of one stranger end
  a node's part in the DHT. Here each peer may have `STREAMS`, each for `STREAM` seconds.

Upstream's own lookups are not used. They answer from the local store first (so a node that provides a key finds only
itself, and a reader of a value sees no newer one for a day), wait up to 10 s for each dead peer, follow whatever closer
peers a liar invents, and say nothing about failed stores. `find_providers`, `get` and `put` here ask one peer;
`protocols.lookup` decides whom.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import base58
import trio
from google.protobuf.message import DecodeError
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.pb.kademlia_pb2 import Record as StoredRecord
from libp2p.kad_dht.value_store import ValueStore
from libp2p.peer.id import ID
from libp2p.records.validator import NamespacedValidator, Validator
from multiaddr import Multiaddr

from swarmnode.node.addresses import with_peer
from swarmnode.protocols.dht_records import NAMESPACE, BadRecord, Record, Verify, supersedes, unseal
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.lookup import sorted_by_distance
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId
from swarmnode.protocols.wire import WireError

log = logging.getLogger(__name__)

STREAMS = 8  # of one peer at once; each may hold one message of at most 4 MiB (upstream's limit), so 32 MiB a peer
STREAM = 30.0  # seconds that a stream of a peer lives; go-libp2p keeps one open to use it again, and opens another then
ASKS = 4  # questions of ours in flight to one peer: half of what a peer of our kind admits
ASK = 2.0  # seconds to open a stream, dialling included
REPLY = 256 * 1024  # bytes of an answer: 20 providers and 20 closer peers with addresses and signed records take 20 KiB
CLOSER = 20  # closer peers taken from an answer: Kademlia's k
ANCHORS = 8  # oldest connections that every lookup begins with: age cannot be ground
RECORDS = 4096  # kept for others in all
RECORDS_PER_AUTHOR = 16
RECORD_BYTES = 32 << 20  # of all values kept

Providers = dict[PeerId, tuple[Address, ...]]


class RecordStore(ValueStore):
    """Records kept for others. A store that is full refuses; it never gives up a live record for a new one."""

    def __init__(self, host: IHost, verify: Verify, now: Callable[[], float]) -> None:
        super().__init__(host=host, local_peer_id=host.get_id())
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
            if len(self._records) >= RECORDS or self._per_author[record.author] >= RECORDS_PER_AUTHOR:
                self.refusals["full"] += 1
                raise BadRecord("full", "there is no room for another record")
        size = self._size + len(raw) - len(self._raw.get(key, b""))
        if size > RECORD_BYTES:
            self.refusals["full"] += 1
            raise BadRecord("full", "there is no room for another record")
        self._per_author[record.author] += key not in self._records
        self._records[key], self._raw[key], self._size = record, raw, size
        return record

    def held(self, key: bytes) -> Record | None:
        """The live record under `key`."""
        record = self._records.get(key)
        return record if record is not None and record.expires > self._now() * 1000 else None

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


class _RecordValidator(Validator):
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


class Kademlia(KadDHT):
    """Serves the DHT as soon as it is made, and asks one peer at a time on behalf of lookups."""

    def __init__(self, host: IHost, network: Network, *, now: Callable[[], float] = time.time) -> None:
        self._streams: Counter[PeerId] = Counter()
        self._lines: WeakValueDictionary[PeerId, trio.Semaphore] = WeakValueDictionary()
        self._network = network
        self.records = RecordStore(host, network.verify, now)
        validator = NamespacedValidator({NAMESPACE: _RecordValidator(self.records)}, strict_validation=True)
        super().__init__(host, DHTMode.SERVER, validator=validator, validator_changed=True, strict_validation=True)
        self.value_store = self.records

    async def handle_stream(self, stream: INetStream) -> None:
        peer = str(stream.muxed_conn.peer_id)
        if self._streams[peer] >= STREAMS:
            log.debug("Kademlia: %s has more than %d streams", peer, STREAMS)
            await stream.reset()
            return
        self._streams[peer] += 1
        try:
            with trio.move_on_after(STREAM) as scope:
                await self._do_handle_stream(stream)
            if scope.cancelled_caught:
                await stream.reset()
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def speakers(self) -> list[PeerId]:
        """Connected peers that said in identify that they speak Kademlia."""
        store, protocol = self.host.get_peerstore(), str(TProtocol(PROTOCOL_ID))
        return [
            str(peer)
            for peer in self.host.get_connected_peers()
            if store.has_peer(peer) and store.supports_protocols(peer, [protocol])
        ]

    async def first_hand(self, key: bytes) -> list[PeerId]:
        """Where a lookup of `key` begins: the closest of the table, those connected, and before all the `anchors`."""
        await self.fill_table()
        speakers = sorted_by_distance(key, self.speakers())
        table = [str(peer) for peer in self.routing_table.find_local_closest_peers(key, CLOSER)]
        return list(dict.fromkeys((*self.anchors(), *table, *speakers)))[: ANCHORS + 2 * CLOSER]

    async def fill_table(self) -> None:
        """Put those connected that speak Kademlia into the table, for lookups of ours and of others."""
        for peer in map(ID.from_base58, self.speakers()):
            if not self.routing_table.peer_in_table(peer):
                await self.add_peer(peer, skip_server_mode_check=True)

    def anchors(self) -> list[PeerId]:
        """The peers connected longest: identities ground to crowd a key out of sight do not come before these."""
        speakers = set(self.speakers())
        views = sorted(self._network.peers(), key=lambda view: view.connected_at)
        return [view.peer for view in views if view.peer in speakers][:ANCHORS]

    # -- one question to one peer

    async def find_providers(self, peer: PeerId, key: bytes) -> tuple[Providers, list[PeerId]]:
        """Who `peer` says provides `key`, and the closer peers that it knows. Raises NetworkError."""
        answer = await self._exchange(peer, Message(type=Message.MessageType.GET_PROVIDERS, key=key))
        providers: Providers = {}
        for told in answer.providerPeers[:CLOSER]:
            name, addresses = _named(told)
            if name != self._network.me:
                providers.setdefault(name, addresses)
        return providers, self._closer(answer)

    async def announce(self, peer: PeerId, key: bytes) -> None:
        """Tell `peer` that this node provides `key`. Raises NetworkError."""
        message = Message(type=Message.MessageType.ADD_PROVIDER, key=key)
        addresses = [address.to_bytes() for address in self.host.get_addrs()]
        message.providerPeers.add(id=self.host.get_id().to_bytes(), addrs=addresses)
        await self._exchange(peer, message, silent=True)

    async def get(self, peer: PeerId, key: bytes) -> tuple[bytes | None, list[PeerId]]:
        """The bytes, unchecked, that `peer` holds under `key`, and the closer peers it knows. Raises NetworkError."""
        answer = await self._exchange(peer, Message(type=Message.MessageType.GET_VALUE, key=key))
        value = answer.record.value if answer.HasField("record") and answer.record.key == key else None
        return value or None, self._closer(answer)

    async def put(self, peer: PeerId, key: bytes, raw: bytes) -> bool:
        """Whether `peer` says that it keeps the record now. Raises NetworkError."""
        record = StoredRecord(key=key, value=raw)
        answer = await self._exchange(peer, Message(type=Message.MessageType.PUT_VALUE, key=key, record=record))
        return bool(answer.type == Message.MessageType.PUT_VALUE and answer.key == key)

    async def _exchange(self, peer: PeerId, message: Message, *, silent: bool = False) -> Message:
        """The answer of `peer`; with `silent`, of one that may close the stream without (go-libp2p, ADD_PROVIDER)."""
        line = self._lines.setdefault(peer, trio.Semaphore(ASKS))
        async with line:
            try:
                stream = await self._network.open_stream(peer, str(PROTOCOL_ID), timeout=ASK)
            except NetworkError:
                self.routing_table.remove_peer(ID.from_base58(peer))
                raise
            try:
                await stream.send_all(frame(message.SerializeToString()))
                if silent:
                    await stream.send_eof()  # only here: upstream resets a stream that ends, the answer with it
                raw = await FrameReader(stream, limit=REPLY).frame()
                if raw is None and not silent:
                    raise NetworkError(f"{peer} closed the stream without an answer")
                return Message.FromString(bytes(raw or b""))
            except (WireError, DecodeError) as error:
                raise NetworkError(f"{peer} broke the rules of Kademlia: {error}") from None
            finally:
                with trio.CancelScope(shield=True):  # aclose never waits long
                    await stream.aclose()

    def _closer(self, answer: Message) -> list[PeerId]:
        """Closer peers of an answer. Where to dial them is learned only of peers that nothing is known about."""
        closer = []
        for told in answer.closerPeers[:CLOSER]:
            peer, addresses = _named(told)
            if peer == self._network.me:
                continue
            closer.append(peer)
            if addresses and not self._network.known_addresses(peer):
                self._network.learn(peer, addresses)
        return closer


def _named(told: Any) -> tuple[PeerId, tuple[Address, ...]]:
    """A peer in an answer, with those of its addresses that can be read."""
    peer = base58.b58encode(told.id).decode()
    addresses = []
    for raw in told.addrs[:16]:
        try:
            addresses.append(with_peer(str(Multiaddr(raw)), peer))
        except Exception as error:  # multiaddr raises many kinds for what it cannot read
            log.debug("Kademlia: an unreadable address of %s: %r", peer, error)
    return peer, tuple(addresses)
