"""The weights of a policy that one node trains, for those who only sample for it (SHARDCAST, INTELLECT-2 2505.07291).

    rollouts.weights   sampler → trainer: what is newest, and what came of my groups?         Newest
    rollouts.fresh     trainer → sampler, where the run says "push": this is newest now       Thanks

Weights are one shard: float32, little-endian, in the layout's order. What names it is signed by the trainer and has a
counter that only grows, the number of updates, and the hash of all bytes. Samplers fetch it from the trainer and from
one another, and check the hash of what they put together.

A trainer broadcasts while somebody asks, once a round; nobody else pays for it. Who may fail when, and what is then
true: a trainer that is silent or gone leaves its samplers without new weights, and they stop when those they have are
too old to be of use; a sampler that dies costs what was on its way; one that asks too often is refused as "busy".
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.rollouts.messages import TIMEOUT, Thanks
from swarmnode.protocols.methods.rollouts.samplers import Samplers
from swarmnode.protocols.methods.rollouts.signed import MAX_AUTHOR, MAX_COUNTER, SIGNATURE, Sign, Verify
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.violations import Kind, Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.protocols.wire import WireError, decode, encode

log = logging.getLogger(__name__)

WEIGHTS, FRESH = "rollouts.weights", "rollouts.fresh"
TAG = b"swarmnode/weights/1\0"  # no other kind of message that a node signs begins so
MAX_SIGNED = 1024  # bytes of Weights
ASKED_WITHIN = 30.0  # seconds after its last question for which a node counts as one that samples
MAX_SAMPLERS = 256  # that are told of new weights
QUERIES = Allowance(rate=4.0, burst=32)  # of one peer

Vector = NDArray[np.float32]


class NoWeights(Exception):
    """What came are not the weights that the trainer signed. The message says why."""


@dataclass(frozen=True)
class Weights:
    """What a trainer signs: one version of its policy."""

    trainer: str
    counter: int  # grows with each version of this trainer's, over its restarts too
    version: int  # updates that the policy has seen
    policy: str  # sha-256 of all bytes, hex
    shape: str  # of the policy, such as gpt:2x48: who samples has one of the same
    shard: bytes
    size: int  # bytes

    def __post_init__(self) -> None:
        if not 0 < len(self.trainer) <= MAX_AUTHOR or len(self.policy) != 64 or len(self.shape) > MAX_AUTHOR:
            raise WireError("Weights: no trainer, hash or shape")
        if not (0 <= self.counter <= MAX_COUNTER and 0 <= self.version <= MAX_COUNTER and 0 < self.size <= 1 << 40):
            raise WireError("Weights: counter, version or size out of range")
        if len(self.shard) != 32:
            raise WireError("Weights: no shard")


@dataclass(frozen=True)
class WeightsQuery:
    run_id: str
    samples: bool = False  # I sample for you
    push: bool = False  # tell me of new ones


@dataclass(frozen=True)
class Newest:
    """Whether the peer trains a policy, its newest weights where they are out, and how the asker stands with it."""

    trains: bool = False
    shape: str = ""  # of the policy, such as gpt:2x48
    payload: bytes = b""  # of Weights; empty where none are out yet: ask again
    signature: bytes = b""
    samplers: int = 0  # others that sample for it
    expected: int = -1  # counter of the asker's next group; -1 where none came yet
    came: int = 0  # the asker's groups
    accepted: int = 0  # of these, learned from or found to teach nothing
    refused: dict[str, int] = field(default_factory=dict)  # by reason
    caught: str = ""  # why nothing of the asker's is taken any more


@dataclass(frozen=True)
class Fresh:
    run_id: str
    payload: bytes
    signature: bytes


def hash_of(parameters: Vector) -> str:
    """sha-256 of a policy's parameters (P,) in hex, little-endian."""
    return hashlib.sha256(parameters.astype("<f4").tobytes()).hexdigest()


def seal_weights(weights: Weights, *, run_id: str, sign: Sign) -> tuple[bytes, bytes]:
    """The bytes that travel and their signature."""
    payload = encode(weights)
    return payload, sign(_message(run_id, payload))


def open_weights(payload: bytes, signature: bytes, *, run_id: str, trainer: PeerId, verify: Verify) -> Weights:
    """What `trainer` signed for this run. Raises NoWeights."""
    try:
        weights = decode(Weights, payload, limit=MAX_SIGNED)
    except WireError as error:
        raise NoWeights(f"{trainer} names no weights: {error}") from error
    if weights.trainer != trainer or len(signature) != SIGNATURE:
        raise NoWeights(f"{trainer} names weights that are not its own")
    if not verify(trainer, _message(run_id, payload), signature):
        raise NoWeights(f"weights are not signed by {trainer}")
    return weights


async def fetch_weights(weights: Weights, *, shards: Shards, runner: Runner) -> Vector:
    """The parameters (P,), from the trainer and whoever else has them. Raises ShardError or NoWeights."""
    await shards.fetch(weights.shard, providers=[weights.trainer], announce=False)
    content = await shards.content(weights.shard)

    def checked() -> Vector:
        if len(content) != weights.size or hashlib.sha256(content).hexdigest() != weights.policy:
            raise NoWeights(f"the weights that {weights.trainer} signed do not have their hash")
        parameters = np.frombuffer(content, "<f4").astype(np.float32)
        if not np.isfinite(parameters).all():
            raise NoWeights(f"the weights of {weights.trainer} are not all numbers")
        return parameters

    return await runner(checked)


