"""Weights of a policy that one node trains and others sample with: their name, their shards, and who puts them out.

    rollouts.weights   sampler → trainer: what is newest, and what came of my groups?         Newest

Weights (SHARDCAST, INTELLECT-2 2505.07291) are one shard: bf16, little-endian, in the layout's order. Between versions
that differ little there is a patch beside it, a shard as well (`training.rl.patches`; PULSE, 2602.03839), so that who
has an older version fetches what changed since. What names them is signed by the trainer and has a counter that only
grows, the number of updates, and the hash of all bytes. Samplers fetch shards from the trainer and from one another,
and check the hash of what they put together; where a patch is lost or wrong, they fetch all bytes. A trainer broadcasts
while somebody asks, once a round; nobody else pays for it. Who may fail when, and what is then true: a trainer that is
silent or gone leaves its samplers without new weights, and they stop when those they have are too old to be of use; a
sampler that dies costs what was on its way; one that asks too often is refused as "busy".
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import trio

from swarmnode.crdt.envelope import Domain, Envelope, InvalidEnvelope, Verify
from swarmnode.crdt.record import MAX_AUTHOR
from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.limits import Allowance, Budget, Recent
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.rollouts.messages import MAX_COUNTER, Digest
from swarmnode.protocols.methods.rollouts.samplers import Samplers, SamplerTally
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner, surely
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.protocols.wire import Message, WireError, decode, plain, within
from swarmnode.training.codecs.floats import from_bf16
from swarmnode.training.rl.patches import BadPatch, Words, applied, between

log = logging.getLogger(__name__)

WEIGHTS = "rollouts.weights"
MAX_PATCHES = 8  # versions over which patches lead to the newest
WORTH_IT = 0.5  # of the bytes of all weights: a patch of more is not put out
MAX_SIGNED = 2048  # bytes of Weights
MAX_SHAPE = 264  # characters: hf-full: and the longest name of a model
MAX_REASONS = 64  # that a trainer gives a sampler, and characters of each
OFFERS = Domain("weights", 3, MAX_SIGNED)  # what trainers sign; 2 had float32, and no patches
ASKED_WITHIN = 30.0  # seconds after its last question for which a node counts as one that samples
MAX_SAMPLERS = 256  # that are counted, who asked last
QUERIES = Allowance(rate=4.0, burst=32)  # of one peer


class NoWeights(Exception):
    """What came are not the weights that the trainer signed. The message says why."""


@dataclass(frozen=True)
class Patch(Message):
    """What makes one version of another."""

    base: Digest  # sha-256 of the version before
    shard: Digest


@dataclass(frozen=True)
class Weights(Message):
    """What a trainer signs: one version of its policy."""

    trainer: Annotated[str, within(1, MAX_AUTHOR)]
    counter: Annotated[int, within(0, MAX_COUNTER)]  # grows with each version of this trainer's, over its restarts too
    version: Annotated[int, within(0, MAX_COUNTER)]  # updates that the policy has seen
    policy: Annotated[str, within(64, 64)]  # sha-256 of all bytes, hex
    shape: Annotated[str, within(0, MAX_SHAPE)]  # of the policy, such as gpt:2x48: who samples has one of the same
    shard: Digest
    size: Annotated[int, within(1, 1 << 40)]  # bytes
    patches: Annotated[tuple[Patch, ...], within(0, MAX_PATCHES)] = ()  # each from the version before; the last is this

    @property
    def shards(self) -> set[bytes]:
        return {self.shard, *(patch.shard for patch in self.patches)}

    def since(self, policy: str) -> tuple[Patch, ...]:
        """What leads here from those weights; empty where nothing does."""
        bases = [patch.base.hex() for patch in self.patches]
        return self.patches[bases.index(policy) :] if policy in bases else ()


@dataclass(frozen=True)
class WeightsQuery:
    run_id: str
    samples: bool = False  # I sample for you


def check_tally(what: str, tally: SamplerTally) -> None:
    """Raise WireError for words that nobody could show: the sampler keeps them with each of its rounds."""
    if len(tally.refused) > MAX_REASONS or any(len(word) > MAX_REASONS for word in (*tally.refused, tally.caught)):
        raise WireError(f"{what} has {len(tally.refused)} reasons, at most {MAX_REASONS} short ones are allowed")


@dataclass(frozen=True)
class Newest(Message):
    """The newest weights of a peer that trains a policy, where they are out, and how the asker stands with it."""

    shape: Annotated[str, within(0, MAX_SHAPE)] = ""  # of the policy, such as gpt:2x48
    payload: bytes = b""  # of Weights; empty where none are out yet: ask again
    signature: bytes = b""
    samplers: int = 0  # others that sample for it
    tally: Annotated[SamplerTally, check_tally] = field(default_factory=SamplerTally)  # of the asker's groups


def hash_of(words: Words) -> str:
    """sha-256 of a policy's words (P,) in hex, little-endian."""
    return hashlib.sha256(words.astype("<u2", copy=False).data).hexdigest()


def open_weights(envelope: Envelope, *, run_id: str, trainer: PeerId, verify: Verify) -> Weights:
    """What `trainer` signed for this run. Raises NoWeights."""
    try:
        weights = decode(Weights, envelope.payload, limit=MAX_SIGNED)
        OFFERS.open(envelope, trainer, verify, run_id)
    except (InvalidEnvelope, WireError) as error:
        raise NoWeights(f"weights of {trainer} are refused: {error}") from error
    if weights.trainer != trainer:
        raise NoWeights(f"{trainer} names weights that are not its own")
    return weights


