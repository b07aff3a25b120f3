"""Catch-up: the whole shared state of a round, fetched as shards from several members at once, and from other joiners.

A node offers the states of its last rounds. Whoever needs one asks members for a manifest (round, state hash, shards),
takes the state that is asked for, or the one that most of them stand on, and fetches its shards into memory
(`shard_fetch`) from all members who gave the same manifest. Parameters and momentum are shards of their own, of at most
`shard_manifest.MAX_SIZE` each; a momentum of zeros need not travel. At the end the state hash is recomputed: no head
count replaces it.

Every source names others who asked for the shard of late, each joiner serves what it has verified, and takes from
members first what no other joiner has. Whoever serves states serves a bounded number of answers at a time, joiner by
joiner (`limits.FairScheduler`), and few of them while its own exchange of a round is under way (`eased`).

Message: `catchup.state`: StateQuery -> StateManifest; refused where the state is not here whole.

Who may fail when, and what is then true: a source that dies, lies or stops serving costs its chunks another try,
nothing else; when no member answers any more, the attempt ends. An attempt that ended early is taken up again when the
same state is asked for, as long as the process lives: in the next one the swarm stands on another state, of which no
chunk is the same, and members serve a state for STATES_KEPT rounds only. A manifest whose shards do not make up the
state costs one fetch of them and is not used again.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import inf
from time import time as wall_clock  # seconds since 1970

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.methods.context import NOBODY, Context, Observer
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import PeerGoneSilent
from swarmnode.protocols.transfer.shard_manifest import HASH, MAX_SIZE, ShardManifest
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.training import mapped
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.options import number_of
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

STATES_KEPT = 4  # rounds that a node serves: late comers and this round's missers find theirs
MANIFEST_TIMEOUT = 5.0  # seconds
SLOW, SLOWEST = 30.0, 1e6  # seconds, and bytes a second, for a state where another may be had: twice as long each time
REST = 1.0  # seconds for the others, once half of them answered: a state is gone some rounds later


@dataclass(frozen=True)
class StateQuery:
    """`catchup.state`: asks for a manifest."""

    run_id: str
    state_hash: str | None  # None: the newest state


@dataclass(frozen=True)
class StateManifest:
    run_id: str
    round: int  # rounds that are in this state
    state_hash: str
    layout: str  # digest of the layout table
    shards: tuple[bytes, ...]  # ids of the parts of the parameters, then of those of the momentum


def most_rounds() -> int:
    """No run has done a round in each tenth of a second since 1970; what is counted on from more fits no message."""
    return int(10 * wall_clock())


class CatchUpFailed(Exception):
    """No complete state could be fetched now; trying again later may help."""


@dataclass
class _Served:
    """A state that is here whole."""

    round: int
    state: OuterState
    manifest: StateManifest | None = None  # None: nobody has asked for it yet


@dataclass(frozen=True)
class _Attempt:
    """A state that is on its way here, or was."""

    manifest: StateManifest
    vector: NDArray[np.float32]  # parameters ‖ momentum, little-endian; zeros where nothing came
    parts: tuple[memoryview, ...]  # of its bytes, one for each shard


class CatchUp:
    def __init__(self, parts: Context) -> None:
        self._run_id, self._rpc, self._shards = parts.run_id, parts.rpc, parts.shards
        self._liveness, self._runner, self._layout = parts.liveness, parts.runner, parts.trainer.layout
        self._served: OrderedDict[str, _Served] = OrderedDict()
        self._unfinished: _Attempt | None = None
        self._fetching = trio.Lock()
        self._hashing = trio.Lock()
        parts.rpc.serve("catchup.state", StateQuery, self._on_query)

    # --- serving ----------------------------------------------------------------------------------------------------

    def serve_state(self, round: int, hash: str, state: OuterState) -> None:
        """Offer the state after `round` rounds; the oldest of more than STATES_KEPT is withdrawn."""
        if hash not in self._served:
            self._keep(hash, _Served(round, state))

    def _keep(self, hash: str, served: _Served) -> None:
        self._served[hash] = served
        while len(self._served) > STATES_KEPT:
            self.withdraw(next(iter(self._served)))

    def withdraw(self, hash: str) -> None:
        served = self._served.pop(hash, None)
        if served is not None and served.manifest is not None:
            self._drop(served.manifest)

    def _drop(self, manifest: StateManifest) -> None:
        """Let go of the shards that are in no other state that is served: an unused momentum is in all of them."""
        others = {shard for other in self._served.values() if other.manifest for shard in other.manifest.shards}
        if self._unfinished is not None:
            others.update(self._unfinished.manifest.shards)
        for shard in set(manifest.shards) - others:
            self._shards.memory.drop(shard)

    def eased(self) -> AbstractContextManager[None]:
        """While in the block this node has something to exchange itself: it serves little, for some seconds."""
        return self._shards.server.turns.eased()

    async def _on_query(self, peer: PeerId, query: StateQuery) -> StateManifest:
        if query.run_id != self._run_id or not self._served:
            raise Refuse("unknown-run", "this node has no state of that run")
        wanted = query.state_hash or next(reversed(self._served))
        served = self._served.get(wanted)
        if served is None:
            raise Refuse("unknown-state", f"this node no longer has state {wanted[:12]}")
        async with self._hashing:  # once, however many ask at the same time
            if served.manifest is None:
                parts = [*_parts(served.state.parameters), *_parts(served.state.momentum)]
                hashed = await self._runner(lambda: [(ShardManifest.of(part), part) for part in parts])
                shards = tuple(manifest.id for manifest, _ in hashed)
                served.manifest = StateManifest(self._run_id, served.round, wanted, self._layout.digest, shards)
                if wanted in self._served:  # it was not withdrawn meanwhile
                    for manifest, part in hashed:
                        self._shards.memory.offer(manifest, part)
        return served.manifest

    # --- fetching ---------------------------------------------------------------------------------------------------

    async def fetch(
        self, peers: Iterable[PeerId], *, state_hash: str | None = None, observer: Observer = NOBODY
    ) -> tuple[int, str, OuterState]:
        """Fetch a state from `peers`: the one with this hash, or the one that most of them stand on.

        `observer` is told of the progress. Returns (rounds, state hash, state). Raises CatchUpFailed.
        """
        asked, failed, none = list(peers), dict[StateManifest, str](), "no member answered"
        for rest in (REST, inf):  # who lies hashes no state first: where such answers were all, the others have longer
            if not (manifests := await self._ask_manifests(asked, state_hash, rest)):
                break
            none, asked = "no member that answered has the state", [peer for peer in asked if peer not in manifests]
            usable = {p: m for p, m in manifests.items() if self._fits(m, state_hash) and m not in failed}
            votes, within = Counter(usable.values()), SLOW + 8 * self._layout.parameters / SLOWEST
            choices = deque(sorted(votes, key=lambda m: (votes[m], m.round, m.state_hash), reverse=True))
            while choices:  # a manifest that lies must not stand in the way of one that does not, however slowly
                chosen = choices.popleft()
                members = [peer for peer, manifest in usable.items() if manifest == chosen]
                try:
                    async with self._fetching:
                        with trio.move_on_after(within if choices else inf):
                            return await self._fetch_by(chosen, members, observer)
                except CatchUpFailed as error:
                    failed[chosen] = str(error)
                else:
                    choices.append(chosen)
                    within *= 2
        raise CatchUpFailed("; ".join(failed.values()) or none)

    async def _fetch_by(
        self, manifest: StateManifest, members: list[PeerId], observer: Observer
    ) -> tuple[int, str, OuterState]:
        attempt = self._take_up(manifest)
        vector = attempt.vector
        text = "fetching the state of round %d: %.1f MB from %s"
        logger.info(text, manifest.round, vector.nbytes / 1e6, number_of(len(members), "member"))
        done = 0  # bytes of the parts before the one that is fetched

        def report(here: int, _size: int) -> None:
            observer.progress(done + here, vector.nbytes)

        failure: ShardError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, members, nursery.cancel_scope)
            try:
                for shard, part in zip(manifest.shards, attempt.parts, strict=True):
                    await self._shards.fetch(shard, providers=members, progress=report)
                    content = self._shards.memory.content(shard)
                    if len(content) != len(part):
                        raise ShardError("its manifest names one shard for parts of unlike length")
                    if content is not part:  # another part, or a state that is served here, has the same bytes
                        part[:] = content
                    done += len(part)
                    report(0, 0)
            except ShardError as error:  # as it is, in no group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None or done < vector.nbytes:
            why = failure or "no member answers any more; what came is kept"
            raise CatchUpFailed(f"the state could not be fetched: {why}") from failure
        try:
            state = await self._runner(lambda: self._restore(manifest, vector))
        except CatchUpFailed:
            self._give_up()
            raise
        served = self._served.get(manifest.state_hash)
        if served is None or served.manifest is None:  # its shards are on offer, from the memory of the state
            self._keep(manifest.state_hash, _Served(manifest.round, state, manifest))
        self._unfinished = None
        return manifest.round, manifest.state_hash, state

    async def _until_gone(self, members: list[PeerId], scope: trio.CancelScope) -> None:
        """Cancel `scope` when the last of `members` is silent."""

        async def watch(peer: PeerId) -> None:
            with suppress(PeerGoneSilent):
                await self._liveness.unless_gone(peer, trio.sleep_forever)

        async with trio.open_nursery() as nursery:
            for peer in members:
                nursery.start_soon(watch, peer)
        scope.cancel()

    def _take_up(self, manifest: StateManifest) -> _Attempt:
        """The attempt at this state that ended early, or a new one; memory for one state at a time."""
        if self._unfinished is None or self._unfinished.manifest != manifest:
            self._give_up()
            half = self._layout.parameters
            vector = mapped.zeros(2 * half).view("<f4")
            parts = (*_parts(vector[:half]), *_parts(vector[half:]))
            self._unfinished = _Attempt(manifest, vector, parts)
            for shard, part in zip(manifest.shards, parts, strict=True):
                self._shards.memory.expect(shard, part)
        return self._unfinished

    def _give_up(self) -> None:
        if self._unfinished is not None:
            manifest, self._unfinished = self._unfinished.manifest, None
            self._drop(manifest)

    async def _ask_manifests(self, peers: list[PeerId], wanted: str | None, rest: float) -> dict[PeerId, StateManifest]:
        query, ask = StateQuery(self._run_id, wanted), self._rpc.call_all
        answers = await ask(peers, "catchup.state", query, StateManifest, timeout=MANIFEST_TIMEOUT, rest=rest)
        for peer, _ in answers:
            self._liveness.heard_from(peer)
        return dict(answers)

    def _fits(self, manifest: StateManifest, wanted: str | None) -> bool:
        return (
            manifest.run_id == self._run_id
            and wanted in (None, manifest.state_hash)
            and 0 <= manifest.round <= most_rounds()
            and manifest.layout == self._layout.digest
            and len(manifest.shards) == 2 * -(-4 * self._layout.parameters // MAX_SIZE)
            and all(len(shard) == HASH for shard in manifest.shards)
        )

    def _restore(self, manifest: StateManifest, vector: NDArray[np.float32]) -> OuterState:
        vector = vector.astype(np.float32, copy=False)  # in this machine's byte order
        vector.flags.writeable = False
        half = self._layout.parameters
        state = OuterState(vector[:half], vector[half:])
        computed = state_hash(manifest.round, self._layout, state)
        if computed != manifest.state_hash:
            raise CatchUpFailed(f"the state fetched hashes to {computed[:12]}, not to {manifest.state_hash[:12]}")
        if not is_finite(vector):
            raise CatchUpFailed("the state fetched contains NaN or infinity")
        return state


def _parts(vector: NDArray[np.float32]) -> list[memoryview]:
    """The bytes of a vector, little-endian, in parts that a shard can have."""
    whole = np.ascontiguousarray(vector, "<f4").data.cast("B")
    return [whole[start : start + MAX_SIZE] for start in range(0, len(whole), MAX_SIZE)]
