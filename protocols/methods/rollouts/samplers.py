"""Those who only sample for a policy that one node trains: its weights on the wire, and what it holds of their groups.

    rollouts.weights   sampler → trainer: what is newest, and what came of my groups?         Newest

Where the run says "push", the trainer answers as soon as there are newer weights than those that the sampler names.

**Weights** (SHARDCAST, INTELLECT-2 2505.07291) are one shard: float32, little-endian, in the layout's order. What names
it is signed by the trainer and has a counter that only grows, the number of updates, and the hash of all bytes.
Samplers fetch it from the trainer and from one another, and check the hash of what they put together. A trainer
broadcasts while somebody asks, once a round; nobody else pays for it. Who may fail when, and what is then true: a
trainer that is silent or gone leaves its samplers without new weights, and they stop when those they have are too old
to be of use; a sampler that dies costs what was on its way; one that asks too often is refused as "busy".

**Groups** are checked by the trainer:

    samplers.know(policy_hash, version)              # weights that are out; older ones than `staleness` are forgotten
    samplers.insert(signed)                          # "" where it is kept, else the word for why not
    groups = samplers.drawn(32, version=14)          # the newest versions first, authors take turns
    samplers.settle(groups, caught={"12D3…": "other-activations"})

A group counts only if it answers the question that follows from its author, its counter and the weights
(`training.rl.tasks.assigned_task`): so nobody picks questions. Nor does anybody by leaving out groups: counters grow by
one, and of those that are missing SKIPS are borne, to which each group that comes adds a quarter. Whether the weights
wrote it, the trainer process audits a share of the groups for; who is caught lying has no standing from then on, and
all that he sent is dropped. Standing is this process's: it ends with it.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.crdt.envelope import Domain, Envelope, InvalidEnvelope, Sign, Verify
from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.limits import Allowance, Budget, Recent
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.rollouts.messages import MAX_AUTHOR, MAX_COUNTER, TIMEOUT, SignedGroup
from swarmnode.protocols.methods.rollouts.sharing import admit
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.protocols.wire import WireError, decode, plain
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.rl.tasks import assigned_task, tasks_of_run

log = logging.getLogger(__name__)

SKIPS = 64.0  # counters of an author that may be missing: eight batches that were lost
REFUND = 0.25  # of a skip, for each group that comes
MOST = 128  # groups of one author that wait to be learned from; the oldest are let go
WAITING_BYTES = 4 << 20  # of all authors' groups that wait; who has most lets go of his oldest
AUTHORS = 256  # that are remembered; the one silent longest is forgotten first, liars last
LIES = ("cherry-picked", "other-version")  # what nobody sends by mistake
WEIGHTS = "rollouts.weights"
MAX_SIGNED = 1024  # bytes of Weights
OFFERS = Domain("weights", 2, MAX_SIGNED)  # what trainers sign; 1 was not canonical
ASKED_WITHIN = 30.0  # seconds after its last question for which a node counts as one that samples
HELD_FOR = 5.0  # seconds for which a question waits for newer weights
MAX_SAMPLERS = 256  # that are counted, who asked last
QUERIES = Allowance(rate=4.0, burst=32)  # of one peer


@dataclass
class SamplerTally:
    """What came of one author."""

    sampler: PeerId = ""
    version: int = 0  # the newest that a group of his was written with
    expected: int = -1  # counter of the next group; -1 where none came
    came: int = 0
    accepted: int = 0
    proved: int = 0  # of these, groups that an audit looked at and found true
    refused: dict[str, int] = field(default_factory=dict)
    caught: str = ""  # the lie, where there was one

    def refuse(self, reason: str, count: int = 1) -> None:
        if count:
            self.refused[reason] = self.refused.get(reason, 0) + count


@dataclass
class _Author:
    tally: SamplerTally
    waiting: list[SignedGroup] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)  # counters above the expected one - SKIPS
    skips: float = SKIPS

    @property
    def size(self) -> int:
        return sum(group.size for group in self.waiting)

    def let_go(self) -> None:
        """Of the oldest group that waits."""
        del self.waiting[0]
        self.tally.refuse("full")

    def condemn(self, reason: str) -> None:
        self.tally.caught = self.tally.caught or reason
        self.tally.refuse("no-standing", len(self.waiting))
        self.waiting = []

    def count(self, counter: int) -> str:
        """Note a group's counter; or why it does not count: counter (again, or long ago), skips."""
        tally = self.tally
        missing = counter - tally.expected
        if tally.expected < 0:
            tally.expected = counter + 1
        elif missing >= 0:
            if missing > self.skips:
                return "skips"
            tally.expected, self.skips = counter + 1, self.skips - missing
        elif counter in self.seen or counter < tally.expected - SKIPS:
            return "counter"
        else:  # it was late only
            self.skips += 1
        self.skips = min(SKIPS, self.skips + REFUND)
        self.seen = {each for each in self.seen if each >= tally.expected - SKIPS} | {counter}
        return ""


