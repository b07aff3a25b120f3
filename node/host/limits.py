"""Everything that peers may take of this node, in one place: `Limits`, one part for each thing that enforces its own.

Each field names its unit and its reason. What a peer goes beyond is waited out where waiting costs the peer alone
(bytes a second), else refused before memory is taken; and noted as a violation, which `protocols.peers.scoring` weighs.
What one peer can make this node keep by doing everything at once is summed up in tests/node/host/test_limits.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.protocols.calls.frames import RpcLimits
from swarmnode.protocols.methods.rollouts.pool import RolloutLimits
from swarmnode.protocols.peers.scoring import ScoringLimits
from swarmnode.protocols.transfer.bulk import BulkLimits
from swarmnode.protocols.transfer.shard_wire import ShardLimits

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class ConnectionLimits:
    """Connections, their streams and unread bytes."""

    peers: int = 64  # connected at once; a seat for each in the default swarm, 2 % of a core for their pings
    per_peer: int = 4  # connections: both may dial at once, and again when one lost its end; of all together two each
    handshakes: int = 64  # connections whose peer is not known yet: what 5 s each allow is 13 newcomers a second
    handshake: float = 5.0  # seconds for it: six round trips of a slow satellite link
    streams: int = 128  # of one peer, on all its connections. An honest one has about 30
    streams_in_all: int = 4096  # of all peers: 48 MiB of tasks. Beyond it each peer has an equal share, as much in all
    unread: int = 16 * MIB  # bytes of one peer that no reader has taken yet: four streams at their widest window
    unread_in_all: int = 128 * MIB  # beyond half of it each peer has an equal share
    unread_chunk: int = 64  # bytes that a piece costs beside its length: a peer may send them one byte at a time


@dataclass(frozen=True)
class RateLimits:
    """Bytes a second, in each direction; beyond them a peer is not read from and not written to. 0 is no limit.

    Members of a run have none: the volunteer's own caps (`up`, `down`) hold for all, and a round is as fast as its
    slowest member. The others get what a home or office network carries, which a busy machine can still encrypt.
    """

    stranger: float = 128.0 * MIB  # bytes a second, each: the line rate of gigabit Ethernet: a fifth of a core
    strangers: float = 256.0 * MIB  # bytes a second, all together: two such links, half a core
    slowed: float = 64.0 * KIB  # bytes a second, a peer whose standing fell: 400 small calls, or half a large one


@dataclass(frozen=True)
class DhtLimits:
    """The DHT: questions of others, and what is kept for them."""

    streams: int = 8  # of one peer; go-libp2p keeps one and opens another while that is busy
    stream: float = 30.0  # seconds that a stream of a peer lives
    message: int = 64 * KIB  # bytes of a question: twenty peers with addresses take 24
    provider_keys: int = 8192  # keys with providers in all, of at most 20 each: 60 MiB at the very worst
    keys_per_provider: int = 128  # twice what a node of our kind announces


@dataclass(frozen=True)
class RelayLimits:
    """What strangers may have of a relay. The defaults serve a swarm of some hundred nodes."""

    reservations: int = 256  # at a time; one is a few hundred bytes
    reservation_ttl: float = 3600.0  # s; renewed by its holder long before
    circuits: int = 128  # at a time; each has two streams and two buffers of 64 KiB
    circuits_per_peer: int = 16  # that a peer is one end of
    circuit_bytes: int = 4 << 30  # each way; a round of a small model is megabytes, so this is hours
    circuit_seconds: float = 2 * 3600.0  # s; the ends make a new circuit when they need one
    requests_per_minute: int = 60  # of one peer; a private node needs one in five minutes, a dialler one a dial


@dataclass(frozen=True)
class Limits:
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    rates: RateLimits = field(default_factory=RateLimits)
    dht: DhtLimits = field(default_factory=DhtLimits)
    conduct: ScoringLimits = field(default_factory=ScoringLimits)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    bulk: BulkLimits = field(default_factory=BulkLimits)
    shards: ShardLimits = field(default_factory=ShardLimits)
    relay: RelayLimits = field(default_factory=RelayLimits)
    rollouts: RolloutLimits = field(default_factory=RolloutLimits)
