"""This node's part in the Kademlia DHT: py-libp2p's `KadDHT` answers others, in server mode, within limits of ours.

Upstream's routing table and handlers are used as they are, but for
- providers: kept in a store of our own (`BoundedProviderStore`), which is bounded;
- values: refused, whoever signed them, as nothing here reads any;
- streams: upstream admits 12 at once and waits for ever for what they say, so 12 silent streams of one stranger end
  a node's part in the DHT. Here each peer may have some, each for a while, and with questions of a bounded size.

Upstream's own lookups are not used. They answer from the local store first (so a node that provides a key finds only
itself), wait up to 10 s for each dead peer, and follow whatever closer peers a liar invents. A `Walk` here asks peer
after peer; `protocols.dht.lookup` decides whom. `ContentRouting` announces what this node has, again and again, and
finds who has what. Announcements are paced below the 10 in 10 s that a peer accepts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Any
from weakref import WeakValueDictionary

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator

from swarmnode.node.host.addresses import with_peer
from swarmnode.node.host.connections import Connections
from swarmnode.node.host.limits import DhtLimits
from swarmnode.node.host.stream import places_in
from swarmnode.protocols.dht.lookup import LookupLimits, lookup, sorted_by_distance
from swarmnode.protocols.frames import FrameReader, close, frame
from swarmnode.protocols.limits import Allowance, Budget, counted
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId
from swarmnode.protocols.peers.diversity import Group, group_of_addresses, spread
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.wire import WireError

log = logging.getLogger(__name__)

ASKS = 4  # questions of ours in flight to one peer: half of what a peer of our kind admits
ASK = 2.0  # seconds to open a stream, dialling included
REPLY = 256 * 1024  # bytes of an answer: 20 providers and 20 closer peers with addresses and signed records take 20 KiB
MAX_ID = 64  # bytes of a peer id
ASKED = Allowance(rate=16, burst=256)  # questions that one peer has answered: each takes some 2 ms
MAX_ADDRESSES, MAX_ADDRESS_BYTES = 8, 600  # kept of a provider, the first that it names: six circuits through relays
CLOSER = 20  # closer peers taken from an answer: Kademlia's k
SPOKE = 3  # answers that name providers, before which a search for those goes on
ANCHORS = 8  # oldest connections that every lookup begins with: age cannot be ground
PER_PREFIX = 2  # peers from one network in a bucket of the table, as upstream has it
PER_RELAY = 5  # peers reached through one relay in a bucket, which has room for 20
LOOKUP = LookupLimits()

PROVIDERS = Metric("swarmnode_dht_provider_keys", GAUGE, "keys for which this node remembers who provides them")

FoundProviders = dict[PeerId, tuple[Address, ...]]
REPEAT = 600.0  # seconds between announcements of a key; records live for 48 h upstream, peers do not
PACE = (9, 10.5)  # announcements, seconds: a peer drops the eleventh in 10 s
MAX_KEYS = 64  # that one node keeps announced
PROVIDED = Metric("swarmnode_dht_provided_keys", GAUGE, "keys that this node announces in the DHT")


class Kademlia(KadDHT):
    """Serves the DHT as soon as it is made, and asks one peer at a time on behalf of lookups."""

    def __init__(self, host: IHost, network: Network, connections: Connections, limits: DhtLimits) -> None:
        self._connections = connections
        self.limits = limits
        self.violations = Violations(str(PROTOCOL_ID))
        self._streams: Counter[PeerId] = Counter()
        self._asked = Budget[PeerId](ASKED)
        self._lines: WeakValueDictionary[PeerId, trio.Semaphore] = WeakValueDictionary()
        self.network = network
        validator = NamespacedValidator({}, strict_validation=True)  # which refuses every value
        super().__init__(host, DHTMode.SERVER, validator=validator, validator_changed=True, strict_validation=True)
        self.provider_store: BoundedProviderStore = BoundedProviderStore(host, limits)

    async def handle_stream(self, stream: INetStream) -> None:
        peer = str(stream.muxed_conn.peer_id)
        if self.violations.refuses(peer) is not None:
            await stream.reset()
            return
        if self._streams[peer] >= self.limits.streams:
            self.violations.note(peer, f"more than {self.limits.streams} streams", Kind.LOAD)
            await stream.reset()
            return
        with counted(self._streams, peer):
            with trio.move_on_after(self.limits.stream) as scope:
                await self._do_handle_stream(_Measured(stream, self.limits.message, self._asked))  # type: ignore[arg-type]
            if scope.cancelled_caught:
                await stream.reset()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PROVIDERS, lambda: len(self.provider_store.providers))
        self.violations.measure(metrics)

    def speakers(self) -> list[PeerId]:
        """Connected peers that said in identify that they speak Kademlia."""
        store, protocol = self.host.get_peerstore(), str(TProtocol(PROTOCOL_ID))
        known = filter(store.has_peer, self.host.get_connected_peers())
        return [str(peer) for peer in known if store.supports_protocols(peer, [protocol])]

    async def first_hand(self, key: bytes) -> list[PeerId]:
        """Where a lookup of `key` begins: the closest of the table, those connected, and before all the `anchors`."""
        await self.fill_table()
        speakers = sorted_by_distance(key, self.speakers())
        table = [str(peer) for peer in self.routing_table.find_local_closest_peers(key, CLOSER)]
        known = list(dict.fromkeys((*self.anchors(), *table, *speakers)))
        return spread(known, self._group_of)[: ANCHORS + 2 * CLOSER]

    def _group_of(self, peer: PeerId) -> Group:
        """Where a peer connects from; for one that is not connected, where it claims to be."""
        return self._connections.group_of(peer) or group_of_addresses(self.network.known_addresses(peer))

    async def add_peer(self, peer_id: ID, *, skip_server_mode_check: bool = False) -> bool:
        """Put a peer into the table, unless its bucket has as many from there as it may have.

        Upstream has the same rule and applies it to addresses that a peer claims.
        """
        peer, table = str(peer_id), self.routing_table
        group = self._group_of(peer)
        if group is not None and not table.peer_in_table(peer_id):
            there = sum(self._group_of(str(other)) == group for other in table.find_bucket(peer_id).peer_ids())
            if there >= (PER_RELAY if group.startswith("via ") else PER_PREFIX):
                return False
        return bool(await super().add_peer(peer_id, skip_server_mode_check=skip_server_mode_check))

    async def fill_table(self) -> None:
        """Put those connected that speak Kademlia into the table, for lookups of ours and of others."""
        for peer in map(ID.from_base58, self.speakers()):
            if not self.routing_table.peer_in_table(peer):
                await self.add_peer(peer, skip_server_mode_check=True)

    def anchors(self) -> list[PeerId]:
        """The peers connected longest: identities ground to crowd a key out of sight do not come before these."""
        speakers = set(self.speakers())
        views = sorted(self.network.peers(), key=lambda view: view.connected_at)
        oldest = spread((view for view in views if view.peer in speakers), lambda view: view.group)
        return [view.peer for view in oldest][:ANCHORS]

    async def look_up(
        self, key: bytes, *, providers: bool = False, known: FoundProviders | None = None, wanted: int | None = None
    ) -> tuple[Walk, list[PeerId]]:
        """Ask ever closer peers for those closest to `key`, or also who provides it; what was said, and who answered.

        Those that answered come closest first. `known`: providers that are known already; with `wanted` it ends.
        """
        kind = Message.MessageType.GET_PROVIDERS if providers else Message.MessageType.FIND_NODE
        walk = Walk(self, Message(type=kind, key=key), known or {}, wanted)
        return walk, await lookup(key, await self.first_hand(key), walk, me=self.network.me, limits=LOOKUP)

    async def tell_closest(self, answered: list[PeerId], message: Message) -> int:
        """Tell the `CLOSER` closest of those that answered, the anchors among them; how many."""
        anchors = [peer for peer in self.anchors() if peer in answered]
        targets = list(dict.fromkeys((*answered[: CLOSER - len(anchors)], *anchors, *answered)))[:CLOSER]

        async def tell_one(peer: PeerId) -> None:
            with trio.move_on_after(LOOKUP.patience):
                try:
                    await self.exchange(peer, message, silent=True)
                except NetworkError as error:
                    log.debug("Kademlia: %s: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in targets:
                nursery.start_soon(tell_one, peer)
        return len(targets)

    async def exchange(self, peer: PeerId, message: Message, *, silent: bool = False) -> Message:
        """The answer of `peer`; with `silent`, of one that may close the stream without (go-libp2p, ADD_PROVIDER).

        Raises NetworkError.
        """
        line = self._lines.setdefault(peer, trio.Semaphore(ASKS))
        async with line:
            try:
                stream = await self.network.open_stream(peer, str(PROTOCOL_ID), timeout=ASK)
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
                self.violations.note(peer, str(error))
                raise NetworkError(f"{peer} broke the rules of Kademlia: {error}") from None
            finally:
                await close(stream)


class Walk:
    """One question to many peers, and what they say: a `lookup.Query`."""

    def __init__(self, kademlia: Kademlia, question: Message, providers: FoundProviders, wanted: int | None) -> None:
        self._kademlia = kademlia
        self._network = kademlia.network
        self._question = question
        self.providers = providers
        self._told = [[*providers]] if providers else []  # of those, by who named any
        self._wanted = wanted
        self.closer: FoundProviders = {}  # who was named as closer, and where it was said to be first

    @property
    def enough(self) -> bool:
        """Whether so many were named, by several: one alone decides nothing."""
        return self._wanted is not None and len(self._told) >= SPOKE and len(self.providers) >= self._wanted

    def by_turns(self) -> list[PeerId]:
        """The providers, of each answer one after the other."""
        return list(dict.fromkeys(peer for turn in zip_longest(*self._told) for peer in turn if peer is not None))

    async def ask(self, peer: PeerId) -> list[PeerId] | None:
        """The closer peers that it knows. Where to dial them is learned only of those of whom nothing is known."""
        try:
            answer = await self._kademlia.exchange(peer, self._question)
        except NetworkError as error:
            log.debug("Kademlia: %s: %s", peer, error)
            return None
        if named := dict(self._named(answer.providerPeers)):
            self._told.append([*named])
            self.providers |= named | self.providers
        closer = list(self._named(answer.closerPeers))
        for other, addresses in closer:
            self.closer[other] = self.closer.get(other) or addresses
            if addresses and not self._network.known_addresses(other):
                self._network.learn(other, addresses)
        return [other for other, _ in closer]

    def _named(self, peers: Sequence[Any]) -> Iterator[tuple[PeerId, tuple[Address, ...]]]:
        """Peers in an answer, but for this node, each with those of its addresses that can be read."""
        for named in peers[:CLOSER]:
            peer = str(ID(named.id)) if len(named.id) <= MAX_ID else self._network.me
            if peer != self._network.me:
                yield peer, tuple(with_peer(place, peer) for place in places_in(named.addrs[:16]))


class _Measured:
    """A stream on which no question is longer than `most` bytes (upstream: 4 MiB), nor read before its peer may ask."""

    def __init__(self, stream: INetStream, most: int, asked: Budget[PeerId]) -> None:
        self._stream, self._most, self._asked = stream, most, asked
        self._read = 0  # since the last answer

    async def read(self, n: int | None = None) -> bytes:
        if not self._read:
            await trio.sleep(self._asked.overdraw(str(self._stream.muxed_conn.peer_id), 1))
        chunk = await self._stream.read(n)
        self._read += len(chunk)
        if self._read > self._most:
            raise NetworkError(f"a question of more than {self._most} bytes")
        return chunk

    async def write(self, data: bytes) -> None:
        self._read = 0
        await self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BoundedProviderStore(ProviderStore):
    """The providers that others announced. Where there is no room, new ones are left out."""

    def __init__(self, host: IHost, limits: DhtLimits) -> None:
        super().__init__(host)
        self._limits = limits

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        sizes = accumulate(len(place.to_bytes()) for place in provider.addrs[:MAX_ADDRESSES])
        places = [place for place, size in zip(provider.addrs, sizes, strict=False) if size <= MAX_ADDRESS_BYTES]
        if provider.addrs and not places:
            return
        provider = PeerInfo(provider.peer_id, places)
        name = str(provider.peer_id)
        if name not in self.providers.get(key, {}) and name != str(self.local_peer_id):
            full = key not in self.providers and len(self.providers) >= self._limits.provider_keys
            of_this = self.providers.get(key, {})
            oldest = min(of_this, key=lambda other: of_this[other].timestamp, default="")
            if len(of_this) >= CLOSER and of_this[oldest].timestamp < time.time() - 3 * REPEAT:
                del of_this[oldest]  # announced no more: who came first would keep the places for two days
            if full or sum(name in of_key for of_key in self.providers.values()) >= self._limits.keys_per_provider:
                return
        super().add_provider(key, provider)

    def withdraw(self, key: bytes, peer: ID) -> None:
        providers = self.providers.get(key, {})
        providers.pop(str(peer), None)
        if not providers:
            self.providers.pop(key, None)


class ContentRouting:
    """Announces and finds providers. `run()` announces again what was provided; the calls work while it runs."""

    def __init__(self, kademlia: Kademlia) -> None:
        self._kademlia = kademlia
        self._host = kademlia.host
        self._keys: dict[bytes, float] = {}  # key -> when it was last announced
        self._recent: deque[float] = deque(maxlen=PACE[0])
        self._pacing = trio.Lock()
        self._changed = trio.Event()
        self._addresses = 0  # how often this node's addresses changed

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            await self._kademlia.fill_table()
            now = trio.current_time()
            for key, at in list(self._keys.items()):
                if key in self._keys and now - at >= REPEAT:
                    await self._announce(key)
            self._kademlia.provider_store.cleanup_expired()
            with trio.move_on_after(REPEAT / 10):
                await self._changed.wait()

    def peer_arrived(self) -> None:
        """A peer that speaks Kademlia came: it may be close to a key, so announcements are due again."""
        if self._keys and len(self._kademlia.speakers()) <= CLOSER:
            self._keys = dict.fromkeys(self._keys, -float("inf"))
        self._changed.set()

    def addresses_changed(self) -> None:
        """This node's addresses changed: announce every key again, also those being announced now."""
        self._addresses += 1
        self._keys = dict.fromkeys(self._keys, -float("inf"))
        self._changed.set()

    async def provide(self, key: bytes) -> None:
        """Announce `key` now and from now on; what is above MAX_KEYS keys is left to connected peers to find."""
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            log.warning("not announced in the DHT, as a node announces at most %d keys: %s", MAX_KEYS, key.hex())
            return
        self._keys[key] = -float("inf")
        await self._announce(key)

    def withdraw(self, key: bytes) -> None:
        """Announce `key` no more, and do not name this node for it."""
        self._keys.pop(key, None)
        self._kademlia.provider_store.withdraw(key, self._host.get_id())

    def measure(self, metrics: Metrics) -> None:
        metrics.show(PROVIDED, lambda: len(self._keys))

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        """Providers of `key` other than this node, at most `limit`; where they may be dialled is learned."""
        here = [one for one in self._kademlia.provider_store.get_providers(key) if one.peer_id != self._host.get_id()]
        known = {str(one.peer_id): places_in(place.to_bytes() for place in one.addrs[:16]) for one in here}
        walk, _ = await self._kademlia.look_up(key, providers=True, known=known, wanted=limit)
        found = walk.by_turns()[:limit]
        for peer in found:
            self._kademlia.network.learn(peer, walk.providers[peer], hearsay=True)
        return tuple(found)

    async def _announce(self, key: bytes) -> None:
        async with self._pacing:
            if len(self._recent) == PACE[0]:
                await trio.sleep_until(self._recent[0] + PACE[1])
            self._recent.append(trio.current_time())
        if key not in self._keys:
            return  # withdrawn meanwhile
        addresses = self._addresses
        here = PeerInfo(self._host.get_id(), self._host.get_addrs())
        self._kademlia.provider_store.add_provider(key, here)  # for those who ask this node
        _, answered = await self._kademlia.look_up(key, providers=True)
        provided = Message(type=Message.MessageType.ADD_PROVIDER, key=key)
        provided.providerPeers.add(id=here.peer_id.to_bytes(), addrs=[place.to_bytes() for place in here.addrs])
        asked = await self._kademlia.tell_closest(answered, provided)
        if asked and key in self._keys and addresses == self._addresses:
            self._keys[key] = trio.current_time()