class Samplers:
    """Bounded; nothing here blocks or waits."""

    def __init__(self, me: PeerId, *, run_id: str, settings: RolloutsSection) -> None:
        """`settings`: of the run, which say what is asked, and how many updates weights may be behind."""
        self._me, self._run_id, self._settings = me, run_id, settings
        self._tasks = tasks_of_run(settings)
        self._versions = Recent[str, range](settings.staleness + 1)  # of weights that are out, by hash: an update may
        # change nothing, so that one hash has several
        self._authors: OrderedDict[PeerId, _Author] = OrderedDict()  # the one heard last at the end

    # -- what comes

    def know(self, policy: str, version: int) -> None:
        """These weights are out: groups that they write may come."""
        known = self._versions.get(policy)
        follows = known is not None and known.stop == version
        self._versions[policy] = range(known.start if known is not None and follows else version, version + 1)

    def insert(self, group: SignedGroup) -> str:
        """Keep a group; or why not: for-another, no-standing, stale, …; noted with its author."""
        author = self._author(group.author)
        tally = author.tally
        tally.came += 1
        reason = self._unfit(group, tally) or author.count(group.packed.counter)
        if reason:
            tally.refuse(reason)
            if reason in LIES:
                author.condemn(reason)
            return reason
        tally.version = max(tally.version, group.version)
        author.waiting.append(group)
        while len(author.waiting) > MOST:
            author.let_go()
        while sum(each.size for each in self._authors.values()) > WAITING_BYTES:
            max(self._authors.values(), key=lambda each: each.size).let_go()
        return ""

    def _unfit(self, signed: SignedGroup, tally: SamplerTally) -> str:
        group = signed.group
        if signed.packed.trainer != self._me:
            return "for-another"
        if tally.caught:
            return "no-standing"
        if group.policy not in self._versions:
            return "stale" if group.version <= self._oldest() else "unknown-weights"
        if group.version not in self._versions[group.policy]:
            return "other-version"
        if group.task != assigned_task(
            self._run_id,
            signed.author,
            signed.packed.counter,
            version=group.version,
            policy=group.policy,
            tasks=self._tasks,
        ):
            return "cherry-picked"
        if len(group.answers) != self._settings.answers:
            return "other-size"
        if group.logprobs is None:
            return "no-logprobs"
        return "" if group.proof else "no-proof"

    def _oldest(self) -> int:
        return min((versions.start for versions in self._versions.values()), default=-1)

    # -- what is learned from

    def drawn(self, most: int, *, version: int) -> tuple[SignedGroup, ...]:
        """Take up to `most` groups, at most `staleness` updates behind `version`; those further behind are let go."""
        decks: list[list[SignedGroup]] = []
        for author in self._authors.values():
            fresh = [group for group in author.waiting if self._is_fresh(group, version)]
            author.tally.refuse("stale", len(author.waiting) - len(fresh))
            author.waiting = sorted(fresh, key=lambda group: group.version)
            decks.append(author.waiting)
        chosen: list[SignedGroup] = []
        while len(chosen) < most and any(decks):
            for deck in [deck for deck in decks if deck][: most - len(chosen)]:
                chosen.append(deck.pop())
        return tuple(chosen)

    def _is_fresh(self, group: SignedGroup, version: int) -> bool:
        versions = self._versions.get(group.packed.policy)
        return versions is not None and 0 <= version - versions[-1] <= self._settings.staleness

    def settle(
        self,
        groups: Sequence[SignedGroup],
        *,
        caught: Mapping[PeerId, str],
        checked: Mapping[PeerId, int] | None = None,
    ) -> None:
        """These were given to the trainer, and it caught those authors lying; `checked`: it looked at so many."""
        for peer, reason in caught.items():
            author = self._author(peer)
            author.tally.refuse(reason, sum(group.author == peer for group in groups))
            author.condemn(reason)
        for group in groups:
            if group.author not in caught:
                self._author(group.author).tally.accepted += 1
        for peer, count in (checked or {}).items():
            if peer not in caught:
                self._author(peer).tally.proved += count

    # -- looking

    def standing(self, peer: PeerId) -> float:
        """1, or 0 for who was caught lying: the pool's seam."""
        return 0.0 if self.tally(peer).caught else 1.0

    def proved(self, peer: PeerId) -> bool:
        """Whether groups of his passed audits, and none was a lie."""
        tally = self.tally(peer)
        return tally.accepted > 0 and not tally.caught

    def tally(self, peer: PeerId) -> SamplerTally:
        """How one author stands."""
        author = self._authors.get(peer)
        return author.tally if author is not None else SamplerTally(peer)

    def tallies(self) -> tuple[SamplerTally, ...]:
        """Everybody who is remembered, who gave most first."""
        return tuple(sorted(map(self.tally, self._authors), key=lambda tally: (-tally.accepted, tally.sampler)))

    def _author(self, peer: PeerId) -> _Author:
        author = self._authors.setdefault(peer, _Author(SamplerTally(peer)))
        self._authors.move_to_end(peer)
        if len(self._authors) > AUTHORS:
            del self._authors[next((old for old, each in self._authors.items() if not each.tally.caught), peer)]
        return author