class WeightsFetch:
    """A sampler's side: the weights that it had last, and newer ones by the shortest way."""

    def __init__(self, shards: Shards, runner: Runner) -> None:
        self._shards, self._runner = shards, runner
        self._held: tuple[Weights, Words] | None = None
        self.patched = 0  # versions that came as patches

    async def fetch(self, weights: Weights) -> Vector:
        """The parameters (P,), from the trainer and whoever else has them. Raises ShardError or NoWeights."""
        held = self._held
        way = weights.since(held[0].policy) if held is not None else ()
        try:
            found = await self._patched(held[1], way, weights) if held is not None and way else await self._all(weights)
        except (ShardError, NoWeights, BadPatch) as error:
            if not way:
                raise
            log.info("version %d is fetched as a whole, since patches lead nowhere: %s", weights.version, error)
            found = await self._all(weights)
        words, parameters = found
        self._held = weights, words
        for shard in (held[0].shards if held is not None else set()) - weights.shards:
            await self._shards.drop(shard)
        return parameters

    async def _patched(self, words: Words, way: Sequence[Patch], weights: Weights) -> tuple[Words, Vector]:
        raw = [await self._content(patch.shard, weights, range(1, weights.size)) for patch in way]
        after = await self._runner(lambda: _checked(functools.reduce(applied, raw, words), weights))
        self.patched += 1
        return after

    async def _all(self, weights: Weights) -> tuple[Words, Vector]:
        content = await self._content(weights.shard, weights, range(weights.size, weights.size + 1))
        return await self._runner(lambda: _checked(np.frombuffer(content, "<u2"), weights))

    async def _content(self, shard: bytes, weights: Weights, sizes: range) -> bytes:
        await self._shards.fetch(shard, providers=[weights.trainer], sizes=sizes, announce=False)
        return await self._shards.content(shard)


def _checked(words: Words, weights: Weights) -> tuple[Words, Vector]:
    """These words, and the parameters that they are, if they are those that were signed. Raises NoWeights."""
    if hash_of(words) != weights.policy:
        raise NoWeights(f"the weights that {weights.trainer} signed do not have their hash")
    parameters = from_bf16(words)
    if not np.isfinite(parameters).all():
        raise NoWeights(f"the weights of {weights.trainer} are not all numbers")
    return words, parameters


class WeightsBroadcast:
    """A trainer's side: puts out the newest weights while somebody asks for them."""

    def __init__(self, parts: Context, samplers: Samplers) -> None:
        self._parts, self._shards, self._samplers = parts, parts.shards, samplers
        self._shape = parts.policy or parts.spec.rollouts.policy
        self.violations = Violations("weights")
        self._newest: tuple[Weights, Envelope] | None = None
        self._words: Words | None = None  # of the newest
        self._patches: deque[Patch] = deque(maxlen=MAX_PATCHES)
        self._out: deque[set[bytes]] = deque(maxlen=parts.spec.rollouts.staleness + 1)  # shards of each version
        self._counter = 0
        self._asked = Recent[PeerId, float](MAX_SAMPLERS)  # trio time of the last question
        self._queries = Budget[PeerId](QUERIES)
        parts.rpc.serve(WEIGHTS, WeightsQuery, self._on_query)

    @property
    def newest(self) -> Weights | None:
        return self._newest[0] if self._newest is not None else None

    async def publish(self, words: Words, *, version: int, policy: str) -> None:
        """Put out these words (P,), whose `hash_of` is `policy`. Raises ShardError where there is no room."""
        newest = self.newest
        if newest is not None and newest.policy == policy:  # an update that changed nothing
            shard = newest.shard
        else:
            shard = await self._shards.put(words.astype("<u2", copy=False).view(np.uint8).data, announce=False)
            try:
                await self._put_patch(words)
            except BaseException:
                if not any(shard in out for out in self._out):
                    await surely(self._shards.drop(shard))
                raise
            self._words = words
        self._counter = max(self._counter + 1, self._parts.now())
        size, patches = words.nbytes, tuple(self._patches)
        weights = Weights(self._parts.me, self._counter, version, policy, self._shape, shard, size, patches)
        self._newest = weights, OFFERS.seal(plain(weights), self._parts.network.sign, self._parts.run_id)
        self._samplers.know(policy, version)
        late = self._out[0] if len(self._out) == self._out.maxlen else set()
        self._out.append(weights.shards)
        for gone in late.difference(*self._out):
            await self._shards.drop(gone)

    async def _put_patch(self, words: Words) -> None:
        """Put out what makes these words of those before, if it is worth it. Raises ShardError."""
        newest, before, patch = self.newest, self._words, b""
        if newest is not None and before is not None:
            patch = await self._parts.runner(lambda: between(before, words))
        if newest is not None and 0 < len(patch) < WORTH_IT * words.nbytes:
            shard = await self._shards.put(memoryview(patch), announce=False)
            self._patches.append(Patch(bytes.fromhex(newest.policy), shard))
        else:
            self._patches.clear()

    def askers(self) -> list[PeerId]:
        """Who samples for this node."""
        now = trio.current_time()
        return [peer for peer, at in self._asked.items() if now - at <= ASKED_WITHIN]

    async def _on_query(self, peer: PeerId, query: WeightsQuery) -> Newest:
        admit(self._parts, peer, query.run_id)
        if not self._queries.take(peer, 1):
            self.violations.note(peer, "asks too often for weights", Kind.LOAD)
            raise Refuse("busy", f"at most {QUERIES.rate:g} questions for weights a second")
        self._asked.pop(peer, None)
        if query.samples:
            self._asked[peer] = trio.current_time()
        payload, signature = self._newest[1] if self._newest is not None else (b"", b"")
        samplers = sum(asker != peer for asker in self.askers())
        return Newest(self._shape, payload, signature, samplers, self._samplers.tally(peer))