def _message(run_id: str, payload: bytes) -> bytes:
    return TAG + run_id.encode() + b"\0" + payload


class Broadcast:
    """A trainer's side: puts out the newest weights while somebody asks for them."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        shape: str,
        rpc: Rpc,
        shards: Shards,
        sign: Sign,
        runner: Runner,
        now: Callable[[], int],
        admits: Callable[[PeerId], bool],
        samplers: Samplers,
        keep: int,
    ) -> None:
        """`shape`: of the policy; `keep`: versions whose shards stay for those who are late."""
        self._me, self._run_id, self._shape, self._keep = me, run_id, shape, keep
        self._rpc, self._shards, self._sign, self._runner = rpc, shards, sign, runner
        self._now, self._admits, self._samplers = now, admits, samplers
        self.offences = Offences("weights")
        self._newest: tuple[Weights, bytes, bytes] | None = None
        self._out: deque[bytes] = deque()  # shards that are here, the oldest first
        self._counter = 0
        self._asked: OrderedDict[PeerId, tuple[float, bool]] = (
            OrderedDict()
        )  # who samples: trio time of the last question; push?
        self._queries = Budget[PeerId](QUERIES)
        self._news = trio.Event()
        rpc.serve(WEIGHTS, WeightsQuery, self._on_query)

    @property
    def wanted(self) -> bool:
        """Whether somebody samples for this node."""
        return any(True for _ in self._askers())

    @property
    def newest(self) -> Weights | None:
        return self._newest[0] if self._newest is not None else None

    async def publish(self, parameters: Vector, *, version: int, policy: str) -> None:
        """Put out these parameters (P,), whose `hash_of` is `policy`. Raises ShardError where there is no room."""
        if self.newest is not None and self.newest.policy == policy:  # an update that changed nothing
            shard = self.newest.shard
        else:
            shard = await self._put(parameters)
            self._out.append(shard)
        self._counter = max(self._counter + 1, self._now())
        weights = Weights(self._me, self._counter, version, policy, self._shape, shard, 4 * parameters.size)
        self._newest = (weights, *seal_weights(weights, run_id=self._run_id, sign=self._sign))
        self._samplers.know(policy, version)
        while len(self._out) > self._keep:
            gone = self._out.popleft()
            if gone not in self._out:
                await self._shards.drop(gone)
        self._news.set()

    async def _put(self, parameters: Vector) -> bytes:
        """The shard that these parameters are now."""
        try:
            with tempfile.TemporaryDirectory(prefix="swarmnode-weights-") as folder:
                source = Path(folder) / "weights"
                await self._runner(lambda: source.write_bytes(parameters.astype("<f4").tobytes()))
                return await self._shards.put(source, announce=False)
        except OSError as error:
            raise ShardError(f"the folder for temporary files takes no weights: {error}") from error

    async def watch(self) -> None:
        """Tell those who want to be told, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._news.wait()
                self._news = trio.Event()
                for peer in [peer for peer, push in self._askers() if push]:
                    nursery.start_soon(self._tell, peer)

    async def _tell(self, peer: PeerId) -> None:
        assert self._newest is not None
        _, payload, signature = self._newest
        try:
            await self._rpc.call(peer, FRESH, Fresh(self._run_id, payload, signature), Thanks, timeout=TIMEOUT)
        except CallError as error:
            log.debug("%s is not told of new weights: %s", peer, error)

    def _askers(self) -> list[tuple[PeerId, bool]]:
        now = trio.current_time()
        return [(peer, push) for peer, (at, push) in self._asked.items() if now - at <= ASKED_WITHIN]

    async def _on_query(self, peer: PeerId, query: WeightsQuery) -> Newest:
        if query.run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if not self._admits(peer):
            raise Refuse("not-admitted", "this run does not admit you")
        if not self._queries.take(peer, 1):
            self.offences.note(peer, "asks too often for weights", Kind.LOAD)
            raise Refuse("busy", f"at most {QUERIES.rate:g} questions for weights a second")
        self._asked.pop(peer, None)
        if query.samples:
            self._asked[peer] = (trio.current_time(), query.push)
        while len(self._asked) > MAX_SAMPLERS:
            self._asked.popitem(last=False)
        tally = self._samplers.tally(peer)
        _, payload, signature = self._newest or (None, b"", b"")
        return Newest(
            trains=True,
            shape=self._shape,
            payload=payload,
            signature=signature,
            samplers=sum(asker != peer for asker, _ in self._askers()),
            expected=tally.expected,
            came=tally.came,
            accepted=tally.accepted,
            refused=dict(tally.refused),
            caught=tally.caught,
        )


async def ask(rpc: Rpc, peer: PeerId, *, run_id: str, samples: bool, push: bool) -> Newest | None:
    """What a peer says of its weights; None where it does not answer, or trains nothing."""
    try:
        newest = await rpc.call(peer, WEIGHTS, WeightsQuery(run_id, samples, push), Newest, timeout=TIMEOUT)
    except CallError as error:
        log.debug("%s does not tell of weights: %s", peer, error)
        return None
    return newest if newest.trains else None


Told = Callable[[PeerId, bytes, bytes], Awaitable[None]]


def serve_fresh(rpc: Rpc, *, run_id: str, told: Told) -> None:
    """Be told of new weights: `told(peer, payload, signature)`, which may be anything."""

    async def on_fresh(peer: PeerId, fresh: Fresh) -> Thanks:
        if fresh.run_id != run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        await told(peer, fresh.payload, fresh.signature)
        return Thanks()

    rpc.serve(FRESH, Fresh, on_fresh)