# -- weights

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
    after: int = -1  # counter of weights that I know: answer when there are newer ones, or after HELD_FOR


@dataclass(frozen=True)
class Newest:
    """The newest weights of a peer that trains a policy, where they are out, and how the asker stands with it."""

    shape: str = ""  # of the policy, such as gpt:2x48
    payload: bytes = b""  # of Weights; empty where none are out yet: ask again
    signature: bytes = b""
    samplers: int = 0  # others that sample for it
    tally: SamplerTally = field(default_factory=SamplerTally)  # of the asker's groups


def hash_of(parameters: Vector) -> str:
    """sha-256 of a policy's parameters (P,) in hex, little-endian."""
    return hashlib.sha256(parameters.astype("<f4").tobytes()).hexdigest()


def seal_weights(weights: Weights, *, run_id: str, sign: Sign) -> Envelope:
    """What travels of weights of this node's own."""
    return OFFERS.seal(plain(weights), sign, run_id)


def open_weights(envelope: Envelope, *, run_id: str, trainer: PeerId, verify: Verify) -> Weights:
    """What `trainer` signed for this run. Raises NoWeights."""
    try:
        weights = decode(Weights, envelope.payload, limit=MAX_SIGNED)
    except WireError as error:
        raise NoWeights(f"{trainer} names no weights: {error}") from error
    if weights.trainer != trainer:
        raise NoWeights(f"{trainer} names weights that are not its own")
    try:
        OFFERS.open(envelope, trainer, verify, run_id)
    except InvalidEnvelope as error:
        raise NoWeights(f"weights of {trainer} are refused: {error}") from error
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


class WeightsBroadcast:
    """A trainer's side: puts out the newest weights while somebody asks for them."""

    def __init__(self, parts: Context, shards: Shards, samplers: Samplers) -> None:
        self._parts, self._shards, self._samplers = parts, shards, samplers
        self._shape = parts.policy or parts.spec.rollouts.policy
        self._kept = parts.spec.rollouts.staleness + 1  # versions whose shards stay for those who are late
        self.violations = Violations("weights")
        self._newest: tuple[Weights, Envelope] | None = None
        self._out: deque[bytes] = deque()  # shards that are here, the oldest first
        self._counter = 0
        self._asked = Recent[PeerId, float](MAX_SAMPLERS)  # trio time of the last question
        self._queries = Budget[PeerId](QUERIES)
        self._changed = trio.Event()  # newer weights are out
        parts.rpc.serve(WEIGHTS, WeightsQuery, self._on_query)

    @property
    def wanted(self) -> bool:
        """Whether somebody samples for this node."""
        return bool(self._askers())

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
        self._counter = max(self._counter + 1, self._parts.now())
        weights = Weights(self._parts.me, self._counter, version, policy, self._shape, shard, 4 * parameters.size)
        self._newest = (weights, seal_weights(weights, run_id=self._parts.run_id, sign=self._parts.sign))
        self._samplers.know(policy, version)
        while len(self._out) > self._kept:
            gone = self._out.popleft()
            if gone not in self._out:
                await self._shards.drop(gone)
        self._changed.set()
        self._changed = trio.Event()

    async def _put(self, parameters: Vector) -> bytes:
        """The shard that these parameters are now."""
        try:
            with tempfile.TemporaryDirectory(prefix="swarmnode-weights-") as folder:
                source = Path(folder) / "weights"
                await self._parts.runner(lambda: source.write_bytes(parameters.astype("<f4").tobytes()))
                return await self._shards.put(source, announce=False)
        except OSError as error:
            raise ShardError(f"the folder for temporary files takes no weights: {error}") from error

    def _askers(self) -> list[PeerId]:
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
        if query.after >= self._counter:
            with trio.move_on_after(HELD_FOR):
                await self._changed.wait()
        payload, signature = self._newest[1] if self._newest is not None else (b"", b"")
        samplers = sum(asker != peer for asker in self._askers())
        return Newest(self._shape, payload, signature, samplers, self._samplers.tally(peer))


async def ask(rpc: Rpc, peer: PeerId, query: WeightsQuery) -> Newest | None:
    """What a peer says of its weights; None where it does not answer, or trains nothing."""
    try:
        return await rpc.call(peer, WEIGHTS, query, Newest, timeout=TIMEOUT + (HELD_FOR if query.after >= 0 else 0))
    except CallError as error:
        log.debug("%s does not tell of weights: %s", peer, error)
        return None
